"""`antiphon quantize`: a checkpoint in 4 or 8 bits, in the form that vLLM and transformers load too."""

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.cli.options import refuse_given
from antiphon.cli.output import JsonOption, emit_json, show, table
from antiphon.kernels.select import make_backend, resolve_dtype
from antiphon.models.checkpoint_folder import weights_folder
from antiphon.models.config import load_model_spec
from antiphon.models.rounding import WeightRounding
from antiphon.models.write_quantized import Errors, text_loss, write_quantized
from antiphon.serve.text.tokenizer_reading import TokenizerReader
from antiphon.specs.model import WEIGHT_GROUP

_MOST_CHARACTERS = 200_000
ExpertsOption = Annotated[
    Literal["int8", "int4", "mxfp4"], typer.Option(metavar="NAME", help="Routed experts: int8, int4, mxfp4.")
]
DenseOption = Annotated[
    Literal["int8", "bf16"], typer.Option(metavar="NAME", help="Attention and shared experts: int8, bf16 (as stored).")
]
GroupOption = Annotated[int, typer.Option(metavar="N", help="Columns that share a scale in int8 and int4.")]
TextOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Compare the loss on this text.")]


def quantize(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Checkpoint folder in Hugging Face format.", callback=weights_folder),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; a run that was stopped goes on.")],
    experts: ExpertsOption = "int4",
    dense: DenseOption = "bf16",
    group: GroupOption = WEIGHT_GROUP,
    text: TextOption = None,
    json: JsonOption = None,
) -> None:
    """Write MODEL to OUT in few bits: rounded to the nearest, with the best clip of every group."""
    if group < 1 or group % 8:
        raise UserError(f"--group is {group}: it must be a multiple of 8, for example 32 or 128")
    if experts == "mxfp4" and dense == "bf16":
        refuse_given(context, ["group"], "mxfp4 has blocks of 32 columns, and nothing else is rounded: leave it out")
    wanted = WeightRounding(experts=experts, dense="int8" if dense == "int8" else None, group=group)
    sample = None if text is None else _token_ids(model, text)
    with progress("rounding shards") as report:
        errors = write_quantized(model, out, wanted, report)
    show(_error_table(errors), json=json)
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (model, out)]
    show(f"written to {out}: {format_bytes(sizes[1])}, {model} has {format_bytes(sizes[0])}", json=json)
    losses = None if sample is None else _losses(model, out, sample)
    if losses is not None:
        before, after = losses
        show(f"loss on {text}: {before:.4f} before, {after:.4f} after ({after - before:+.4f})", json=json)
    rows = [
        {"layer": layer, "weights": kind, "relative_error": each.relative}
        for (layer, kind), each in sorted(errors.items())
    ]
    emit_json(json, {"folder": out, "bytes": sizes[1], "bytes_before": sizes[0], "errors": rows, "loss": losses})


def _token_ids(model: Path, text: Path) -> list[int]:
    try:
        with text.open(encoding="utf-8") as file:  # which may be larger than memory
            words = file.read(_MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text} cannot be read ({error}): give a file with UTF-8 text") from error
    with TokenizerReader(model) as reader:
        reader.read()
        ids = reader.encode(words)
    if len(ids) < 2:
        raise UserError(f"--text {text} holds {len(ids)} tokens: give a longer text")
    return ids


def _losses(model: Path, out: Path, sample: list[int]) -> tuple[float, float]:
    backend = make_backend("auto", torch.device("cpu"), resolve_dtype(load_model_spec(model).dtype))
    with progress("measuring the loss") as report:
        before = text_loss(model, sample, backend, lambda done: report(done, 2.0))
        return before, text_loss(out, sample, backend, lambda done: report(1.0 + done, 2.0))


def _error_table(errors: Errors) -> Table:
    kinds = sorted({kind for _, kind in errors}, reverse=True)
    layers = sorted({layer for layer, _ in errors})
    rows = [
        [layer, *(f"{errors[layer, kind].relative:.2%}" if (layer, kind) in errors else None for kind in kinds)]
        for layer in layers
    ]
    return table(["layer", *kinds], rows, title="Error of the weights, of their root mean square")
