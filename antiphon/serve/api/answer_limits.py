"""How large an answer may become: an estimate, before anything is computed for it.

A request of some hundred bytes can ask for gigabytes: answers times tokens times alternatives. The estimate takes
typical lengths: eight bytes of text a token, and for the log-probabilities the vocabulary's average token. The longest
token would be safe and would refuse most of what people ask for. So an answer that grows to twice the limit is given up
(`respond`). Streams without a prompt's log-probabilities have no such limit: they are gone when they are sent.
"""

from antiphon.serve.api.choice import TokenizedPrompt
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from antiphon.specs.sampling import SamplingParams

_TEXT_BYTES = 8
_ID_BYTES = 7
_COMPLETION_BYTES = 24  # of an alternative, beside its token: quotes and number
_COMPLETION_ENTRY_BYTES = 40  # of a token beside its alternatives
_CHAT_BYTES = 64
_PROMPT_ENTRY_BYTES = 72
_DIGITS_OF_A_BYTE = 4  # in a chat's list of bytes


def num_affordable_tokens(context: ApiContext, request: ChatCompletionRequest, logprobs: int | None) -> int:
    """How many tokens each answer of a request without max_tokens may have; at least one."""
    if request.stream:
        return context.engine.info.max_model_len
    per_token = _bytes_per_token(context, request, logprobs) * (request.n or 1)
    return max(1, int(context.settings.max_answer_bytes / per_token))


def check_answer_size(
    context: ApiContext, request: GenerationRequest, prompts: list[TokenizedPrompt], params: list[SamplingParams]
) -> None:
    """`ApiError` 400 when the answer is going to be too large to be made."""
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    if request.stream and params[0].prompt_logprobs is None:
        return
    per_token = _bytes_per_token(context, request, params[0].logprobs)
    per_prompt_token = per_token if echo else _ID_BYTES if request.return_token_ids else 0
    if request.prompt_logprobs is not None:
        length = 1.5 * context.tokenizer.mean_token_characters
        per_prompt_token += (1 + request.prompt_logprobs) * (_PROMPT_ENTRY_BYTES + length)
    num_answers = request.n or 1
    total = num_answers * sum(
        per_prompt_token * len(prompt.token_ids) + per_token * each.max_tokens
        for prompt, each in zip(prompts, params, strict=True)
    )
    if total > context.settings.max_answer_bytes:
        what = f"{num_answers * len(prompts)} choices of up to {max(each.max_tokens for each in params)} tokens"
        what += " after their prompts" if echo else ""
        if params[0].logprobs is not None:
            what += f", {params[0].logprobs} alternatives for each token"
        raise answer_too_large(context, f"would have about {total:.0f} bytes ({what})")


def answer_too_large(context: ApiContext, how: str) -> ApiError:
    return bad_request(
        f"the answer {how}: at most {context.settings.max_answer_bytes} are made for one request; lower max_tokens,"
        " n or the number of logprobs, or send several requests with fewer prompts",
        param="max_tokens",
        code="answer_too_large",
    )


def _bytes_per_token(context: ApiContext, request: GenerationRequest, logprobs: int | None) -> float:
    num_bytes: float = _TEXT_BYTES + (_ID_BYTES if request.return_token_ids else 0)
    if logprobs is None:
        return num_bytes
    length = 1.5 * context.tokenizer.mean_token_characters  # escapes, and letters of two bytes
    if isinstance(request, ChatCompletionRequest):
        return num_bytes + (1 + logprobs) * (_CHAT_BYTES + (1 + _DIGITS_OF_A_BYTE) * length)
    return num_bytes + _COMPLETION_ENTRY_BYTES + length + (1 + logprobs) * (_COMPLETION_BYTES + length)
