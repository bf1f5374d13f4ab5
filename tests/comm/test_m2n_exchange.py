"""The exchange equals a dense computation, whatever the numbers of workers, micro-batches, rows and experts."""

import errno
import math
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import PeerTimeout, ResourceError
from antiphon.comm.m2n.api import AttentionExchange, ExchangeShape, ExpertExchange, StepAborted
from antiphon.comm.m2n.layout import RegionLayout
from antiphon.comm.m2n.routing import RowRouter
from antiphon.comm.m2n.shared_memory import create_region
from antiphon.comm.m2n.shm import ControlPage
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from tests.comm.exchange_harness import TIMEOUT_S, Exchange, Traffic, dense, exchange, random_traffic

Plan = dict[tuple[int, int, int], int]  # rows by (attention worker, layer, micro-batch)


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Any owners, copies included; every worker holds something."""
    num_workers = draw(st.integers(1, 4))
    num_experts = draw(st.integers(num_workers, 7))
    owners = [
        draw(st.lists(st.integers(0, num_workers - 1), min_size=1, max_size=num_workers, unique=True))
        for _ in range(num_experts)
    ]
    for worker in range(num_workers):
        if all(worker not in workers for workers in owners):
            owners[worker].append(worker)
    return ExpertPlacement(num_workers=num_workers, owners=tuple(tuple(workers) for workers in owners))


def run_step(made: Exchange, step: int, rows_of: dict[tuple[int, int], int], num_layers: int) -> dict[int, int]:
    """One step of all attention workers: `rows_of[attention, micro-batch]` rows, absent: no part in it.

    Compares with the dense computation; returns the bytes each attention worker should have sent."""
    shape, placement = made.shape, made.placement
    participants = [
        [attention for attention in range(shape.num_attention) if (attention, index) in rows_of]
        for index in range(shape.num_micro_batches)
    ]
    sent = dict.fromkeys(range(shape.num_attention), 0)

    def traffic(attention: int, layer: int, micro_batch: int) -> Traffic:
        seed = hash((step, attention, layer, micro_batch)) % 2**31
        num_rows = rows_of[attention, micro_batch]
        return random_traffic(num_rows, shape.hidden_size, placement.num_experts, shape.top_k, seed)

    def work(attention: int) -> None:
        end = made.attention[attention]
        mine = [index for index in range(shape.num_micro_batches) if (attention, index) in rows_of]
        end.begin_step(step, participants)
        under_way: dict[int, tuple[int, Traffic]] = {}
        for layer in range(num_layers + 1):
            for index in mine:
                if index in under_way:
                    before, data = under_way.pop(index)
                    total = end.combine(before, index, TIMEOUT_S)
                    torch.testing.assert_close(total, dense(data, before), rtol=1e-5, atol=1e-5)
                if layer < num_layers:
                    data = traffic(attention, layer, index)
                    copy = Traffic(data.rows_TH.clone(), data.ids_TK.clone(), data.weights_TK.clone())
                    end.dispatch(layer, index, copy.rows_TH, copy.ids_TK, copy.weights_TK)
                    for tensor in (copy.rows_TH, copy.ids_TK, copy.weights_TK):
                        tensor.zero_()  # the arguments may be reused on return
                    under_way[index] = layer, data
                    sent[attention] += bytes_of(made, data)

    threads = []
    for attention in range(shape.num_attention):
        made.start(partial(work, attention))
        threads.append(made._threads[-1])
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    if made.failures:
        raise made.failures[0]
    return sent


def bytes_of(made: Exchange, data: Traffic) -> int:
    """Each row once per worker that serves one of its experts: the row, and an id and a weight for each expert."""
    owners = made.placement.owners
    messages = sum(
        len({owners[expert][row % _turns(made.placement) % len(owners[expert])] for expert in ids})
        for row, ids in enumerate(data.ids_TK.tolist())
    )
    return messages * (made.layout.row_bytes + 8 * made.shape.top_k)


def _turns(placement: ExpertPlacement) -> int:
    return math.lcm(*(len(workers) for workers in placement.owners))


@settings(max_examples=40, deadline=None)
@given(placement=placements(), data=st.data())
def test_any_exchange_equals_one_dense_process(placement: ExpertPlacement, data: st.DataObject) -> None:
    num_attention = data.draw(st.integers(1, 3), "attention workers")
    num_micro_batches = data.draw(st.integers(1, 4), "micro-batches")
    max_rows = data.draw(st.integers(1, 9), "max rows")
    top_k = data.draw(st.integers(1, min(3, placement.num_experts)), "top k")
    with exchange(
        placement,
        num_attention=num_attention,
        num_micro_batches=num_micro_batches,
        max_rows=max_rows,
        hidden_size=data.draw(st.sampled_from([1, 5, 16]), "hidden"),
        top_k=top_k,
        start_word=data.draw(st.sampled_from([0, 2**31 - 2, 2**32 - 2]), "sequence number"),
    ) as made:
        made.serve()
        sent = dict.fromkeys(range(num_attention), 0)
        for step in range(2):
            pairs = [(a, i) for a in range(num_attention) for i in range(num_micro_batches)]
            chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)), "parts")
            rows_of = {pair: data.draw(st.integers(0, max_rows), "rows") for pair in chosen}
            for attention, num_bytes in run_step(made, step, rows_of, num_layers=3).items():
                sent[attention] += num_bytes
        made.join()
        assert {index: end.bytes_sent for index, end in enumerate(made.attention)} == sent
        for worker, batches in made.served.batches.items():
            held = set(placement.experts_of(worker))
            for batch in batches:
                ids = batch.ids_RK
                assert bool((ids >= 0).any(dim=1).all()), "a row without an expert here should have stayed away"
                assert set(ids[ids >= 0].tolist()) <= held
                assert sum(batch.rows_per_source) == len(batch.rows_RH)
        replies = sum(len(b.rows_RH) for batches in made.served.batches.values() for b in batches)
        assert sum(end.bytes_sent for end in made.experts) == replies * made.layout.row_bytes


@settings(max_examples=100, deadline=None)
@given(placement=placements(), num_rows=st.integers(0, 40), seed=st.integers(0, 1000))
def test_each_row_is_served_once_for_each_chosen_expert(placement: ExpertPlacement, num_rows: int, seed: int) -> None:
    top_k = min(3, placement.num_experts)
    data = random_traffic(num_rows, 1, placement.num_experts, top_k, seed)
    shares = RowRouter(placement).split(data.ids_TK, data.weights_TK)
    assert len(shares) == placement.num_workers
    times = torch.zeros(num_rows, top_k, dtype=torch.int32)
    for worker, share in enumerate(shares):
        rows = torch.arange(num_rows) if share.row_index is None else share.row_index
        assert rows.tolist() == sorted(rows.tolist()), "rows stay in order"
        mine = share.ids_TK >= 0
        assert torch.equal(share.ids_TK[mine], data.ids_TK[rows][mine])
        assert torch.equal(share.weights_TK, data.weights_TK[rows])
        assert set(share.ids_TK[mine].tolist()) <= set(placement.experts_of(worker))
        times[rows] += mine.int()
    assert bool((times == 1).all())


def test_copies_of_an_expert_share_its_rows_evenly() -> None:
    placement = ExpertPlacement(num_workers=3, owners=((0, 1, 2), (0, 1), (2,)))
    ids = torch.zeros(60, 1, dtype=torch.int32)
    shares = RowRouter(placement).split(ids, torch.ones(60, 1))
    assert [len(share.ids_TK) for share in shares] == [20, 20, 20]
    shares = RowRouter(placement).split(ids + 1, torch.ones(60, 1))
    assert [len(share.ids_TK) for share in shares] == [30, 30, 0]


def test_a_slot_can_be_full_but_not_more() -> None:
    with exchange(contiguous_placement(4, 1), max_rows=8) as made:
        made.serve()
        run_step(made, 0, {(0, 0): 8}, num_layers=2)
        data = random_traffic(9, 6, 4, 2, 0)
        made.attention[0].begin_step(1, [[0]])
        with pytest.raises(ValueError, match="9 rows in one micro-batch: the exchange was made for 8"):
            made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)


def test_bfloat16_partial_sums_are_added_in_float32() -> None:
    with exchange(contiguous_placement(6, 3), dtype=torch.bfloat16, hidden_size=64, top_k=3) as made:
        made.serve()
        data = random_traffic(8, 64, 6, 3, 1)
        rows = data.rows_TH.to(torch.bfloat16)
        made.attention[0].begin_step(0, [[0]])
        made.attention[0].dispatch(2, 0, rows, data.ids_TK, data.weights_TK)
        total = made.attention[0].combine(2, 0, TIMEOUT_S)
        assert total.dtype == torch.bfloat16
        expected = dense(Traffic(rows.float(), data.ids_TK, data.weights_TK), 2)
        torch.testing.assert_close(total.float(), expected, rtol=2e-2, atol=2e-2)


def dispatch_one(made: Exchange, attention: int, participants: list[int], step: int = 0, layer: int = 0) -> Traffic:
    data = random_traffic(3, made.shape.hidden_size, made.placement.num_experts, made.shape.top_k, attention + step)
    end = made.attention[attention]
    end.begin_step(step, [participants] * made.shape.num_micro_batches)
    end.dispatch(layer, 0, data.rows_TH, data.ids_TK, data.weights_TK)
    return data


def test_missing_experts_are_named() -> None:
    with exchange(contiguous_placement(6, 3)) as made:
        dispatch_one(made, 0, [0])
        batch = made.experts[1].receive(1.0, 1.0)
        assert batch is not None
        made.experts[1].reply(batch, made.partial_sums(batch), (0, 1))
        with pytest.raises(PeerTimeout, match=r"combine, layer 0: nothing from experts\[0\], experts\[2\]") as caught:
            made.attention[0].combine(0, 0, 0.05)
        assert caught.value.peers == ["experts[0]", "experts[2]"]


def test_missing_attention_workers_are_named() -> None:
    with exchange(contiguous_placement(4, 1), num_attention=3) as made:
        dispatch_one(made, 0, [0, 1, 2])
        with pytest.raises(PeerTimeout, match=r"nothing from attention\[1\], attention\[2\] within 0.1 s") as caught:
            made.experts[0].receive(30.0, 0.05)
        assert caught.value.peers == ["attention[1]", "attention[2]"]
        dispatch_one(made, 2, [0, 1, 2])
        dispatch_one(made, 1, [0, 1, 2])
        batch = made.experts[0].receive(1.0, 1.0)
        assert batch is not None
        assert batch.sources == (0, 1, 2)
        assert batch.rows_per_source == (3, 3, 3)


def test_an_idle_expert_worker_is_no_error() -> None:
    with exchange(contiguous_placement(4, 1), num_attention=2) as made:
        assert made.experts[0].receive(0.01, 0.01) is None
        assert made.experts[0].wait_s > 0


def test_a_new_epoch_wakes_all_who_wait() -> None:
    with exchange(contiguous_placement(4, 2), num_attention=2) as made:
        outcomes: list[str] = []

        def waits(what: str, wait: object) -> None:
            with pytest.raises(StepAborted):
                wait()  # type: ignore[operator]
            outcomes.append(what)

        dispatch_one(made, 0, [0, 1])
        threads = [
            threading.Thread(target=waits, args=["combine", lambda: made.attention[0].combine(0, 0, 60.0)]),
            threading.Thread(target=waits, args=["gather", lambda: made.experts[0].receive(60.0, 60.0)]),
            threading.Thread(target=waits, args=["idle", lambda: made.experts[1].receive(60.0, 60.0)]),
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        made.control.abort_step()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert sorted(outcomes) == ["combine", "gather", "idle"]
        with pytest.raises(StepAborted):
            dispatch_one(made, 1, [0, 1])


def reset_all(made: Exchange) -> int:
    epoch = made.control.abort_step()
    ends: list[AttentionExchange | ExpertExchange] = [*made.attention, *made.experts]
    for end in ends:
        end.reset(epoch)
    return epoch


def test_messages_of_an_old_epoch_are_forgotten() -> None:
    """An attention worker sent, an expert worker took; neither is owed anything in the next epoch."""
    with exchange(contiguous_placement(4, 1), num_attention=2, num_micro_batches=2) as made:
        dispatch_one(made, 0, [0, 1])
        dispatch_one(made, 1, [0, 1])
        batch = made.experts[0].receive(1.0, 1.0)
        assert batch is not None
        dispatch_one(made, 1, [1])
        reset_all(made)
        assert made.experts[0].receive(0.01, 0.01) is None
        made.serve()
        run_step(made, 1, {(0, 0): 3, (1, 0): 4, (1, 1): 2}, num_layers=3)


def test_a_late_message_of_an_old_epoch_is_ignored() -> None:
    """The sender was past its look at the epoch when it changed: it publishes after everybody has reset."""
    with exchange(contiguous_placement(4, 1)) as made:
        stale = made.new_attention(0)
        epoch = made.control.abort_step()
        made.experts[0].reset(epoch)
        stale._check_epoch = lambda: None  # type: ignore[method-assign]
        data = random_traffic(2, 6, 4, 2, 0)
        stale.begin_step(0, [[0]])
        stale.dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        assert made.experts[0].receive(0.01, 0.01) is None
        made.attention[0].reset(epoch)
        made.serve()
        run_step(made, 1, {(0, 0): 5}, num_layers=2)


def test_a_late_reply_of_an_old_epoch_is_not_taken_for_the_next() -> None:
    with exchange(contiguous_placement(4, 1)) as made:
        dispatch_one(made, 0, [0])
        batch = made.experts[0].receive(1.0, 1.0)
        assert batch is not None
        epoch = made.control.abort_step()
        made.attention[0].reset(epoch)
        made.experts[0]._check_epoch = lambda: None  # type: ignore[method-assign]
        made.experts[0].reply(batch, torch.full((3, 6), 777.0), (0, 1))
        del made.experts[0]._check_epoch
        with pytest.raises(StepAborted):
            made.experts[0].receive(0.01, 0.01)
        made.experts[0].reset(epoch)
        dispatch_one(made, 0, [0], step=1)
        with pytest.raises(PeerTimeout):
            made.attention[0].combine(0, 0, 0.02)


def test_a_replacement_joins_where_the_dead_one_left() -> None:
    """Whatever the dead worker had sent or taken, its successor starts with empty hands."""
    with exchange(contiguous_placement(5, 2), num_attention=2, num_micro_batches=2) as made:
        made.serve()
        run_step(made, 0, {(0, 0): 3, (1, 0): 4, (0, 1): 1}, num_layers=2)
        made.join()
        made._stop.clear()
        dispatch_one(made, 0, [0, 1])
        assert made.experts[1]._arrivals(0) == ([0], [1]), "one of two messages has come"
        made.control.abort_step()
        made.attention[0] = made.new_attention(0)
        made.experts[1] = made.new_experts(1)
        reset_all(made)
        made.serve()
        run_step(made, 1, {(0, 0): 3, (1, 0): 4, (1, 1): 8}, num_layers=3)


def test_closing_lets_go_of_the_memory() -> None:
    shape = ExchangeShape(
        num_attention=1, num_experts=1, num_micro_batches=1, max_rows=2, hidden_size=2, top_k=1, dtype=torch.float32
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    control = ControlPage(create_region(RegionLayout(shape).total_bytes), shape)
    assert control.abort_step() == 1
    control.close()
    control.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_region_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("os.ftruncate", refuse)
    with pytest.raises(
        ResourceError, match=r"cannot reserve 2.0 TiB of shared memory: Cannot allocate memory; use few"
    ):
        create_region(2 << 40)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
