"""What the sampler remembers of one request: parameters, seed, and token counts if penalties need them.

Counts are kept as a list of distinct tokens with a count each, not as a row of the vocabulary: 152k counters for each
of 256 requests would be 156 MB touched at random, the tokens of a conversation are a few thousand. They live in host
memory, where the tokens come from, and go to the device with each penalised batch.

A token is counted when its position first appears as *input* of a step (or at the start), never when it is sampled. So
a step that is sent again after a failure counts nothing twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.specs.sampling import SamplingParams


class TokenCounts:
    """Distinct tokens of one request in order of first appearance, with how often each was *generated*."""

    def __init__(self) -> None:
        self._index_of: dict[int, int] = {}
        self._ids = torch.empty(64, dtype=torch.int64)
        self._counts = torch.zeros(64)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> Tensor:
        """float32, 0 for tokens that are only in the prompt."""
        return self._counts[: len(self._index_of)]

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        distinct = [token for token in dict.fromkeys(token_ids) if token not in self._index_of]
        first, end = len(self._index_of), len(self._index_of) + len(distinct)
        self._reserve(end)
        self._ids[first:end] = torch.tensor(distinct, dtype=torch.int64)
        self._index_of.update(zip(distinct, range(first, end), strict=True))

    def add_output(self, token_id: int) -> None:
        index = self._index_of.get(token_id)
        if index is None:
            index = self._index_of[token_id] = len(self._index_of)
            self._reserve(index + 1)
            self._ids[index] = token_id
        self._counts[index] += 1

    def _reserve(self, size: int) -> None:
        missing = size - len(self._ids)
        if missing > 0:
            grow = max(missing, len(self._ids))
            self._ids = torch.cat([self._ids, torch.empty(grow, dtype=torch.int64)])
            self._counts = torch.cat([self._counts, torch.zeros(grow)])


class SamplingState:
    """One request on its worker. `stop_ids` (end-of-sequence and stop tokens) are banned until `min_tokens` are out."""

    def __init__(
        self, params: SamplingParams, *, seed: int, stop_ids: Sequence[int], token_ids: Sequence[int], num_prompt: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.num_prompt = num_prompt
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self.bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self.penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.plain_greedy = params.greedy and not self.penalised and not params.logit_bias and params.logprobs is None
        self.token_counts = TokenCounts()
        self._num_seen = num_prompt
        if self.penalised and params.repetition_penalty != 1.0:
            self.token_counts.add_prompt(token_ids[:num_prompt])
        self.observe(num_prompt, token_ids[num_prompt:])

    def observe(self, start: int, token_ids: Sequence[int]) -> None:
        """The tokens at positions `start` and on are known. Prompt tokens and those seen before are passed over."""
        if self.penalised:
            for token_id in token_ids[max(self._num_seen - start, 0) :]:
                self.token_counts.add_output(token_id)
        self._num_seen = max(self._num_seen, start + len(token_ids))

    def bans_stop_ids(self, output_index: int) -> bool:
        """Whether output token `output_index` (0 is the first) must not end the request."""
        return output_index < self.params.min_tokens and bool(self.stop_ids)
