"""The `fusedattn` command: `run`, `compile`, `inspect`, `schema`, `engines`, `targets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fusedattn.bundle_format import Bundle
from fusedattn.bundle_write import require_place, write_bundle
from fusedattn.errors import FusedAttnError, RunFileError
from fusedattn.rules import availability
from fusedattn.runs.bench import BenchRow, bench_case, bench_cases
from fusedattn.runs.bundle_tables import bundle_tables, summary, unplanned_table
from fusedattn.runs.compile import compile_run, parse_targets, require_engine
from fusedattn.runs.config import BenchRun, VerifyRun, json_schema
from fusedattn.runs.dispatch import DispatchRow, dispatch_rows
from fusedattn.runs.load import load_run
from fusedattn.runs.plan_builder import plan_builder, usable_cores
from fusedattn.runs.report import bench_table, dispatch_table, document, prepare_out, verify_table, write_json
from fusedattn.runs.targets import targets_table
from fusedattn.runs.verify import VerifyRow, verify_case, verify_cases
from fusedattn.target import TARGETS, DeviceTarget

_WIDTH = 160  # of a table that goes into a pipe or a file

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fused attention: verified and timed from a YAML file.",
)


@app.command()
def run(file: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)]) -> None:
    """Run a YAML file: `kind: verify` compares with a float64 reference, `kind: bench` times against torch,
    `kind: dispatch` times what the host does before a GPU has anything to do.

    Paths of inputs are relative to the file, `out` to the working directory.
    Exit status: 0 all is well, 1 a case failed, 2 the file is wrong.
    """
    try:
        config = load_run(file)
        out = prepare_out(file, config)
    except RunFileError as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from None
    console = _console()
    rows: list[VerifyRow] | list[BenchRow] | list[DispatchRow]
    if isinstance(config, VerifyRun):
        rows = list(_verify(config, file.parent))
        console.print(verify_table(rows, file.name))
    elif isinstance(config, BenchRun):
        rows = list(_bench(config, file.parent))
        console.print(bench_table(rows, file.name))
    else:
        rows = dispatch_rows(config, file.parent)
        console.print(dispatch_table(rows, file.name))
    write_json(out, document(config, rows))
    failed = sum(not row.ok for row in rows)
    console.print(
        f"{len(rows) - failed} of {len(rows)} comparisons ok, {failed} failed. Written to {out}", style="bold"
    )
    raise typer.Exit(1 if failed else 0)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _verify(config: VerifyRun, folder: Path) -> Iterator[VerifyRow]:
    cases = verify_cases(config)
    with _progress() as progress:
        task = progress.add_task("", total=len(cases))
        for path, case in cases:
            progress.update(task, description=case.name)
            yield from verify_case(case, config.engine, folder, path)
            progress.advance(task)


def _bench(config: BenchRun, folder: Path) -> Iterator[BenchRow]:
    cases = bench_cases(config)
    with _progress() as progress:
        task = progress.add_task("", total=len(cases))
        for path, case in cases:
            progress.update(task, description=case.name)
            yield from bench_case(case, config, folder, path)
            progress.advance(task)


@app.command("compile")
def compile_(
    file: Annotated[Path, typer.Argument(help="The YAML file of a run.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the bundle, which is made.", show_default=False)],
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU that `fusedattn targets` lists or describes in a .json file; again for each further one."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one a core.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
) -> None:
    """Build every cuDNN plan that the cases of a run need, here, without a GPU, and write them as a bundle.

    Exit status: 0 all is well, 1 a plan could not be built (the others are written), 2 the file, a target or the place
    is wrong.
    """
    try:
        targets = parse_targets(target or [])
        config = load_run(file)
        require_engine(file, config)
        require_place(out, force)
        with _progress() as progress, plan_builder(jobs or usable_cores()) as builder:
            task = progress.add_task("", total=None)
            compiled = compile_run(
                config, targets, file.parent, builder,
                lambda done, total, what: progress.update(task, completed=done, total=total, description=what),
            )  # fmt: skip
        if compiled.manifest is not None:
            write_bundle(out, compiled.manifest, compiled.blobs, force)
    except FusedAttnError as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from None
    console = _console()
    if compiled.unplanned:
        console.print(unplanned_table(compiled.unplanned))
    if compiled.manifest is None:
        console.print(f"No case of {file} has a plan; nothing is written.", style="bold", markup=False)
        raise typer.Exit(1)
    console.print(f"{summary(compiled.manifest)}. Written to {out}", style="bold", markup=False)
    raise typer.Exit(1 if any(call.failed for call in compiled.unplanned) else 0)


@app.command()
def inspect(folder: Annotated[Path, typer.Argument(help="Folder of the bundle.", show_default=False)]) -> None:
    """Print what is in a bundle, and see that it is whole.

    Exit status: 0 all is well, 2 there is no bundle, or it is damaged.
    """
    try:
        bundle = Bundle.open(folder)
        for plan in bundle.manifest.plans:
            bundle.blob(plan)
    except FusedAttnError as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from None
    console = _console()
    for table in bundle_tables(bundle.manifest):
        console.print(table)
    console.print(summary(bundle.manifest), style="bold", markup=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a run file, from which an editor completes it."""
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def engines() -> None:
    """Print which engines work here, and why the others do not."""
    for engine, reason in availability().items():
        typer.echo(f"{engine.word:6} {'works here' if reason is None else f'does not work here: {reason}'}")


@app.command()
def targets(
    save: Annotated[
        Path | None, typer.Option(help="Write this machine's own GPU into this .json file instead.", show_default=False)
    ] = None,
) -> None:
    """Print the GPUs that plans can be built for.

    Exit status: 0 all is well, 2 this machine has no GPU, or the file cannot be written.
    """
    if save is None:
        _console().print(targets_table(TARGETS.values()))
        return
    try:
        target = DeviceTarget.current()
        target.save(save)
    except FusedAttnError as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{target.name} ({target.fingerprint}) is written to {save}.")


def main() -> None:
    """The entry point of the `fusedattn` command."""
    app()
