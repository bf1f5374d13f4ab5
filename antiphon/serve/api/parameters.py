"""What a request's parameters mean: `SamplingParams`; defaults, limits of model and operator; how large the answer may
become.

Defaults are OpenAI's; a chat answer without a limit may fill the rest of the context, as far as an answer may be so
large. n answers with a seed use seed, seed + 1, ...: each is reproducible alone.

A request of some hundred bytes can ask for gigabytes: answers times tokens times alternatives. So an answer's size is
estimated before anything is computed for it, with typical lengths: eight bytes of text a token, and for the
log-probabilities the vocabulary's average token. The longest token would be safe and would refuse most of what people
ask for. So an answer that grows to twice the limit is given up (`respond`). Streams without a prompt's
log-probabilities have no such limit: they are gone when they are sent.
"""

import dataclasses
from typing import Any

from antiphon.serve.api.choice import TokenizedPrompt
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from antiphon.serve.api.settings import too_long
from antiphon.specs.sampling import SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
_TEXT_BYTES = 8
_ID_BYTES = 7
_COMPLETION_BYTES = 24  # of an alternative, beside its token: quotes and number
_COMPLETION_ENTRY_BYTES = 40  # of a token beside its alternatives
_CHAT_BYTES = 64
_PROMPT_ENTRY_BYTES = 72
_DIGITS_OF_A_BYTE = 4  # in a chat's list of bytes
# What a request and the engine call alike, with the same default.
_SAME = (
    "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "priority",
)  # fmt: skip
BadWords = tuple[tuple[int, ...], ...]


def check_request(context: ApiContext, request: GenerationRequest, num_prompts: int) -> None:
    """Everything that can be refused before anything is tokenized or compiled further."""
    settings = context.settings
    num_answers = request.n or 1
    if num_answers > settings.max_n:
        raise bad_request(f"n is {num_answers}: at most {settings.max_n}", param="n")
    if request.best_of is not None and request.best_of != num_answers:
        raise bad_request(
            f"best_of is {request.best_of}: it must be n ({num_answers}), because no answer is thrown away; raise n and"
            " choose among the answers yourself",
            param="best_of",
        )
    if num_answers * num_prompts > settings.max_choices_per_request:
        raise bad_request(
            f"n is {num_answers} for {num_prompts} prompts: at most {settings.max_choices_per_request} answers a"
            " request; send several requests",
            param="n",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", param="stream_options")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        context.limits.check_token_ids(getattr(request, name) or [], name)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not sent in streams: leave out stream or prompt_logprobs", param="stream")
    bias = request.logit_bias or {}
    if len(bias) > settings.max_logit_bias:
        raise bad_request(f"logit_bias has {len(bias)} entries: at most {settings.max_logit_bias}", param="logit_bias")
    context.limits.check_token_ids(list(bias), "logit_bias")


def sampling_params(
    context: ApiContext,
    request: CompletionRequest | ChatCompletionRequest,
    num_prompt_tokens: int,
    grammar: str | None,
    bad_words: BadWords,
) -> SamplingParams:
    """The engine's parameters for the answers to one prompt; `ApiError` 400 for what does not fit the context or
    contradicts itself."""
    limit = context.engine.info.max_model_len
    room = max(1, limit - num_prompt_tokens)  # at least one, so that a full context is an error
    if isinstance(request, ChatCompletionRequest):
        max_tokens, logprobs, prompt_logprobs = _of_chat(context, request, room)
    else:
        max_tokens, logprobs, prompt_logprobs = _of_completion(request, room)
    reported_ids = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    if reported_ids and logprobs is None:
        raise bad_request("logprob_token_ids needs logprobs", param="logprob_token_ids")
    if num_prompt_tokens + max_tokens > limit:
        raise too_long(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}:"
            f" the model's context is {limit}; shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens is {min_tokens}: at most max_tokens ({max_tokens})", param="min_tokens")
    stated: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **stated,
        max_tokens=max_tokens,
        top_k=max(0, request.top_k or 0),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=len(reported_ids) if reported_ids else logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
        logprob_token_ids=reported_ids,
        grammar=grammar,
    )


def _of_completion(request: CompletionRequest, room: int) -> tuple[int, int | None, int | None]:
    """The most tokens of an answer, and the alternatives to report for its tokens and for those of the prompt."""
    of_prompt = request.logprobs if request.echo else None
    if request.prompt_logprobs is not None:
        if of_prompt not in (None, request.prompt_logprobs):
            raise bad_request(
                f"prompt_logprobs is {request.prompt_logprobs}, and echo reports logprobs ({of_prompt}) of the prompt:"
                " send the same number, or one of the two",
                param="prompt_logprobs",
            )
        of_prompt = request.prompt_logprobs
    max_tokens = min(_DEFAULT_COMPLETION_TOKENS, room) if request.max_tokens is None else request.max_tokens
    return max_tokens, request.logprobs, of_prompt


def _of_chat(context: ApiContext, request: ChatCompletionRequest, room: int) -> tuple[int, int | None, int | None]:
    """As `_of_completion`."""
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise bad_request("max_tokens and max_completion_tokens mean the same: send one of them", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.max_tokens == 0:
        raise bad_request("max_tokens is 0: a chat answer has at least 1 token", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is None:
        max_tokens = min(room, _num_affordable_tokens(context, request, logprobs))
    return max_tokens, logprobs, request.prompt_logprobs


def with_seed(params: SamplingParams, seed: int | None, answer: int) -> SamplingParams:
    """The parameters of answer number `answer`; seeds reach the engine as 0 to 2**63 - 1, whatever sign was sent."""
    return params if seed is None else dataclasses.replace(params, seed=(seed + answer) % 2**63)


# --- how large an answer may become -----------------------------------------------------------------------------------


def _num_affordable_tokens(context: ApiContext, request: ChatCompletionRequest, logprobs: int | None) -> int:
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
