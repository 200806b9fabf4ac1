"""The `fusedattn` command: `run`, `schema`, `engines`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fusedattn.errors import RunFileError
from fusedattn.rules import availability
from fusedattn.runs.bench import BenchRow, bench_case, bench_cases
from fusedattn.runs.config import BenchRun, VerifyRun, json_schema
from fusedattn.runs.load import load_run
from fusedattn.runs.report import bench_table, document, prepare_out, verify_table, write_json
from fusedattn.runs.verify import VerifyRow, verify_case, verify_cases

_WIDTH = 160  # of a table that goes into a pipe or a file

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fused attention: verified and timed from a YAML file.",
)


@app.command()
def run(file: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)]) -> None:
    """Run a YAML file: `kind: verify` compares with a float64 reference, `kind: bench` times against torch.

    Paths of inputs are relative to the file, `out` to the working directory.
    Exit status: 0 all is well, 1 a case failed, 2 the file is wrong.
    """
    try:
        config = load_run(file)
        out = prepare_out(file, config)
    except RunFileError as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    rows: list[VerifyRow] | list[BenchRow]
    if isinstance(config, VerifyRun):
        rows = list(_verify(config, file.parent))
        console.print(verify_table(rows, file.name))
    else:
        rows = list(_bench(config, file.parent))
        console.print(bench_table(rows, file.name))
    write_json(out, document(config, rows))
    failed = sum(not row.ok for row in rows)
    console.print(
        f"{len(rows) - failed} of {len(rows)} comparisons ok, {failed} failed. Written to {out}", style="bold"
    )
    raise typer.Exit(1 if failed else 0)


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


@app.command()
def schema() -> None:
    """Print the JSON Schema of a run file, from which an editor completes it."""
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def engines() -> None:
    """Print which engines work here, and why the others do not."""
    for engine, reason in availability().items():
        typer.echo(f"{engine.word:6} {'works here' if reason is None else f'does not work here: {reason}'}")


def main() -> None:
    """The entry point of the `fusedattn` command."""
    app()
