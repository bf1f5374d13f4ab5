"""`antiphon bench serve --rate`: servers of ours and one at a URL, under load that does not wait for them."""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.bench.load import COLUMNS, LoadOptions, bench_load, best_within, load_case, own_servers
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.cli.bench_rows import check_limits, show_rows
from antiphon.cli.options import words_of
from antiphon.cli.output import check_output_file, write_whole
from antiphon.report.document import Grid
from antiphon.report.load import load_page
from antiphon.report.page import html
from antiphon.serve.signals import sigterm_exits


def serve_load(
    model: Path,
    layouts: str,
    against_url: str | None,
    device: str,
    threads: int | None,
    load: LoadOptions,
    json: str | None,
) -> None:
    """Start the servers, time them, show the rows and write the page. Blocks until all requests are answered."""

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    check_limits(load)
    check_output_file("--html", load.html)
    case = load_case(load, model)
    names = words_of(layouts)
    given = ["--device", device, *(["--threads", str(threads)] if threads else [])]
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-load-") as folder,
        sigterm_exits(),
        own_servers(model, names, case, Path(folder), given) as peers,
    ):
        if against_url is not None:
            peers.append(OpenAIPeer(against_url))
        if not peers:
            raise UserError("no server to measure: give --layouts or --against-url")
        for peer in peers:
            peer.start()
        rows = bench_load(model, peers, case, say=say)
    slo = case.workload.slo
    within = None if slo.tpot_s is None else best_within(rows, slo.tpot_s)
    about = {
        "workload": case.workload.name,
        "slo": asdict(slo),
        "burstiness": case.burstiness,
        "output_tokens_per_s_within_tpot": within,
    }
    show_rows("serve-load", COLUMNS, rows, json, about=about, device=device)
    for name, tokens_per_s in (within or {}).items():
        reached = "no rate" if tokens_per_s is None else f"{tokens_per_s:,.0f} output tokens/s"
        say(f"{name}: {reached} with a median time per token of at most {(slo.tpot_s or 0) * 1e3:g} ms")
    if load.html is not None:
        cells = [["" if cell is None else str(cell) for cell in row] for row in COLUMNS.cells(rows)]
        grid = Grid(columns=COLUMNS.headings, rows=cells, right=range(1, len(COLUMNS.headings)))
        write_whole("--html", load.html, html(load_page(rows, model.name, case.workload.name, slo, grid)))
