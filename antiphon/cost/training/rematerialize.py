"""Activations of one MoE layer, which of them backward needs, and which are thrown away and made again so that it fits.

Tensor by tensor (MegaScale-MoE, Figure 9):

1. Sizes are in elements per tokens * hidden / n, the share of one rank of a model-parallel group of n: `width`.
2. "All" adds up to 2n + 2k + 3kf + 12 + 5/m, what MegaScale-MoE keeps to 2kf + 4 + 2/m (m query heads per key/value
   head, f = expert width / hidden).
3. Many of "all" no backward operator reads (sums, rotated copies, what was gathered before a scatter): a framework that
   frees them holds `needed`, and that is what rematerialization really saves.
4. With all-to-all dispatch nothing is gathered: k rows stand where all-gather has n.

The figure's colours are not in the text: which tensors are kept is inferred from the sum, which leaves one choice
(attention's output before or after its all-to-all has the same size; before is what attention's backward reads).
Rejected: one coefficient per strategy. It cannot say what a tensor costs to make again.

What is made again, with bytes, time and re-communication:

1. An option names tensors that backward needs and how they are made again from what stays: a norm, an all-to-all, a
   norm with the dispatch and the scatter, the activation, or the products themselves.
2. MegaScale-MoE (section 4.1) makes the cheap ones again: norms, activation, exchanges; never attention, never
   products. The options of this kind are its choice; products and the whole layer are for machines with less memory.
3. `choose` takes options in the order of seconds per byte saved until the target is met, by candidate. Under overlap
   only the fraction of communication and of memory traffic that cannot be hidden counts as seconds.
4. An option that builds on another one (products from rows that are made again) comes after it.

How much a device must make again (`fit_memory`):

1. Without rematerialization the fullest device holds all that backward reads, for each micro-batch in flight; the
   last stage holds one micro-batch and the logits, the first one as many as there are stages.
2. What is missing, spread over the layers and micro-batches in flight, is what each layer must save; one layer's
   worth stays, for its tensors are whole while its backward runs.

Rejected: full recomputation or none, the usual switch. The cheap options save most of the memory at next to no time,
and with memory to spare making things again costs time for nothing.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.roofline import FloatArray, Number, Parts
from antiphon.cost.training.memory import (
    StageLayers,
    TrainingMemory,
    layers_in_flight,
    logits_bytes,
    rank_parameters,
    state_bytes,
)
from antiphon.cost.training.operators import LayerOperators, layer_operators
from antiphon.cost.training.setup import Dispatch, LayerCase, LayerSizes, Training
from antiphon.specs.model import ModelSpec

CHEAP = ("ln1_out", "attn_a2a", "ln2_out", "ffn_in", "fc2_in")  # MegaScale-MoE's choice
Rematerialize = Literal["none", "cheap", "fit"]


@dataclass(frozen=True, kw_only=True)
class SavedActivation:
    """One tensor. `kept`: by MegaScale-MoE's rematerialization; `needed`: some backward operator reads it."""

    name: str
    width: Number
    kept: bool = False
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The ratios that decide a layer's activations. `sent`: copies of a token in an all-to-all (k, or less). `query`,
    `value`: widths of all heads' queries and of attention's output over hidden (1 in all of the paper's models)."""

    degree: Number
    top_k: Number
    width_ratio: Number
    heads_per_kv_head: Number
    sent: Number
    query: Number = 1.0
    value: Number = 1.0

    @staticmethod
    def of(model: ModelSpec, degree: Number, copies: Number | None = None) -> "LayerShape":
        """The shape of `model`'s MoE layers on `degree` ranks. Latent attention counts as m = 1: expanded, every
        head has keys and values of its own."""
        attention = model.attention
        latent = attention.latent
        heads_per_kv_head = 1.0 if latent is not None else attention.num_heads / attention.num_kv_heads
        value_dim = attention.head_dim if latent is None else latent.v_head_dim
        return LayerShape(
            degree=degree,
            top_k=model.router.top_k,
            width_ratio=model.feed_forward.intermediate / model.hidden_size,
            heads_per_kv_head=heads_per_kv_head,
            sent=model.router.top_k if copies is None else copies,
            query=attention.num_heads * attention.head_dim / model.hidden_size,
            value=attention.num_heads * value_dim / model.hidden_size,
        )


def layer_activations(
    shape: LayerShape, dispatch: Dispatch = "all_gather", *, gate_after_down: bool = False
) -> tuple[SavedActivation, ...]:
    """Figure 9's tensors in order. `gate_after_down`: the router's weight multiplies after the down projection (section
    7, for FP8) and not before it (section 4.1), so that its gradient needs the down projection's output."""
    k, f, m = shape.top_k, shape.width_ratio, np.asarray(shape.heads_per_kv_head, dtype=np.float64)
    query = shape.query
    around = shape.degree if dispatch == "all_gather" else shape.sent
    return (
        SavedActivation(name="hidden", width=1.0, kept=True, needed=True),
        SavedActivation(name="ln1_out", width=1.0, needed=True),
        SavedActivation(name="qkv", width=query * (1 + 2 / m)),
        SavedActivation(name="q_rope", width=query),
        SavedActivation(name="k_rope", width=query / m),
        SavedActivation(name="qkv_a2a", width=query * (1 + 2 / m), kept=True, needed=True),
        SavedActivation(name="attn", width=shape.value, kept=True, needed=True),
        SavedActivation(name="attn_a2a", width=shape.value, needed=True),
        SavedActivation(name="attn_out", width=1.0),
        SavedActivation(name="ln2_in", width=1.0, kept=True, needed=True),
        SavedActivation(name="ln2_out", width=1.0, needed=True),
        SavedActivation(name="ln2_out_ag", width=around),
        SavedActivation(name="ffn_in", width=k, needed=True),
        SavedActivation(name="fc1_out", width=k * f, kept=True, needed=True),
        SavedActivation(name="fc3_out", width=k * f, kept=True, needed=True),
        SavedActivation(name="fc2_in", width=k * f, needed=True),
        SavedActivation(name="fc2_out", width=k, kept=gate_after_down, needed=gate_after_down),
        SavedActivation(name="fc2_out_rs", width=around),
        SavedActivation(name="ffn_out", width=1.0),
        SavedActivation(name="hidden_next", width=1.0),
    )


def total_width(activations: tuple[SavedActivation, ...], which: Literal["all", "needed", "kept"] = "all") -> Number:
    """Sum of the widths of all tensors, of those a backward operator reads, or of those that are kept."""
    total: Number = 0.0
    for activation in activations:
        if which == "all" or (activation.needed if which == "needed" else activation.kept):
            total = total + activation.width
    return total


@dataclass(frozen=True, kw_only=True)
class Option:
    """One thing to make again, in one layer. `after`: options this one builds on, whose tensors are gone when it is
    chosen."""

    name: str
    saved_bytes: Number
    computation: Parts = field(default_factory=Parts)
    communication: Parts = field(default_factory=Parts)
    after: tuple[str, ...] = ()


def options(case: LayerCase, operators: LayerOperators) -> tuple[Option, ...]:
    """All options of one MoE layer on one rank, cheap ones first."""
    unit = case.rows * case.model.hidden_size * case.setup.precision.row_bytes
    width = {item.name: item.width for item in activations_of(case)}
    width["fc1_out+fc3_out"] = width["fc1_out"] + width["fc3_out"]
    kernels, products = operators.kernels, operators.products
    norm, scatter = 2 / 9 * kernels["norms"].forward, 0.5 * kernels["permute"].forward
    sent = operators.communications

    def option(name: str, computation: Parts = Parts(), communication: Parts = Parts(), *after: str) -> Option:
        return Option(
            name=name, saved_bytes=width[name] * unit, computation=computation, communication=communication, after=after
        )

    found = (
        option("ln1_out", norm),
        option("attn_a2a", Parts(), sent["after_attention"]),
        option("ln2_out", norm),
        option("ffn_in", scatter, sent["dispatch"]),
        option("fc2_in", kernels["activation"].forward),
        option("qkv_a2a", products["qkv"].forward + kernels["rope"].forward, sent["before_attention"], "ln1_out"),
        option("fc1_out+fc3_out", products["experts_in"].forward, Parts(), "ffn_in", "fc2_in"),
        option("attn", kernels["scores"].forward, Parts(), "qkv_a2a"),
    )
    return tuple(each for each in found if each.name != "attn_a2a" or case.setup.attention == "sequence")


def activations_of(case: LayerSizes) -> tuple[SavedActivation, ...]:
    """The layer's tensors under this setup, as one rank holds them. Tensor-parallel experts hold n times as many rows,
    of 1/n of the width: so only the rows at full width weigh more. Attention's output has a second copy only where it
    is exchanged."""
    setup = case.setup
    shape = LayerShape.of(case.model, setup.model_parallel, case.copies)
    by_all_to_all = setup.experts == "expert" and setup.dispatch == "all_to_all"
    found = layer_activations(
        shape, "all_to_all" if by_all_to_all else "all_gather", gate_after_down=setup.gate_after_down
    )
    wider: dict[str, Number] = {}
    if setup.experts == "tensor":
        wider = {"ffn_in": shape.top_k * shape.degree, "fc2_out": shape.top_k * shape.degree}
    exchanged = 0.0 if setup.attention == "tensor" else shape.value
    wider["attn_a2a"] = np.where(np.asarray(shape.degree) > 1, exchanged, 0.0)
    return tuple(replace(item, width=wider.get(item.name, item.width)) for item in found)


def needed_bytes(case: LayerSizes) -> Number:
    """What one layer holds for its backward pass if nothing is made again. A shared expert or dense feed-forward keeps
    its input with the layer's and adds its two products and the activation (3 widths)."""
    unit = case.rows * case.model.hidden_size * case.setup.precision.row_bytes
    shared = 3 * case.model.feed_forward.shared_intermediate / case.model.hidden_size
    return (total_width(activations_of(case), "needed") + shared) * unit


def dense_bytes(case: LayerSizes) -> Number:
    """What a layer without experts holds: attention's tensors, the norms, and the feed-forward's three widths."""
    unit = case.rows * case.model.hidden_size * case.setup.precision.row_bytes
    attention = tuple(item for item in activations_of(case) if not item.name.startswith(("ffn", "fc")))
    dense = 3 * case.model.feed_forward.dense_intermediate / case.model.hidden_size
    return (total_width(attention, "needed") + dense) * unit


def seconds(option: Option, *, overlaps: bool, overlap: float) -> Number:
    """What an option costs in backward: of its communication and memory traffic what overlap cannot hide, all else."""
    computation, communication = option.computation, option.communication
    hideable_s = communication.total_s + computation.memory_s
    return computation.total_s + communication.total_s - (overlap * hideable_s if overlaps else 0.0)


@dataclass(frozen=True, kw_only=True)
class Rematerialized:
    """By candidate: options taken (`taken[option, candidate]`), bytes saved in one layer, computation and communication
    that its backward repeats."""

    names: tuple[str, ...]
    taken: NDArray[np.bool_]
    saved_bytes: FloatArray
    computation: Parts
    communication: Parts

    def chosen(self, index: int) -> tuple[str, ...]:
        """Names of what candidate `index` makes again."""
        return tuple(name for name, taken in zip(self.names, self.taken[:, index], strict=True) if taken)


def choose(
    available: tuple[Option, ...],
    target_bytes: Number,
    *,
    overlaps: bool,
    overlap: float,
    at_least: tuple[str, ...] = (),
) -> Rematerialized:
    """Options in the order of seconds per byte until `target_bytes` of one layer are saved, or all of them.

    `at_least`: options that are taken in any case, such as `CHEAP`."""
    shape = np.broadcast_shapes(np.shape(target_bytes), (1,), *(np.shape(option.saved_bytes) for option in available))
    target = np.broadcast_to(np.asarray(target_bytes, dtype=np.float64), shape)
    saved = np.stack([np.broadcast_to(np.asarray(option.saved_bytes, dtype=np.float64), shape) for option in available])
    cost = np.stack(
        [np.broadcast_to(seconds(option, overlaps=overlaps, overlap=overlap), shape) for option in available]
    )
    taken = np.zeros(saved.shape, dtype=np.bool_)
    names = [option.name for option in available]
    for index, option in enumerate(available):
        taken[index] = option.name in at_least
    for _ in available:
        open_options = ~taken & (saved > 0)
        for index, option in enumerate(available):
            for other in option.after:
                open_options[index] &= taken[names.index(other)]
        price = np.where(open_options, cost / np.maximum(saved, 1e-30), np.inf)
        best = np.argmin(price, axis=0)
        short = (np.sum(saved * taken, axis=0) < target) & np.isfinite(np.min(price, axis=0))
        for index in range(len(available)):
            taken[index] |= short & (best == index)
    shares = list(zip(available, taken.astype(np.float64), strict=True))
    return Rematerialized(
        names=tuple(names),
        taken=taken,
        saved_bytes=np.sum(saved * taken, axis=0),
        computation=sum((share * option.computation for option, share in shares), Parts()),
        communication=sum((share * option.communication for option, share in shares), Parts()),
    )


def fit_memory(
    training: Training, case: LayerCase, layers: StageLayers, num_micro_batches: Number, rematerialize: Rematerialize
) -> tuple[Rematerialized, TrainingMemory]:
    setup = case.setup
    weights, gradients, optimizer = state_bytes(rank_parameters(training.model, setup, layers), setup)
    held = layers_in_flight(1.0, setup.pipeline, setup.virtual_stages, num_micro_batches)
    moe, dense = needed_bytes(case), dense_bytes(case)
    unit = case.rows * case.model.hidden_size * setup.precision.row_bytes
    made = total_width(activations_of(case)) * unit
    logits = logits_bytes(training.model, setup, training.sequence_length)
    budget = training.usable_bytes - weights - gradients - optimizer - (made - moe)
    target: Number = 0.0
    if rematerialize == "fit":
        in_layers = held * layers.num_moe
        first = (in_layers * moe + held * layers.num_dense * dense - budget) / np.maximum(in_layers - 1, 1)
        last = (layers.num_moe * moe + layers.num_dense * dense + logits - budget) / np.maximum(layers.num_moe - 1, 1)
        only = (in_layers * moe + held * layers.num_dense * dense + logits - budget) / np.maximum(in_layers - 1, 1)
        target = np.where(np.asarray(setup.pipeline) == 1, only, np.maximum(first, last))
    efficiency = training.cluster.efficiency
    choice = choose(
        options(case, layer_operators(case)),
        target,
        overlaps=setup.overlap != "none",
        overlap=efficiency.overlap,
        at_least=CHEAP if rematerialize == "cheap" else (),
    )
    kept = moe - choice.saved_bytes
    one = layers.num_moe * kept + layers.num_dense * dense
    alone = np.asarray(setup.pipeline) == 1
    activations: FloatArray = np.where(alone, held * one + logits, np.maximum(held * one, one + logits))
    memory = TrainingMemory(
        parameters=weights, gradients=gradients, optimizer=optimizer, activations=activations, workspace=made - kept
    )
    return choice, memory
