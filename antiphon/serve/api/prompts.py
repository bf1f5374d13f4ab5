"""From what a request says to the token ids of its prompts, within the limits of model and operator.

Short texts are tokenized here, in a few milliseconds at most; long ones, and every chat template, in the processes of
`text_service`. With `truncate_prompt_tokens` a text is tokenized whole, up to a length of its own, and then cut:
tokenizing only its end could split the first kept token differently.
"""

from dataclasses import dataclass

from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.conversation import render_conversation
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.input_limits import too_long
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, Prompt
from antiphon.serve.engine_api import RequestTooLong

_SHORT_CHARACTERS = 2048  # of all texts of a request together
_SHORT_TOKENS = 8192


@dataclass(frozen=True)
class TokenizedPrompt:
    """One prompt; `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str


async def encode_text(
    context: ApiContext, text: str, param: str, *, add_special_tokens: bool, truncated: bool = False
) -> list[int]:
    """Token ids of `text`, which `param` holds; `ApiError` 400 when they do not fit. `truncated`: all its ids, however
    many, because the caller keeps only the last ones."""
    ids = await _encode_texts(context, [text], param, add_special_tokens=add_special_tokens, truncated=truncated)
    return ids[0]


async def _encode_texts(
    context: ApiContext, texts: list[str], param: str, *, add_special_tokens: bool, truncated: bool
) -> list[list[int]]:
    limits = context.limits
    for text in texts:
        limits.check_text(text, param, truncated=truncated)
    if sum(map(len, texts)) <= _SHORT_CHARACTERS:
        encoded = [context.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    else:
        max_tokens = None if truncated else limits.max_prompt_tokens
        try:
            encoded = await context.texts.encode(texts, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        except RequestTooLong as error:
            raise too_long(f"{param} {error}", param) from None
    if not truncated:
        for token_ids in encoded:
            limits.check_num_tokens(len(token_ids), param)
    return encoded


async def decode_ids(context: ApiContext, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """Text of `token_ids`, which are in the vocabulary."""
    if len(token_ids) <= _SHORT_TOKENS:
        return context.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return await context.texts.decode(token_ids, skip_special_tokens=skip_special_tokens)


def check_token_ids(context: ApiContext, token_ids: list[int], param: str) -> None:
    """`ApiError` 400 when an id is outside the model's vocabulary."""
    vocab_size = context.engine.info.vocab_size
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise bad_request(f"{param} holds token id {largest}: ids must be below {vocab_size}", param=param)


async def completion_prompts(context: ApiContext, request: CompletionRequest) -> list[TokenizedPrompt]:
    """The request's prompts in order, truncated if it asked for that, none too long or empty."""
    num_kept = request.truncate_prompt_tokens
    skip_special_tokens = request.skip_special_tokens is not False
    parts = split_prompts(request.prompt)
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await _encode_texts(
        context,
        texts,
        "prompt",
        add_special_tokens=request.add_special_tokens is not False,
        truncated=num_kept is not None,
    )
    ids_of_texts = iter(encoded)
    prompts = []
    for part in parts:
        if isinstance(part, str):
            token_ids = next(ids_of_texts)
        else:
            check_token_ids(context, part, "prompt")
            token_ids = part
        kept = _truncate(token_ids, num_kept)
        if isinstance(part, str) and len(kept) == len(token_ids):
            text = part
        elif request.echo:
            text = await decode_ids(context, kept, skip_special_tokens=skip_special_tokens)
        else:
            text = ""
        prompts.append(_within_limits(context, TokenizedPrompt(kept, text), "prompt"))
    return prompts


async def chat_prompt(context: ApiContext, request: ChatCompletionRequest, *, offers_tools: bool) -> TokenizedPrompt:
    """The conversation through the model's chat template."""
    truncated = request.truncate_prompt_tokens is not None
    text = await render_conversation(
        context,
        request.messages,
        request,
        offers_tools=offers_tools,
        reasoning_effort=request.reasoning_effort,
        truncated=truncated,
    )
    add_special_tokens = bool(request.add_special_tokens)
    token_ids = await encode_text(context, text, "messages", add_special_tokens=add_special_tokens, truncated=truncated)
    kept = _truncate(token_ids, request.truncate_prompt_tokens)
    return _within_limits(context, TokenizedPrompt(kept, text), "messages")


def split_prompts(prompt: Prompt) -> list[str | list[int]]:
    """The single prompts in the four forms a completion's `prompt` has."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _truncate(token_ids: list[int], num_kept: int | None) -> list[int]:
    return token_ids if num_kept is None else token_ids[-num_kept:]


def _within_limits(context: ApiContext, prompt: TokenizedPrompt, param: str) -> TokenizedPrompt:
    if not prompt.token_ids:
        raise bad_request(f"{param} has no tokens: write at least one", param=param)
    context.limits.check_num_tokens(len(prompt.token_ids), param)
    return prompt
