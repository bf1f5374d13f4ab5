"""Stands in the place of the peer's `tests/utils.py`: starts `antiphon serve` where its tests start their own server.

The peer's options become ours where there is one, are dropped where they only concern its engine, and fail the tests
where they ask for a feature that this server does not have. `PEER_SUITE` names a folder with `checkpoint/`, `project`
and the servers' logs. Other helpers of the peer's file are mocks: tests that need them start no server.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import MagicMock

import anthropic
import openai
import pytest

FOLDER = Path(os.environ["PEER_SUITE"])
PYTHON = os.environ["PEER_SUITE_PYTHON"]
CHECKPOINT = FOLDER / "checkpoint"
START_TIMEOUT_S, STOP_TIMEOUT_S = 240.0, 30.0
RENAMED = {
    "--served-model-name": "--served-model-name",
    "--reasoning-parser": "--reasoning-parser",
    "--tool-call-parser": "--tool-parser",
    "--default-chat-template-kwargs": "--chat-template-kwargs",
    "--root-path": "--root-path",
}
FLAGS = {
    "--return-tokens-as-token-ids": "--return-tokens-as-token-ids",
    "--enable-force-include-usage": "--force-include-usage",
}
NOT_HERE = {
    "--uds": "listens on TCP alone",
    "--watermark-config": "no watermarks",
    "--skip-tokenizer-init": "always has a tokenizer",
}
LEFT_OUT = {"--enable-prompt-embeds": "embeddings", "--load-format": "internals"}
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}


def options_of(arguments: list[Any]) -> dict[str, list[str]]:
    """Options with their words; written as `--name value`, `--name=value` or one string of both."""
    words: list[str] = []
    for argument in map(str, arguments):
        is_option = argument.startswith("--")
        separator = next((mark for mark in ("=", " ") if is_option and mark in argument), None)
        words += argument.split(separator, 1) if separator else [argument]
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.replace("_", "-")
            options[name] = []
        elif name:
            options[name].append(word)
    return options


class RemoteVLLMServer:
    """One running server, as the peer's class of this name; `with` stops it at the end."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: list[Any], *, env_dict: dict[str, str] | None = None, **_: Any) -> None:
        options = options_of(arguments)
        if "VLLM_API_KEY" in (env_dict or {}):
            options["--api-key"] = [env_dict["VLLM_API_KEY"]]
        for name, reason in LEFT_OUT.items():
            if name in options:
                pytest.skip(f"left out: {reason}: {name}")
        for name, reason in NOT_HERE.items():
            if name in options:
                pytest.fail(f"{name}: {reason}")
        command = [PYTHON, "-m", "antiphon.cli.main", "serve", str(CHECKPOINT), "--port", "0", "--threads", "1"]
        command += ["--kv-bytes", "256MiB", "--dtype", "float32"]
        options.setdefault("--served-model-name", [model])
        for name, ours in RENAMED.items():
            if name in options:
                command += [ours, ",".join(options[name])]
        command += [ours for name, ours in FLAGS.items() if name in options]
        length = int(options.get("--max-model-len", ["16384"])[0])
        command += ["--max-model-len", str(max(16384, length))]  # its tokens are shorter than the peer's
        if "--chat-template" not in options and "--reasoning-parser" in options:
            command += ["--chat-template", str(FOLDER / "thinking.jinja")]
        if "--chat-template" in options:
            template = options["--chat-template"][0]
            path = self._file("template.jinja", template if "{" in template else Path(template).read_text("utf-8"))
            command += ["--chat-template", path]
        if "--api-key" in options:
            command += ["--api-key-file", self._file("keys", "\n".join(options["--api-key"]) + "\n")]
        self.host, self.uds = "127.0.0.1", None
        self._start(command)

    @staticmethod
    def _file(name: str, text: str) -> str:
        path = FOLDER / f"{time.monotonic_ns()}-{name}"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        return str(path)

    def _start(self, command: list[str]) -> None:
        stem = FOLDER / f"server-{time.monotonic_ns()}"
        ready, log = stem.with_suffix(".json"), stem.with_suffix(".log")
        with log.open("wb") as stream:
            self.proc = subprocess.Popen([*command, "--json", str(ready)], stdout=stream, stderr=stream, cwd=FOLDER)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if self.proc.poll() is not None or time.monotonic() > deadline_s:
                self.proc.kill()
                raise RuntimeError(f"the server did not start: {log.read_text('utf-8', 'replace')[-500:]}")
            time.sleep(0.1)
        self.port = int(json.loads(ready.read_text("utf-8"))["url"].rsplit(":", 1)[1])

    def __enter__(self) -> "RemoteVLLMServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._openai(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._openai(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def _openai(self, options: dict[str, Any]) -> dict[str, Any]:
        ours = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return {**ours, **options}


RemoteOpenAIServer = RemoteOpenAIServerCustom = RemoteLaunchRenderServer = RemoteVLLMServer


def unchanged(*_: Any, **__: Any) -> Any:
    """A decorator of the peer's that only chooses where a test runs."""
    return lambda test: test


create_new_process_for_each_test = multi_gpu_test = large_gpu_test = unchanged


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
