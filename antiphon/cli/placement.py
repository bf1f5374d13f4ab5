"""`antiphon placement`: which experts to copy and where, from the routing that a server recorded.

The table's placement is made from the first half of the steps and judged on the second, because a placement is used on
steps that come later. The one that is written is made from all steps. Rejected: the newest steps counting most, as
`--balance window` has it: a file stays in use for longer than what was popular just now.

With `--profile-paths` a profile of sample paths is written, from all rows, for `--balance paths`. A second table judges
paths of the first half's rows on the second half, beside the next router's forecast and the last steps' counts.

The column "ahead" says what `--balance predict` would bring at most: copies by each step's forecast besides, one for
each worker, whose loads cost nothing.
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.cli.options import refuse_given
from antiphon.cli.output import (
    JsonOption,
    check_output_file,
    emit_json,
    provenance,
    show,
    table,
    whole_file,
    write_whole,
)
from antiphon.placement.place import matrix_of, owners_of, place, recent_loads
from antiphon.placement.routing_trace import RoutingTrace, read_routing_trace
from antiphon.placement.sample_paths import PathProfile, estimate_score, expected_by_paths, pack_first_fit
from antiphon.placement.split import BoolArray, FloatArray, IntArray, balancedness, split_rows
from antiphon.specs.checked import LARGEST, SMALLEST
from antiphon.specs.placement import ExpertPlacement, contiguous_placement, placement_to_json

DEFAULT_PATH_LENGTH = 3  # as in Lina, section 7.1
WINDOW_STEPS = 8
PATH_COLUMNS = (
    *("layer", "paths right", "elsewhere", "next router right", "elsewhere", "window right", "elsewhere"),
    "packed by eq. 1",
)
COLUMNS = ("layer", "contiguous", "shared evenly", "split", "5th percentile", "ahead", "copies")


def placement(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="What antiphon serve --record-routing wrote.")],
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Expert workers.")],
    slots: Annotated[int, typer.Option("--slots", metavar="S", help="Experts a worker holds in a layer.")],
    speeds: Annotated[
        str | None, typer.Option("--speeds", metavar="A,B,...", help="Rows/s of the workers, or only their ratios.")
    ] = None,
    knee: Annotated[
        int,
        typer.Option("--knee", metavar="ROWS", min=1, help="Rows up to which an expert takes no longer than for one."),
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the placement, as JSON.")] = None,
    profile_paths: Annotated[
        Path | None, typer.Option("--profile-paths", metavar="FILE", help="Write sample paths, for --balance paths.")
    ] = None,
    path_length: Annotated[
        int, typer.Option("--path-length", metavar="L", min=1, help="Layers of a sample path.")
    ] = DEFAULT_PATH_LENGTH,
    phase: Annotated[
        Literal["both", "prefill", "decode"],
        typer.Option("--phase", metavar="NAME", help="Only rows of prompts (prefill), or of answers (decode)."),
    ] = "both",
    json: JsonOption = None,
) -> None:
    """Place experts by recorded routing: copies of the popular ones, and how even the load becomes."""
    check_output_file("--out", out)
    check_output_file("--profile-paths", profile_paths)
    if profile_paths is None:
        refuse_given(context, ["path_length"], "it is of --profile-paths FILE: add that, or leave it out")
    recorded = read_routing_trace(trace)
    if phase != "both":
        recorded = recorded.of_phase(phase)
    counts = recorded.counts_of_steps()
    if len(counts) < 2:
        raise UserError(f"{trace} has {len(counts)} steps: record at least 2, one to place by and one to judge by")
    ratios = _speeds(speeds, workers)
    expected: list[IntArray | None] = [None] * recorded.header.num_layers  # the first layer is never expected
    if (forecasts := recorded.forecasts_of_steps()) is not None:
        expected[1:] = np.moveaxis(forecasts, 1, 0)
    layers = [
        _judged(number, steps, forecast, workers, slots, ratios, knee)
        for number, steps, forecast in zip(recorded.header.layers, np.moveaxis(counts, 1, 0), expected, strict=True)
    ]
    show(table(COLUMNS, [["" if x is None else x for x in each.values()] for each in layers]), json=json)
    if out is not None:
        held = place(counts.mean(axis=0), workers, slots, speeds=ratios, floor=knee)
        made = ExpertPlacement(workers, dict(zip(recorded.header.layers, map(owners_of, held), strict=True)))
        write_whole("--out", out, placement_to_json(made) + "\n")
        show(f"{out}: for antiphon serve --placement, or POST /placement", json=json)
    paths = [] if profile_paths is None else _profile(recorded, path_length, workers, slots, profile_paths)
    if paths:
        rows = [["" if cell is None else cell for cell in each.values()] for each in paths]
        show(
            table(PATH_COLUMNS, rows, title=f"sample paths of length {path_length}: shares of steps, or of choices"),
            json=json,
        )
        show(f"{profile_paths}: for antiphon serve --balance paths --path-profile", json=json)
    emit_json(
        json,
        {"bench": "placement", **provenance(), "phase": phase, "steps": len(counts), "layers": layers, "paths": paths},
    )


def _profile(
    recorded: RoutingTrace, length: int, num_workers: int, slots: int, file: Path
) -> list[dict[str, float | None]]:
    """Write the profile of all rows; a row for each layer that paths of this length reach, of the profile of the first
    half's rows on the second half."""
    header = recorded.header
    rows = sorted(recorded.rows, key=lambda each: each.step)
    early, late = (RoutingTrace(header, half) for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]))
    profile = PathProfile.of_rows(early.ids_LTK(), header.num_experts, length)
    forecasts, counts = late.forecasts_of_steps(), recorded.counts_of_steps()
    rows_of_steps = counts.astype(np.float64)
    found = []
    for number in range(length, header.num_layers):
        expected, actual = expected_by_paths(profile, late, number)
        paths_right, paths_elsewhere = estimate_score(expected, actual, header.top_k)
        window = [
            recent_loads(rows_of_steps[max(0, step - WINDOW_STEPS) : step, number : number + 1])[0]
            for step in range(1, len(counts))
        ]
        window_right, window_elsewhere = estimate_score(np.stack(window), counts[1:, number], header.top_k)
        by_router: tuple[float | None, float | None] = None, None
        if forecasts is not None:
            by_router = estimate_score(
                forecasts[:, number - 1].astype(np.float64), late.counts_of_steps()[:, number], header.top_k
            )
        packed = [pack_first_fit(num_workers * each / max(each.sum(), 1e-12), num_workers, slots) for each in expected]
        found.append(
            {
                "layer": header.layers[number],
                "paths_right": paths_right,
                "paths_elsewhere": paths_elsewhere,
                "router_right": by_router[0],
                "router_elsewhere": by_router[1],
                "window_right": window_right,
                "window_elsewhere": window_elsewhere,
                "packed": float(balancedness(split_rows(actual, np.stack(packed))).mean()),
            }
        )
    if not found:
        raise UserError(
            f"--path-length is {length}: the trace has {header.num_layers} layers with experts, so paths have at most "
            f"{header.num_layers - 1}"
        )
    whole = PathProfile.of_rows(recorded.ids_LTK(), header.num_experts, length, header.layers)
    with whole_file("--profile-paths", file) as partial:
        whole.write(partial)
    return found


def _judged(
    layer: int,
    steps: IntArray,
    forecast: IntArray | None,
    num_workers: int,
    slots: int,
    speeds: FloatArray | None,
    knee: int,
) -> dict[str, float | None]:
    """A row of the table, from the rows [T, E] of one layer, and those expected: balancedness in the second half of the
    steps."""
    half = len(steps) // 2
    held = place(steps[:half].mean(axis=0), num_workers, slots, speeds=speeds, floor=knee)
    num_experts = steps.shape[1]
    plain = matrix_of(contiguous_placement(num_experts, num_workers, (layer,)).owners[layer], num_workers)
    later = steps[half:]
    even = held / held.sum(axis=1, keepdims=True) * later[..., None]
    split = balancedness(split_rows(later, held, speeds, knee), speeds)
    ahead = None
    if forecast is not None:
        with_copies = _with_copies_ahead(forecast[half:], held, speeds, knee)
        ahead = float(balancedness(split_rows(later, with_copies, speeds, knee), speeds).mean())
    return {
        "layer": layer,
        "contiguous": float(balancedness(split_rows(later, plain, speeds, knee), speeds).mean()),
        "even_shares": float(balancedness(even, speeds).mean()),
        "split": float(split.mean()),
        "split_p5": float(np.quantile(split, 0.05)),
        "ahead": ahead,
        "copies": int(held.sum()) - num_experts,
    }


def _with_copies_ahead(forecast: IntArray, held: BoolArray, speeds: FloatArray | None, knee: int) -> BoolArray:
    """Who has a copy in each step [T, E, W], with those that its forecast [T, E] wants."""
    num_workers = held.shape[1]
    split = _m2n.ExpertSplit(num_workers, owners_of(held), () if speeds is None else speeds.tolist(), knee)
    held_TEW = np.repeat(held[None], len(forecast), axis=0)
    for held_EW, expected_E in zip(held_TEW, forecast.astype(np.uint32), strict=True):
        for expert, worker, _ in split.wanted_copies(expected_E, np.ones(num_workers, dtype=bool)):
            held_EW[expert, worker] = True
    return held_TEW


def _speeds(text: str | None, num_workers: int) -> FloatArray | None:
    if text is None:
        return None
    try:
        speeds = np.array([float(part) for part in text.split(",")])
    except ValueError as error:
        raise UserError(f"--speeds {text}: write one number for each worker, for example 1,1,0.5") from error
    if speeds.size != num_workers or not ((speeds > SMALLEST) & (speeds <= LARGEST)).all():
        raise UserError(
            f"--speeds {text}: give {num_workers} numbers above 0, one for each worker, between {SMALLEST:g} and "
            f"{LARGEST:g}"
        )
    return speeds
