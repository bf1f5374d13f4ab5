"""The bars of the dashboard from spans: which steps are drawn, and what of them."""

from antiphon.serve.api.dashboard import last_steps
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, EXPERTS, RECEIVE, SAMPLE, STEP
from tests.serve.span_examples import joined, recorded

ATTENTION_WORK = joined(
    (ATTENTION, 1, 1000, 3000, 4), (COMBINE, 1, 3000, 6000, 4), (STEP, 1, 1000, 7000, 4),
    (ATTENTION, 2, 8000, 9000, 4), (COMBINE, 2, 9000, 12000, 4), (STEP, 2, 8000, 14000, 4),
    (ATTENTION, 3, 15000, 16000, 4), (COMBINE, 3, 16000, 19000, 4), (STEP, 3, 15000, 20000, 4),
)  # fmt: skip


def test_two_steps_of_which_everybody_told() -> None:
    experts = joined((EXPERTS, 1, 4000, 5000, 6), (EXPERTS, 2, 10000, 11000, 6))  # asked in the middle of step 3
    found = last_steps({"attention[0]": ATTENTION_WORK, "experts[0]": experts}, now_ns=1_000_014_000)
    assert found is not None
    assert [(step.number, step.start_us, step.length_us) for step in found.steps] == [(1, 0, 6), (2, 7, 6)]
    assert (found.length_us, found.ended_s_ago) == (13, 1.0)
    attention, expert = found.workers
    assert attention.kinds == ["attention", "waiting"] * 2
    assert (expert.name, expert.starts_us, expert.lengths_us, expert.rows) == ("experts[0]", [3, 9], [1, 1], [6, 6])
    assert (expert.layers, expert.micro_batches) == ([3, 3], [1, 1])


def test_when_nobody_told_all_the_newest_step_is_drawn() -> None:
    experts = joined((EXPERTS, 3, 10, 20, 6), (EXPERTS, 9, 18500, 18600, 6))
    missing = {"attention[0]": ATTENTION_WORK, "experts[0]": experts, "experts[1]": recorded((RECEIVE, 1, 2, 0))}
    first_is_missing = joined((COMBINE, 1, 5, 10, 4), (STEP, 1, 0, 20, 4))
    found = last_steps(missing, now_ns=20000)
    assert found is not None
    assert [step.number for step in found.steps] == [3]
    assert [worker.name for worker in found.workers] == ["attention[0]", "experts[0]"], "who shows nothing has no row"
    assert last_steps({"attention[0]": first_is_missing}, now_ns=20) is not None


def test_a_replica_has_no_exchange_and_its_steps_are_its_own() -> None:
    busy = joined((ATTENTION, 5, 500, 600, 2), (DISPATCH, 5, 600, 700, 2), (COMBINE, 5, 700, 701, 2),
                  (SAMPLE, 5, 800, 850, 0), (STEP, 5, 400, 900, 2))  # fmt: skip
    other = joined((ATTENTION, 90, 100, 450, 3), (STEP, 90, 100, 460, 3))
    found = last_steps({"replica[0]": busy, "replica[1]": other, "replica[2]": recorded()}, now_ns=900)
    assert found is not None
    assert [step.number for step in found.steps] == [5]
    first, second = found.workers
    assert first.kinds == ["attention", "experts", "sampling"]
    assert (second.starts_us, second.lengths_us) == ([0], [0.05]), "cut to the window of the first"


def test_nothing_before_the_first_step() -> None:
    assert last_steps({}, now_ns=5) is None
    assert last_steps({"attention[0]": recorded(), "experts[0]": recorded((RECEIVE, 0, 3, 0))}, now_ns=5) is None


def test_instances_count_their_steps_each_for_itself() -> None:
    spans = {
        "1/attention[0]": ATTENTION_WORK,
        "1/experts[0]": joined((EXPERTS, 2, 10000, 11000, 6)),
        "experts[0]": joined((EXPERTS, 800, 9000, 9500, 6)),
        "1/replica[0]": joined((DISPATCH, 4, 8000, 9000, 2)),
    }
    found = last_steps(spans, now_ns=20000)
    assert found is not None
    assert [step.number for step in found.steps] == [2]
    assert [worker.name for worker in found.workers] == [*list(spans)[:1], "1/experts[0]", "1/replica[0]", "experts[0]"]
    assert found.workers[2].kinds == ["experts"]
