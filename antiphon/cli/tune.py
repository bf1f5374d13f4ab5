"""`antiphon tune`: tiles of a model's expert products on this GPU, and the quickest implementations: for workers."""

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli import options
from antiphon.cli.output import JsonOption, check_output_file, check_output_folder, emit_json, show, table, whole_file
from antiphon.kernels import triton
from antiphon.kernels.api import ExpertFormats, ExpertShape, KVCacheSpec
from antiphon.kernels.choices import (
    Choice,
    Key,
    choices_path,
    choose,
    read_choices,
    read_table,
    table_path,
    write_choices,
    write_table,
)
from antiphon.kernels.quantized import WeightFormat
from antiphon.kernels.select import find_gpu
from antiphon.kernels.stacked import StackedWeight, TritonExperts
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
CONTEXTS = (256, 8192)  # keys of the longest row where attention is measured
MOST_ROWS = 512  # of them at once
BLOCK_SIZE = 16  # the server's
TILE_KEYS = ("rows", "columns", "inputs", "warps", "stages", "num_registers")
NEEDS = ("weight", "for", *TILE_KEYS[:-1], "registers", "shared KiB", "stack", "wgmma")
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
    counts = sorted(set(options.numbers_of("--tokens", text, "1,8,64,512")))
    if counts[0] < 1 or counts[-1] > 1 << 17:
        raise UserError(f"--tokens is {text!r}: give numbers from 1 to {1 << 17}, for example 1,8,64,512")
    return counts


def _experts(spec: ModelSpec, experts: int, weights: str, device: torch.device) -> TritonExperts:
    """A layer's experts, unfilled."""
    count, form, feed_forward = experts or spec.router.num_experts, FORMATS[weights], spec.feed_forward
    shape = ExpertShape(count, spec.hidden_size, feed_forward.intermediate, "silu", has_bias=feed_forward.expert_bias)
    formats = ExpertFormats(gate_up=form, down=form)
    return TritonExperts(shape, formats, device, torch.bfloat16)


def _show_needs(spec: ModelSpec, experts: int, weights: str, counts: list[int], json: str | None) -> None:
    tuning, rows = _search(), []
    made = _experts(spec, experts, weights, torch.device("cpu"))
    for name, weight in _named(made):
        row_counts = [tokens * spec.router.top_k for tokens in counts]
        for capability in CAPABILITIES:
            with progress(f"compiling {name} for {capability / 10}") as report:
                needs = tuning.compile_candidates(weight, row_counts, capability, report)
            rows += [{"weight": name, **vars(tile), **vars(need), "fits": need.fits} for tile, need in needs]
    shown = [
        [row["weight"], f"{row['capability'] / 10}", *(str(row[key]) for key in TILE_KEYS),
         f"{row['shared_bytes'] / 1024:.0f}", str(row["stack_bytes"]), str(row["num_wgmma"])]
        for row in rows
    ]  # fmt: skip
    show(table(NEEDS, shown, title="What tiles need of a GPU (a stack means spilled registers)"), json=json)
    num_fit = sum(row["fits"] for row in rows)
    show(f"{num_fit} of {len(rows)} tiles fit without spills; none has been run", json=json)
    emit_json(json, {"tiles": rows})


def make_ready(path: Path) -> None:
    """`UserError` before minutes of measuring if the table could not be written there. Makes its folder."""
    check_output_folder("--out", path.parent)
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
    path = out or table_path()
    beside = choices_path(path)
    make_ready(path)
    kept, choices = read_table(path) if path.exists() else {}, read_choices(beside)
    tuning, backend, grouped = _search(), triton.load("backend"), triton.load("grouped")
    made, rows, entries = _experts(spec, experts, weights, device), [], {}
    for name, weight in _named(made):
        tuning.fill_at_random(weight)
        with progress(f"tuning {name}") as report:
            buckets = tuning.tune(weight, counts, spec.router.top_k, report)
        entries[name] = tuning.table_entry(weight, buckets)
        rows += [
            {"weight": name, "most_rows": each.most_rows, **vars(each.tile), "time_s": each.time_s,
             "default_time_s": each.default_time_s}
            for each in buckets
        ]  # fmt: skip
    kept |= {grouped.key_of(weight, device): entries[name] for name, weight in _named(made)}
    candidates = tuning.product_candidates(made, counts, spec.router.top_k, entries["gate and up"], entries["down"])
    products = choose(candidates, [f"{count} tokens" for count in counts], tuning.measure_s)
    choices[backend.experts_key(made)] = products.name, products.why
    attention = _attention(spec, counts, device, tuning)
    if attention is not None:
        key, chosen = attention
        choices[key] = chosen.name, chosen.why
    with whole_file("--out", path) as partial:
        write_table(partial, kept)
    with whole_file("--out", beside) as partial:
        write_choices(partial, choices)
    shown = [
        [row["weight"], str(row["most_rows"]), f"{row['rows']} x {row['columns']} x {row['inputs']}",
         f"{row['time_s'] * 1e6:.1f}", f"{row['default_time_s'] / row['time_s'] - 1:+.0%}"]
        for row in rows
    ]  # fmt: skip
    show(table(["weight", "most rows", "tile", "us", "over the rule's"], shown, title=f"Tiles on {device}"), json=json)
    show(f"experts use {products.name}: {products.why}", json=json)
    if attention is not None:
        show(f"attention of single rows uses {attention[1].name}: {attention[1].why}", json=json)
    show(f"written to {path} and {beside}", json=json)
    chosen_of = {"experts": products} | ({} if attention is None else {"attention": attention[1]})
    found = {name: {"name": each.name, "why": each.why, "tried": list(map(vars, each.tried))}
             for name, each in chosen_of.items()}  # fmt: skip
    emit_json(json, {"table": path, "tiles": rows, "choices": found, "choices_file": beside})


def _attention(spec: ModelSpec, counts: list[int], device: torch.device, tuning: Any) -> tuple[Key, Choice] | None:
    """The choice for this model's caches of numbers; None where only our own kernel reads such a cache."""
    attention = spec.attention
    if attention.latent is not None:
        return None
    rows = [count for count in counts if count <= MOST_ROWS] or [1]
    cases = [(count, keys) for count in rows for keys in CONTEXTS]
    cache_spec = KVCacheSpec(
        num_layers=1, num_blocks=CONTEXTS[-1] // BLOCK_SIZE * 4, block_size=BLOCK_SIZE,
        num_kv_heads=attention.num_kv_heads, key_dim=attention.head_dim, value_dim=attention.head_dim,
    )  # fmt: skip
    cache, candidates = tuning.attention_candidates(cache_spec, attention.num_heads, cases, device, torch.bfloat16)
    names = [f"{count} rows of up to {keys} keys" for count, keys in cases]
    found = choose(candidates, names, tuning.measure_s)
    return triton.load("backend").attention_key(cache, attention.num_heads), found


def _named(experts: TritonExperts) -> tuple[tuple[str, StackedWeight], ...]:
    return ("gate and up", experts.gate_up), ("down", experts.down)


def _search() -> Any:
    """The module that measures, which loads Triton."""
    return importlib.import_module("antiphon.bench.tile_search")
