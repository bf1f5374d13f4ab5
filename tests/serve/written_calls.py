"""What models of each family write, put together by hand: the reference that readers and grammars are held to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]  # the function, and its arguments
Writer = Callable[[Sequence[Call]], str]


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    """A value as formats of tags write it: a string as it is."""
    return value if isinstance(value, str) else compact(value)


def each(one: Callable[[str, dict[str, Any]], str], between: str = "\n") -> Writer:
    return lambda calls: between.join(one(name, arguments) for name, arguments in calls)


def objects(key: str = "arguments") -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: f'{{"name": "{name}", "{key}": {compact(arguments)}}}'


def tagged(before: str, parameter: Callable[[str, object], str], after: str) -> Callable[[str, dict[str, Any]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return before % name + "".join(parameter(key, value) for key, value in arguments.items()) + after

    return one


def dsml(block: str) -> Writer:
    def parameter(key: str, value: object) -> str:
        said = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{said}">{bare(value)}</｜DSML｜parameter>\n'

    one = tagged('<｜DSML｜invoke name="%s">\n', parameter, "</｜DSML｜invoke>\n")
    return lambda calls: f"<｜DSML｜{block}>\n{each(one, '')(calls)}</｜DSML｜{block}>"


def python(calls: Sequence[Call], between: str = ", ") -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return between.join(one(name, arguments) for name, arguments in calls)


function = tagged(
    "<function=%s>\n", lambda key, value: f"<parameter={key}>\n{bare(value)}\n</parameter>\n", "</function>\n"
)
seed = tagged("<function=%s>\n", lambda key, value: f"<parameter={key}>{bare(value)}</parameter>\n", "</function>\n")
invoke = tagged(
    '<invoke name="%s">\n', lambda key, value: f'<parameter name="{key}">{bare(value)}</parameter>\n', "</invoke>\n"
)
glm = tagged(
    "<tool_call>%s\n",
    lambda key, value: f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n",
    "</tool_call>",
)


def deepseek(one: Callable[[str, dict[str, Any]], str], between: str = "") -> Writer:
    return lambda calls: f"<｜tool▁calls▁begin｜>{each(one, between)(calls)}<｜tool▁calls▁end｜>"


WRITERS: dict[str, Writer] = {
    "hermes": each(lambda name, arguments: f"<tool_call>\n{objects()(name, arguments)}\n</tool_call>"),
    "mistral_json": lambda calls: f"[TOOL_CALLS][{each(objects(), ', ')(calls)}]",
    "mistral": each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}", ""),
    "granite": lambda calls: f"<|tool_call|>[{each(objects(), ', ')(calls)}]",
    "hunyuan": lambda calls: f"<tool_calls>[{each(objects(), ', ')(calls)}]</tool_calls>",
    "nemotron": lambda calls: f"<TOOLCALL>[{each(objects(), ', ')(calls)}]</TOOLCALL>",
    "llama3_json": each(objects("parameters"), "; "),
    "pythonic": lambda calls: f"[{python(calls)}]",
    "lfm2": lambda calls: f"<|tool_call_start|>[{python(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>{python(calls, chr(10))}</function_calls>",
    "qwen3_coder": each(lambda name, arguments: f"<tool_call>\n{function(name, arguments)}</tool_call>"),
    "seed_oss": each(lambda name, arguments: f"<seed:tool_call>\n{seed(name, arguments)}</seed:tool_call>"),
    "glm45": each(glm),
    "minimax_m2": lambda calls: f"<minimax:tool_call>\n{each(invoke, '')(calls)}</minimax:tool_call>",
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v31": deepseek(
        lambda name, arguments: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(arguments)}<｜tool▁call▁end｜>"
    ),
    "deepseek_v3": deepseek(
        lambda name, arguments: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(arguments)}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{compact(arguments)}"
            "<|tool_call_end|>"
            for number, (name, arguments) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "harmony": each(
        lambda name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(arguments)}<|call|>"
        ),
        "<|start|>assistant",
    ),
}
# Formats whose calls are the whole answer, and those that may have text in front.
UNMARKED = frozenset({"llama3_json", "pythonic"})
REASONERS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite32": ("Here is my thought process:", "Here is my response:"),
    "think": ("<think>\n", "\n</think>\n\n"),
}


def with_text(form: str, text: str, calls: str) -> str:
    """Text for the user, and then calls."""
    if form == "harmony":
        return f"<|channel|>final<|message|>{text}<|end|><|start|>assistant{calls}" if text else calls
    return text + calls
