"""Engines beside which serving is measured, ours or others: one workload in, rates and latencies out.

All requests of a workload arrive together and every one produces exactly `output_tokens` tokens by greedy decoding,
without ever stopping early. A run is two passes over the same prompts: one that asks for a single token (its duration
is the prefill) and one that asks for all; the difference of their durations is the decode. That definition needs
nothing from inside an engine and treats engines that mix prefill and decode in one step like those that do not.
"""

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from antiphon.base.allowance import allowance
from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.bench.harness.children import Child, ChildFailed, Children, programs

ENGINES_FILE = Path(__file__).with_name("engines.py")
VLLM_ENVIRONMENT = Path(".peers/vllm")
LLAMA_CPP_PACKAGES = Path(".peers/llama.cpp")
# Relative to the environment. libiomp5 comes with the wheel's needs; peers.sh puts tcmalloc beside it.
PRELOADED_LIBRARIES = ("lib/libtcmalloc_minimal.so.4", "lib/libiomp5.so")
START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0
LOG_TAIL_LINES = 8


class PeerError(RuntimeError):
    """An engine could not be started, failed, or took too long; the message names the engine and the reason."""


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, all sent at once, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_tokens: int

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("a workload needs at least one prompt, and none may be empty")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens is {self.output_tokens}; it must be at least 1")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run of one workload.

    `output_tokens_per_s`: generated tokens over the whole duration, prefill included (what load clients call
    output throughput).
    `decode_tokens_per_s`: tokens after each request's first, over the duration less the prefill's (the one-token pass,
    or the time until all had their first token if that was shorter); to be held against the decode bound. None for
    `output_tokens == 1`, and when the longer pass was not the slower one.
    `prefill_tokens_per_s`: prompt tokens over the duration of the one-token pass.
    `ttft_s`: time to first token, one per request where the engine tells them apart, else one for all.
    `itl_s`: times between tokens.
    `peak_rss_bytes`: the engine's processes together, since they started; 0 for an engine that runs
    elsewhere.
    """

    output_tokens_per_s: float
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float
    ttft_s: list[float]
    itl_s: list[float]
    peak_rss_bytes: int
    token_ids: list[list[int]] | None


def steady_rate(arrivals_s: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second while all requests decode, from when each one's tokens came: from the last first token to the
    first last one. None if they never did."""
    begin, end = max(each[0] for each in arrivals_s), min(each[-1] for each in arrivals_s)
    return sum(begin < moment <= end for each in arrivals_s for moment in each) / (end - begin) if end > begin else None


class Peer(ABC):
    """An engine under test, called `name` in rows. Not thread safe; every call blocks, with a timeout, and raises
    `PeerError`. In a `with` it is started."""

    name: str

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Root of the engine's process tree while it runs on this machine; its CPU time is not foreign."""
        return None

    def sizes(self) -> dict[str, int | str | None]:
        """What a report's row says of its layout."""
        return dict.fromkeys(("layout", "attention", "experts", "micro_batches"))

    @abstractmethod
    def start(self) -> Mapping[str, str]:
        """Start the engine and load the model; returns what a report should say of it (version, kernels chosen)."""

    @abstractmethod
    def run(self, workload: Workload) -> RunResult:
        """Run the workload once, both passes."""

    def pause(self) -> None:  # noqa: B027 -- most have nothing to do
        """Take the engine off the CPUs while another is measured, if it is ours; its memory stays."""

    def resume(self) -> None:  # noqa: B027 -- most have nothing to do
        """Undo `pause`."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to do
        """Stop the engine and free what it holds; harmless when it never started."""


def run_result(
    workload: Workload,
    peak_rss_bytes: int,
    *,
    prefill_s: float,
    total_s: float,
    ttft_s: list[float],
    itl_s: list[float],
    token_ids: list[list[int]] | None,
) -> RunResult:
    """What an engine observed, durations of both passes and times seen from the start of the second, as rates; every
    engine goes through here, so all are defined alike."""
    num_outputs = len(workload.prompts) * workload.output_tokens
    num_decoded = len(workload.prompts) * (workload.output_tokens - 1)
    # A disturbed one-token pass would flatter the decode; the second pass's own prefill is the limit where known.
    decode_s = total_s - min(prefill_s, max(ttft_s, default=prefill_s))  # not above 0 if noise exceeds a short decode
    return RunResult(
        output_tokens_per_s=num_outputs / total_s,
        decode_tokens_per_s=num_decoded / decode_s if num_decoded and decode_s > 0 else None,
        prefill_tokens_per_s=workload.num_prompt_tokens / prefill_s,
        ttft_s=ttft_s,
        itl_s=itl_s,
        peak_rss_bytes=peak_rss_bytes,
        token_ids=token_ids,
    )


class EngineProcess(Peer):
    """A peer whose engine is loaded from `engine_file` (see `engines`) in a process of its own under `interpreter`: it
    shares no threads with the benchmark and is stopped as a whole.

    A paused engine is stopped with SIGSTOP: it keeps its memory and caches nothing on the CPUs, which an idle engine's
    spinning threads would. `options` reach the engine's `load`; `environment` is added to ours; `advice` says how to
    get an interpreter that is missing.
    """

    def __init__(
        self,
        name: str,
        engine_file: Path,
        options: Mapping[str, Any],
        *,
        interpreter: str,
        environment: Mapping[str, str],
        advice: str = "install it",
    ) -> None:
        self.name = name
        self._advice = advice
        self._made = (str(engine_file), (dict(options),))
        self._interpreter = interpreter
        self._environment = environment
        self._children = Children()
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> Mapping[str, str]:
        """Start the process and wait until the model is loaded and warm. `PeerError` if there is no
        interpreter that could be started.

        Call it from a thread that outlives the engine: Linux ends the child with the thread that started it.
        """
        starter = programs(self._environment, self._interpreter)
        with self._in_words():
            try:
                (self._child,) = self._children.start([self.name], [self._made], starter, START_TIMEOUT_S)
            except OSError as error:
                reason = f"{self._interpreter} cannot be started ({error.strerror})"
                raise PeerError(f"{self.name}: {reason}; {self._advice}") from None
            details: Mapping[str, str] = self._child.ask("details")
        return details

    def run(self, workload: Workload) -> RunResult:
        child = self._running()
        with self._in_words():
            child.begin("timed_run", workload.prompts, workload.output_tokens)
            observed = child.answer(RUN_TIMEOUT_S)
        return run_result(workload, tree_peak_rss_bytes(child.pid), **observed)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._child is not None:
            self._signal(signal.SIGKILL)
            self._child = None
        self._children.close()

    def _running(self) -> Child:
        if self._child is None:
            raise PeerError(f"{self.name}: not started; call start() first")
        return self._child

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._running().pid, number)
        except ProcessLookupError:
            if number != signal.SIGKILL:
                raise PeerError(f"{self.name}: it is gone") from None

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What goes wrong inside becomes a `PeerError`, with the last lines that the engine wrote."""
        try:
            yield
        except (ChildFailed, PeerLost, PeerTimeout) as error:
            if isinstance(error, PeerLost):
                reason = f"{self.name}: it ended unexpectedly, {error.reason}"
            else:
                reason = str(error) if isinstance(error, ChildFailed) else f"{self.name}: {error}"
            tail = self._children.last_lines(LOG_TAIL_LINES)
            raise PeerError(reason + ("; its last lines:\n" + "\n".join(tail) if tail else "")) from None


def tree_peak_rss_bytes(root_pid: int) -> int:
    """The sum of the peak resident sizes of a process and its descendants: an upper bound of their common peak."""
    root = psutil.Process(root_pid)
    return sum(_peak_rss_bytes(process.pid) for process in (root, *root.children(recursive=True)))


def _peak_rss_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


# --- transformers, vLLM and llama.cpp, each in a process of its own
#
# transformers and llama.cpp run under our interpreter, llama.cpp's package from a folder of its own. vLLM runs on the
# CPU in the environment that `benchmarks/peers.sh` builds. What its own guide asks for is set here: tcmalloc and its
# OpenMP library are preloaded where the environment has them, its OpenMP settings are made by hand, and every CPU
# computes. Left alone, vLLM keeps one CPU free for a scheduler process (half of a two-core machine), and in one process
# it falls back to a single thread.


def transformers_peer(model: Path, *, device: str) -> EngineProcess:
    """transformers' batched `generate` in bf16 on all CPUs; prompts must be of equal length."""
    num_threads = allowance().num_cores
    return EngineProcess(
        "transformers",
        ENGINES_FILE,
        {"engine": "transformers", "model": str(model), "device": device, "num_threads": num_threads},
        interpreter=sys.executable,
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads), "TRANSFORMERS_VERBOSITY": "error"},
    )


def vllm_peer(model: Path, *, environment: Path = VLLM_ENVIRONMENT) -> EngineProcess:
    """vLLM's offline engine in bf16 on all CPUs. Where `environment` is not built, `start` says so."""
    libraries = [environment / name for name in PRELOADED_LIBRARIES]
    cpus = [str(cpu) for cpu in allowance().cores]
    return EngineProcess(
        "vllm",
        ENGINES_FILE,
        {"engine": "vllm", "model": str(model.resolve()), "max_model_len": 1024, "max_num_seqs": 64},
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


def llama_cpp_peer(model: Path, *, packages: Path = LLAMA_CPP_PACKAGES) -> EngineProcess:
    """llama.cpp on all CPUs with the GGUF file `model`; `UserError` for anything else. Where `packages`, which
    `benchmarks/peers.sh` fills, is not there, `start` says so."""
    if model.suffix != ".gguf":
        raise UserError(f"peer llama.cpp reads GGUF files, {model} is none: give one, or other --peers")
    num_threads = allowance().num_cores
    sizes = {"num_threads": num_threads, "max_model_len": 1024, "max_num_seqs": 64}
    return EngineProcess(
        "llama.cpp",
        ENGINES_FILE,
        {"engine": "llama.cpp", "model": str(model.resolve()), **sizes},
        # a program that is not there: `start` then names it and gives the advice
        interpreter=sys.executable if packages.is_dir() else str(packages),
        advice="run `make peers` to build it",
        environment={"PYTHONPATH": str(packages.absolute()), "OMP_NUM_THREADS": str(num_threads)},
    )


def default_peers(device: str, say: Callable[[str], None]) -> tuple[str, ...]:
    """The peers that this device has; says which one it leaves out."""
    if device == "cpu":
        return ("transformers", "vllm")
    say(f"without vllm: it is set up for the CPU, not for --device {device}")
    return ("transformers",)


def make_peer(name: str, model: Path, device: str) -> Peer:
    """A peer by its name on the command line."""
    if name == "transformers":
        return transformers_peer(model, device=device)
    if name in ("vllm", "llama.cpp"):
        if device != "cpu":
            raise UserError(
                f"--peers has {name}: it is set up for the CPU: with --device {device} use --peers transformers"
            )
        return vllm_peer(model) if name == "vllm" else llama_cpp_peer(model)
    raise UserError(f"--peers has {name!r}: use transformers, vllm or llama.cpp, or --against-url")
