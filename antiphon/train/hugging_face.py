"""A trainable model from and to a folder in Hugging Face format, by the plan that serving loads with.

1. Import: every tensor of the checkpoint, whatever its dtype and layout, into the float32 parameters.
2. Export: the family's published names; experts in the first layout that is not a compressed one. Shards of at most
   `SHARD_BYTES`, the index last: a folder without it was not written to its end. Tensors are read one at a time
   from a run's checkpoint, so one shard is held; their sizes are known before the first byte is read.
   Score biases stay in float32: in bfloat16 they would choose other experts.
3. A layer for further tokens (multi-token prediction) that is trained is read and written like any other, with the
   copies of embedding and head that published checkpoints have there. One that is not: export copies it from the
   checkpoint that the run began with.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import replace_text
from antiphon.kernels.api import ExpertShape
from antiphon.kernels.reference import ReferenceBackend, ReferenceExperts
from antiphon.models.checkpoint_folder import INDEX_NAME
from antiphon.models.config import read_config, tensor_names
from antiphon.models.load import open_checkpoint
from antiphon.models.packed import SCALE_BLOCK, SCALE_SUFFIXES
from antiphon.models.rounding import float8_blocks
from antiphon.models.tensor_names import StackedLayout, TensorNames
from antiphon.models.tensors import (
    ExpertRefs,
    LoadPlan,
    NoCheckpoint,
    Stored,
    attention_layer_plan,
    check,
    expert_refs,
    outer_plan,
)
from antiphon.models.weights import PLAIN_PURPOSES, WeightReader
from antiphon.models.write_quantized import save_whole
from antiphon.specs.model import ModelSpec
from antiphon.train.device import HOST, SHAPES_ONLY
from antiphon.train.further_token import (
    COPIES,
    FURTHER_LAYERS,
    PROJECTION,
    further_parameters,
    further_plan,
    with_further,
)
from antiphon.train.model import MoeModel
from antiphon.train.weights import (
    DOWN,
    GATE_UP,
    NOT_TRAINED,
    Part,
    Weights,
    attribute_of,
    layer_parameters,
    outer_parameters,
    parts_of,
)

SHARD_BYTES = 4 << 30
FLOAT8 = torch.float8_e4m3fn
_FLOAT8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
}
_NEVER_ROUNDED = tuple(purpose for purpose in PLAIN_PURPOSES if purpose != "kv_up")  # a reader multiplies that one out
_log = get_logger("train")
_GENERATION = "generation_config.json"
_OF_TOKENIZERS = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", _GENERATION, "added_tokens")


def import_weights(model: MoeModel, folder: Path) -> None:
    """Fill what `model` holds from the checkpoint in `folder`; `CheckpointError` if it is another model's or damaged.
    Of the experts only those held here are read."""
    spec = model.spec
    checkpoint = open_checkpoint(folder, spec)
    names = checkpoint.family_names(spec.family)
    quantised = read_config(folder).get("quantization_config") or any(map(checkpoint.is_packed, checkpoint.names))
    if quantised and model.mesh.rank == 0:
        how = quantised.get("quant_method", "an unnamed way") if isinstance(quantised, dict) else "blocks"
        _log.warning("%s is quantised (%s): its weights are multiplied out, and trained as they then are", folder, how)
    outer = outer_plan(spec, names)
    plans = [{purpose: refs for purpose, refs in outer.items() if purpose in parts_of(model)}]
    plans += [_layer_plan(layer.spec, names, layer.layer, checkpoint, spec.num_layers) for layer in model.layers]
    first_expert, last_expert = model.share.experts
    experts = {
        each.layer: [
            expert_refs(each.spec, names, each.layer, expert, checkpoint) for expert in range(first_expert, last_expert)
        ]
        for each in model.layers
        if each.spec.moe_layers[each.layer]
    }
    refs = [ref for plan in plans for part in plan.values() for ref in part]
    refs += [ref for of_layer in experts.values() for one in of_layer for ref in one.refs]
    reader = WeightReader(checkpoint, ReferenceBackend(), check(checkpoint, refs), None)
    with torch.no_grad():
        for module, plan in zip((model, *model.layers), plans, strict=True):
            weights = Weights(module, torch.float32)
            for purpose, stored in plan.items():
                part = parts_of(module)[purpose]
                target = weights.stored(purpose)
                target.copy_(part.of(reader.tensor(stored, target.dtype).view(part.shape)))
        for layer, of_layer in experts.items():
            for place, one in enumerate(of_layer):
                whole = _whole_expert(spec, Weights(model.layers[layer], torch.float32).stored(DOWN).dtype)
                reader.expert(whole, 0, one, None)
                _copy_expert(whole, model.layers[layer], place)


def _layer_plan(spec: ModelSpec, names: TensorNames, layer: int, stored: Stored, num_layers: int) -> LoadPlan:
    """The plan of a layer without its routed experts; behind the model's `num_layers`, of that for a further token."""
    plan = attention_layer_plan(spec, names, layer, stored)
    return plan if layer < num_layers else plan | further_plan(spec, layer)


def _whole_expert(spec: ModelSpec, dtype: torch.dtype) -> ReferenceExperts:
    """Room for one whole expert as a loader writes it."""
    widths = spec.feed_forward
    shape = ExpertShape(1, spec.hidden_size, widths.intermediate, widths.activation, has_bias=widths.expert_bias)
    return ReferenceExperts(shape, HOST, dtype)


def _copy_expert(whole: ReferenceExperts, layer: nn.Module, place: int) -> None:
    """Make `whole` expert number `place` of those that `layer` holds, of which it takes its part."""
    weights, parts = Weights(layer, torch.float32), parts_of(layer)
    by_purpose = {
        GATE_UP: whole.gate_up_EJH,
        DOWN: whole.down_EHI,
        GATE_UP + "_bias": whole.gate_up_bias_EJ,
        DOWN + "_bias": whole.down_bias_EH,
    }
    for purpose, value in by_purpose.items():
        if value is not None:
            part = parts[purpose]
            weights.stored(purpose)[place] = Part(part.shape[1:], part.ranges[1:]).of(value[0])


class Parameters(Protocol):
    """`spec`: of their model; `further`: whether it has a layer for a further token too. Names are those of patterns:
    "embedding", "layers.3.experts_down"."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def further(self) -> bool: ...

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a parameter, in host memory, as it is kept; None: to its end."""


class Shapes:
    """The parameters of a model that is nowhere: without values."""

    def __init__(self, spec: ModelSpec, *, further: bool = False) -> None:
        self.spec, self.further = spec, further
        layers = with_further(spec) if further else spec
        self._shapes = {each.attribute: each.shape for each in outer_parameters(spec)}
        for layer in range(layers.num_layers):
            parameters = layer_parameters(layers, layer)
            parameters += further_parameters(spec) if layer == spec.num_layers else []
            self._shapes |= {f"layers.{layer}.{each.attribute}": each.shape for each in parameters}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        return torch.empty(self._shapes[name], device=SHAPES_ONLY)[first:last]


def _written(spec: ModelSpec) -> NoCheckpoint:
    """The names that an export writes: the family's first ones, experts in the first layout that is not compressed."""
    layouts = tensor_names(spec).experts
    plain = (each for each in layouts if not (isinstance(each, StackedLayout) and each.kind == "mxfp4"))
    return NoCheckpoint(next(plain).marker())


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor under its published name, as it is kept. `purpose`: the parameter that it is of; empty: of none.
    `in_layer`: and not outside of all layers."""

    name: str
    value: Tensor
    purpose: str = ""
    in_layer: bool = True

    @property
    def may_be_rounded(self) -> bool:
        """Whether servers take it in few bits."""
        return (
            self.in_layer
            and self.value.ndim == 2
            and self.purpose not in ("", NOT_TRAINED, PROJECTION, *_NEVER_ROUNDED)
        )

    @property
    def is_linear(self) -> bool:
        """Whether servers take it for a linear layer's."""
        return self.name.endswith(".weight") and self.value.ndim == 2 and self.purpose != "embedding"


def tensors_of(source: Parameters) -> Iterator[PublishedTensor]:
    """Every tensor of the checkpoint, one at a time."""
    spec, names = source.spec, tensor_names(source.spec)
    written = _written(spec)
    for each in _of_plan(source, "", outer_plan(spec, names)):
        yield replace(each, in_layer=False)
    layers = with_further(spec) if source.further else spec
    for layer in range(layers.num_layers):
        where = f"layers.{layer}."
        yield from _of_plan(source, where, _layer_plan(layers, names, layer, written, spec.num_layers))
        if layers.moe_layers[layer]:
            refs = [expert_refs(layers, names, layer, expert, written) for expert in range(spec.router.num_experts)]
            yield from _of_experts(source, where, refs)
    for name, copied in COPIES.items() if source.further else ():
        kept = "embedding" if name == "head" and spec.tie_embeddings else name
        yield PublishedTensor(names.layer.format(layer=spec.num_layers) + copied, source.read(kept), in_layer=False)


def further_tensors(folder: Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint's layers for further tokens, multiplied out where they are quantised."""
    checkpoint, names = open_checkpoint(folder, spec), tensor_names(spec)
    layer_name = re.compile(re.escape(names.layer).replace(re.escape("{layer}"), r"(\d+)"))
    for name in checkpoint.names:
        found = layer_name.match(name)
        if found is not None and int(found[1]) >= spec.num_layers and not name.endswith(SCALE_SUFFIXES):
            yield name, checkpoint.read(name)
            checkpoint.release(name)


def _of_plan(source: Parameters, where: str, plan: LoadPlan) -> Iterator[PublishedTensor]:
    for purpose, refs in plan.items():
        first, last = 0, 0
        for ref in refs:
            first, last = last, last + ref.shape[0]
            part = source.read(where + attribute_of(purpose), first, last)
            in_one_row = purpose == NOT_TRAINED and tensor_names(source.spec).score_bias_in_one_row
            yield PublishedTensor(ref.name, part.unsqueeze(0) if in_one_row else part, purpose)


def _of_experts(source: Parameters, where: str, refs: list[ExpertRefs]) -> Iterator[PublishedTensor]:
    if refs[0].layout == "separate":
        for expert, ref in enumerate(refs):
            gate_JH, up_JH = source.read(where + attribute_of(GATE_UP), expert, expert + 1)[0].chunk(2)
            yield PublishedTensor(ref.gate_up[0].name, gate_JH, GATE_UP)
            yield PublishedTensor(ref.gate_up[1].name, up_JH, GATE_UP)
            yield PublishedTensor(ref.down.name, source.read(where + attribute_of(DOWN), expert, expert + 1)[0], DOWN)
        return
    yield from _stacked_experts(source, where, refs)


def _stacked_experts(source: Parameters, where: str, refs: list[ExpertRefs]) -> Iterator[PublishedTensor]:
    """The same of families that publish all experts of a layer in one tensor. Holds one projection at a time, if what
    is yielded is let go."""
    layout, width = refs[0].layout, source.spec.feed_forward.intermediate
    value = source.read(where + attribute_of(GATE_UP))
    if layout == "rows":
        yield PublishedTensor(refs[0].gate_up[0].name, value[:, :width].flatten(0, 1))
        yield PublishedTensor(refs[0].gate_up[1].name, value[:, width:].flatten(0, 1))
    else:
        yield PublishedTensor(refs[0].gate_up[0].name, _in_turns(value).mT if layout == "columns" else value)
    del value
    value = source.read(where + attribute_of(DOWN))
    if layout == "rows":
        yield PublishedTensor(refs[0].down.name, value.mT.flatten(0, 1))
    else:
        yield PublishedTensor(refs[0].down.name, value.mT if layout == "columns" else value)
    if layout == "columns" and refs[0].down_bias is not None:
        yield PublishedTensor(refs[0].biases[0].name, _in_turns(source.read(where + attribute_of(GATE_UP + "_bias"))))
        yield PublishedTensor(refs[0].down_bias.name, source.read(where + attribute_of(DOWN + "_bias")))


def _in_turns(stacked_EJ: Tensor) -> Tensor:
    """Gate's rows above up's, as rows of gate and up in turns."""
    return torch.stack(stacked_EJ.chunk(2, dim=1), dim=2).flatten(1, 2)


def export(
    source: Parameters,
    folder: Path,
    config: Mapping[str, Any],
    beside: Mapping[str, Path],
    dtype: torch.dtype,
    report: Callable[[float, float], None] = lambda done, total: None,
    begun_with: Path | None = None,
) -> int:
    """Write weights as `dtype`, `config.json`, and copies of the files `beside`, by name; returns bytes. Holds
    a file's tensors at a time, and what is read for one of them. `dtype` float8_e4m3fn: matrices in blocks of 128 x 128
    with a scale each, all else in bfloat16; `UserError` where a family has none that stand alone. `begun_with`: the
    checkpoint whose layers for further tokens are copied; None: there are none.

    `UserError` if `folder` holds a model already: nothing is overwritten. `report`: bytes done, bytes in all."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := [*folder.glob("*.safetensors*"), *folder.glob("config.json")]:
        raise UserError(f"{folder} holds {found[0].name} already: name a new folder, or remove what is there")
    _check_rounding(source.spec, dtype)

    wide_layers, kept_wide = set[str](), tuple(name.rpartition(".")[2] for name in tensor_names(source.spec).score_bias)

    def tensors(source: Parameters) -> Iterator[tuple[str, Tensor]]:
        further = () if begun_with is None else further_tensors(begun_with, source.spec)
        for each in chain(tensors_of(source), (PublishedTensor(name, value) for name, value in further)):
            if each.is_linear and not each.may_be_rounded:
                wide_layers.add(each.name.removesuffix(".weight"))
            yield from _written_as(each, dtype, kept_wide)
            del each  # else it is held while the next one is read

    sizes = {name: tensor.nbytes for name, tensor in tensors(Shapes(source.spec, further=source.further))}
    shard_of, files = _shards(sizes)
    total, left = sum(sizes.values()), Counter(shard_of.values())
    done, shard = 0, dict[str, Tensor]()
    for name, tensor in tensors(source):
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        del tensor
        done += sizes[name]
        report(done, total)
        left[shard_of[name]] -= 1
        if not left[shard_of[name]]:
            save_whole(shard, folder / shard_of[name], {"format": "pt"})
            shard = {}
    assert not shard, f"{len(shard)} tensors were not written"
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        _write_json(folder / INDEX_NAME, index)
    for name, file in beside.items():
        shutil.copyfile(file, folder / name)
    written = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    if begun_with is None and not source.further and written.get(FURTHER_LAYERS):
        written[FURTHER_LAYERS] = 0
    if dtype == FLOAT8:
        written["quantization_config"] = {**_FLOAT8_CONFIG, "modules_to_not_convert": sorted(wide_layers)}
    plain = torch.bfloat16 if dtype == FLOAT8 else dtype
    _write_json(folder / "config.json", {**written, "dtype": str(plain).removeprefix("torch.")})
    for name in files:
        shutil.copymode(folder / "config.json", folder / name)  # safetensors writes for the owner alone
    return total


def files_beside(tokenizer: Path, model: Path) -> dict[str, Path]:
    """What an export holds beside weights and configuration, by the names that it gives them: the files of `tokenizer`,
    a folder or a file of any name, and how the `model` generates."""
    generation = (model if model.is_dir() else model.parent) / _GENERATION
    own = {_GENERATION: generation} if generation.is_file() else {}
    if not tokenizer.exists():
        _log.warning("%s is not there: the export has no tokenizer, put its files beside config.json", tokenizer)
        return own
    others = sorted((tokenizer if tokenizer.is_dir() else tokenizer.parent).iterdir())
    found = [each for each in others if each.name.startswith(_OF_TOKENIZERS) and each.suffix != ".py"]
    named = {each.name: each for each in found if each.is_file()}
    return named | ({} if tokenizer.is_dir() else {"tokenizer.json": tokenizer}) | own


def _check_rounding(spec: ModelSpec, dtype: torch.dtype) -> None:
    layout = expert_refs(spec, tensor_names(spec), spec.moe_layers.index(True), 0, _written(spec)).layout
    if dtype == FLOAT8 and layout != "separate":
        raise UserError(
            f"--dtype fp8: {spec.family} stores all experts of a layer in one tensor, which has no blocks: export in "
            "bfloat16, and let antiphon serve round it (--weights)"
        )


def _written_as(each: PublishedTensor, dtype: torch.dtype, wide: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for it in a file. `wide`: how names of those end that stay in float32."""
    if dtype == FLOAT8 and each.may_be_rounded:
        codes, scales = float8_blocks(each.value)
        yield each.name, codes
        yield each.name + SCALE_SUFFIXES[0], scales
        return
    plain = torch.bfloat16 if dtype == FLOAT8 else dtype
    yield each.name, each.value.to(torch.promote_types(plain, torch.float32) if each.name.endswith(wide) else plain)


def _shards(sizes: Mapping[str, int]) -> tuple[dict[str, str], list[str]]:
    """The file of each tensor, in order, and all files."""
    numbers, current, filled = {}, 0, 0
    for name, size in sizes.items():
        if filled and filled + size > SHARD_BYTES:
            current, filled = current + 1, 0
        numbers[name], filled = current, filled + size
    total = current + 1
    files = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    if total == 1:
        files = ["model.safetensors"]
    return {name: files[number] for name, number in numbers.items()}, files


def _write_json(file: Path, value: object) -> None:
    replace_text(file, json.dumps(value, indent=2) + "\n")
