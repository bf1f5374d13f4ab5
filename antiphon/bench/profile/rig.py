"""One process's model, set up to time its parts with the engine's own code: steps of `AttentionRunner`, with real
kernels, real block tables, real sampling; only the engine that would send the steps is missing.

1. Both halves are loaded, the KV cache is filled with noise, and random tokens stand at the end of the contexts asked
   for, so that no prompt has to be computed first.
2. A step's spans say how long attention (with gate, norms, shared expert), experts, head and sampling took; what is
   left of the step is the worker's bookkeeping.
3. Which weights are read depends on the tokens: each repetition of a decode step of few rows has others, as an engine's
   steps have. With the same ones again, experts that the caches hold would make it up to a seventh too short.
4. A decode step of a whole replica is one native call, and half a layer of an attention worker is one, where the
   engine's are (`serve.worker.decode_steps`, `models.noted_half`).
5. Attention alone runs with experts that answer at once; experts alone are given what the gate chose for the same rows.

Rejected: timing kernels one by one. What Python, caches and the order of the layers make of them is a good part of the
truth on a CPU, and would have to be fitted later.
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from antiphon import _native
from antiphon.bench.profile.exchange import AttentionEnd, ExpertEnd, Rounds, Served
from antiphon.kernels.select import make_backend, resolve_dtype
from antiphon.models.batch import BlockTables
from antiphon.models.config import load_model_spec
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.noted_half import NotedHalf
from antiphon.serve.micro_batch_choice import fill_with_noise
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker.attention import AllLayers, AttentionRunner
from antiphon.serve.worker.decode_steps import native_steps
from antiphon.serve.worker.exchange import LocalExperts, RowRouting, StepExchange
from antiphon.serve.worker.messages import RunStep
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.spans import ATTENTION, DISPATCH, SAMPLE, STEP, SpanRecorder, Spans
from antiphon.specs.sampling import SamplingParams

BLOCK_SIZE = 16
_TIMEOUT_S = 60.0  # of a wait for experts; here there is none
_NUM_DRAWS = 8
_MANY_PAIRS = 4  # for each expert; beyond, hardly one has no row, so every draw reads the same weights
_MAX_REPETITIONS = 400
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class RigWork:
    """One kind of work at one size. `colocated`: a whole decode step; `attention`: the same without experts;
    `experts`: all MoE layers of `rows` rows, of which the process acts as if it held `num_held` experts.

    `prompt_tokens` > 0: instead of decoding, that many tokens of one prompt, after `cached_tokens` that were computed
    before."""

    kind: Literal["colocated", "attention", "experts"]
    rows: int
    context: int = 1
    num_held: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class PartSeconds:
    """Seconds of each repetition. `attention`, `experts`: per layer that has them; `head`: logits and sampling;
    `step`: what else the step took; empty where the work has no such part."""

    attention: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


_Captured = tuple[Tensor, Tensor, Tensor]
"""What a step sent to the experts of one layer: rows_TH, ids_TK, weights_TK."""


class _CapturingExperts(LocalExperts):
    """Experts that add nothing, at once; what they were sent is kept if asked to."""

    def __init__(self, half: ExpertHalf) -> None:
        super().__init__(half)
        self.captured: dict[int, _Captured] | None = None

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        if self.captured is not None:
            self.captured[layer] = rows_TH.clone(), ids_TK.clone(), weights_TK.clone()
        self._results[micro_batch] = torch.zeros_like(rows_TH)


class Rig:
    """The model in the folder `model`. `run_once` does one piece of work, `times_of` reads what the last ones took.
    `max_rows` sequences and `max_tokens` cached tokens are the most any work will have."""

    def __init__(self, model: str, dtype: str, kernels: str, max_rows: int, max_tokens: int, max_context: int) -> None:
        self.spec = load_model_spec(model)
        self.dtype = resolve_dtype(self.spec.dtype if dtype == "auto" else dtype)
        self.backend = make_backend(kernels, torch.device("cpu"), self.dtype)
        checkpoint = open_weights(model)
        self._half = load_attention_half(checkpoint, self.spec, self.backend, max_positions=max_context + 1)
        self._experts = load_expert_half(checkpoint, self.spec, self.backend)
        self._recorder = SpanRecorder(keeps_all=True)
        self._max_rows = max_rows
        blocks = -(-max_tokens // BLOCK_SIZE) + 2 * max_rows + 1
        self._num_blocks = blocks
        self._cache = self._half.new_cache(blocks, BLOCK_SIZE)
        fill_with_noise(self._cache, self.spec, self.backend, blocks)
        max_blocks = -(-max_context // BLOCK_SIZE) + 1
        self._tables = BlockTables(BLOCK_SIZE, max_rows, max_blocks, self.backend.device)
        self._sampler = RowSampler(self.backend)
        self._capturing = _CapturingExperts(self._experts)
        self._colocated = self._runner(LocalExperts(self._experts))
        self._alone = self._runner(self._capturing)
        self._steps: dict[RigWork, list[RunStep]] = {}
        self._captures: dict[RigWork, list[dict[int, _Captured]]] = {}

    def _runner(self, experts: LocalExperts) -> AttentionRunner:
        half, captured, rows = self._half, None, self._max_rows
        if experts is self._capturing:
            half = NotedHalf.of(half, rows, self._tables.most_blocks * BLOCK_SIZE, BLOCK_SIZE)
        else:
            shared = (half, experts, self._cache, self._tables, self._sampler, self._recorder)
            captured = native_steps(*shared, most_rows=rows)
        exchange, stage = StepExchange(experts, half, self._recorder, _TIMEOUT_S), AllLayers(half, self._sampler)
        return AttentionRunner(exchange, self._cache, self._tables, stage, RowRouting(half), decode_steps=captured)

    def run_once(self, work: RigWork) -> None:
        """One repetition; its times are recorded."""
        if work.kind == "experts":
            self._run_experts(work)
            return
        steps = self._steps_of(work)
        step = self._next(steps[self._recorder.step % len(steps)])
        (self._colocated if work.kind == "colocated" else self._alone).run(step)

    def times_of(self, work: RigWork) -> PartSeconds:
        """The repetitions since the last call."""
        spans = self._recorder.take()
        if work.kind == "experts":
            return PartSeconds(experts=[seconds / self.spec.num_moe_layers for seconds in _sums(spans, DISPATCH)])
        attention, experts, head = (_sums(spans, kind) for kind in (ATTENTION, DISPATCH, SAMPLE))
        whole = _sums(spans, STEP)
        rest = [all_s - sum(parts) for all_s, *parts in zip(whole, attention, experts, head, strict=True)]
        return PartSeconds(
            attention=[seconds / self.spec.num_layers for seconds in attention],
            experts=[seconds / self.spec.num_moe_layers for seconds in experts] if work.kind == "colocated" else [],
            head=head,
            step=[max(0.0, seconds) for seconds in rest],
        )

    def _steps_of(self, work: RigWork) -> list[RunStep]:
        """The messages an engine would send, one for each draw of tokens. They are made once, because a step may be
        sent again with the same effect."""
        if work not in self._steps:
            router = self.spec.router
            has_all = work.prompt_tokens or work.rows * router.top_k > _MANY_PAIRS * router.num_experts
            steps = [self._make_step(work, draw) for draw in range(1 if has_all else _NUM_DRAWS)]
            for start in steps[0].starts:
                self._sampler.add(start)
            self._steps = {work: steps}  # of one work: a slot belongs to one sequence
        return self._steps[work]

    def _next(self, step: RunStep) -> RunStep:
        """The same with a number of its own, and without what happened before."""
        self._recorder.step += 1
        return RunStep(
            step=self._recorder.step,
            released=[],
            starts=[],
            micro_batches=step.micro_batches,
            participants=step.participants,
        )

    def _capture(self, step: RunStep) -> dict[int, _Captured]:
        """What the step sends to the experts, by layer. Its spans are forgotten."""
        self._capturing.captured = {}
        self._alone.run(step)
        captured, self._capturing.captured = self._capturing.captured, None
        self._recorder.take()
        return captured

    def _make_step(self, work: RigWork, draw: int) -> RunStep:
        num_rows = 1 if work.prompt_tokens else work.rows
        context = work.cached_tokens + work.prompt_tokens if work.prompt_tokens else work.context
        blocks_each = -(-context // BLOCK_SIZE)
        assert num_rows * blocks_each <= self._num_blocks, f"{num_rows} x {context} tokens do not fit the cache"
        generator = torch.Generator().manual_seed(draw * 10**9 + context * 1000 + num_rows)
        tokens = torch.randint(0, self.spec.vocab_size, (num_rows, max(1, work.prompt_tokens)), generator=generator)
        starts, sequences = [], []
        for index in range(num_rows):
            own = tuple(tokens[index].tolist())
            start = context - len(own)
            starts.append(SequenceStart(str(index), index, (own[0],) * context, context, _GREEDY, 0, ()))
            blocks = tuple(range(index * blocks_each, (index + 1) * blocks_each))
            sequences.append(SequenceStep(str(index), index, own, start, 0, blocks, True, 0, 0))
        return RunStep(step=0, released=[], starts=starts, micro_batches=[sequences], participants=[[0]])

    @torch.inference_mode()
    def _run_experts(self, work: RigWork) -> None:
        draws = self._captured(work)
        self._recorder.step += 1
        captured = draws[self._recorder.step % len(draws)]
        for layer, sent in captured.items():
            start_ns = time.monotonic_ns()
            self._experts.forward(layer, *sent)
            self._recorder.add(DISPATCH, start_ns)

    def _captured(self, work: RigWork) -> list[dict[int, _Captured]]:
        """Rows and choices of steps of `work.rows` rows, those kept that go to the first `num_held` experts."""
        if work not in self._captures:
            sent = RigWork(kind="attention", rows=work.rows, context=work.context, prompt_tokens=work.prompt_tokens)
            draws = [self._capture(self._next(step)) for step in self._steps_of(sent)]
            self._captures = {
                work: [{layer: _held(kept, work.num_held) for layer, kept in each.items()} for each in draws]
            }
        return self._captures[work]


def _held(sent: _Captured, num_held: int) -> _Captured:
    """The rows that have an expert among the first `num_held`, their other choices marked as held elsewhere."""
    rows_TH, ids_TK, weights_TK = sent
    here_TK = ids_TK < num_held
    rows = here_TK.any(dim=1).nonzero()[:, 0]
    kept_ids_TK = torch.where(here_TK, ids_TK, -1).index_select(0, rows).contiguous()
    return rows_TH.index_select(0, rows), kept_ids_TK, weights_TK.index_select(0, rows).contiguous()


def _sums(spans: Spans, kind: int) -> list[float]:
    """Seconds of all spans of a kind, per step, in the order of the steps."""
    totals: dict[int, float] = dict.fromkeys(spans.steps, 0.0)
    for index, name in enumerate(spans.name_index):
        if name == kind:
            totals[spans.steps[index]] += (spans.ends_ns[index] - spans.starts_ns[index]) * 1e-9
    return list(totals.values())


class RigProcess:
    """What the profiler calls in each of its processes (`harness.children`)."""

    def __init__(self) -> None:
        self._rig: Rig | None = None
        self._end: AttentionEnd | ExpertEnd | None = None

    def open(self, *arguments: Any) -> str:
        """Load the model, a `Rig` of these arguments; the name of its kernels."""
        self._rig = Rig(*arguments)
        return self._rig.backend.name

    def settle(self, num_threads: int, cores: list[int]) -> None:
        """Claim cores and threads as a worker of the engine does."""
        psutil.Process(os.getpid()).cpu_affinity(cores)
        if self._rig is None or self._rig.backend.name == "cpu":
            _native.set_num_threads(num_threads)
            torch.set_num_threads(1)  # PyTorch's own pool would compete with the kernels' pool for the same cores
        else:
            torch.set_num_threads(num_threads)

    def time(self, work: RigWork, seconds: float, min_repetitions: int) -> PartSeconds:
        """Repeat the work at least `min_repetitions` times and for `seconds`."""
        rig = self._opened()
        rig.run_once(work)
        rig.times_of(work)
        deadline = time.monotonic() + seconds
        count = 0
        while count < min_repetitions or (time.monotonic() < deadline and count < _MAX_REPETITIONS):
            rig.run_once(work)
            count += 1
        return rig.times_of(work)

    def keep_busy(self, work: RigWork) -> Iterator[None]:
        """Repeat the work until the next call."""
        rig = self._opened()
        rig.run_once(work)
        try:
            for count in itertools.count():
                yield
                rig.run_once(work)
                if count % 100 == 0:
                    rig.times_of(work)
        finally:
            rig.times_of(work)

    def open_exchange(self, role: Literal["attention", "experts"], *arguments: Any) -> bytes:
        """Become one end of the exchange; the expert worker's end has a ticket for the other one."""
        self._end = ExpertEnd(*arguments) if role == "experts" else AttentionEnd(*arguments)
        return self._end.ticket if isinstance(self._end, ExpertEnd) else b""

    def join_exchange(self, ticket: bytes) -> Iterator[None] | None:
        """Connect to the expert worker. That one serves until the next call."""
        if isinstance(self._end, ExpertEnd):
            return _serve(self._end)
        self._attention().join(ticket)
        return None

    def time_exchange(self, rows: int, num_rounds: int) -> Rounds:
        """`num_rounds` rounds of each kind with `rows` rows, at the attention worker's end."""
        return self._attention().time(rows, num_rounds)

    def stop_exchange(self) -> Served | None:
        """Leave the exchange."""
        assert self._end is not None, "open_exchange comes first"
        served = self._end.served if isinstance(self._end, ExpertEnd) else None
        self._end.close()
        self._end = None
        return served

    def _opened(self) -> Rig:
        assert self._rig is not None, "open comes first"
        return self._rig

    def _attention(self) -> AttentionEnd:
        assert isinstance(self._end, AttentionEnd), "open_exchange comes first"
        return self._end


def _serve(experts: ExpertEnd) -> Iterator[None]:
    while True:
        yield
        experts.serve_one()
