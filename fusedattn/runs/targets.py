"""The table of GPUs that plans can be built for."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from fusedattn.target import DeviceTarget


def targets_table(targets: Iterable[DeviceTarget]) -> Table:
    """Lay targets out as a table, one a row.

    Args:
        targets: The targets.

    Returns:
        The table; sizes are in KiB and GiB.

    Raises:
        Nothing.

    Example:
        >>> from fusedattn.target import TARGETS
        >>> targets_table(TARGETS.values()).row_count == len(TARGETS)
        True
    """
    table = Table()
    for left in ("name", "device"):
        table.add_column(left, overflow="fold")
    for right in ("compute capability", "SMs", "shared memory a block", "memory"):
        table.add_column(right, justify="right")
    for target in targets:
        cells = (
            target.name,
            target.device_name,
            "{}.{}".format(*target.compute_capability),
            str(target.multiprocessor_count),
            f"{target.shared_memory_per_block_optin_bytes // 1024} KiB",
            f"{target.memory_bytes / 1024**3:.0f} GiB",
        )
        # Text: a device's name may hold square brackets, which rich would read as markup.
        table.add_row(*map(Text, cells))
    return table
