"""The parameters of a trainable model: which there are, their first values, and their way from and to checkpoints.

A parameter is what serving calls a purpose (`models/tensors`): several tensors of a checkpoint may be stacked in it.
So a family is described once, and a checkpoint is read and written by one plan.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from antiphon.models.config import tensor_names
from antiphon.models.tensors import LoadPlan, attention_layer_plan, outer_plan
from antiphon.specs.model import ModelSpec

GATE_UP, DOWN = "experts.gate_up", "experts.down"
NOT_TRAINED = "score_bias"  # steers the choice of experts; no gradient reaches it


class NoCheckpoint:
    """Stands where a checkpoint does when there is none: no tensor is stored, so the family's first names are taken."""

    folder = Path()

    def __contains__(self, name: object) -> bool:
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its purpose in the model, its whole shape, and how it begins."""

    purpose: str
    shape: tuple[int, ...]
    begins: str  # "normal", "ones" or "zeros"

    @property
    def attribute(self) -> str:
        """Its name in a module, where a dot would mean a module of its own."""
        return self.purpose.replace(".", "_")


def outer_parameters(spec: ModelSpec) -> list[ParameterSpec]:
    """Embedding, final norm and head."""
    return list(_of_plan(outer_plan(spec, tensor_names(spec))))


def layer_parameters(spec: ModelSpec, layer: int) -> list[ParameterSpec]:
    """All of one layer, its routed experts last."""
    found = list(_of_plan(attention_layer_plan(spec, tensor_names(spec), layer, NoCheckpoint())))
    if spec.moe_layers[layer]:
        experts, hidden, width = spec.router.num_experts, spec.hidden_size, spec.feed_forward.intermediate
        found.append(ParameterSpec(GATE_UP, (experts, 2 * width, hidden), "normal"))
        found.append(ParameterSpec(DOWN, (experts, hidden, width), "normal"))
        if spec.feed_forward.expert_bias:
            found.append(ParameterSpec(GATE_UP + "_bias", (experts, 2 * width), "zeros"))
            found.append(ParameterSpec(DOWN + "_bias", (experts, hidden), "zeros"))
    return found


def _of_plan(plan: LoadPlan) -> Iterator[ParameterSpec]:
    for purpose, refs in plan.items():
        rows = sum(ref.shape[0] for ref in refs)
        shape = (rows, *refs[0].shape[1:])
        if purpose == "kv_up" or len(shape) > 1:
            begins = "normal"
        elif purpose.endswith("norm"):
            begins = "ones"
        else:
            begins = "zeros"
        yield ParameterSpec(purpose, shape, begins)


def register(module: nn.Module, specs: list[ParameterSpec], where: str, seed: int, std: float) -> None:
    """Give `module` these parameters in float32, with first values that depend on seed and name alone."""
    for each in specs:
        value = first_value(each, f"{where}.{each.purpose}", seed, std)
        if each.purpose == NOT_TRAINED:
            module.register_buffer(each.attribute, value)
        else:
            module.register_parameter(each.attribute, nn.Parameter(value))


def first_value(spec: ParameterSpec, name: str, seed: int, std: float) -> Tensor:
    """Normal with `std` for matrices; each expert draws by itself, so that whoever holds it draws the same."""
    if spec.begins != "normal":
        return torch.ones(spec.shape) if spec.begins == "ones" else torch.zeros(spec.shape)
    if not spec.purpose.startswith("experts."):
        return torch.empty(spec.shape).normal_(std=std, generator=_generator(name, seed))
    value = torch.empty(spec.shape)
    for expert in range(spec.shape[0]):
        value[expert].normal_(std=std, generator=_generator(f"{name}.{expert}", seed))
    return value


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class Weights:
    """`weights["qkv"]` is that parameter of `module` as `dtype`; gradients reach the parameter itself."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getitem__(self, purpose: str) -> Tensor:
        return self.stored(purpose).to(self._dtype)

    def stored(self, purpose: str) -> Tensor:
        """As it is kept, in float32 or wider."""
        found = getattr(self._module, purpose.replace(".", "_"))
        assert isinstance(found, Tensor)
        return found

    def optional(self, purpose: str) -> Tensor | None:
        """None where the model has no such part."""
        return self[purpose] if hasattr(self._module, purpose.replace(".", "_")) else None
