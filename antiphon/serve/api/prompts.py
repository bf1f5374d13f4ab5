"""From what a request says to the token ids of its prompts, within the limits of model and operator.

A chat becomes one text through the model's chat template. What a template does not read would be dropped in silence, so
it is refused here, by name: tools, calls in earlier turns, results of tools, names, variables.

Texts are tokenized, and chat templates rendered, in the processes of `text_service`, where clients take turns: `client`
is whose request it is. With `truncate_prompt_tokens` a text is tokenized whole, up to a length of its own, and then
cut: tokenizing only its end could split the first kept token differently.
"""

import json
from functools import partial
from typing import Any

import msgspec

from antiphon.base.errors import UserError, shortened
from antiphon.serve.api.chat_messages import (
    AssistantMessage,
    Content,
    Message,
    TemplateOptions,
    TextPart,
    Tool,
    ToolMessage,
)
from antiphon.serve.api.choice import TokenizedPrompt
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest, split_prompts
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.text.call_values import call_arguments
from antiphon.serve.text.text_process import RenderChat
from antiphon.serve.text.text_service import settable_variables, thinking_switches
from antiphon.serve.text.tokenizer import ChatMessage, TextTokenizer

_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_NAMES_SHOWN = 32
# Stands behind the last message while it is rendered, so that the text can be cut there.
_CUT_HERE = "\ue000\ue001cut here\ue001\ue000"


async def encode_texts(
    context: ApiContext,
    client: str,
    texts: list[str],
    param: str,
    *,
    add_special_tokens: bool,
    truncated: bool = False,
) -> list[list[int]]:
    """Token ids of each of `texts`, which `param` holds; `ApiError` 400 when they do not fit. `truncated`: all its ids,
    however many, because the caller keeps only the last ones."""
    limits = context.limits
    for text in texts:
        limits.check_text(text, param, truncated=truncated)
    try:
        encoded = await context.texts.encode(
            texts,
            add_special_tokens=add_special_tokens,
            max_tokens=None if truncated else limits.max_prompt_tokens,
            client=client,
        )
    except RequestTooLong as error:
        raise limits.too_long(f"{param} {error}", param) from None
    if not truncated:
        for token_ids in encoded:
            limits.check_num_tokens(len(token_ids), param)
    return encoded


async def bad_word_ids(context: ApiContext, client: str, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
    """What each of `words` is in tokens, within a word and at its beginning."""
    if not words:
        return ()
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    encoded = await encode_texts(context, client, texts, "bad_words", add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))


async def completion_prompts(context: ApiContext, client: str, request: CompletionRequest) -> list[TokenizedPrompt]:
    """The request's prompts in order, truncated if it asked for that, none too long or empty."""
    num_kept = request.truncate_prompt_tokens
    skip_special_tokens = request.skip_special_tokens is not False
    parts = split_prompts(request.prompt)
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await encode_texts(
        context,
        client,
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
            context.limits.check_token_ids(part, "prompt")
            token_ids = part
        kept = _kept(token_ids, request)
        as_given = part if isinstance(part, str) and len(kept) == len(token_ids) else None
        prompt = TokenizedPrompt(kept, as_given or "")
        if request.echo and (as_given is None or request.logprobs is not None):
            prompt = await _echoed(context, client, kept, as_given, skip_special_tokens=skip_special_tokens)
        prompts.append(_within_limits(context, prompt, "prompt"))
    return prompts


async def _echoed(
    context: ApiContext, client: str, token_ids: list[int], as_given: str | None, *, skip_special_tokens: bool
) -> TokenizedPrompt:
    """A prompt whose text is the text of its tokens, so that these have places in it. A tokenizer may change a text
    before it is cut into tokens; special tokens that the client wrote, it gets back."""
    decode = partial(context.texts.decode, token_ids, client=client)
    text = await decode(skip_special_tokens=skip_special_tokens)
    if as_given is not None and text != as_given and skip_special_tokens:
        whole = await decode(skip_special_tokens=False)
        if whole == as_given:
            return TokenizedPrompt(token_ids, whole, shows_special_tokens=True)
    return TokenizedPrompt(token_ids, text)


async def chat_prompt(
    context: ApiContext, client: str, request: ChatCompletionRequest, *, offers_tools: bool
) -> TokenizedPrompt:
    """The conversation through the model's chat template."""
    truncated = request.truncate_prompt_tokens is not None
    text = await render_conversation(
        context,
        client,
        request.messages,
        request,
        offers_tools=offers_tools,
        reasoning_effort=request.reasoning_effort,
        truncated=truncated,
    )
    special = bool(request.add_special_tokens)
    (token_ids,) = await encode_texts(
        context, client, [text], "messages", add_special_tokens=special, truncated=truncated
    )
    return _within_limits(context, TokenizedPrompt(_kept(token_ids, request), text), "messages")


def _kept(token_ids: list[int], request: GenerationRequest) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    return token_ids[:num_kept] if request.truncation_side == "right" else token_ids[-num_kept:]


def _within_limits(context: ApiContext, prompt: TokenizedPrompt, param: str) -> TokenizedPrompt:
    if not prompt.token_ids:
        raise bad_request(f"{param} has no tokens: write at least one", param=param)
    context.limits.check_num_tokens(len(prompt.token_ids), param)
    return prompt


async def render_conversation(
    context: ApiContext,
    client: str,
    messages: list[Message],
    options: TemplateOptions,
    *,
    offers_tools: bool = True,
    reasoning_effort: str | None = None,
    truncated: bool = False,
) -> str:
    """The conversation as one text, ready for the assistant's turn, or in the middle of it.

    `offers_tools` false leaves out `options.tools`. `truncated`: as for `encode_texts`. `ApiError` 400 or
    `UserError` for what the template cannot do, and for a text that cannot fit the context.
    """
    tokenizer = context.tokenizer
    continues = bool(options.continue_final_message)
    if continues and options.add_generation_prompt:
        raise bad_request(
            "add_generation_prompt and continue_final_message exclude each other: send one",
            param="add_generation_prompt",
        )
    limits = context.limits
    names = await context.texts.template_names()
    tools = _described(names, options.tools) if options.tools and offers_tools else None
    asked, defaults = options.chat_template_kwargs or {}, context.settings.chat_template_kwargs
    variables = _variables(names, asked, defaults, reasoning_effort)
    _check_names(tokenizer, messages)
    turns = [_turn_of(tokenizer, message, f"messages[{number}]") for number, message in enumerate(messages)]
    if continues:
        _mark_end(messages[-1], turns[-1], f"messages[{len(messages) - 1}]")
    job = RenderChat(
        messages=turns,
        add_generation_prompt=not continues and options.add_generation_prompt is not False,
        max_characters=limits.max_truncated_characters if truncated else limits.max_prompt_characters,
        tools=tools,
        template_kwargs=variables,
    )
    try:
        text = await _rendered(context, client, job)
    except RequestTooLong as error:
        raise limits.too_long(f"messages {error}", "messages") from None
    _check_roles(text, turns)
    if not continues:
        return text
    if _CUT_HERE not in text:
        raise bad_request("this model's chat template cannot end in a message", param="continue_final_message")
    return text[: text.rindex(_CUT_HERE)]


async def _rendered(context: ApiContext, client: str, job: RenderChat) -> str:
    """Most templates write the arguments of calls as JSON themselves; a few append them to a text, and fail else."""
    try:
        return await context.texts.render(job, client)
    except UserError as error:
        if type(error) is not UserError or not any("tool_calls" in turn for turn in job.messages):
            raise
        as_text = msgspec.structs.replace(job, messages=_with_arguments_as_text(job.messages))
        try:
            return await context.texts.render(as_text, client)
        except UserError:
            raise error from None


def _described(names: frozenset[str], tools: list[Tool]) -> list[dict[str, Any]]:
    if "tools" not in names:
        raise bad_request("tools: this model's chat template does not read tools; leave them out", param="tools")
    described = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        described.append({"type": "function", "function": function})
    return described


def _variables(
    names: frozenset[str], asked: dict[str, Any], defaults: dict[str, Any], reasoning_effort: str | None
) -> dict[str, Any]:
    settable = settable_variables(names)
    for name in asked:
        if name not in settable:
            readable = ", ".join(sorted(settable)[:_MAX_NAMES_SHOWN]) or "none"
            raise bad_request(
                f"chat_template_kwargs has {shortened(name)!r}: the variables of this model's chat template that "
                f"requests can set are: {readable}",
                param="chat_template_kwargs",
            )
    if reasoning_effort is None:
        return defaults | asked
    if "reasoning_effort" in settable:
        return defaults | {"reasoning_effort": reasoning_effort} | asked
    switches = thinking_switches(settable, on=reasoning_effort != "none")
    if switches or reasoning_effort == "none":
        return defaults | switches | asked
    raise bad_request(
        f"reasoning_effort is {reasoning_effort!r}: this model's chat template does not read it; leave it out or send"
        ' null or "none"',
        param="reasoning_effort",
    )


# --- messages as templates read them ----------------------------------------------------------------------------------


def _turn_of(tokenizer: TextTokenizer, message: Message, param: str) -> ChatMessage:
    """One message as templates want it; text parts are joined by line breaks."""
    role: str = message.role
    if role == "developer" and not tokenizer.template_reads("developer"):
        role = "system"  # OpenAI's newer name for it; templates drop roles that they do not know
    turn: ChatMessage = {"role": role, "content": text_of(message.content)}
    if isinstance(message, ToolMessage):
        if not tokenizer.template_reads("tool"):
            raise _not_read(f"{param}.role", "results of tools")
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        elif tokenizer.template_reads("tool_call_id"):
            name = f"{param}.tool_call_id"
            raise bad_request(f"{name} is missing: this model's chat template reads it", param=name)
    elif isinstance(message, AssistantMessage):
        _add_answered(tokenizer, message, turn, param)
    if message.name is not None and tokenizer.template_reads("name"):
        turn["name"] = message.name
    return turn


def _add_answered(tokenizer: TextTokenizer, message: AssistantMessage, turn: ChatMessage, param: str) -> None:
    """What only the model says: refusals, calls, reasoning. Templates that read no reasoning are of models that do not
    see that of earlier turns; others choose the turns whose reasoning they write."""
    if message.refusal is not None:
        turn["content"] += ("\n" if turn["content"] else "") + message.refusal
    if message.tool_calls:
        if not tokenizer.template_reads("tool_calls"):
            raise _not_read(f"{param}.tool_calls", "calls of tools")
        turn["tool_calls"] = _calls(message, param)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    if message.content is message.refusal is reasoning is None and not message.tool_calls:
        raise bad_request(f"{param}.content is missing: send a text, or tool_calls", param=f"{param}.content")


def _check_roles(text: str, turns: list[ChatMessage]) -> None:
    """`ApiError` 400 where a template dropped a message, because it does not know the role."""
    for number, turn in enumerate(turns):
        role = turn["role"]
        if role not in _USUAL_ROLES and not (role in text and turn["content"].strip() in text):
            param = f"messages[{number}].role"
            raise bad_request(
                f"{param} is {role!r}: this model's chat template does not know it; use {', '.join(_USUAL_ROLES)}",
                param=param,
            )


def _check_names(tokenizer: TextTokenizer, messages: list[Message]) -> None:
    """Names tell those apart who speak in one role. `ApiError` 400 where that would be lost."""
    if tokenizer.template_reads("name"):
        return
    first: dict[str, str] = {}
    for number, message in enumerate(messages):
        if message.name is None or isinstance(message, ToolMessage):  # the call's id says it too
            continue
        if first.setdefault(message.role, message.name) != message.name:
            raise _not_read(f"messages[{number}].name", "names, and two of one role differ")


def text_of(content: Content | None) -> str:
    """What a message says, its parts joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _not_read(param: str, what: str) -> Exception:
    return bad_request(f"{param}: this model's chat template does not read {what}; leave it out", param=param)


def _calls(message: AssistantMessage, param: str) -> list[dict[str, Any]]:
    calls = []
    for number, call in enumerate(message.tool_calls or ()):
        arguments = call_arguments(call.function.arguments)
        if arguments is None:
            where = f"{param}.tool_calls[{number}].function.arguments"
            raise bad_request(f"{where} is not a JSON object as text: send one", param=where)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _with_arguments_as_text(turns: list[ChatMessage]) -> list[ChatMessage]:
    """Copies in which the arguments of calls are texts of JSON."""
    copies = []
    for turn in turns:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls", ())
        ]
        copies.append(turn | {"tool_calls": calls} if calls else turn)
    return copies


def _mark_end(message: Message, turn: ChatMessage, param: str) -> None:
    """Add `_CUT_HERE` to the turn of the last message, which `param` holds; `ApiError` 400 when it is none to go on."""
    if message.role != "assistant" or "tool_calls" in turn or not turn["content"]:
        raise bad_request(
            f"continue_final_message: {param} must be the assistant's and have text, and no calls",
            param="continue_final_message",
        )
    turn["content"] += _CUT_HERE
