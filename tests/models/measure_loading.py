"""Load one half of a checkpoint in a fresh process and print what it read, kept and held at most (JSON).

Run by `test_load.py`: `python measure_loading.py FOLDER attention|experts [ID ...]`.
"""

import json
import sys
from pathlib import Path

import torch

from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_attention_half, load_expert_half


def status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    folder, role, *ids = sys.argv[1:]
    spec, backend = load_model_spec(folder), ReferenceBackend(dtype=torch.bfloat16)
    backend.linear(torch.ones(2, 8, dtype=torch.bfloat16), backend.pack_linear(torch.ones(8, 8)))  # warm libraries
    checkpoint = Checkpoint(folder)
    before = status_bytes("VmRSS")
    if role == "attention":
        kept = load_attention_half(checkpoint, spec, backend).weight_bytes
    else:
        kept = load_expert_half(checkpoint, spec, backend, [int(i) for i in ids] or None).num_bytes
    print(json.dumps({"read": checkpoint.bytes_read, "kept": kept, "peak": status_bytes("VmHWM") - before}))


if __name__ == "__main__":
    main()
