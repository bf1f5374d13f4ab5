"""Every parameter has its effect or is refused; what errors advise exists; long because each has a row.

A field without a row here fails the test. A row: what is sent without the parameter, the parameter's value, and what is
then true of what the server and its engine did, and not true without it.
"""

import ast
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

from antiphon.cli.main import COMMANDS
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.guard.harmless import HARMLESS
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from tests.serve.api_harness import Live, eos_id, fake_engine, ids, live, small_tokenizer
from tests.serve.test_api_tools import HERMES, LOOK

SOURCES = Path(__file__).parents[2] / "antiphon"
HELLO = [{"role": "user", "content": "hello"}]
SAID = "ab<|im_start|>cd"
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


@dataclass
class Seen:
    """What came of one request."""

    status: int
    text: str
    answer: dict[str, Any]
    events: list[str]
    submissions: list[Any]
    log: str
    prompt: str

    @property
    def params(self) -> Any:
        return self.submissions[0].params

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.answer["choices"][0]
        return choice

    @property
    def said(self) -> str:
        return str(self.choice["text"] if "text" in self.choice else self.choice["message"]["content"])


@dataclass
class Row:
    value: Any
    effect: Callable[[Seen], object]
    base: dict[str, Any] = field(default_factory=dict)

    def with_base(self, base: dict[str, Any]) -> "Row":
        return replace(self, base=base)


def param(name: str, value: Any, **base: Any) -> Row:
    """A value that reaches the engine as it is."""
    return Row(value, lambda seen: getattr(seen.params, name) == value, base)


STREAM_OPTIONS = {
    "include_usage": Row(True, lambda seen: '"choices":[],"usage":{' in seen.text, {"stream": True}),
    "continuous_usage_stats": Row(True, lambda seen: '"usage":{"prompt_tokens"' in seen.events[1], {"stream": True}),
    "include_obfuscation": Row(True, lambda seen: seen.status == 400, {"stream": True}),
}
BOTH = {
    "model": Row("other", lambda seen: seen.status == 404),
    "max_tokens": param("max_tokens", 3),
    "temperature": param("temperature", 0.5),
    "top_p": param("top_p", 0.5),
    "top_k": param("top_k", 3),
    "min_p": param("min_p", 0.25),
    "n": Row(2, lambda seen: len(seen.answer["choices"]) == 2),
    "best_of": Row(2, lambda seen: seen.status == 400),
    "seed": param("seed", 7),
    "stop": Row("b", lambda seen: (seen.said, seen.choice["stop_reason"]) == ("a", "b")),
    "stop_token_ids": Row([5], lambda seen: seen.params.stop_token_ids == (5,)),
    "include_stop_str_in_output": Row(True, lambda seen: seen.said == "ab", {"stop": "b"}),
    "skip_special_tokens": Row(False, lambda seen: seen.said == SAID),
    "stream": Row(True, lambda seen: seen.events[-1] == "[DONE]"),
    "stream_options": STREAM_OPTIONS["include_usage"],
    "logit_bias": Row({"5": 1}, lambda seen: seen.params.logit_bias == {5: 1.0}),
    "presence_penalty": param("presence_penalty", 0.5),
    "frequency_penalty": param("frequency_penalty", 0.5),
    "repetition_penalty": param("repetition_penalty", 1.5),
    "min_tokens": param("min_tokens", 2),
    "ignore_eos": param("ignore_eos", True),
    "response_format": Row({"type": "json_object"}, lambda seen: seen.params.grammar is not None),
    "structured_outputs": Row({"choice": ["q"]}, lambda seen: seen.said == "q"),
    "guided_json": Row({"const": 7}, lambda seen: seen.said == "7"),
    "guided_regex": Row("q", lambda seen: seen.said == "q"),
    "guided_choice": Row(["q"], lambda seen: seen.said == "q"),
    "guided_grammar": Row('start: "q"', lambda seen: seen.said == "q"),
    "json_schema": Row({"const": 7}, lambda seen: seen.said == "7"),
    "regex": Row("q", lambda seen: seen.said == "q"),
    "ebnf": Row('root ::= "q"', lambda seen: seen.said == "q"),
    "truncate_prompt_tokens": Row(1, lambda seen: len(seen.submissions[0].prompt_token_ids) == 1),
    "truncation_side": Row(
        "right",
        lambda seen: seen.submissions[0].prompt_token_ids in (ids("hello")[:1], ids("<|im_start|>")),
        {"truncate_prompt_tokens": 1},
    ),
    "return_token_ids": Row(True, lambda seen: seen.choice.get("token_ids") == [*ids(SAID), eos_id()]),
    "return_tokens_as_token_ids": Row(True, lambda seen: f'"token_id:{ids("a")[0]}"' in seen.text, {"logprobs": 1}),
    "user": Row("somebody-7", lambda seen: "somebody-7" in seen.log),
    "safety_identifier": Row("somebody-8", lambda seen: "somebody-8" in seen.log),
    "prompt_logprobs": Row(
        2, lambda seen: seen.params.prompt_logprobs == 2 and '"prompt_logprobs":[null,{"' in seen.text
    ),
    "allowed_token_ids": Row([5, 6], lambda seen: seen.params.allowed_token_ids == (5, 6)),
    "bad_words": Row(["a"], lambda seen: set(seen.params.bad_words) == {tuple(ids("a")), tuple(ids(" a"))}),
    "logprob_token_ids": Row([5, 6], lambda seen: seen.params.logprob_token_ids == (5, 6), {"logprobs": 1}),
    "priority": param("priority", -3),
    "request_id": Row("mine-7", lambda seen: seen.answer["id"].endswith("-mine-7")),
}
FORMATS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
CHANGES_NOTHING = {"prompt_cache_key", "metadata"}  # and says so
PROMPTS = {  # a tokenizer of chats and of /tokenize
    "tools": Row([LOOK], lambda seen: "look" in seen.prompt),
    "chat_template_kwargs": Row({"thinking": False}, lambda seen: seen.prompt.endswith("no ")),
    "add_generation_prompt": Row(False, lambda seen: "assistant" not in seen.prompt),
    "continue_final_message": Row(
        True, lambda seen: seen.prompt.endswith("hel"), {"messages": [*HELLO, {"role": "assistant", "content": "hel"}]}
    ),
    "add_special_tokens": Row(True, lambda seen: "began specially" in seen.log),
    "messages": Row([{"role": "user", "content": "other"}], lambda seen: "other" in seen.prompt),
}
NO_CALL = {"type": "function", "function": {"name": "look"}}
TABLE: dict[str, tuple[type[BaseModel], dict[str, Row]]] = {
    COMPLETIONS: (
        CompletionRequest,
        BOTH
        | {
            "prompt": Row("other", lambda seen: seen.prompt == "other"),
            "echo": Row(True, lambda seen: seen.said == "hello" + "abcd"),
            "add_special_tokens": Row(False, lambda seen: "began specially" not in seen.log),
            "logprobs": Row(1, lambda seen: seen.params.logprobs == 1 and seen.choice["logprobs"]["tokens"]),
        },
    ),
    CHAT: (
        ChatCompletionRequest,
        BOTH
        | PROMPTS
        | {  # a chat's answer may think first, as long as it likes
            name: Row(BOTH[name].value, lambda seen: "think" in (seen.params.grammar or "")) for name in FORMATS
        }
        | {
            "logprob_token_ids": BOTH["logprob_token_ids"].with_base({"logprobs": True}),
            "return_tokens_as_token_ids": Row(
                True, lambda seen: f'"token_id:{ids("a")[0]}"' in seen.text, {"logprobs": True}
            ),
            "max_completion_tokens": Row(3, lambda seen: seen.params.max_tokens == 3),
            "logprobs": Row(True, lambda seen: seen.choice["logprobs"]["content"]),
            "echo": Row(
                True,
                lambda seen: seen.said.startswith("I think"),
                {
                    "messages": [*HELLO, {"role": "assistant", "content": "I think"}],
                    "continue_final_message": True,
                },
            ),
            "top_logprobs": Row(2, lambda seen: seen.params.logprobs == 2, {"logprobs": True}),
            "tool_choice": Row("required", lambda seen: seen.params.grammar is not None, {"tools": [LOOK]}),
            "parallel_tool_calls": Row(
                False,
                lambda seen: len(seen.choice["message"]["tool_calls"]) == 1,
                {"tools": [LOOK], "messages": [{"role": "user", "content": "call twice"}]},
            ),
            "include_reasoning": Row(
                False,
                lambda seen: (seen.said, seen.choice["message"].get("reasoning")) == ("b", None),
                {"messages": [{"role": "user", "content": "go thinking"}]},
            ),
            "separate_reasoning": Row(
                False,
                lambda seen: seen.said == THOUGHT,
                {"messages": [{"role": "user", "content": "go thinking"}]},
            ),
            "thinking_token_budget": Row(5, lambda seen: "</think> is not one token" in seen.text),
            "reasoning_effort": Row("high", lambda seen: "effort high" in seen.prompt),
        },
    ),
    TOKENIZE: (
        TokenizeRequest,
        PROMPTS
        | {
            "model": BOTH["model"],
            "prompt": Row("other", lambda seen: seen.prompt == "other", {"messages": None, "prompt": "hello"}),
            "return_token_strs": Row(True, lambda seen: "hello" in "".join(seen.answer["token_strs"] or ())),
        },
    ),
    DETOKENIZE: (
        DetokenizeRequest,
        {"model": BOTH["model"], "tokens": Row([5], lambda seen: len(seen.answer["prompt"]) == 1)},
    ),
}
NEEDED = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": HELLO},
    TOKENIZE: {"messages": HELLO},
    DETOKENIZE: {"tokens": [5, 6]},
}
THOUGHT = "<think>a</think>b"
TWO_CALLS = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' * 2


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Live]:
    template = HERMES + "{# </think> #}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"

    def script(prompt: list[int], params: Any) -> list[int]:
        asked = small_tokenizer().decode(prompt, skip_special_tokens=False)
        said = TWO_CALLS if "call twice" in asked else THOUGHT if "go thinking" in asked else SAID
        return [*ids(said), eos_id()][: params.max_tokens]

    with live(fake_engine(script=script, max_model_len=4096), chat_template=template) as running:
        yield running


@pytest.fixture
def ask(
    shared_server: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[str, dict[str, Any]], Seen]:
    """Send a request and look at everything that came of it."""
    context: ApiContext = shared_server.server.config.app.state.context  # type: ignore[union-attr]
    encode, tokenizer = context.texts.encode, context.tokenizer
    log = logging.getLogger("antiphon.serve.api")

    async def remember(texts: list[str], *, add_special_tokens: bool, **options: Any) -> list[list[int]]:
        if add_special_tokens:
            log.info("began specially")
        return await encode(texts, add_special_tokens=add_special_tokens, **options)

    monkeypatch.setattr(context.texts, "encode", remember)
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("antiphon"), "propagate", True)

    def asked(path: str, body: dict[str, Any]) -> Seen:
        shared_server.engine.reset()
        caplog.clear()
        with caplog.at_level(logging.INFO, "antiphon.serve.api"):
            response = shared_server.http.post(path, json=NEEDED[path] | body)
        answer = response.json() if response.headers["content-type"] == "application/json" else {}
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line] if not answer else []
        submissions = list(shared_server.engine.submissions)
        token_ids = submissions[0].prompt_token_ids if submissions else answer.get("tokens", [])
        prompt = tokenizer.decode(token_ids, skip_special_tokens=False)
        return Seen(response.status_code, response.text, answer, events, submissions, caplog.text, prompt)

    return asked


def test_every_field_has_a_row() -> None:
    for path, (model, rows) in TABLE.items():
        assert model.model_fields.keys() - CHANGES_NOTHING == rows.keys(), path
    assert STREAM_OPTIONS.keys() == StreamOptions.model_fields.keys()
    for name in CHANGES_NOTHING:
        assert str(CompletionRequest.model_fields[name].description).startswith("Changes nothing")


ROWS = [
    pytest.param(path, name, row, id=f"{path} {name}")
    for path, (_, rows) in TABLE.items()
    for name, row in rows.items()
]


def held(row: Row, seen: Seen) -> bool:
    """Whether the row's effect is there; what it looks at may not be."""
    try:
        return bool(row.effect(seen))
    except (KeyError, IndexError, TypeError):
        return False


@pytest.mark.parametrize(("path", "name", "row"), ROWS)
def test_a_parameter_has_its_effect(ask: Callable[[str, dict[str, Any]], Seen], path: str, name: str, row: Row) -> None:
    # An answer that is not cut off, unless its length is the question.
    base = {"max_tokens": 200} if path in (COMPLETIONS, CHAT) and not name.startswith("max_") else {}
    value = {"include_usage": True} if name == "stream_options" else row.value
    without, seen = ask(path, base | row.base), ask(path, base | row.base | {name: value})
    assert without.status == 200, without.text
    assert held(row, seen), seen
    assert not held(row, without), "the same without it"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", list(STREAM_OPTIONS))
def test_a_stream_option_has_its_effect(ask: Callable[[str, dict[str, Any]], Seen], path: str, name: str) -> None:
    row = STREAM_OPTIONS[name]
    without, seen = ask(path, row.base), ask(path, row.base | {"stream_options": {name: row.value}})
    assert without.status == 200
    assert held(row, seen)
    assert not held(row, without)


# ---- advice --------------------------------------------------------------------------------------------------------

PATH_OF = {model: path for path, (model, _) in TABLE.items()}


def test_what_the_table_of_other_servers_advises_exists() -> None:
    """Each name with an underscore in a reason, and each behind "use" or "called", is a parameter of the endpoint that
    the reason names, or else of the one at which it is given."""
    for name, entry in HARMLESS.items():
        for model in (CompletionRequest, ChatCompletionRequest):
            if name in model.model_fields:
                continue
            elsewhere = [each for each, _ in TABLE.values() if f"on {PATH_OF[each]}" in entry.reason]
            advised = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|(?<=use )\w+|(?<=called )\w+", entry.reason))
            for field_name in advised:
                assert any(field_name in each.model_fields for each in elsewhere or [model]), (name, entry.reason)


@cache
def messages_of_errors() -> list[tuple[Path, str]]:
    """Every text within a `raise` or a call that makes an error, with the file it is in."""
    found = []
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            name = getattr(called, "id", getattr(called, "attr", ""))
            if isinstance(node, ast.Raise) or re.search(r"Error$|^bad_request$|^too_|^_log$|Refused|Failed$", name):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                found.append((file, " ".join(text for text in texts if isinstance(text, str))))
    return found


def options_of(name: str) -> set[str]:
    return _all_options(typer.main.get_command(COMMANDS[name].load()))


def _all_options(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    return found.union(*(_all_options(sub) for sub in getattr(command, "commands", {}).values()))


def test_options_that_errors_advise_exist() -> None:
    everywhere = {"--debug", "--version", "--help"}.union(*map(options_of, COMMANDS))
    serving = set().union(*map(options_of, ("serve", "generate", "worker", "bench", "plan")))
    for file, text in messages_of_errors():
        known = serving if "serve" in file.relative_to(SOURCES).parts[:1] else everywhere
        text = re.sub(r"'ray [^']*'|(docker run|torchrun) [a-z-]+", "", text)  # another program's
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)) - known:
            own = "".join(each.read_text(encoding="utf-8") for each in file.parent.glob("*.py"))
            is_of_program = re.search(rf'add_argument\(\s*"{option}"', own)
            assert is_of_program, f"{file.relative_to(SOURCES)} advises {option}, which no command has: {text}"


def test_parameters_that_errors_advise_exist() -> None:
    """Names with an underscore behind "use", "send", "lower" or "raise" in the texts of the API's errors."""
    fields = set().union(*(model.model_fields for model, _ in TABLE.values()))
    num_advised = 0
    for file, text in messages_of_errors():
        if file.is_relative_to(SOURCES / "serve" / "api"):
            for name in re.findall(r"\b(?:use|send|lower|raise|with) ([a-z]+(?:_[a-z]+)+)", text):
                num_advised += 1
                assert name in fields, f"{file.name} advises {name}: {text}"
    assert num_advised > 3
