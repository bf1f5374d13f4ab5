"""`antiphon reproduce`: the papers' figures and tables, theirs beside ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli.options import check_not_empty
from antiphon.cli.output import JsonOption, check_output_file, emit_json, provenance, show, table, write_whole
from antiphon.cost.engine_step import load_engine
from antiphon.reproduce.claims import PAPERS, Claim, Row, by_reason, headline, select
from antiphon.reproduce.claims import reproduce as run_claims
from antiphon.reproduce.markdown import page, tolerance_text, value_text
from antiphon.reproduce.measured_servers import COLUMNS as COLUMNS_OF_SLICES
from antiphon.reproduce.measured_servers import (
    STORED,
    compare,
    cross_validated,
    engine_file,
    fitted_engines,
    measured_points,
    peer_times,
    slices,
    times_file,
)
from antiphon.reproduce.published import calibration_page
from antiphon.specs import catalog

COLUMNS = ("", "id", "what", "theirs", "ours", "unit", "tolerance", "kind")
LISTED = ("id", "paper", "source", "what", "theirs", "unit", "tolerance", "kind")
HOLDS, MISSES = Text("█", style="green"), Text("░ no", style="red")


def reproduce(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Rows, or a group: msi-fig12.")] = None,
    paper: Annotated[str | None, typer.Option("--paper", metavar="NAME", help="MSI, MIX, MSM or LINA.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Only say which rows there are.")] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the page docs/reproduction.md.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Write the page docs/calibration.md, nothing else."),
    ] = None,
    deployments: Annotated[
        bool,
        typer.Option("--deployments", help="Servers that others measured, beside our model, by slice."),
    ] = False,
    fit: Annotated[
        Path | None,
        typer.Option("--fit", metavar="FOLDER", help="With --deployments: write the engines' constants, fitted anew."),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", metavar="PYTHON", help="With --deployments: beside aiconfigurator, which that one has."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """The papers' figures and tables, theirs beside ours. All rows without ID; rows that do not hold say why."""
    check_output_file("--markdown", markdown)
    check_output_file("--calibration", calibration)
    if deployments:
        if ids or paper or list_only or markdown is not None or calibration is not None:
            raise UserError("--deployments prints tables of its own: leave out the other options and the ids")
        check_not_empty("--peer", peer)
        show_deployments(fit, peer, json)
        return
    for name, value in (("--fit", fit), ("--peer", peer)):
        if value is not None:
            raise UserError(f"{name} belongs to --deployments: add it")
    if calibration is not None:
        if ids or paper or list_only or markdown is not None or json is not None:
            raise UserError("--calibration writes a page of its own: leave out the other options and the ids")
        write_whole("--calibration", calibration, calibration_page())
        return
    claims = select(ids or (), paper)
    if list_only:
        if markdown is not None:
            raise UserError("--markdown with --list: leave out --list, a page needs our values")
        show(list_table(claims), json=json)
        emit_json(json, {"bench": "reproduce", "rows": [{key: getattr(one, key) for key in LISTED} for one in claims]})
        return
    with progress("reproducing") as report:
        rows = run_claims(claims, report)
    for renderable in tables(rows):
        show(renderable, json=json)
    for line in headline(rows):
        show(line, json=json)
    show(f"all together: {sum(row.holds for row in rows)} of {len(rows)} rows hold", json=json)
    emit_json(json, {"bench": "reproduce", **provenance(), "rows": [row.to_json() for row in rows]})
    if markdown is not None:
        write_whole("--markdown", markdown, page(rows))


def show_deployments(fit: Path | None, peer: str | None, json: str | None) -> None:
    """The table by slice; with `fit` a file for each engine in that folder, with `peer` two lines beside that tool."""
    files = {} if fit is None else {name: fit / f"{name}.toml" for name in catalog.names("engine")}
    for path in files.values():
        check_output_file("--fit", path)
    written: dict[Path, str] = {}
    with progress("pricing measured servers") as report:
        judged = cross_validated(measured_points(), report)
    engines = fitted_engines(judged) if fit is not None else [load_engine(name) for name in catalog.names("engine")]
    lines = slices(judged, engines)
    if peer is not None:
        with progress("pricing with aiconfigurator") as report:
            times = peer_times(peer, report)
        lines += compare(judged, times)
        if fit is not None:
            written[fit / STORED.name] = times_file(times)
    cells = [one.cells() for one in lines]
    show(table(COLUMNS_OF_SLICES, cells, title="time per token and to the first one"), json=json)
    emit_json(json, {"bench": "deployments", **provenance(), "rows": [vars(one) for one in lines]})
    written |= {files[engine.name]: engine_file(engine) for engine in engines if engine.name in files}
    for path, text in written.items():
        write_whole("--fit", path, text)
        show(f"wrote {path}", json=json)


def list_table(claims: Sequence[Claim]) -> RenderableType:
    return table(
        ("id", "source", "what", "kind"), [(claim.id, claim.source, claim.what, claim.kind) for claim in claims]
    )


def tables(rows: Sequence[Row]) -> list[RenderableType]:
    """One table per paper, then the reasons of what does not hold, or holds loosely."""
    found: list[RenderableType] = []
    for paper, title in PAPERS.items():
        of_paper = [row for row in rows if row.paper == paper]
        if of_paper:
            holding = sum(row.holds for row in of_paper)
            heading = f"{paper}: {title}, {holding} of {len(of_paper)} hold"
            found += [table(COLUMNS, [_cells(row) for row in of_paper], title=heading), ""]
    return found + [f"{', '.join(row.id for row in alike)}: {reason}\n" for reason, alike in by_reason(rows).items()]


def _cells(row: Row) -> tuple[object, ...]:
    mark = HOLDS if row.holds else MISSES
    values = (value_text(row.theirs), value_text(row.ours))
    return (mark, row.id, row.what, *values, row.unit, tolerance_text(row), row.kind)
