"""Whole transcripts of every format, drawn from seeds: reasoning that looks like calls or never ends, text, several
calls with nested arguments, cut off anywhere. Each is read in every pair of pieces, and nothing of it is lost.
"""

import random
from dataclasses import dataclass

import pytest

from antiphon.serve.text.dialects import Dialect
from tests.serve.test_answer_reader import Read, dialect, parsed, read, read_everywhere, some_calls
from tests.serve.written_calls import REASONERS, UNMARKED, WRITERS, Call, with_text

_QUICK, _ALL = 8, 200
_THOUGHTS = ("hm", "<b>? {", "use <tool_call> or [TOOL_CALLS]?", "日本\n\nso", "<think> once more", '{"name": "add"')
_TEXTS = ("", "So.\n", "Let me look: <b>", "日本 ", "a < b and {c}\n\n", "<tool", "「x」[1, 2]")


@dataclass(frozen=True)
class Transcript:
    """What a model wrote, and what it means; `cut`: it was cut off, so the meaning is an upper bound."""

    form: Dialect
    answer: str
    thought: str
    text: str
    calls: list[Call]
    cut: bool


def drawn(form: str, seed: int) -> Transcript:
    chance = random.Random(f"{form} {seed}")
    calls = some_calls(chance) if chance.random() < 0.85 else []
    text = "" if form in UNMARKED and calls else chance.choice(_TEXTS)
    answer = with_text(form, text, WRITERS[form](calls) if calls else "")
    reasoner = "harmony" if form == "harmony" else chance.choice(sorted(REASONERS.keys() - {"harmony"}))
    thought = ""
    thinks = chance.random() < 0.6
    ends = chance.random() < 0.85
    if thinks:
        begin, end = REASONERS[reasoner]
        thought = chance.choice(_THOUGHTS)
        answer = begin + thought + (end + answer if ends else "")
    if thinks and not ends:
        text, calls = "", []
    cut = chance.random() < 0.3
    if cut:
        answer = answer[: chance.randint(0, len(answer))]
    return Transcript(dialect(form, reasoner), answer, thought, text, calls, cut)


def check(form: str, seed: int) -> None:
    case = drawn(form, seed)
    found: Read = read_everywhere(case.form, case.answer)
    reasoning, text, calls = found
    rng = random.Random(seed)
    for _ in range(4):  # several pieces
        cuts = sorted(rng.sample(range(len(case.answer) + 1), min(4, len(case.answer))))
        pieces = [case.answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.answer)], strict=True)]
        assert read(case.form, pieces) == found
    if not case.cut:
        assert (reasoning.strip(), text, parsed(calls)) == (case.thought, case.text, case.calls), case.answer
        return
    assert [name for name, _ in calls] == [name for name, _ in case.calls][: len(calls)]
    assert parsed(calls[:-1]) == case.calls[: max(0, len(calls) - 1)]
    shown = "".join((reasoning + text).split())
    rest = iter("".join(case.answer.split()))
    assert all(character in rest for character in shown), "what comes out stands in the answer, in its order"


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_transcripts_read_the_same_at_every_split(form: str) -> None:
    for seed in range(_QUICK):
        check(form, seed)


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted(WRITERS))
def test_two_hundred_transcripts_read_the_same_at_every_split(form: str) -> None:
    for seed in range(_QUICK, _ALL):
        check(form, seed)
