"""Which rows an expert worker computes together, and what it waits for."""

import pytest

from antiphon.comm.m2n.ready_batches import ReadyBatches, ReadyStep


def step(number: int, layer: int, source: int, since_s: float = 0.0, micro_batch: int = 0) -> ReadyStep:
    return ReadyStep(number, layer, micro_batch, (source,), since_s)


def test_what_is_ready_of_the_oldest_layer_is_one_batch() -> None:
    ready = ReadyBatches(merges=True)
    for each in (step(1, 3, 0), step(2, 4, 1), step(3, 3, 2), step(4, 3, 0, micro_batch=1)):
        ready.add(each)
    assert [each.number for each in ready.take()] == [1, 3, 4]
    assert [each.number for each in ready.take()] == [2]
    assert not ready


def test_steps_that_all_take_together_are_batches_one_by_one() -> None:
    ready = ReadyBatches(merges=False)
    ready.add(ReadyStep(1, 3, 0, (0, 1), 5.0))
    ready.add(ReadyStep(1, 3, 1, (0, 1), 6.0))
    assert ready.wait_until_s() == 5.0, "not at all"
    assert [[each.micro_batch for each in ready.take()] for _ in range(2)] == [[0], [1]]


def warm(took_s: float = 0.5) -> ReadyBatches:
    """Sources 0 and 1 have each been answered twice: source 1 came back with layer 2 after 0.1 s, and now layer 1 of
    both has been answered at 10 s."""
    ready = ReadyBatches(merges=True)
    for source in (0, 1):
        ready.add(step(source, 1, source))
        ready.answered(ready.take(), 2 * took_s, 5.0)
        ready.add(step(source, 2, source, since_s=5.1))
        ready.answered(ready.take(), took_s, 6.0)
        ready.add(step(source + 2, 1, source, since_s=7.0))
        ready.answered(ready.take(), 3 * took_s, 10.0)
    return ready


def test_rows_that_are_due_soon_are_waited_for() -> None:
    ready = warm()
    ready.add(step(2, 2, 0, since_s=10.02))
    assert ready.wait_until_s() == pytest.approx(10.125), "the other source's time and a quarter"
    ready.add(step(3, 2, 1, since_s=10.1))
    assert ready.wait_until_s() <= 10.02, "all are here"
    assert [each.number for each in ready.take()] == [2, 3]


@pytest.mark.parametrize(
    ("took_s", "further"),
    [
        (0.01, ()),  # reading weights takes no longer than the shortest batch
        (0.5, (step(9, 7, 2, 10.02),)),  # there is other work
    ],
)
def test_what_is_saved_bounds_what_is_waited(took_s: float, further: tuple[ReadyStep, ...]) -> None:
    ready = warm(took_s)
    assert ready.longest_wait_s == took_s
    for each in (step(2, 2, 0, since_s=10.02), *further):
        ready.add(each)
    assert ready.wait_until_s() == pytest.approx(10.02 if further else 10.03)


def test_the_same_workers_other_micro_batch_is_not_waited_for() -> None:
    ready = ReadyBatches(merges=True)
    for micro_batch in (0, 1):
        ready.add(step(micro_batch, 1, 0, micro_batch=micro_batch))
        ready.answered(ready.take(), 0.5, 5.0)
        ready.add(step(micro_batch, 2, 0, since_s=5.1, micro_batch=micro_batch))
        ready.answered(ready.take(), 0.5, 6.0)
        ready.add(step(micro_batch, 1, 0, since_s=7.0, micro_batch=micro_batch))
        ready.answered(ready.take(), 0.5, 10.0)
    ready.add(step(2, 2, 0, since_s=10.05))
    assert ready.wait_until_s() == 10.05


def test_a_new_epoch_expects_nothing() -> None:
    ready = warm()
    ready.add(step(2, 2, 0, since_s=10.02))
    ready.forget()
    assert not ready
    ready.add(step(5, 2, 0, since_s=11.0))
    assert ready.wait_until_s() == 11.0
