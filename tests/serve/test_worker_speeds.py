"""Speeds of expert workers from what they did: a slow one is found, one that gets few rows is not called slow."""

from antiphon.serve.policy.worker_speeds import WorkerSpeeds


def test_without_reports_all_are_equal() -> None:
    assert WorkerSpeeds(3, 12, 8).shares() == (1.0, 1.0, 1.0)


def test_a_worker_at_half_speed_is_found_and_small_differences_are_not() -> None:
    speeds = WorkerSpeeds(3, 12, 8)
    for worker, busy_s in enumerate((1.0, 2.0, 1.1)):
        speeds.add(worker, num_batches=100, num_rows=100_000, busy_s=busy_s)
    assert speeds.shares() == (1.0, 0.5, 1.0)


def test_few_rows_take_the_time_of_reading_weights() -> None:
    """Below the knee the time does not depend on the rows, so the speeds must not either."""
    speeds = WorkerSpeeds(2, 8, 64)
    speeds.add(0, num_batches=100, num_rows=4000, busy_s=1.0)
    speeds.add(1, num_batches=100, num_rows=2000, busy_s=1.0)
    assert speeds.shares() == (1.0, 1.0)


def test_old_reports_fade() -> None:
    speeds = WorkerSpeeds(2, 8, 1)
    for _ in range(50):
        speeds.add(0, 10, 10_000, 1.0)
        speeds.add(1, 10, 10_000, 2.0)
    for _ in range(50):
        speeds.add(0, 10, 10_000, 1.0)
        speeds.add(1, 10, 10_000, 1.0)
    assert speeds.shares() == (1.0, 1.0)


def test_more_work_explains_a_longer_batch() -> None:
    """The first worker has the hot expert: twice the rows take four times as long. Its own speed may be that of all."""
    speeds = WorkerSpeeds(3, 12, 1)
    for worker, (num_rows, busy_s) in enumerate(((100_000, 8.0), (50_000, 2.0), (50_000, 2.0))):
        speeds.add(worker, num_batches=100, num_rows=num_rows, busy_s=busy_s)
    assert speeds.shares() == (1.0, 1.0, 1.0)


def test_after_a_move_equals_are_measured_anew_and_a_slow_one_stays_slow() -> None:
    speeds = WorkerSpeeds(3, 12, 1)
    for worker, busy_s in enumerate((1.0, 4.0, 1.0)):
        speeds.add(worker, num_batches=100, num_rows=100_000, busy_s=busy_s)
    assert speeds.shares() == (1.0, 0.25, 1.0)
    speeds.forget_equals()
    assert speeds.shares() == (1.0, 0.25, 1.0), "nobody to compare it with"
    for worker in (0, 2):
        speeds.add(worker, num_batches=100, num_rows=120_000, busy_s=2.4)
    assert speeds.shares() == (1.0, 0.5, 1.0)


def test_a_moment_says_nothing() -> None:
    speeds = WorkerSpeeds(2, 12, 1)
    speeds.add(0, num_batches=10, num_rows=10_000, busy_s=0.1)
    speeds.add(1, num_batches=10, num_rows=10_000, busy_s=0.9)
    assert speeds.shares() == (1.0, 1.0)


def test_a_slow_worker_is_found_while_the_others_wait_for_it() -> None:
    speeds = WorkerSpeeds(3, 12, 8)
    for worker, busy_s in enumerate((4.0, 0.4, 0.4)):
        speeds.add(worker, num_batches=100, num_rows=4_000, busy_s=busy_s)
    assert speeds.shares() == (0.1, 1.0, 1.0)
