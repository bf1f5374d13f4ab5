"""`antiphon generate` as users run it: a process of its own, workers and all; one of them a program, others forked."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serve.fork_server import PROGRAMS

ROOT = Path(__file__).parents[2]
APART = ("--layout", "disaggregated")


def generate(checkpoint: Path, *options: str, run: Callable[..., Any] = PROGRAMS.run) -> str:
    command = [sys.executable, "-m", "antiphon.cli.main", "generate", str(checkpoint), *options]
    ended = run([*command, "--dtype", "float32"], cwd=ROOT, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


def as_json(checkpoint: Path, *options: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(generate(checkpoint, *options, "--json", "-"))
    return result


@pytest.fixture(scope="module")
def result(checkpoint: Path) -> dict[str, Any]:
    return as_json(checkpoint, *APART, "--prompt", "bada do", "--max-tokens", "12", "--logprobs", "2")


def test_json_holds_tokens_text_and_alternatives(result: dict[str, Any]) -> None:
    assert set(result) == {"token_ids", "text", "finish_reason", "logprobs"}
    assert len(result["token_ids"]) == len(result["logprobs"]) == 12
    assert result["finish_reason"] == "length"
    for token_id, entry in zip(result["token_ids"], result["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top"][0][0]
        assert entry["logprob"] == entry["top"][0][1] < 0
        assert len(entry["top"]) == 2


def test_text_is_printed_as_it_comes_and_the_same_in_both_layouts(
    checkpoint: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    timeline = tmp_path / "trace.json"
    options = ("--prompt", "bada do", "--max-tokens", "12", "--timeline", str(timeline))
    printed = generate(checkpoint, *options, run=partial(subprocess.run, capture_output=True, check=False))
    assert printed.startswith(result["text"] + "\n")
    assert "steps took" in printed
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} == {"M", "X"}


def test_token_ids_need_no_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.glob("*"):
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    printed = generate(tmp_path, *APART, "--token-ids", "5,6,7", "--max-tokens", "6", "--logprobs", "1")
    ids, _, table = printed.partition("\n")
    assert len(ids.split()) == 6
    assert all(0 <= int(token) < 512 for token in ids.split())
    assert table.splitlines()[0].split() == ["token", "logprob", "alternatives"]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ids.split()


def test_a_seed_repeats_and_a_file_takes_the_json(checkpoint: Path, tmp_path: Path) -> None:
    sampled = ("--prompt", "bada", "--temperature", "1.5", "--max-tokens", "10", "--seed", "4")
    target = tmp_path / "result.json"
    printed = generate(checkpoint, *sampled, "--json", str(target))
    written = json.loads(target.read_text())
    assert printed == written["text"] + "\n"
    assert as_json(checkpoint, *sampled, *APART)["token_ids"] == written["token_ids"]


def test_a_model_of_the_hubs_cache_beyond_its_context(checkpoint: Path, result: dict[str, Any], tmp_path: Path) -> None:
    """Its folder, other weights beside its own, a key that is missing, a scaling that changes nothing, and a context
    longer than the model's: the same tokens, and a line for each."""
    snapshot = tmp_path / "models--org--model" / "snapshots" / "a1"
    shutil.copytree(checkpoint, snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    del config["decoder_sparse_step"]
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "adapter_model.safetensors").write_bytes(b"")
    command = [sys.executable, "-m", "antiphon.cli.main", "generate", str(tmp_path / "models--org--model")]
    options = [
        "--prompt",
        "bada do",
        "--max-tokens",
        "12",
        "--json",
        "-",
        "--max-model-len",
        "9000",
        "--dtype",
        "float32",
    ]
    scaling = ["--rope-scaling", json.dumps({"rope_type": "linear", "factor": 1.0})]
    ended = PROGRAMS.run([*command, *options, *scaling], cwd=ROOT, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["token_ids"] == result["token_ids"]
    assert "--max-model-len 9000 is beyond the 8192 positions" in ended.stderr
    assert "config.json does not say decoder_sparse_step: taken from the defaults of qwen3_moe" in ended.stderr
    assert f"not used, beside the weights in {snapshot}: adapter_model.safetensors" in ended.stderr


def test_a_text_ends_at_the_tokenizers_own_token(checkpoint: Path, result: dict[str, Any], tmp_path: Path) -> None:
    """`config.json` names another, and there is no `generation_config.json`."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ending = result["token_ids"][5]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    texts = {number: text for text, number in vocabulary.items()}
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": texts[ending]}))
    command = [sys.executable, "-m", "antiphon.cli.main", "generate", str(folder), "--prompt", "bada do", "--json", "-"]
    ended = PROGRAMS.run([*command, "--max-tokens", "12", "--dtype", "float32"], cwd=ROOT, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["finish_reason"], found["token_ids"]) == ("stop", result["token_ids"][:6])
    assert f"a text ends at token {ending} (" in ended.stderr
