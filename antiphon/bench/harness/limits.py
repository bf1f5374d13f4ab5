"""What this machine could do at best: measured bandwidth and arithmetic, and the bounds they set on a decoder.

Method
1. Read bandwidth: sum a buffer of 1 GiB (far beyond any last-level cache) as 64-bit integers, best of several
   passes. On the machines tried, this reaches what a hand-written AVX-512 loop reaches; sums of float32 are
   slower by a few percent, a bf16 matrix-vector product by a factor of four.
2. Arithmetic: one product 4096 x 4096 x 4096, best of several; bf16, or float32 where that is faster: on a processor
   without bf16 instructions PyTorch's bf16 products run a hundred times slower than its float32 ones. A machine that
   would need longer than `GEMM_PATIENCE_S` for one gets a smaller product.
3. Both are taken for 1, 2, 4, ... and all threads, in the run that uses them: shared machines change from
   hour to hour.
4. A decode step must read every weight that any of its tokens needs once, and the KV cache of every sequence;
   a step takes at least the larger of bytes / bandwidth and operations / arithmetic.

Rejected: data-sheet numbers (a virtual machine seldom gets them), and the planner's cost model (a bound that
shares code with the prediction cannot catch its mistakes). Only the expected number of experts is the planner's
formula, which a test compares with enumeration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from antiphon.cost.layers import expected_touched
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.tensors import TensorRef, attention_layer_plan, expert_refs, outer_plan
from antiphon.specs.model import ModelSpec

READ_BUFFER_BYTES = 1 << 30
GEMM_SIZE = 4096
GEMM_PATIENCE_S = 2.0
_PROBE_SIZE = 512
BYTES_PER_ELEMENT = 2  # bf16 weights and KV cache


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """What was reached, by the number of threads that worked together."""

    read_by_threads: dict[int, float]
    gemm_by_threads: dict[int, float]

    @property
    def read_bytes_per_s(self) -> float:
        """The best read bandwidth at any number of threads."""
        return max(self.read_by_threads.values())

    @property
    def gemm_flops_per_s(self) -> float:
        """The best matrix product at any number of threads (a multiply-add counts as two operations)."""
        return max(self.gemm_by_threads.values())


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """The weights of a Mixture-of-Experts decoder that decide its traffic and arithmetic. `*_bytes`: of one weight as
    it is kept, with its share of a scale: of routed experts, of other matrices, of the head."""

    spec: ModelSpec
    expert_bytes: float = BYTES_PER_ELEMENT
    dense_bytes: float = BYTES_PER_ELEMENT
    head_bytes: float = BYTES_PER_ELEMENT

    def __post_init__(self) -> None:
        if self.spec.attention.latent is not None:
            raise ValueError("latent attention is not priced here; use a model without it as the yardstick")

    @property
    def attention_parameters(self) -> int:
        """Weights of the query, key, value and output projections of one layer."""
        attention = self.spec.attention
        return self.spec.hidden_size * attention.head_dim * 2 * (attention.num_heads + attention.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Weights of one SwiGLU expert: gate, up and down."""
        return 3 * self.spec.hidden_size * self.spec.feed_forward.intermediate

    @property
    def router_parameters(self) -> int:
        """Weights of the routers of all layers."""
        return self.spec.num_moe_layers * self.spec.hidden_size * self.spec.router.num_experts

    @property
    def head_parameters(self) -> int:
        return self.spec.hidden_size * self.spec.vocab_size

    def decoder_parameters(self, num_experts_counted: float) -> float:
        """Weights of all layers when `num_experts_counted` experts of each MoE layer count."""
        spec = self.spec
        experts = spec.num_moe_layers * num_experts_counted * self.expert_parameters
        num_dense, widths = spec.num_layers - spec.num_moe_layers, spec.feed_forward
        width = num_dense * widths.dense_intermediate + spec.num_moe_layers * widths.shared_intermediate
        dense = spec.num_layers * self.attention_parameters + 3 * spec.hidden_size * width
        return dense + self.router_parameters + experts

    def read_bytes(self, num_experts_read: float) -> float:
        """Bytes of all layers and the head, when `num_experts_read` experts of each MoE layer are read."""
        experts = self.spec.num_moe_layers * num_experts_read * self.expert_parameters
        dense = self.decoder_parameters(0) - self.router_parameters
        head = self.head_parameters * self.head_bytes
        routers = self.router_parameters * BYTES_PER_ELEMENT
        return experts * self.expert_bytes + dense * self.dense_bytes + routers + head


def as_kept(spec: ModelSpec, checkpoint: Checkpoint) -> DecoderSizes:
    """With the bytes of a weight that the checkpoint's formats take; floats are kept in bfloat16. `ValueError` for
    latent attention."""
    sizes, names, layer = DecoderSizes(spec=spec), checkpoint.family_names(spec.family), spec.expert_layers[0]

    def bytes_of(refs: Sequence[TensorRef], num_weights: int) -> float:
        stored = sum(checkpoint.stored_bytes(ref.name, ref.rows, ref.cut) for ref in refs)
        return min(BYTES_PER_ELEMENT, stored / num_weights)

    expert = expert_refs(spec, names, layer, 0, checkpoint)
    kept = replace(sizes, expert_bytes=bytes_of((*expert.gate_up, expert.down), sizes.expert_parameters))
    attention = attention_layer_plan(spec, names, layer, checkpoint)
    matrices = (*attention["qkv"], *attention["out"])
    kept = replace(kept, dense_bytes=bytes_of(matrices, sizes.attention_parameters))
    if spec.tie_embeddings:
        return kept
    return replace(kept, head_bytes=bytes_of(outer_plan(spec, names)["head"], sizes.head_parameters))


def measure_limits(device: str) -> MachineLimits:
    """What the device that computes could do at best."""
    return measure_machine_limits(num_passes=4) if device == "cpu" else measure_device_limits(device)


def measure_machine_limits(num_threads: int | None = None, num_passes: int = 7) -> MachineLimits:
    """Measure with 1, 2, 4, ... and `num_threads` threads (default: torch's present number).

    Blocks for half a minute at most and holds 1 GiB meanwhile. Restores torch's number of threads.
    """
    before = torch.get_num_threads()
    highest = num_threads or before
    counts = sorted({1 << power for power in range(highest.bit_length()) if 1 << power <= highest} | {highest})
    words = torch.ones(READ_BUFFER_BYTES // 8, dtype=torch.int64)
    try:
        torch.set_num_threads(1)
        factors = _fastest_factors(GEMM_SIZE)
        read, gemm = {}, {}
        for count in counts:
            torch.set_num_threads(count)
            read[count] = READ_BUFFER_BYTES / _best_time_s(words.sum, num_passes)
            gemm[count] = _flops_per_s(factors, num_passes)
        return MachineLimits(read_by_threads=read, gemm_by_threads=gemm)
    finally:
        torch.set_num_threads(before)


def measure_device_limits(device: str, num_passes: int = 7) -> MachineLimits:
    """The same of an accelerator ("cuda"), which has no threads to count: it is with 0 of them."""
    words = torch.ones(READ_BUFFER_BYTES // 8, dtype=torch.int64, device=device)
    factors = _square_pair(GEMM_SIZE, torch.bfloat16, device)

    def read() -> None:
        words.sum().item()  # the copy back waits for the device

    def multiply() -> None:
        (factors[0] @ factors[1])[0, 0].item()

    return MachineLimits(
        read_by_threads={0: READ_BUFFER_BYTES / _best_time_s(read, num_passes)},
        gemm_by_threads={0: 2 * GEMM_SIZE**3 / _best_time_s(multiply, num_passes)},
    )


def measure_gemm_flops_per_s(dtype: torch.dtype, num_passes: int = 5) -> float:
    """The best of some large products in `dtype` with torch's present number of threads; smaller ones where a large
    one would need longer than `GEMM_PATIENCE_S`."""
    flops_per_s = _flops_per_s(_square_pair(_PROBE_SIZE, dtype), 2)
    factors = _square_pair(_affordable(GEMM_SIZE, flops_per_s), dtype)
    return max(flops_per_s, _flops_per_s(factors, num_passes))


def _square_pair(size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Two square matrices [2, size, size]."""
    return torch.randn(2, size, size, device=device).to(dtype)


def _flops_per_s(factors: torch.Tensor, num_passes: int) -> float:
    """The rate of the product of a pair."""
    return 2 * factors.shape[1] ** 3 / _best_time_s(lambda: factors[0] @ factors[1], num_passes)


def _fastest_factors(size: int) -> torch.Tensor:
    """A pair in the dtype that one CPU thread multiplies fastest, `size` wide or less, so that its product needs
    `GEMM_PATIENCE_S`."""
    probes = [_square_pair(min(_PROBE_SIZE, size), dtype) for dtype in (torch.bfloat16, torch.float32)]
    fastest = max(probes, key=lambda probe: _flops_per_s(probe, 1))
    return _square_pair(_affordable(size, _flops_per_s(fastest, 2)), fastest.dtype)


def _affordable(size: int, flops_per_s: float) -> int:
    """`size`, halved until a product needs `GEMM_PATIENCE_S` at most."""
    while size > _PROBE_SIZE and 2 * size**3 > GEMM_PATIENCE_S * flops_per_s:
        size //= 2
    return size


def _best_time_s(action: Callable[[], object], num_passes: int) -> float:
    action()
    times_s = []
    for _ in range(num_passes):
        start_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def touched_experts(sizes: DecoderSizes, num_tokens: int) -> float:
    """Experts of a layer that this many tokens touch, expected."""
    num_experts, top_k = sizes.spec.router.num_experts, sizes.spec.router.top_k
    return float(expected_touched(num_experts, num_tokens * top_k, num_experts=num_experts, top_k=top_k))


def decode_step_bytes(sizes: DecoderSizes, concurrency: int, context: int) -> float:
    """Bytes that one decode step must read: the weights touched, once, and each sequence's `context` cached tokens."""
    touched = touched_experts(sizes, concurrency)
    embeddings = concurrency * sizes.spec.hidden_size * BYTES_PER_ELEMENT
    cached = concurrency * context * sizes.spec.kv_bytes_per_token(BYTES_PER_ELEMENT)
    return sizes.read_bytes(touched) + embeddings + cached


def decode_step_flops(sizes: DecoderSizes, concurrency: int, context: int) -> float:
    """Operations of one decode step: 2 per active weight and token, and scores and values over `context` tokens."""
    active = sizes.decoder_parameters(sizes.spec.router.top_k) + sizes.head_parameters
    return concurrency * (2.0 * active + _attention_flops(sizes, context))


def prefill_flops(sizes: DecoderSizes, prompt_tokens: int) -> float:
    """Operations to prefill one prompt; attention sees half the prompt on average, the LM head only its last token."""
    layers = 2.0 * sizes.decoder_parameters(sizes.spec.router.top_k)
    attention = _attention_flops(sizes, (prompt_tokens + 1) / 2)
    return prompt_tokens * (layers + attention) + 2.0 * sizes.head_parameters


def _attention_flops(sizes: DecoderSizes, context: float) -> float:
    attention = sizes.spec.attention
    return 4.0 * sizes.spec.num_layers * attention.num_heads * attention.head_dim * context


def memory_bound_tokens_per_s(sizes: DecoderSizes, limits: MachineLimits, concurrency: int, context: int) -> float:
    """Decode rate if only reading memory took time."""
    return concurrency * limits.read_bytes_per_s / decode_step_bytes(sizes, concurrency, context)


def compute_bound_tokens_per_s(sizes: DecoderSizes, limits: MachineLimits, concurrency: int, context: int) -> float:
    """Decode rate if only arithmetic took time."""
    return concurrency * limits.gemm_flops_per_s / decode_step_flops(sizes, concurrency, context)


def decode_bound_tokens_per_s(sizes: DecoderSizes, limits: MachineLimits, concurrency: int, context: int) -> float:
    """Decode rate if a step took the longer of its memory and its arithmetic time: perfect overlap of the two."""
    return min(
        memory_bound_tokens_per_s(sizes, limits, concurrency, context),
        compute_bound_tokens_per_s(sizes, limits, concurrency, context),
    )


def compute_bound_prefill_tokens_per_s(sizes: DecoderSizes, limits: MachineLimits, prompt_tokens: int) -> float:
    """Prefill rate if only arithmetic took time; it does not depend on the number of prompts."""
    return prompt_tokens * limits.gemm_flops_per_s / prefill_flops(sizes, prompt_tokens)


def prefill_bound_tokens_per_s(
    sizes: DecoderSizes, limits: MachineLimits, num_prompts: int, prompt_tokens: int
) -> float:
    """Prefill rate if the whole batch took the longer of its arithmetic and reading each touched weight once."""
    num_tokens = num_prompts * prompt_tokens
    touched = touched_experts(sizes, num_tokens)
    return min(
        num_tokens * limits.read_bytes_per_s / sizes.read_bytes(touched),
        compute_bound_prefill_tokens_per_s(sizes, limits, prompt_tokens),
    )
