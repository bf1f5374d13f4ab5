"""How long a worker that died waits for its restart."""

import pytest

from antiphon.serve.policy.restarts import Restarts


def delays(restarts: Restarts, num_deaths: int, *, from_outside: bool = False) -> list[float]:
    """It dies at once whenever it is started."""
    found = []
    now_s = 0.0
    for _ in range(num_deaths):
        restarts.note_death(now_s, "exited with 1", from_outside=from_outside)
        assert restarts.due_s is not None
        found.append(restarts.due_s - now_s)
        now_s = restarts.due_s
        restarts.note_start()
    return found


def test_the_first_restart_is_at_once_and_the_others_wait_longer_and_longer() -> None:
    restarts = Restarts()
    restarts.note_ready(0.0)
    assert delays(restarts, 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert delays(restarts, 5000)[-1] == 30.0, "for ever"
    assert not restarts.hopeless


def test_kills_from_outside_wait_a_second_at_most_once_it_has_been_ready() -> None:
    restarts = Restarts()
    assert delays(restarts, 4, from_outside=True) == [0.0, 1.0, 2.0, 4.0], "a first start has nobody who waits"
    restarts.note_ready(100.0)
    assert delays(restarts, 3, from_outside=True) == [1.0, 1.0, 1.0]


def test_work_begins_the_count_anew() -> None:
    restarts = Restarts()
    delays(restarts, 4)
    restarts.begin_count()
    assert delays(restarts, 2) == [0.0, 1.0]


@pytest.mark.parametrize(("alive_s", "delay_s"), [(9.9, 2.0), (10.0, 0.0)])
def test_so_do_ten_seconds_of_being_ready(alive_s: float, delay_s: float) -> None:
    restarts = Restarts()
    delays(restarts, 2)
    restarts.note_ready(50.0)
    restarts.note_death(50.0 + alive_s, "killed by SIGSEGV", from_outside=False)
    assert restarts.due_s == 50.0 + alive_s + delay_s


def test_only_a_worker_that_never_came_up_is_given_up() -> None:
    restarts = Restarts()
    delays(restarts, 5)
    assert not restarts.hopeless
    delays(restarts, 1)
    assert restarts.hopeless
    restarts.note_ready(0.0)
    delays(restarts, 10)
    assert not restarts.hopeless


def test_in_words() -> None:
    restarts = Restarts()
    assert restarts.describe(0.0) == "loading"
    restarts.note_death(7.0, "killed by SIGKILL", from_outside=False)
    restarts.note_start()
    assert restarts.describe(7.0) == "loading, died once: killed by SIGKILL"
    restarts.note_death(8.0, "killed by SIGKILL", from_outside=False)
    assert restarts.describe(8.25) == "restart in 0.8 s, died 2 times: killed by SIGKILL"
    assert restarts.describe(9.5) == "restart in 0.0 s, died 2 times: killed by SIGKILL"
