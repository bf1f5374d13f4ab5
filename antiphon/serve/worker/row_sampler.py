"""Connects a step's rows to the sampler: which rows need logits, whose state applies, what is reported.

R rows with logits, V vocabulary. Rows of a sequence come in order: those that report prompt log-probabilities, then the
last row if it samples (one row may do both).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.api import KernelBackend
from antiphon.serve.policy.step import SequenceStart, SequenceStep
from antiphon.serve.worker.messages import Sampled
from antiphon.serve.worker.sampling import argmax_of_rows, prompt_logprobs, sample_tokens
from antiphon.serve.worker.sampling_state import GrammarMask, SamplingState
from antiphon.specs.sampling import TokenLogprob


def needs_logits(step: SequenceStep) -> bool:
    return step.samples or step.logprob_end > step.logprob_begin


def logit_rows(step: SequenceStep) -> list[int]:
    """Rows of one sequence (counted within it) that need logits."""
    rows = list(range(step.logprob_begin, step.logprob_end))
    last = len(step.token_ids) - 1
    if step.samples and (not rows or rows[-1] != last):
        rows.append(last)
    return rows


def rows_with_logits(steps: list[SequenceStep]) -> list[int]:
    """Rows of a micro-batch that need logits."""
    rows: list[int] = []
    first_row = 0
    for step in steps:
        num_rows = len(step.token_ids)
        if step.samples and step.logprob_end == step.logprob_begin:
            rows.append(first_row + num_rows - 1)
        elif needs_logits(step):
            rows.extend(first_row + row for row in logit_rows(step))
        first_row += num_rows
    return rows


class RowSampler:
    """Sampling state of all requests on this worker."""

    def __init__(self, backend: KernelBackend) -> None:
        self._argmax: Callable[[Tensor], Tensor] = getattr(backend, "argmax_rows", argmax_of_rows)
        self._states: dict[str, SamplingState] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}

    def add(self, start: SequenceStart) -> None:
        """Begin (or begin again) a request."""
        self._states[start.request_id] = SamplingState(
            start.params,
            seed=start.seed,
            stop_ids=start.stop_ids,
            token_ids=start.token_ids,
            num_prompt=start.num_prompt,
        )
        if start.params.prompt_logprobs is not None:
            self._prompts[start.request_id] = tuple(start.token_ids[: start.num_prompt])

    def remove(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def sample(self, logits_RV: Tensor, steps: list[SequenceStep], bitmasks: dict[str, bytes]) -> list[Sampled]:
        """Next tokens and log-probabilities. `logits_RV` has the rows `rows_with_logits` named, in that order."""
        prompt_reports: dict[str, list[TokenLogprob]] = {}
        sampling: list[SequenceStep] = []
        rows: list[int] = []
        row = 0
        for step in steps:
            count = len(logit_rows(step))
            num_reported = step.logprob_end - step.logprob_begin
            if num_reported > 0:
                report = self._report_prompt(logits_RV[row : row + num_reported], step)
                prompt_reports.setdefault(step.request_id, []).extend(report)  # a chunk may come in several pieces
            row += count
            if step.samples:
                sampling.append(step)
                rows.append(row - 1)
        chosen = self._choose(logits_RV, sampling, rows, bitmasks) if sampling else {}
        result = [
            Sampled(request_id, None, None, report)
            for request_id, report in prompt_reports.items()
            if request_id not in chosen
        ]
        for request_id, (token_id, logprob) in chosen.items():
            result.append(Sampled(request_id, token_id, logprob, prompt_reports.get(request_id)))
        return result

    def _choose(
        self, logits_RV: Tensor, sampling: list[SequenceStep], rows: list[int], bitmasks: dict[str, bytes]
    ) -> dict[str, tuple[int, TokenLogprob | None]]:
        states = [self._states[step.request_id] for step in sampling]
        indices = []
        for step, state in zip(sampling, states, strict=True):
            state.observe(step.start, step.token_ids)
            indices.append(step.start + len(step.token_ids) - state.num_prompt)
        picked_RV = logits_RV if len(rows) == logits_RV.shape[0] else logits_RV[rows]
        grammar = self._grammar(sampling, bitmasks)
        sampled = sample_tokens(picked_RV, states, indices, grammar=grammar, argmax_rows=self._argmax)
        logprobs = sampled.logprobs or [None] * len(sampling)
        return {
            step.request_id: (token_id, logprob)
            for step, token_id, logprob in zip(sampling, sampled.token_ids, logprobs, strict=True)
        }

    @staticmethod
    def _grammar(sampling: list[SequenceStep], bitmasks: dict[str, bytes]) -> GrammarMask | None:
        rows = [row for row, step in enumerate(sampling) if step.request_id in bitmasks]
        if not rows:
            return None
        words = np.stack([np.frombuffer(bitmasks[sampling[row].request_id], dtype=np.int32) for row in rows])
        return GrammarMask(rows, torch.from_numpy(words))

    def _report_prompt(self, logits_RV: Tensor, step: SequenceStep) -> list[TokenLogprob]:
        first = step.start + step.logprob_begin + 1
        targets = self._prompts[step.request_id][first : first + logits_RV.shape[0]]
        count = self._states[step.request_id].params.prompt_logprobs
        assert count is not None, "only requests that asked for prompt log-probabilities report them"
        return prompt_logprobs(logits_RV, targets, count)
