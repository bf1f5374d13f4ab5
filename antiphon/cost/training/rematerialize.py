"""What to throw away in forward and make again in backward: by tensor, with bytes, FLOPs, and re-communication.

1. An option names tensors that backward needs and how they are made again from what stays: a norm, an all-to-all, a
   norm with the dispatch and the scatter, the activation, or the products themselves.
2. MegaScale-MoE (section 4.1) makes the cheap ones again: norms, activation, exchanges; never attention, never
   products. The options of this kind are its choice; products and the whole layer are for machines with less memory.
3. `choose` takes options in the order of seconds per byte saved until the target is met, by candidate. Under overlap
   only the fraction of communication and of memory traffic that cannot be hidden counts as seconds.
4. An option that builds on another one (products from rows that are made again) comes after it.

Rejected: full recomputation or none, the usual switch. The cheap options save most of the memory at next to no time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.parts import FloatArray, Number, Parts
from antiphon.cost.training.activations import LayerShape, SavedActivation, layer_activations, total_width
from antiphon.cost.training.layer_case import LayerCase, LayerSizes
from antiphon.cost.training.layer_time import Recomputed
from antiphon.cost.training.operators import LayerOperators
from antiphon.specs.counts import count_flops

CHEAP = ("ln1_out", "attn_a2a", "ln2_out", "ffn_in", "fc2_in")  # MegaScale-MoE's choice


@dataclass(frozen=True, kw_only=True)
class Option:
    """One thing to make again, in one layer. `flops`: arithmetic of products that is repeated. `after`: options this
    one builds on, whose tensors are gone when it is chosen."""

    name: str
    saved_bytes: Number
    flops: Number
    recomputed: Recomputed
    after: tuple[str, ...] = ()


def options(case: LayerCase, operators: LayerOperators) -> tuple[Option, ...]:
    """All options of one MoE layer on one rank, cheap ones first."""
    unit = case.rows * case.model.hidden_size * case.setup.precision.row_bytes
    width = {item.name: item.width for item in activations_of(case)}
    norm = 2 / 9 * operators.kernels["norms"].forward
    scatter = 0.5 * operators.kernels["permute"].forward
    exchanged = operators.communications
    products = operators.products
    flops = count_flops(case.model)
    gated = width["fc1_out"] + width["fc3_out"]
    found = (
        Option(name="ln1_out", saved_bytes=width["ln1_out"] * unit, flops=0.0, recomputed=Recomputed(computation=norm)),
        Option(
            name="attn_a2a",
            saved_bytes=width["attn_a2a"] * unit,
            flops=0.0,
            recomputed=Recomputed(communication=exchanged["after_attention"].time),
        ),
        Option(name="ln2_out", saved_bytes=width["ln2_out"] * unit, flops=0.0, recomputed=Recomputed(computation=norm)),
        Option(
            name="ffn_in",
            saved_bytes=width["ffn_in"] * unit,
            flops=0.0,
            recomputed=Recomputed(computation=scatter, communication=exchanged["dispatch"].time),
        ),
        Option(
            name="fc2_in",
            saved_bytes=width["fc2_in"] * unit,
            flops=0.0,
            recomputed=Recomputed(computation=operators.kernels["activation"].forward),
        ),
        Option(
            name="qkv_a2a",
            saved_bytes=width["qkv_a2a"] * unit,
            flops=case.rows * flops.attention_projections,
            recomputed=Recomputed(
                computation=products["qkv"].forward + operators.kernels["rope"].forward,
                communication=exchanged["before_attention"].time,
            ),
            after=("ln1_out",),
        ),
        Option(
            name="fc1_out+fc3_out",
            saved_bytes=gated * unit,
            flops=case.rows * case.model.router.top_k * flops.expert * 2 / 3,
            recomputed=Recomputed(computation=products["experts_in"].forward),
            after=("ffn_in", "fc2_in"),
        ),
        Option(
            name="attn",
            saved_bytes=width["attn"] * unit,
            flops=case.rows * flops.score_flops_expanded * (case.sequence_length + 1) / 2,
            recomputed=Recomputed(computation=operators.kernels["scores"].forward),
            after=("qkv_a2a",),
        ),
    )
    return tuple(option for option in found if option.name != "attn_a2a" or case.setup.attention == "sequence")


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
    return tuple(
        SavedActivation(name=item.name, width=wider.get(item.name, item.width), kept=item.kept, needed=item.needed)
        for item in found
    )


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
    computation, communication = option.recomputed.computation, option.recomputed.communication
    hideable_s = communication.total_s + computation.memory_s
    return computation.total_s + communication.total_s - (overlap * hideable_s if overlaps else 0.0)


@dataclass(frozen=True, kw_only=True)
class Rematerialized:
    """By candidate: options taken (`taken[option, candidate]`), bytes saved and work repeated in one layer."""

    names: tuple[str, ...]
    taken: NDArray[np.bool_]
    saved_bytes: FloatArray
    recomputed: Recomputed

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
    return Rematerialized(
        names=tuple(names),
        taken=taken,
        saved_bytes=np.sum(saved * taken, axis=0),
        recomputed=_together(available, taken),
    )


def _together(available: tuple[Option, ...], taken: NDArray[np.bool_]) -> Recomputed:
    computation, communication = Parts(), Parts()
    for option, chosen in zip(available, taken, strict=True):
        share = chosen.astype(np.float64)
        computation = computation + share * option.recomputed.computation
        communication = communication + share * option.recomputed.communication
    return Recomputed(computation=computation, communication=communication)
