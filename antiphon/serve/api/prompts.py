"""From what a request says to the token ids of its prompts, within the limits of model and operator."""

import asyncio
from dataclasses import dataclass

from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, Message, Prompt
from antiphon.serve.text.tokenizer import ChatMessage

_LONG_TEXT_CHARACTERS = 4096


@dataclass(frozen=True)
class TokenizedPrompt:
    """One prompt; `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str


async def encode_text(context: ApiContext, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`; long texts in a thread, so that running streams go on."""
    if len(text) < _LONG_TEXT_CHARACTERS:
        return context.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(context.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def check_token_ids(context: ApiContext, token_ids: list[int], param: str) -> None:
    """`ApiError` 400 when an id is outside the model's vocabulary."""
    vocab_size = context.engine.info.vocab_size
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise bad_request(f"{param} holds token id {largest}: ids must be below {vocab_size}", param=param)


async def completion_prompts(context: ApiContext, request: CompletionRequest) -> list[TokenizedPrompt]:
    """The request's prompts in order, truncated if it asked for that, none too long or empty."""
    prompts = []
    for part in split_prompts(request.prompt):
        if isinstance(part, str):
            token_ids = await encode_text(context, part, add_special_tokens=True)
            text = part
        else:
            check_token_ids(context, part, "prompt")
            token_ids = part
            text = context.tokenizer.decode(part, skip_special_tokens=True) if request.echo else ""
        kept = _truncate(token_ids, request.truncate_prompt_tokens)
        if len(kept) < len(token_ids):
            text = context.tokenizer.decode(kept, skip_special_tokens=True)
        prompts.append(_within_limits(context, TokenizedPrompt(kept, text), "prompt"))
    return prompts


async def chat_prompt(context: ApiContext, request: ChatCompletionRequest) -> TokenizedPrompt:
    """The conversation through the model's chat template."""
    text = render_messages(context, request.messages, add_generation_prompt=True)
    token_ids = await encode_text(context, text, add_special_tokens=False)
    kept = _truncate(token_ids, request.truncate_prompt_tokens)
    return _within_limits(context, TokenizedPrompt(kept, text), "messages")


def render_messages(context: ApiContext, messages: list[Message], *, add_generation_prompt: bool) -> str:
    """`messages` as one text; text parts of a message are joined by line breaks."""
    plain: list[ChatMessage] = []
    for number, message in enumerate(messages):
        content = message.content
        role: str = message.role
        if role == "developer" and not context.tokenizer.template_reads("developer"):
            role = "system"  # OpenAI's newer name for it; templates drop roles that they do not know
        turn = {
            "role": role,
            "content": content if isinstance(content, str) else "\n".join(part.text for part in content),
        }
        if message.name is not None:
            if not context.tokenizer.template_reads("name"):
                param = f"messages[{number}].name"
                raise bad_request(f"{param}: this model's chat template does not read names; leave it out", param=param)
            turn["name"] = message.name
        plain.append(turn)
    return context.tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt)


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
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise bad_request(f"{param} has no tokens: write at least one", param=param)
    own_limit = context.settings.max_prompt_tokens
    limit = context.engine.info.max_model_len if own_limit is None else own_limit
    if num_tokens > limit:
        raise too_long(f"{param} has {num_tokens} tokens, the limit is {limit}: shorten it", param)
    return prompt


def too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")
