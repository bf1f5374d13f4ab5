"""How thoroughly a machine is measured: which sizes, and for how long each."""

from dataclasses import dataclass, replace
from typing import Self

from antiphon.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Effort:
    """`rows`: requests of a micro-batch; `prompts`: tokens of a prompt; `contexts`: a short and a long one, in tokens;
    `beside_rows`: sizes at which two workers run beside each other. Of training: `sequences` of a micro-batch,
    `training_steps` of each, `sum_bytes` that are summed over ranks. `point_s`: time for one figure. `together`:
    whether an engine of several workers is started, to see what each further one adds to the engine's turn."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    contexts: tuple[int, int] = (64, 512)
    beside_rows: tuple[int, ...] = (1, 8, 32, 128)
    exchange_rows: tuple[int, ...] = (1, 8, 32, 128, 512)
    engine_rows: tuple[int, ...] = (1, 8, 32, 128)
    sequences: tuple[int, ...] = (1, 4, 8)
    sum_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
    training_steps: int = 4
    point_s: float = 0.25
    min_repetitions: int = 3
    exchange_rounds: int = 20
    engine_steps: int = 24
    limit_passes: int = 3
    together: bool = True

    def bounded(self, max_rows: int, max_context: int) -> Self:
        """The same within what is wanted and what the model's context allows. `UserError` where nothing is left."""
        if max_rows < 1:
            raise UserError(f"--max-rows is {max_rows}: it must be at least 1")
        if max_context < 2:
            raise UserError(f"the model's context is {max_context}: at least 2 tokens are needed to measure")
        short = min(self.contexts[0], max_context // 2)
        return replace(
            self,
            rows=_up_to(self.rows, max_rows),
            prompts=_up_to(self.prompts, max_context),
            contexts=(short, max(short + 1, min(self.contexts[1], max_context))),
            beside_rows=_up_to(self.beside_rows, max_rows),
            engine_rows=_up_to(self.engine_rows, max_rows),
        )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes up to `largest`, and `largest` itself if any was above."""
    return sizes if sizes[-1] <= largest else (*(size for size in sizes if size < largest), largest)


NORMAL = Effort()
QUICK = Effort(
    rows=(1, 4, 16),
    prompts=(16, 64),
    contexts=(16, 64),
    beside_rows=(1, 16),
    exchange_rows=(1, 32),
    engine_rows=(1, 8),
    sequences=(1, 2),
    sum_bytes=(1 << 10, 1 << 18, 1 << 22),
    training_steps=2,
    point_s=0.02,
    min_repetitions=3,
    exchange_rounds=5,
    engine_steps=12,
    limit_passes=1,
    together=False,
)
