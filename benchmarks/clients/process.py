"""Runs one command of a client, with hubs and reports home switched off, and says in one line why it failed."""

import json
import os
import subprocess
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
