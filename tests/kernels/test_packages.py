"""Other packages' kernels behind our signatures: what each is given, by stand-ins in plain PyTorch."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import packages
from antiphon.kernels.api import ExpertFormats, ExpertShape, KVCacheSpec
from antiphon.kernels.quantized import QuantizedWeight, WeightFormat
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.reference_attention import ReferenceCache
from antiphon.kernels.stacked import TritonExperts

CPU = torch.device("cpu")
FP8 = WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128)
SPEC = KVCacheSpec(num_layers=1, num_blocks=6, block_size=16, num_kv_heads=2, key_dim=8, value_dim=8)


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    packages._module.cache_clear()


def multiplied(rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor, owners: Tensor) -> None:
    """What DeepGEMM's product of groups does, and what it requires."""
    (codes, scales), (w_codes, w_scales) = rows, weight
    assert codes.dtype is w_codes.dtype is torch.float8_e4m3fn
    assert scales.dtype is w_scales.dtype is torch.float32
    assert out.dtype is torch.bfloat16
    assert owners.dtype is torch.int32
    assert scales.shape == (len(codes), codes.shape[1] // 128)
    assert w_scales.shape == (len(w_codes), w_codes.shape[1] // 128, w_codes.shape[2] // 128)
    assert len(codes) == len(owners) == len(out)
    assert len(codes) % 128 == 0
    assert (owners.view(-1, 128) == owners.view(-1, 128)[:, :1]).all(), "an expert's rows begin at multiples of 128"
    x = codes.float() * scales.repeat_interleave(128, 1)
    w = w_codes.float() * w_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    for row in (owners >= 0).nonzero().flatten().tolist():
        out[row] = w[owners[row]] @ x[row]


def bfloat16_experts(num_experts: int, device: torch.device = CPU) -> tuple[Any, Any]:
    """The same in the layout of Triton's back-end and in the reference's."""
    torch.manual_seed(1)
    shape = ExpertShape(num_experts, 256, 128, "silu")
    mine = TritonExperts(shape, ExpertFormats(), device, torch.bfloat16)
    theirs = ReferenceBackend(device, torch.bfloat16).new_experts(shape, ExpertFormats())
    for index in range(num_experts):
        matrices = [torch.randn(size).bfloat16() / 16 for size in ((128, 256), (128, 256), (256, 128))]
        for each in (mine, theirs):
            each.set_expert(index, *matrices)
    return mine, theirs


def fp8_experts(num_experts: int, device: torch.device = CPU) -> tuple[Any, Any]:
    """As `bfloat16_experts`."""
    torch.manual_seed(1)
    shape, formats = ExpertShape(num_experts, 256, 128, "silu"), ExpertFormats(gate_up=FP8, down=FP8)
    mine = TritonExperts(shape, formats, device, torch.bfloat16)
    theirs = ReferenceBackend(device, torch.bfloat16).new_experts(shape, formats)
    for index in range(num_experts):
        matrices = [
            QuantizedWeight(
                format=FP8,
                num_columns=columns,
                codes=torch.randn(rows, columns).to(torch.float8_e4m3fn),
                scales=torch.rand(rows // 128, columns // 128) * 0.1,
            )
            for rows, columns in ((128, 256), (128, 256), (256, 128))
        ]
        for each in (mine, theirs):
            each.set_expert(index, *matrices)
    return mine, theirs


def check_products(
    name: str, num_tokens: int, experts: tuple[Any, Any], tolerance: float, device: torch.device
) -> None:
    """Sums as the reference's; choices of -1 add nothing; a row alone has the same bits."""
    mine, theirs = experts
    x = torch.randn(num_tokens, 256).bfloat16().to(device)
    ids = torch.randint(-1, 2, (num_tokens, 2)).int().to(device)  # expert 2 has no row
    weights = torch.rand(num_tokens, 2).to(device)
    found = packages.products(name, x, ids, weights, mine)
    expected = ReferenceBackend(device, torch.bfloat16).grouped_ffn(x, ids, weights, theirs)
    assert found.shape == expected.shape
    if num_tokens:
        scale = expected.float().abs().max().clamp(min=1e-6)
        assert ((found.float() - expected.float()).abs().max() / scale) < tolerance
        alone = packages.products(name, x[-1:], ids[-1:], weights[-1:], mine)
        assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_deep_gemm(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to float8 of the rows."""
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=multiplied))
    check_products("deep_gemm", num_tokens, fp8_experts(3), 0.1, CPU)


@pytest.mark.parametrize("num_tokens", [1, 37])
def test_grouped_mm(num_tokens: int) -> None:
    check_products("grouped_mm", num_tokens, bfloat16_experts(3), 0.02, CPU)


def dense(q_SND: Tensor, cache: ReferenceCache, tables: Tensor, contexts: Tensor, window: int | None) -> Tensor:
    out = []
    for row, count in enumerate(contexts.tolist()):
        places = (tables[row].long()[:, None] * 16 + torch.arange(16)).flatten()[:count]
        places = places if window is None else places[-window:]
        keys, values = (table[0][places].float().repeat_interleave(2, 1) for table in (cache.keys, cache.values))
        shares = torch.einsum("nd,cnd->nc", q_SND[row].float(), keys).mul(0.3).softmax(-1)
        out.append(torch.einsum("nc,cnv->nv", shares, values))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["varlen_attn", "flashinfer"])
def test_attention_is_asked_for_with_its_own_arguments(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cache = ReferenceCache(SPEC, CPU, torch.bfloat16)
    for table in (*cache.keys, *cache.values):
        table.normal_()
    q = torch.randn(3, 4, 8).bfloat16()
    tables, contexts = torch.tensor([[1, 3], [5, 0], [2, 4]]).int(), torch.tensor([20, 1, 32]).int()

    def paged(keys: Tensor, values: Tensor) -> None:
        assert keys.shape == values.shape == (6, 16, 2, 8)
        assert keys.data_ptr() == cache.keys[0].data_ptr()

    def varlen(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, *given: Any, **how: Any) -> Tensor:
        paged(keys, values)
        assert (starts.tolist(), given) == ([0, 1, 2, 3], (None, 1, 32))
        assert how.pop("window_size") == ((-1, -1) if window is None else (4, 0))
        assert (how["enable_gqa"], how["num_splits"], how["scale"]) == (True, 1, 0.3)
        return dense(query, cache, how["block_table"], how["seqused_k"], window).bfloat16()

    def decode(
        query: Tensor, kv: Any, workspace: Tensor, tables: Tensor, lens: Tensor, *given: Any, **how: Any
    ) -> Tensor:
        paged(*kv)
        assert not workspace.any()
        assert given == (32,)
        assert how == {
            "bmm1_scale": 0.3, "bmm2_scale": 1.0, "window_left": -1 if window is None else 4, "kv_layout": "NHD"
        }  # fmt: skip
        return dense(query, cache, tables, lens, window).bfloat16()

    modules = {
        "torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen),
        "flashinfer.decode": SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode),
    }
    monkeypatch.setattr(packages, "_WORKSPACE_BYTES", 64)
    packages._workspace.cache_clear()
    monkeypatch.setattr(packages, "_module", modules.__getitem__)
    found = packages.attend(name, q, cache, 0, tables, contexts, scale=0.3, window=window)
    assert torch.equal(found, dense(q, cache, tables, contexts, window).bfloat16())


def test_what_keeps_a_package_from_these_weights() -> None:
    mine, _ = fp8_experts(1)
    floats = TritonExperts(ExpertShape(1, 256, 128, "silu"), ExpertFormats(), CPU, torch.bfloat16)
    odd = TritonExperts(ExpertShape(1, 256, 20, "silu"), ExpertFormats(), CPU, torch.bfloat16)
    why = packages.why_no_products
    assert why("deep_gemm", mine) == "deep_gemm is not installed"
    assert why("deep_gemm", floats) == "takes float8 experts with float32 scales of 128 x 128"
    assert why("grouped_mm", floats) == ""
    assert why("grouped_mm", odd) == why("grouped_mm", mine) == "takes bfloat16 experts with widths in multiples of 8"


def test_what_keeps_a_package_from_this_cache() -> None:
    why = packages.why_no_attention
    assert why("flashinfer", SPEC, torch.bfloat16, has_sinks=False) == "flashinfer is not installed"
    assert why("varlen_attn", SPEC, torch.float32, has_sinks=False) == "computes in bfloat16 or float16"
    assert "without sinks" in why("varlen_attn", SPEC, torch.bfloat16, has_sinks=True)
