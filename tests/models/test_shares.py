"""The parts of N ranks add up to the whole model, for every family, and no rank reads what is not its own."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.rank_group import RankGroup
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.shares import check_ranks, share_of
from tests.models.conftest import FAMILIES, SavedModel, logits_by_chunks
from tests.models.decoder import Decoder
from tests.models.rank_threads import ThreadRanks, on_ranks

TOLERANCE = 2e-4


def logits_of_ranks(
    saved: SavedModel,
    num_ranks: int,
    token_ids: Tensor,
    chunks: list[int],
    *,
    backend: KernelBackend | None = None,
    num_blocks: int = 1,
    weights: str = "as-stored",
) -> list[Tensor]:
    spec, backend = load_model_spec(saved.folder), backend or ReferenceBackend()

    def of(ranks: ThreadRanks) -> Tensor:
        ranks.num_blocks = num_blocks
        checkpoint = open_weights(saved.folder, weights)
        share = share_of(spec, ranks.rank, num_ranks)
        half = load_attention_half(checkpoint, spec, backend, ranks=ranks)
        decoder = Decoder(half, load_expert_half(checkpoint, spec, backend, share=share))
        return logits_by_chunks(decoder, token_ids, chunks, block_size=16)

    return on_ranks(num_ranks, of)


QUICK = [("qwen3_moe", 2), ("olmoe", 5), ("dbrx", 3), ("gpt_oss", 3), ("deepseek_v2", 2), ("granitemoeshared", 3)]


def families_and_ranks() -> Iterator[Any]:
    for family in FAMILIES:
        for num_ranks in (2, 3, 5):
            quick = (family, num_ranks) in QUICK
            yield pytest.param(family, num_ranks, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "num_ranks"), list(families_and_ranks()))
def test_ranks_equal_transformers(family: str, num_ranks: int, save_model: Any, tools: Any) -> None:
    """Two KV heads: two ranks get one each, three and five ranks share them; widths of 24 and 40 do not divide."""
    saved = save_model(tools.config(family))
    token_ids = tools.ids(37)
    expected = saved.logits(token_ids)
    found = logits_of_ranks(saved, num_ranks, token_ids, [16, 1, 20])
    assert all(torch.equal(each, found[0]) for each in found[1:]), "all ranks have the same bits"
    assert float((found[0] - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("weights", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx", "deepseek_v3"])
def test_ranks_have_the_numbers_that_one_process_rounds_to(
    family: str, weights: str, save_model: Any, tools: Any
) -> None:
    """Parts of 24 and 40 columns begin inside groups of 32; experts lie in the file in four ways."""
    saved, token_ids = save_model(tools.config(family)), tools.ids(9)
    for backend in (ReferenceBackend(), CpuBackend(torch.float32)):
        whole, parts = (
            logits_of_ranks(saved, num_ranks, token_ids, [9], backend=backend, weights=weights)[0]
            for num_ranks in (1, 3)
        )
        assert float((parts - whole).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "granitemoeshared"])
def test_sums_by_blocks_of_rows_have_the_same_bits(family: str, save_model: Any, tools: Any) -> None:
    """Our kernels give a row the same bits whatever is multiplied with it. 21 rows in 4 blocks do not divide; one row
    leaves three of them empty."""
    saved, token_ids = save_model(tools.config(family)), tools.ids(37)
    whole, blocks = (
        logits_of_ranks(saved, 2, token_ids, [21, 1, 15], backend=CpuBackend(torch.float32), num_blocks=num_blocks)
        for num_blocks in (1, 4)
    )
    assert all(torch.equal(each, whole[0]) for each in (*whole, *blocks))


def test_native_kernels_take_parts_of_any_size(save_model: Any, tools: Any) -> None:
    """Three query heads for two copies of one KV head and one of the other; widths of 12, 8 and 5 columns."""
    saved = save_model(tools.config("qwen3_moe", num_key_value_heads=3, moe_intermediate_size=13))
    spec, checkpoint, backend = load_model_spec(saved.folder), Checkpoint(saved.folder), CpuBackend(torch.float32)
    x_TH = torch.randn(7, spec.hidden_size)
    ids_TK = torch.tensor([[0, 4], [1, 2], [3, 0], [4, 3], [2, 1], [1, 0], [0, 1]], dtype=torch.int32)
    weights_TK = torch.rand(7, 2)
    whole = load_expert_half(checkpoint, spec, backend).forward(1, x_TH, ids_TK, weights_TK)
    for num_ranks in (2, 3, 13):
        parts = [
            load_expert_half(checkpoint, spec, backend, share=share_of(spec, rank, num_ranks)).forward(
                1, x_TH, ids_TK, weights_TK
            )
            for rank in range(num_ranks)
        ]
        assert torch.allclose(torch.stack(parts).sum(0), whole, atol=1e-5), num_ranks


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "shares"),
    [
        (6, 3, 2, [((0, 4), (0, 1)), ((4, 6), (2,))]),
        (6, 2, 3, [((0, 2), (0,)), ((2, 4), (0, 1)), ((4, 6), (1,))]),
        (6, 2, 4, [((0, 2), (0,)), ((2, 4), (0, 1)), ((4, 5), (1,)), ((5, 6), (1,))]),
        (10, 2, 3, [((0, 4), (0,)), ((4, 7), (0, 1, 1)), ((7, 10), (1,))]),
        (8, 1, 3, [((0, 3), (0,)), ((3, 6), (0,)), ((6, 8), (0,))]),
    ],
)
def test_heads_of_ranks(
    num_heads: int, num_kv_heads: int, num_ranks: int, shares: list[Any], save_model: Any, tools: Any
) -> None:
    config = tools.config("qwen3_moe", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    spec = load_model_spec(save_model(config).folder)
    found = [share_of(spec, rank, num_ranks) for rank in range(num_ranks)]
    assert [(share.q_heads, share.kv_heads) for share in found] == shares
    counted = [share.kv_heads[place] for share in found for place in share.counted_kv_heads(num_heads // num_kv_heads)]
    assert counted == list(range(num_kv_heads)), "each KV head is counted once"


@pytest.mark.parametrize("family", ["qwen2_moe", "dbrx", "deepseek_v3", "gpt_oss"])
def test_a_rank_reads_its_part(family: str, save_model: Any, tools: Any) -> None:
    """Two ranks read each routed expert once between them, and of attention once what is split and twice the rest."""
    saved = save_model(tools.config(family))
    spec, backend = load_model_spec(saved.folder), ReferenceBackend()
    tensors = load_file(saved.folder / "model.safetensors")
    routed = sum(v.nbytes for k, v in tensors.items() if ".experts." in k)

    def bytes_read(half: str, share: Any = None) -> int:
        checkpoint = Checkpoint(saved.folder)
        if half == "experts":
            load_expert_half(checkpoint, spec, backend, share=share)
        else:
            ranks = RankGroup() if share is None else ThreadRanks(share.rank, [None] * 2, threading.Barrier(2))
            load_attention_half(checkpoint, spec, backend, ranks=ranks)
        return checkpoint.bytes_read

    shares = [share_of(spec, rank, 2) for rank in range(2)]
    assert sum(bytes_read("experts", share) for share in shares) == routed
    assert all(abs(bytes_read("experts", share) - routed / 2) < 0.05 * routed for share in shares)
    whole = bytes_read("attention")
    assert all(bytes_read("attention", share) < 0.75 * whole for share in shares)


def test_more_ranks_than_parts_are_refused(save_model: Any, tools: Any) -> None:
    spec = load_model_spec(save_model(tools.config("qwen3_moe")).folder)
    check_ranks(spec, "--tp", 6, attention=True, experts=True)
    with pytest.raises(UserError) as caught:
        check_ranks(spec, "--tp", 7, attention=True, experts=True)
    assert str(caught.value) == "--tp is 7: the model has 6 attention heads, so it must be at most 6"
    with pytest.raises(UserError) as caught:
        check_ranks(spec, "--expert-tp", 25, attention=False, experts=True)
    assert str(caught.value) == "--expert-tp is 25: the model has 24 columns in an expert, so it must be at most 24"
