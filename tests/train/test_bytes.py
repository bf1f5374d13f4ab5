"""Bytes that the trainer's collectives count, against the formulas of `cost.training`: MegaScale-MoE's six models.

Equations 1, 3 and 4 count what a rank sends, and so does the ledger. Equation 2 (Ulysses) is twice that, as
`tests/cost/training/test_volumes.py` shows element by element; so is the ratio SP / TP that follows from it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.collectives import run
from antiphon.comm.dispatch import AllToAllWay, Dispatcher
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.cost.exchange import expected_distinct
from antiphon.cost.network import collective_bytes
from antiphon.cost.training.counts import (
    expert_parallel_volume,
    expert_to_tensor_ratio,
    layer_ratio,
    sequence_to_tensor_ratio,
)
from antiphon.kernels.ops.route import choose_experts
from antiphon.reproduce.msm_models import NODE_DEVICES, TABLE_2
from antiphon.specs.model import ModelSpec, RouterSpec
from antiphon.train import feed_forward
from antiphon.train.config_tables import LossConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing
from antiphon.train.sequence_parallel import SequenceParallel
from antiphon.train.weights import FirstValues, RankShare
from tests.comm.ranks import on_ranks

RANKS, LENGTH, NUMBER_BYTES = 4, 64, 8


def sent(mesh: Mesh, *purposes: str) -> int:
    """Since it was last asked."""
    return sum(num for name, num in mesh.ledger.take().sent_bytes.items() if name.split(".")[0] in purposes)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Collectives of eight ranks that move nothing: enough to count."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NODE_DEVICES)
    yield
    dist.destroy_process_group()


def attention_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Of one layer's attention in bfloat16, forward and backward: its collectives on tensors of the model's shapes."""
    mesh, share = connect(sizes, 0), RankShare.of(spec, sizes, 0)
    parallel = SequenceParallel(spec.attention, share, mesh.group("sequence"), mesh.group("tensor"), LENGTH)
    rows = LENGTH // NODE_DEVICES

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(1, *shape, dtype=torch.bfloat16, requires_grad=True)

    x_BsH = tensor(rows, spec.hidden_size).transpose(0, 1)
    gathered = run(parallel.gather(x_BsH), x_BsH)
    heads, width = spec.attention.num_heads // sizes.tensor, spec.attention.head_dim
    kv_heads = spec.attention.num_kv_heads // sizes.tensor
    packed = parallel.pack_heads(
        *(tensor(LENGTH // sizes.sequence, each, width) for each in (heads, kv_heads, kv_heads))
    )
    received = run(parallel.to_heads(packed), packed)
    packed_rows = parallel.pack_rows(tensor(LENGTH, heads // sizes.sequence, width))
    rows_back = run(parallel.to_rows(packed_rows), packed_rows)
    x_BSH = tensor(gathered.shape[0], spec.hidden_size).transpose(0, 1)
    summed = run(parallel.scatter(x_BSH), x_BSH)
    results = [gathered, received, rows_back, summed]
    torch.autograd.backward(results, [torch.ones_like(each) for each in results])
    return sent(mesh, "attention")


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("row", TABLE_2.values(), ids=lambda row: row.name)
def test_attention_over_eight_ranks(row: Any) -> None:
    whole, ranks = 2 * LENGTH * row.hidden_size, NODE_DEVICES  # bytes of b s h in bfloat16
    spec = row.model(1)
    by_tensor = attention_bytes(spec, Sizes(world_size=ranks, tensor=ranks))
    by_sequence = attention_bytes(spec, Sizes(world_size=ranks, sequence=ranks))
    held = (1 + 2 / row.heads_per_kv_head) * whole / ranks
    queries_keys_values, _ = collective_bytes("all_to_all", held, ranks)
    output, _ = collective_bytes("all_to_all", whole / ranks, ranks)
    assert by_tensor == 2 * 2 * whole * (ranks - 1) / ranks
    assert by_sequence == pytest.approx(2 * float(queries_keys_values + output), rel=1e-12)
    ratio = float(sequence_to_tensor_ratio(ranks, row.heads_per_kv_head))
    assert by_sequence / by_tensor == pytest.approx(ratio / 2, rel=1e-12)


def small(name: str) -> tuple[Any, ModelSpec]:
    """The model with its heads, experts and top-k, one layer, and heads of width 2."""
    row = TABLE_2[name]
    small_row = replace(row, hidden_size=2 * row.num_heads, expert_width=8, num_shared=0)
    return row, replace(small_row.model(1), vocab_size=16)


def even(logits_TE: Tensor, score_bias_E: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
    """The gate's weights, and choices that use all experts alike; rows times top-k divides by experts."""
    ids_TK, weights_TK = choose_experts(logits_TE, score_bias_E, router)
    return (torch.arange(ids_TK.numel()) % router.num_experts).view_as(ids_TK), weights_TK


def layer_bytes(rank: int) -> dict[str, list[int]]:
    """By model: bytes that this rank sends in a forward and backward of a layer: [SP, EP, TP, TP]."""
    found = {}
    feed_forward.choose_experts = even
    for name in TABLE_2:
        _, spec = small(name)
        counted = []
        for sizes in (
            Sizes(world_size=RANKS, sequence=RANKS, expert=RANKS),
            Sizes(world_size=RANKS, tensor=RANKS, expert_tensor=RANKS),
        ):
            mesh = connect(sizes, rank, 60)
            model = MoeModel(
                spec,
                mesh,
                max_positions=RANKS * LENGTH,
                dtype=torch.float64,
                first=FirstValues(0, 0.1),
                parallel=ParallelConfig(deduplicate=False),
            ).double()
            ids = torch.zeros(1, RANKS * LENGTH, dtype=torch.int64)
            batch = Batch(ids, ids, torch.arange(RANKS * LENGTH).unsqueeze(0), None)
            routing = Routing(spec.router, LossConfig(), mesh.stage, num_layers=1)
            mesh.ledger.take()
            model.stage(0, None, batch, torch.tensor(1), routing).backward()
            ledger = mesh.ledger.take()
            for purposes in (("attention",), ("dispatch", "combine")):
                mesh.ledger.sent_bytes.update(ledger.sent_bytes)
                counted.append(sent(mesh, *purposes))
        found[name] = counted
    return found


def test_a_layer_over_four_ranks(tmp_path: Path) -> None:
    for of_rank in on_ranks(RANKS, tmp_path, layer_bytes):
        for name, (by_sequence, by_expert, by_tensor, by_width) in of_rank.items():
            row, spec = small(name)
            whole = NUMBER_BYTES * RANKS * LENGTH * spec.hidden_size
            assert by_tensor == by_width == 2 * 2 * whole * (RANKS - 1) // RANKS
            assert by_expert == 2 * whole * float(expert_parallel_volume(RANKS, row.top_k))
            assert by_expert / by_width == float(expert_to_tensor_ratio(RANKS, row.top_k))
            attention = float(sequence_to_tensor_ratio(RANKS, row.heads_per_kv_head)) / 2
            assert by_sequence / by_tensor == pytest.approx(attention, rel=1e-12)
            layer = float(layer_ratio(RANKS, row.heads_per_kv_head, row.top_k))
            of_layer = (2 * by_sequence + by_expert) / (by_tensor + by_width)  # as the paper counts Ulysses
            assert of_layer == pytest.approx(layer, rel=1e-12)


def deduplicated(rank: int) -> dict[str, tuple[int, float]]:
    """By model: (bytes sent there and back, forward and backward; by expectation). A rank has a row for each possible
    choice, or, where there are millions, some thousand of them."""
    found = {}
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60)
    group, hidden = mesh.group("expert"), 2
    for name, row in TABLE_2.items():
        if row.num_experts < 64:
            choices = torch.tensor(list(itertools.combinations(range(row.num_experts), row.top_k)))
        else:
            generator = torch.Generator().manual_seed(rank)
            choices = torch.rand(20_000, row.num_experts, generator=generator).argsort(1)[:, : row.top_k]
        experts = split_evenly(row.num_experts, RANKS)
        way = AllToAllWay(group, experts, deduplicate=True)
        dispatcher = Dispatcher(experts[rank][1] - experts[rank][0], (way,))
        x = torch.ones(choices.shape[0], hidden, requires_grad=True)
        mesh.ledger.take()
        dispatcher.through(lambda rows, *_: rows, x, choices, torch.ones(choices.shape)).sum().backward()
        copies = float(expected_distinct(row.num_experts, row.top_k, RANKS))
        whole = 4 * hidden * RANKS * choices.shape[0]
        found[name] = sent(mesh, "dispatch", "combine"), 2 * whole * float(expert_parallel_volume(RANKS, copies))
    return found


def test_a_row_once_to_a_rank(tmp_path: Path) -> None:
    """Exact where all choices are there; of a sample within half a percent."""
    for of_rank in on_ranks(RANKS, tmp_path, deduplicated):
        for name, (counted, expected) in of_rank.items():
            rel = 1e-12 if TABLE_2[name].num_experts < 64 else 5e-3
            assert counted == pytest.approx(expected, rel=rel), name
