"""Tables of what is in a bundle, and of what is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from fusedattn.bundle_format import Manifest
from fusedattn.runs.compile import Unplanned

_FEW = 3


def bundle_tables(manifest: Manifest) -> Iterator[Table]:
    """The plans of a bundle.

    Args:
        manifest: Of the bundle.

    Yields:
        A table for each GPU; GPUs that share their plans share a table. Sums are in its caption.

    Raises:
        Nothing.
    """
    names: dict[str, list[str]] = {}
    for target in manifest.targets:
        names.setdefault(target.fingerprint, []).append(target.name)
    for fingerprint, sharing in names.items():
        plans = [plan for plan in manifest.plans if plan.fingerprint == fingerprint]
        table = Table(
            title=f"{', '.join(sharing)} ({fingerprint})", title_justify="left", caption_justify="left", show_lines=True
        )
        # Below each other, since beside the rest no terminal has room for names of kernels.
        table.add_column("problem\nneeded by\nkernels", overflow="fold")
        for right in ("workspace\nMiB", "build\nms", "size\nKiB"):
            table.add_column(right, justify="right", no_wrap=True)
        for plan in plans:
            figures = (f"{plan.workspace_bytes / 2**20:.1f}", f"{plan.build_ms:.0f}", f"{plan.bytes / 1024:.0f}")
            lines = (f"{plan.direction} {plan.problem}", ", ".join(_few(plan.cases)), *plan.kernels)
            # Text: names may hold square brackets, which rich would read as markup.
            table.add_row(*map(Text, ("\n".join(lines), *figures)))
        seconds = sum(plan.build_ms for plan in plans) / 1e3
        table.caption = f"{len(plans)} plans, built in {seconds:.1f} s, {_mib(plan.bytes for plan in plans)}"
        yield table


def summary(manifest: Manifest) -> str:
    """The bundle in a line: how many plans, for what, built with what.

    Args:
        manifest: Of the bundle.

    Returns:
        The line.

    Raises:
        Nothing.
    """
    gpus = ", ".join(target.name for target in manifest.targets)
    size = _mib(plan.bytes for plan in manifest.plans)
    made = f"cuDNN {manifest.cudnn} for CUDA {manifest.cuda_major}, frontend {manifest.frontend}"
    return f"{len(manifest.plans)} plans for {gpus}, {size}; {made}, fusedattn {manifest.fusedattn}"


def unplanned_table(unplanned: Iterable[Unplanned]) -> Table:
    """The calls that have no plan, those with one reason together.

    Args:
        unplanned: The calls.

    Returns:
        The table; what the rules give to the torch engine first.

    Raises:
        Nothing.
    """
    groups: dict[tuple[bool, str, str], list[Unplanned]] = {}
    for call in unplanned:
        groups.setdefault((call.failed, call.direction, call.reason), []).append(call)
    table = Table(title="without a plan", title_justify="left")
    for name in ("case", "direction", "target", "what follows"):
        table.add_column(name, overflow="fold")
    for (failed, direction, reason), calls in sorted(groups.items(), key=lambda group: group[0][0]):
        cases, targets = (tuple(dict.fromkeys(getattr(call, name) for call in calls)) for name in ("case", "target"))
        style, word = ("red", "FAILED") if failed else ("", "torch engine")
        table.add_row(
            Text("\n".join(_few(cases))), Text(direction), Text(", ".join(targets)), Text(f"{word}: {reason}", style)
        )
    return table


def _few(names: tuple[str, ...]) -> list[str]:
    more = len(names) - _FEW
    return [*names[:_FEW], *([f"and {more} more"] if more > 0 else [])]


def _mib(sizes: Iterable[int]) -> str:
    return f"{sum(sizes) / 2**20:.1f} MiB"
