"""Commands given to an engine's own argument parser, read from its package without installing or building it.

    python benchmarks/engine_parser.py vllm FOLDER < commands.json

FOLDER has the Python files of a wheel; standard input a list of lists of arguments. Prints a list: null for a command
that parses, else what the parser says.

The packages that the engine imports and that are missing here (its kernels, transformers, ray) are replaced by empty
ones: building a parser calls none of them. Only imports by the engine's own files are, so other packages still see
what is really installed. Rejected: installing the engine, which takes gigabytes and a GPU's libraries.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class AnyThing(type):
    """A class every attribute of which is a class like it, and which can be called, subscripted and combined."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return any_thing(name)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def any_thing(name: str) -> AnyThing:
    """A class that takes any arguments and that pydantic takes for a field's type."""
    members = {
        "__init__": lambda self, *args, **words: None,
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: {"type": "any"}),
    }
    return AnyThing(name, (), members)


class EmptyModule(types.ModuleType):
    """A module that has whatever is asked of it."""

    __path__: list[str] = []  # noqa: RUF012 - import reads it

    def __getattr__(self, name: str) -> Any:
        value = AnyThing.__getattr__(AnyThing, name)
        setattr(self, name, value)
        return value


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nothing else finds, for the engine's own files."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.replaced: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        root, importer = name.partition(".")[0], _importer()
        if root not in self.replaced and importer.partition(".")[0] != self.engine:
            return None
        if importer.partition(".")[2].startswith("platforms"):
            return None  # there it asks what devices this machine has
        if root == self.engine and not name.rpartition(".")[2].startswith("_"):
            return None  # a compiled part of it has a name with an underscore
        self.replaced.add(root)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _importer() -> str:
    """The module whose import statement is being carried out."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("importlib", "_frozen_importlib")) and name != __name__:
            return str(name)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def vllm_parser() -> argparse.ArgumentParser:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # it would look for devices, of which a parser needs none
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {"vllm": vllm_parser, "sglang": sglang_parser}


def refused(parser: argparse.ArgumentParser, arguments: list[str]) -> str | None:
    """What the parser says against these arguments."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(arguments)
    except SystemExit as stopped:
        if stopped.code:
            return said.getvalue().strip().splitlines()[-1]
    return None


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    commands = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # engines log while they are imported
    sys.path.insert(0, str(folder))
    sys.meta_path.append(MissingPackages(engine))
    parser = PARSERS[engine]()
    json.dump([refused(parser, command) for command in commands], answer)


if __name__ == "__main__":
    main()
