"""Hugging Face transformers as an engine for `engine_child.py`: `generate` over the whole batch, bf16, greedy.

Of the ways transformers has to run experts (`grouped_mm`, `batched_mm`, `eager`) the fastest here is chosen
at the start by a short trial, so that the comparison is with transformers at its best.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
# Short prompts: batched_mm copies the weights of every (token, expert) pair, which long ones would not survive.
TRIAL_PROMPTS, TRIAL_PROMPT_TOKENS, TRIAL_OUTPUT_TOKENS, NUM_TRIALS = 4, 8, 8, 3


class StepClock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time after each generated token; never stops anything."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TransformersEngine:
    """Generates for equally long prompts, all in one batch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("the transformers engine batches without padding; give it prompts of equal length")
        input_ids = torch.tensor(prompts, device=self.model.device)
        clock = StepClock()
        config = GenerationConfig(do_sample=False, max_new_tokens=output_tokens, eos_token_id=None, pad_token_id=0)
        start_s = time.perf_counter()
        with torch.inference_mode():
            sequences = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        times_s = clock.times_s
        assert len(times_s) == output_tokens
        return {
            "ttft_s": [times_s[0] - start_s],
            "itl_s": [after - before for before, after in itertools.pairwise(times_s)],
            "token_ids": sequences[:, input_ids.shape[1] :].tolist(),
        }


def trials_s(engine: TransformersEngine) -> dict[str, float]:
    """The fastest short generation with each way to run experts, tried in turn so that a disturbance hits all alike."""
    prompts = [[row * TRIAL_PROMPT_TOKENS + i for i in range(TRIAL_PROMPT_TOKENS)] for row in range(TRIAL_PROMPTS)]
    best_s = dict.fromkeys(EXPERTS_IMPLEMENTATIONS, float("inf"))
    for _ in range(NUM_TRIALS):
        for name in EXPERTS_IMPLEMENTATIONS:
            engine.model.set_experts_implementation(name)
            start_s = time.perf_counter()
            engine(prompts, TRIAL_OUTPUT_TOKENS)
            best_s[name] = min(best_s[name], time.perf_counter() - start_s)
    return best_s


def load(options: dict[str, Any]) -> tuple[TransformersEngine, dict[str, str]]:
    """`options`: `model` (folder), `device` and `num_threads`. How experts run is chosen by trial."""
    torch.set_num_threads(options["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
    model.to(options["device"]).eval()
    model.generation_config.eos_token_id = None
    engine = TransformersEngine(model)
    details = {"version": transformers.__version__, "torch": torch.__version__}
    trials = trials_s(engine)
    chosen = min(trials, key=lambda name: trials[name])
    details["trials"] = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in trials.items())
    model.set_experts_implementation(chosen)
    return engine, {**details, "experts_implementation": chosen}
