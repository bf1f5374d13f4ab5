"""Rows that travel as E4M3: edge sizes of the format, then dispatch and combine on four ranks: values, gradients and
bytes with their scales."""

from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.collectives import AllGather, MovesRows, ReduceScatter, run
from antiphon.comm.dispatch import AllToAllWay, Dispatcher, GatherScatter, Way
from antiphon.comm.float8 import (
    Float8Rows,
    RowFormat,
    decode_by_channel,
    decode_by_token,
    encode_by_channel,
    encode_by_token,
    rows_by_channel,
)
from antiphon.comm.mesh import Group, Sizes, connect
from tests.comm.ranks import on_ranks

RANKS, ROWS, WIDTH, EXPERTS, TOP_K = 4, 150, 16, 6, 2
KINDS = "each", "once", "gathered"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
def test_rows_come_back_within_a_sixteenth(rows: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, WIDTH) * torch.logspace(-6, 6, WIDTH)).to(dtype)
    by_token, _ = encode_by_token(x)
    assert by_token.shape == (rows, WIDTH + 4)
    scale = x.abs().amax(1, keepdim=True).double()
    assert bool(((decode_by_token(by_token, dtype) - x).double().abs() <= x.double().abs() / 14 + scale / 2**17).all())
    runs = (rows // 2, 0, rows - rows // 2)
    by_channel, lost = encode_by_channel(x, runs)
    assert by_channel.shape == (sum(map(rows_by_channel, runs)), WIDTH)
    assert lost[0] == 0
    back = decode_by_channel(by_channel, runs, dtype)
    assert back.dtype == dtype
    largest = x.double().abs().amax(0) if rows else 0.0
    assert bool(((back - x).double().abs() <= x.double().abs() / 14 + largest / 2**17).all())


def test_what_is_lost_is_counted() -> None:
    x = torch.tensor([[1.0, 1e-9, 0.0, -2.0], [float("inf"), 1.0, float("-inf"), 0.5], [0.0, 0.0, 0.0, 0.0]])
    encoded, lost = encode_by_token(x)
    assert lost == (2, 1)
    assert torch.equal(decode_by_token(encoded, torch.float32)[2], x[2])
    assert decode_by_token(encoded, torch.float32)[1].tolist() == [1.0, 1.0, -1.0, 0.5]
    assert encode_by_channel(x, (3,))[1] == (2, 1)
    nan, _ = encode_by_token(torch.tensor([[1.0, float("nan")]]))
    assert bool(decode_by_token(nan, torch.float32)[0, 1].isnan())


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(ROWS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    x, grad = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, ids, torch.rand(ROWS, TOP_K, generator=generator), grad


def through(dispatcher: Dispatcher, own: tuple[int, int], rank: int) -> tuple[list[Tensor], tuple[int, ...]]:
    """The sum, and gradients of rows and weights; then the rows that came."""
    x, ids, weights, grad = drawn(rank)
    x.requires_grad_()
    weights.requires_grad_()
    arrived = []

    def multiply(rows: Tensor, counts: tuple[int, ...], _: Tensor | None) -> Tensor:
        arrived.append(counts)
        return rows * (torch.arange(*own).repeat_interleave(torch.tensor(counts)).unsqueeze(1) + 1.0)

    out = dispatcher.through(multiply, x, ids, weights)
    out.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad], arrived[0]


def both_ways(rank: int) -> dict[tuple[str, str], Any]:
    """By way and format: the largest distance of sum and gradients, over the largest number, bytes, and numbers lost;
    and whether a second time gives the same bits."""
    mesh = connect(Sizes(world_size=RANKS, expert=RANKS), rank, 60)
    group, experts = mesh.group("expert"), split_evenly(EXPERTS, RANKS)
    own, found = experts[rank], {}
    expected, _ = through(Dispatcher(EXPERTS), (0, EXPERTS), rank)
    for kind in KINDS:
        for name in ("float8", "float8_permutation"):
            formats = RowFormat(name)  # type: ignore[arg-type]
            way: Way = GatherScatter(group, own, formats)
            if kind != "gathered":
                way = AllToAllWay(group, experts, deduplicate=kind == "once", formats=formats)
            mesh.ledger.take()
            results, _ = through(Dispatcher(own[1] - own[0], (way,)), own, rank)
            ledger = mesh.ledger.take()
            again, _ = through(Dispatcher(own[1] - own[0], (way,)), own, rank)
            off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, expected, strict=True)]
            same = all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
            sent = {key: num for key, num in ledger.sent_bytes.items() if key.split(".")[0] in ("dispatch", "combine")}
            found[kind, name] = off, sent, dict(ledger.lost_numbers), same
    for gathers in (True, False):
        found["attention", gathers] = of_attention(group, gathers)
    return found


POSITIONS, TOKENS = (3, 2, 2, 2), 2  # of each rank, and sequences of a position


def of_attention(group: Group, gathers: bool) -> tuple[torch.dtype, list[float], dict[str, int]]:
    """What tensor ranks gather before attention, or add up behind it, with its gradient: how far from plain, and bytes
    of the E4M3 form."""
    generator = torch.Generator().manual_seed(group.index)
    num_positions = POSITIONS[group.index] if gathers else sum(POSITIONS)
    x = torch.randn(num_positions, TOKENS, WIDTH, generator=generator).bfloat16()
    plain: MovesRows = (AllGather if gathers else ReduceScatter)(group, "attention", POSITIONS)
    results = []
    for collective in (plain, Float8Rows(plain, torch.bfloat16, tokens=TOKENS)):
        leaf = x.clone().requires_grad_()
        group.ledger.take()
        out = run(collective, leaf)
        out.backward(torch.randn(out.shape, generator=generator.manual_seed(9)).bfloat16())
        assert leaf.grad is not None
        results.append((out.detach(), leaf.grad))
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True)]
    return results[1][0].dtype, off, dict(group.ledger.take().sent_bytes)


def sent_to(rank: int, kind: str) -> list[int]:
    """Rows that this rank sends to each."""
    experts = split_evenly(EXPERTS, RANKS)
    ids, counts = drawn(rank)[1], []
    for first, last in experts:
        here = (ids >= first) & (ids < last)
        counts.append(int(here.any(1).sum() if kind == "once" else here.sum()))
    return counts


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), both_ways)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(of_ranks: list[Any], kind: str) -> None:
    for found in of_ranks:
        for name in ("float8", "float8_permutation"):
            off, _, lost, same = found[kind, name]
            assert max(off) < (1e-5 if (kind, name) == ("gathered", "float8_permutation") else 0.08)
            assert same
            assert not any(num for key, num in lost.items() if key.endswith("clipped"))


@pytest.mark.parametrize("kind", ["each", "once"])
def test_bytes_of_all_to_alls(of_ranks: list[Any], kind: str) -> None:
    """Rows with a scale by token forward; by channel and group of 128 backward, over the same way reversed."""
    table = [sent_to(rank, kind) for rank in range(RANKS)]
    for rank, found in enumerate(of_ranks):
        away = [table[rank][other] for other in range(RANKS) if other != rank]
        came = [table[other][rank] for other in range(RANKS) if other != rank]
        there = sum(away) * (WIDTH + 4) + sum(came) * WIDTH + 4 * WIDTH * sum(-(-rows // 128) for rows in came)
        back = sum(came) * (WIDTH + 4) + sum(away) * WIDTH + 4 * WIDTH * sum(-(-rows // 128) for rows in away)
        for name in ("float8", "float8_permutation"):
            assert found[kind, name][1] == {"dispatch.all_to_all": there, "combine.all_to_all": back}


def test_rows_of_attention(of_ranks: list[Any]) -> None:
    """By token forward and by channel backward; sums are all-to-alls, added in float32 and given in the own type."""
    for rank, found in enumerate(of_ranks):
        away = TOKENS * (sum(POSITIONS) - POSITIONS[rank])
        others = (RANKS - 1) * TOKENS * max(POSITIONS)
        by_channel = others * WIDTH + (RANKS - 1) * 4 * WIDTH
        dtype, off, sent = found["attention", True]
        assert dtype == torch.bfloat16
        assert max(off) < 0.1
        back = away * WIDTH + 4 * WIDTH * (RANKS - 1)
        assert sent == {"attention.all_gather": others * (WIDTH + 4), "attention.all_to_all": back}
        _, off, sent = found["attention", False]
        assert max(off) < 0.1
        assert sent == {"attention.all_to_all": away * (WIDTH + 4), "attention.all_gather": by_channel}


def test_bytes_of_gathers(of_ranks: list[Any]) -> None:
    others, groups = RANKS - 1, -(-ROWS // 128)
    forward, backward = others * ROWS * (WIDTH + 4), others * WIDTH * (ROWS + 4 * groups)
    for found in of_ranks:
        sent = found["gathered", "float8"][1]
        assert sent["dispatch.all_gather"] == sent["combine.all_to_all"] == forward
        assert sent["dispatch.all_to_all"] == sent["combine.all_gather"] == backward
        plain = found["gathered", "float8_permutation"][1]
        assert set(plain.values()) == {others * ROWS * WIDTH * 4}
