"""Which rows get logits, and that each report comes from its row: whole prompts, chunks, and pieces of chunks."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker.messages import Sampled
from antiphon.serve.worker.row_sampler import RowSampler, logit_rows, needs_logits, rows_with_logits
from antiphon.specs.sampling import SamplingParams, TokenLogprob

VOCAB_SIZE = 33
GREEDY = SamplingParams(temperature=0.0)


def step(
    request_id: str, num_rows: int, start: int = 0, samples: bool = False, logprobs: tuple[int, int] = (0, 0)
) -> SequenceStep:
    tokens = tuple((start + row) % VOCAB_SIZE for row in range(num_rows))
    return SequenceStep(request_id, 0, tokens, start, 0, (), samples, *logprobs)


def sampler(*starts: tuple[str, int, SamplingParams]) -> RowSampler:
    made = RowSampler(ReferenceBackend())
    for request_id, num_prompt, params in starts:
        prompt = tuple(position % VOCAB_SIZE for position in range(num_prompt))
        made.add(SequenceStart(request_id, 0, prompt, num_prompt, params, 5, ()))
    return made


def logits_of(steps: list[SequenceStep]) -> Tensor:
    """Logits of the rows asked for, of a model that at position p prefers token 2p."""
    rows = rows_with_logits(steps)
    positions = [sequence.start + row for sequence in steps for row in range(len(sequence.token_ids))]
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    for index, row in enumerate(rows):
        logits[index, 2 * positions[row] % VOCAB_SIZE] = 5.0
    return logits


def prompt_reports(result: Sampled) -> list[TokenLogprob]:
    return [report for piece in result.prompt_logprobs or [] for report in piece]


def by_id(results: list[Sampled]) -> dict[str, Sampled]:
    assert len({result.request_id for result in results}) == len(results), "one answer for each request"
    return {result.request_id: result for result in results}


def test_rows_that_need_logits() -> None:
    steps = [
        step("decode", 1, 9, samples=True),
        step("chunk", 5),
        step("end of prompt", 4, samples=True),
        step("reports", 5, logprobs=(1, 4)),
        step("reports and samples", 5, samples=True, logprobs=(0, 4)),
        step("one row does both", 3, samples=True, logprobs=(1, 3)),
    ]
    assert [needs_logits(s) for s in steps] == [True, False, True, True, True, True]
    assert [logit_rows(s) for s in steps] == [[0], [], [3], [1, 2, 3], [0, 1, 2, 3, 4], [1, 2]]
    assert rows_with_logits(steps) == [0, 9, 11, 12, 13, 15, 16, 17, 18, 19, 21, 22]
    assert rows_with_logits([]) == []


def test_each_request_gets_the_token_of_its_row() -> None:
    made = sampler(("a", 10, GREEDY), ("b", 4, GREEDY), ("c", 20, GREEDY))
    steps = [step("a", 1, 9, samples=True), step("b", 4, samples=True), step("c", 3, 17, samples=True)]
    found = by_id(made.sample(logits_of(steps), steps, {}))
    assert {key: result.token_id for key, result in found.items()} == {"a": 18, "b": 6, "c": 38 % VOCAB_SIZE}
    assert all(result.logprob is None and result.prompt_logprobs is None for result in found.values())


def test_prompt_reports_name_the_token_that_follows_each_row() -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=2)
    made = sampler(("p", 12, params), ("other", 30, GREEDY))
    steps = [step("other", 1, 29, samples=True), step("p", 12, samples=True, logprobs=(0, 11))]
    found = by_id(made.sample(logits_of(steps), steps, {}))
    reports = prompt_reports(found["p"])
    assert [report.token_id for report in reports] == list(range(1, 12))
    assert [report.top[0][0] for report in reports] == [2 * row for row in range(11)]
    assert found["p"].token_id == 22
    assert found["p"].logprob is not None
    assert [len(report.top) for report in found["p"].logprob] == [2]


def test_chunks_and_pieces_report_every_row_once() -> None:
    """A chunk of a prompt, cut into two micro-batches of the same step, with another request between the pieces."""
    made = sampler(("p", 21, SamplingParams(temperature=0.0, prompt_logprobs=0)), ("x", 5, GREEDY))
    first = [
        step("p", 6, 0, logprobs=(0, 6)),
        step("x", 1, 4, samples=True),
        step("p", 4, 6, logprobs=(0, 4)),
    ]
    found = by_id(made.sample(logits_of(first), [s for s in first if needs_logits(s)], {}))
    assert [report.token_id for report in prompt_reports(found["p"])] == list(range(1, 11))
    assert found["p"].token_id is None
    second = [step("p", 5, 10, logprobs=(0, 5)), step("p", 6, 15, samples=True, logprobs=(0, 5))]
    found = by_id(made.sample(logits_of(second), second, {}))
    assert [report.token_id for report in prompt_reports(found["p"])] == list(range(11, 21))
    assert found["p"].token_id == 40 % VOCAB_SIZE


def test_grammar_masks_reach_their_own_rows() -> None:
    made = sampler(("free", 5, GREEDY), ("bound", 5, GREEDY), ("also free", 5, GREEDY))
    steps = [step(name, 1, 4, samples=True) for name in ("free", "bound", "also free")]
    bits = np.zeros(64, dtype=np.uint8)
    bits[[3, 32]] = 1
    masks = {"bound": np.packbits(bits, bitorder="little").tobytes(), "not here": b"\0" * 8}
    found = by_id(made.sample(logits_of(steps), steps, masks))
    assert [found[name].token_id for name in ("free", "bound", "also free")] == [8, 3, 8]


def test_a_step_that_is_run_again_counts_no_token_twice() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    made, again = sampler(("a", 5, params)), sampler(("a", 5, params))
    for position in range(5, 9):
        sequence = SequenceStep("a", 0, (8,), position, 0, (), True, 0, 0)
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, 8], logits[0, 9] = 7.0, 1.0
        once = made.sample(logits, [sequence], {})
        for _ in range(3):
            repeated = again.sample(logits, [sequence], {})
        assert repeated == once
    assert once[0].token_id == 9, "four times counted, the token has lost"


def test_a_request_that_is_removed_is_forgotten() -> None:
    made = sampler(("a", 5, SamplingParams(prompt_logprobs=0)))
    made.remove("a")
    made.remove("a")
    assert not made._states
    assert not made._prompts


@pytest.mark.parametrize("kernels", [ReferenceBackend, partial(CpuBackend, torch.float32)], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    "others",
    [
        [],
        [SamplingParams(temperature=0.7, top_p=0.9)],
        [SamplingParams(temperature=0.0, min_tokens=9)],
        [SamplingParams(temperature=0.0, logprobs=2)],
        [SamplingParams(temperature=0.0, presence_penalty=0.5)],
    ],
    ids=["plain", "filtered", "banned", "reported", "edited"],
)
def test_a_plain_rows_token_is_the_same_beside_others(
    kernels: Callable[[], KernelBackend], others: list[SamplingParams]
) -> None:
    """Whether or not all rows of the step are chosen in one operation."""
    plain = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.1), SamplingParams(temperature=0.4)]
    made = RowSampler(kernels())
    steps = []
    for row, params in enumerate([*plain, *others]):
        made.add(SequenceStart(str(row), row, (5, 6), 2, params, row, (3,)))
        steps.append(SequenceStep(str(row), row, (6,), 1, 0, (), True, 0, 0))
    torch.manual_seed(1)
    logits = 2.0 * torch.randn(len(steps), VOCAB_SIZE)
    together = by_id(made.sample(logits, steps, {}))
    for row in range(len(plain)):
        alone = made.sample(logits[row : row + 1], steps[row : row + 1], {})
        assert alone == [together[str(row)]]
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    mask[1] = 1
    masked = by_id(made.sample(logits, steps, {"1": mask.tobytes()}))
    assert masked["1"].token_id == 32, "the only one that its grammar allows"
    assert {name: each for name, each in masked.items() if name != "1"} == {
        name: each for name, each in together.items() if name != "1"
    }
