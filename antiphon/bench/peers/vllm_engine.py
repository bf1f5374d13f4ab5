"""vLLM's offline `LLM` as an engine for `engine_child.py`, on the CPU, in one process.

Prefix caching is off: a run's two passes, and its repetitions, send the same prompts.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch
from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

WARM_UP_BATCHES = (1, 8)
WARM_UP_PROMPT_TOKENS, WARM_UP_OUTPUT_TOKENS = 32, 8


class VllmEngine:
    """Generates for any prompts, all handed over at once."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __call__(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling_params=sampling, use_tqdm=False
        )
        ttft_s, itl_s = [], []
        for output in outputs:
            metrics = output.metrics
            if metrics is not None and metrics.first_token_latency:
                ttft_s.append(metrics.first_token_latency)
            if metrics is not None and output_tokens > 1:
                # Only the mean is to be had offline: the time from first to last token over the tokens between.
                itl_s.append((metrics.last_token_ts - metrics.first_token_ts) / (output_tokens - 1))
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"ttft_s": ttft_s, "itl_s": itl_s, "token_ids": token_ids}


def load(options: dict[str, Any]) -> tuple[VllmEngine, dict[str, str]]:
    """`options`: `model` (folder), `max_model_len`, `max_num_seqs`."""
    llm = LLM(
        model=options["model"],
        dtype="bfloat16",
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    engine = VllmEngine(llm)
    for batch in WARM_UP_BATCHES:
        engine([list(range(WARM_UP_PROMPT_TOKENS))] * batch, WARM_UP_OUTPUT_TOKENS)
    return engine, {
        "version": version("vllm"),
        "torch": torch.__version__,
        "preload": os.environ.get("LD_PRELOAD", ""),
        "num_threads": str(torch.get_num_threads()),
    }
