"""What a request's parameters do to its logits, and the draw: edits, filters, one uniform.

`SamplingState` is what is remembered of one request: parameters, seed, token counts if penalties need them. Counts are
kept as a list of distinct tokens with a count each, not as a row of the vocabulary: 152k counters for each of 256
requests would be 156 MB touched at random, the tokens of a conversation are a few thousand. They live in host memory,
where the tokens come from, and go to the device with each penalised batch. A token is counted when its position first
appears as *input* of a step (or at the start), never when it is sampled. So a step that is sent again after a failure
counts nothing twice.

Every filter is a *threshold on the probability*. They are found in the order min-p, top-k, top-p, each on what the
earlier ones left (vLLM's order); tokens tied with the last one kept are kept too. The draw puts one uniform through the
inverse CDF, in order of token id. Both depend on the values of the row alone, never on how a sort happened to order
ties. So a row gives the same token whatever batch, layout or restart it is computed in.

The thresholds need the row's values in order, not the order of its tokens. NumPy sorts bare float32 values with
vector instructions, 30 times as fast as `torch.sort`, which carries indices along (152k values on one AVX-512 core:
0.35 ms against 11 ms); other devices sort with torch. Values that are too small to be kept are not sorted at all.

Randomness is counter-based: one 53-bit uniform per (seed, output index), by SplitMix64 (Steele, Lea, Flood 2014).
Rejected: `torch.multinomial` with generators (the token would depend on batch mates and on every draw before), and
Gumbel noise per vocabulary entry (152k hashes a token).

R rows   V vocabulary   C segments of the vocabulary   S tokens of a segment
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.specs.sampling import SamplingParams

_BITS_PER_WORD = 32
_SEGMENT = 512
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MARGIN = 1e-9  # more than two orders of a sum of float64 differ by

Floats = NDArray[np.float32]


class TokenCounts:
    """Distinct tokens of one request in order of first appearance, with how often each was *generated*."""

    def __init__(self) -> None:
        self._index_of: dict[int, int] = {}
        self._ids = torch.empty(64, dtype=torch.int64)
        self._counts = torch.zeros(64)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> Tensor:
        """float32, 0 for tokens that are only in the prompt."""
        return self._counts[: len(self._index_of)]

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        distinct = [token for token in dict.fromkeys(token_ids) if token not in self._index_of]
        first, end = len(self._index_of), len(self._index_of) + len(distinct)
        self._reserve(end)
        self._ids[first:end] = torch.tensor(distinct, dtype=torch.int64)
        self._index_of.update(zip(distinct, range(first, end), strict=True))

    def add_output(self, token_id: int) -> None:
        index = self._index_of.get(token_id)
        if index is None:
            index = self._index_of[token_id] = len(self._index_of)
            self._reserve(index + 1)
            self._ids[index] = token_id
        self._counts[index] += 1

    def _reserve(self, size: int) -> None:
        missing = size - len(self._ids)
        if missing > 0:
            grow = max(missing, len(self._ids))
            self._ids = torch.cat([self._ids, torch.empty(grow, dtype=torch.int64)])
            self._counts = torch.cat([self._counts, torch.zeros(grow)])


class SamplingState:
    """One request on its worker. `stop_ids` (end-of-sequence and stop tokens) are banned until `min_tokens` are out."""

    def __init__(
        self, params: SamplingParams, *, seed: int, stop_ids: Sequence[int], token_ids: Sequence[int], num_prompt: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.num_prompt = num_prompt
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self.bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self.penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.allowed_ids = torch.tensor(params.allowed_token_ids, dtype=torch.int64)
        has_edits = bool(self.penalised or params.logit_bias or params.allowed_token_ids or params.bad_words)
        self.only_drawn = not has_edits and params.logprobs is None
        self.plain_greedy = params.greedy and self.only_drawn
        self.token_counts = TokenCounts()
        self._tail: list[int] = []  # the output's last tokens, as many as the longest bad word has before its own last
        self._tail_length = max(map(len, params.bad_words), default=1) - 1
        self._num_seen = num_prompt
        if self.penalised and params.repetition_penalty != 1.0:
            self.token_counts.add_prompt(token_ids[:num_prompt])
        self.observe(num_prompt, token_ids[num_prompt:])

    def observe(self, start: int, token_ids: Sequence[int]) -> None:
        """The tokens at positions `start` and on are known. Prompt tokens and those seen before are passed over."""
        new_ids = token_ids[max(self._num_seen - start, 0) :]
        if self.penalised:
            for token_id in new_ids:
                self.token_counts.add_output(token_id)
        if self._tail_length:
            self._tail = [*self._tail, *new_ids][-self._tail_length :]
        self._num_seen = max(self._num_seen, start + len(token_ids))

    def banned_ids(self) -> set[int]:
        """Tokens that would complete one of the bad words."""
        return {
            word[-1]
            for word in self.params.bad_words
            if len(word) == 1 or tuple(self._tail[1 - len(word) :]) == word[:-1]
        }

    def bans_stop_ids(self, output_index: int) -> bool:
        """Whether output token `output_index` (0 is the first) must not end the request."""
        return output_index < self.params.min_tokens and bool(self.stop_ids)


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens are left out of its draws for being improbable."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True)
class GrammarMask:
    """Which tokens a grammar allows next. `words` int32 [len(rows), >= ceil(V / 32)], on any device: bit t % 32 of word
    t // 32 set means token t is allowed. `rows` index the logits; rows that are not named are free."""

    rows: Sequence[int]
    words: Tensor


def edit_logits(
    logits_RV: Tensor, states: Sequence[SamplingState], output_indices: Sequence[int], grammar: GrammarMask | None
) -> None:
    """Apply all edits to `logits_RV` in place, before temperature, for all rows of a batch at once. Row i belongs to
    `states[i]`, about to get token `output_indices[i]`.

    In vLLM's order: logit bias; repetition penalty over prompt and output (logit divided by it if positive, multiplied
    if not: Keskar et al. 2019, eq. 1.4); frequency and presence penalty over the output (OpenAI's API reference,
    `mu[j] - c[j] * frequency - (c[j] > 0) * presence`); allowed tokens; grammar; bad words; ban on ending before
    `min_tokens`. A grammar or a list of allowed tokens that leaves nothing but bad words has its way.

    Rows without an edit are not touched; each edit is one gather and one scatter over the concerned (row, token) pairs.
    """
    _add_bias(logits_RV, states)
    _apply_penalties(logits_RV, states)
    _keep_allowed(logits_RV, states)
    if grammar is not None and len(grammar.rows):
        _apply_grammar(logits_RV, grammar)
    _ban(logits_RV, {row: sorted(state.banned_ids()) for row, state in enumerate(states) if state.params.bad_words})
    _ban_stop_ids(logits_RV, states, output_indices)


def _add_bias(logits_RV: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if len(state.bias_ids)]
    if not rows:
        return
    device = logits_RV.device
    pairs = _row_of_each(rows, [states[row].bias_ids for row in rows], device)
    values = torch.cat([states[row].bias_values for row in rows]).to(device)
    logits_RV[pairs] += values


def _apply_penalties(logits_RV: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.penalised and len(state.token_counts.ids)]
    if not rows:
        return
    device = logits_RV.device
    ids = [states[row].token_counts.ids for row in rows]
    pairs = _row_of_each(rows, ids, device)
    counts = torch.cat([states[row].token_counts.counts for row in rows]).to(device)
    params = [states[row].params for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in ids])
    per_row = torch.tensor([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params])
    repetition, frequency, presence = per_row.repeat_interleave(lengths, dim=0).to(device).unbind(1)
    values = logits_RV[pairs]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits_RV[pairs] = values - counts * frequency - (counts > 0) * presence


def _apply_grammar(logits_RV: Tensor, grammar: GrammarMask) -> None:
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    words = grammar.words.to(device)
    assert words.shape[1] * _BITS_PER_WORD >= vocab_size, f"{words.shape[1]} mask words for {vocab_size} tokens"
    bits = torch.arange(_BITS_PER_WORD, dtype=torch.int32, device=device)
    banned = ((words.unsqueeze(-1) >> bits) & 1).eq(0).flatten(1)[:, :vocab_size]
    rows = torch.tensor(list(grammar.rows), device=device)
    logits_RV[rows] = logits_RV[rows].masked_fill(banned, -torch.inf)


def _ban_stop_ids(logits_RV: Tensor, states: Sequence[SamplingState], output_indices: Sequence[int]) -> None:
    banned = {row: state.stop_ids for row, state in enumerate(states) if state.bans_stop_ids(output_indices[row])}
    _ban(logits_RV, banned)


def _keep_allowed(logits_RV: Tensor, states: Sequence[SamplingState]) -> None:
    for row, state in enumerate(states):
        if len(state.allowed_ids):
            allowed_ids = state.allowed_ids.to(logits_RV.device)
            kept = logits_RV[row, allowed_ids]
            logits_RV[row] = -torch.inf
            logits_RV[row, allowed_ids] = kept


def _ban(logits_RV: Tensor, ids_of_rows: Mapping[int, Sequence[int]]) -> None:
    """Where nothing else is allowed (a grammar that is complete), the ban is lifted: a token must come."""
    rows = [row for row, ids in ids_of_rows.items() if ids]
    if not rows:
        return
    pairs = _row_of_each(rows, [torch.tensor(ids_of_rows[row]) for row in rows], logits_RV.device)
    before = logits_RV[pairs]
    logits_RV[pairs] = -torch.inf
    nothing_left = logits_RV[rows].amax(dim=1) == -torch.inf
    lengths = torch.tensor([len(ids_of_rows[row]) for row in rows], device=logits_RV.device)
    logits_RV[pairs] = torch.where(nothing_left.repeat_interleave(lengths), before, -torch.inf)


def _row_of_each(rows: list[int], ids: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index pairs (row, token) for the token lists of several rows; no pair occurs twice."""
    lengths = torch.tensor([len(tokens) for tokens in ids])
    return torch.tensor(rows).repeat_interleave(lengths).to(device), torch.cat(ids).to(device)


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
    if device.type == "cpu":
        for row in rows:
            _filter_row(probs_RV[row].numpy(), top_ks[row], top_ps[row], min_ps[row])
        return probs_RV
    select = slice(None) if len(rows) == len(top_ks) else torch.tensor(rows, device=device)
    picked_RV = probs_RV[select]
    min_p_R = torch.tensor([min_ps[row] for row in rows], device=device)
    threshold_R = picked_RV.amax(dim=1) * min_p_R
    if any(0 < top_ks[row] < vocab_size or top_ps[row] < 1.0 for row in rows):
        last_ranks = [min(top_ks[row], vocab_size) if top_ks[row] > 0 else vocab_size for row in rows]
        last_rank_R = torch.tensor(last_ranks, device=device) - 1
        top_p_R = torch.tensor([top_ps[row] for row in rows], dtype=torch.float64, device=device)
        sorted_RV = picked_RV.sort(dim=1, descending=True).values
        threshold_R = _raise_thresholds(threshold_R, sorted_RV, last_rank_R, top_p_R)
    probs_RV[select] = picked_RV * (picked_RV >= threshold_R.unsqueeze(1))
    return probs_RV


def _filter_row(probs_V: Floats, top_k: int, top_p: float, min_p: float) -> None:
    """The same in place, for a row in host memory."""
    threshold = probs_V.max() * np.float32(min_p)
    if 0 < top_k < len(probs_V):
        last = len(probs_V) - top_k
        threshold = np.maximum(threshold, np.partition(probs_V, last)[last])
    if top_p < 1.0:
        threshold = np.maximum(threshold, _nucleus_end(probs_V, threshold, top_p))
    probs_V *= probs_V >= threshold


def _nucleus_end(probs_V: Floats, threshold: np.float32, top_p: float) -> np.float32:
    """The last of the largest probabilities that make up `top_p` of those from `threshold` on.

    All probabilities below `cut` are less than half of what top-p leaves out, so they are behind that end and need not
    be sorted, only summed. Their sum may differ in its last bits from that of the sorted ones: where these could
    decide, all are sorted."""
    cut = np.float32(0.5 * (1.0 - top_p) / len(probs_V))
    for lowest in (cut, threshold) if threshold == 0.0 else (threshold,):
        chosen = np.flatnonzero(probs_V >= lowest)
        if not len(chosen):
            break  # nothing is allowed
        are_few = 2 * len(chosen) < len(probs_V)
        ordered = np.sort(probs_V[chosen] if are_few else probs_V)[::-1][: len(chosen)]
        mass = np.cumsum(ordered.astype(np.float64))
        total, margin = (mass[-1], 0.0) if lowest == threshold else (probs_V.sum(dtype=np.float64), _MARGIN)
        wanted = top_p * total
        first, last = np.searchsorted(mass, (wanted * (1.0 - margin), wanted * (1.0 + margin)))
        if first == last < len(ordered):
            return np.float32(ordered[first])
    return threshold


def _raise_thresholds(threshold_R: Tensor, sorted_RV: Tensor, last_rank_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Top-k, then top-p of what is left. `last_rank_R`: index of the k-th value, the last index where top-k is off."""
    kth_R = sorted_RV.gather(1, last_rank_R.unsqueeze(1)).squeeze(1)
    threshold_R = torch.maximum(threshold_R, kth_R)
    mass_RV = (sorted_RV * (sorted_RV >= threshold_R.unsqueeze(1))).cumsum(1, dtype=torch.float64)
    num_short_R = (mass_RV < top_p_R.unsqueeze(1) * mass_RV[:, -1:]).sum(1)
    nucleus_R = sorted_RV.gather(1, num_short_R.clamp(max=sorted_RV.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(top_p_R < 1.0, torch.maximum(threshold_R, nucleus_R), threshold_R)


class RowDraw(NamedTuple):
    """How one row is drawn, where nothing edits its logits."""

    params: SamplingParams
    uniform: float

    def last_rank(self, vocab_size: int) -> int:
        """The place of the last value that top-k keeps, counted from 0."""
        return (min(self.params.top_k, vocab_size) if self.params.top_k > 0 else vocab_size) - 1


class Draws(NamedTuple):
    """The same of R rows, as tensors of the logits' device: float64, but for ranks and `greedy_R`, which are int32."""

    temperatures_R: Tensor
    last_ranks_R: Tensor
    top_ps_R: Tensor
    min_ps_R: Tensor
    uniforms_R: Tensor
    greedy_R: Tensor


def draw_on_device(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Token ids int64 [R]: the argmax of greedy rows, of the others what `filtered_probabilities` and `draw_tokens`
    make of them, value by value. Asks the host nothing, so every row pays for the filters."""
    best_R = logits_RV.argmax(dim=-1)
    probs_RV = torch.softmax(logits_RV / draws.temperatures_R.float().unsqueeze(1), dim=-1)
    threshold_R = probs_RV.amax(dim=1) * draws.min_ps_R.float()
    sorted_RV = probs_RV.sort(dim=1, descending=True).values
    threshold_R = _raise_thresholds(threshold_R, sorted_RV, draws.last_ranks_R.long(), draws.top_ps_R)
    drawn_R = draw_tokens(probs_RV * (probs_RV >= threshold_R.unsqueeze(1)), draws.uniforms_R)
    return torch.where((draws.greedy_R != 0) | (drawn_R < 0), best_R, drawn_R)


def draw_tokens(probs_RV: Tensor, uniforms: Sequence[float] | Tensor) -> Tensor:
    """Token ids int64 [R]: where the running sum of each row first exceeds uniform x total. -1 for rows without mass.

    Two levels, sums of segments and then one segment, so that nothing of length V is scanned one by one. A token of
    probability zero is never drawn: within the segment we stop at the latest where its sum is complete."""
    num_rows, vocab_size = probs_RV.shape
    padded_RV = torch.nn.functional.pad(probs_RV, (0, -vocab_size % _SEGMENT))
    segments_RCS = padded_RV.view(num_rows, -1, _SEGMENT)
    ends_RC = segments_RCS.sum(-1).double().cumsum(1)
    total_R = ends_RC[:, -1:]
    if not isinstance(uniforms, Tensor):
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=probs_RV.device)
    target_R = uniforms.unsqueeze(1) * total_R
    segment_R = ((ends_RC <= target_R) & (ends_RC < total_R)).sum(1, keepdim=True)
    before_R = torch.where(segment_R > 0, ends_RC.gather(1, (segment_R - 1).clamp(min=0)), 0.0)
    rows = torch.arange(num_rows, device=probs_RV.device)
    sums_RS = segments_RCS[rows, segment_R.squeeze(1).clamp(max=segments_RCS.shape[1] - 1)].double().cumsum(1)
    offset_R = ((sums_RS <= target_R - before_R) & (sums_RS < sums_RS[:, -1:])).sum(1)
    tokens_R = segment_R.squeeze(1) * _SEGMENT + offset_R
    return torch.where(total_R.squeeze(1) > 0, tokens_R, -1)
