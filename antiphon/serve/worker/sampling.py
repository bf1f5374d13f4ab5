"""One token for each row of logits: edits, filters, draw, and the log-probabilities that were asked for.

1. If every row is plain greedy, one argmax is all (`argmax_rows`, where a native operator can be put in).
2. Otherwise copy the logits and apply each request's edits (`sampling_state.py`).
3. Greedy rows take the argmax; the others are filtered and drawn (`draw.py`) with the uniform that belongs to their
   (seed, output index). A row of which nothing is allowed (all minus infinity) falls back to the argmax.
4. Log-probabilities are of the raw logits (`token_logprobs`).

All steps work on each row by itself, so the token does not depend on the batch. Ties in an argmax go to the lowest id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.serve.worker.draw import counter_uniform, draw_tokens, filtered_probabilities
from antiphon.serve.worker.sampling_state import GrammarMask, SamplingState, edit_logits
from antiphon.specs.sampling import TokenLogprob

ArgmaxRows = Callable[[Tensor], Tensor]
MAX_ALTERNATIVES = 20  # the API's limit; always searched, so that ties do not depend on what batch mates asked for


@dataclass(frozen=True)
class SampledTokens:
    """`token_ids[i]` for row i; `logprobs[i]` where its request asked for it, `logprobs` None if nobody did."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None


def argmax_of_rows(logits_RV: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest if several are equal."""
    return logits_RV.argmax(dim=-1)


def sample_tokens(
    logits_RV: Tensor,
    states: Sequence[SamplingState],
    output_indices: Sequence[int],
    *,
    grammar: GrammarMask | None = None,
    argmax_rows: ArgmaxRows = argmax_of_rows,
) -> SampledTokens:
    """Choose output token number `output_indices[i]` of request `states[i]` from row i of `logits_RV` (float32).

    The logits are left as they are; the states too: they learn of the token when it comes back as input."""
    assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}"
    assert len(states) == len(output_indices) == logits_RV.shape[0], "one state and one output index for each row"
    if not states:
        return SampledTokens([], None)
    if _all_plain_greedy(states, output_indices, grammar):
        return SampledTokens(argmax_rows(logits_RV).tolist(), None)
    edited_RV = logits_RV.clone()
    edit_logits(edited_RV, states, output_indices, grammar)
    token_ids = _choose(edited_RV, states, output_indices, argmax_rows)
    return SampledTokens(token_ids, _report(logits_RV, states, token_ids))


def _all_plain_greedy(
    states: Sequence[SamplingState], output_indices: Sequence[int], grammar: GrammarMask | None
) -> bool:
    if grammar is not None and len(grammar.rows):
        return False
    return all(
        state.plain_greedy and not state.bans_stop_ids(index)
        for state, index in zip(states, output_indices, strict=True)
    )


def _choose(
    edited_RV: Tensor, states: Sequence[SamplingState], output_indices: Sequence[int], argmax_rows: ArgmaxRows
) -> list[int]:
    """Step 3."""
    token_ids: list[int] = [-1] * len(states)
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if drawn:
        logits_NV = edited_RV if len(drawn) == len(states) else edited_RV[drawn]
        params = [states[row].params for row in drawn]
        probs_NV = filtered_probabilities(
            logits_NV,
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        )
        uniforms = [counter_uniform(states[row].seed, output_indices[row]) for row in drawn]
        for row, token_id in zip(drawn, draw_tokens(probs_NV, uniforms).tolist(), strict=True):
            token_ids[row] = token_id
    others = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if others:
        for row, token_id in zip(others, argmax_rows(edited_RV[others]).tolist(), strict=True):
            token_ids[row] = token_id
    return token_ids


def _report(
    logits_RV: Tensor, states: Sequence[SamplingState], token_ids: Sequence[int]
) -> list[TokenLogprob | None] | None:
    """Step 4."""
    wanted = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
    if not wanted:
        return None
    rows = [row for row, _ in wanted]
    reports = token_logprobs(logits_RV[rows], [token_ids[row] for row in rows], [count for _, count in wanted])
    result: list[TokenLogprob | None] = [None] * len(states)
    for row, report in zip(rows, reports, strict=True):
        result[row] = report
    return result


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    """For each row of raw logits: the log-probability and rank of its token, and the row's best alternatives.

    Log-softmax of the *raw* logits, before bias, penalties, grammar and temperature. This is vLLM's default, and
    OpenAI's since logit bias no longer shows in its log-probabilities: what the model thinks, comparable between
    requests, and always finite. Rejected: the distribution actually drawn from, in which a masked alternative is minus
    infinity (not JSON) and greedy decoding would report 0 for every token.

    A token's rank is 1 plus the number of strictly more likely tokens. Alternatives are ordered by probability, then
    id."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R = logprobs_RV.gather(1, torch.tensor(token_ids, device=logits_RV.device).unsqueeze(1))
    ranks = ((logprobs_RV > chosen_R).sum(1) + 1).tolist()
    best = logprobs_RV.topk(min(MAX_ALTERNATIVES, logits_RV.shape[1]), dim=-1)
    rows = zip(token_ids, chosen_R.squeeze(1).tolist(), ranks, num_alternatives, strict=True)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    result = []
    for (token_id, logprob, rank, count), (ids, values) in zip(rows, tops, strict=True):
        ordered = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        result.append(TokenLogprob(token_id, logprob, rank, tuple(ordered[:count])))
    return result


def prompt_logprobs(logits_RV: Tensor, next_token_ids: Sequence[int], num_alternatives: int) -> list[TokenLogprob]:
    """The same for rows of a prompt, whose next tokens are known. Takes R x V floats: the caller bounds R."""
    return token_logprobs(logits_RV, next_token_ids, [num_alternatives] * len(next_token_ids))
