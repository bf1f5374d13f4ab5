"""Schemas that ask too much: refused with a reason, cut off in the middle, never a 5xx, and nobody else waits."""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import psutil
import pytest

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import QueueFull, ShuttingDown
from antiphon.serve.text import grammar_lanes, grammar_trial, structured
from antiphon.serve.text.dialects import dialect_of
from antiphon.serve.text.grammar_text import Spelling, Wish, answer_rules, json_grammar, lark_grammar
from antiphon.serve.text.structured import GrammarCompiler, GrammarMatcher
from tests.serve.api_harness import (
    MODEL_VOCAB_SIZE,
    compiling,
    eos_id,
    fake_engine,
    followed,
    ids,
    live,
    small_grammars,
    small_tokenizer,
)
from tests.waiting import wait_until


def optional_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}}


# Divisible by four primes: an automaton of a hundred million states, built without an end.
def endless(prime: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "multipleOf": each} for each in (97, 101, 103, prime)]}


ENDLESS = endless(107)


def chain(count: int) -> dict[str, Any]:
    """A reference to a reference to a reference ..."""
    links: dict[str, Any] = {f"{index}": {"$ref": f"#/$defs/{index + 1}"} for index in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**links, f"{count}": {"type": "integer"}}}


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {"anyOf": [schema]}
    return schema


TOO_MUCH = [
    (optional_properties(5000), "allows too many things at once|building it takes"),  # which, is the machine's speed
    (ENDLESS, "building it takes"),
    ({"type": "integer", "multipleOf": 999_983}, "building it takes"),
    ({"$ref": "#"}, "no text can satisfy it; does a $ref lead back to itself?"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "lead back to itself"),
    (chain(5000), "it nests too deeply"),
    (nested(200), "recursion limit exceeded"),
    ({"type": "string", "pattern": "a?" * 100_000}, "too big|of memory"),
    ({"anyOf": [{"type": "string"}], "pattern": "(" * 5000}, ""),
    ({"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]}, ""),
]
FINE = [
    optional_properties(500),
    {"type": "object", "properties": (many := optional_properties(5000)["properties"]), "required": list(many)},
    {"enum": [f"value {index}" for index in range(10_000)]},
    {"type": "string", "pattern": "^(a?){5000}$"},
    {"type": "string", "pattern": "^((a|b){0,1000}){0,100000}$"},
    chain(500),
    {"type": "string", "pattern": f"^({'|'.join(f'w{index}x*' for index in range(5000))})$"},
    {"type": "object", "properties": {"child": {"$ref": "#"}}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**5},
    {"type": "string", "minLength": 10**5},
]


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals for time come sooner; most of a schema's time is its last lane's."""
    monkeypatch.setattr(grammar_lanes, "_CPU_LIMITS_S", (0.02, 0.1, 0.2, 0.4))


@pytest.mark.parametrize(("schema", "reason"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_a_schema_that_asks_too_much_is_400(
    schema: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = "building" in reason  # it takes all the time there is: one of each form
    if patient:
        little_time(monkeypatch)
    with live(fake_engine()) as server:
        for stream in (schema is ENDLESS,) if patient else (False, True):
            response = server.complete(response_format=wanted(schema), stream=stream)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("grammar_error", "response_format")
            assert "the JSON schema cannot be used: " in error["message"]
            assert any(words in error["message"] for words in reason.split("|")), error
        assert server.engine.submissions == []
        assert server.complete(response_format=wanted({"enum": ["yes"]})).json()["choices"][0]["text"] == '"yes"'


@pytest.mark.parametrize("schema", FINE, ids=range(len(FINE)))
def test_a_large_schema_is_followed(schema: dict[str, Any]) -> None:
    with live(fake_engine()) as server:
        response = server.complete(response_format=wanted(schema), max_tokens=8)
        assert response.status_code == 200, response.text


def test_others_are_served_while_a_schema_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    little_time(monkeypatch)
    with live(fake_engine()) as server:
        statuses: list[int] = []
        trying = threading.Thread(
            target=lambda: statuses.append(server.complete(response_format=wanted(endless(109))).status_code)
        )
        trying.start()
        num_served = 0
        while trying.is_alive():
            assert server.complete(prompt="x" * 5000, truncate_prompt_tokens=5, max_tokens=1).status_code == 200
            num_served += 1
            time.sleep(0.01)
        assert statuses == [400]
        assert num_served > 3, "the others waited"


def test_a_grammar_that_breaks_off_is_a_400_or_an_event() -> None:
    engine = fake_engine()
    engine.break_grammar_after_tokens = 2
    with live(engine) as server:
        response_format = wanted({"type": "object"})
        response = server.complete(response_format=response_format, n=2)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "grammar_error"
        lines = server.complete(response_format=response_format, stream=True).text.split("\n\n")
        assert '"finish_reason":"stop"' not in "".join(lines)
        assert lines[-3].startswith('data: {"error":{"message":"structured output broke off: too many items"')
        assert '"type":"invalid_request_error","param":"response_format","code":"grammar_error"' in lines[-3]
        assert lines[-2] == "data: [DONE]"
        assert server.metric('requests_finished_total{reason="grammar"}') >= 2


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(small_tokenizer().backend, MODEL_VOCAB_SIZE, (eos_id(),))
    yield made
    made.close()


def choice_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def test_a_good_schema_does_not_wait_for_bad_ones_of_the_same_client(compiler: GrammarCompiler) -> None:
    followed(compiler, choice_of("first"))  # the process is up
    bad = [compiling(compiler, endless(107 + 2 * index), "a client") for index in range(8)]
    good = compiling(compiler, choice_of("yes"), "a client")
    medium = compiling(compiler, {"enum": [f"medium {index}" for index in range(10_000)]}, "another client")
    assert good.result(60) != medium.result(60)
    assert not any(each.done() for each in bad), "each takes seconds of processor time"
    for each in bad:
        each.cancel()


def test_a_refusal_is_remembered(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="no text can satisfy it"):
            followed(compiler, {"$ref": "#"})
    assert compiler._trials._num_orders == 1


def test_the_same_schema_at_once_is_tried_once(compiler: GrammarCompiler) -> None:
    answers = [compiling(compiler, choice_of("same"), client) for client in range(20)]
    assert len({answer.result(60) for answer in answers}) == 1
    assert compiler._trials._num_orders == 1
    assert followed(compiler, choice_of("same")) == answers[0].result()
    assert compiler._trials._num_orders == 1


def test_the_line_for_schemas_is_bounded_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_lanes, "_MAX_WAITING_OF_CLIENT", 0)
    with live(fake_engine()) as server:
        response = server.complete(response_format=wanted(choice_of("a line that is full")))
        assert response.status_code == 429, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert "of this client wait to be compiled" in response.json()["error"]["message"]
        monkeypatch.undo()
        assert server.complete(response_format=wanted(choice_of("a line that is full"))).status_code == 200


def test_an_answer_is_settled_once() -> None:
    answer: Future[str] = Future()
    grammar_lanes.settle(answer, "first")
    with pytest.raises(AssertionError, match="settled twice"):
        grammar_lanes.settle(answer, "second")
    assert answer.result(0) == "first"
    cancelled: Future[str] = Future()
    cancelled.cancel()
    grammar_lanes.settle(cancelled, "not wanted any more")
    assert cancelled.cancelled()


def running_trial(compiler: GrammarCompiler) -> Future[str]:
    """The answer of a trial that runs. One that was over before this process saw it run is followed by another one."""
    for _ in range(20):
        answer: Future[str] = compiling(compiler, {"enum": [f"{uuid.uuid4()}" for _ in range(5000)]})
        wait_until(lambda answer=answer: bool(compiler._trials._running) or answer.done(), "the trial")
        if not answer.done():
            return answer
    raise AssertionError("each of 20 trials was over before it was seen")


def test_a_trial_whose_process_was_killed_begins_again(compiler: GrammarCompiler) -> None:
    followed(compiler, choice_of("first"))
    for _ in range(2):
        answer = running_trial(compiler)
        assert compiler._trials._process is not None
        os.kill(compiler._trials._process.pid, signal.SIGKILL)
        assert answer.result(60)


def test_a_process_that_cannot_start_is_the_answer_and_not_the_end(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(2):
        with pytest.raises(QueueFull, match="cannot be tried out"):
            followed(compiler, choice_of("yes"))
    monkeypatch.undo()
    assert followed(compiler, choice_of("yes"))


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def processes_of(group: int) -> list[int]:
    """Processes of a group that run, not those that nobody has waited for yet."""
    return [
        process.pid
        for process in psutil.process_iter(["pid", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        if group_of(process.pid) == group
    ]


def test_what_is_closed_answers_those_who_wait(compiler: GrammarCompiler) -> None:
    followed(compiler, choice_of("first"))
    answers = [compiling(compiler, endless(301 + 2 * index)) for index in range(3)]
    wait_until(lambda: len(compiler._compiling) == 3, "three schemas that wait")
    assert compiler._trials._process is not None
    group = compiler._trials._process.pid
    assert group is not None
    compiler.close()
    for answer in answers:
        with pytest.raises(ShuttingDown):
            answer.result(60)
    wait_until(lambda: not processes_of(group), "the end of all trials")


def test_kept_grammars_are_bounded_in_bytes_and_come_back(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "_KEPT_BYTES", 40 * 1024 * 1024)
    grammars = [followed(compiler, {"enum": [f"{number} {index}" for index in range(4000)]}) for number in range(12)]
    assert sum(kept.kept_bytes for kept in compiler._kept.values()) <= 40 * 1024 * 1024
    assert 1 < len(compiler._kept) < 12
    num_trials = compiler._trials._num_orders
    again = compiler.matcher(grammars[0])
    assert again.is_slow, "it is built in the lane of those who may take long"
    assert again.fill_bitmask().any()
    assert not again.is_slow
    assert followed(compiler, {"enum": [f"1 {index}" for index in range(4000)]}) == grammars[1]
    assert compiler._trials._num_orders == num_trials, "what was tried is not tried again"


def test_grammars_in_use_are_bounded_in_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_KEPT_BYTES", 1024 * 1024)
    monkeypatch.setattr(structured, "_USED_BYTES", 20 * 1024 * 1024)
    matchers: list[GrammarMatcher] = []

    def follow_ever_more() -> None:
        for number in range(20):
            matchers.append(compiler.matcher(followed(compiler, {"enum": [f"{number} {i}" for i in range(4000)]})))

    with pytest.raises(QueueFull, match="in use would take more than 20 MiB"):
        follow_ever_more()
    assert matchers, "the first one fits"
    assert matchers[0].fill_bitmask().any(), "who is there goes on"
    matchers.clear()
    assert followed(compiler, {"enum": [f"again {index}" for index in range(4000)]})


def test_a_grammar_that_takes_too_much_memory_is_refused(compiler: GrammarCompiler) -> None:
    verdict = grammar_trial.try_grammar(compiler._tokenizer, json_grammar(choice_of("small")))
    assert verdict.reason is None
    assert verdict.grown_bytes < 64 * 1024 * 1024
    with pytest.raises(UserError, match=r"masks take more than|too complex|of memory|building it takes"):
        followed(compiler, {"const": "ab" * 120_000})


@pytest.mark.parametrize("num_levels", [1, 2000])
def test_a_schema_beyond_the_size_is_refused_before_its_text_is_made(
    compiler: GrammarCompiler, num_levels: int
) -> None:
    schema: dict[str, Any] = {"enum": ["x" * 100] * 3000}
    for _ in range(num_levels):
        schema = {"not": schema}
    with pytest.raises(UserError, match="too long: at most 262144 characters"):
        followed(compiler, schema)
    wish, hermes = Wish(schemas={"call": schema}, forced=True), dialect_of("", tool_parser="hermes")
    tool = partial(lark_grammar, partial(answer_rules, hermes, Spelling({}, (0,)), wish))
    with pytest.raises(UserError, match="too long: at most 262144 characters"):
        compiler.compile(tool).result(60)


def test_a_schema_that_cannot_be_written_as_text_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(UserError, match="nested too deeply; use"):
        followed(compiler, nested(2000))


def test_masks_that_take_too_long_end_all_sequences_of_their_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_MASK_CREDIT_S", 0.0)
    monkeypatch.setattr(grammar_trial, "_MASK_PACE_S", 1e-9)
    grammar = compiler.json_object()
    first, second = compiler.matcher(grammar), compiler.matcher(grammar)
    assert first.error is None
    first.fill_bitmask()
    for matcher in (first, second):
        assert matcher.error is not None
        assert "masks take more than" in matcher.error
    with pytest.raises(UserError, match="masks take more than"):
        compiler.matcher(grammar)


def test_matchers_are_copies_that_do_not_disturb_each_other() -> None:
    compiler = small_grammars()
    grammar = followed(compiler, FINE[1])
    began_s = time.perf_counter()
    compiler.matcher(grammar)
    copied_s = time.perf_counter() - began_s
    assert copied_s < 0.1, "it was built again"
    first, second = compiler.matcher(grammar), compiler.matcher(grammar)
    assert first.accept(ids("{")[0])
    assert second.fill_bitmask().tobytes() == compiler.matcher(grammar).fill_bitmask().tobytes()
