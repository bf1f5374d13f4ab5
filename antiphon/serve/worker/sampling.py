"""One token for each row of logits: edits, filters, draw, and the log-probabilities that were asked for.

1. If every row is plain greedy, one argmax is all (`argmax_rows`, where a native operator can be put in).
2. Otherwise copy the logits and apply each request's edits (`sampling_state.py`).
3. Greedy rows take the argmax; the others are filtered and drawn with the uniform that belongs to their
   (seed, output index). A row of which nothing is allowed (all minus infinity) falls back to the argmax.
4. Log-probabilities are of the raw logits (`token_logprobs`).

All steps work on each row by itself, so the token does not depend on the batch. Ties in an argmax go to the lowest id.

Every filter is a *threshold on the probability*. They are found in the order min-p, top-k, top-p, each on what the
earlier ones left (vLLM's order); tokens tied with the last one kept are kept too. The draw puts one uniform through the
inverse CDF, in order of token id. Both depend on the values of the row alone, never on how a sort happened to order
ties. So a row gives the same token whatever batch, layout or restart it is computed in.

The thresholds need the row's values in order, not the order of its tokens. NumPy sorts bare float32 values with
vector instructions, 30 times as fast as `torch.sort`, which carries indices along (152k values on one AVX-512 core:
0.35 ms against 11 ms); other devices sort with torch.

Randomness is counter-based: one 53-bit uniform per (seed, output index), by SplitMix64 (Steele, Lea, Flood 2014).
Rejected: `torch.multinomial` with generators (the token would depend on batch mates and on every draw before), and
Gumbel noise per vocabulary entry (152k hashes a token).

R rows   V vocabulary   C segments of the vocabulary   S tokens of a segment
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from antiphon.serve.worker.sampling_state import GrammarMask, SamplingState, edit_logits
from antiphon.specs.sampling import TokenLogprob

ArgmaxRows = Callable[[Tensor], Tensor]
MAX_ALTERNATIVES = 20  # the API's limit; always searched, so that ties do not depend on what batch mates asked for
_SEGMENT = 512
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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


def counter_uniform(seed: int, index: int) -> float:
    """The uniform in [0, 1) that belongs to output token `index` of a request with `seed`. Any integers."""
    state = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((state + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit words in which each input bit flips half of the output bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def filtered_probabilities(
    logits_RV: Tensor,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
) -> Tensor:
    """Probabilities [R, V], zero where filtered, not renormalised. `top_ks` 0 or -1: off. NaN rows: nothing allowed."""
    device = logits_RV.device
    temperature_R = torch.tensor(temperatures, device=device).unsqueeze(1)
    probs_RV = torch.softmax(logits_RV / temperature_R, dim=-1)
    vocab_size = logits_RV.shape[1]
    rows = [
        row
        for row, (top_k, top_p, min_p) in enumerate(zip(top_ks, top_ps, min_ps, strict=True))
        if 0 < top_k < vocab_size or top_p < 1.0 or min_p > 0.0
    ]
    if not rows:
        return probs_RV
    select = slice(None) if len(rows) == len(top_ks) else torch.tensor(rows, device=device)
    picked_RV = probs_RV[select]
    min_p_R = torch.tensor([min_ps[row] for row in rows], device=device)
    threshold_R = picked_RV.amax(dim=1) * min_p_R
    if any(0 < top_ks[row] < vocab_size or top_ps[row] < 1.0 for row in rows):
        last_ranks = [min(top_ks[row], vocab_size) if top_ks[row] > 0 else vocab_size for row in rows]
        last_rank_R = torch.tensor(last_ranks, device=device) - 1
        top_p_R = torch.tensor([top_ps[row] for row in rows], dtype=torch.float64, device=device)
        threshold_R = _raise_thresholds(threshold_R, _sorted_descending(picked_RV), last_rank_R, top_p_R)
    probs_RV[select] = picked_RV * (picked_RV >= threshold_R.unsqueeze(1))
    return probs_RV


def _sorted_descending(values_RV: Tensor) -> Tensor:
    if values_RV.device.type == "cpu":
        return torch.from_numpy(np.sort(values_RV.numpy(), axis=1)).flip(1)
    return values_RV.sort(dim=1, descending=True).values


def _raise_thresholds(threshold_R: Tensor, sorted_RV: Tensor, last_rank_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Top-k, then top-p of what is left. `last_rank_R`: index of the k-th value, the last index where top-k is off."""
    kth_R = sorted_RV.gather(1, last_rank_R.unsqueeze(1)).squeeze(1)
    threshold_R = torch.maximum(threshold_R, kth_R)
    mass_RV = (sorted_RV * (sorted_RV >= threshold_R.unsqueeze(1))).cumsum(1, dtype=torch.float64)
    num_short_R = (mass_RV < top_p_R.unsqueeze(1) * mass_RV[:, -1:]).sum(1)
    nucleus_R = sorted_RV.gather(1, num_short_R.clamp(max=sorted_RV.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(top_p_R < 1.0, torch.maximum(threshold_R, nucleus_R), threshold_R)


def draw_tokens(probs_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Token ids int64 [R]: where the running sum of each row first exceeds uniform x total. -1 for rows without mass.

    Two levels, sums of segments and then one segment, so that nothing of length V is scanned one by one. A token of
    probability zero is never drawn: within the segment we stop at the latest where its sum is complete."""
    num_rows, vocab_size = probs_RV.shape
    padded_RV = torch.nn.functional.pad(probs_RV, (0, -vocab_size % _SEGMENT))
    segments_RCS = padded_RV.view(num_rows, -1, _SEGMENT)
    ends_RC = segments_RCS.sum(-1).double().cumsum(1)
    total_R = ends_RC[:, -1:]
    target_R = torch.tensor(uniforms, dtype=torch.float64, device=probs_RV.device).unsqueeze(1) * total_R
    segment_R = ((ends_RC <= target_R) & (ends_RC < total_R)).sum(1, keepdim=True)
    before_R = torch.where(segment_R > 0, ends_RC.gather(1, (segment_R - 1).clamp(min=0)), 0.0)
    rows = torch.arange(num_rows, device=probs_RV.device)
    sums_RS = segments_RCS[rows, segment_R.squeeze(1).clamp(max=segments_RCS.shape[1] - 1)].double().cumsum(1)
    offset_R = ((sums_RS <= target_R - before_R) & (sums_RS < sums_RS[:, -1:])).sum(1)
    tokens_R = segment_R.squeeze(1) * _SEGMENT + offset_R
    return torch.where(total_R.squeeze(1) > 0, tokens_R, -1)


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
