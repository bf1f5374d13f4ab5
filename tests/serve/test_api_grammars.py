"""Schemas that ask too much: refused with a reason, cut off in the middle, never a 5xx, and nobody else waits."""

import threading
import time
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.text import grammar_trial
from antiphon.serve.text.structured import GrammarCompiler
from tests.serve.api_harness import MODEL_VOCAB_SIZE, eos_id, fake_engine, ids, live, small_grammars, small_tokenizer


def optional_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}}


# Divisible by four primes: an automaton of a hundred million states, built without an end.
def endless(prime: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "multipleOf": each} for each in (97, 101, 103, prime)]}


ENDLESS = endless(107)
TOO_MUCH = [
    (optional_properties(5000), "allows too many things at once|building it takes"),  # which, is the machine's speed
    (ENDLESS, "building it takes"),
    ({"type": "integer", "multipleOf": 999_983}, "building it takes"),
    ({"$ref": "#"}, "no text can satisfy it; does a $ref lead back to itself?"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "lead back to itself"),
    ({"anyOf": [{"type": "string"}], "pattern": "(" * 5000}, ""),
    ({"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]}, ""),
]
FINE = [
    optional_properties(500),
    {"type": "object", "properties": (many := optional_properties(5000)["properties"]), "required": list(many)},
    {"enum": [f"value {index}" for index in range(10_000)]},
    {"type": "string", "pattern": "^(a?){5000}$"},
    {"type": "string", "pattern": f"^({'|'.join(f'w{index}x*' for index in range(5000))})$"},
    {"type": "object", "properties": {"child": {"$ref": "#"}}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    {"type": "string", "minLength": 10**5},
]


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(("schema", "reason"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_a_schema_that_asks_too_much_is_400(schema: dict[str, Any], reason: str) -> None:
    patient = "building" in reason  # it takes seconds: one of each form
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


def test_others_are_served_while_a_schema_is_tried() -> None:
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


def test_masks_that_take_too_long_end_all_sequences_of_their_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "_MASK_CREDIT_S", 0.0)
    monkeypatch.setattr(grammar_trial, "_MASK_PACE_S", 1e-9)
    compiler = GrammarCompiler(small_tokenizer().backend, MODEL_VOCAB_SIZE, (eos_id(),))
    try:
        grammar = compiler.json_object()
        first, second = compiler.matcher(grammar), compiler.matcher(grammar)
        assert first.error is None
        first.fill_bitmask()
        for matcher in (first, second):
            assert matcher.error is not None
            assert "masks take more than" in matcher.error
        with pytest.raises(UserError, match="masks take more than"):
            compiler.matcher(grammar)
    finally:
        compiler.close()


def test_matchers_are_copies_that_do_not_disturb_each_other() -> None:
    compiler = small_grammars()
    grammar = compiler.json_schema(FINE[1])
    began_s = time.perf_counter()
    compiler.matcher(grammar)
    copied_s = time.perf_counter() - began_s
    assert copied_s < 0.1, "it was built again"
    first, second = compiler.matcher(grammar), compiler.matcher(grammar)
    assert first.accept(ids("{")[0])
    assert second.fill_bitmask().tobytes() == compiler.matcher(grammar).fill_bitmask().tobytes()
