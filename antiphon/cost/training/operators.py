"""One layer as a list of operators of the busiest rank: products, memory-bound kernels, communications.

1. Sequence-parallel attention: rows / n through whole weights, all-to-all to heads / n and back (Ulysses).
   Tensor-parallel: all rows, 1/n of the weights, all-gather before and reduce-scatter after.
2. Expert-parallel experts: whole experts, ceil(E/n) of them, k/n of the rows. Tensor-parallel: all experts, all rows k
   times, 1/n of the width: the same FLOPs, but n times the rows to scatter and gather.
3. Each product runs three times: forward, gradient of its input, gradient of its weight. The last one adds to
   FP32 sums in memory (read and written), which makes it memory-bound at small micro-batches.
4. Each communication has one product it can be fused with, forward and backward.
5. Shared expert and dense layers run where attention runs: whole weights under sequence parallelism, 1/n under tensor
   parallelism, where they share the exchange of the routed experts.

Rejected: FLOPs over one efficiency. It cannot tell the layouts apart, whose FLOPs are equal.

Collectives of one model-parallel group (`gather`, `exchange`), and the choice of the faster dispatch:

1. All-gather and reduce-scatter run as a ring inside a scale-up domain: neighbours stream without pause, the start is
   paid once: latency + (bytes + half) / bandwidth.
2. All-to-all sends n - 1 separate messages, each of which pays the start: (n - 1) (block + half) / bandwidth. So it
   reaches Util(block) = block / (block + half) of the bandwidth, and loses before its bytes do.
3. Theory prefers all-gather when k > n. With `half` = 1.5 MB, the one constant calibrated for MegaScale-MoE's cluster
   (`EfficiencySpec.scale_up_half_bytes`), the change at n = 8 and Mixtral-8x7B's rows lies between k = 6 and k = 7, as
   its Figure 7 measures; from 1.23 to 2.44 MB it does.
4. Groups wider than a domain take the two-level network's collectives (`cost.network`).

Rejected: a fixed threshold k > 6. Smaller micro-batches send smaller blocks, so the change comes earlier.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.exchange import once_per_node
from antiphon.cost.memory import (
    Matrix,
    attention_matrices,
    cached_width,
    gated_matrices,
    local_heads,
    score_width,
    share_of,
    visible_tokens,
)
from antiphon.cost.network import Link, Network
from antiphon.cost.roofline import Number, Parts, Roof, grouped_gemm, kernel, select
from antiphon.cost.training.setup import LayerCase
from antiphon.specs.model import BYTES_OF

ATTENTION_BACKWARD = 2.5  # products of a recomputing attention kernel: five against two


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product: forward, gradient of its input, gradient of its weight."""

    forward: Parts
    input_gradient: Parts
    weight_gradient: Parts


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Anything else that computes or moves memory: forward and backward."""

    forward: Parts
    backward: Parts


FUSES_WITH = {
    "before_attention": "qkv",
    "after_attention": "out",
    "dispatch": "experts_in",
    "combine": "experts_out",
    "before_dense": "dense_in",
    "after_dense": "dense_out",
}
"""The product that each communication can be fused with."""


@dataclass(frozen=True, kw_only=True)
class LayerOperators:
    """By name. Communications are the same size both ways. `beside` names products of forward that no exchange of the
    experts waits for: the shared expert."""

    products: dict[str, Product]
    kernels: dict[str, Kernel]
    communications: dict[str, Parts]
    beside: tuple[str, ...] = ()


def layer_operators(case: LayerCase, *, moe_layer: bool = True) -> LayerOperators:
    """All operators of one layer; `moe_layer` False: with the dense feed-forward in place of the experts."""
    products, kernels, communications = _attention(case)
    more = _experts(case) if moe_layer else _dense(case)
    beside = ("shared_in", "shared_out") if moe_layer and case.model.feed_forward.shared_intermediate else ()
    return LayerOperators(
        products=products | more[0],
        kernels=kernels | more[1],
        communications=communications | more[2],
        beside=beside,
    )


_Operators = tuple[dict[str, Product], dict[str, Kernel], dict[str, Parts]]


def _attention(case: LayerCase) -> _Operators:
    model, setup, attention = case.model, case.setup, case.model.attention
    degree, element = setup.model_parallel, setup.precision.row_bytes
    sequence = setup.attention == "sequence"
    matrices = attention_matrices(model, 1 if sequence else degree)
    rows = case.rows if sequence else case.tokens
    into = [_product(case, rows, matrix.count, matrix) for matrix in matrices[:-1]]
    heads = local_heads(attention, degree)
    own_width = heads * attention.head_dim + cached_width(attention, degree)
    visible = visible_tokens(attention, (case.sequence_length + 1) / 2)
    width = score_width(attention, absorbed=False)
    flops = 2 * case.tokens * visible * heads * width
    moved = case.tokens * (heads * width + cached_width(attention, degree)) * element
    scores = Kernel(
        forward=kernel(case.roofs.attention, flops, moved),
        backward=kernel(case.roofs.attention, ATTENTION_BACKWARD * flops, 2.5 * moved),
    )
    kernels = {
        "scores": scores,
        "norms": _elementwise(case.roofs.gemm, 9 * case.rows * model.hidden_size * element, 1.5, num_kernels=3),
        "rope": _elementwise(case.roofs.gemm, 2 * case.tokens * own_width * element, 1.0),
        "layer": Kernel(forward=Parts(fixed_s=case.roofs.layer_s), backward=Parts(fixed_s=case.roofs.layer_s)),
    }
    before, after = _attention_exchanges(case, own_width)
    return (
        {"qkv": _joined(into), "out": _product(case, rows, 1, matrices[-1])},
        kernels,
        {"before_attention": before, "after_attention": after},
    )


def _attention_exchanges(case: LayerCase, own_width: Number) -> tuple[Parts, Parts]:
    """Ulysses: queries, keys and values to heads, output back. Key/value heads are copied where there are too few."""
    model, setup = case.model, case.setup
    degree, wire = setup.model_parallel, setup.precision.wire_bytes(model.hidden_size)
    if setup.attention == "tensor":
        size = case.tokens * model.hidden_size * wire
        return gather(case.network, size, degree), _reduce(case, size)
    latent = model.attention.latent
    head_width = model.attention.head_dim if latent is None else latent.v_head_dim
    out_width = local_heads(model.attention, degree) * head_width * degree
    return (
        exchange(case.network, case.rows * own_width * degree * wire, degree),
        exchange(case.network, case.rows * out_width * wire, degree),
    )


def _experts(case: LayerCase) -> _Operators:
    model, setup = case.model, case.setup
    degree, element, hidden = setup.model_parallel, setup.precision.row_bytes, case.model.hidden_size
    tensor = setup.experts == "tensor"
    into, out = gated_matrices(hidden, model.feed_forward.intermediate, degree if tensor else 1)
    held = model.router.num_experts if tensor else share_of(model.router.num_experts, setup.expert_parallel)
    rows = case.expert_rows
    by_all_to_all = not tensor and setup.dispatch == "all_to_all"
    sent_rows = case.rows * case.copies if by_all_to_all else case.tokens
    at_source = np.where(np.asarray(setup.expert_parallel) > 1, 4.0, 1.0) if by_all_to_all else 1.0
    permuted = 4 * rows + at_source * sent_rows
    shared, shared_kernels = _gated(case, model.feed_forward.shared_intermediate, "shared")
    kernels = {
        "permute": _elementwise(case.roofs.gemm, permuted * hidden * element, 1.0, num_kernels=4),
        "activation": _elementwise(case.roofs.gemm, rows * 1.5 * into.outputs * element, 5 / 3),
    }
    router = Matrix(inner=hidden, outputs=model.router.num_experts)
    products = {
        "router": _product(case, case.rows, 1, router),
        "experts_in": _product(case, rows, held, into),
        "experts_out": _product(case, rows, held, out),
    }
    dispatch, combine = _expert_exchanges(case, by_all_to_all)
    return products | shared, kernels | shared_kernels, {"dispatch": dispatch, "combine": combine}


def _expert_exchanges(case: LayerCase, by_all_to_all: bool) -> tuple[Parts, Parts]:
    setup, hidden = case.setup, case.model.hidden_size
    wire = setup.precision.wire_bytes(hidden)
    if by_all_to_all:
        one_way = exchange(case.network, case.rows * case.copies * hidden * wire, setup.expert_parallel)
        if setup.deduplicate:
            per_node = once_per_node(case.network, case.spread, case.rows, hidden * wire)
            wide = np.asarray(setup.expert_parallel) > case.network.domain
            one_way = select(wide & np.asarray(per_node.total_s < one_way.total_s), per_node, one_way)
        return one_way, one_way
    size = case.tokens * hidden * wire
    return gather(case.network, size, setup.model_parallel), _reduce(case, size)


def _reduce(case: LayerCase, size_bytes: Number) -> Parts:
    """Reduce-scatter; in FP8 an all-to-all whose sums are in FP32 (MegaScale-MoE, section 5)."""
    move = exchange if case.setup.precision.activation_wire == "fp8" else gather
    return move(case.network, size_bytes, case.setup.model_parallel)


def _dense(case: LayerCase) -> _Operators:
    """The dense feed-forward of a layer without experts, cut like the attention beside it."""
    products, kernels = _gated(case, case.model.feed_forward.dense_intermediate, "dense")
    if case.setup.attention == "sequence":
        return products, kernels, {}
    size = case.tokens * case.model.hidden_size * case.setup.precision.wire_bytes(case.model.hidden_size)
    before, after = gather(case.network, size, case.setup.model_parallel), _reduce(case, size)
    return products, kernels, {"before_dense": before, "after_dense": after}


def _gated(case: LayerCase, intermediate: int, name: str) -> tuple[dict[str, Product], dict[str, Kernel]]:
    """A gated feed-forward that all rows pass; nothing if its width is 0."""
    if intermediate == 0:
        return {}, {}
    sequence = case.setup.attention == "sequence"
    rows = case.rows if sequence else case.tokens
    into, out = gated_matrices(case.model.hidden_size, intermediate, 1 if sequence else case.setup.model_parallel)
    moved = rows * 1.5 * into.outputs * case.setup.precision.row_bytes
    return (
        {f"{name}_in": _product(case, rows, 1, into), f"{name}_out": _product(case, rows, 1, out)},
        {f"{name}_activation": _elementwise(case.roofs.gemm, moved, 5 / 3)},
    )


def _product(case: LayerCase, rows: Number, num_weights: Number, matrix: Matrix) -> Product:
    """`num_weights` weights (experts, heads) share the rows; each weight's gradient is read, added to, and written."""
    precision, roof = case.setup.precision, case.roofs.gemm
    rows = rows * matrix.count
    forward = grouped_gemm(
        roof, rows, num_weights, matrix.inner, matrix.outputs, BYTES_OF[precision.weights], precision.row_bytes
    )
    gradient_bytes = num_weights * matrix.inner * matrix.outputs * 2 * BYTES_OF[precision.gradients]
    weight_gradient = kernel(
        roof,
        2 * rows * matrix.inner * matrix.outputs,
        gradient_bytes + rows * (matrix.inner + matrix.outputs) * precision.row_bytes,
    )
    return Product(forward=forward, input_gradient=forward, weight_gradient=weight_gradient)


def _elementwise(roof: Roof, moved_bytes: Number, backward_factor: float, num_kernels: int = 1) -> Kernel:
    """A kernel bound by memory; its backward moves `backward_factor` times as much."""
    return Kernel(
        forward=kernel(roof, 0.0, moved_bytes, num_kernels),
        backward=kernel(roof, 0.0, moved_bytes * backward_factor, num_kernels),
    )


def _joined(products: list[Product]) -> Product:
    """Products in a row as one."""
    total = products[0]
    for product in products[1:]:
        total = Product(
            forward=total.forward + product.forward,
            input_gradient=total.input_gradient + product.input_gradient,
            weight_gradient=total.weight_gradient + product.weight_gradient,
        )
    return total


def stream_gather(link: Link, size_bytes: Number, degree: Number) -> Number:
    """Seconds of an all-gather or reduce-scatter of `size_bytes` over a ring inside a domain; in a mesh each rank's
    part goes straight to every other."""
    if link.num_wires:
        return block_exchange(link, size_bytes, degree)
    sent = size_bytes * (np.asarray(degree, dtype=np.float64) - 1) / degree
    return link.send_s(sent)


def block_exchange(link: Link, size_bytes: Number, degree: Number) -> Number:
    """Seconds of an all-to-all inside a domain; `size_bytes` is what one rank holds, its own block included."""
    return link.send_s(size_bytes / np.asarray(degree, dtype=np.float64), np.asarray(degree, dtype=np.float64) - 1)


def gather(network: Network, size_bytes: Number, degree: Number) -> Parts:
    """All-gather or reduce-scatter of `size_bytes` (of the whole tensor) over neighbouring ranks."""
    inside = Parts(
        scale_up_s=stream_gather(network.scale_up, size_bytes, degree), fixed_s=_fixed(network.collective_s, degree)
    )
    return select(_within(network, degree), inside, network.all_gather(size_bytes, degree))


def exchange(network: Network, size_bytes: Number, degree: Number) -> Parts:
    """All-to-all of `size_bytes` held by each of `degree` neighbouring ranks."""
    wire_s = block_exchange(network.scale_up, size_bytes, degree)
    inside = Parts(scale_up_s=wire_s, fixed_s=_fixed(network.exchange_s, degree))
    return select(_within(network, degree), inside, network.all_to_all(size_bytes, degree))


def _within(network: Network, degree: Number) -> NDArray[np.bool_]:
    return np.asarray(np.asarray(degree) <= network.domain)


def _fixed(once_s: Number, degree: Number) -> Number:
    fixed: Number = np.where(np.asarray(degree) > 1, once_s, 0.0)
    return fixed


def prefers_all_gather(
    network: Network, tokens: Number, row_bytes: Number, degree: Number, copies: Number
) -> NDArray[np.bool_]:
    """Whether all-gather and reduce-scatter of a group's `tokens` rows take less time than two all-to-alls that send
    `copies` of each to other ranks; equal times keep all-to-all, which holds less memory."""
    gathered = gather(network, tokens * row_bytes, degree)
    exchanged = exchange(network, tokens / np.asarray(degree, dtype=np.float64) * copies * row_bytes, degree)
    return np.asarray(gathered.total_s) < np.asarray(exchanged.total_s)


def crossover_top_k(network: Network, tokens: float, row_bytes: float, degree: int, limit: int = 64) -> int:
    """The largest k for which all-to-all is still the faster one (Figure 7: 6); `limit` if it always is, 0 if never."""
    faster = [k for k in range(1, limit + 1) if not prefers_all_gather(network, tokens, row_bytes, degree, k)]
    return max(faster, default=0)
