"""Command line: reads options and shows results; what a command does is in a module of its own."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from typer.core import TyperGroup

from nixl_fast import bench as benching
from nixl_fast import explain as explaining
from nixl_fast.demo import Report, ScenarioResult, run_demo
from nixl_fast.doctor import doctor
from nixl_fast.errors import NixlFastError
from nixl_fast.plan import Direction
from nixl_fast.scenarios import SCENARIOS, Scenario

_PIPE_WIDTH = 120
"""Columns of the table where there is no terminal to ask."""


class _Commands(TyperGroup):
    """Shows what the package refuses as one line and ends with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NixlFastError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("nixl-fast"))
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Checked KV-cache block pairing and transfer with NIXL."""


def _known(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise typer.BadParameter(f"unknown scenario {unknown[0]!r}; the scenarios are: {', '.join(SCENARIOS)}")
    return names


@app.command()
def demo(
    scenario: Annotated[
        list[str],
        typer.Option(
            "--scenario",
            metavar="NAME",
            callback=_known,
            default_factory=list,
            show_default="all",
            help=f"Run only this one; may be repeated. One of: {', '.join(SCENARIOS)}.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Moves requests between processes with real NIXL agents and checks every byte.

    Needs nixl (pip install nixl-fast[nixl]) and host memory only. Exit status: 0 if every byte was right, 1 if not or
    if something failed, 2 for a wrong option.
    """
    scenarios = [SCENARIOS[name] for name in dict.fromkeys(scenario)] or list(SCENARIOS.values())
    report = _run_with_progress(scenarios)
    if as_json:
        _print_json(report)
    else:
        _show(report)
    raise typer.Exit(0 if report.verified else 1)


def _example(name: str | None) -> str | None:
    if name is not None and name not in explaining.examples():
        raise typer.BadParameter(f"unknown example {name!r}; the examples are: {', '.join(explaining.examples())}")
    return name


@app.command()
def explain(
    local: Annotated[
        Path | None,
        typer.Argument(metavar="LOCAL.json", help="This rank's layout, or a whole deployment as --example prints it."),
    ] = None,
    remote: Annotated[
        Path | None, typer.Argument(metavar="[REMOTE.json]", help="The peer's layout, or a list of its ranks' layouts.")
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option(metavar="REQUEST.json", help="Block ids of a request, as TransferPlan.pair takes them."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="This rank is the producer and pushes.")] = False,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", callback=_example, help="Print a ready deployment and exit.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a deployment and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Shows what two engines would exchange, before they run.

    Exit status: 0 if there is a plan (and the request fits it), 1 if it is refused, 2 for a wrong option.
    """
    if example is not None:
        _print_json(explaining.examples()[example])
        return
    if schema:
        _print_json(msgspec.json.schema(explaining.Deployment))
        return
    if local is None:
        raise typer.BadParameter("LOCAL.json is missing; --example NAME prints something to start from")
    try:
        deployment = explaining.load(local, remote, request, Direction.WRITE if write else None)
        plans = deployment.plans()
        reports = [explaining.report(plan, deployment.request) for plan in plans]
    except NixlFastError as error:
        if as_json:
            _print_json({"refused": str(error), "error": type(error).__name__})
        raise
    waiting = [{"pp_rank": rank.pp_rank, "tp_rank": rank.tp_rank} for rank in plans.notify_only]
    if as_json:
        _print_json({"plans": reports, "notify_only": waiting})
        return
    for report in reports:
        typer.echo(explaining.render(report))
    if waiting:
        ranks = ", ".join(f"{rank['pp_rank']}.{rank['tp_rank']}" for rank in waiting)
        typer.echo(f"only a notification goes to ranks (stage.rank) {ranks}")


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter measurements, under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Times the planning of a request on this machine, beside numpy and beside filling the same memory.

    Times are medians in microseconds for both sides of one request; ratios are of the same run.
    """
    rows: list[benching.Row] = []
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=benching.count(quick=quick))

        def on_row(row: benching.Row) -> None:
            progress.update(task, description=row.name, advance=1)

        rows = benching.run(quick=quick, on_row=on_row)
    if as_json:
        _print_json(rows)
        return
    table = Table(title="nixl-fast bench", caption=benching.machine(), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("request")
    table.add_column("block ids")
    for column in (
        "ids\nper side",
        "ours\nus",
        "numpy\nus",
        "ours\nis faster",
        "ours / fill\nfresh",
        "ours / fill\nwarm",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            "fragmented" if row.fragmented else "contiguous",
            f"{row.ids_per_side:,}",
            f"{row.ours_us:,.1f}",
            f"{row.numpy_us:,.1f}",
            f"{row.speedup:.1f} x",
            f"{row.ours_us / row.fresh_fill_us:.2f}",
            f"{row.ours_us / row.warm_fill_us:.2f}",
        )
    _console().print(table)


app.command()(doctor)


def _print_json(document: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def _run_with_progress(scenarios: list[Scenario]) -> Report:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting processes", total=len(scenarios))
        order = {each.name: index for index, each in enumerate(scenarios)}

        def on_step(each: Scenario, step: str) -> None:
            progress.update(task, description=f"{each.name}: {step}", completed=order[each.name])

        return run_demo(scenarios, on_step)


def _show(report: Report) -> None:
    table = Table(title="nixl-fast demo", caption=_summary(report), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("scenario")
    for column in ("blocks", "descriptors", "merged\nruns", "bytes", "planning\ntime", "NIXL\ntime"):
        table.add_column(column, justify="right")
    table.add_column("verified")
    for result in report.scenarios:
        table.add_row(
            result.name,
            _blocks(result),
            f"{result.descriptors:,}",
            f"{result.runs:,}",
            f"{result.bytes:,}",
            _duration(result.planning_us),
            _duration(result.nixl_us),
            "[green]yes[/]" if result.verified else "[bold red]NO[/]",
        )
    console = _console()
    console.print(table)
    for result in report.scenarios:
        if not result.verified:
            console.print(f"{result.name}: {_fault(result)}", style="red", markup=False, highlight=False)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def _summary(report: Report) -> str:
    checked = sum(result.checked_bytes for result in report.scenarios)
    return f"{checked:,} bytes checked, NIXL {report.nixl}, {report.seconds:.1f} s"


def _blocks(result: ScenarioResult) -> str:
    if result.producer_blocks == result.consumer_blocks:
        return f"{result.consumer_blocks:,}"
    return f"{result.producer_blocks:,} -> {result.consumer_blocks:,}"


def _fault(result: ScenarioResult) -> str:
    if result.wrong_bytes:
        return f"{result.wrong_bytes:,} of {result.checked_bytes:,} bytes are wrong, first {result.first_wrong}"
    return f"{result.bytes:,} bytes were moved, but {result.data_bytes:,} hold data"


def _duration(microseconds: float) -> str:
    return f"{microseconds:.0f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


if __name__ == "__main__":
    app()
