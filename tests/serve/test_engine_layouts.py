"""Every layout gives the tokens that transformers gives: real worker processes, real exchange."""

import pytest

from tests.serve.engine_harness import (
    NUM_TOKENS,
    Prompts,
    TinyModel,
    Tokens,
    complete,
    config,
    running,
    wait_until_idle,
)

LAYOUTS = ("1", "2", "1+1/m1", "2+1/m2", "1+2/m3", "3+2/m4")
MORE = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("1+1/m4", "3+2/m2")]


@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE])
def test_64_greedy_tokens_equal_transformers(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout)) as engine:
        assert complete(engine, prompts) == reference
        wait_until_idle(engine)
        if "+1/" in layout:  # one expert worker: each row goes there once a layer, with two ids and weights
            num_rows = sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts)
            assert engine.stats().dispatch_bytes == num_rows * 2 * (48 * 4 + 2 * 8)
