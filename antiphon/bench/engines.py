"""Other engines, as the processes of `peers` load them: transformers' `generate`, vLLM's offline `LLM`, llama.cpp.

This file runs under the engine's own interpreter, where antiphon may not be installed: it imports nothing of ours, and
each engine's library where that engine is made.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any

import torch

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
# Short prompts: batched_mm copies the weights of every (token, expert) pair, which long ones would not survive.
TRIAL_PROMPTS, TRIAL_PROMPT_TOKENS, TRIAL_OUTPUT_TOKENS, NUM_TRIALS = 4, 8, 8, 3
WARM_UP_BATCHES = (1, 8)
WARM_UP_PROMPT_TOKENS, WARM_UP_OUTPUT_TOKENS = 32, 8


class PeerEngine(ABC):
    """What a peer's process calls. `about`: what a report says of the engine."""

    def __init__(self) -> None:
        self.about: dict[str, str] = {}

    @abstractmethod
    def generate(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Greedy tokens for all prompts at once: `{"ttft_s": […], "itl_s": […], "token_ids": [[…], …]}`."""

    def details(self) -> dict[str, str]:
        return self.about

    def timed_run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Both passes of a run: one token, then all. Their durations, and what the engine saw in the second."""
        start_s = time.perf_counter()
        observed = self.generate(prompts, 1)
        prefill_s = time.perf_counter() - start_s
        if output_tokens == 1:
            return {**observed, "prefill_s": prefill_s, "total_s": prefill_s}
        start_s = time.perf_counter()
        observed = self.generate(prompts, output_tokens)
        return {**observed, "prefill_s": prefill_s, "total_s": time.perf_counter() - start_s}


class TransformersEngine(PeerEngine):
    """transformers over the whole batch, bf16, without padding: prompts must be of equal length.

    `options`: `model` (folder), `device` and `num_threads`. Of the ways transformers has to run experts the fastest
    here is chosen by a short trial, so that the comparison is with transformers at its best.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import transformers

        super().__init__()
        torch.set_num_threads(options["num_threads"])
        self._library: Any = transformers
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
        self.model.to(options["device"]).eval()
        self.model.generation_config.eos_token_id = None
        trials = self._trials_s()
        chosen = min(trials, key=lambda name: trials[name])
        self.model.set_experts_implementation(chosen)
        self.about = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "trials": ", ".join(f"{name} {seconds:.3f} s" for name, seconds in trials.items()),
            "experts_implementation": chosen,
        }

    def generate(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("the transformers engine batches without padding; give it prompts of equal length")
        input_ids = torch.tensor(prompts, device=self.model.device)
        times_s: list[float] = []

        def clock(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            """Called after each generated token; never stops anything."""
            times_s.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        start_s = time.perf_counter()
        with torch.inference_mode():
            sequences = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=self._library.GenerationConfig(
                    do_sample=False, max_new_tokens=output_tokens, eos_token_id=None, pad_token_id=0
                ),
                stopping_criteria=self._library.StoppingCriteriaList([clock]),
            )
        assert len(times_s) == output_tokens
        return {
            "ttft_s": [times_s[0] - start_s],
            "itl_s": [after - before for before, after in itertools.pairwise(times_s)],
            "token_ids": sequences[:, input_ids.shape[1] :].tolist(),
        }

    def _trials_s(self) -> dict[str, float]:
        """The fastest short generation with each way to run experts, tried in turn so that a disturbance hits all
        alike."""
        prompts = [[row * TRIAL_PROMPT_TOKENS + i for i in range(TRIAL_PROMPT_TOKENS)] for row in range(TRIAL_PROMPTS)]
        best_s = dict.fromkeys(EXPERTS_IMPLEMENTATIONS, float("inf"))
        for _ in range(NUM_TRIALS):
            for name in EXPERTS_IMPLEMENTATIONS:
                self.model.set_experts_implementation(name)
                start_s = time.perf_counter()
                self.generate(prompts, TRIAL_OUTPUT_TOKENS)
                best_s[name] = min(best_s[name], time.perf_counter() - start_s)
        return best_s


class VllmEngine(PeerEngine):
    """vLLM on the CPU, in one process; takes any prompts, all handed over at once.

    `options`: `model` (folder), `max_model_len`, `max_num_seqs`. Prefix caching is off: a run's two passes, and its
    repetitions, send the same prompts.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm  # type: ignore[import-not-found,unused-ignore]

        super().__init__()
        self._library: Any = vllm
        self._llm: Any = vllm.LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=0,
        )
        for batch in WARM_UP_BATCHES:
            self.generate([list(range(WARM_UP_PROMPT_TOKENS))] * batch, WARM_UP_OUTPUT_TOKENS)
        self.about = {
            "version": version("vllm"),
            "torch": torch.__version__,
            "preload": os.environ.get("LD_PRELOAD", ""),
            "num_threads": str(torch.get_num_threads()),
        }

    def generate(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        sampling = self._library.SamplingParams(
            temperature=0.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
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


class LlamaCppEngine(PeerEngine):
    """llama.cpp on the CPU with a GGUF file, by the C interface that its Python package has; takes any prompts.

    `options`: `model` (file), `num_threads`, `max_model_len`, `max_num_seqs`. Every sequence has a cache of its own and
    all of a step go in one batch, which is what llama.cpp's server does; everything else is its default. Greedy tokens
    are chosen here, from its logits.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        import numpy

        super().__init__()
        self._library: Any = llama_cpp
        self._numpy: Any = numpy
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self._model = llama_cpp.llama_model_load_from_file(
            options["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {options['model']}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = options["max_num_seqs"]
        settings.n_ctx = options["max_num_seqs"] * options["max_model_len"]
        settings.n_threads = settings.n_threads_batch = options["num_threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {settings.n_ctx} tokens")
        self._most_tokens = int(settings.n_batch)
        self._batch = llama_cpp.llama_batch_init(self._most_tokens, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        for batch in WARM_UP_BATCHES:
            self.generate([list(range(WARM_UP_PROMPT_TOKENS))] * batch, WARM_UP_OUTPUT_TOKENS)
        self.about = {
            "version": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "num_threads": str(options["num_threads"]),
        }

    def generate(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        start_s = time.perf_counter()
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        token_ids: list[list[int]] = [[] for _ in prompts]
        times_s: list[list[float]] = [[] for _ in prompts]
        for step in range(output_tokens):
            for first in range(0, len(rows), self._most_tokens):
                part = rows[first : first + self._most_tokens]
                for sequence, token in zip([row[2] for row in part if row[3]], self._decoded(part), strict=True):
                    token_ids[sequence].append(token)
                    times_s[sequence].append(time.perf_counter())
            rows = [
                (token_ids[sequence][-1], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)
            ]
        return {
            "ttft_s": [each[0] - start_s for each in times_s],
            "itl_s": [after - before for each in times_s for before, after in itertools.pairwise(each)],
            "token_ids": token_ids,
        }

    def _decoded(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, place, sequence, whether its logits are wanted); the next tokens where they are."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, place, sequence, is_last) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, is_last
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if status := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returns {status}")
        num_wanted = sum(row[3] for row in rows)
        if num_wanted == 0:
            return []
        logits = self._library.llama_get_logits(self._context)
        shape = (num_wanted, self._vocab_size)
        return [int(token) for token in self._numpy.ctypeslib.as_array(logits, shape=shape).argmax(axis=1)]


def load(options: dict[str, Any]) -> PeerEngine:
    """The engine that `options["engine"]` names."""
    engines: dict[str, type[TransformersEngine | VllmEngine | LlamaCppEngine]] = {
        "transformers": TransformersEngine,
        "vllm": VllmEngine,
        "llama.cpp": LlamaCppEngine,
    }
    return engines[options["engine"]](options)
