"""What the documentation names is there: commands with their options, tests, files, targets of make, links.

Pages that keep what was measured long ago (`HISTORY`) may name what is gone, and so may lines that name a commit.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from antiphon.cli import main as cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = ("log.md", "results-history.md", "m2n-measurements.md")
CURRENT = [page for page in PAGES if page.name not in HISTORY]
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PARTS = re.compile(r"\s(?:&&|\|\||\||;|&)(?:\s|$)")
OF_A_COMMIT = re.compile(r"\bcommit [0-9a-f]{7}\b")
LEFT_OUT = re.compile(r"…|\[URL\]|\$\(\w+\)")


def blocks_and_lines(page: Path) -> Iterator[tuple[int, bool, str]]:
    """(number of its line, whether it stands in a block, text); a line of a block that goes on is one with the next."""
    in_block, begun, first = False, "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            in_block, begun = not in_block, ""
            continue
        begun, first = (f"{begun} {line.strip()}", first) if begun else (line, number)
        indented = begun.startswith("    ")
        if (in_block or indented) and begun.endswith("\\"):
            begun = begun[:-1]
            continue
        yield first, in_block or indented, begun
        begun = ""


def shell_commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Everything that a reader may type, as words."""
    for number, in_block, text in blocks_and_lines(page):
        if OF_A_COMMIT.search(text):
            continue
        for written in [text] if in_block else INLINE.findall(text):
            for part in PARTS.split(LEFT_OUT.sub("", written).strip().removeprefix("$ ")):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # prose
                    continue
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    del words[0]
                if words:
                    yield number, words


def commands_of(program: str) -> list[Any]:
    """Those in all pages that begin with `program`, each with its place for the test's name."""
    return [
        pytest.param(words, id=f"{page.name}:{number}")
        for page in CURRENT
        for number, words in shell_commands(page)
        if Path(words[0]).name == program
    ]


@cache
def command_named(names: tuple[str, ...]) -> tuple[Any, Any]:
    if not names:
        root = typer.main.get_command(cli.app)
        return root, root.context_class(root, info_name="antiphon")
    group, above = command_named(names[:-1])
    found = group.get_command(above, names[-1])
    assert found is not None, f"antiphon {' '.join(names)} is no command"
    return found, found.context_class(found, info_name=names[-1], parent=above)


@pytest.mark.parametrize("words", commands_of("antiphon"))
def test_commands_and_their_options_exist(words: list[str]) -> None:
    names: tuple[str, ...] = ()
    arguments = words[1:]
    while arguments and hasattr(command_named(names)[0], "get_command") and not arguments[0].startswith("-"):
        names = (*names, arguments.pop(0))
    command, context = command_named(names)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--debug", *context.help_option_names}
    unknown = {word.partition("=")[0] for word in arguments if re.match("--[a-z]", word)} - known
    assert not unknown, f"antiphon {' '.join(names)} has no {', '.join(sorted(unknown))}"
    if arguments and not arguments[0].startswith("-"):  # all of a command, not the mention of an option
        needed = {parameter.opts[0] for parameter in command.params if parameter.required}
        missing = {name for name in needed if name.startswith("-")} - set(arguments)
        assert not missing, f"antiphon {' '.join(names)} needs {', '.join(sorted(missing))}"


@pytest.mark.parametrize("words", [*commands_of("pytest"), *commands_of("python"), *commands_of("torchrun")])
def test_files_that_are_run_exist(words: list[str]) -> None:
    for word in words[1:]:
        file, _, name = word.partition("::")
        if re.match(r"(tests|benchmarks|scripts|examples)/", file):
            assert (ROOT / file).exists(), file
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), word


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [each for each in [*commands_of("pytest"), *commands_of("python")] if "-k" in each.values[0]]
)
def test_a_choice_of_tests_is_not_empty(words: list[str]) -> None:
    chosen = words[words.index("pytest") if "pytest" in words else 0 :]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", *chosen[1:]]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode == 0


@cache
def source_files() -> frozenset[str]:
    """Each with every end of its path: `cpu.py`, `kernels/cpu.py`, `antiphon/kernels/cpu.py`."""
    folders = ("antiphon", "benchmarks", "csrc", "examples", "scripts", "tests")
    parts = [file.relative_to(ROOT).parts for folder in folders for file in (ROOT / folder).rglob("*.*")]
    return frozenset("/".join(path[first:]) for path in parts for first in range(len(path)))


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    for number, in_block, text in blocks_and_lines(page):
        if not in_block and not OF_A_COMMIT.search(text):
            named = [word for code in INLINE.findall(text) for word in re.findall(r"[\w/]+\.(?:py|h|cpp)\b", code)]
            missing = set(named) - source_files() - {"llama.cpp"}
            assert not missing, f"{page.name}:{number}"


@pytest.mark.parametrize("words", commands_of("make"))
def test_targets_of_make_exist(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    assert not set(wanted) - set(targets)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for number, in_block, text in blocks_and_lines(page):
        for target in [] if in_block else LINK.findall(text):
            if re.match("[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}:{number}: {target}"
            assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page.name}:{number}: {target}"
