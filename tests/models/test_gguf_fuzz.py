"""Thousands of damaged GGUF files: each is read or refused in one line, quickly, with little memory."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from antiphon.base.errors import CheckpointError
from antiphon.models.config import load_model_spec
from antiphon.models.load import open_checkpoint
from tests.models.gguf_specimens import all_of, write_gguf

LARGE = (2**63 - 1, 2**64 - 1, 2**40, 2**32, 10**9, 0)
MOST_BYTES = 50_000_000


def mutated(data: bytes, generator: random.Random, head_bytes: int) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        place = generator.randrange(head_bytes - 8)
        way = generator.randrange(5)
        if way == 0:
            changed[place] = generator.randrange(256)
        elif way == 1:
            changed[place : place + 8] = struct.pack("<Q", generator.choice(LARGE))
        elif way == 2:
            changed[place : place + 4] = struct.pack("<I", generator.randrange(45))
        elif way == 3:
            del changed[generator.randrange(len(changed)) :]
            changed += b"\0" * generator.choice((0, 0, 1))
        else:
            other = generator.randrange(head_bytes - 8)
            changed[place : place + 8] = changed[other : other + 8]
        if len(changed) <= head_bytes:
            break
    return bytes(changed)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files(count: int, save_model: Any, tools: Any, tmp_path: Path) -> None:
    folder = save_model(tools.config("qwen3_moe", decoder_sparse_step=1, hidden_size=64, head_dim=16)).folder
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, all_of(Kind.Q8_0), lambda writer: writer.add_token_list([f"t{i}" for i in range(97)]))
    data, generator = file.read_bytes(), random.Random(count)
    head_bytes = data.index(b"output_norm.weight") + 4000
    said: list[str] = []
    tracemalloc.start()
    for _ in range(count):
        file.write_bytes(mutated(data, generator, head_bytes))
        tracemalloc.reset_peak()
        try:
            spec = load_model_spec(file)
            open_checkpoint(file, spec)
        except CheckpointError as error:
            said.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()
    assert len(said) > count / 2
    assert not [line for line in said if "\n" in line or len(line) > 600]
