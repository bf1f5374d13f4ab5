"""A checkpoint folder in few bits, in the form of compressed-tensors, which vLLM and transformers read.

1. Shard by shard: a tensor is read, rounded (`models/rounding`) and put into the shard of the same name. No more than
   one shard is held, in few bits.
2. A shard appears whole or not at all, with what was asked for, the digests of its source and of itself, and its errors
   in its header. So a run that was stopped goes on where it was: shards that were made the same way from the same
   weights, and are as they were written, are kept. One run at a time writes a folder, which the kernel's lock on it
   ensures.
3. The index, `config.json` with its `quantization_config`, and the tokenizer's files come last.
4. What rounding costs, in one number: the loss on a text before and after (`text_loss`).

Router, embedding, head, norms and the up projection of latent attention stay as they are. Rejected: a file format of
our own; a folder that only one program reads is of use to few.
"""

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from antiphon.base.errors import CheckpointError, ResourceError, UserError, why_unwritten
from antiphon.base.system import one_writer, replace_text
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.quantized import QuantizedWeight
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import make_attention_batch
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.checkpoint_folder import INDEX_NAME, open_regular
from antiphon.models.config import config_file, load_model_spec, read_config
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.gguf.container import SUFFIX as GGUF_SUFFIX
from antiphon.models.load import load_attention_half, load_expert_half, open_checkpoint
from antiphon.models.packed import SCALE_SUFFIXES
from antiphon.models.rounding import RoundedFormat, WeightRounding, format_of, rounded
from antiphon.models.tensor_names import GatedNames
from antiphon.models.tensors import attention_layer_plan, expert_refs
from antiphon.models.weights import PLAIN_PURPOSES
from antiphon.specs.model import ModelSpec

Report = Callable[[float, float | None], None]
_KEPT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
_MADE_BY, _MADE_FROM, _ERRORS, _WRITTEN = "antiphon.quantize", "source", "errors", "written"
_PARTIAL = ".partial"
_PIECE_BYTES = 1 << 20
_BLOCK_SIZE = 16
_WINDOW = 512  # tokens that see each other


@dataclass
class RoundedError:
    """Squares summed over the matrices of one kind and layer: of their errors, and of their numbers."""

    error: float = 0.0
    total: float = 0.0

    @property
    def relative(self) -> float:
        """The root of the mean squared error, as a fraction of the root of the mean square."""
        return (self.error / self.total) ** 0.5 if self.total else 0.0


Kinds = dict[str, tuple[int, str, RoundedFormat]]  # by tensor: layer, kind, format
Errors = dict[tuple[int, str], RoundedError]  # by layer and "experts" or "dense"
Squares = dict[str, tuple[float, float]]  # the same of one file: of errors, and of numbers


def write_quantized(model: Path, out: Path, wanted: WeightRounding, report: Report) -> Errors:
    """Write the folder `out`; returns the errors of every layer. `UserError` if `out` holds something else, another run
    writes it, or it cannot be written."""
    if config_file(model).suffix == GGUF_SUFFIX:
        raise UserError(f"{model} is a GGUF file: give the folder in Hugging Face format that it was made from")
    spec = load_model_spec(model)
    checkpoint = open_checkpoint(model, spec)
    if packed := next((name for name in checkpoint.names if checkpoint.is_packed(name)), None):
        raise UserError(f"{model} is in few bits already ({packed}): give the model in bfloat16, float16 or float8")
    kinds = _kinds(spec, checkpoint, wanted)
    shards: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.names:
        shards[checkpoint.file_of(name)].append(name)
    errors: Errors = defaultdict(RoundedError)
    weight_map: dict[str, str] = {}
    with writing(out, "; the same command goes on from here"):
        present = {path.name for path in out.glob("*.safetensors")}
        foreign = sorted(present - shards.keys()) or [
            name for name in ("config.json",) if not present and (out / name).exists()
        ]
        if foreign or out.resolve() == Path(model).resolve():
            raise UserError(f"{out} holds {foreign[0] if foreign else 'the model itself'}: give another folder")
        for number, (file, names) in enumerate(sorted(shards.items())):
            written, squares = _write_shard(checkpoint, names, kinds, out / file, wanted)
            for key, (error, total) in squares.items():
                layer, kind = key.split(" ")
                errors[int(layer), kind].error += error
                errors[int(layer), kind].total += total
            weight_map |= dict.fromkeys(written, file)
            report(number + 1, len(shards))
        _write_rest(Path(model), out, spec, kinds, wanted, weight_map)
    return dict(errors)


@contextmanager
def writing(folder: Path, advice: str) -> Iterator[None]:
    """Makes `folder`; within it no other run writes there, and what the system refuses to write is a `ResourceError`
    that ends with `advice`."""

    def refused(reason: str) -> ResourceError:
        why = why_unwritten(reason)
        return ResourceError(f"{folder} cannot be written ({why}): make room, or give another folder{advice}")

    try:
        with one_writer(folder, "another run writes it: wait for it, or give another folder"):
            try:
                yield
            finally:
                shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
    except SafetensorError as error:
        raise refused(str(error)) from error
    except OSError as error:
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(folder):
            raise  # of what is read
        raise refused(error.strerror or str(error)) from error


def _kinds(spec: ModelSpec, checkpoint: Checkpoint, wanted: WeightRounding) -> Kinds:
    """The matrices that are rounded: layer, "experts" or "dense", and format. `UserError` where that cannot be."""
    names = checkpoint.family_names(spec.family)
    found: Kinds = {}
    for layer, routes in enumerate(spec.moe_layers):
        if wanted.dense is not None:
            for purpose, refs in attention_layer_plan(spec, names, layer, checkpoint).items():
                if purpose not in PLAIN_PURPOSES and all(len(ref.shape) == 2 and ref.shape[0] > 1 for ref in refs):
                    found |= dict.fromkeys((ref.name for ref in refs), (layer, "dense", wanted.dense))
        if not routes or wanted.experts is None:
            continue
        if not isinstance(names.experts[0], GatedNames) or _are_stacked(spec, checkpoint, layer):
            raise UserError(
                f"{checkpoint.folder} stores all experts of a layer in one tensor, which compressed-tensors cannot "
                f"hold: antiphon serve --weights {wanted.experts} rounds them at load"
            )
        for expert in range(spec.router.num_experts):
            refs = expert_refs(spec, names, layer, expert, checkpoint).refs
            found |= dict.fromkeys((ref.name for ref in refs), (layer, "experts", wanted.experts))
    for name, (_, kind, form) in found.items():
        group = 32 if form == "mxfp4" else wanted.group
        columns = checkpoint.shape(name)[1]
        if columns % group:
            option = f"--{kind} {form}" if form == "mxfp4" else f"--group {group}"
            raise UserError(f"{option}: {name} has {columns} columns, which groups of {group} do not divide")
    return found


def _are_stacked(spec: ModelSpec, checkpoint: Checkpoint, layer: int) -> bool:
    refs = expert_refs(spec, checkpoint.family_names(spec.family), layer, 0, checkpoint)
    return refs.down.rows is not None


def _write_shard(
    checkpoint: Checkpoint,
    names: list[str],
    kinds: Kinds,
    file: Path,
    wanted: WeightRounding,
) -> tuple[list[str], Squares]:
    """The names of the tensors in the file, which is written unless an earlier run did; errors by layer and kind."""
    made = {_MADE_BY: json.dumps(asdict(wanted), sort_keys=True), _MADE_FROM: _digest(checkpoint.folder / file.name)}
    if file.exists():
        return _kept_shard(file, made)
    tensors: dict[str, Tensor] = {}
    errors: Squares = {}
    for name in names:
        if any(name.removesuffix(suffix) in checkpoint for suffix in SCALE_SUFFIXES if name.endswith(suffix)):
            continue  # of a matrix in float8, which is multiplied out
        source = checkpoint.read(name, dequantize_to=torch.bfloat16)
        if name not in kinds:
            tensors[name] = source
            continue
        layer, kind, form = kinds[name]
        weight = rounded(source, format_of(form, wanted.group, source.dtype))
        error, total = _squares(source, weight)
        before = errors.get(f"{layer} {kind}", (0.0, 0.0))
        errors[f"{layer} {kind}"] = before[0] + error, before[1] + total
        tensors |= {name + suffix: part for suffix, part in packed_parts(weight)}
        checkpoint.release(name)
    made |= {_ERRORS: json.dumps(errors)}
    save_whole(tensors, file, {"format": "pt", **made, _WRITTEN: _digest_of(tensors.items(), made[_ERRORS])})
    for name in names:  # what stays in floats was read where it lies
        checkpoint.release(name)
    return list(tensors), errors


def save_whole(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a shard that appears whole or not at all. What is not whole, and the library's own temporary file, lie in a
    folder beside it, which `writing` removes, after a kill too."""
    partial = file.parent / _PARTIAL / file.name
    partial.parent.mkdir(exist_ok=True)
    save_file(tensors, partial, metadata)
    partial.chmod(0o644)  # the library lets no one else read
    partial.replace(file)


def _kept_shard(file: Path, made: dict[str, str]) -> tuple[list[str], Squares]:
    """The shard that an earlier run wrote. `UserError` unless it was made as `made` says, and is as it was written."""
    fix = f"remove the folder {file.parent}, or give another"
    try:
        with safe_open(file, "pt") as known:
            header, stored = known.metadata() or {}, list(known.keys())
            if header.get(_MADE_BY) != made[_MADE_BY]:
                raise UserError(
                    f"{file} was made otherwise ({header.get(_MADE_BY, 'not by antiphon quantize')}): {fix}"
                )
            if header.get(_MADE_FROM) != made[_MADE_FROM]:
                raise UserError(f"{file} was made from other weights than the model has now: {fix}")
            parts = ((name, known.get_tensor(name)) for name in stored)
            if header.get(_WRITTEN) != _digest_of(parts, header.get(_ERRORS, "")):
                raise UserError(f"{file} is damaged (it is not what was written): remove it, or give another folder")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it, or give another folder") from error
    return stored, json.loads(header[_ERRORS])


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as source:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _digest_of(tensors: Iterable[tuple[str, Tensor]], errors: str) -> str:
    """The digest of a shard's tensors, in any order, and of its errors."""
    parts = []
    for name, tensor in tensors:
        about, bits = f"{name} {tensor.dtype} {list(tensor.shape)} ", tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(about + hashlib.sha256(bits.numpy().data).hexdigest())
    return hashlib.sha256("\n".join([*sorted(parts), errors]).encode()).hexdigest()


def _squares(source: Tensor, weight: QuantizedWeight) -> tuple[float, float]:
    wide = source.float()
    if not bool(torch.isfinite(wide.sum())):
        raise CheckpointError("a matrix holds NaN or infinity: the weights are damaged, download them again")
    return float((weight.dequantize() - wide).square().sum()), float(wide.square().sum())


def packed_parts(weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a symmetric matrix, by what stands behind its name (`models/packed`)."""
    if weight.format.codes == "mxfp4":
        yield "_packed", weight.codes.contiguous()
        yield "_scale", weight.scales.contiguous().view(torch.uint8)
        return
    codes = weight.codes if weight.format.codes == "int4" else weight.codes.view(torch.uint8) ^ 0x80
    yield "_packed", torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)
    yield "_scale", weight.scales.contiguous()
    yield "_shape", torch.tensor(weight.shape)


def _write_rest(
    model: Path,
    out: Path,
    spec: ModelSpec,
    kinds: Kinds,
    wanted: WeightRounding,
    weight_map: dict[str, str],
) -> None:
    for pattern in _KEPT_FILES:
        for source in model.glob(pattern):
            if source.is_file() and not source.name.endswith(".index.json") and source.name != "config.json":
                target = out / source.relative_to(model)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
    total = sum((out / file).stat().st_size for file in set(weight_map.values()))
    if len(set(weight_map.values())) > 1 or "model.safetensors" not in weight_map.values():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_text(out / INDEX_NAME, json.dumps(index, indent=1) + "\n")
    config = read_config(model)
    config.pop("compression_config", None)
    dtype = config.get("dtype") or config.get("torch_dtype") or spec.dtype
    config |= {"dtype": dtype, "quantization_config": quantization_config(kinds, wanted, weight_map)}
    replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def quantization_config(kinds: Kinds, wanted: WeightRounding, weight_map: dict[str, str]) -> dict[str, Any]:
    """What compressed-tensors wants to know: which modules are in which format, and which linear ones are in none.

    transformers takes the first group that names `experts` for the routed ones, and the first that does not for all
    other matrices: so routed experts come first, and shared ones have a group of their own."""
    targets: dict[tuple[bool, bool, RoundedFormat], set[str]] = defaultdict(set)
    for name, (_, kind, form) in kinds.items():
        parts = (r"\d+" if part.isdigit() else re.escape(part) for part in name.removesuffix(".weight").split("."))
        is_dense = kind == "dense"
        targets[is_dense, is_dense and "experts" in name, form].add("re:" + r"\.".join(parts) + "$")
    groups = {
        f"group_{number}": {
            "targets": sorted(modules),
            "weights": _scheme(form, wanted.group),
            "input_activations": None,
            "output_activations": None,
            "format": _form(form),
        }
        for number, ((*_, form), modules) in enumerate(sorted(targets.items()))
    }
    forms = {group["format"] for group in groups.values()}
    plain = [name.removesuffix(".weight") for name in weight_map if name.endswith(".weight")]
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted(name for name in plain if name == "lm_head" or "norm" not in name.rpartition(".")[2]),
        "config_groups": groups,
    }


def _form(form: RoundedFormat) -> str:
    return "mxfp4-pack-quantized" if form == "mxfp4" else "pack-quantized"


def _scheme(form: RoundedFormat, group: int) -> dict[str, Any]:
    kind, bits, size = ("float", 4, 32) if form == "mxfp4" else ("int", 8 if form == "int8" else 4, group)
    scheme: dict[str, Any] = {
        **{"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": size},
        **{"dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None},
    }
    return scheme | ({"scale_dtype": "torch.uint8", "zp_dtype": None} if form == "mxfp4" else {})


def text_loss(model: Path, token_ids: Sequence[int], backend: KernelBackend, report: Callable[[float], None]) -> float:
    """The mean loss of a model on tokens, in nats: each but the first of a window of `_WINDOW` is predicted from those
    before it. Reads the whole model. `report`: the part that is done, up to 1."""
    spec, checkpoint = load_model_spec(model), open_weights(model, "as-stored")
    attention, experts = load_attention_half(checkpoint, spec, backend), load_expert_half(checkpoint, spec, backend)
    width = min(_WINDOW, spec.max_position)
    windows = [list(token_ids[start : start + width]) for start in range(0, len(token_ids), width)]
    windows = [window for window in windows if len(window) > 1]
    total = count = 0.0
    with torch.inference_mode():
        for number, window in enumerate(windows):
            ids = torch.tensor(window, device=backend.device)
            logits = _logits(attention, experts, ids)
            total += float(F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
            count += len(window) - 1
            report((number + 1) / len(windows))
    return total / max(count, 1.0)


def _logits(half: AttentionHalf, experts: ExpertHalf, ids_T: Tensor) -> Tensor:
    num_blocks = -(-len(ids_T) // _BLOCK_SIZE)
    cache = half.new_cache(num_blocks, _BLOCK_SIZE)
    batch = make_attention_batch([len(ids_T)], [len(ids_T)], [list(range(num_blocks))], _BLOCK_SIZE, ids_T.device)
    x_TH, delta_TH = half.embed(ids_T), None
    for layer in half.layers:
        x_TH, y_TH = half.attend(layer, x_TH, delta_TH, cache, batch)
        delta_TH = half.local_feed_forward(layer, y_TH)
        if half.routes(layer):
            ids_TK, weights_TK = half.gate(layer, y_TH)
            routed_TH = experts.forward(layer, y_TH, experts.to_local(layer, ids_TK), weights_TK)
            delta_TH = routed_TH if delta_TH is None else delta_TH.add_(routed_TH)
    return half.head(x_TH, delta_TH)
