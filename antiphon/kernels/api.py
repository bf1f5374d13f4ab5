"""The seam between model maths and machine: one signature per operation, several back-ends.

A back-end (`reference`: plain PyTorch on any device; `cpu`: native packed kernels) owns the layout of the weights it
packed and of the KV cache it created; no other code looks inside. All operations are ordered on the current stream of
`device` and return tensors of the same device. Shapes use these letters:

T rows (tokens) of the micro-batch   S sequences in it   H hidden   N query heads   G KV heads   D head width
E experts held here   K experts per token   I expert width   B blocks   P tokens per block   V output width
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from antiphon.kernels.quantized import AnyWeight, WeightFormat
from antiphon.specs.model import KV_SCALE_BYTES, KVStorage, RouterSpec


def address(x: Tensor | None) -> int:
    """Where a tensor's elements begin, for native code; 0: none. `ValueError` for a tensor that is not in host memory,
    or whose gradient would be lost."""
    if x is None:
        return 0
    if not x.is_cpu:
        raise ValueError(f"a tensor on {x.device}: native code reads host memory, use .cpu()")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("a tensor requires a gradient, which native code does not pass on: use torch.no_grad()")
    return x.data_ptr()


class _Packed(Protocol):
    dtype: torch.dtype


_Own = TypeVar("_Own", bound=_Packed)


def own(made: object, kind: type[_Own], dtype: torch.dtype) -> _Own:
    """`made`, a weight or cache of the back-end that calls. `ValueError` for another one's, whose layout differs."""
    if isinstance(made, kind) and made.dtype == dtype:
        return made
    of_dtype = f" of {made.dtype}" if hasattr(made, "dtype") else ""
    raise ValueError(f"a {type(made).__name__}{of_dtype} where this back-end takes its own {kind.__name__} of {dtype}")


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one attention worker caches. Latent attention: one head, values are the first `value_dim` of the key.

    `storage`: elements in the back-end's dtype ("auto"), or codes of 8 bits with a scale for each key and each value.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    storage: KVStorage = "auto"

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_blocks, self.num_kv_heads, self.key_dim, self.value_dim)
        if min(sizes) < 0 or self.block_size < 1:
            raise ValueError(f"{self}: no size may be below 0, and a block has at least 1 token")

    def block_bytes(self, bytes_per_element: int) -> int:
        """Bytes of one block over all layers: the unit in which KV memory is admitted."""
        return self.num_layers * self.block_size * self.num_kv_heads * self.row_bytes(bytes_per_element)

    def row_bytes(self, bytes_per_element: int) -> int:
        """Bytes of one token in one head of one layer."""
        width = self.key_dim if self.values_in_keys else self.key_dim + self.value_dim
        if self.storage != "auto":
            return width + KV_SCALE_BYTES * (1 if self.values_in_keys else 2)
        return width * bytes_per_element

    def check_run(
        self, layer: int, blocks: Tensor, run: tuple[int, int], heads: Tensor, rows: Tensor, size: int
    ) -> None:
        """`ValueError` unless the tokens `run`, first and count, are in the cache and `rows` has room for just them, of
        elements of `size` bytes."""
        first, count = run
        if not (0 <= layer < self.num_layers and first >= 0 < count):
            raise ValueError(f"tokens {first} to {first + count - 1} of layer {layer} of {self.num_layers}")
        named = blocks[first // self.block_size : -(-(first + count) // self.block_size)]
        if first + count > len(blocks) * self.block_size or int(named.min()) < 0 or int(named.max()) >= self.num_blocks:
            raise ValueError(
                f"{len(blocks)} of {self.num_blocks} blocks do not hold tokens {first} to {first + count - 1}"
            )
        if not len(heads) or int(heads.min()) < 0 or int(heads.max()) >= self.num_kv_heads:
            raise ValueError(f"heads {heads.tolist()} of {self.num_kv_heads}")
        wanted = len(heads) * count * self.row_bytes(size)
        if rows.numel() != wanted or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(f"{rows.numel()} elements of {rows.dtype} for {wanted} bytes")


class KVCache(Protocol):
    """Paged keys and values of every layer, in the back-end's own layout.

    Runs of tokens leave it and come in as plain rows in host memory, `spec.row_bytes` for each head and token: for each
    head in turn its keys [tokens, key_dim], then its values [tokens, value_dim], unless they are in the keys. In 8 bits
    these are codes as they are stored, each key and each value followed by its scale (float32). Token i of a sequence
    is in block `blocks[i // block_size]`; `heads` are places in the cache. May be called beside steps, from another
    thread, for blocks that no step writes."""

    spec: KVCacheSpec
    dtype: torch.dtype

    def read_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """Fill `rows` (uint8) from the cache. `blocks` and `heads`: int32 in host memory. `ValueError` for ranges that
        do not fit."""

    def write_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """The reverse."""


class PackedLinear(Protocol):
    """Weight [out, in] and optional bias [out], laid out once at load for the back-end's matrix units. A quantized
    weight stays in its format; products are those of its values in float32."""

    in_features: int
    out_features: int
    num_bytes: int


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of E gated feed-forwards and the formula between their products: for `activation`, `alpha` and `limit`
    see `FeedForwardSpec`. `has_bias`: there is room for biases, which start as zeros."""

    num_experts: int
    hidden: int
    intermediate: int
    activation: str
    alpha: float = 1.702
    limit: float = 7.0
    has_bias: bool = False

    def __post_init__(self) -> None:
        if min(self.num_experts, self.hidden, self.intermediate) < 0:
            raise ValueError(f"{self}: no size may be below 0")


@dataclass(frozen=True, kw_only=True)
class ExpertFormats:
    """How experts are stored: gates and up projections in one format, down projections in another. None: as floats.
    `ordered`: gate and up of an expert may have columns in an order (`QuantizedWeight.order`), one for both."""

    gate_up: WeightFormat | None = None
    down: WeightFormat | None = None
    ordered: bool = False

    def __str__(self) -> str:
        act = " in act order" if self.ordered else ""
        return f"gate and up {self.gate_up or 'in floats'}{act}, down {self.down or 'in floats'}"


class PackedExperts(Protocol):
    """Weights of E experts of one layer. Filled one expert at a time, so that loading never holds a second copy."""

    shape: ExpertShape
    formats: ExpertFormats
    num_bytes: int

    def set_expert(self, index: int, gate_IH: AnyWeight, up_IH: AnyWeight, down_HI: AnyWeight) -> None:
        """Copy one expert's three matrices in (any float dtype; converted to the back-end's). Where a format was given,
        the matrix must be quantized in it; `ValueError` otherwise, nothing is converted."""

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        """Copy one expert's three biases in, likewise. Only for experts that were made with room for them."""


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """Where the T rows of a micro-batch stand. Rows of a sequence are consecutive; sequences keep their order.

    All tensors are int32 on the compute device; the tuples repeat what the host needs to know without a copy back.
    Beyond its last block a row of `block_tables_SB` holds any valid block id. `slots_T` = block * block_size + offset.
    `refilled`: the tensors of this object get the values of one step after another, one row a sequence, and
    `context_lens` are upper bounds. So nothing may be worked out from values and kept, nor read back to the host.
    """

    positions_T: Tensor
    slots_T: Tensor
    query_starts: Tensor  # [S + 1], first row of each sequence, then T
    context_lens_S: Tensor  # keys visible to the sequence's last row, its own included
    block_tables_SB: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    refilled: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.positions_T.shape[0])


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """cos and sin for every position, float32 [positions, rotated width / 2], attention factor included."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """How the rows [q | k | v] of a fused projection become heads: `num_heads` query heads, an optional RMS norm of
    each head of q and of k, and a rotation. The table's width says how many of the first dims rotate (none: width 0).
    """

    num_heads: int
    rotary: RotaryTable
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 1e-6


class KernelBackend(Protocol):
    """Everything the decoder asks of a machine. One object per worker; not thread-safe. Without gradients:
    `antiphon.kernels.ops` has operators with them. `ValueError` for tensors that do not fit the call."""

    name: str
    device: torch.device
    dtype: torch.dtype
    asks_host: bool
    """Operations may wait for the device and read values back. False while a step is captured: none may, and no shape
    may depend on a value."""
    orders_columns: bool
    """Takes weights with a `QuantizedWeight.order`: of linear layers, and of experts' gate and up projections."""

    def pack_linear(self, weight: AnyWeight, bias: Tensor | None = None) -> PackedLinear:
        """Lay out weight [out, in]; the source tensor may be dropped afterwards."""

    def linear(
        self,
        x_TI: Tensor,
        weight: PackedLinear,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x @ weight.T + bias (+ residual), summed in float32, returned as `out_dtype` (default: the back-end's)."""

    def weight_rows(self, weight: PackedLinear, ids_T: Tensor) -> Tensor:
        """Rows [T, in] of a weight that was packed from floats, in the back-end's dtype and owned by the caller: what a
        head that is also the embedding looks tokens up in. `ids_T`: int64, each below `out_features`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last axis: x / sqrt(mean(x²) + eps) * weight, statistics in float32."""

    def rms_norm_(self, x_TH: Tensor, weight: Tensor, eps: float) -> None:
        """The same in place, for rows that may be parts of wider ones."""

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta rounded to dtype, its RMS norm): the residual step at the head of each half-layer."""

    def new_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """Reserve (not touch) memory for `spec.num_blocks` blocks; `ResourceError` if it cannot be had."""

    def rotate_and_store(
        self, qkv_TX: Tensor, cache: KVCache, layer: int, batch: AttentionBatch, heads: HeadRows
    ) -> Tensor:
        """Make heads of fused rows [q | k | v], write keys and values to the cache at `batch.slots_T`, and return
        q [T, N, D]. With `values_in_keys` the rows are the keys alone, rotated by the caller."""

    def paged_attention(
        self,
        q_TND: Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every row over its sequence's cached keys. Returns [T, N, value_dim].

        `sinks_N` (float32) are logits of a key per head that every row sees and that has no value: exp(sink) is added
        to the softmax's denominator (gpt-oss).
        A row's result must not depend on which other rows share the call, nor on how its prompt was cut into chunks."""

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        """Router scores and choice: (expert ids int32 [T, K], weights float32 [T, K]), best first."""

    def shared_gate(self, x_TH: Tensor, weight: PackedLinear, scaling: float) -> tuple[Tensor, Tensor]:
        """How much a gate [1, in] lets through of an expert that every row passes: (its id 0 int32 [T, 1], the logit's
        sigmoid times `scaling` float32 [T, 1])."""

    def new_experts(self, shape: ExpertShape, formats: ExpertFormats | None = None) -> PackedExperts:
        """Room for the weights of gated feed-forwards, as floats or in the formats given."""

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        """y[t] = sum over j of weights[t, j] * FFN_{ids[t, j]}(x[t]); ids are local indices, -1 means "not held here".

        FFN(x) = down(act(gate(x)) * up(x)), biases included where there are any. Each touched expert's weights are
        read once. Sums in float32 in ascending local index, rounded once to dtype, so a row's bits do not depend on its
        neighbours."""
