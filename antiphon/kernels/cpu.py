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
)
from antiphon.kernels.cpu_weights import CpuExperts, CpuLinear
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
        try:
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
            wanted = spec.num_blocks * spec.block_bytes(dtype.itemsize)
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
        return layer, blocks.data_ptr(), first, count, heads.data_ptr(), len(heads), rows.data_ptr()


class BatchAddresses:
    """The addresses of the last batch and rotary table seen: every layer of a step asks for the same ones."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._rotary: RotaryTable | None = None
        self._native_batch: _native.BatchAddresses | None = None
        self._native_rotary: _native.RotaryAddresses | None = None

    def of_batch(self, batch: AttentionBatch) -> _native.BatchAddresses:
        if batch is self._batch and self._native_batch is not None:
            return self._native_batch
        tables = batch.block_tables_SB
        arrays = (batch.positions_T, batch.slots_T, batch.query_starts, batch.context_lens_S, tables)
        for array in arrays:
            if array.dtype != torch.int32 or not array.is_contiguous():
                raise ValueError(f"batch tensors must be contiguous int32, got {array.dtype} {tuple(array.shape)}")
        positions, slots, starts, lengths, table = (array.data_ptr() for array in arrays)
        native = _native.BatchAddresses(
            positions, slots, starts, lengths, table, tables.shape[1], len(batch.query_lens), batch.num_tokens
        )
        self._batch, self._native_batch = batch, native
        return native

    def of_rotary(self, rotary: RotaryTable) -> _native.RotaryAddresses:
        if rotary is self._rotary and self._native_rotary is not None:
            return self._native_rotary
        for table in (rotary.cos, rotary.sin):
            if table.dtype != torch.float32 or not table.is_contiguous():
                raise ValueError(f"rotary tables must be contiguous float32, got {table.dtype}")
        native = _native.RotaryAddresses(
            rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1], rotary.interleaved
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
        assert isinstance(weight, CpuLinear)
        x_TI = self._inputs(x_TI, weight)
        num_rows, out_fp32 = x_TI.shape[0], out_dtype is torch.float32
        out = torch.empty((num_rows, weight.out_features), dtype=torch.float32 if out_fp32 else self.dtype)
        residual, residual_stride = 0, 0
        if residual_TO is not None:
            residual_TO = self._rows(residual_TO, weight.out_features)
            if residual_TO.shape[0] != num_rows:
                raise ValueError(f"residual has {residual_TO.shape[0]} rows, x has {num_rows}")
            residual, residual_stride = residual_TO.data_ptr(), residual_TO.stride(0)
        weight.native.linear(
            x_TI.data_ptr(), num_rows, x_TI.stride(0), residual, residual_stride, out.data_ptr(), out_fp32
        )
        return out if out_dtype is None else out.to(out_dtype)

    def weight_rows(self, weight: PackedLinear, ids_T: Tensor) -> Tensor:
        assert isinstance(weight, CpuLinear)
        assert not weight.quantized
        ids_T = ids_T.contiguous()
        assert ids_T.dtype == torch.int64
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < weight.out_features:
            raise IndexError(f"rows {ids_T.tolist()} of a weight of {weight.out_features} rows")
        out = torch.empty((len(ids_T), weight.in_features), dtype=self.dtype)
        weight.native.take_rows(ids_T.data_ptr(), len(ids_T), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        x = x if x.is_contiguous() else x.contiguous()
        self._check(x, weight, width)
        out = torch.empty_like(x)
        _native.rms_norm(
            self._is_bf16,
            x.data_ptr(),
            x.numel() // max(1, width),
            width,
            width,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            width,
        )
        return out

    def rms_norm_(self, x_TH: Tensor, weight: Tensor, eps: float) -> None:
        num_rows, width = x_TH.shape
        self._check(x_TH, weight, width)
        if x_TH.stride(1) != 1 and width > 1:
            raise ValueError(f"rows of stride {x_TH.stride(1)}: their elements must be consecutive")
        at, stride = x_TH.data_ptr(), x_TH.stride(0)
        _native.rms_norm(self._is_bf16, at, num_rows, stride, width, weight.data_ptr(), eps, at, stride)

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        num_rows, width = x_TH.shape
        x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
        self._check(x_TH, weight, width)
        if delta_TH.shape != x_TH.shape or delta_TH.dtype != self.dtype:
            raise ValueError(f"delta is {delta_TH.dtype} {tuple(delta_TH.shape)}, x is {tuple(x_TH.shape)}")
        total, out = torch.empty_like(x_TH), torch.empty_like(x_TH)
        _native.add_rms_norm(
            self._is_bf16,
            x_TH.data_ptr(),
            delta_TH.data_ptr(),
            num_rows,
            width,
            weight.data_ptr(),
            eps,
            total.data_ptr(),
            out.data_ptr(),
        )
        return total, out

    def add_rows(self, x_TH: Tensor, delta_TH: Tensor) -> Tensor:
        """x + delta, rounded to dtype: the bits of PyTorch's sum."""
        num_rows, width = x_TH.shape
        x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
        if not (x_TH.dtype == delta_TH.dtype == self.dtype and delta_TH.shape == x_TH.shape):
            raise ValueError(f"{x_TH.dtype} {tuple(x_TH.shape)} and {delta_TH.dtype} {tuple(delta_TH.shape)}")
        total_TH = torch.empty_like(x_TH)
        given = x_TH.data_ptr(), delta_TH.data_ptr(), num_rows, width
        _native.add_rms_norm(self._is_bf16, *given, 0, 0.0, total_TH.data_ptr(), 0)  # without a norm
        return total_TH

    def new_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return self._reference.new_kv_cache(spec) if spec.values_in_keys else CpuKVCache(spec, self.dtype)

    def rotate_and_store(
        self, qkv_TX: Tensor, cache: KVCache, layer: int, batch: AttentionBatch, heads: HeadRows
    ) -> Tensor:
        if not isinstance(cache, CpuKVCache):
            return self._reference.rotate_and_store(qkv_TX, cache, layer, batch, heads)
        spec = cache.spec
        width = heads.num_heads * spec.key_dim + spec.num_kv_heads * (spec.key_dim + spec.value_dim)
        qkv_TX = self._rows(qkv_TX, width).contiguous()
        for norm in (heads.q_norm_D, heads.k_norm_D):
            if norm is not None:
                self._check(qkv_TX, norm, spec.key_dim)
        q_TND = torch.empty((qkv_TX.shape[0], heads.num_heads, spec.key_dim), dtype=self.dtype)
        cache.native.rotate_and_store(
            layer,
            self._addresses.of_batch(batch),
            self._addresses.of_rotary(heads.rotary),
            qkv_TX.data_ptr(),
            heads.num_heads,
            address(heads.q_norm_D),
            address(heads.k_norm_D),
            heads.eps,
            q_TND.data_ptr(),
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
        if not isinstance(cache, CpuKVCache):
            return self._reference.paged_attention(
                q_TND, cache, layer, batch, scale=scale, sliding_window=sliding_window, sinks_N=sinks_N
            )
        num_rows, num_heads, dim = q_TND.shape
        spec = cache.spec
        if q_TND.dtype != self.dtype or dim != spec.key_dim or num_heads % spec.num_kv_heads != 0:
            raise ValueError(f"queries {q_TND.dtype} {tuple(q_TND.shape)} do not fit the cache {spec}")
        if sinks_N is not None:
            sinks_N = sinks_N.contiguous()
            if sinks_N.dtype != torch.float32 or sinks_N.shape != (num_heads,):
                raise ValueError(f"sinks are {sinks_N.dtype} {tuple(sinks_N.shape)}: {num_heads} in float32 are needed")
        q_TND = q_TND.contiguous()
        out_TNV = torch.empty((num_rows, num_heads, spec.value_dim), dtype=self.dtype)
        cache.native.paged_attention(
            layer,
            self._addresses.of_batch(batch),
            q_TND.data_ptr(),
            num_heads,
            scale,
            sliding_window or 0,
            address(sinks_N),
            out_TNV.data_ptr(),
        )
        return out_TNV

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, CpuLinear)
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
        ids = torch.empty((num_rows, options.top_k), dtype=torch.int32)
        weights = torch.empty((num_rows, options.top_k), dtype=torch.float32)
        if bias_E is not None:
            bias_E = bias_E.float().contiguous()
        _native.gate(
            weight.native,
            options,
            x_TH.data_ptr(),
            num_rows,
            x_TH.stride(0),
            address(bias_E),
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

    def shared_gate(self, x_TH: Tensor, weight: PackedLinear, scaling: float) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, CpuLinear)
        if (options := self._shared_gates.get(scaling)) is None:
            router = RouterSpec(num_experts=1, top_k=1, scoring="sigmoid", normalize=False, scaling=scaling)
            options = self._shared_gates[scaling] = _gate_options(router)
        return self._choose_experts(x_TH, weight, None, options)

    def new_experts(self, shape: ExpertShape, formats: ExpertFormats | None = None) -> CpuExperts:
        return CpuExperts(shape, formats or FLOATS, self.dtype)

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        assert isinstance(experts, CpuExperts)
        x_TH = self._rows(x_TH, experts.shape.hidden)
        num_rows, top_k = ids_TK.shape
        if num_rows != x_TH.shape[0] or weights_TK.shape != ids_TK.shape:
            raise ValueError(f"{x_TH.shape[0]} rows, ids {tuple(ids_TK.shape)}, weights {tuple(weights_TK.shape)}")
        ids_TK, weights_TK = ids_TK.int().contiguous(), weights_TK.float().contiguous()
        out_TH = torch.empty((num_rows, experts.shape.hidden), dtype=self.dtype)
        experts.native.grouped_ffn(
            x_TH.data_ptr(),
            num_rows,
            x_TH.stride(0),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            top_k,
            out_TH.data_ptr(),
        )
        return out_TH

    def argmax_rows(self, logits_TV: Tensor) -> Tensor:
        """Index of each row's first largest float32 logit, int64 [T]."""
        if logits_TV.dtype != torch.float32 or logits_TV.stride(-1) != 1:
            raise ValueError(f"logits must be float32 with consecutive columns, got {logits_TV.dtype}")
        ids = torch.empty(logits_TV.shape[0], dtype=torch.int64)
        num_rows, width = logits_TV.shape
        _native.argmax_rows(logits_TV.data_ptr(), num_rows, width, logits_TV.stride(0), ids.data_ptr())
        return ids

    def choose_rows(self, logits_TV: Tensor, choices: bytes) -> list[int]:
        """A token of each row of float32 logits, as `choices` say: a `ROW_CHOICE` for each row, one after the other."""
        if logits_TV.dtype != torch.float32 or logits_TV.stride(-1) != 1:
            raise ValueError(f"logits must be float32 with consecutive columns, got {logits_TV.dtype}")
        num_rows, width = logits_TV.shape
        if len(choices) != num_rows * ROW_CHOICE.size:
            raise ValueError(f"{num_rows} rows and {len(choices)} bytes of choices: a row has {ROW_CHOICE.size}")
        return _native.choose_rows(logits_TV.data_ptr(), num_rows, width, logits_TV.stride(0), choices)

    def _inputs(self, x: Tensor, weight: CpuLinear) -> Tensor:
        """x as rows in the order of the weight's columns."""
        x = self._rows(x, weight.in_features)
        return x if weight.order is None else x.index_select(1, weight.order)

    def _rows(self, x: Tensor, width: int) -> Tensor:
        """x as rows of consecutive elements, after checking that the kernel may read them."""
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != width:
            raise ValueError(f"expected {self.dtype} rows of width {width}, got {x.dtype} {tuple(x.shape)}")
        return x if x.stride(1) == 1 or width <= 1 else x.contiguous()

    def _check(self, x: Tensor, weight: Tensor, width: int) -> None:
        if x.dtype != self.dtype or weight.dtype != self.dtype or weight.numel() != width:
            raise ValueError(
                f"expected {self.dtype} rows and a norm weight of width {width}, got {x.dtype} rows and "
                f"{weight.dtype} {tuple(weight.shape)}"
            )


def _gate_options(router: RouterSpec) -> _native.GateOptions:
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
