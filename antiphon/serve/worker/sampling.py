"""What a request's parameters do to its logits, and the draw: edits, weights, filters, one uniform.

`SamplingState` is what is remembered of one request: parameters, seed, token counts if penalties need them. Counts are
kept as a list of distinct tokens with a count each, not as a row of the vocabulary: 152k counters for each of 256
requests would be 156 MB touched at random, the tokens of a conversation are a few thousand. They live in host memory,
where the tokens come from. A token is counted when its position first appears as *input* of a step (or at the start),
never when it is sampled. So a step that is sent again after a failure counts nothing twice.

The tokens of a row have *weights*, whole numbers in proportion to their probabilities: 2^q exp(x / t - max), rounded,
with a q that keeps the sum of all below 2^53. So a sum of weights is exact in float64, in any order. Every filter is a
*threshold on the weight*. They are found in the order min-p, top-k, top-p, each on what the earlier ones left (vLLM's
order); tokens tied with the last one kept are kept too. The draw puts one uniform through the inverse CDF, in order of
token id. The exponential is written out, each product and sum rounded by itself. So a row of logits gives the same
token whatever batch, layout, restart or instruction set it is computed in; and `choose_tokens`, which PyTorch computes
on any device, the same as the native kernel (`csrc/kernels/draw.h`). What a token of 152k loses by rounding is at most
2^-36 of the likeliest one.

Randomness is counter-based: one 53-bit uniform per (seed, output index), by SplitMix64 (Steele, Lea, Flood 2014).
Rejected: `torch.multinomial` with generators (the token would depend on batch mates and on every draw before), Gumbel
noise per vocabulary entry (152k hashes a token), and probabilities (each library's exponential has other last bits, and
each order of sums, so tokens at the edge of top-p differ).

R rows   V vocabulary   C segments of the vocabulary   S tokens of a segment
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.cpu import ROW_CHOICE
from antiphon.specs.sampling import SamplingParams

_BITS_PER_WORD = 32
_SEGMENT = 512
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MASS_BITS = 53  # whole numbers that float64 holds
_SERIES = [float(np.float32(1) / np.float32(divisor)) for divisor in (720, 120, 24, 6, 2, 1, 1)]  # of the exponential


class TokenCounts:
    """Distinct tokens of one request in order of first appearance, with how often each was *generated*."""

    def __init__(self) -> None:
        self._index_of: dict[int, int] = {}
        self.ids = array("q")
        self.counts = array("f")  # 0 for tokens that are only in the prompt

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._place_of(token_id)

    def add_output(self, token_id: int) -> None:
        self.counts[self._place_of(token_id)] += 1

    def _place_of(self, token_id: int) -> int:
        place = self._index_of.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0.0)
        return place


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
        self.has_edits = bool(params.logit_bias or params.allowed_token_ids or params.bad_words)  # and no penalties
        self.only_drawn = not self.has_edits and params.logprobs is None  # with penalties, if there are any
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

    @property
    def counted(self) -> TokenCounts | None:
        """The tokens that have penalties now."""
        return self.token_counts if self.penalised and self.token_counts.ids else None

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
    _apply_penalties(logits_RV, [(state.params, state.token_counts) for state in states])
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


def _apply_penalties(logits_RV: Tensor, rows_R: Sequence[tuple[SamplingParams, TokenCounts]]) -> None:
    rows = [row for row, (_, counted) in enumerate(rows_R) if len(counted.ids)]
    if not rows:
        return
    device = logits_RV.device
    ids = [torch.tensor(rows_R[row][1].ids) for row in rows]
    pairs = _row_of_each(rows, ids, device)
    counts = torch.cat([torch.tensor(rows_R[row][1].counts) for row in rows]).to(device)
    params = [rows_R[row][0] for row in rows]
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


class RowDraw(NamedTuple):
    """How the token of one row is chosen. `counted`: the tokens that have penalties, if the logits are without them."""

    params: SamplingParams
    uniform: float
    counted: TokenCounts | None = None

    @property
    def takes_largest(self) -> bool:
        """The token is that of the largest logit."""
        return self.params.greedy and self.counted is None

    def last_rank(self, vocab_size: int) -> int:
        """The place of the last value that top-k keeps, counted from 0."""
        return (min(self.params.top_k, vocab_size) if self.params.top_k > 0 else vocab_size) - 1

    def is_filtered(self, vocab_size: int) -> bool:
        """Whether some tokens are left out for being improbable."""
        params = self.params
        return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab_size

    def packed(self) -> bytes:
        """A `ROW_CHOICE`, good until the next token is counted."""
        params, counted = self.params, self.counted
        ids, num_ids = (0, 0) if counted is None else counted.ids.buffer_info()
        counts, _ = (0, 0) if counted is None else counted.counts.buffer_info()
        return ROW_CHOICE.pack(
            *(self.uniform, params.top_p, ids, counts, num_ids, params.top_k),
            *(0.0 if params.greedy else params.temperature, params.min_p),
            *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
        )


class Draws(NamedTuple):
    """The same of R rows, as tensors of the logits' device: float64, but for ranks and `greedy_R`, which are int32."""

    temperatures_R: Tensor
    last_ranks_R: Tensor
    top_ps_R: Tensor
    min_ps_R: Tensor
    uniforms_R: Tensor
    greedy_R: Tensor

    @staticmethod
    def of(rows: Sequence[RowDraw], vocab_size: int, device: torch.device) -> "Draws":
        params = [row.params for row in rows]
        numbers = [(1.0 if p.greedy else p.temperature, p.top_p, p.min_p) for p in params]
        temperatures_R, top_ps_R, min_ps_R = torch.tensor(numbers, dtype=torch.float64).T.to(device)
        uniforms_R = torch.tensor([row.uniform for row in rows], dtype=torch.float64).to(device)
        integers = [(row.last_rank(vocab_size), row.params.greedy) for row in rows]
        last_ranks_R, greedy_R = torch.tensor(integers, dtype=torch.int32).T.to(device)
        return Draws(temperatures_R, last_ranks_R, top_ps_R, min_ps_R, uniforms_R, greedy_R)


def choose_tokens(logits_RV: Tensor, rows: Sequence[RowDraw]) -> list[int]:
    """The token of each row of float32 logits. The reference of `CpuBackend.choose_rows`, which says the same for all
    rows without NaN, and what other back-ends do."""
    if any(row.counted is not None for row in rows):
        logits_RV = logits_RV.clone()
        _apply_penalties(logits_RV, [(row.params, row.counted or TokenCounts()) for row in rows])
    vocab_size = logits_RV.shape[1]
    filters = any(row.is_filtered(vocab_size) for row in rows)
    token_ids: list[int] = draw_on_device(
        logits_RV, Draws.of(rows, vocab_size, logits_RV.device), filters=filters
    ).tolist()
    return token_ids


def draw_on_device(logits_RV: Tensor, draws: Draws, *, filters: bool = True) -> Tensor:
    """Token ids int64 [R]: the argmax of greedy rows, and of those of which nothing is allowed. Asks the host nothing,
    so every row pays for `filters`, if one has any."""
    best_R = logits_RV.argmax(dim=-1)
    weights_RV = token_weights(logits_RV, draws.temperatures_R)
    if filters:
        weights_RV = filter_weights(weights_RV, draws)
    drawn_R = draw_tokens(weights_RV, draws.uniforms_R)
    return torch.where((draws.greedy_R != 0) | (drawn_R < 0), best_R, drawn_R)


def token_weights(logits_RV: Tensor, temperatures_R: Tensor) -> Tensor:
    """Whole numbers [R, V], float32, in proportion to softmax(logits / temperature); NaN in rows that have one. The
    exponential: x = n ln 2 + r with |r| <= ln(2) / 2, and e^r by its Taylor series to degree 6."""
    x_RV = logits_RV / temperatures_R.float().unsqueeze(1)
    x_RV = (x_RV - x_RV.amax(dim=1, keepdim=True)).clamp(min=-88.0)
    n_RV = torch.round(x_RV * 1.44269504088896341)
    r_RV = x_RV - n_RV * 0.693145751953125
    r_RV = r_RV - n_RV * 1.42860682030941723e-6
    e_RV = torch.full_like(r_RV, _SERIES[0])
    for factor in _SERIES[1:]:
        e_RV = e_RV * r_RV + factor
    power_RV = ((n_RV.int() + 127) << 23).view(torch.float32)
    scale = 2.0 ** (_MASS_BITS - (logits_RV.shape[1] - 1).bit_length())
    return torch.round(e_RV * power_RV * scale)


def filter_weights(weights_RV: Tensor, draws: Draws) -> Tensor:
    """The same with zeros for tokens that a filter leaves out."""
    threshold_R = weights_RV.amax(dim=1) * draws.min_ps_R.float()
    sorted_RV = weights_RV.sort(dim=1, descending=True).values
    kth_R = sorted_RV.gather(1, draws.last_ranks_R.long().unsqueeze(1)).squeeze(1)
    threshold_R = torch.maximum(threshold_R, kth_R)
    mass_RV = (sorted_RV * (sorted_RV >= threshold_R.unsqueeze(1))).cumsum(1, dtype=torch.float64)
    num_short_R = (mass_RV < draws.top_ps_R.unsqueeze(1) * mass_RV[:, -1:]).sum(1)
    nucleus_R = sorted_RV.gather(1, num_short_R.clamp(max=sorted_RV.shape[1] - 1).unsqueeze(1)).squeeze(1)
    threshold_R = torch.where(draws.top_ps_R < 1.0, torch.maximum(threshold_R, nucleus_R), threshold_R)
    return weights_RV * (weights_RV >= threshold_R.unsqueeze(1))


def draw_tokens(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Token ids int64 [R]: where the running sum of each row first exceeds uniform x total. -1 for rows without mass.

    Two levels, sums of segments and then one segment, so that nothing of length V is scanned one by one. A token that
    weighs nothing is never drawn: within the segment we stop at the latest where its sum is complete."""
    num_rows, vocab_size = weights_RV.shape
    padded_RV = torch.nn.functional.pad(weights_RV, (0, -vocab_size % _SEGMENT))
    segments_RCS = padded_RV.view(num_rows, -1, _SEGMENT)
    ends_RC = segments_RCS.sum(-1, dtype=torch.float64).cumsum(1)
    total_R = ends_RC[:, -1:]
    target_R = uniforms_R.unsqueeze(1) * total_R
    segment_R = ((ends_RC <= target_R) & (ends_RC < total_R)).sum(1, keepdim=True)
    before_R = torch.where(segment_R > 0, ends_RC.gather(1, (segment_R - 1).clamp(min=0)), 0.0)
    rows = torch.arange(num_rows, device=weights_RV.device)
    sums_RS = segments_RCS[rows, segment_R.squeeze(1).clamp(max=segments_RCS.shape[1] - 1)].double().cumsum(1)
    offset_R = ((sums_RS <= target_R - before_R) & (sums_RS < sums_RS[:, -1:])).sum(1)
    tokens_R = segment_R.squeeze(1) * _SEGMENT + offset_R
    return torch.where(total_R.squeeze(1) > 0, tokens_R, -1)
