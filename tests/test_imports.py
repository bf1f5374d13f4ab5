"""The house rules that sources show: imports point down, a class name stands for one thing. Nothing is imported."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "antiphon"

# Lowest first. Packages of one floor do not import each other.
FLOORS = (
    {"base", "_native"},
    {"specs"},
    {"cost", "placement", "kernels"},
    {"planner", "comm"},
    {"models"},
    {"serve", "train"},
    {"sim"},
    {"bench", "report", "reproduce"},
    {"cli"},
)
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}

# Plain Python, so that the simulator can run it and tests take microseconds. Holds for all they import of ours, too.
FREE_OF = {
    "antiphon.serve.policy": {"torch", "numpy"},
    "antiphon.comm.micro_ops": {"torch", "numpy"},
    "antiphon.specs": {"torch", "numpy"},
    "antiphon.cost": {"torch"},
    "antiphon.placement": {"torch"},
    "antiphon.planner": {"torch"},
    "antiphon.models.config": {"torch", "numpy"},
}
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

# Files that may import our own packages inside functions, and why.
MAY_IMPORT_LATE = {"antiphon.cli.main": "a command's module is loaded when the command runs, so that --help is quick"}


@dataclass(frozen=True)
class Import:
    """`source` imports `target` in `line`; `late` inside a function."""

    source: str
    target: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of ours by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("antiphon", *path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


def imports_of(name: str, tree: ast.Module, is_package: bool) -> Iterator[Import]:
    """All import statements of a module, relative ones made absolute."""
    late = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, id(node) in late)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield Import(name, f"{base}.{alias.name}", node.lineno, id(node) in late)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        found
        for name, (path, tree) in modules().items()
        for found in imports_of(name, tree, path.name == "__init__.py")
    )


def package_of(module: str) -> str | None:
    """``antiphon.serve.api.server`` -> ``serve``; None for the top package itself and for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "antiphon" and len(parts) > 1 and parts[1] in FLOOR_OF else None


def points_up(found: Import) -> bool:
    source, target = package_of(found.source), package_of(found.target)
    if target is None or source == target:
        return False
    return source is None or FLOOR_OF[target] >= FLOOR_OF[source]


def reachable(start: str) -> set[str]:
    """Modules that are loaded when `start` and all below it are, the packages above each of them included."""
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        graph.setdefault(found.source, set()).update(_prefixes(found.target) & modules().keys())
    waiting = [name for name in modules() if name == start or name.startswith(start + ".")]
    seen: set[str] = set()
    while waiting:
        for name in (_prefixes(waiting.pop()) & modules().keys()) - seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return seen


def _prefixes(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[: length + 1]) for length in range(len(parts))}


def test_every_package_has_a_floor() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
    assert packages <= FLOOR_OF.keys(), "name the new package's floor in FLOORS"


def test_imports_point_down() -> None:
    assert [str(found) for found in all_imports() if points_up(found)] == []


@pytest.mark.parametrize("start", FREE_OF)
def test_plain_packages_stay_plain(start: str) -> None:
    loaded = reachable(start)
    heavy = [
        str(found)
        for found in all_imports()
        if found.source in loaded and not found.late and found.target.split(".")[0] in FREE_OF[start]
    ]
    assert heavy == []


def test_policy_loads_no_native_code() -> None:
    names = [name for name in modules() if name.startswith("antiphon.serve.policy")]
    program = f"import sys, {', '.join(names)}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert set(loaded.stdout.split()) & {"antiphon._m2n", "antiphon._native", "torch", "numpy"} == set()


def test_no_late_imports_of_our_own() -> None:
    late = [found for found in all_imports() if found.late and found.target.split(".")[0] == "antiphon"]
    assert [str(found) for found in late if found.source not in MAY_IMPORT_LATE] == []


def test_nothing_unpickles() -> None:
    """A pickle from a peer or a checkpoint runs its author's code; we read safetensors, JSON and msgpack."""
    assert [str(found) for found in all_imports() if found.target.split(".")[0] in PICKLERS] == []


def test_torch_load_reads_weights_only() -> None:
    unsafe = [
        f"{name}:{node.lineno}"
        for name, (_, tree) in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    ]
    assert unsafe == []


def test_a_class_name_stands_for_one_thing() -> None:
    owners: dict[str, list[str]] = {}
    for name, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(name)
    doubles = {name: where for name, where in owners.items() if len(where) > 1}
    assert doubles == {}, "rename the newer one: a reader looks classes up by name"


@pytest.mark.parametrize(
    ("module", "statement", "up"),
    [
        ("antiphon.specs.model", "from antiphon.base.errors import UserError", False),
        ("antiphon.specs.model", "from antiphon.specs import placement", False),
        ("antiphon.specs.model", "from antiphon.models import decoder", True),
        ("antiphon.cost.roofline", "import antiphon.placement", True),
        ("antiphon.serve.engine", "from antiphon.train import trainer", True),
        ("antiphon.serve.engine", "from .policy import scheduler", False),
        ("antiphon.serve.engine", "from ..cli import main", True),
        ("antiphon.serve.engine", "from .. import cli", True),
        ("antiphon.base.errors", "import torch", False),
        ("antiphon.cli.main", "from antiphon import __version__", False),
    ],
)
def test_the_rule_itself(module: str, statement: str, up: bool) -> None:
    assert [points_up(found) for found in imports_of(module, ast.parse(statement), is_package=False)] == [up]


def names_in(tree: ast.Module) -> set[str]:
    """What a module defines or imports at its top, also under a condition."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_what_scripts_import_of_ours_exists(folder: str) -> None:
    """No test runs most of them, and the type checker does not see them."""
    native = {"antiphon._native", "antiphon._m2n"}
    missing = []
    for path in sorted((ROOT.parent / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for found in imports_of(path.name, tree, is_package=False):
            owner, _, name = found.target.rpartition(".")
            if not found.target.startswith("antiphon.") or found.target in {*modules(), *native}:
                continue
            if owner not in native and (owner not in modules() or name not in names_in(modules()[owner][1])):
                missing.append(str(found))
    assert missing == []
