"""How one request's tokens are chosen and how urgent it is, as frozen data of API, policy and workers. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.base.errors import UserError

MAX_LOGPROBS = 20  # of alternatives of one token


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Token-level sampling parameters, in OpenAI's and vLLM's meaning.

    Stop *strings* are the API's business (it owns the text); everything here is about token ids.
    `logprobs`: how many alternatives to report per sampled token (0: only the sampled one), None: none at all.
    `prompt_logprobs`: the same for prompt tokens. `seed` None: the engine draws one and keeps it, so that a request
    that is preempted or recomputed continues with the same choices. `allowed_token_ids` empty: all are.
    `bad_words`: sequences of tokens that must not come. `logprob_token_ids`: these are reported in place of the
    likeliest alternatives, `logprobs` of them. `priority`: smaller goes first, in the line and when memory is short.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    priority: int = 0
    grammar: str | None = None  # serialized grammar for the structured-output library, None: free text

    def __post_init__(self) -> None:
        allowed = f"between 0 and {MAX_LOGPROBS}"
        checks = (
            (self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens"),
            (0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1"),
            (self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or a positive count"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "between -2 and 2"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "between -2 and 2"),
            (
                0.0 < self.repetition_penalty <= 100.0,
                "repetition_penalty",
                self.repetition_penalty,
                "above 0, at most 100",
            ),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "between -2**63 and 2**63 - 1"),
            (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", self.logprobs, allowed),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                "prompt_logprobs",
                self.prompt_logprobs,
                allowed,
            ),
            (all(self.bad_words), "bad_words", self.bad_words, "words of at least one token"),
            (
                not self.logprob_token_ids or self.logprobs == len(self.logprob_token_ids),
                "logprobs",
                self.logprobs,
                f"the number of logprob_token_ids ({len(self.logprob_token_ids)})",
            ),
        )
        for holds, name, value, limit in checks:
            if not holds:
                raise UserError(f"{name} is {value}: it must be {limit}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token (natural log) under the raw logits: before bias, penalties, grammar and temperature.

    `rank` is 1 plus the number of more likely tokens; `top` holds the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PackedLogprobs:
    """`TokenLogprob`s of rows one after the other, as bytes that travel and wait without being looked at: one object
    for a chunk of a prompt, not twenty for each of its tokens.

    A row has its token and then its `num_top` alternatives, best first: `ids` int32 and `values` float32 of shape
    [rows, 1 + num_top]; `ranks` int32 [rows]."""

    num_top: int
    ids: bytes
    values: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[TokenLogprob]:
        ids, values = memoryview(self.ids).cast("i"), memoryview(self.values).cast("f")
        width = 1 + self.num_top
        for row, rank in enumerate(memoryview(self.ranks).cast("i")):
            begin, end = row * width, (row + 1) * width
            top = tuple(zip(ids[begin + 1 : end], values[begin + 1 : end], strict=True))
            yield TokenLogprob(ids[begin], values[begin], rank, top)


class PromptLogprobs:
    """Log-probabilities of all tokens of a prompt, in the pieces that were computed. The first token has None: nothing
    precedes it."""

    def __init__(self, pieces: list[PackedLogprobs]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return 1 + sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        yield None
        for piece in self._pieces:
            yield from piece
