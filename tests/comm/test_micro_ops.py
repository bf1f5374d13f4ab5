"""Lina's scheduler as a policy: what is launched when, and in which order, on numbers and names only."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.comm.micro_ops import MicroOp, MicroOpScheduler, choose_experts_per_device, partition


def launch(scheduler: MicroOpScheduler) -> str | None:
    """The next micro-op as ``tensor/number``, finished at once."""
    chosen = scheduler.next()
    if chosen is None:
        return None
    scheduler.finished(chosen)
    return f"{chosen.tensor}/{chosen.number}"


def launch_all(scheduler: MicroOpScheduler) -> list[str]:
    return list(iter(lambda: launch(scheduler), None))


@given(st.integers(0, 10**12), st.integers(1, 10**9))
@settings(max_examples=100, deadline=None)
def test_partition_is_even_and_complete(size_bytes: int, chunk: int) -> None:
    chunk_bytes = max(chunk, size_bytes // 1000 + 1)
    pieces = partition(size_bytes, chunk_bytes)
    sizes = [size for _, size in pieces] or [0]
    assert [offset for offset, _ in pieces] == [sum(sizes[:i]) for i in range(len(pieces))]
    assert sum(sizes) == size_bytes
    assert len(pieces) == -(-size_bytes // chunk_bytes)
    assert max(sizes) <= chunk_bytes
    assert max(sizes) - min(sizes) <= 1


def test_partition_by_hand() -> None:
    assert partition(90_000_000) == [(0, 30_000_000), (30_000_000, 30_000_000), (60_000_000, 30_000_000)]
    assert partition(7, 3) == [(0, 2), (2, 2), (4, 3)]
    with pytest.raises(UserError, match=r"chunks of 0 bytes: a chunk holds at least one"):
        MicroOpScheduler(0)


def test_sums_between_pairs() -> None:
    """Lina's fixed schedule: none between the two exchanges of a layer's backward, whatever else is on the wire."""
    scheduler = MicroOpScheduler(None, between_pairs=True)
    assert launch_all(scheduler) == []
    scheduler.submit_all_reduce("G0", 40)
    scheduler.submit_all_to_all("combine.all_to_all, backward", 10)
    assert launch_all(scheduler) == ["combine.all_to_all, backward/0"], "the pair has begun"
    scheduler.submit_all_to_all("dispatch.all_to_all", 10)  # rows are sent again meanwhile
    assert launch_all(scheduler) == ["dispatch.all_to_all/0"]
    scheduler.submit_all_to_all("dispatch.all_to_all, backward", 10, number=0, num_pieces=2)
    assert launch_all(scheduler) == ["dispatch.all_to_all, backward/0"]
    scheduler.submit_all_to_all("dispatch.all_to_all, backward", 10, number=1, num_pieces=2)
    scheduler.submit_all_to_all("attention.all_to_all, backward", 10)
    assert launch(scheduler) == "dispatch.all_to_all, backward/1"
    of_attention, of_sums = scheduler.next(), scheduler.next()
    assert of_attention is not None
    assert of_attention.tensor == "attention.all_to_all, backward"
    assert of_sums is not None
    assert of_sums.tensor == "G0", "it shares the wire with what is in no pair"


def test_all_to_all_overtakes_and_all_reduce_fills_gaps() -> None:
    """The story of Lina Figure 8(a), step by step."""
    scheduler = MicroOpScheduler(10)
    assert scheduler.submit_all_reduce("G0", 40) == 4
    assert [launch(scheduler) for _ in range(2)] == ["G0/0", "G0/1"]
    running = scheduler.next()
    assert running == MicroOp("all_reduce", "G0", 2, 4, 10)
    scheduler.combine_begins()
    scheduler.submit_all_reduce("G1", 10)
    assert scheduler.next() is None, "one all-reduce is in flight"
    scheduler.finished(running)
    assert scheduler.next() is None, "all-to-all is imminent"
    scheduler.submit_all_to_all("A", 99)
    assert launch(scheduler) == "A/0", "all-to-all is never cut by the scheduler"
    assert launch(scheduler) == "G0/3", "the FFN computes: a gap"
    scheduler.submit_all_to_all("B", 99)
    assert launch_all(scheduler) == ["B/0", "G1/0"]
    assert scheduler.num_waiting == 0


def test_parts_of_an_all_to_all_keep_all_reduce_out() -> None:
    scheduler = MicroOpScheduler(10)
    scheduler.submit_all_reduce("G", 10)
    scheduler.submit_all_to_all("A", 5, number=0, num_pieces=2)
    assert launch(scheduler) == "A/0"
    assert scheduler.next() is None, "part 1 of A is to come"
    scheduler.submit_all_to_all("A", 5, number=1, num_pieces=2)
    assert launch_all(scheduler) == ["A/1", "G/0"]


def test_without_partitioning() -> None:
    scheduler = MicroOpScheduler(None)
    assert scheduler.submit_all_reduce("G", 10**9) == 1
    assert scheduler.submit_all_reduce("empty", 0) == 0
    assert launch_all(scheduler) == ["G/0"]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("all_reduce"), st.integers(0, 50)),
        st.tuples(st.just("all_to_all"), st.integers(1, 3)),
        st.tuples(st.just("combine"), st.just(0)),
        st.tuples(st.just("launch"), st.just(0)),
        st.tuples(st.just("finish"), st.just(0)),
    ),
    max_size=40,
)


def play(steps: list[tuple[str, int]]) -> list[MicroOp]:
    """Perform the steps, then finish everything; all-to-alls come whole or in parts, an imminent one is submitted."""
    scheduler, launched = MicroOpScheduler(10), []

    def take() -> bool:
        chosen = scheduler.next()
        launched.extend([chosen] if chosen else [])
        return chosen is not None

    for number, (what, amount) in enumerate([*steps, ("all_to_all", 1)]):
        if what == "all_reduce":
            scheduler.submit_all_reduce(f"g{number}", amount)
        elif what == "all_to_all":
            for part in range(amount):
                scheduler.submit_all_to_all(f"a{number}", 1, number=part, num_pieces=amount)
        elif what == "combine":
            scheduler.combine_begins()
        elif what == "launch":
            take()
        elif scheduler.in_flight:
            scheduler.finished(scheduler.in_flight[0])
    while scheduler.in_flight or take():
        scheduler.finished(scheduler.in_flight[0])
    return launched


@given(actions)
@settings(max_examples=100, deadline=None)
def test_everything_is_sent_once_in_the_order_of_submission(steps: list[tuple[str, int]]) -> None:
    """Inside a class the order depends on submissions only: what ranks with other timings launch is the same."""
    launched = play(steps)
    hasty = play([step for step in steps if step[0] in ("all_reduce", "all_to_all")])
    for traffic in ("all_to_all", "all_reduce"):
        order = [(op.number, op.size_bytes) for op in launched if op.traffic == traffic]
        assert order == [(op.number, op.size_bytes) for op in hasty if op.traffic == traffic]
    expected = sum(size for what, size in steps if what == "all_reduce")
    assert sum(op.size_bytes for op in launched if op.traffic == "all_reduce") == expected
    tensors = [op.tensor for op in launched if op.traffic == "all_reduce"]
    assert tensors == sorted(tensors, key=lambda name: int(name[1:]))


class SeveralRanks:
    """Ranks that run one program, each at a pace of its own. A collective is over once all ranks have launched it; a
    rank goes on behind an all-to-all when that is over, and is done when its sums are over too."""

    def __init__(self, num_ranks: int, program: list[tuple[str, int]]) -> None:
        self.program = program
        self.policies = [MicroOpScheduler(10) for _ in range(num_ranks)]
        self.places = [0] * num_ranks
        self.waiting: list[set[str]] = [set() for _ in range(num_ranks)]
        self.launched: list[list[MicroOp]] = [[] for _ in range(num_ranks)]

    def events(self) -> list[tuple[str, int]]:
        """What may happen next."""
        steps = [("step", rank) for rank, place in enumerate(self.places) if self._may_step(rank, place)]
        ends = [("end", rank) for rank, policy in enumerate(self.policies) if self._ended(rank, policy)]
        return steps + ends

    def happen(self, what: str, rank: int) -> None:
        policy = self.policies[rank]
        if what == "end":
            (over, *_) = self._ended(rank, policy)
            policy.finished(over)
            if over.is_last:
                self.waiting[rank].discard(over.tensor)
        else:
            self._step(rank, policy)
        while (chosen := policy.next()) is not None:
            self.launched[rank].append(chosen)

    def _step(self, rank: int, policy: MicroOpScheduler) -> None:
        number = self.places[rank]
        kind, amount = self.program[number]
        if kind == "all_reduce":
            policy.submit_all_reduce(f"{kind} {number}", amount)
        else:
            policy.combine_begins()
            for part in range(amount):
                policy.submit_all_to_all(f"{kind} {number}", 1, number=part, num_pieces=amount)
            self.waiting[rank].add(f"{kind} {number}")
        self.places[rank] += 1

    def _may_step(self, rank: int, place: int) -> bool:
        return place < len(self.program) and not self.waiting[rank]

    def _ended(self, rank: int, policy: MicroOpScheduler) -> list[MicroOp]:
        return [op for op in policy.in_flight if all(op in launched for launched in self.launched)]


ANY_PROGRAM = given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["all_reduce", "all_to_all"]), st.integers(1, 35)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)


@ANY_PROGRAM
@settings(max_examples=75, deadline=None)
def test_ranks_never_wait_in_a_circle(num_ranks: int, program: list[tuple[str, int]], chance: random.Random) -> None:
    """Whatever the pace of each rank. A rank whose all-to-all waited for its all-reduce in flight would end here."""
    never_wait_in_a_circle(num_ranks, program, chance)


@pytest.mark.slow
@ANY_PROGRAM
@settings(max_examples=1000, deadline=None)
def test_ranks_never_wait_in_a_circle_often(
    num_ranks: int, program: list[tuple[str, int]], chance: random.Random
) -> None:
    never_wait_in_a_circle(num_ranks, program, chance)


def never_wait_in_a_circle(num_ranks: int, program: list[tuple[str, int]], chance: random.Random) -> None:
    ranks = SeveralRanks(num_ranks, program)
    while events := ranks.events():
        ranks.happen(*chance.choice(events))
    assert ranks.places == [len(program)] * num_ranks
    assert all(not policy.in_flight and not policy.num_waiting for policy in ranks.policies)
    for traffic in ("all_to_all", "all_reduce"):
        orders = [[op for op in launched if op.traffic == traffic] for launched in ranks.launched]
        assert all(order == orders[0] for order in orders)


def test_an_all_to_all_does_not_wait_for_an_all_reduce_in_flight() -> None:
    scheduler = MicroOpScheduler(10)
    scheduler.submit_all_reduce("G", 20)
    first = scheduler.next()
    scheduler.submit_all_to_all("A", 5)
    second = scheduler.next()
    assert [op and op.tensor for op in (first, second)] == ["G", "A"]
    assert scheduler.in_flight == (first, second)
    assert scheduler.next() is None


def test_misuse_is_refused() -> None:
    scheduler = MicroOpScheduler()
    with pytest.raises(UserError, match=r"all-to-all 'A': part 1 of 2, but part 0 is next"):
        scheduler.submit_all_to_all("A", 1, number=1, num_pieces=2)
    with pytest.raises(UserError, match=r"is not in flight \(\(\) are\)"):
        scheduler.finished(MicroOp("all_reduce", "G", 0, 1, 1))


def test_packing_doubles_until_computation_fills_all_to_all() -> None:
    steps = choose_experts_per_device(lambda packed: (1.0, 6.0 / packed**2), 16)
    assert [step.experts_per_device for step in steps] == [1, 2, 4]
    assert (steps[-1].ffn_s, steps[-1].all_to_all_s) == (1.0, 6.0 / 16)


def test_packing_stops_at_limits_and_odd_counts() -> None:
    def slow(packed: int) -> tuple[float, float]:
        return 1.0, 100.0

    assert [step.experts_per_device for step in choose_experts_per_device(slow, 8)] == [1, 2, 4, 8]
    assert [step.experts_per_device for step in choose_experts_per_device(slow, 6)] == [1, 2]
    assert [step.experts_per_device for step in choose_experts_per_device(slow, 5)] == [1]
    with pytest.raises(UserError, match=r"0 experts: at least one"):
        choose_experts_per_device(slow, 0)
