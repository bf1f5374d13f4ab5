"""Load one half of a checkpoint in a fresh process and print what it read, kept and held at most (JSON); or all of it,
rounded as `serve --weights` rounds, how long that took, and what stays resident beside what a plan counts.

Run by `test_load.py`: `python measure_loading.py FOLDER attention|experts [ID ...]`, `... FOLDER whole WEIGHTS`.
"""

import json
import sys
import time
from pathlib import Path

import torch

from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.planned import stored_precision
from antiphon.specs.model import PrecisionSpec


def status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure_whole(folder: str, weights: str) -> dict[str, float]:
    """Bytes that both halves add to the process, at the end and at most, those that a plan counts, and seconds."""
    spec, backend = load_model_spec(folder), CpuBackend(torch.bfloat16)
    backend.linear(torch.ones(2, 8, dtype=torch.bfloat16), backend.pack_linear(torch.ones(8, 8)))  # warm libraries
    plain = stored_precision(Path(folder), spec) or PrecisionSpec()
    precision = plain if weights == "as-stored" else PrecisionSpec(weights="int8", experts=weights)  # type: ignore[arg-type]
    planned = attention_weight_bytes(spec, 1, precision)
    planned = planned + expert_weight_bytes(spec, spec.router.num_experts, 1, precision)
    before, start_s = status_bytes("VmRSS"), time.perf_counter()
    checkpoint = open_weights(folder, weights)
    halves = load_attention_half(checkpoint, spec, backend), load_expert_half(checkpoint, spec, backend)
    took_s = time.perf_counter() - start_s
    resident, peak = status_bytes("VmRSS") - before, status_bytes("VmHWM") - before
    assert len(halves) == 2
    more = resident / float(planned) - 1
    return {"planned": float(planned), "resident": resident, "peak": peak, "more": more, "seconds": took_s}


def main() -> None:
    folder, role, *ids = sys.argv[1:]
    if role == "whole":
        print(json.dumps(measure_whole(folder, *ids)))
        return
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
