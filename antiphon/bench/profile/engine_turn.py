"""What the engine itself takes between two steps, and a worker beside its kernels, from a real engine over the model.

The workers record their steps; the gap between the end of one and the begin of the next is the engine's turn: the
result on its way, tokens committed and handed out, the next step planned, cut and sent. Nothing else is taken from this
run: what the kernels take is measured alone.

Rejected: the same over a model too small to matter. Its steps leave the caches and the cores to the engine, whose turn
then takes half of what it takes between real steps.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.antiphon_engine import AntiphonEngine, parse_contestant
from antiphon.bench.profile.step_parts import step_parts
from antiphon.bench.serve import WorkloadSize, make_workload
from antiphon.models.config import load_model_spec

_PROMPT_TOKENS = 4
_MORE = 4


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Seconds of a step outside the layers: `engine_s` between the workers' steps, `bookkeeping_s` within them, and
    `head_s`: logits and sampling as they are within the engine."""

    engine_s: float
    bookkeeping_s: float
    head_s: float


def engine_turns(
    contestant: str, model: Path, rows: Sequence[int], num_steps: int, advance: Callable[[], None]
) -> dict[int, Turn]:
    """By requests running on one attention worker; `advance` after each size."""
    spec = load_model_spec(model)
    workers = parse_contestant(contestant).num_attention
    tokens = min(spec.max_position, _PROMPT_TOKENS + _MORE * num_steps)
    engine = AntiphonEngine(contestant, model, max_concurrency=max(rows) * workers, max_tokens=tokens, trace=True)
    engine.start()
    try:
        turns = {}
        for count in rows:
            turns[count] = _turn(engine, count * workers, (num_steps, tokens - _PROMPT_TOKENS), spec.vocab_size)
            advance()
        return turns
    finally:
        engine.close()


def _turn(engine: AntiphonEngine, concurrency: int, attempts: Sequence[int], vocab_size: int) -> Turn:
    """On a machine where others are busy, requests may arrive so slowly that more steps are needed."""
    for steps in attempts:
        engine.take_spans()
        size = WorkloadSize(concurrency, min(_PROMPT_TOKENS, vocab_size), steps)
        with suppress(UserError):  # never did all requests decode at once
            engine.steady_decode_tokens_per_s(make_workload(size, vocab_size))
        parts = step_parts(engine.take_spans(), concurrency)
        if parts.get("engine"):
            return Turn(engine_s=parts["engine"], bookkeeping_s=parts["bookkeeping"], head_s=parts["head"])
    raise ResourceError(
        f"{concurrency} requests never decoded together within {attempts[-1]} steps: other programs keep this machine "
        f"too busy to be measured, try again later"
    )
