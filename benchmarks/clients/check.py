"""Run stock clients, unchanged, against a server of ours: benchmarks, an evaluation harness, two libraries.

Usage: `python benchmarks/clients_check.py [--clients NAME,...] [--json FILE]`.

1. every client is installed in an environment of its own under .clients (vLLM's is .peers/vllm, which `make peers`
   builds, too); one that cannot be installed is named with the reason and skipped
2. `antiphon serve` starts on a tiny random model whose chat template reads tools, attention and experts apart
3. each client does its usual work; its own report is read, and must say that nothing failed
4. a table; exit code 1 if a client failed

Nothing is downloaded but packages: models, tokenizers and data are local, and hubs are switched off.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .runs import CLIENTS, ROOT, RUN_TIMEOUT_S, TORCH, CheckError, Client, ServerTarget, read_json, run

INSTALL_TIMEOUT_S = 3600.0
START_TIMEOUT_S = 180.0
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# 'tool' #}"
)


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """What a client did: "passed", "failed: ..." or "skipped: ..."."""

    client: str
    version: str
    ran: str
    result: str
    duration_s: float


def install(client: Client) -> str:
    """Make the client's environment if it is not complete; its version. `CheckError` when pip cannot."""
    python = client.environment / "bin" / "python"
    if client.name == "vllm":
        run(["bash", ROOT / "benchmarks" / "peers.sh"], INSTALL_TIMEOUT_S)
        return version_in(python, client.distribution)
    stamp = client.environment / f".complete-{'-'.join(client.requirements).replace('==', '-')}"
    if not stamp.exists():
        print(f"{client.name}: installing {' '.join(client.requirements)} in {client.environment}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", client.environment], INSTALL_TIMEOUT_S)
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        if TORCH in client.requirements:  # first and alone, so that the flags choose its build
            run([*pip, *os.environ.get("TORCH_FLAGS", "").split(), TORCH], INSTALL_TIMEOUT_S)
        run([*pip, *client.requirements], INSTALL_TIMEOUT_S)
        stamp.touch()
    return version_in(python, client.distribution)


def version_in(python: Path, distribution: str) -> str:
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    return run([python, "-c", code, distribution], RUN_TIMEOUT_S).strip()


def make_model(folder: Path) -> Path:
    """The tiny random model, with a chat template that reads tools."""
    run([sys.executable, ROOT / "benchmarks" / "make_model.py", "tiny", folder], RUN_TIMEOUT_S)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(read_json(path) | {"chat_template": TEMPLATE}), encoding="utf-8")
    return folder


@contextlib.contextmanager
def server(folder: Path) -> Iterator[ServerTarget]:
    """`antiphon serve` on the tiny model, until the block ends."""
    model, ready, log_path = make_model(folder / "tiny"), folder / "ready.json", folder / "server.log"
    command = [sys.executable, "-m", "antiphon.cli.main", "serve", str(model), "--layout", "disaggregated"]
    command += ["--port", "0", "--kv-bytes", "64MiB", "--json", str(ready)]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise CheckError(f"the server did not start: {log_path.read_text(errors='replace')[-300:]}")
                time.sleep(0.1)  # nothing but the file tells that the server is ready
            facts = json.loads(ready.read_text())
            yield ServerTarget(facts["url"], facts["model"], model, folder)
        finally:
            process.kill()  # its workers notice and end by themselves


def check_client(client: Client, target: ServerTarget) -> Iterator[ClientRow]:
    """One row for each thing the client does; one row when it cannot be installed."""
    try:
        version = install(client)
    except CheckError as error:
        yield ClientRow(client=client.name, version="", ran="", result=f"skipped: {error}", duration_s=0.0)
        return
    for name, check in client.runs.items():
        started_s = time.monotonic()
        try:
            check(client.environment, target)
            result = "passed"
        except (CheckError, KeyError, ValueError) as error:
            result = f"failed: {error!r}" if not isinstance(error, CheckError) else f"failed: {error}"
        elapsed_s = time.monotonic() - started_s
        yield ClientRow(client=client.name, version=version, ran=name, result=result, duration_s=elapsed_s)


def table(rows: list[ClientRow]) -> str:
    lines = ["| client | version | ran | result | seconds |", "|---|---|---|---|---|"]
    lines += [f"| {r.client} | {r.version} | {r.ran} | {r.result} | {r.duration_s:.0f} |" for r in rows]
    return "\n".join(lines)


def exit_code(rows: list[ClientRow]) -> int:
    """1 when a client failed; one that is skipped is no failure."""
    return int(any(row.result.startswith("failed") for row in rows))


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
    rows: list[ClientRow] = []
    try:
        with tempfile.TemporaryDirectory(prefix="antiphon-clients-") as name, server(Path(name)) as target:
            for client in clients:
                for row in check_client(client, target):
                    print(f"{row.client} {row.version} {row.ran}: {row.result}", flush=True)
                    rows.append(row)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(rows)}")
    if options.json is not None:
        report = {"bench": "clients_check", "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return exit_code(rows)
