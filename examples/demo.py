"""The demonstration: serve the shipped model with attention and experts in separate processes, ask it something, stop.

    python examples/demo.py [--model DIR]

1. start `antiphon serve` with one attention worker, one expert worker and two micro-batches that take turns
2. show its processes
3. ask eight completions at once over HTTP, so that both micro-batches have work; print one of them as it streams
4. let the model call a tool and answer with its result
5. stop the server; it prints what the timeline says: who waited for whom, and what communication was not hidden

Everything has a time limit, and the server is gone when this ends, however it ends.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "demo-moe"
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
MAX_TOKENS = 96
SAMPLING = {"max_tokens": MAX_TOKENS, "temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1, "stream": True}
SHOWN_PROMPT = "class Stack:\n    def __init__(self):\n"
OTHER_PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef list_files(path):\n",
    "class Queue:\n    def put(self, item):\n",
    "def read_lines(path):\n    with open(path) as file:\n",
    "try:\n    import json\nexcept ImportError:\n",
    "def main():\n    parser = argparse.ArgumentParser(\n",
    "class TestCase:\n    def test_add(self):\n",
)


class DemoError(RuntimeError):
    """The demonstration cannot go on; the message is for people."""


@contextlib.contextmanager
def running_server(
    model: Path, folder: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """(process, what it said when it was ready). Killed at the end if it still runs."""
    ready = folder / "server.json"
    log_path = folder / "server.log"
    command = [sys.executable, "-m", "antiphon.cli.main", "serve", str(model), "--layout", "disaggregated"]
    command += [
        "--micro-batches",
        "2",
        "--port",
        "0",
        "--json",
        str(ready),
        "--timeline",
        str(folder / "timeline.json"),
        *options,
    ]
    print(f"$ antiphon serve {model.name} --layout disaggregated --micro-batches 2 --port 0", flush=True)
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            yield process, wait_until_ready(process, ready, log_path)
        finally:
            if process.poll() is None:
                process.kill()  # its workers notice and end by themselves


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log_path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None:
            raise DemoError(f"the server ended with {process.returncode}: {last_line(log_path)}")
        if time.monotonic() > deadline:
            raise DemoError(f"the server was not ready within {START_TIMEOUT_S:.0f} s: {last_line(log_path)}")
        time.sleep(0.05)
    facts: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
    return facts


def last_line(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def show_server(facts: dict[str, Any]) -> None:
    print(f"\n{facts['model']}: {facts['architecture']}, at {facts['url']}")
    processes = [{"name": "server", "pid": facts["pid"]}, *facts["workers"]]
    for process in processes:
        print(f"  process {process['pid']:>7}  {process['name']}")


def stream_completion(url: str, prompt: str, seed: int, show: bool) -> int:
    """Ask for one completion and print it as it comes if `show`; returns the number of tokens."""
    body = {"prompt": prompt, "seed": seed, **SAMPLING, "stream_options": {"include_usage": True}}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S, trust_env=False
    ) as response:
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {response.read().decode(errors='replace')}")
        num_tokens = 0
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoError(f"the server failed: {event['error']['message']}")
            if show and event["choices"]:
                print(event["choices"][0]["text"], end="", flush=True)
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return num_tokens


def ask(url: str) -> None:
    """All prompts at once; one is shown."""
    print(f"\nPOST /v1/completions, {1 + len(OTHER_PROMPTS)} at once; one of them:\n")
    print(SHOWN_PROMPT, end="", flush=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(OTHER_PROMPTS)) as pool:
        others = [
            pool.submit(stream_completion, url, prompt, seed, False) for seed, prompt in enumerate(OTHER_PROMPTS, 1)
        ]
        num_tokens = stream_completion(url, SHOWN_PROMPT, 0, True)
        num_tokens += sum(other.result(ANSWER_TIMEOUT_S) for other in others)
    elapsed_s = time.perf_counter() - started
    print(f"\n\n{num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.0f} tokens/s over all of them")


def use_tool(url: str, question: str = "What is 17 plus 25?") -> str:
    """An agent's loop, without a grammar: ask, call, result, answer; a line that says what happened."""
    tool: dict[str, Any] = {"name": "add", "description": "Add two numbers."}
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    tool["parameters"] = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    said = question
    for _ in range(2):
        body = {"messages": messages, "tools": [{"type": "function", "function": tool}], "temperature": 0}
        response = httpx.post(
            f"{url}/v1/chat/completions", json=body | {"max_tokens": 80}, timeout=ANSWER_TIMEOUT_S, trust_env=False
        )
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {response.text}")
        message = response.json()["choices"][0]["message"]
        if not message.get("tool_calls"):
            return f"{said} -> {message['content']}"
        call = message["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        result = str(sum(arguments.values()))
        said += f" -> {call['function']['name']}({', '.join(f'{k}={v}' for k, v in arguments.items())}) -> {result}"
        messages += [{"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": result}]
    raise DemoError("the model called a second time: run the demo on the shipped model")


def stop(process: subprocess.Popen[bytes], log_path: Path) -> None:
    """SIGTERM, as a service manager would; then pass on what the server says of its timeline."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server did not stop within {STOP_TIMEOUT_S:.0f} s") from None
    if code != 0:
        raise DemoError(f"the server ended with {code}: {last_line(log_path)}")
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("steps took")), len(lines))
    print("\nThe server has stopped. Its timeline:\n")
    print("\n".join(line.rstrip() for line in lines[first:] if not line.startswith("trace:")))


def demonstrate(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise DemoError(f"there is no model in {model}: check the repository out whole, or give --model DIR")
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-demo-") as name,
        running_server(model, Path(name)) as (
            process,
            facts,
        ),
    ):
        show_server(facts)
        ask(facts["url"])
        if model == MODEL:
            print(f"\nA tool, called without a grammar: {use_tool(facts['url'])}")
        stop(process, Path(name) / "server.log")


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the shipped model, ask it something, stop.")
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint folder (default: the shipped one)")
    try:
        demonstrate(parser.parse_args().model)
    except (DemoError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
