"""From a step's rows of logits to its tokens: which rows need logits, whose state applies, what is reported.

1. If a row is edited by more than penalties, copy the logits and apply each request's edits (`sampling.py`).
2. One operation chooses the tokens (`RowOperations`, where a back-end may have native ones). Greedy rows take the
   argmax; the others are filtered and drawn with the uniform that belongs to their (seed, output index). A row of which
   nothing is allowed (all minus infinity) falls back to the argmax. Rows that were not copied get their penalties here.
3. Log-probabilities are of the raw logits (`token_logprobs`).

All steps work on each row by itself, so the token does not depend on the batch. Ties in an argmax go to the lowest id.

R rows with logits, V vocabulary, N rows that are drawn, A alternatives. Rows of a sequence come in order: those that
report prompt log-probabilities, then the last row if it samples (one row may do both).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker.messages import Sampled
from antiphon.serve.worker.sampling import (
    GrammarMask,
    RowDraw,
    SamplingState,
    choose_tokens,
    counter_uniform,
    edit_logits,
)
from antiphon.specs.sampling import MAX_LOGPROBS, PackedLogprobs

ArgmaxRows = Callable[[Tensor], Tensor]
ChooseRows = Callable[[Tensor, Sequence[RowDraw]], list[int]]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
_ROWS_AT_ONCE = 256  # whose log-probabilities are reported


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


def argmax_of_rows(logits_RV: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest if several are equal."""
    return logits_RV.argmax(dim=-1)


@dataclass(frozen=True)
class RowOperations:
    """What a back-end does with whole rows of logits. `choose` is for rows that are not all greedy."""

    argmax: ArgmaxRows = argmax_of_rows
    choose: ChooseRows = choose_tokens

    @staticmethod
    def of(backend: KernelBackend) -> "RowOperations":
        if not isinstance(backend, CpuBackend):
            return RowOperations()
        choose = backend.choose_rows
        return RowOperations(
            backend.argmax_rows, lambda logits_RV, rows: choose(logits_RV, b"".join([row.packed() for row in rows]))
        )

    def tokens(self, logits_RV: Tensor, rows: Sequence[RowDraw]) -> list[int]:
        """Step 2."""
        if all(row.takes_largest for row in rows):
            largest: list[int] = self.argmax(logits_RV).tolist()
            return largest
        return self.choose(logits_RV, rows)


class RowSampler:
    """Sampling state of all requests on this worker."""

    def __init__(self, backend: KernelBackend) -> None:
        self._operations = RowOperations.of(backend)
        self._states: dict[str, SamplingState] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._plain: set[str] = set()  # whose tokens are the largest logits, in every step

    def add(self, start: SequenceStart) -> None:
        """Begin (or begin again) a request."""
        state = self._states[start.request_id] = SamplingState(
            start.params,
            seed=start.seed,
            stop_ids=start.stop_ids,
            token_ids=start.token_ids,
            num_prompt=start.num_prompt,
        )
        self._plain.discard(start.request_id)
        if state.only_drawn and start.params.greedy and not (state.penalised or start.params.min_tokens):
            self._plain.add(start.request_id)
        if start.params.prompt_logprobs is not None:
            self._prompts[start.request_id] = tuple(start.token_ids[: start.num_prompt])

    def remove(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._plain.discard(request_id)
        self._prompts.pop(request_id, None)

    def takes_largest(self, request_ids: list[str], bitmasks: dict[str, bytes]) -> bool:
        """The next token of each of these requests is that of its largest logit; the states need not learn of it."""
        return not bitmasks and self._plain.issuperset(request_ids)

    def sample(self, logits_RV: Tensor, steps: list[SequenceStep], bitmasks: dict[str, bytes]) -> list[Sampled]:
        """Next tokens and log-probabilities. `logits_RV` has the rows `rows_with_logits` named, in that order."""
        draws = self.draws(steps, bitmasks, penalties=True) if len(steps) == logits_RV.shape[0] else None
        if draws is not None:
            tokens = self._operations.tokens(logits_RV, draws)
            return [Sampled(step.request_id, token) for step, token in zip(steps, tokens, strict=True)]
        prompt_reports: dict[str, list[PackedLogprobs]] = {}
        sampling: list[SequenceStep] = []
        rows: list[int] = []
        row = 0
        for step in steps:
            count = len(logit_rows(step))
            num_reported = step.logprob_end - step.logprob_begin
            if num_reported > 0:
                report = self._report_prompt(logits_RV[row : row + num_reported], step)
                prompt_reports.setdefault(step.request_id, []).append(report)  # a chunk may come in several pieces
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

    def draws(
        self, steps: list[SequenceStep], bitmasks: dict[str, bytes], *, penalties: bool = False
    ) -> list[RowDraw] | None:
        """How the rows of these steps are drawn, one each, if neither edits nor reports concern any of them; of edits
        only `penalties`, if allowed. Their states have learnt then what they must. Else None: `sample` must be asked.
        """
        found: list[RowDraw] = []
        for step in steps:
            state = self._states[step.request_id]
            params, index = state.params, step.start + len(step.token_ids) - state.num_prompt
            if not (state.only_drawn and step.samples) or step.logprob_end > step.logprob_begin:
                return None
            if params.min_tokens and state.bans_stop_ids(index):
                return None
            if state.penalised:
                if not penalties:
                    return None
                state.observe(step.start, step.token_ids)
            found.append(_draw(state, index))
        if bitmasks and any(step.request_id in bitmasks for step in steps):
            return None
        return found

    def _choose(
        self, logits_RV: Tensor, sampling: list[SequenceStep], rows: list[int], bitmasks: dict[str, bytes]
    ) -> dict[str, tuple[int, PackedLogprobs | None]]:
        states = [self._states[step.request_id] for step in sampling]
        indices = []
        for step, state in zip(sampling, states, strict=True):
            state.observe(step.start, step.token_ids)
            indices.append(step.start + len(step.token_ids) - state.num_prompt)
        picked_RV = logits_RV if len(rows) == logits_RV.shape[0] else logits_RV[rows]
        grammar = self._grammar(sampling, bitmasks)
        sampled = sample_tokens(picked_RV, states, indices, grammar=grammar, operations=self._operations)
        return {step.request_id: chosen for step, chosen in zip(sampling, sampled, strict=True)}

    @staticmethod
    def _grammar(sampling: list[SequenceStep], bitmasks: dict[str, bytes]) -> GrammarMask | None:
        rows = [row for row, step in enumerate(sampling) if step.request_id in bitmasks]
        if not rows:
            return None
        words = np.stack([np.frombuffer(bitmasks[sampling[row].request_id], dtype=np.int32) for row in rows])
        return GrammarMask(rows, torch.from_numpy(words))

    def _report_prompt(self, logits_RV: Tensor, step: SequenceStep) -> PackedLogprobs:
        first = step.start + step.logprob_begin + 1
        targets = self._prompts[step.request_id][first : first + logits_RV.shape[0]]
        count = self._states[step.request_id].params.prompt_logprobs
        assert count is not None, "only requests that asked for prompt log-probabilities report them"
        return prompt_logprobs(logits_RV, targets, count)


def sample_tokens(
    logits_RV: Tensor,
    states: Sequence[SamplingState],
    output_indices: Sequence[int],
    *,
    grammar: GrammarMask | None = None,
    operations: RowOperations = RowOperations(),
) -> list[tuple[int, PackedLogprobs | None]]:
    """Choose output token number `output_indices[i]` of request `states[i]` from row i of `logits_RV` (float32), with
    its log-probabilities if the request asked for them.

    The logits are left as they are; the states too: they learn of the token when it comes back as input."""
    assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}"
    assert len(states) == len(output_indices) == logits_RV.shape[0], "one state and one output index for each row"
    if not states:
        return []
    rows = list(zip(states, output_indices, strict=True))
    is_edited = grammar is not None and len(grammar.rows) > 0
    if is_edited or any(state.has_edits or state.bans_stop_ids(index) for state, index in rows):
        edited_RV = logits_RV.clone()
        edit_logits(edited_RV, states, output_indices, grammar)
        draws = [_draw(state, index)._replace(counted=None) for state, index in rows]
    else:
        edited_RV = logits_RV
        draws = [_draw(state, index) for state, index in rows]
    token_ids = operations.tokens(edited_RV, draws)
    return list(zip(token_ids, _report(logits_RV, states, token_ids), strict=True))


def _draw(state: SamplingState, output_index: int) -> RowDraw:
    params = state.params
    return RowDraw(params, 0.0 if params.greedy else counter_uniform(state.seed, output_index), state.counted)


def _report(
    logits_RV: Tensor, states: Sequence[SamplingState], token_ids: Sequence[int]
) -> list[PackedLogprobs | None]:
    """Step 3."""
    result: list[PackedLogprobs | None] = [None] * len(states)
    wanted = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
    if not wanted:
        return result
    rows = [row for row, _ in wanted]
    reports = token_logprobs(logits_RV[rows], [token_ids[row] for row in rows], [count for _, count in wanted])
    for row, report in zip(rows, reports, strict=True):
        asked = states[row].params.logprob_token_ids
        result[row] = _of_tokens(logits_RV[row], report, asked) if asked else report
    return result


def _of_tokens(logits_V: Tensor, report: PackedLogprobs, token_ids: Sequence[int]) -> PackedLogprobs:
    """`report` of one row with these tokens, in their order, in place of the best alternatives; the row's own token
    comes last unless it is among them."""
    own_id, own_value = np.frombuffer(report.ids, np.int32)[:1], np.frombuffer(report.values, np.float32)[:1]
    token_ids = [*token_ids, *(own for own in own_id.tolist() if own not in token_ids)]
    values = torch.log_softmax(logits_V.float(), dim=-1)[token_ids].cpu().numpy()
    return PackedLogprobs(
        num_top=len(token_ids),
        ids=np.concatenate([own_id, np.array(token_ids, dtype=np.int32)]).tobytes(),
        values=np.concatenate([own_value, values]).tobytes(),
        ranks=report.ranks,
    )


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[PackedLogprobs]:
    """For each row of raw logits: the log-probability and rank of its token, and the row's best alternatives.

    Log-softmax of the *raw* logits, before bias, penalties, grammar and temperature. This is vLLM's default, and
    OpenAI's since logit bias no longer shows in its log-probabilities: what the model thinks, comparable between
    requests, and always finite. Rejected: the distribution actually drawn from, in which a masked alternative is minus
    infinity (not JSON) and greedy decoding would report 0 for every token.

    A token's rank is 1 plus the number of strictly more likely tokens. Alternatives are ordered by probability, then
    id."""
    ids_RA, values_RA, ranks_R = _ranked(logits_RV, token_ids)
    return [
        _packed(ids_RA[row : row + 1], values_RA[row : row + 1], ranks_R[row : row + 1], count)
        for row, count in enumerate(num_alternatives)
    ]


def prompt_logprobs(logits_RV: Tensor, next_token_ids: Sequence[int], num_alternatives: int) -> PackedLogprobs:
    """The same for rows of a prompt, whose next tokens are known, together."""
    return _packed(*_ranked(logits_RV, next_token_ids), num_alternatives)


def _packed(ids_RA: Int32s, values_RA: Floats, ranks_R: Int32s, num_alternatives: int) -> PackedLogprobs:
    num_top = min(num_alternatives, ids_RA.shape[1] - 1)
    return PackedLogprobs(
        num_top=num_top,
        ids=ids_RA[:, : 1 + num_top].tobytes(),
        values=values_RA[:, : 1 + num_top].tobytes(),
        ranks=ranks_R.tobytes(),
    )


def _ranked(logits_RV: Tensor, token_ids: Sequence[int]) -> tuple[Int32s, Floats, Int32s]:
    """Ids and log-probabilities of each row's token and then of its alternatives in their order; the token's rank.

    Some rows at a time: a log-softmax of a whole prompt would be as large as its logits once more."""
    parts = []
    for begin in range(0, len(token_ids), _ROWS_AT_ONCE):
        logprobs_RV = torch.log_softmax(logits_RV[begin : begin + _ROWS_AT_ONCE].float(), dim=-1)
        tokens_R = np.array(token_ids[begin : begin + _ROWS_AT_ONCE])
        chosen_R = logprobs_RV.gather(1, torch.from_numpy(tokens_R).to(logits_RV.device).unsqueeze(1))
        ranks_R = (logprobs_RV > chosen_R).sum(1) + 1
        # always as many, so that ties do not depend on what batch mates asked for
        best = logprobs_RV.topk(min(MAX_LOGPROBS, logits_RV.shape[1]), dim=-1)
        ids_RA, values_RA = best.indices.cpu().numpy(), best.values.cpu().numpy()
        order = np.lexsort((ids_RA, -values_RA))
        ids_RA = np.column_stack([tokens_R, np.take_along_axis(ids_RA, order, axis=1)])
        values_RA = np.column_stack([chosen_R.cpu().numpy(), np.take_along_axis(values_RA, order, axis=1)])
        parts.append((ids_RA.astype(np.int32), values_RA, ranks_R.cpu().numpy().astype(np.int32)))
    ids, values, ranks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, values, ranks
