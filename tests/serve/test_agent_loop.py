"""An agent's loop over HTTP, without a grammar: ask, call, result, answer, in formats that differ in every respect.

The engine stands in for a model that obeys: what it writes depends on what it reads, as the template wrote it."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.api_harness import END, eos_id, fake_engine, ids, live, small_tokenizer
from tests.serve.written_calls import WRITERS

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
CALL = ("add", {"a": 17, "b": 25, "note": 'a "note"\nof two lines é'})
TURNS = (
    "{% if tools %}{{ tools[0].function.name }} is there.\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALLED {{ call.id }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %} OF {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
)
# A template's own signs, the end of its prompts, and what comes before calls and answers.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "hermes": ("</think> <tool_call>", "", "<think>\nI have to add.\n</think>\n\n"),
    "minimax_m2": ("</think> <minimax:tool_call>", "<think>\n", "I have to add.\n</think>\n\n"),
    "glm45": ("</think> <arg_key>", "", "\n<think>I have to add.</think>\n"),
    "deepseek_v31": ("</think> <｜tool▁call▁begin｜>", "<think>", "I have to add.</think>"),
    "harmony": (
        "<|channel|> <|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>I have to add.<|end|><|start|>assistant",
    ),
    "qwen3_coder": ("</think> <function= <parameter=", "", "<think>I have to add.</think>"),
}


def model_of(form: str, thought: str) -> Callable[[list[int], Any], list[int]]:
    """Calls when it was asked, answers when it has the result of its call."""

    def script(prompt: list[int], params: Any) -> list[int]:
        text = small_tokenizer().decode(prompt, skip_special_tokens=False)
        assert "add is there." in text
        if "<|im_start|>tool\n" in text:
            result = text.rpartition("<|im_start|>tool\n")[2].partition(" OF ")[0]
            said = f"It is {result}."
            said = f"<|channel|>final<|message|>{said}" if form == "harmony" else said
        else:
            said = WRITERS[form]([CALL]).removesuffix("<|call|>")
        return [*ids(thought + said), eos_id()][: params.max_tokens]

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", sorted(FAMILIES))
def test_ask_call_result_answer(form: str, stream: bool) -> None:
    signs, opening, thought = FAMILIES[form]
    template = f"{{# {signs} #}}" + TURNS.replace("OPENING", opening)
    engine = fake_engine(script=model_of(form, thought), max_model_len=4096)
    messages: list[Any] = [{"role": "user", "content": "What is 17 and 25?"}]
    with live(engine, chat_template=template) as server:

        def turn() -> Any:
            asked: Any = {"model": "fake-moe", "messages": messages, "tools": [ADD]}
            if not stream:
                return server.openai.chat.completions.create(**asked).choices[0]
            with server.openai.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                return events.get_final_completion().choices[0]

        first = turn()
        assert (first.message.content or None, first.finish_reason) == (None, "tool_calls")
        assert first.message.reasoning == "I have to add."
        (call,) = first.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments) == CALL
        said = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [said]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})
        second = turn()
        assert (second.message.content, second.finish_reason) == ("It is 42.", "stop")
        assert second.message.reasoning == "I have to add."
        prompt = small_tokenizer().decode(engine.submissions[-1].prompt_token_ids, skip_special_tokens=False)
        assert f"CALLED {call.id} {json.dumps(CALL[1], ensure_ascii=False)}{END}" in prompt


@pytest.mark.parametrize("template", ["chat_template.jinja", "tags.jinja"])
def test_the_shipped_model_calls_a_tool_and_answers(template: str, tmp_path: Path) -> None:
    """In two formats, trained and not forced."""
    path = Path(__file__).parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    options = ("--chat-template", str(demo.MODEL / template), "--threads", "1", "--kv-bytes", "64MiB")
    with demo.running_server(demo.MODEL, tmp_path, *options) as (_, facts):
        said = demo.use_tool(facts["url"])
    assert said == "What is 17 plus 25? -> add(a=17, b=25) -> 42 -> The sum is 42."
