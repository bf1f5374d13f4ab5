"""Log-probabilities to report: log-softmax of the *raw* logits, before bias, penalties, grammar and temperature.

This is vLLM's default, and OpenAI's since logit bias no longer shows in its log-probabilities: what the model thinks,
comparable between requests, and always finite. Rejected: the distribution actually drawn from, in which a masked
alternative is minus infinity (not JSON) and greedy decoding would report 0 for every token.

A token's rank is 1 plus the number of strictly more likely tokens. Alternatives are ordered by probability, then id.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.specs.sampling import TokenLogprob

MAX_ALTERNATIVES = 20  # the API's limit; always searched, so that ties do not depend on what batch mates asked for


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    """For each row of raw logits: the log-probability and rank of its token, and the row's best alternatives."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R = logprobs_RV.gather(1, torch.tensor(token_ids, device=logits_RV.device).unsqueeze(1))
    ranks = ((logprobs_RV > chosen_R).sum(1) + 1).tolist()
    best = logprobs_RV.topk(min(MAX_ALTERNATIVES, logits_RV.shape[1]), dim=-1)
    rows = zip(token_ids, chosen_R.squeeze(1).tolist(), ranks, num_alternatives, strict=True)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    result = []
    for (token_id, logprob, rank, count), (ids, values) in zip(rows, tops, strict=True):
        ordered = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        result.append(TokenLogprob(token_id, logprob, rank, tuple(ordered[:count])))
    return result


def prompt_logprobs(logits_RV: Tensor, next_token_ids: Sequence[int], num_alternatives: int) -> list[TokenLogprob]:
    """The same for rows of a prompt, whose next tokens are known. Takes R x V floats: the caller bounds R."""
    return token_logprobs(logits_RV, next_token_ids, [num_alternatives] * len(next_token_ids))
