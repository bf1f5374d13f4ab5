"""What a request does to its logits before temperature, in place, for all rows of a batch at once.

In vLLM's order: logit bias; repetition penalty over prompt and output (logit divided by it if positive, multiplied
if not: Keskar et al. 2019, eq. 1.4); frequency and presence penalty over the output (OpenAI's API reference,
`mu[j] - c[j] * frequency - (c[j] > 0) * presence`); grammar; ban on ending before `min_tokens`.

Rows without an edit are not touched; each edit is one gather and one scatter over the concerned (row, token) pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.serve.worker.sampling_state import SamplingState

_BITS_PER_WORD = 32


@dataclass(frozen=True)
class GrammarMask:
    """Which tokens a grammar allows next. `words` int32 [len(rows), >= ceil(V / 32)], on any device: bit t % 32 of word
    t // 32 set means token t is allowed. `rows` index the logits; rows that are not named are free."""

    rows: Sequence[int]
    words: Tensor


def edit_logits(
    logits_RV: Tensor, states: Sequence[SamplingState], output_indices: Sequence[int], grammar: GrammarMask | None
) -> None:
    """Apply all edits to `logits_RV` in place. Row i belongs to `states[i]`, about to get token `output_indices[i]`."""
    _add_bias(logits_RV, states)
    _apply_penalties(logits_RV, states)
    if grammar is not None and len(grammar.rows):
        _apply_grammar(logits_RV, grammar)
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
    """Where nothing else is allowed (a grammar that is complete), the ban is lifted: the request must end."""
    rows = [row for row, state in enumerate(states) if state.bans_stop_ids(output_indices[row])]
    if not rows:
        return
    pairs = _row_of_each(rows, [torch.tensor(states[row].stop_ids) for row in rows], logits_RV.device)
    before = logits_RV[pairs]
    logits_RV[pairs] = -torch.inf
    nothing_left = logits_RV[rows].amax(dim=1) == -torch.inf
    lengths = torch.tensor([len(states[row].stop_ids) for row in rows], device=logits_RV.device)
    logits_RV[pairs] = torch.where(nothing_left.repeat_interleave(lengths), before, -torch.inf)


def _row_of_each(rows: list[int], ids: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index pairs (row, token) for the token lists of several rows; no pair occurs twice."""
    lengths = torch.tensor([len(tokens) for tokens in ids])
    return torch.tensor(rows).repeat_interleave(lengths).to(device), torch.cat(ids).to(device)
