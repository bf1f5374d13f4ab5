"""The cpu back-end: thin launchers that check shapes and hand addresses to `antiphon._native`.

Weights, keys and values lie in the native layout, in memory that belongs to a native object and goes with it. A decode
step of a small model is a few hundred of these calls, so a launcher does a handful of Python operations and nothing per
layer that can be kept between layers. The instruction set is chosen at run time. Latent attention and the sparsemixer
router are rare on CPUs: they run in the reference back-end's code. Rejected: torch custom operators (dispatch costs
more than a small kernel).

Letters as in `antiphon.kernels.api`; O output width, I inner width of a plain linear.
"""

from struct import Struct

import torch
from torch import Tensor

from antiphon import _native
from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import (
    AttentionBatch,
    ExpertFormats,
    ExpertShape,
    HeadRows,
    KVCache,
    KVCacheSpec,
    PackedExperts,
    PackedLinear,
    RotaryTable,
    address,
    own,
)
from antiphon.kernels.cpu_weights import CpuExperts, CpuLinear, check_addressable
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.quantized import AnyWeight
from antiphon.kernels.reference import FLOATS, ReferenceBackend
from antiphon.specs.model import RouterSpec

PANEL_WIDTH = 16
ROW_CHOICE = Struct("=ddqqqqfffff4x")
"""`RowChoice` of csrc/kernels/operations.h: uniform; top-p; addresses of int64 token ids and of float32 counts, and how
many; top-k; temperature, 0 for the largest logit; min-p; repetition, frequency and presence penalties."""


class CpuKVCache:
    """Reserved, not touched: pages come into being as blocks are written. Unwritten memory reads as zero."""

    def __init__(self, spec: KVCacheSpec, dtype: torch.dtype) -> None:
        if spec.block_size % PANEL_WIDTH != 0:
            raise ValueError(
                f"block_size {spec.block_size} does not fit the cpu back-end: use a multiple of {PANEL_WIDTH}"
            )
        self.spec = spec
        self.dtype = dtype
        wanted = spec.num_blocks * spec.block_bytes(dtype.itemsize)
        try:
            check_addressable(wanted)
            self.native = _native.KVCache(
                dtype == torch.bfloat16,
                "" if spec.storage == "auto" else spec.storage,
                spec.num_layers,
                spec.num_blocks,
                spec.block_size,
                spec.num_kv_heads,
                spec.key_dim,
                spec.value_dim,
            )
        except MemoryError as error:
            raise ResourceError(
                f"cannot reserve a KV cache of {format_bytes(wanted)} ({spec.num_blocks} blocks of "
                f"{spec.block_size} tokens): lower the number of blocks"
            ) from error

    def read_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """See `KVCache`."""
        self.native.read_tokens(*self._run(layer, blocks, first, count, heads, rows))

    def write_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """See `KVCache`."""
        self.native.write_tokens(*self._run(layer, blocks, first, count, heads, rows))

    def _run(
        self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor
    ) -> tuple[int, int, int, int, int, int, int]:
        self.spec.check_run(layer, blocks, (first, count), heads, rows, self.dtype.itemsize)
        if not (blocks.dtype == heads.dtype == torch.int32 and blocks.is_contiguous() and heads.is_contiguous()):
            raise ValueError(f"blocks and heads must be contiguous int32, got {blocks.dtype} and {heads.dtype}")
        return layer, address(blocks), first, count, address(heads), len(heads), address(rows)


class BatchAddresses:
    """The addresses of the last batch and rotary table seen: every layer of a step asks for the same ones."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._rotary: RotaryTable | None = None
        self._native_batch: _native.BatchAddresses | None = None
        self._native_rotary: _native.RotaryAddresses | None = None

    def of_batch(self, batch: AttentionBatch, block_size: int) -> _native.BatchAddresses:
        if batch is self._batch and self._native_batch is not None:
            return self._native_batch
        tables = batch.block_tables_SB
        arrays = (batch.positions_T, batch.slots_T, batch.query_starts, batch.context_lens_S, tables)
        rows, sequences = batch.num_tokens, len(batch.query_lens)
        shapes = (rows,), (rows,), (sequences + 1,), (sequences,), (sequences, tables.shape[-1])
        for array, shape in zip(arrays, shapes, strict=True):
            if array.dtype != torch.int32 or not array.is_contiguous() or array.shape != shape:
                given = f"{array.dtype} {tuple(array.shape)}"
                raise ValueError(f"batch tensors must be contiguous int32, here {shape}, got {given}")
        positions, slots, starts, lengths, table = map(address, arrays)
        native = _native.BatchAddresses(positions, slots, starts, lengths, table, tables.shape[1], sequences, rows)
        if not batch.refilled:
            native.look(block_size)
        self._batch, self._native_batch = batch, native
        return native

    def of_rotary(self, rotary: RotaryTable) -> _native.RotaryAddresses:
        if rotary is self._rotary and self._native_rotary is not None:
            return self._native_rotary
        for table in (rotary.cos, rotary.sin):
            if table.dtype != torch.float32 or not table.is_contiguous() or table.shape != rotary.cos.shape:
                given = f"{table.dtype} {tuple(table.shape)}"
                raise ValueError(f"rotary tables must be contiguous float32 and of one shape, got {given}")
        num_positions, half = rotary.cos.shape
        native = _native.RotaryAddresses(
            address(rotary.cos), address(rotary.sin), num_positions, half, rotary.interleaved
        )
        self._rotary, self._native_rotary = rotary, native
        return native


class CpuBackend:
    """`KernelBackend` on packed weights, for bfloat16 and float32."""

    name = "cpu"
    orders_columns = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in {torch.bfloat16, torch.float32}:
            raise ValueError(f"dtype {dtype} is not known to the cpu back-end: use bfloat16 or float32")
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.asks_host = True
        self._is_bf16 = dtype == torch.bfloat16
        self._reference = ReferenceBackend(self.device, dtype)
        self._addresses = BatchAddresses()
        self._router: RouterSpec | None = None
        self._gate_options = _native.GateOptions()
        self._shared_gates: dict[float, _native.GateOptions] = {}

    def pack_linear(self, weight: AnyWeight, bias: Tensor | None = None) -> CpuLinear:
        return CpuLinear(weight, bias, self.dtype)

    def linear(
        self,
        x_TI: Tensor,
        weight: PackedLinear,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        weight = own(weight, CpuLinear, self.dtype)
        x_TI = self._inputs(x_TI, weight)
        num_rows, out_fp32 = x_TI.shape[0], out_dtype is torch.float32
        out = torch.empty(
            (num_rows, weight.out_features), dtype=torch.float32 if out_fp32 else self.dtype, device=self.device
        )
        residual, residual_stride = 0, 0
        if residual_TO is not None:
            residual_TO = self._rows(residual_TO, weight.out_features)
            if residual_TO.shape[0] != num_rows:
                raise ValueError(f"residual has {residual_TO.shape[0]} rows, x has {num_rows}")
            residual, residual_stride = address(residual_TO), residual_TO.stride(0)
        weight.native.linear(address(x_TI), num_rows, x_TI.stride(0), residual, residual_stride, address(out), out_fp32)
        return out if out_dtype is None else out.to(out_dtype)

    def weight_rows(self, weight: PackedLinear, ids_T: Tensor) -> Tensor:
        weight = own(weight, CpuLinear, self.dtype)
        if weight.quantized or ids_T.dtype != torch.int64 or ids_T.dim() != 1:
            kept = "kept in codes" if weight.quantized else "kept as floats"
            raise ValueError(f"rows {ids_T.dtype} {tuple(ids_T.shape)} of a weight {kept}: give int64 [T], and floats")
        ids_T = ids_T.contiguous()
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < weight.out_features:
            raise IndexError(f"rows {ids_T.tolist()} of a weight of {weight.out_features} rows")
        out = torch.empty((len(ids_T), weight.in_features), dtype=self.dtype, device=self.device)
        weight.native.take_rows(address(ids_T), len(ids_T), address(out))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = weight.numel()
        x = x if x.is_contiguous() else x.contiguous()
        weight = self._norm_weight(x.dtype, weight, x.shape[-1] if x.dim() else 0)
        out = torch.empty_like(x)
        _native.rms_norm(
            self._is_bf16,
            address(x),
            x.numel() // max(1, width),
            width,
            width,
            address(weight),
            eps,
            address(out),
            width,
        )
        return out

    def rms_norm_(self, x_TH: Tensor, weight: Tensor, eps: float) -> None:
        num_rows, width = x_TH.shape
        weight = self._norm_weight(x_TH.dtype, weight, width)
        if (x_TH.stride(1) != 1 and width > 1) or (x_TH.stride(0) < width and num_rows > 1):
            raise ValueError(f"rows of strides {x_TH.stride()}: elements must be consecutive, rows apart")
        at, stride = address(x_TH), x_TH.stride(0)
        _native.rms_norm(self._is_bf16, at, num_rows, stride, width, address(weight), eps, at, stride)

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        num_rows, width = x_TH.shape
        x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
        weight = self._norm_weight(x_TH.dtype, weight, width)
        if delta_TH.shape != x_TH.shape or delta_TH.dtype != self.dtype:
            raise ValueError(f"delta is {delta_TH.dtype} {tuple(delta_TH.shape)}, x is {tuple(x_TH.shape)}")
        total, out = torch.empty_like(x_TH), torch.empty_like(x_TH)
        _native.add_rms_norm(
            self._is_bf16,
            address(x_TH),
            address(delta_TH),
            num_rows,
            width,
            address(weight),
            eps,
            address(total),
            address(out),
        )
        return total, out

    def add_rows(self, x_TH: Tensor, delta_TH: Tensor) -> Tensor:
        """x + delta, rounded to dtype: the bits of PyTorch's sum."""
        num_rows, width = x_TH.shape
        x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
        if not (x_TH.dtype == delta_TH.dtype == self.dtype and delta_TH.shape == x_TH.shape):
            raise ValueError(f"{x_TH.dtype} {tuple(x_TH.shape)} and {delta_TH.dtype} {tuple(delta_TH.shape)}")
        total_TH = torch.empty_like(x_TH)
        given = address(x_TH), address(delta_TH), num_rows, width
        _native.add_rms_norm(self._is_bf16, *given, 0, 0.0, address(total_TH), 0)  # without a norm
        return total_TH

    def new_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return self._reference.new_kv_cache(spec) if spec.values_in_keys else CpuKVCache(spec, self.dtype)

    def rotate_and_store(
        self, qkv_TX: Tensor, cache: KVCache, layer: int, batch: AttentionBatch, heads: HeadRows
    ) -> Tensor:
        if cache.spec.values_in_keys:
            return self._reference.rotate_and_store(qkv_TX, cache, layer, batch, heads)
        cache = own(cache, CpuKVCache, self.dtype)
        spec = cache.spec
        width = heads.num_heads * spec.key_dim + spec.num_kv_heads * (spec.key_dim + spec.value_dim)
        qkv_TX = self._rows(qkv_TX, width).contiguous()
        q_norm_D, k_norm_D = (
            None if norm is None else self._norm_weight(qkv_TX.dtype, norm, spec.key_dim)
            for norm in (heads.q_norm_D, heads.k_norm_D)
        )
        q_TND = torch.empty((qkv_TX.shape[0], heads.num_heads, spec.key_dim), dtype=self.dtype, device=self.device)
        cache.native.rotate_and_store(
            layer,
            self._addresses.of_batch(batch, spec.block_size),
            self._addresses.of_rotary(heads.rotary),
            address(qkv_TX),
            heads.num_heads,
            address(q_norm_D),
            address(k_norm_D),
            heads.eps,
            address(q_TND),
        )
        return q_TND

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
        if cache.spec.values_in_keys:
            return self._reference.paged_attention(
                q_TND, cache, layer, batch, scale=scale, sliding_window=sliding_window, sinks_N=sinks_N
            )
        cache = own(cache, CpuKVCache, self.dtype)
        num_rows, num_heads, dim = q_TND.shape
        spec = cache.spec
        if q_TND.dtype != self.dtype or dim != spec.key_dim or num_heads % spec.num_kv_heads or not num_heads:
            raise ValueError(f"queries {q_TND.dtype} {tuple(q_TND.shape)} do not fit the cache {spec}")
        if sinks_N is not None:
            sinks_N = sinks_N.contiguous()
            if sinks_N.dtype != torch.float32 or sinks_N.shape != (num_heads,):
                raise ValueError(f"sinks are {sinks_N.dtype} {tuple(sinks_N.shape)}: {num_heads} in float32 are needed")
        q_TND = q_TND.contiguous()
        out_TNV = torch.empty((num_rows, num_heads, spec.value_dim), dtype=self.dtype, device=self.device)
        cache.native.paged_attention(
            layer,
            self._addresses.of_batch(batch, spec.block_size),
            address(q_TND),
            num_heads,
            scale,
            sliding_window or 0,
            address(sinks_N),
            address(out_TNV),
        )
        return out_TNV

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        weight = own(weight, CpuLinear, self.dtype)
        if weight.out_features != router.num_experts:
            raise ValueError(f"a gate of {weight.out_features} outputs for a router of {router.num_experts} experts")
        if router.scoring == "sparsemixer":
            return choose_experts(self.linear(x_TH, weight, out_dtype=torch.float32), bias_E, router)
        if router is not self._router:
            self._gate_options, self._router = _gate_options(router), router
        return self._choose_experts(x_TH, weight, bias_E, self._gate_options)

    def _choose_experts(
        self, x_TH: Tensor, weight: CpuLinear, bias_E: Tensor | None, options: _native.GateOptions
    ) -> tuple[Tensor, Tensor]:
        x_TH = self._inputs(x_TH, weight)
        num_rows = x_TH.shape[0]
        ids = torch.empty((num_rows, options.top_k), dtype=torch.int32, device=self.device)
        weights = torch.empty((num_rows, options.top_k), dtype=torch.float32, device=self.device)
        if bias_E is not None:
            bias_E = bias_E.float().contiguous()
            if bias_E.shape != (weight.out_features,):
                raise ValueError(f"a bias {tuple(bias_E.shape)} for {weight.out_features} experts")
        _native.gate(
            weight.native,
            options,
            address(x_TH),
            num_rows,
            x_TH.stride(0),
            address(bias_E),
            address(ids),
            address(weights),
        )
        return ids, weights

    def shared_gate(self, x_TH: Tensor, weight: PackedLinear, scaling: float) -> tuple[Tensor, Tensor]:
        weight = own(weight, CpuLinear, self.dtype)
        if (options := self._shared_gates.get(scaling)) is None:
            router = RouterSpec(num_experts=1, top_k=1, scoring="sigmoid", normalize=False, scaling=scaling)
            options = self._shared_gates[scaling] = _gate_options(router)
        return self._choose_experts(x_TH, weight, None, options)

    def new_experts(self, shape: ExpertShape, formats: ExpertFormats | None = None) -> CpuExperts:
        return CpuExperts(shape, formats or FLOATS, self.dtype)

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        experts = own(experts, CpuExperts, self.dtype)
        x_TH = self._rows(x_TH, experts.shape.hidden)
        num_rows, top_k = ids_TK.shape if ids_TK.dim() == 2 else (-1, 0)
        if num_rows != x_TH.shape[0] or weights_TK.shape != ids_TK.shape:
            raise ValueError(f"{x_TH.shape[0]} rows, ids {tuple(ids_TK.shape)}, weights {tuple(weights_TK.shape)}")
        ids_TK, weights_TK = _whole(ids_TK).contiguous(), weights_TK.float().contiguous()
        out_TH = torch.empty((num_rows, experts.shape.hidden), dtype=self.dtype, device=self.device)
        experts.native.grouped_ffn(
            address(x_TH),
            num_rows,
            x_TH.stride(0),
            address(ids_TK),
            address(weights_TK),
            top_k,
            address(out_TH),
        )
        return out_TH

    def argmax_rows(self, logits_TV: Tensor) -> Tensor:
        """Index of each row's first largest float32 logit, int64 [T]."""
        _check_logits(logits_TV)
        ids = torch.empty(logits_TV.shape[0], dtype=torch.int64, device=self.device)
        num_rows, width = logits_TV.shape
        _native.argmax_rows(address(logits_TV), num_rows, width, logits_TV.stride(0), address(ids))
        return ids

    def choose_rows(self, logits_TV: Tensor, choices: bytes) -> list[int]:
        """A token of each row of float32 logits, as `choices` say: a `ROW_CHOICE` for each row, one after the other."""
        _check_logits(logits_TV)
        num_rows, width = logits_TV.shape
        if len(choices) != num_rows * ROW_CHOICE.size:
            raise ValueError(f"{num_rows} rows and {len(choices)} bytes of choices: a row has {ROW_CHOICE.size}")
        return _native.choose_rows(address(logits_TV), num_rows, width, logits_TV.stride(0), choices)

    def _inputs(self, x: Tensor, weight: CpuLinear) -> Tensor:
        """x as rows in the order of the weight's columns."""
        x = self._rows(x, weight.in_features)
        return x if weight.order is None else x.index_select(1, weight.order)

    def _rows(self, x: Tensor, width: int) -> Tensor:
        """x as rows of consecutive elements, after checking that the kernel may read them."""
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != width:
            raise ValueError(f"expected {self.dtype} rows of width {width}, got {x.dtype} {tuple(x.shape)}")
        return x if x.stride(1) == 1 or width <= 1 else x.contiguous()

    def _norm_weight(self, dtype: torch.dtype, weight: Tensor, width: int) -> Tensor:
        """The weight as the kernels read it, after checking that it is one of rows of this dtype and width."""
        if dtype != self.dtype or weight.dtype != self.dtype or weight.numel() != width:
            raise ValueError(
                f"expected {self.dtype} rows and a norm weight of width {width}, got {dtype} rows and "
                f"{weight.dtype} {tuple(weight.shape)}"
            )
        return weight if weight.is_contiguous() else weight.contiguous()


def _check_logits(logits_TV: Tensor) -> None:
    is_table = logits_TV.dim() == 2 and logits_TV.shape[1] > 0 and logits_TV.stride(1) == 1
    if logits_TV.dtype != torch.float32 or not is_table:
        given = f"{logits_TV.dtype} {tuple(logits_TV.shape)}"
        raise ValueError(f"logits must be float32 with consecutive columns, one at least, got {given}")


def _whole(ids_TK: Tensor) -> Tensor:
    """In int32; `ValueError` for what is no whole number of 32 bits."""
    if ids_TK.dtype == torch.int32:
        return ids_TK
    whole = ids_TK.int()
    if not torch.equal(whole.to(ids_TK.dtype), ids_TK):
        raise ValueError(f"ids in {ids_TK.dtype} are no numbers of experts: use int32")
    return whole


def _gate_options(router: RouterSpec) -> _native.GateOptions:
    fits = 0 < router.top_k <= router.num_experts and 0 < router.top_k_groups <= router.num_groups
    if not fits or router.num_experts % router.num_groups or router.scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"{router}: it chooses 1 to all experts, of 1 to all of its groups, which are of one size")
    options = _native.GateOptions()
    options.sigmoid = router.scoring == "sigmoid"
    options.top_k = router.top_k
    options.num_groups = router.num_groups
    options.top_k_groups = router.top_k_groups
    options.group_score_top2 = router.group_score == "top2"
    options.normalize = router.normalize
    options.softmax_after_top_k = router.softmax_after_top_k
    options.scaling = router.scaling
    return options
