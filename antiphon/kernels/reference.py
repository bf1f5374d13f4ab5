"""The reference back-end: every kernel in plain PyTorch, on any device, in float32, bfloat16 or float16.

The other back-ends are tested against it, and it runs where no native kernel exists. Results of a row agree with those
it would have alone to rounding, not bit for bit: PyTorch picks matrix kernels by the number of rows.

Weights are plain tensors in its dtype, gate and up projections stacked. The grouped feed-forward is a loop over touched
experts, or two grouped matrix products: the loop asks the host which experts were touched, so on an accelerator it
waits for the device; `torch._grouped_mm` (bfloat16, rows of 16-byte multiples) does not, and is used there when it can
be. Where the host must not be asked and it cannot be used, every expert computes every row, with weight zero but for
the rows that chose it: slow, for checks and for types that nothing else takes. Quantized weights stay quantized and are
multiplied out, in its dtype, for each product. Attention is in `reference_attention`.

Letters as in `antiphon.kernels.api`; R = T * K routed rows in order of local expert.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import (
    AttentionBatch,
    ExpertFormats,
    ExpertShape,
    HeadRows,
    KVCache,
    KVCacheSpec,
    PackedExperts,
    PackedLinear,
    own,
)
from antiphon.kernels.ops.attention import look_up, rms_norm, rotate
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.quantized import AnyWeight, QuantizedWeight, WeightFormat
from antiphon.kernels.reference_attention import AttentionPlans, ReferenceCache, make_plan, paged_attention
from antiphon.specs.model import RouterSpec

if TYPE_CHECKING:  # which imports this module
    from antiphon.kernels.stacked import TritonExperts

FLOATS = ExpertFormats()


class ReferenceLinear:
    """Weight [out, in] and optional bias [out] on the back-end's device."""

    def __init__(self, weight: AnyWeight, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias_O = bias_O
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        weight_bytes = weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        self.num_bytes = weight_bytes + (0 if bias_O is None else bias_O.nbytes)

    @property
    def weight_OI(self) -> Tensor:
        return _multiplied_out(self.weight, self.dtype)


def _multiplied_out(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)


class ReferenceExperts:
    """E gated feed-forwards: `gate_up` holds the gate's I rows above the up projection's I rows, and so its bias.
    Quantized matrices stand in a list instead, and the tensor of floats has no experts."""

    def __init__(
        self, shape: ExpertShape, device: torch.device, dtype: torch.dtype, formats: ExpertFormats = FLOATS
    ) -> None:
        self.shape = shape
        self.formats = formats
        self.dtype = dtype
        num_experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
        wide_experts = 0 if formats.gate_up is not None else num_experts
        down_experts = 0 if formats.down is not None else num_experts
        self.gate_up_EJH = torch.empty((wide_experts, 2 * width, hidden), dtype=dtype, device=device)
        self.down_EHI = torch.empty((down_experts, hidden, width), dtype=dtype, device=device)
        self.quantized: list[tuple[QuantizedWeight | None, ...] | None] = [None] * num_experts  # gate, up, down
        self.gate_up_bias_EJ = self.gate_up_EJH.new_zeros((num_experts, 2 * width)) if shape.has_bias else None
        self.down_bias_EH = self.down_EHI.new_zeros((num_experts, hidden)) if shape.has_bias else None
        tensors = (self.gate_up_EJH, self.down_EHI, self.gate_up_bias_EJ, self.down_bias_EH)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        for form, num_bytes_of in ((formats.gate_up, (width, hidden, 2)), (formats.down, (hidden, width, 1))):
            if form is not None:
                rows, columns, count = num_bytes_of
                self.num_bytes += num_experts * count * form.num_bytes(rows, columns)

    def set_expert(self, index: int, gate_IH: AnyWeight, up_IH: AnyWeight, down_HI: AnyWeight) -> None:
        width, hidden = self.shape.intermediate, self.shape.hidden
        wide, narrow = (width, hidden), (hidden, width)
        kept: list[QuantizedWeight | None] = []
        for name, matrix, shape, form, held_EXX, rows in (
            ("gate", gate_IH, wide, self.formats.gate_up, self.gate_up_EJH, slice(width)),
            ("up", up_IH, wide, self.formats.gate_up, self.gate_up_EJH, slice(width, None)),
            ("down", down_HI, narrow, self.formats.down, self.down_EHI, slice(None)),
        ):
            matrix = checked_format(name, matrix, shape, form)
            if isinstance(matrix, Tensor):
                held_EXX[index, rows].copy_(matrix)
            kept.append(None if isinstance(matrix, Tensor) else matrix.own_copy(self.down_EHI.device))
        self.quantized[index] = tuple(kept)

    def gate_up_of(self, expert: int) -> Tensor:
        """[2 I, H] of one expert in the back-end's dtype."""
        kept = self.quantized[expert] if self.formats.gate_up is not None else None
        if kept is None:
            return self.gate_up_EJH[expert]
        return torch.cat([part.dequantize(self.gate_up_EJH.dtype) for part in kept[:2] if part is not None])

    def down_of(self, expert: int) -> Tensor:
        """[H, I] of one expert, likewise."""
        kept = self.quantized[expert] if self.formats.down is not None else None
        if kept is None or kept[2] is None:
            return self.down_EHI[expert]
        return kept[2].dequantize(self.down_EHI.dtype)

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        if self.gate_up_bias_EJ is None or self.down_bias_EH is None:
            raise ValueError("these experts were made without room for biases")
        self.gate_up_bias_EJ[index, : self.shape.intermediate].copy_(gate_I)
        self.gate_up_bias_EJ[index, self.shape.intermediate :].copy_(up_I)
        self.down_bias_EH[index].copy_(down_H)


def checked_format(name: str, matrix: AnyWeight, shape: tuple[int, int], form: WeightFormat | None) -> AnyWeight:
    """The matrix, if it has this shape and format (None: floats); nothing is converted in silence."""
    if tuple(matrix.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected {shape}")
    given = None if isinstance(matrix, Tensor) else matrix.format
    if given != form:
        raise ValueError(f"{name} is stored as {given or 'floats'}, expected {form or 'floats'}")
    return matrix


def own_copy(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy that shares nothing with `tensor`, so that a memory-mapped source can be let go."""
    copy = torch.empty(tensor.shape, dtype=dtype, device=device)
    copy.copy_(tensor)
    return copy


def has_grouped_mm(experts: "ReferenceExperts | TritonExperts") -> bool:
    """Whether `torch._grouped_mm` takes these weights: bfloat16, both widths multiples of 8 elements (16 bytes)."""
    return (
        hasattr(torch, "_grouped_mm")
        and experts.formats == FLOATS
        and experts.down_EHI.dtype == torch.bfloat16
        and experts.shape.hidden % 8 == 0
        and experts.shape.intermediate % 8 == 0
    )


def loop_over_experts(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ReferenceExperts) -> Tensor:
    """Ascending over the touched experts; each adds its weighted rows to a float32 sum."""
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    if experts.shape.num_experts == 1:
        touched = [0]
    else:
        touched = [expert for expert in torch.unique(ids_TK).tolist() if expert >= 0]
    for expert in touched:
        rows, slots = torch.where(ids_TK == expert)
        y_RH = _rows_of_expert(x_TH[rows], expert, experts).float()
        sums_TH.index_add_(0, rows, y_RH * weights_TK[rows, slots].float().unsqueeze(1))
    return sums_TH.to(x_TH.dtype)


def every_expert(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ReferenceExperts) -> Tensor:
    """The sums of `loop_over_experts` in the same order, without asking which experts were touched."""
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in range(experts.shape.num_experts):
        chosen_TK = ids_TK == expert
        y_TH = _rows_of_expert(x_TH, expert, experts)
        weights_T1 = torch.where(chosen_TK, weights_TK.float(), 0.0).sum(1, keepdim=True)
        sums_TH += torch.where(chosen_TK.any(1, keepdim=True), y_TH.float() * weights_T1, 0.0)
    return sums_TH.to(x_TH.dtype)


def _rows_of_expert(x_RH: Tensor, expert: int, experts: ReferenceExperts) -> Tensor:
    gate_up_RJ = F.linear(x_RH, experts.gate_up_of(expert), _of(expert, experts.gate_up_bias_EJ))
    hidden_RI = activate(gate_up_RJ, experts.shape, native=False)
    return F.linear(hidden_RI, experts.down_of(expert), _of(expert, experts.down_bias_EH))


def _of(expert: int, bias_EX: Tensor | None) -> Tensor | None:
    return None if bias_EX is None else bias_EX[expert]


def _add_bias(y_RX: Tensor, bias_EX: Tensor | None, experts_R: Tensor) -> Tensor:
    """Each row plus its expert's bias; rows of no expert, which count for nothing, get the last one's."""
    if bias_EX is None:
        return y_RX
    return y_RX + bias_EX.index_select(0, experts_R.clamp(max=bias_EX.shape[0] - 1))


def grouped_products(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: "ReferenceExperts | TritonExperts"
) -> Tensor:
    """The same sums without asking the host anything."""
    num_experts, (num_rows, top_k) = experts.shape.num_experts, ids_TK.shape
    # 1. Slots of each row in ascending local index, "not held here" last; then all slots by expert, stable.
    keys_TK, slots_TK = torch.where(ids_TK < 0, num_experts, ids_TK).sort(dim=1)
    weights_TK = weights_TK.gather(1, slots_TK).float()
    keys_R, order_R = keys_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(keys_R, torch.arange(num_experts, device=x_TH.device), right=True).int()
    # 2. Both products over the groups. Rows beyond the last group are never written: they are replaced by zeros below.
    x_RH = x_TH.index_select(0, order_R // top_k)
    gate_up_RJ = torch._grouped_mm(x_RH, experts.gate_up_EJH.transpose(1, 2), offs=ends_E)
    hidden_RI = activate(_add_bias(gate_up_RJ, experts.gate_up_bias_EJ, keys_R), experts.shape, native=False)
    y_RH = torch._grouped_mm(hidden_RI, experts.down_EHI.transpose(1, 2), offs=ends_E)
    y_RH = _add_bias(y_RH, experts.down_bias_EH, keys_R)
    # 3. Back to rows of tokens, summed in a fixed order.
    y_TKH = torch.empty_like(y_RH).index_copy_(0, order_R, y_RH).view(num_rows, top_k, y_RH.shape[-1])
    held_TK1 = (keys_TK < num_experts).unsqueeze(-1)
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for slot in range(top_k):
        y_TH = torch.where(held_TK1[:, slot], y_TKH[:, slot], 0).float()
        sums_TH.addcmul_(y_TH, weights_TK[:, slot, None])
    return sums_TH.to(x_TH.dtype)


WIDE_LINEAR_ROWS = 4096


class ReferenceBackend:
    """`KernelBackend` in plain PyTorch. `dtype` is that of weights, activations and cache."""

    name = "reference"
    orders_columns = True

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.asks_host = True
        self._plans = AttentionPlans(make_plan)

    def pack_linear(self, weight: AnyWeight, bias: Tensor | None = None) -> PackedLinear:
        kept_bias = None if bias is None else own_copy(bias, self.device, self.dtype)
        if isinstance(weight, QuantizedWeight):
            return ReferenceLinear(weight.own_copy(self.device), kept_bias, self.dtype)
        return ReferenceLinear(own_copy(weight, self.device, self.dtype), kept_bias, self.dtype)

    def linear(
        self,
        x_TI: Tensor,
        weight: PackedLinear,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        weight = own(weight, ReferenceLinear, self.dtype)
        if out_dtype is not None and out_dtype != x_TI.dtype:
            y = _float32_linear(x_TI, weight)
            return (y if residual_TO is None else y + residual_TO).to(out_dtype)
        if residual_TO is None:
            return F.linear(x_TI, weight.weight_OI, weight.bias_O)
        if weight.bias_O is not None:
            residual_TO = residual_TO + weight.bias_O
        return torch.addmm(residual_TO, x_TI, weight.weight_OI.t())

    def weight_rows(self, weight: PackedLinear, ids_T: Tensor) -> Tensor:
        weight = own(weight, ReferenceLinear, self.dtype)
        return weight.weight_OI.index_select(0, ids_T)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, native=False)

    def rms_norm_(self, x_TH: Tensor, weight: Tensor, eps: float) -> None:
        x_TH.copy_(self.rms_norm(x_TH.contiguous(), weight, eps))

    def shared_gate(self, x_TH: Tensor, weight: PackedLinear, scaling: float) -> tuple[Tensor, Tensor]:
        weights_T1 = self.linear(x_TH, weight, out_dtype=torch.float32).sigmoid().mul_(scaling)
        return torch.zeros_like(weights_T1, dtype=torch.int32), weights_T1

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH = x_TH + delta_TH
        return x_TH, self.rms_norm(x_TH, weight, eps)

    def new_kv_cache(self, spec: KVCacheSpec) -> ReferenceCache:
        return ReferenceCache(spec, self.device, self.dtype)

    def rotate_and_store(
        self, qkv_TX: Tensor, cache: KVCache, layer: int, batch: AttentionBatch, heads: HeadRows
    ) -> Tensor:
        cache = own(cache, ReferenceCache, self.dtype)
        spec, num_rows = cache.spec, qkv_TX.shape[0]
        q_end = heads.num_heads * spec.key_dim
        k_end = q_end + spec.num_kv_heads * spec.key_dim
        q = qkv_TX[:, :q_end].reshape(num_rows, heads.num_heads, spec.key_dim)
        k = qkv_TX[:, q_end:k_end].reshape(num_rows, spec.num_kv_heads, spec.key_dim)
        v = None if spec.values_in_keys else qkv_TX[:, k_end:].view(num_rows, spec.num_kv_heads, spec.value_dim)
        if heads.q_norm_D is not None:
            q = self.rms_norm(q, heads.q_norm_D, heads.eps)
        if heads.k_norm_D is not None:
            k = self.rms_norm(k, heads.k_norm_D, heads.eps)
        cos, sin = look_up(heads.rotary, batch.positions_T)
        cache.store(layer, batch.slots_T, rotate(k, cos, sin, heads.rotary.interleaved, native=False), v)
        return rotate(q, cos, sin, heads.rotary.interleaved, native=False)

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
        cache = own(cache, ReferenceCache, self.dtype)
        plan = self._plans.of(batch, cache.spec, sliding_window)
        return paged_attention(q_TND, cache, layer, plan, scale, sinks_N)

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        return choose_experts(self.linear(x_TH, weight, out_dtype=torch.float32), bias_E, router)

    def new_experts(self, shape: ExpertShape, formats: ExpertFormats | None = None) -> PackedExperts:
        return ReferenceExperts(shape, self.device, self.dtype, formats or FLOATS)

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        experts = own(experts, ReferenceExperts, self.dtype)
        if self.device.type == "cuda" and has_grouped_mm(experts):
            return grouped_products(x_TH, ids_TK, weights_TK, experts)
        if not self.asks_host:
            return every_expert(x_TH, ids_TK, weights_TK, experts)
        return loop_over_experts(x_TH, ids_TK, weights_TK, experts)


def _float32_linear(x_TI: Tensor, weight: ReferenceLinear) -> Tensor:
    """x @ weight.T + bias with float32 results, widening a slice of the weight at a time."""
    wide = x_TI.float()
    if isinstance(weight.weight, QuantizedWeight):
        starts = range(0, max(1, weight.out_features), WIDE_LINEAR_ROWS)
        ends = [min(start + WIDE_LINEAR_ROWS, weight.out_features) for start in starts]
        slices = [weight.weight.rows(start, end).dequantize() for start, end in zip(starts, ends, strict=True)]
    else:
        slices = list(torch.split(weight.weight, WIDE_LINEAR_ROWS))
    parts = [wide @ rows.float().t() for rows in slices]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return y if weight.bias_O is None else y + weight.bias_O
