"""vLLM on the CPU as a peer, from the environment that `benchmarks/peers.sh` builds, in its own process.

What vLLM's own guide asks for is set here: tcmalloc and its OpenMP library are preloaded where the environment
has them, its OpenMP settings are made by hand, and every CPU computes. Left alone, vLLM keeps one CPU free for a
scheduler process (half of a two-core machine), and in one process it falls back to a single thread.
"""

from __future__ import annotations

import os
from pathlib import Path

from antiphon.bench.peers.engine_process import EngineProcess

ENGINE_FILE = Path(__file__).with_name("vllm_engine.py")
DEFAULT_ENVIRONMENT = Path(".peers/vllm")
# Relative to the environment. libiomp5 comes with the wheel's needs; peers.sh puts tcmalloc beside it.
PRELOADED_LIBRARIES = ("lib/libtcmalloc_minimal.so.4", "lib/libiomp5.so")


def vllm_peer(
    model: Path,
    *,
    environment: Path = DEFAULT_ENVIRONMENT,
    kv_cache_gib: int = 2,
    max_model_len: int = 1024,
    max_num_seqs: int = 64,
) -> EngineProcess:
    """vLLM's offline engine in bf16 on all CPUs. Where `environment` is not built, `start` says so."""
    libraries = [environment / name for name in PRELOADED_LIBRARIES]
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    return EngineProcess(
        "vllm",
        ENGINE_FILE,
        {"model": str(model.resolve()), "max_model_len": max_model_len, "max_num_seqs": max_num_seqs},
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
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        },
    )
