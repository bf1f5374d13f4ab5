"""Prefill and decode in pools of their own: the text of one process, whatever the layouts and whatever dies."""

import pytest

from tests.serve.engine_harness import (
    Prompts,
    TinyModel,
    Tokens,
    complete,
    config,
    running,
    wait_until_idle,
)

LAYOUTS = ("1>1", "2>1+1/m2")


@pytest.mark.parametrize("layout", LAYOUTS)
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
