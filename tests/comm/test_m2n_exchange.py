"""The exchange equals a dense computation, whatever the numbers of workers, micro-batches, rows and experts."""

import gc
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import _m2n
from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.comm.m2n.api import ExpertBatch, StepAborted
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from tests.comm.exchange_harness import LAYERS, TIMEOUT_S, Exchange, Traffic, dense, exchange, random_traffic
from tests.comm.m2n.backends import Backend, by_name
from tests.waiting import wait_until

CARRIERS = by_name("shm", "tcp", "loopback", "loopback-shuffled")
EXAMPLES = {"shm": 60, "tcp": 25, "loopback": 40, "loopback-shuffled": 40}
SHM = CARRIERS[0]


@pytest.fixture(params=CARRIERS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The carriers one by one."""
    chosen: Backend = request.param
    return chosen


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
    return ExpertPlacement(num_workers, dict.fromkeys(LAYERS, tuple(map(tuple, owners))))


def run_step(made: Exchange, step: int, rows_of: dict[tuple[int, int], int], num_layers: int) -> None:
    """One step of all attention workers: `rows_of[attention, micro-batch]` rows, absent: no part in it. Compares with
    the dense computation. Where expert workers merge what is ready, each makes a step of its own of it."""
    shape, placement = made.shape, made.placement
    participants = [
        [attention for attention in range(shape.num_attention) if (attention, index) in rows_of]
        for index in range(shape.num_micro_batches)
    ]

    def traffic(attention: int, layer: int, micro_batch: int) -> Traffic:
        seed = hash((step, attention, layer, micro_batch)) % 2**31
        num_rows = rows_of[attention, micro_batch]
        return random_traffic(num_rows, shape.hidden_size, len(placement.owners[0]), shape.top_k, seed)

    def work(attention: int) -> None:
        end = made.attention[attention]
        mine = [index for index in range(shape.num_micro_batches) if (attention, index) in rows_of]
        if made.merges:
            end.begin_step(step * shape.num_attention + attention, [[attention]] * shape.num_micro_batches)
        else:
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

    threads = [made.start(partial(work, attention)) for attention in range(shape.num_attention)]
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    if made.failures:
        raise made.failures[0]


def check_any_exchange(backend: Backend, placement: ExpertPlacement, data: st.DataObject) -> None:
    num_attention = data.draw(st.integers(1, 3), "attention workers")
    num_micro_batches = data.draw(st.integers(1, 4), "micro-batches")
    max_rows = data.draw(st.integers(1, 9), "max rows")
    top_k = data.draw(st.integers(1, min(3, len(placement.owners[0]))), "top k")
    with exchange(
        placement,
        backend=backend,
        num_attention=num_attention,
        num_micro_batches=num_micro_batches,
        max_rows=max_rows,
        hidden_size=data.draw(st.sampled_from([1, 5, 16]), "hidden"),
        top_k=top_k,
        merges=data.draw(st.booleans(), "merges"),
    ) as made:
        made.serve()
        num_choices = 0
        for step in range(2):
            pairs = [(a, i) for a in range(num_attention) for i in range(num_micro_batches)]
            chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)), "parts")
            rows_of = {pair: data.draw(st.integers(0, max_rows), "rows") for pair in chosen}
            num_choices += 3 * top_k * sum(rows_of.values())
            run_step(made, step, rows_of, num_layers=3)
        made.join()
        for worker, batches in made.served.batches.items():
            held = set(placement.experts_of(worker)[0])
            for batch in batches:
                ids = batch.ids_RK
                assert bool((ids >= 0).any(dim=1).all()), "a row without an expert here should have stayed away"
                assert set(ids[ids >= 0].tolist()) <= held
                assert sum(batch.rows_per_source) == len(batch.rows_RH)
                assert list(batch.sources) == sorted(batch.sources)
        received: Counter[int] = Counter()
        for batch in (batch for batches in made.served.batches.values() for batch in batches):
            for source, num_rows in zip(batch.sources, batch.rows_per_source, strict=True):
                received[source] += num_rows
        for index, end in enumerate(made.attention):  # each row once for each worker: the row, ids and weights
            assert end.bytes_sent == received[index] * (made.row_bytes + 8 * top_k)
        all_batches = [batch for batches in made.served.batches.values() for batch in batches]
        assert sum(int((batch.ids_RK >= 0).sum()) for batch in all_batches) == num_choices, "once for each choice"
        check_counts(made, all_batches)
        replies = sum(len(batch.rows_RH) for batch in all_batches)
        assert sum(end.bytes_sent for end in made.experts) == replies * made.row_bytes


def check_counts(made: Exchange, batches: list[ExpertBatch]) -> None:
    """Attention workers have counted what expert workers saw, and count it once."""
    shape = len(LAYERS), len(made.placement.owners[0])
    seen = np.zeros(shape, dtype=np.int64)
    for batch in batches:
        np.add.at(seen[batch.layer], batch.ids_RK[batch.ids_RK >= 0].numpy(), 1)
    counted = [np.frombuffer(end.take_counts(), dtype=np.uint32).reshape(shape) for end in made.attention]
    assert np.sum(counted, axis=0).tolist() == seen.tolist()
    assert not any(any(end.take_counts()) for end in made.attention)


@pytest.mark.parametrize("backend", CARRIERS, ids=lambda backend: backend.name)
def test_any_exchange_equals_one_dense_process(backend: Backend) -> None:
    @settings(max_examples=EXAMPLES[backend.name], deadline=None)
    @given(placement=placements(), data=st.data())
    def check(placement: ExpertPlacement, data: st.DataObject) -> None:
        check_any_exchange(backend, placement, data)

    check()


def test_copies_of_an_expert_share_its_rows_evenly() -> None:
    placement = ExpertPlacement(3, {0: ((0, 1, 2), (0, 1), (2,))})
    with exchange(placement, max_rows=60, top_k=1) as made:
        for step, shares in enumerate([(20, 20, 20), (30, 30, 0)]):
            ids = torch.full((60, 1), step, dtype=torch.int32)
            made.attention[0].begin_step(step, [[0]])
            made.attention[0].dispatch(0, 0, torch.zeros(60, 6), ids, torch.ones(60, 1))
            for end, share in zip(made.experts, shares, strict=True):
                batch = end.receive(TIMEOUT_S, TIMEOUT_S)
                assert batch is not None
                assert batch.rows_RH.shape == (share, 6)
                end.reply(batch, torch.zeros(share, 6), (0, 1))
            assert made.attention[0].combine(0, 0, TIMEOUT_S).shape == (60, 6)


def test_strided_rows_arrive_as_they_look() -> None:
    """The rows of a wider tensor, as a slice of a fused projection's output is."""
    with exchange(contiguous_placement(4, 2, LAYERS)) as made:
        made.serve()
        data = random_traffic(5, 6, 4, 2, 3)
        wide = torch.cat([data.rows_TH, torch.full((5, 3), 9.0)], dim=1)
        made.attention[0].begin_step(0, [[0]])
        made.attention[0].dispatch(1, 0, wide[:, :6], data.ids_TK, data.weights_TK)
        torch.testing.assert_close(made.attention[0].combine(1, 0, TIMEOUT_S), dense(data, 1), rtol=1e-5, atol=1e-5)


def test_a_slot_can_be_full_but_not_more(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend, max_rows=8) as made:
        made.serve()
        run_step(made, 0, {(0, 0): 8}, num_layers=2)
        data = random_traffic(9, 6, 4, 2, 0)
        made.attention[0].begin_step(1, [[0]])
        with pytest.raises(UserError, match="9 rows in one micro-batch: the exchange was made for 8"):
            made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        run_step(made, 2, {(0, 0): 8}, num_layers=1)


def test_rows_choices_and_sums_of_other_sizes_are_refused(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend) as made:
        end, data = made.attention[0], random_traffic(3, 6, 4, 2, 0)
        right = (data.rows_TH, data.ids_TK, data.weights_TK)
        end.begin_step(0, [[0]])
        for place in range(3):
            for wrong in (right[place][:2], right[place][:, :1]):
                with pytest.raises(UserError, match="this exchange takes"):
                    end.dispatch(0, 0, *right[:place], wrong, *right[place + 1 :])
        end.dispatch(0, 0, *right)
        expert = made.experts[0]
        batch = expert.receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        with pytest.raises(UserError, match=r"sums \(1, 6\) in reply to a batch of \(3, 6\)"):
            expert.reply(batch, torch.zeros(1, 6), (0, 0))
        expert.reply(batch, torch.zeros(3, 6), (0, 0))
        with pytest.raises(UserError, match="no batch waits for a reply"):
            expert.reply(batch, torch.zeros(3, 6), (0, 0))
        assert torch.equal(end.combine(0, 0, TIMEOUT_S), torch.zeros(3, 6))


def test_an_expert_that_is_none_is_refused_before_anything_is_sent() -> None:
    with exchange(contiguous_placement(4, 2, LAYERS)) as made:
        data = random_traffic(3, 6, 4, 2, 0)
        data.ids_TK[2, 1] = 4
        made.attention[0].begin_step(0, [[0]])
        with pytest.raises(UserError, match="row 2 chose expert 4: the placement has 4"):
            made.attention[0].dispatch(0, 0, data.rows_TH, data.ids_TK, data.weights_TK)
        assert all(end.receive(0.01, 0.01) is None for end in made.experts)


def test_ends_of_different_shapes_do_not_write_past_a_slot() -> None:
    """The attention worker was given larger rows than the expert worker has room for."""
    with exchange(contiguous_placement(4, 1, LAYERS), hidden_size=8, max_rows=100) as small:
        shape = small.shape.__class__(**{**small.shape.__dict__, "hidden_size": 4096})
        small.shape = shape
        small.attention[0] = small.new_attention(0)
        with pytest.raises(UserError, match=r"the slots of experts\[0\] hold \d+ bytes, the largest message is \d+"):
            small.control.reset(small.control.abort_step())
        small.failures.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_partial_sums_are_added_in_float32_and_rounded_once(dtype: torch.dtype, num_workers: int) -> None:
    """In the order of the workers, so that results do not depend on who answered first."""
    with exchange(contiguous_placement(num_workers, num_workers, LAYERS), dtype=dtype, hidden_size=33, top_k=1) as made:
        generator = torch.Generator().manual_seed(num_workers)
        made.attention[0].begin_step(0, [[0]])
        ids = torch.arange(num_workers, dtype=torch.int32)[:, None]
        # A row goes to one worker; each worker answers with values that do not cancel.
        made.attention[0].dispatch(0, 0, torch.zeros(num_workers, 33, dtype=dtype), ids, torch.ones(num_workers, 1))
        answers = []
        for end in reversed(made.experts):
            batch = end.receive(TIMEOUT_S, TIMEOUT_S)
            assert batch is not None
            answers.append(torch.randn(len(batch.rows_RH), 33, generator=generator).to(dtype))
            end.reply(batch, answers[-1], (0, 1))
        total = made.attention[0].combine(0, 0, TIMEOUT_S)
        assert total.dtype == dtype
        assert torch.equal(total, torch.cat(answers[::-1])), "one part is passed on bit by bit"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sum_of_many_parts_is_rounded_once(dtype: torch.dtype) -> None:
    with exchange(contiguous_placement(5, 5, LAYERS), dtype=dtype, hidden_size=257, top_k=5, max_rows=4) as made:
        generator = torch.Generator().manual_seed(5)
        ids = torch.arange(5, dtype=torch.int32).repeat(4, 1)
        made.attention[0].begin_step(0, [[0]])
        made.attention[0].dispatch(0, 0, torch.zeros(4, 257, dtype=dtype), ids, torch.ones(4, 5))
        parts = [(torch.randn(4, 257, generator=generator) * 3.0**worker).to(dtype) for worker in range(5)]
        parts[2][0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0]).to(dtype)
        for worker in (3, 0, 4, 2, 1):
            batch = made.experts[worker].receive(TIMEOUT_S, TIMEOUT_S)
            assert batch is not None
            made.experts[worker].reply(batch, parts[worker], (0, 1))
        expected = torch.zeros(4, 257)
        for part in parts:
            expected += part.float()
        total = made.attention[0].combine(0, 0, TIMEOUT_S)
        assert torch.equal(total.isnan(), expected.isnan())
        assert torch.equal(total.nan_to_num(), expected.to(dtype).nan_to_num())


def dispatch_one(made: Exchange, attention: int, participants: list[int], step: int = 0, layer: int = 0) -> Traffic:
    data = random_traffic(3, made.shape.hidden_size, len(made.placement.owners[0]), made.shape.top_k, attention + step)
    end = made.attention[attention]
    end.begin_step(step, [participants] * made.shape.num_micro_batches)
    end.dispatch(layer, 0, data.rows_TH, data.ids_TK, data.weights_TK)
    return data


def test_missing_experts_are_named(backend: Backend) -> None:
    with exchange(contiguous_placement(6, 3, LAYERS), backend=backend) as made:
        dispatch_one(made, 0, [0])
        batch = made.experts[1].receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        made.experts[1].reply(batch, made.partial_sums(batch), (0, 1))
        with pytest.raises(
            PeerTimeout, match=r"attention\[0\].*waiting for experts\[0\], experts\[2\] after"
        ) as caught:
            made.attention[0].combine(0, 0, 0.3)
        assert caught.value.peers == ["experts[0]", "experts[2]"]


def test_missing_attention_workers_are_named(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), num_attention=3, backend=backend) as made:
        dispatch_one(made, 0, [0, 1, 2])
        started = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"nothing from attention\[1\], attention\[2\] within 0.1 s") as caught:
            made.experts[0].receive(30.0, 0.05)
        assert caught.value.peers == ["attention[1]", "attention[2]"]
        assert time.monotonic() - started < 15.0, "overdue before idle"
        dispatch_one(made, 2, [0, 1, 2])
        dispatch_one(made, 1, [0, 1, 2])
        batch = made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        assert batch.sources == (0, 1, 2)
        assert batch.rows_per_source == (3, 3, 3)


def test_a_peer_that_never_connected_is_named() -> None:
    with exchange(contiguous_placement(4, 2, LAYERS), num_attention=2) as made:
        alone = made.new_attention(0)
        made.retired.append(alone)
        alone._timeout_s = 0.05
        tickets = [end.ticket for end in made.experts]
        with pytest.raises(PeerTimeout, match=r"experts\[0\], experts\[1\] after 0.05 s") as caught:
            alone.reset(0, tickets)
        assert caught.value.peers == ["experts[0]", "experts[1]"]


def test_an_idle_expert_worker_is_no_error(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), num_attention=2, backend=backend) as made:
        assert made.experts[0].receive(0.01, 0.01) is None
        assert made.experts[0].receive(0.03, 0.01) is None
        assert made.experts[0].wait_s > 0


def test_a_lost_peer_is_named_to_all_who_need_it(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 2, LAYERS), num_attention=2, backend=backend) as made:
        dispatch_one(made, 0, [0, 1])
        made.experts[1].close()
        made.attention[1].close()
        with pytest.raises(PeerLost, match=r"lost experts\[1\]: "):
            made.attention[0].combine(0, 0, TIMEOUT_S)
        with pytest.raises(PeerLost, match=r"lost attention\[1\]: "):
            made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
        assert made.experts[0].receive(0.01, TIMEOUT_S) is None, "said once"


def test_a_new_epoch_wakes_all_who_wait(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 2, LAYERS), num_attention=2, backend=backend) as made:
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
        aborted = time.monotonic()
        made.control.abort_step()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert sorted(outcomes) == ["combine", "gather", "idle"]
        assert time.monotonic() - aborted < 10.0
        with pytest.raises(StepAborted):
            dispatch_one(made, 1, [0, 1])


def test_an_interrupt_that_is_no_new_epoch_sends_nothing_twice() -> None:
    """A late abort of an epoch that has passed falls into dispatch, reply and combine: they carry on."""
    with exchange(contiguous_placement(4, 2, LAYERS), num_micro_batches=1) as made:
        made.serve()
        stop = threading.Event()

        def disturb() -> None:
            while not stop.is_set():
                for end in [*made.attention, *made.experts]:
                    end.abort(0)
                time.sleep(0.0005)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for step in range(20):
                run_step(made, step, {(0, 0): 5}, num_layers=5)
        finally:
            stop.set()
            thread.join()
        made.join()
        for batches in made.served.batches.values():
            assert len(batches) == 100, "one batch for each layer of each step"


def reset_all(made: Exchange) -> int:
    epoch = made.control.abort_step()
    made.control.reset(epoch)
    return epoch


def test_messages_of_an_old_epoch_are_forgotten(backend: Backend) -> None:
    """An attention worker sent, an expert worker took; neither is owed anything in the next epoch."""
    with exchange(contiguous_placement(4, 1, LAYERS), num_attention=2, num_micro_batches=2, backend=backend) as made:
        dispatch_one(made, 0, [0, 1])
        dispatch_one(made, 1, [0, 1])
        batch = made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        dispatch_one(made, 1, [1])
        reset_all(made)
        assert made.experts[0].receive(0.01, 0.01) is None
        made.serve()
        run_step(made, 1, {(0, 0): 3, (1, 0): 4, (1, 1): 2}, num_layers=3)


def test_many_epochs_use_up_nothing(backend: Backend) -> None:
    """Credits of what each epoch left behind come back."""
    with exchange(contiguous_placement(4, 2, LAYERS), num_attention=2, num_micro_batches=2, backend=backend) as made:
        for _ in range(8):
            dispatch_one(made, 0, [0, 1])
            batch = dispatch_one(made, 1, [0, 1]) and made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
            assert batch is not None
            made.experts[0].reply(batch, made.partial_sums(batch), (0, 1))
            reset_all(made)
        made.serve()
        run_step(made, 1, {(0, 0): 3, (1, 0): 4, (0, 1): 8, (1, 1): 2}, num_layers=3)


def test_a_late_message_of_an_old_epoch_is_ignored(backend: Backend) -> None:
    """The sender was past its look at the epoch when it changed: it publishes after the expert worker has reset."""
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend) as made:
        epoch = made.control.abort_step()
        made.experts[0].reset(epoch, [])
        stale = made.attention[0]
        stale._check_epoch = lambda: None  # type: ignore[method-assign]
        dispatch_one(made, 0, [0])
        del stale._check_epoch
        assert made.experts[0].receive(0.05, 0.05) is None
        assert made.experts[0].traffic().pairs[0].stale == 1
        made.control.reset(epoch)
        made.serve()
        run_step(made, 1, {(0, 0): 5}, num_layers=2)


def test_a_late_reply_of_an_old_epoch_is_not_taken_for_the_next(backend: Backend) -> None:
    with exchange(contiguous_placement(4, 1, LAYERS), backend=backend) as made:
        dispatch_one(made, 0, [0])
        batch = made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        epoch = made.control.abort_step()
        made.attention[0].reset(epoch, [made.experts[0].ticket])
        made.experts[0]._check_epoch = lambda: None  # type: ignore[method-assign]
        made.experts[0].reply(batch, torch.full((3, 6), 777.0), (0, 1))
        del made.experts[0]._check_epoch
        with pytest.raises(StepAborted):
            made.experts[0].receive(0.01, 0.01)
        made.experts[0].reset(epoch, [])
        dispatch_one(made, 0, [0], step=1)
        with pytest.raises(PeerTimeout):
            made.attention[0].combine(0, 0, 0.1)


@pytest.mark.parametrize("farewell", [True, False], ids=["closed", "cut off"])
def test_a_replacement_joins_where_the_dead_one_left(backend: Backend, farewell: bool) -> None:
    """Whatever the dead worker had sent or taken, its successor starts with empty hands."""
    with exchange(contiguous_placement(5, 2, LAYERS), num_attention=2, num_micro_batches=2, backend=backend) as made:
        made.serve()
        run_step(made, 0, {(0, 0): 3, (1, 0): 4, (0, 1): 1}, num_layers=2)
        made.join()
        dispatch_one(made, 0, [0, 1])
        made.control.abort_step()
        made.replace_attention(0, farewell=farewell)
        made.replace_experts(1, farewell=farewell)
        reset_all(made)
        made.serve()
        run_step(made, 1, {(0, 0): 3, (1, 0): 4, (1, 1): 8}, num_layers=3)
        made.join()
        # The others, now; the loss of the former ones was no news after the reset.
        made.replace_attention(1, farewell=farewell)
        made.replace_experts(0, farewell=farewell)
        reset_all(made)
        made.serve()
        run_step(made, 2, {(0, 0): 3, (1, 0): 4, (1, 1): 8}, num_layers=3)


def test_waits_are_split_into_work_and_exposed_communication() -> None:
    with exchange(contiguous_placement(4, 1, LAYERS)) as made:
        dispatch_one(made, 0, [0])
        batch = made.experts[0].receive(TIMEOUT_S, TIMEOUT_S)
        assert batch is not None
        end = made.attention[0]

        computing = threading.Event()
        ended_ns: list[int] = []

        def answer() -> None:
            start_ns = time.monotonic_ns()
            computing.set()
            time.sleep(0.5)  # the experts' work
            ended_ns.append(time.monotonic_ns())
            made.experts[0].reply(batch, made.partial_sums(batch), (start_ns, ended_ns[0]))

        made.start(answer)
        assert computing.wait(TIMEOUT_S)
        began_ns = time.monotonic_ns()
        end.combine(0, 0, TIMEOUT_S)
        hidden_s = end.wait_s - end.exposed_s
        assert end.exposed_s >= 0
        assert 0 < hidden_s <= (ended_ns[0] - began_ns) * 1e-9


def test_closing_lets_go_of_memory_sockets_and_threads(backend: Backend) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def run() -> None:
        with exchange(contiguous_placement(4, 2, LAYERS), num_attention=2, backend=backend) as made:
            made.serve()
            run_step(made, 0, {(0, 0): 3, (1, 0): 1}, num_layers=1)

    run()  # what the process opens once
    descriptors, threads = held()
    for _ in range(3):
        run()
    # Not more: what earlier tests of this process still held may go meanwhile.
    # A thread that was joined is listed until the kernel has taken it away.
    wait_until(lambda: held()[0] <= descriptors and held()[1] <= threads, f"{descriptors, threads} again", 20.0)


def test_a_step_number_holds_what_the_engine_needs() -> None:
    assert _m2n.first_step_of(0) == 0
    assert _m2n.first_step_of(2) > _m2n.first_step_of(1) > 2**40
    assert _m2n.INTRODUCTION == 2**63
    with exchange(contiguous_placement(4, 1, LAYERS)) as made:
        data = random_traffic(1, 6, 4, 2, 0)
        made.attention[0].begin_step(0, [[0]])
        with pytest.raises(UserError, match="layer 4096: a step number has room for 4096"):
            made.attention[0].dispatch(4096, 0, data.rows_TH, data.ids_TK, data.weights_TK)
