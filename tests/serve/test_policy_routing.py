"""Which attention worker gets a request."""

from antiphon.serve.policy.request import Request, SchedulerConfig, new_request
from antiphon.serve.policy.scheduler import choose_attention_worker
from antiphon.specs.sampling import SamplingParams
from tests.serve.policy_harness import Simulation

CONFIG = SchedulerConfig(
    num_blocks=64, block_size=4, max_model_len=200, max_batch_tokens=64, max_running=8, watermark_blocks=0
)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SYSTEM = list(range(100, 140))


def request(prompt: list[int]) -> Request:
    return new_request("new", prompt, PARAMS, arrival=1000, seed=0, eos_token_ids=(2,))


def workers(count: int) -> list[Simulation]:
    return [Simulation(CONFIG) for _ in range(count)]


def choose(prompt: list[int], simulations: list[Simulation], live: tuple[int, ...]) -> int | None:
    return choose_attention_worker(request(prompt), {index: simulations[index].scheduler for index in live})


def test_the_longest_prefix_hit_wins_among_idle_workers() -> None:
    sims = workers(3)
    sims[1].submit("short", SYSTEM[:12], PARAMS)
    sims[1].run()
    sims[2].submit("long", SYSTEM, PARAMS)
    sims[2].run()
    assert choose([*SYSTEM, 7], sims, (0, 1, 2)) == 2
    assert choose([*SYSTEM, 7], sims, (0, 1)) == 1
    assert choose([9] * 20, sims, (0, 1, 2)) == 0


def test_a_hit_is_worth_the_tokens_it_spares_and_no_more() -> None:
    sims = workers(2)
    sims[0].submit("cached", SYSTEM, PARAMS)
    sims[0].run()
    for index in range(4):  # 4 running sequences weigh 64 tokens, the hit spares 40
        sims[0].submit(str(index), [index + 3], SamplingParams(max_tokens=100, ignore_eos=True))
    sims[0].step()
    assert choose([*SYSTEM, 7], sims, (0, 1)) == 1


def test_a_worker_without_room_is_passed_over_whatever_it_has_cached() -> None:
    sims = workers(2)
    sims[0].submit("big", SYSTEM + [5] * 150, PARAMS)
    for _ in range(4):
        sims[0].step()
    assert choose(SYSTEM + [6] * 80, sims, (0, 1)) == 1


def test_queued_tokens_count_before_they_run() -> None:
    sims = workers(2)
    sims[0].submit("queued", [5] * 20, PARAMS)
    assert choose([7] * 3, sims, (0, 1)) == 1
    sims[1].submit("queued", [6] * 30, PARAMS)
    assert choose([7] * 3, sims, (0, 1)) == 0


def test_small_prompts_are_dealt_out_evenly_while_a_first_step_runs() -> None:
    sims = workers(2)
    for name in range(16):
        chosen = choose([name + 3] * 4, sims, (0, 1))
        assert chosen is not None
        sims[chosen].submit(str(name), [name + 3] * 4, SamplingParams(max_tokens=100, ignore_eos=True))
        if name == 3:  # one worker begins earlier than the other
            sims[0].step()
    assert [sim.scheduler.num_running + sim.scheduler.num_waiting for sim in sims] == [8, 8]


def test_only_live_workers_are_chosen() -> None:
    sims = workers(2)
    assert choose([3], sims, (1,)) == 1
    assert choose([3], sims, ()) is None
