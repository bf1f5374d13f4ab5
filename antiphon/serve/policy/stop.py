"""When a request is finished, judged on token ids alone. Stop strings are the API's business: it owns the text.

`min_tokens` is enforced in one place only, the sampler, which bans `stop_ids` until enough tokens are out. A stop
token that arrives nevertheless (a grammar that is complete and allows nothing else) therefore ends the request;
a second check here would let it run on with nothing left to say.
"""

from antiphon.serve.engine_api import FinishReason
from antiphon.serve.policy.request import Request


def finish_reason_after_last_token(request: Request, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token it was just given, or None if it goes on.

    A stop token that is also the last one allowed counts as "stop", as in OpenAI's API.
    """
    num_tokens = len(request.token_ids)
    if request.token_ids[-1] in request.stop_ids:
        return "stop"
    if num_tokens - request.num_prompt >= request.params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return None
