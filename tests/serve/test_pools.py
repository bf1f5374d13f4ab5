"""Prefill and decode in pools of their own: the text of one process, whatever the layouts and whatever dies."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.models.config import load_model_spec
from antiphon.serve import prepare as prepare_module
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.prepare import prepare
from antiphon.serve.worker.kv_transfer import layout_digest
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.counts import count_parameters, kv_cache_block_bytes
from antiphon.specs.sampling import SamplingParams
from tests.serve.engine_harness import (
    GREEDY,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    random_prompts,
    running,
    wait_until_idle,
)
from tests.serve.poisoned_worker import SEED, poison
from tests.waiting import wait_until

LAYOUTS = ("1>1", "2>1+1/m2")
MORE = [
    pytest.param(layout, marks=pytest.mark.slow)
    for layout in ("1t2>1", "1>1t2", "1p2>2t2*1", "1+1/m2>2", "2+1/m3>1t2+1/m2", "2t2*1>1p2")
]


@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE])
def test_64_greedy_tokens_equal_transformers(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout)) as engine:
        assert complete(engine, prompts) == reference
        wait_until_idle(engine)
        counts = engine.stats().handovers
        num_long = sum(len(prompt) > 16 for prompt in prompts)
        assert counts.num_done == counts.num_begun > num_long / 2, counts
        assert not counts.num_failed, counts
        assert not counts.num_recomputed, counts


def test_what_one_prompt_left_in_a_cache_is_not_handed_over_again(tiny_model: TinyModel) -> None:
    """Of a prompt that the decode worker has, only the rest is offered; what the prefill worker has is not computed."""
    (prompt,) = random_prompts([150])
    longer = [*prompt, *random_prompts([60], seed=5)[0]]
    with running(config(tiny_model, "1>1")) as engine:
        assert complete(engine, [prompt]) == tiny_model.greedy([prompt])
        before = engine.stats()
        params = replace(GREEDY, max_tokens=20)
        assert complete(engine, [longer], params) == tiny_model.greedy([longer], 20)
        after = engine.stats()
        assert 0 < after.handovers.num_tokens - before.handovers.num_tokens <= len(longer) - 144
        assert after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens >= 144


def test_requests_that_are_pushed_out_come_back_by_hand_over(tiny_model: TinyModel) -> None:
    prompts = random_prompts([90] * 6, seed=3)
    with running(config(tiny_model, "1>1", num_blocks=32)) as engine:
        assert complete(engine, prompts) == tiny_model.greedy(prompts)
        wait_until_idle(engine)
        assert engine.stats().num_preemptions
        assert engine.stats().handovers.num_done >= len(prompts)


def test_answers_that_end_with_the_first_token_hold_nothing(tiny_model: TinyModel) -> None:
    prompts = random_prompts([40, 90, 120])
    with running(config(tiny_model, "1>1")) as engine:
        assert complete(engine, prompts, replace(GREEDY, max_tokens=1)) == tiny_model.greedy(prompts, 1)
        assert complete(engine, prompts, replace(GREEDY, max_tokens=0)) == [[], [], []]
        wait_until_idle(engine)


def test_log_probabilities_of_prompt_and_answer_are_those_of_one_process(tiny_model: TinyModel) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = random_prompts([40, 90], seed=8)
    answers = []
    for layout in ("1", "1>1"):
        with running(config(tiny_model, layout)) as engine:
            finished = Run(engine, prompts, params).finish()
        answers.append([(each.token_ids, _logprobs(each.outputs)) for each in finished])
    assert answers[0] == answers[1]


def test_min_tokens_hold_for_a_first_token_that_a_prefill_worker_samples(tiny_model: TinyModel) -> None:
    prompts = random_prompts([40, 90], seed=8)
    (first, *_), (second, *_) = tiny_model.greedy(prompts)
    params = replace(GREEDY, max_tokens=12, min_tokens=7, stop_token_ids=(first, second))
    answers = []
    for layout in ("1", "1>1"):
        with running(config(tiny_model, layout)) as engine:
            answers.append(complete(engine, prompts, params))
    assert answers[0] == answers[1]
    assert not {first, second}.intersection(answers[1][0][:7] + answers[1][1][:7])


def _logprobs(outputs: list[EngineOutput]) -> list[tuple[list[object], list[object]]]:
    return [(list(each.logprobs or ()), list(each.prompt_logprobs or ())) for each in outputs]


def test_aborted_requests_give_their_blocks_back(tiny_model: TinyModel) -> None:
    """At every moment of a hand-over: none of a thousand leaves a block behind, and others are not disturbed."""
    prompts = random_prompts([120] * 8, seed=1)
    with running(config(tiny_model, "1>1")) as engine:
        for round_ in range(12):
            run = Run(engine, prompts, GREEDY)
            aborted = run.ids[: 4 + round_ % 4]

            def abort(num_tokens: int, after: int = round_ * 3, ids: list[str] = aborted) -> None:
                if num_tokens >= after:
                    for request_id in ids:
                        engine.abort(request_id)

            abort(0)
            finished = run.finish(abort)
            kept = [index for index, each in enumerate(finished) if run.ids[index] not in aborted]
            expected = tiny_model.greedy(prompts)
            assert [finished[index].token_ids for index in kept] == [expected[index] for index in kept]
        wait_until_idle(engine)


def test_requests_that_end_while_a_prefill_worker_is_replaced_give_its_blocks_back(tiny_model: TinyModel) -> None:
    prompts = random_prompts([120] * 8, seed=1)
    with running(config(tiny_model, "2*1>1", max_batch_tokens=64)) as engine:
        wait_until(lambda: engine.complete, "all workers")
        for _ in range(4):
            run = Run(engine, prompts, GREEDY)
            wait_until(lambda: engine.stats().handovers.num_begun > 0, "hand-overs")
            kill(engine, "replica", 1, pool="prefill")
            for request_id in run.ids:
                engine.abort(request_id)
            run.finish()
            wait_until(lambda: engine.complete, "all workers")
            wait_until_idle(engine)


VICTIMS = {
    "prefill": ["prefill/attention"],
    "decode": ["decode/attention"],
    "both": ["prefill/attention", "decode/attention"],
    "prefill experts": ["prefill/experts"],
    "decode experts": ["decode/experts"],
    "both experts": ["prefill/experts", "decode/experts"],
}


def _kill(engine: Engine, who: str) -> None:
    """The first worker of each pool and kind; where it has no attention workers a replica."""
    for victim in VICTIMS[who]:
        pool, role = victim.split("/")
        apart = any(name.pool == pool and name.role == role for name in engine.workforce.names)
        kill(engine, role if apart else "replica", 0, pool="prefill" if pool == "prefill" else "decode")


QUICK_KILLS = {
    *(("1>1", who, after) for who in ("prefill", "decode", "both") for after in (0, 1)),
    ("1+1/m2>2+1/m2 free", "prefill", 40),
    ("1+1/m2>2+1/m2 free", "both experts", 1),
}
KILLS = [
    (layout, who, after)
    for layout in ("1>1", "2>2", "1+1/m2>2+1/m2 free", "2>1+2/m3 free")
    for who in VICTIMS
    for after in (0, 1, 40)
    if "experts" not in who or layout[1] == "+" or (who == "decode experts" and "+" in layout)
]


@pytest.mark.parametrize(
    ("layout", "who", "after"),
    [pytest.param(*case, marks=[] if case in QUICK_KILLS else pytest.mark.slow) for case in KILLS],
)
def test_killed_workers_change_no_text(layout: str, who: str, after: int, tiny_model: TinyModel) -> None:
    """`after` so many tokens: none, while prompts are computed and handed over; one, while others are; 40, while
    some decode and others are tried again."""
    prompts = random_prompts([200, 180, 90, 33, 9] * 2, seed=6)
    params = replace(GREEDY, max_tokens=24)
    with running(config(tiny_model, layout)) as engine:
        killed = threading.Event()

        def strike(num_tokens: int) -> None:
            if num_tokens >= after and not killed.is_set():
                killed.set()
                _kill(engine, who)

        run = Run(engine, prompts, params)
        if after == 0:
            wait_until(lambda: engine.stats().handovers.num_begun > 0, "a hand-over")
            strike(0)
        finished = run.finish(strike)
        assert killed.is_set()
        assert [each.error for each in finished] == [None] * len(prompts)
        assert [each.token_ids for each in finished] == tiny_model.greedy(prompts, 24)
        wait_until(lambda: engine.complete, "all workers back")
        assert complete(engine, prompts, params) == tiny_model.greedy(prompts, 24)
        wait_until_idle(engine)


@pytest.mark.parametrize(
    ("kv_dtype", "together", "apart"),
    [
        ("int8", "1", "1>1+1/m2"),
        pytest.param("fp8", "1", "1+2/m2>2", marks=pytest.mark.slow),
        pytest.param("int8", "1t2", "1t2>1t2", marks=pytest.mark.slow),
    ],
)
def test_keys_and_values_in_8_bits_arrive_as_they_were_stored(
    kv_dtype: str, together: str, apart: str, tiny_model: TinyModel
) -> None:
    """The text of one pool whose cache has the same codes, also when a prefill worker dies while they travel."""
    prompts = random_prompts([90, 120, 33], seed=6)
    with running(config(tiny_model, together, kv_dtype=kv_dtype)) as engine:
        expected = complete(engine, prompts)
    with running(config(tiny_model, apart, kv_dtype=kv_dtype)) as engine:
        run = Run(engine, prompts, GREEDY)
        assert [each.token_ids for each in run.finish()] == expected
        counts = engine.stats().handovers
        assert counts.num_done == len(prompts)
        assert counts.num_failed == counts.num_recomputed == 0
        prompts = random_prompts([90, 120, 33], seed=7)
        run = Run(engine, prompts, GREEDY)
        wait_until(lambda: engine.stats().handovers.num_begun > counts.num_begun, "a hand-over")
        _kill(engine, "prefill")
        found = [each.token_ids for each in run.finish()]
        wait_until(lambda: engine.complete, "all workers back")
        wait_until_idle(engine)
    with running(config(tiny_model, together, kv_dtype=kv_dtype)) as engine:
        assert found == complete(engine, prompts)


@pytest.mark.parametrize("way", ["die", pytest.param("error", marks=pytest.mark.slow)])
def test_a_prompt_that_breaks_workers_ends_alone(
    way: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks prefill workers first; then a decode worker computes it, where the search for suspects finds it."""
    poison(tmp_path, monkeypatch, way)
    prompts = random_prompts([60, 70], seed=12)
    (poisonous,) = random_prompts([80], seed=13)
    with running(config(tiny_model, "1>1")) as engine:
        run = Run(engine, [prompts[0], poisonous, prompts[1]], [GREEDY, replace(GREEDY, seed=SEED), GREEDY])
        first, victim, last = run.finish()
        assert [first.token_ids, last.token_ids] == tiny_model.greedy(prompts)
        assert victim.last.finish_reason == "error"
        assert "the server has given the request up" in str(victim.error)
        assert engine.fatal is None
        wait_until_idle(engine)


def test_without_prefill_workers_the_decode_workers_compute_prompts(tiny_model: TinyModel) -> None:
    prompts = random_prompts([90, 120], seed=2)
    with running(config(tiny_model, "1>1")) as engine:
        engine.workforce.load_timeout_s = 0.0  # it never comes back
        kill(engine, "replica", 0, pool="prefill")
        wait_until(lambda: not engine.complete, "the prefill worker gone")
        assert complete(engine, prompts) == tiny_model.greedy(prompts)
        assert engine.stats().healthy


def test_a_prefill_worker_that_stops_is_replaced(tiny_model: TinyModel) -> None:
    prompts = random_prompts([180] * 4, seed=9)
    with running(config(tiny_model, "1>1")) as engine:
        run = Run(engine, prompts, GREEDY)
        kill(engine, "replica", 0, signal.SIGSTOP, pool="prefill")
        assert [each.token_ids for each in run.finish()] == tiny_model.greedy(prompts)
        wait_until(lambda: engine.complete, "it is back")
        wait_until_idle(engine)


def test_workers_are_named_after_their_pool(tiny_model: TinyModel) -> None:
    with running(config(tiny_model, "1>1+1/m1", trace=True)) as engine:
        complete(engine, random_prompts([60, 80]))
        stats = engine.stats()
        names = ["decode/attention[0]", "decode/experts[0]", "prefill/replica[0]"]
        assert sorted(stats.workers) == names
        assert engine.info.layout == "prefill 1, decode 1+1/m1"
        assert [pool.name for pool in stats.pools] == ["prefill", "decode"]
        assert sorted(map(str, engine.take_spans())) == names


def test_pools_that_cannot_understand_each_other_are_refused(tiny_model: TinyModel) -> None:
    settings = config(tiny_model, "1>1")
    assert settings.prefill is not None
    with pytest.raises(UserError, match=r"--dtype is bfloat16 for --prefill and auto for --decode"):
        replace(settings, prefill=replace(settings.prefill, dtype="bfloat16"))
    with pytest.raises(UserError, match=r"--kv-dtype is int8 for --prefill and auto for --decode"):
        replace(settings, prefill=replace(settings.prefill, kv_dtype="int8"))
    with pytest.raises(UserError, match="model is"):
        replace(settings, prefill=replace(settings.prefill, model=tiny_model.folder.parent))
    with pytest.raises(UserError, match="--kv-bytes"):
        prepare(replace(settings, kv_bytes=1000, prefill=replace(settings.prefill, kv_bytes=1000)))


def test_pools_that_do_not_fit_the_memory_are_refused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "free_memory_bytes", lambda device: 3 << 20)
    fits = config(tiny_model, "1>1", num_blocks=17)
    assert len(prepare(fits).pools) == 2
    with pytest.raises(ResourceError, match=r"the pools do not fit: weights need .* of --decode and .* of --prefill"):
        prepare(config(tiny_model, "9>1", num_blocks=17))


def test_a_workers_tokens_are_the_servers_although_the_tokenizer_ends_texts_too(tiny_model: TinyModel) -> None:
    """The server adds the tokenizer's ending to the model; workers read `config.json` alone."""
    spec = load_model_spec(tiny_model.folder)
    servers = replace(spec, eos_token_ids=(*spec.eos_token_ids, 5))
    assert layout_digest(servers, torch.float32, "auto") == layout_digest(spec, torch.float32, "auto")
    assert layout_digest(replace(spec, vocab_size=9), torch.float32, "auto") != layout_digest(
        spec, torch.float32, "auto"
    )


def test_experts_that_stay_in_the_file_need_no_memory_but_their_pool(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_model_spec(tiny_model.folder)
    experts = 4 * spec.num_moe_layers * spec.router.num_experts * count_parameters(spec).expert
    rest = 4 * count_parameters(spec).total - experts
    kv_bytes = 17 * kv_cache_block_bytes(spec, 16, 4)
    free_bytes = 2 * (rest + kv_bytes) + experts  # two replicas with half of their experts each
    monkeypatch.setattr(prepare_module, "free_memory_bytes", lambda device: free_bytes)
    with pytest.raises(ResourceError, match="the pools do not fit"):
        prepare(config(tiny_model, "1>1", num_blocks=17))
    for layout in ("1>1", "2"):
        prepare(config(tiny_model, layout, num_blocks=17, expert_bytes=experts // 2 - 1024))
    with pytest.raises(
        ResourceError, match=r"--expert-memory .* does not fit: .* lower it, --kv-bytes or the number of replicas"
    ):
        prepare(config(tiny_model, "2", num_blocks=17, expert_bytes=experts // 2 + 1024))


def test_a_worker_name_says_where_it_is() -> None:
    assert str(WorkerName("experts", 2, instance=1, pool="prefill")) == "prefill/1/experts[2]"
