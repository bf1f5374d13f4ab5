"""transformers and vLLM as peers, each in a process of its own.

transformers runs under our interpreter. vLLM runs on the CPU in the environment that `benchmarks/peers.sh` builds. What
vLLM's own guide asks for is set here: tcmalloc and its OpenMP library are preloaded where the environment has them, its
OpenMP settings are made by hand, and every CPU computes. Left alone, vLLM keeps one CPU free for a scheduler process
(half of a two-core machine), and in one process it falls back to a single thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

from antiphon.base.allowance import allowance
from antiphon.bench.peers.engine_process import EngineProcess

TRANSFORMERS_FILE = Path(__file__).with_name("transformers_engine.py")
VLLM_FILE = Path(__file__).with_name("vllm_engine.py")
VLLM_ENVIRONMENT = Path(".peers/vllm")
# Relative to the environment. libiomp5 comes with the wheel's needs; peers.sh puts tcmalloc beside it.
PRELOADED_LIBRARIES = ("lib/libtcmalloc_minimal.so.4", "lib/libiomp5.so")


def transformers_peer(model: Path, *, device: str) -> EngineProcess:
    """transformers' batched `generate` in bf16 on all CPUs; prompts must be of equal length."""
    num_threads = allowance().num_cores
    return EngineProcess(
        "transformers",
        TRANSFORMERS_FILE,
        {"model": str(model), "device": device, "num_threads": num_threads},
        interpreter=sys.executable,
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads), "TRANSFORMERS_VERBOSITY": "error"},
    )


def vllm_peer(model: Path, *, environment: Path = VLLM_ENVIRONMENT) -> EngineProcess:
    """vLLM's offline engine in bf16 on all CPUs. Where `environment` is not built, `start` says so."""
    libraries = [environment / name for name in PRELOADED_LIBRARIES]
    cpus = [str(cpu) for cpu in allowance().cores]
    return EngineProcess(
        "vllm",
        VLLM_FILE,
        {"model": str(model.resolve()), "max_model_len": 1024, "max_num_seqs": 64},
        interpreter=str((environment / "bin" / "python").absolute()),
        advice="run `make peers` to build it",
        environment={
            "LD_PRELOAD": ":".join(str(library.absolute()) for library in libraries if library.exists()),
            "OMP_NUM_THREADS": str(len(cpus)),
            # The values that vLLM sets for its worker processes.
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(cpus)}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        },
    )
