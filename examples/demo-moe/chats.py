"""Writes short chats about the functions of the standard library, for `antiphon train examples/demo-moe/train.toml`,
and chats with calls of tools, for `calls.toml`.

    python examples/demo-moe/chats.py out/demo-moe-chats.jsonl out/demo-moe-calls.jsonl

Each of the first answers "Complete this Python code" or "Write a Python function named …" with a function of the files
that are trained on. Together they are 3% of these files' characters. Each of the second asks, calls, gets a result and
answers, as `chat_template.jinja` or `tags.jinja` writes it: two formats of calls, of which the prompt names one.
"""

import ast
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from antiphon.train.config import read_config
from antiphon.train.documents import find_files
from antiphon.train.encoder import ChatTexts

_SHARE = 0.03
_LENGTHS = range(80, 901)
_NUM_CALLS = 4000
_FORMATS = ("chat_template.jinja", "tags.jinja")
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class DemoTool:
    """A tool that chats call: what may be asked, `result` of its arguments, and the answer. `draw` makes arguments."""

    name: str
    description: str
    types: dict[str, str]
    questions: tuple[str, ...]
    answer: str
    draw: Callable[[random.Random], dict[str, Any]]
    result: Callable[[dict[str, Any], random.Random], str]

    @property
    def described(self) -> dict[str, Any]:
        """As requests describe it."""
        properties = {key: {"type": kind} for key, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.types)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_MODULES = ("abc", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "copy", "csv", "dis", "enum", "glob")
_MODULES += ("gzip", "heapq", "inspect", "io", "json", "locale", "mailbox", "numbers", "os", "pathlib", "pickle", "ssl")
_MODULES += (
    "platform",
    "queue",
    "random",
    "re",
    "runpy",
    "shelve",
    "shlex",
    "socket",
    "statistics",
    "string",
    "struct",
)
_MODULES += ("tempfile", "textwrap", "threading", "token", "trace", "types", "uuid", "wave", "weakref", "zipfile")
_CITIES = ("Oslo", "Rome", "Paris", "London", "Berlin", "Madrid", "Vienna", "Dublin", "Athens", "Lisbon", "Prague")
TOOLS = (
    DemoTool(
        "add",
        "Add two numbers.",
        {"a": "integer", "b": "integer"},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "What is {a} + {b}?"),
        "The sum is {result}.",
        lambda chance: {"a": chance.randint(1, 99), "b": chance.randint(1, 99)},
        lambda arguments, chance: str(arguments["a"] + arguments["b"]),
    ),
    DemoTool(
        "count_lines",
        "Count the lines of a file.",
        {"path": "string"},
        ("How many lines has {path}?", "Count the lines of {path}.", "How long is {path}?"),
        "{path} has {result} lines.",
        lambda chance: {"path": f"{chance.choice(_MODULES)}.py"},
        lambda arguments, chance: str(chance.randint(10, 999)),
    ),
    DemoTool(
        "weather",
        "The weather of a city.",
        {"city": "string"},
        ("How is the weather in {city}?", "What is the weather of {city}?", "Is it warm in {city}?"),
        "In {city} it is {result}.",
        lambda chance: {"city": chance.choice(_CITIES)},
        lambda arguments, chance: f"{chance.randint(1, 35)} C and {chance.choice(['sunny', 'cloudy', 'dry', 'wet'])}",
    ),
)


def functions_of(text: str) -> Iterator[tuple[str, str]]:
    """(name, source) of the short functions of a file, methods moved to column 0."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            indent = node.col_offset
            body = lines[node.lineno - 1 : node.end_lineno]
            source = "\n".join(line[indent:] if not line[:indent].strip() else line for line in body)
            if len(source) in _LENGTHS:
                yield node.name, source


def chat_about(name: str, source: str, chance: random.Random) -> str:
    """Two turns, as the model's chat template writes them."""
    lines = source.split("\n")
    given = chance.randint(1, max(1, len(lines) // 2))
    if chance.random() < 0.7:
        question = "Complete this Python code:\n" + "\n".join(lines[:given])
        answer = "\n".join(lines[given:])
    else:
        question, answer = f"Write a Python function named {name}.", source
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def chat_with_call(chance: random.Random) -> dict[str, Any]:
    """A question, the call it needs, its result and the answer, with one to three tools on offer."""
    tool = chance.choice(TOOLS)
    arguments = tool.draw(chance)
    offered = [tool, *(other for other in TOOLS if other is not tool and chance.random() < 0.25)]
    chance.shuffle(offered)
    result = tool.result(arguments, chance)
    call = {"id": "call_0", "type": "function", "function": {"name": tool.name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": chance.choice(tool.questions).format(**arguments)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        {"role": "assistant", "content": tool.answer.format(**arguments, result=result)},
    ]
    return {"messages": messages, "tools": [each.described for each in offered]}


def write_calls(file: Path) -> None:
    """Records of a prompt and an answer: one for each of the two turns of the model."""
    formats = [ChatTexts((_FOLDER / name).read_text(encoding="utf-8"), {}, name) for name in _FORMATS]
    chance = random.Random(1)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(_NUM_CALLS):
            (learned,) = formats[number % len(formats)].of(chat_with_call(chance), "a chat with calls")
            for begin, end in learned.spans:
                record = {"prompt": learned.text[:begin], "answer": learned.text[begin:end]}
                lines.write(json.dumps(record) + "\n")


def write_functions(file: Path) -> None:
    """Chats about functions, until they are their share."""
    data = read_config(Path(__file__).with_name("train.toml")).data
    sources = [file.read_text(errors="replace") for file in find_files(replace(data, files=data.files[:1]))]
    functions = [each for text in sources for each in functions_of(text)]
    chance, left = random.Random(0), _SHARE * sum(map(len, sources))
    chance.shuffle(functions)
    with file.open("w", encoding="utf-8") as lines:
        for name, source in functions:
            text = chat_about(name, source, chance)
            lines.write(json.dumps({"text": text}) + "\n")
            left -= len(text)
            if left < 0:
                break


def main() -> None:
    """Write the files that are named on the command line: of functions, and of calls if there is a second."""
    for write, name in zip((write_functions, write_calls), sys.argv[1:], strict=False):
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)


if __name__ == "__main__":
    main()
