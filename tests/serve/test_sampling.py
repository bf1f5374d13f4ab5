"""Sampling against a naive definition, row by row in plain Python, and the edges: ties, minus infinity, tiny values."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels.cpu import CpuBackend
from antiphon.serve.worker.row_sampler import RowOperations, prompt_logprobs, sample_tokens, token_logprobs
from antiphon.serve.worker.sampling import (
    Draws,
    GrammarMask,
    RowDraw,
    SamplingState,
    counter_uniform,
    draw_tokens,
    edit_logits,
    filter_weights,
    token_weights,
)
from antiphon.specs.sampling import SamplingParams

EOS = 2
VOCAB = 77  # not a multiple of 32


def state(tokens: list[int] | None = None, num_prompt: int = 1, seed: int = 0, **params: Any) -> SamplingState:
    params.setdefault("max_tokens", 100)
    return SamplingState(
        SamplingParams(**params), seed=seed, stop_ids=(EOS,), token_ids=tokens or [5], num_prompt=num_prompt
    )


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def packed(allowed: list[set[int]], vocab_size: int = VOCAB) -> Tensor:
    """Bitmask rows as grammar libraries write them: int32 words, lowest bit first."""
    words = [[0] * -(-vocab_size // 32) for _ in allowed]
    for row, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= 1 << (token % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of one row, zero for tokens that are left out."""
    draws = Draws.of([RowDraw(params, 0.0)], len(logits), logits.device)
    weights = filter_weights(token_weights(logits.unsqueeze(0), draws.temperatures_R), draws)[0]
    return weights / weights.sum()


def uniforms_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- the naive definition -------------------------------------------------------------------------------------------


def naive_edits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], allowed: set[int] | None
) -> list[float]:
    result = list(logits)
    for token, bias in params.logit_bias.items():
        result[token] += bias
    for token in range(len(result)):
        if token in prompt or token in output:
            result[token] *= params.repetition_penalty if result[token] <= 0 else 1 / params.repetition_penalty
        count = output.count(token)
        result[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        if allowed is not None and token not in allowed:
            result[token] = -math.inf
    if len(output) < params.min_tokens and any(value > -math.inf for i, value in enumerate(result) if i != EOS):
        result[EOS] = -math.inf
    return result


def naive_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """min-p, then top-k, then top-p, each on what is left; ties with the last one kept are kept."""
    largest = max(logits)
    weights = [math.exp((value - largest) / params.temperature) for value in logits]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    ordered = sorted(weights, reverse=True)
    if params.top_k > 0:
        limit = ordered[min(params.top_k, len(ordered)) - 1]
        weights = [weight if weight >= limit else 0.0 for weight in weights]
    if params.top_p < 1.0:
        total, running, limit = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            running, limit = running + weight, weight
            if running >= params.top_p * total:
                break
        weights = [weight if weight >= limit else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 76, 77, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([{}, {3: 5.0, 70: -100.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
ALLOWED = st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS, ALLOWED), min_size=1, max_size=6), st.integers(0, 1000))
def test_a_batch_does_what_the_definition_says_row_by_row(rows: list[Any], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)
    states = [
        state([5, *prompt, *output], 1 + len(prompt), seed + row, **params)
        for row, (params, prompt, output, _) in enumerate(rows)
    ]
    output_indices = [len(output) for _, _, output, _ in rows]
    masked = [row for row, entry in enumerate(rows) if entry[3] is not None]
    grammar = GrammarMask(masked, packed([rows[row][3] for row in masked])) if masked else None

    edited = logits.clone()
    edit_logits(edited, states, output_indices, grammar)
    original = logits.clone()
    sampled = sample_tokens(logits, states, output_indices, grammar=grammar)
    assert torch.equal(logits, original), "the logits were changed"
    for row, (_, prompt, output, allowed) in enumerate(rows):
        params = states[row].params
        expected = naive_edits(logits[row].tolist(), params, [5, *prompt], output, allowed)
        assert edited[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        token, told = sampled[row]
        if params.greedy:
            assert edited[row, token] == edited[row].max()
        else:
            naive = naive_probabilities(edited[row].tolist(), params)
            assert filtered(edited[row], params).tolist() == pytest.approx(naive, rel=1e-3, abs=1e-6)
            target = counter_uniform(states[row].seed, output_indices[row])
            assert sum(naive[:token]) - 1e-5 <= target <= sum(naive[: token + 1]) + 1e-5
            assert naive[token] > 0
        assert (told is None) == (params.logprobs is None)
        if told is not None and params.logprobs is not None:
            (report,) = told
            raw = torch.log_softmax(logits[row].double(), 0)
            assert report.token_id == token
            assert report.logprob == pytest.approx(float(raw[token]), abs=1e-4)
            assert report.rank == 1 + int((raw > raw[token]).sum())
            best = sorted(range(VOCAB), key=lambda candidate: -float(raw[candidate]))[: params.logprobs]
            assert [candidate for candidate, _ in report.top] == best


# ---- the same token wherever it is computed -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=2, max_size=8), st.integers(0, 100))
def test_a_row_does_not_depend_on_its_batch(rows: list[dict[str, Any]], seed: int) -> None:
    logits = random_logits(len(rows), 1500, seed)
    states = [state([5, 7, 9], 2, row, **params) for row, params in enumerate(rows)]
    together = sample_tokens(logits, states, [1] * len(rows))
    for row in range(len(rows)):
        assert sample_tokens(logits[row : row + 1], [states[row]], [1]) == together[row : row + 1]


def test_penalty_counts_survive_preemption_and_repeated_steps() -> None:
    params = {"frequency_penalty": 1.0, "repetition_penalty": 1.2}
    tokens = [5, 6, 7, 8, 8, 9, 8]
    whole = state(tokens, 3, **params)
    grown = state(tokens[:3], 3, **params)
    for position in range(7):
        for _ in range(2):  # each step is sent twice
            grown.observe(position, tokens[position : position + 1])
    for counted in (whole, grown):
        counts = counted.token_counts
        pairs = zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)
        assert dict(pairs) == {5: 0, 6: 0, 7: 0, 8: 3, 9: 1}
    many = state([5, *range(1000)], 1, frequency_penalty=1.0)  # more than the first reservation
    assert many.token_counts.ids.tolist() == list(range(1000))
    assert many.token_counts.counts.tolist() == [1.0] * 1000


def test_uniforms_are_fixed_for_ever() -> None:
    """A change here changes what every seeded request says."""
    assert counter_uniform(0, 0) == 0.6524484863740322
    assert counter_uniform(-1, 5) == counter_uniform((1 << 64) - 1, 5)
    assert all(0.0 <= counter_uniform(seed, index) < 1.0 for seed in range(20) for index in range(20))


def test_seeds_and_positions_give_independent_uniforms() -> None:
    rows = [[counter_uniform(seed, index) for index in range(200)] for seed in range(200)]
    values = torch.tensor(rows, dtype=torch.float64)
    assert len(values.unique()) == values.numel()
    counts = torch.histc(values, bins=50, min=0, max=1)
    assert float(((counts - 800) ** 2 / 800).sum()) < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    correlation = torch.corrcoef(values)
    assert float((correlation - torch.eye(200, dtype=torch.float64)).abs().max()) < 0.35


def test_draws_follow_the_probabilities() -> None:
    logits = random_logits(1, 40, 3).repeat(4000, 1)
    states = [state(seed=seed, temperature=0.8, top_k=12) for seed in range(4000)]
    tokens = torch.tensor([token for token, _ in sample_tokens(logits, states, [0] * 4000)])
    expected = 4000 * torch.tensor(naive_probabilities(logits[0].tolist(), states[0].params))
    counts = torch.bincount(tokens, minlength=40)
    assert int(counts[expected == 0].sum()) == 0
    kept = expected > 5
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < 31.3  # at most 11 degrees of freedom, p = 0.001


def test_distinct_seeds_say_distinct_things_and_one_seed_says_one() -> None:
    logits = torch.zeros(8, 5000)
    seeds = [1, 2, 3, 4, 5, 6, 7, 7]
    tokens = [token for token, _ in sample_tokens(logits, [state(seed=seed) for seed in seeds], [0] * 8)]
    assert len(set(tokens)) == 7
    assert tokens[6] == tokens[7]


# ---- edges ----------------------------------------------------------------------------------------------------------


def kept(
    logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> set[int]:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return set(filtered(torch.tensor(logits), params).nonzero().flatten().tolist())


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_weights_are_probabilities(scale: float) -> None:
    """Whole numbers, with a sum that float64 holds, in the proportions of a softmax."""
    logits = random_logits(24, 1000, 3) * scale
    weights = token_weights(logits, torch.full((24,), 0.7, dtype=torch.float64))
    assert torch.equal(weights, weights.round())
    assert float(weights.double().sum(1).max()) <= 2.0**53
    expected = torch.softmax(logits.double() / 0.7, dim=1)
    found = weights.double() / weights.double().sum(1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=1e-12)


def test_ties_with_the_last_token_kept_are_kept() -> None:
    assert kept([3.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1, 2}
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.3) == {0, 1, 2, 3}
    assert kept([2.0, 0.0, 0.0], min_p=math.exp(-2.0) * 0.999) == {0, 1, 2}


def test_filters_at_their_ends() -> None:
    logits = [0.0, 3.0, 1.0, 2.0]
    assert kept(logits, top_k=1) == {1}
    assert kept(logits, top_k=4) == kept(logits, top_k=99) == kept(logits, top_k=-1) == {0, 1, 2, 3}
    assert kept(logits, top_p=1e-9) == {1}
    assert kept(logits, min_p=1.0) == {1}
    assert kept(logits, temperature=1e-4) == {1}
    assert kept(logits, top_k=3, top_p=0.9) == {1, 3}  # 0.67, 0.24, 0.09 of what top-k left


def test_masked_rows_draw_only_what_is_left() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 40] = -1e30
    logits[1, [3, 76]] = 1e30
    states = [state(seed=seed, top_p=0.9) for seed in range(3)]
    tokens = [token for token, _ in sample_tokens(logits, states, [0] * 3)]
    assert tokens[0] == 40
    assert tokens[1] in {3, 76}
    assert 0 <= tokens[2] < VOCAB, "nothing is allowed: any token, but a token"


@pytest.mark.parametrize("vocab_size", [1, 31, 511, 512, 513, 1025])
def test_the_draw_reaches_the_first_and_the_last_token(vocab_size: int) -> None:
    probs = torch.full((2, vocab_size), 1.0 / vocab_size)
    assert draw_tokens(probs, uniforms_of(0.0, 1.0 - 2.0**-53)).tolist() == [0, vocab_size - 1]
    probs[:, -1] = 0.0
    expected = [0, vocab_size - 2] if vocab_size > 1 else [-1, -1]
    assert draw_tokens(probs, uniforms_of(0.0, 1.0 - 2.0**-53)).tolist() == expected


def test_zero_probability_is_never_drawn() -> None:
    probs = torch.zeros(1, 2000)
    probs[0, 700:1400:7] = 1e-3
    for step in range(300):
        (token,) = draw_tokens(probs, uniforms_of(step / 300)).tolist()
        assert probs[0, token] > 0


def test_plain_greedy_is_one_argmax_and_nothing_else() -> None:
    calls: list[tuple[int, ...]] = []

    def counting_argmax(logits: Tensor) -> Tensor:
        calls.append(tuple(logits.shape))
        return logits.argmax(-1)

    logits = random_logits(4)
    states = [state(temperature=0.0) for _ in range(4)]
    sampled = sample_tokens(logits, states, [0] * 4, operations=RowOperations(counting_argmax))
    assert sampled == [(token, None) for token in logits.argmax(-1).tolist()]
    assert calls == [(4, VOCAB)]


def test_native_draws_stand_beside_filtered_edited_and_greedy_rows() -> None:
    """Each row as if it were alone, with the token that PyTorch finds; edits are made once, natively or before."""
    native = RowOperations.of(CpuBackend(torch.float32))
    states = [
        state(temperature=0.8, seed=1),
        state(temperature=0.8, top_k=5, seed=2),
        state(temperature=0.0),
        state(temperature=1.3, logit_bias={3: 5.0}, seed=4),
        state(temperature=0.8, top_p=0.7, seed=5),
        state([5, 7, 7, 9], temperature=0.9, frequency_penalty=1.0, repetition_penalty=1.2, seed=6),
        state([5, 7, 7, 9], temperature=0.0, presence_penalty=2.0, repetition_penalty=0.5),
    ]
    logits, indices = random_logits(7), [3, 1, 4, 1, 5, 3, 3]
    together = sample_tokens(logits, states, indices, operations=native)
    alone = [
        sample_tokens(logits[row : row + 1], [each], [index], operations=native)[0]
        for row, (each, index) in enumerate(zip(states, indices, strict=True))
    ]
    assert together == alone
    plain = sample_tokens(logits, states, indices)
    assert together == plain
    unbiased = [0, 1, 2, 4, 5, 6]  # now penalties are not made beforehand
    some = sample_tokens(logits[unbiased], [states[row] for row in unbiased], [indices[row] for row in unbiased])
    assert some == [plain[row] for row in unbiased]


def test_equal_logits_go_to_the_lowest_token() -> None:
    assert sample_tokens(torch.zeros(2, 300), [state(temperature=0.0)] * 2, [0, 0]) == [(0, None), (0, None)]


def test_no_rows() -> None:
    assert sample_tokens(torch.empty(0, VOCAB), [], []) == []


def test_a_complete_grammar_may_end_before_min_tokens() -> None:
    logits = random_logits(2)
    states = [state(temperature=0.0, min_tokens=5), state(temperature=0.0, min_tokens=5)]
    grammar = GrammarMask([0, 1], packed([{EOS}, {EOS, 9}]))
    assert sample_tokens(logits, states, [0, 0], grammar=grammar) == [(EOS, None), (9, None)]


def test_min_tokens_bans_the_end_exactly_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    limited = state(temperature=0.0, min_tokens=3)
    tokens = [sample_tokens(logits, [limited], [index])[0][0] for index in range(4)]
    assert [token == EOS for token in tokens] == [False, False, False, True]


def test_a_grammar_mask_may_be_padded_but_not_short() -> None:
    logits = random_logits(1)
    words = torch.cat([packed([{76}]), torch.zeros(1, 2, dtype=torch.int32)], dim=1)
    assert sample_tokens(logits, [state()], [0], grammar=GrammarMask([0], words)) == [(76, None)]
    with pytest.raises(AssertionError, match="2 mask words for 77 tokens"):
        sample_tokens(logits, [state()], [0], grammar=GrammarMask([0], words[:, :2]))


def test_prompt_logprobs_are_those_of_the_known_next_tokens() -> None:
    logits = random_logits(5)
    reports = prompt_logprobs(logits, [1, 2, 3, 4, 5], 2)
    raw = torch.log_softmax(logits, -1)
    for row, report in enumerate(reports):
        assert report.logprob == pytest.approx(float(raw[row, row + 1]), abs=1e-5)
        assert len(report.top) == 2
        assert report.top[0][0] == int(raw[row].argmax())


def test_tied_alternatives_come_in_order_of_token_id_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    ((report,),) = token_logprobs(logits, [2], [4])
    assert [token for token, _ in report.top] == [1, 2, 0, 3]
    assert report.rank == 1


def test_nothing_but_allowed_tokens_comes_and_bad_words_do_not() -> None:
    states = [
        state(allowed_token_ids=(7, 9)),
        state([5, 3], allowed_token_ids=(7, 9), bad_words=((7,), (3, 9))),  # nothing is left: the words give way
        state([5, 3, 4], bad_words=((3, 4, 8), (6, 10), (11,))),
        state([5, 4], bad_words=((3, 4, 8), (6, 10))),
    ]
    before = random_logits(4)
    after = before.clone()
    edit_logits(after, states, [0, 1, 2, 1], None)
    banned = [set((row == -math.inf).nonzero().flatten().tolist()) for row in after]
    assert banned == [set(range(VOCAB)) - {7, 9}, set(range(VOCAB)) - {7, 9}, {8, 11}, set()]
    assert torch.equal(after[0, [7, 9]], before[0, [7, 9]])


def test_a_bad_word_is_seen_when_its_tokens_came_one_at_a_time() -> None:
    seen = state(bad_words=((3, 4, 8),))
    for position, token_id in enumerate([3, 4], 1):
        assert seen.banned_ids() == set()
        seen.observe(position, [token_id])
        seen.observe(position, [token_id])  # the step is run again
    assert seen.banned_ids() == {8}


def test_log_probabilities_of_named_tokens_and_the_sampled_one_are_reported_in_their_order() -> None:
    logits = random_logits(2)
    states = [state(temperature=0.0, logprobs=2, logprob_token_ids=(50, 3)), state(temperature=0.0, logprobs=1)]
    sampled = sample_tokens(logits, states, [0, 0])
    (named,), (usual,) = (list(report or ()) for _, report in sampled)
    expected = torch.log_softmax(logits[0], dim=-1)
    own = int(logits[0].argmax())
    assert own not in (50, 3)
    assert [token_id for token_id, _ in named.top] == [50, 3, own]
    assert [value for _, value in named.top] == pytest.approx(expected[[50, 3, own]].tolist())
    assert (named.token_id, named.rank) == (int(logits[0].argmax()), 1)
    assert usual.top[0][0] == sampled[1][0]
