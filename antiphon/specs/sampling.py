"""How one request's tokens are chosen, as frozen data shared by API, policy and workers. No torch."""

from dataclasses import dataclass, field

from antiphon.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Token-level sampling parameters, in OpenAI's and vLLM's meaning.

    Stop *strings* are the API's business (it owns the text); everything here is about token ids.
    `logprobs`: how many alternatives to report per sampled token (0: only the sampled one), None: none at all.
    `prompt_logprobs`: the same for prompt tokens. `seed` None: the engine draws one and keeps it, so that a request
    that is preempted or recomputed continues with the same choices.
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
    grammar: str | None = None  # serialized grammar for the structured-output library, None: free text

    def __post_init__(self) -> None:
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
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "between 0 and 20"),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
                "prompt_logprobs",
                self.prompt_logprobs,
                "between 0 and 20",
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
