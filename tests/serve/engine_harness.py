"""Real engines over tiny random checkpoints, and what transformers makes of the same prompts.

Everything is float32, so that the same greedy tokens come out of any layout; sampled tokens depend on seeds alone.
"""

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from antiphon.models.config import load_model_spec
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.launch import start
from antiphon.serve.layout_text import parse_layout
from antiphon.serve.mask_pool import MakeMatcher
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.prepare import prepare
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.counts import kv_cache_block_bytes
from antiphon.specs.sampling import SamplingParams
from tests.waiting import wait_until

VOCAB_SIZE = 97
EOS = 2
NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PATIENCE_S = 120.0

_runs = itertools.count()

Prompts = list[list[int]]
Tokens = list[list[int]]


def random_prompts(lengths: Sequence[int], seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class TinyModel:
    """A checkpoint folder, the model it was saved from, and transformers' own greedy continuations."""

    folder: Path
    model: Any
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompts: Prompts, num_tokens: int = NUM_TOKENS) -> Tokens:
        """The next tokens of each prompt, end-of-sequence tokens passed over like any other."""
        missing = sorted({tuple(p) for p in prompts if len(self.known.get(tuple(p), [])) < num_tokens}, key=len)
        for length in sorted({len(prompt) for prompt in missing}):
            batch = [prompt for prompt in missing if len(prompt) == length]
            made = self.model.generate(
                torch.tensor(batch),
                attention_mask=torch.ones(len(batch), length, dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
            )
            self.known.update(zip(batch, made[:, length:].tolist(), strict=True))
        return [self.known[tuple(prompt)][:num_tokens] for prompt in prompts]


def save_tiny_model(folder: Path, family: str = "qwen3_moe", **changes: Any) -> TinyModel:
    """A random model of `family` (sizes as in tests/models) that prefers no token, so that its text does not repeat."""
    from transformers import AutoModelForCausalLM  # here: programs that only run an engine load it not

    from tests.models.conftest import family_config

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(family_config(family, **changes), attn_implementation="eager").eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name and tensor.ndim == 1 and name.endswith("weight"):
            tensor.data = 1.0 + 0.2 * torch.randn_like(tensor)
        elif name.endswith("bias"):
            tensor.data = 0.2 * torch.randn_like(tensor)
        elif name.endswith("sinks"):
            tensor.data = torch.randn_like(tensor)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return TinyModel(folder, model)


def config(model: TinyModel, layout: str = "1", *, num_blocks: int = 0, **changes: Any) -> ServeConfig:
    """`layout`: "2" is two replicas, "3+2/m4" three attention and two expert workers with four micro-batches, "1t2+1t3"
    one of each, of two and of three ranks; "2t2*1" a hybrid of two replicas of two ranks, each expert on one;
    "1t2p3" has three stages of two ranks. "2>1+1/m2": two replicas for prompts, and workers that decode. "2+1/m2 free":
    attention workers step each for itself, in the pools that have expert workers.

    `num_blocks` KV blocks for each attention worker; 0: enough for all requests."""
    layout, _, stepping = layout.partition(" ")
    prefill, _, decode = layout.rpartition(">")
    settings: dict[str, Any] = {"max_running": 64, "max_batch_tokens": 256, "num_threads": 1}

    def pool(workers: str) -> ServeConfig:
        own = {"stepping": stepping} if stepping and (not prefill or "+" in workers) else {}
        return ServeConfig(model=model.folder, **(_fields(workers) | own | settings | changes))

    made = pool(decode)
    if prefill:
        made = replace(made, prefill=pool(prefill))
    if num_blocks:
        block_bytes = kv_cache_block_bytes(load_model_spec(model.folder), 16, 4)
        kv_bytes = num_blocks * block_bytes * made.num_kv_caches
        prefill_pool = None if made.prefill is None else replace(made.prefill, kv_bytes=kv_bytes)
        made = replace(made, kv_bytes=kv_bytes, prefill=prefill_pool)
    return made


def _fields(layout: str) -> dict[str, Any]:
    found = parse_layout("layout", layout) | {"written_in": ""}  # refusals name options
    return found if "/m" in layout else found | {"num_micro_batches": 1}


@contextmanager
def running(settings: ServeConfig, make_matcher: MakeMatcher | None = None) -> Iterator[Engine]:
    """A started engine; afterwards no process of it is left."""
    engine = start(prepare(settings), make_matcher=make_matcher)
    try:
        yield engine
    finally:
        pids = engine.worker_pids()
        engine.stop()
        assert not [pid for pid in pids if is_alive(pid)], "workers outlived the engine"


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@dataclass
class Finished:
    """One request's outputs, joined."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

    @property
    def error(self) -> str | None:
        return self.last.error


class Run:
    """Requests sent together, read in this thread. `on_output` sees every output and may act on the engine."""

    def __init__(self, engine: Engine, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> None:
        self.sink = ThreadSink()
        self.engine = engine
        run = next(_runs)  # the names of requests that have ended do not come again
        self.ids = [f"{run}-{index}" for index in range(len(prompts))]
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for request_id, prompt, own in zip(self.ids, prompts, each, strict=True):
            engine.submit_to(self.sink, request_id, prompt, own)

    def finish(self, on_output: Callable[[int], None] | None = None) -> list[Finished]:
        """All requests, in their order. `on_output(tokens so far, over all requests)` is called after each output."""
        finished = {request_id: Finished() for request_id in self.ids}
        num_tokens = 0
        for output in self.sink.outputs(len(self.ids)):
            request = finished[output.request_id]
            assert not request.outputs or request.last.finish_reason is None, "an output after the last"
            request.outputs.append(output)
            request.token_ids += output.token_ids
            num_tokens += len(output.token_ids)
            if on_output is not None:
                on_output(num_tokens)
        return [finished[request_id] for request_id in self.ids]


def complete(engine: Engine, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] = GREEDY) -> Tokens:
    """Tokens of all prompts, which must end without an error."""
    finished = Run(engine, prompts, params).finish()
    assert [request.error for request in finished] == [None] * len(prompts)
    return [request.token_ids for request in finished]


def wait_until_idle(engine: Engine) -> None:
    """All requests are over and have given back what they held."""

    def idle() -> bool:
        stats = engine.stats()
        return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0

    wait_until(idle, "all KV blocks free")


def kill(engine: Engine, role: str, index: int, number: int = signal.SIGKILL, *, rank: int = 0, pool: str = "") -> int:
    """Send a signal to a worker's present incarnation, or to a rank of it; returns its process id."""
    pid = engine.worker_pid(WorkerName(role, index, rank, pool=pool))
    os.kill(pid, number)
    return pid
