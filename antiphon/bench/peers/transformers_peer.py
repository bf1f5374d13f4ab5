"""The peer that everybody has: Hugging Face transformers, in its own process under our interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from antiphon.bench.peers.engine_process import EngineProcess

ENGINE_FILE = Path(__file__).with_name("transformers_engine.py")


def transformers_peer(
    model: Path, *, device: str = "cpu", num_threads: int | None = None, experts_implementation: str | None = None
) -> EngineProcess:
    """transformers' batched `generate` in bf16; prompts must be of equal length.

    `num_threads`: default all CPUs. `experts_implementation`: default the fastest of a trial when it starts.
    """
    threads = num_threads or os.cpu_count() or 1
    return EngineProcess(
        "transformers",
        ENGINE_FILE,
        {
            "model": str(model),
            "device": device,
            "num_threads": threads,
            "experts_implementation": experts_implementation,
        },
        interpreter=sys.executable,
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"},
    )
