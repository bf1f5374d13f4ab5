"""Checkpoints that are wrong, hostile or damaged, through every command that reads one: one line, exit code 1, soon.

What can be wrong with each file, and the words of each refusal, are tested in `tests/models`.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.test_errors import Cli

READERS: list[tuple[str, ...]] = [
    ("serve", "MODEL", "--port", "0"),
    ("generate", "MODEL", "--token-ids", "1"),
    ("generate", "MODEL", "--prompt", "a"),
    ("plan", "MODEL", "--cluster", "laptop"),
    ("profile", "MODEL", "--quick"),
    ("bench", "serve", "MODEL", "--peers", ""),
]
LOADERS = [command for command in READERS if command[0] != "plan"]
SHARD = "model-00002-of-00003.safetensors"
COPY = "copy the file from the model's publisher"

pytestmark = pytest.mark.timeout(120)  # a refusal comes before the work, which would take longer or for ever


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capfd)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refuses(antiphon: Cli, message: str, command: tuple[str, ...], model: Path) -> None:
    antiphon.refuses(1, re.escape(message), *(str(model) if part == "MODEL" else part for part in command))


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("key", "most"),
    [("num_hidden_layers", "10,000"), ("num_experts", "100,000"), ("vocab_size", "16,777,216")],
)
def test_a_billion(antiphon: Cli, folder: Path, command: tuple[str, ...], key: str, most: str) -> None:
    edit_config(folder, **{key: 10**9})
    refuses(
        antiphon,
        f"config.json: {key} = 1000000000: at most {most} is supported, the weights have 2 layers, 8 experts, "
        f"512 tokens, a hidden size of 64: {COPY}",
        command,
        folder,
    )


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "num_experts_per_tok"])
def test_a_billion_in_a_lone_config(antiphon: Cli, checkpoint: Path, tmp_path: Path, key: str) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    edit_config(tmp_path, **{key: 10**9})
    most = "10,000" if key == "num_hidden_layers" else "100,000"
    message = f"config.json: {key} = 1000000000: at most {most} is supported: {COPY}"
    refuses(antiphon, message, ("plan", "MODEL", "--cluster", "laptop"), tmp_path / "config.json")


@pytest.mark.parametrize("command", LOADERS)
@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("num_hidden_layers", 10_000, "10000 layers, but the weights in {} have 2"),
        ("num_experts", 100_000, "100000 experts, but layer 0 of the weights in {} has 8"),
    ],
)
def test_more_than_the_weights_have(
    antiphon: Cli, folder: Path, command: tuple[str, ...], key: str, value: int, what: str
) -> None:
    edit_config(folder, **{key: value})
    message = (
        f"config.json: {what.format(folder)}: weights and config.json are of different models, download both again"
    )
    refuses(antiphon, message, command, folder)


@pytest.mark.parametrize("command", READERS)
def test_values_that_do_not_fit_together(antiphon: Cli, folder: Path, command: tuple[str, ...]) -> None:
    edit_config(folder, num_experts_per_tok=9)
    message = "config.json: 9 experts per token of 8 experts: lower the experts per token to 8 or less"
    refuses(antiphon, message, command, folder)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_or_deep_json_for_a_config(antiphon: Cli, folder: Path, command: tuple[str, ...], name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    refuses(antiphon, f"{folder / name}: not valid JSON (nested too deeply): download it again", command, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuses(antiphon, f"{folder / name}: a pipe, not a file: put the file itself there", command, folder)


@pytest.mark.parametrize("command", LOADERS)
def test_a_pipe_or_another_file_for_a_shard(antiphon: Cli, folder: Path, command: tuple[str, ...]) -> None:
    (folder / SHARD).write_text("<html>not found</html>" * 10)
    promised = int.from_bytes(b"<html>no", "little")
    message = (
        f"{SHARD}: not a safetensors file: its first 8 bytes promise a header of {promised:,} bytes, "
        f"the file has 220: download it again"
    )
    refuses(antiphon, message, command, folder)
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    refuses(antiphon, f"{folder / SHARD}: a pipe, not a file: put the file itself there", command, folder)


@pytest.mark.parametrize("command", [LOADERS[0], LOADERS[2]])
def test_a_pipe_for_a_tokenizer(antiphon: Cli, folder: Path, command: tuple[str, ...]) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    refuses(antiphon, f"{folder}/tokenizer.json: a pipe, not a file: put the file itself there", command, folder)


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_nan_in_a_norm(antiphon: Cli, folder: Path, layout: str) -> None:
    name = "model.layers.0.input_layernorm.weight"
    tensors = load_file(folder / SHARD)
    tensors[name][3] = torch.nan
    save_file(tensors, folder / SHARD)
    message = f"{SHARD}: tensor {name} holds nan at [3]: the weights are damaged, download the file again"
    refuses(antiphon, message, ("generate", "MODEL", "--token-ids", "1", "--layout", layout), folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *(("config.json", command) for command in READERS),
        *((SHARD, command) for command in LOADERS),
        *(("tokenizer.json", command) for command in (LOADERS[0], LOADERS[2])),
    ],
)
def test_a_clone_without_its_large_files(antiphon: Cli, folder: Path, command: tuple[str, ...], name: str) -> None:
    (folder / name).write_text(POINTER)
    message = f"{folder / name}: a pointer of Git LFS, not the file: run git lfs pull in {folder}"
    refuses(antiphon, message, command, folder)


@pytest.mark.parametrize("command", READERS)
def test_an_adapter_and_a_cache_with_two_snapshots(
    antiphon: Cli, folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    merge = "merge the adapter into its model (org/base) and give that folder"
    refuses(antiphon, f"{folder / 'config.json'} is missing: {merge}", command, folder)
    model = tmp_path / "models--org--model"
    for revision in ("a1", "b2"):
        (model / "snapshots" / revision).mkdir(parents=True)
    message = f"{model}: 2 snapshots and no refs/main that names one: give {model / 'snapshots' / 'b2'}"
    refuses(antiphon, message, command, model)
