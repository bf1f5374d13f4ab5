"""Chat templates: the same text as transformers writes, and every way a template can misbehave, within its limits."""

import asyncio
import inspect
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest
import transformers.utils.chat_template_utils
from transformers import PreTrainedTokenizerFast

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.text.text_process import ChatTemplate, RenderChat
from antiphon.serve.text.text_queue import TextLimits
from antiphon.serve.text.text_service import TextService, settable_variables
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_reading import load_tokenizer
from tests.serve.api_harness import live, says, small_tokenizer, text_pids, write_tokenizer
from tests.waiting import wait_until

# In the manner of published families, one peculiarity each.
TEMPLATES = {
    "chatml with tools": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "You may call:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' and not ns.seen %}
        {%- set ns.last_user = index %}
        {%- set ns.seen = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>' ~ call.function.name ~ ': ' }}{{ call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + (' (last)' if loop.index0 == ns.last_user else '') }}
        {{- '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
{%- endif %}
""",
    "a day in the header": """{{ bos_token }}
{%- if strftime_now is defined %}{% set today = strftime_now("%d %b %Y") %}{% else %}{% set today = "?" %}{% endif %}
<|header|>Today is {{ today }}.
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{ raise_exception('no role ' + message['role']) }}
    {% endif %}
<|{{ message['role'] }}|>
{{ message['content'] if message['content'] is string else '' }}<|eot|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
""",
    "roles in turn": """{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}{{ eos_token }}
{% endif %}{% endfor %}""",
    "macros, loop controls, the generation tag": """
{% macro show(value, depth=0) %}
  {% if value is mapping %}
{{ '  ' * depth }}object
    {% for key, item in value | dictsort %}
{{ '  ' * depth }}{{ key }}: {{ show(item, depth + 1) }}
    {% endfor %}
  {% elif value is string %}{{ value | upper }}{% else %}{{ value | tojson(separators=(',', ':'), sort_keys=true) }}
  {% endif %}
{% endmacro %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% set left = 1 %}{% endgeneration %}
  {% else %}{{ show(message) }}{% endif %}{{ left }}
{% endfor %}
{% set options = dict(a=1, b=[1.5, none, true]) %}{{ show(options) }}{{ 'é<b>' | tojson }}{{ tools is none }}
{{ documents is none }}""",
    "reasoning": """{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};
{% endfor %}""",
    "several": {
        "default": "no tools: {{ messages[0].content }}",
        "tool_use": "{{ tools | length }} tools: {{ messages[-1]['content'] }}",
    },
}
TOOL = {
    "type": "function",
    "function": {"name": "wetter", "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}}},
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Grüße <b>& 'quotes'\n\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning": "greet"},
        {"role": "user", "content": "中文?"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "n": [1]}}}
            ],
        },
        {"role": "tool", "content": '{"t": 7}', "name": "wetter"},
    ],
]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_texts_are_those_of_transformers(
    name: str, conversation: int, with_tools: bool, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    if "reasoning" in name and "reasoning" not in inspect.getsource(transformers.utils.chat_template_utils):
        pytest.skip("this version of transformers gives a message's reasoning no second name")
    sources = TEMPLATES[name]
    kwargs = {"enable_thinking": False, "eos_token": "<|other|>"} if with_tools else {}
    tools = [TOOL] if with_tools else None
    reference = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend, **SPECIAL)
    reference.chat_template = sources
    template = ChatTemplate(sources, {key: str(value) for key, value in reference.special_tokens_map.items()})

    def ours() -> str:
        return template.render(
            RenderChat(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                template_kwargs=kwargs,
                max_characters=100_000,
            )
        )

    def theirs() -> str:
        # Older versions write nulls out; ours leaves them away, as later ones do.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return str(
            reference.apply_chat_template(
                present, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        )

    if name == "roles in turn" and conversation > 0:  # neither accepts a system message
        with pytest.raises(jinja2.TemplateError, match="must alternate"):
            theirs()
        with pytest.raises(UserError, match="must alternate"):
            ours()
    else:
        assert ours() == theirs()


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__() }}",
        "{{ raise_exception.__globals__.keys() }}",
    ],
)
def test_the_sandbox_is_shut(attempt: str) -> None:
    template = ChatTemplate(attempt, {})
    with pytest.raises(UserError, match=r"unsafe|underscore|undefined|no attribute"):
        template.render(chat(CONVERSATIONS[0], 1000))


def test_the_processes_read_what_transformers_reads(tmp_path: Path) -> None:
    """From a folder on disk to a text, over the socket, with everything a template may receive."""
    write_tokenizer(tmp_path, str(TEMPLATES["chatml with tools"]))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    with Running(load_tokenizer(tmp_path)) as service:
        for messages in CONVERSATIONS:
            text = asyncio.run(
                service.render(
                    RenderChat(
                        messages=messages,
                        add_generation_prompt=True,
                        tools=[TOOL],
                        template_kwargs={"enable_thinking": False},
                        max_characters=100_000,
                    )
                )
            )
            assert text == reference.apply_chat_template(
                messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )


class Running:
    """A text service that ends with the block."""

    def __init__(self, tokenizer: TextTokenizer, **limits: Any) -> None:
        self.service = TextService(tokenizer, TextLimits(**limits))

    def __enter__(self) -> TextService:
        self.service.start()
        return self.service

    def __exit__(self, *_: object) -> None:
        self.service.close()


def chat(messages: list[dict[str, Any]], max_characters: int = 100_000) -> RenderChat:
    return RenderChat(messages=messages, add_generation_prompt=True, max_characters=max_characters)


def with_template(source: str | dict[str, str] | None) -> TextTokenizer:
    tokenizer = small_tokenizer()
    return TextTokenizer(tokenizer.backend, source, tokenizer.special_tokens)


def render(service: TextService, max_characters: int = 100_000) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return asyncio.run(service.render(chat(messages, max_characters)))


# A bomb needs a message to go off: the same template serves other conversations. What it says when it is stopped.
BOMBS = {
    "nested loops": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "took longer than 1 s, the limit",
    ),
    "one long string": ("{{ ('a' * (10 ** 10)) | length }}", "memory"),
    "doubling": (
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "memory|took longer than 1 s",
    ),
    "a list that grows": (
        "{% set ns = namespace(s=[0]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "memory|took longer than 1 s",
    ),
    "a large power": (
        "{{ ((messages | length * 10) ** (10 ** 9)) | string }}",
        "took longer than 1 s, the limit|memory",
    ),
    "macros without end": ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "calls itself without an end"),
    "much text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 100000 characters"),
    "padding": ("{{ 'x' | center(10 ** 10) }}", "memory"),
}


@pytest.fixture(scope="module")
def bombed() -> Iterator[TextService]:
    cases = "".join(f"{{% elif messages[0].content == '{name}' %}}{source}" for name, (source, _) in BOMBS.items())
    template = "{% if messages[0].content == 'hi' %}hello" + cases + "{% endif %}"
    with Running(with_template(template), template_timeout_s=1.0) as service:
        assert render(service) == "hello"
        yield service


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_runs_wild_is_stopped_and_the_next_request_is_served(bombed: TextService, name: str) -> None:
    messages = [{"role": "user", "content": name}]
    with pytest.raises(UserError, match=BOMBS[name][1]):
        asyncio.run(bombed.render(chat(messages, 100_000)))
    assert render(bombed) == "hello"


def test_what_cannot_fit_is_told_apart() -> None:
    with (
        Running(with_template("{{ 'x' * 1000 }}")) as service,
        pytest.raises(RequestTooLong, match="has more than 999 characters"),
    ):
        render(service, max_characters=999)


# What only looking at a template evaluates, or is too much to look at. No message is needed.
BOMBS_AT_THE_START: dict[str, tuple[str | dict[str, str], str]] = {
    "half a loop": ("{% for message in messages %}", r"cannot be used: line 1: Unexpected end of template"),
    "a power of constants": ("{{ 2 ** (10 ** 10) }}", r"took longer than 1 s|memory"),
    "a power of powers": ("{{ (9**9)**(9**9) }}", r"took longer than 1 s|memory"),
    "20,000 brackets": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "calls itself|cannot be used|cannot do"),
    "3,000 nested conditions": (
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        r"cannot be used|cannot do|nested|longer than 1 s",
    ),
    "a long sum": ("{{ " + "1 + " * 20_000 + "1 }}", "calls itself|cannot be used|cannot do"),
    "2 MB": ("a" * 2**21, "2097152 characters: at most 1048576 are read"),
    "2,000 variables": (" ".join(f"{{{{ v{number} }}}}" for number in range(2000)), "reads 2000 variables: at most"),
    "no default": ({"rag": "x"}, r"chat templates rag, but none is named default"),
}


@pytest.mark.parametrize("name", BOMBS_AT_THE_START)
def test_a_template_that_cannot_be_compiled_is_told_at_the_start(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source, reason = BOMBS_AT_THE_START[name]
    timeout_s = 1.0 if "1 s" in reason else 60.0
    with Running(with_template(source), template_timeout_s=timeout_s) as service:
        with pytest.raises(UserError, match=reason):
            render(service)
        assert any("no chat completions" in record.message for record in caplog.records)
        assert asyncio.run(service.encode(["hello"], add_special_tokens=False, max_tokens=5))


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10000000000 }}", "{{ ([0] * 10000000000) | length }}", "{{ 'x' | center(10000000000) }}"]
)
def test_what_constants_of_a_template_fill_is_the_memory_of_its_process(source: str) -> None:
    """Jinja leaves such a constant to each rendering, which then fails; what is not reached does no harm."""
    with Running(with_template("{% if messages[0].content == 'hi' %}" + source + "{% endif %}hello")) as service:
        with pytest.raises(UserError, match="memory"):
            render(service)
        messages = [{"role": "user", "content": "other"}]
        assert asyncio.run(service.render(chat(messages, 9))) == "hello"


def test_a_server_with_a_hostile_template_refuses_chats_and_serves_completions() -> None:
    source = str(BOMBS_AT_THE_START["a power of powers"][0])
    with live(says("fine"), chat_template="{% if tools %}" + source + "{% endif %}") as server:
        tool = {"type": "function", "function": {"name": "f"}}
        for body in ({}, {"tools": [tool]}, {"chat_template_kwargs": {"a": 1}}, {"reasoning_effort": "low"}):
            refused = server.chat(max_tokens=1, **body)
            assert refused.status_code == 400
            assert "chat template" in refused.json()["error"]["message"]
        assert server.complete(max_tokens=9).json()["choices"][0]["text"] == "fine"
        assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_the_names_that_a_template_reads_come_from_its_process() -> None:
    source = "{% set own = 1 %}{% for m in messages %}{{ m.role }}{{ own }}{% endfor %}{{ style }}{{ bos_token }}"
    with Running(with_template({"default": source, "tool_use": "{{ tools }}{% if (9**9)**9 %}{% endif %}"})) as service:
        names = asyncio.run(service.template_names())
        assert names == {"messages", "style", "bos_token", "tools"}
        assert settable_variables(names) == {"style"}


def test_a_process_that_is_killed_is_replaced() -> None:
    with Running(with_template("hello")) as service:
        assert render(service) == "hello"
        wait_until(lambda: len(text_pids(service)) == 3, "the processes have started")
        short, chats, long = text_pids(service)
        os.kill(chats, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(chats)], timeout=10)
        assert render(service) == "hello"
        assert {short, long} < set(text_pids(service))
        assert chats not in text_pids(service)


def test_without_a_template_there_is_nothing_to_render() -> None:
    with Running(with_template(None)) as service, pytest.raises(UserError, match="no chat template: use /v1/compl"):
        render(service)


def test_a_template_in_the_manner_of_gpt_oss_is_rendered() -> None:
    """Macros, today's date, defaults for what a request does not name."""
    template = ChatTemplate(
        "{%- macro opening(effort) -%}<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}\n"
        "Reasoning: {{ effort }}<|end|>{%- endmacro -%}"
        "{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}{{ opening(effort) }}"
        "{%- for message in messages -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}",
        {},
    )
    text = template.render(chat([{"role": "user", "content": "hi"}], 1000))
    opening = r"<\|start\|>system<\|message\|>Current date: \d{4}-\d\d-\d\d\nReasoning: medium<\|end\|>"
    assert re.fullmatch(opening + re.escape("<|start|>user<|message|>hi<|end|><|start|>assistant"), text)
