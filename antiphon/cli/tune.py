"""`antiphon tune`: the quickest product of a model's experts on this GPU and its tiles, for the table workers read."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli import options
from antiphon.cli.output import JsonOption, check_output_file, emit_json, show, table, whole_file
from antiphon.kernels import triton
from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.kernels.gpu import find_gpu
from antiphon.kernels.quantized import WeightFormat
from antiphon.models.config import load_model_spec
from antiphon.specs.model import ModelSpec

FORMATS: dict[str, WeightFormat | None] = {
    "bf16": None,
    "fp8": WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128),
    "int8": WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.bfloat16),
    "int4": WeightFormat(codes="int4", columns_per_scale=128, scale_dtype=torch.bfloat16),
    "mxfp4": WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
}
CAPABILITIES = (80, 90)
WeightsOption = Annotated[
    Literal["bf16", "fp8", "int8", "int4", "mxfp4"],
    typer.Option(metavar="NAME", help="How experts are stored: bf16, fp8, int8, int4, mxfp4."),
]
ExpertsOption = Annotated[int, typer.Option(metavar="N", help="Experts that a worker holds; 0: all.")]
TokensOption = Annotated[str, typer.Option(metavar="N,N", help="Tokens a step, one bucket each.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Table to add to (default: the one workers read).")
]
CompileOption = Annotated[
    bool, typer.Option("--compile-only", help="Only what each tile needs of a GPU; takes none. Writes no table.")
]


def tune(
    model: options.ModelFolder,
    weights: WeightsOption = "bf16",
    experts: ExpertsOption = 0,
    tokens: TokensOption = "1,8,64,512,4096",
    out: OutOption = None,
    compile_only: CompileOption = False,
    json: JsonOption = None,
) -> None:
    """Measure tiles of MODEL's expert products on this GPU; workers read the table when they start."""
    if not triton.is_installed():
        raise UserError("antiphon tune needs Triton: pip install 'antiphon[triton]'")
    if triton.interprets():
        raise UserError("antiphon tune compiles for GPUs, and TRITON_INTERPRET=1 turns that off: unset it")
    spec, counts = load_model_spec(model), _token_counts(tokens)
    if spec.router.num_experts < 1 or not 0 <= experts <= spec.router.num_experts:
        raise UserError(f"--experts is {experts}: {model} has {spec.router.num_experts} experts a layer")
    if compile_only:
        if out is not None:
            raise UserError(f"--out {out} does not apply with --compile-only, which writes no table; leave it out")
        _show_needs(spec, experts, weights, counts, json)
        return
    try:
        device = find_gpu("cuda", 0)
    except UserError as error:
        raise UserError(f"antiphon tune measures on a GPU (only --compile-only needs none): {error}") from error
    _show_times(spec, experts, weights, counts, device, out, json)


def _token_counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > 1 << 17:
        raise UserError(f"--tokens is {text!r}: give numbers from 1 to {1 << 17}, for example 1,8,64,512")
    return counts


def _experts(spec: ModelSpec, experts: int, weights: str, device: torch.device) -> Any:
    """A layer's experts, unfilled."""
    count, form, feed_forward = experts or spec.router.num_experts, FORMATS[weights], spec.feed_forward
    shape = ExpertShape(count, spec.hidden_size, feed_forward.intermediate, "silu", has_bias=feed_forward.expert_bias)
    formats = ExpertFormats(gate_up=form, down=form)
    return triton.load("weights").TritonExperts(shape, formats, device, torch.bfloat16)


def _show_needs(spec: ModelSpec, experts: int, weights: str, counts: list[int], json: str | None) -> None:
    tuning, rows = triton.load("tune"), []
    made = _experts(spec, experts, weights, torch.device("cpu"))
    for name, weight in (("gate and up", made.gate_up), ("down", made.down)):
        row_counts = [tokens * spec.router.top_k for tokens in counts]
        for capability in CAPABILITIES:
            with progress(f"compiling {name} for {capability / 10}") as report:
                needs = tuning.compile_candidates(weight, row_counts, capability, report)
            rows += [{"weight": name, **vars(tile), **vars(need), "fits": need.fits} for tile, need in needs]
    show(
        table(
            [
                "weight",
                "for",
                "rows",
                "columns",
                "inputs",
                "warps",
                "stages",
                "registers",
                "shared KiB",
                "stack",
                "wgmma",
            ],
            [
                [
                    row["weight"],
                    f"{row['capability'] / 10}",
                    *(str(row[key]) for key in ("rows", "columns", "inputs", "warps", "stages", "num_registers")),
                    f"{row['shared_bytes'] / 1024:.0f}",
                    str(row["stack_bytes"]),
                    str(row["num_wgmma"]),
                ]
                for row in rows
            ],
            title="What tiles need of a GPU (a stack means spilled registers)",
        ),
        json=json,
    )
    num_fit = sum(row["fits"] for row in rows)
    show(f"{num_fit} of {len(rows)} tiles fit without spills; none has been run", json=json)
    emit_json(json, {"tiles": rows})


def make_ready(path: Path) -> None:
    """`UserError` before minutes of measuring if the table could not be written there. Makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: its folder cannot be made ({error.strerror}); name another one") from error
    check_output_file("--out", path)


def _show_times(
    spec: ModelSpec,
    experts: int,
    weights: str,
    counts: list[int],
    device: torch.device,
    out: Path | None,
    json: str | None,
) -> None:
    tuning, tiles = triton.load("tune"), triton.load("tiles")
    path = out or tiles.table_path()
    make_ready(path)
    kept = tiles.read_table(path) if path.exists() else {}
    made, rows, entries = _experts(spec, experts, weights, device), [], {}
    for name, weight in (("gate and up", made.gate_up), ("down", made.down)):
        tuning.fill_at_random(weight)
        with progress(f"tuning {name}") as report:
            buckets = tuning.tune(weight, counts, spec.router.top_k, report)
        entries[name] = tuning.table_entry(weight, buckets)
        rows += [
            {"weight": name, "most_rows": each.most_rows, **vars(each.tile), "time_s": each.time_s,
             "default_time_s": each.default_time_s}
            for each in buckets
        ]  # fmt: skip
    products = tuning.compare_products(made, counts, spec.router.top_k, entries["gate and up"], entries["down"])
    chosen = tuning.quickest_product(products)
    kept[tiles.key_of(made.gate_up, device)] = replace(entries["gate and up"], product=chosen)
    kept[tiles.key_of(made.down, device)] = entries["down"]
    with whole_file("--out", path) as partial:
        tiles.write_table(partial, kept)
    shown = [
        [row["weight"], str(row["most_rows"]), f"{row['rows']} x {row['columns']} x {row['inputs']}",
         f"{row['time_s'] * 1e6:.1f}", f"{row['default_time_s'] / row['time_s'] - 1:+.0%}"]
        for row in rows
    ]  # fmt: skip
    show(table(["weight", "most rows", "tile", "us", "over the rule's"], shown, title=f"Tiles on {device}"), json=json)
    for each in products:
        other = "cannot, or gives other numbers" if each.grouped_mm_s is None else f"{each.grouped_mm_s * 1e6:.1f} us"
        show(f"{each.num_tokens} tokens: triton {each.triton_s * 1e6:.1f} us, grouped_mm {other}", json=json)
    show(f"experts use {chosen}; written to {path}", json=json)
    emit_json(json, {"table": path, "tiles": rows, "products": list(map(vars, products)), "product": chosen})
