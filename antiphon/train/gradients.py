"""Gradients over ranks: summed where ranks hold the same part, one norm of all of them, scaled to a limit.

A loss is a sum over rows, divided by their number in the whole step, so gradients of ranks add up. Each part of a
parameter counts once in the norm, whoever holds copies of it: the classic mistake is to take experts, which differ
between ranks, for copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.mesh import Group
from antiphon.train.model import MoeModel
from antiphon.train.partition import Part
from antiphon.train.weights import attribute_of, parts_of


@dataclass(frozen=True)
class Held:
    """A tensor of the model, its name in the whole model, and what of it is here. `replicas`: the ranks that hold the
    same part."""

    name: str
    tensor: Tensor
    part: Part
    replicas: Group


def held_tensors(model: MoeModel) -> Iterator[Held]:
    """All parameters, and the buffers that are stored with them. A tied embedding is held by two stages."""
    modules: list[tuple[str, nn.Module]] = [("", model)]
    modules += [(f"layers.{layer.layer}.", layer) for layer in model.layers]
    for where, module in modules:
        for purpose, part in parts_of(module).items():
            name, tied = attribute_of(purpose), purpose == "embedding" and model.spec.tie_embeddings
            replicas = model.mesh.ends if tied else model.mesh.replicas(part.axes)
            yield Held(where + name, getattr(module, name), part, replicas)


def sum_gradients(model: MoeModel) -> None:
    """Add up the gradients of ranks that hold the same. A parameter that this rank did not use has zeros."""
    by_group: dict[int, tuple[Group, list[Tensor]]] = {}
    for held in held_tensors(model):
        if held.replicas.size > 1 and isinstance(held.tensor, nn.Parameter):
            by_group.setdefault(id(held.replicas), (held.replicas, []))[1].append(held.tensor)
    for group, parameters in by_group.values():
        flat = torch.cat([_gradient(parameter).flatten() for parameter in parameters])
        summed = run(AllReduce(group, "gradients"), flat)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, torch.split(summed, sizes), strict=True):
            parameter.grad = part.view_as(parameter)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def gradient_norm(model: MoeModel) -> Tensor:
    """The 2-norm of the whole model's gradient, in float32 at least, after `sum_gradients`. Waits for all ranks."""
    squares = [
        torch.linalg.vector_norm(held.tensor.grad, dtype=torch.promote_types(held.tensor.dtype, torch.float32)).square()
        for held in held_tensors(model)
        if held.tensor.grad is not None and held.replicas.index == 0
    ]
    world = model.mesh.world
    if world.size == 1:
        return torch.stack(squares).sum().sqrt()
    mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float32)
    return run(AllReduce(world, "norm"), mine.double().view(1)).sqrt().squeeze(0)


def clip_gradients(model: nn.Module, norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`; 0 means no limit."""
    if not limit:
        return
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
