"""The scheduler's fixed limits, and what they refuse before anything is queued.

A request that could never run must be refused at the door: once queued, it would block the head of the line for ever.
"""

from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.cost.kv_blocks import reserved_blocks
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.policy.request import Request


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one attention worker. `max_batch_tokens`: rows of a step over all its micro-batches.

    `context_tokens_per_row`: how many cached keys cost as much to attend to as everything else costs for one row; a
    step's prompt chunks cost at most as much as `max_batch_tokens` rows without a context (`chunk_cost`).
    `watermark_blocks`: blocks that admission leaves free for running requests to grow into (None: 1% of all, at
    least one), so that an admitted request does not push another one out in the next step.
    `vocab_size` None: token ids are not checked.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batch_tokens: int = 2048
    context_tokens_per_row: float = 1024.0
    max_running: int = 256
    watermark_blocks: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_batch_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_batch_tokens < self.max_running:
            raise UserError(
                f"max_batch_tokens is {self.max_batch_tokens}, max_running is {self.max_running}: each running request "
                "needs room for one token a step; raise max_batch_tokens or lower max_running"
            )
        if self.watermark_blocks is not None and self.watermark_blocks < 0:
            raise UserError(f"watermark_blocks is {self.watermark_blocks}: it must be at least 0")

    @property
    def num_reserved_blocks(self) -> int:
        return reserved_blocks(self.num_blocks) if self.watermark_blocks is None else self.watermark_blocks


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise `RequestTooLong` or `UserError` for a request that this worker could never finish."""
    if request.num_prompt == 0:
        raise UserError("the prompt is empty: it must hold at least 1 token")
    needed = request.num_prompt + request.params.max_tokens
    asked = f"prompt ({request.num_prompt}) plus max_tokens ({request.params.max_tokens}) is {needed} tokens"
    if needed > config.max_model_len:
        raise RequestTooLong(
            f"{asked}, above the context length of {config.max_model_len}: shorten the prompt or lower max_tokens"
        )
    capacity = config.num_blocks * config.block_size
    if needed > capacity:
        raise RequestTooLong(
            f"{asked}, above the {capacity} that the KV memory of one attention worker holds: "
            "shorten the prompt, lower max_tokens, or give the server more KV memory"
        )
    if config.vocab_size is not None:
        _check_token_ids(request, config.vocab_size)


def _check_token_ids(request: Request, vocab_size: int) -> None:
    sources = (
        ("the prompt", request.token_ids),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", request.params.logit_bias),
    )
    for name, ids in sources:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise UserError(f"{name} names token {wrong}: it must be between 0 and {vocab_size - 1}")
