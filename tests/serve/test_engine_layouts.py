"""Every layout gives the tokens that transformers gives: real worker processes, real exchange."""

from typing import Any

import pytest

from antiphon.base.errors import UserError
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


def test_gloo_in_the_place_of_the_library_carries_the_same_text(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, "2+2/m2", exchange_library="gloo")) as engine:
        assert complete(engine, prompts) == reference
        assert engine.stats().exposed_communication_s > 0


def test_gloo_is_refused_where_it_cannot_carry_rows(tiny_model: TinyModel) -> None:
    changes: dict[str, Any]
    for layout, changes in (("1", {}), ("1+1/m1", {"balance": "window"}), ("1t2+1/m1", {})):
        with pytest.raises(UserError, match="gloo carries rows of --layout disaggregated only"):
            config(tiny_model, layout, exchange_library="gloo", **changes)
