"""A GPU's way through the engine on CPU tensors: Triton's kernels in its interpreter, decode steps in the form that is
captured, rows in stream order. The text is the CPU's."""

from dataclasses import replace

import pytest
import torch

from antiphon.kernels.triton import why_not
from tests.serve.engine_harness import GREEDY, TinyModel, complete, config, random_prompts, running


@pytest.mark.parametrize(("layout", "how"), [("1", {"graphs": "on"}), ("1+1", {"streams": "on"})])
def test_the_text_is_the_cpus(tiny_model: TinyModel, layout: str, how: dict[str, str]) -> None:
    if (reason := why_not(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(reason)
    prompts, greedy = random_prompts([3, 9]), replace(GREEDY, max_tokens=3)
    with running(config(tiny_model, layout, kernels="triton", timeout_s=200.0, **how)) as engine:
        assert engine.workforce.kernels == {"triton"}
        assert complete(engine, prompts, greedy) == tiny_model.greedy(prompts, 3)
