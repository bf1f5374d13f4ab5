"""Writes short chats about the functions of the standard library, for `antiphon train examples/demo-moe/train.toml`.

    python examples/demo-moe/chats.py out/demo-moe-chats.jsonl

Each answers "Complete this Python code" or "Write a Python function named …" with a function of the files that are
trained on. Together they are 3% of these files' characters.
"""

import ast
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from antiphon.train.config import read_config
from antiphon.train.documents import find_files

_SHARE = 0.03
_LENGTHS = range(80, 901)


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


def main() -> None:
    """Write the file that is named on the command line."""
    data = read_config(Path(__file__).with_name("train.toml")).data
    sources = [file.read_text(errors="replace") for file in find_files(replace(data, files=data.files[:1]))]
    functions = [each for text in sources for each in functions_of(text)]
    chance, left = random.Random(0), _SHARE * sum(map(len, sources))
    chance.shuffle(functions)
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for name, source in functions:
            text = chat_about(name, source, chance)
            lines.write(json.dumps({"text": text}) + "\n")
            left -= len(text)
            if left < 0:
                break


main()
