"""Laid beside the peer's tests: keeps those that start a server, and lets their files be imported without the peer.

A module of the peer becomes a mock, but for the few things that such tests use. A test that starts no server is one of
the peer's own code. Results go to `PEER_SUITE`/results.jsonl, one line a test.
"""

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

FOLDER = Path(os.environ["PEER_SUITE"])
LEFT_OUT: list[dict[str, Any]] = json.loads((FOLDER / "left_out.json").read_text("utf-8"))
LAUNCHERS = ("RemoteOpenAIServer", "RemoteVLLMServer", "RemoteLaunchRender")


class MockModule(types.ModuleType):
    """Any attribute is there: an exception, a class or a mock, by its name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = sys.modules.get(f"{self.__name__}.{name}")
        if value is None and name.endswith(("Error", "Exception")):
            value = type(name, (Exception,), {})
        elif value is None:
            value = type(name, (MagicMock,), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class PeerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the peer's modules, and those of its needs that no server's client has, as mocks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in ("vllm", "openai_harmony", "gpt_oss", "lm_eval", "torch", "pybase64"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = MockModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "vllm":
            module.__version__ = "0.0"
        elif module.__name__ == "vllm.tokenizers":
            from transformers import PreTrainedTokenizerFast

            module.get_tokenizer = lambda *_, **__: PreTrainedTokenizerFast.from_pretrained(FOLDER / "checkpoint")
        elif module.__name__ == "vllm.platforms":
            names = ("is_rocm", "is_xpu", "is_cuda", "is_cuda_alike", "supports_fp8")
            facts: dict[str, Any] = {name: (lambda: False) for name in names}
            module.current_platform = MagicMock(is_cpu=lambda: True, device_count=lambda: 0, **facts)
        elif module.__name__ == "vllm.config":
            size = json.loads((FOLDER / "checkpoint" / "config.json").read_text("utf-8"))["vocab_size"]
            module.ModelConfig = MagicMock(return_value=MagicMock(get_vocab_size=lambda: size))
        elif module.__name__ == "torch":
            module.iinfo = lambda kind: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)
        elif module.__name__ == "vllm.envs":
            module.VLLM_USE_RUST_FRONTEND = False


sys.meta_path.insert(0, PeerFinder())


def starts_server(item: Any) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    sources = (
        [definition[-1].func for definition in fixtures.name2fixturedefs.values() if definition] if fixtures else []
    )
    for function in (item.function, *sources):
        try:
            if any(f"{name}(" in inspect.getsource(function) for name in LAUNCHERS):
                return True
        except (OSError, TypeError):
            continue
    return False


def note(test: str, outcome: str, reason: str = "") -> None:
    with (FOLDER / "results.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def left_out(name: str) -> str | None:
    """Why this test is left out, by the list; its rows name parts of tests' names."""
    return next((row["reason"] for row in LEFT_OUT if any(part in f"{name}$" for part in row["tests"])), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    kept = []
    for item in items:
        reason = left_out(item.nodeid) or (None if starts_server(item) else "internals: it starts no server")
        if reason is None:
            kept.append(item)
        else:
            note(item.nodeid, "left out", reason)
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        reason = str(getattr(report, "wasxfail", "")) and "the peer expects its own server to fail too"
        if not reason:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        note(report.nodeid, "left out", reason.removeprefix("Skipped: ").removeprefix("left out: "))
    elif report.failed:
        last = str(report.longrepr).strip().splitlines()
        said = [line[2:].strip() for line in last if line.startswith("E ")]
        note(report.nodeid, "failed", f"{report.when}: {(said or last or [''])[0]}"[:400])
    elif report.when == "call":
        note(report.nodeid, "passed")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        said = str(report.longrepr).strip().splitlines()
        note(report.nodeid, "not collected", said[-1][:300] if said else "")
