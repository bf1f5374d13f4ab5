"""What a request's parameters mean: `SamplingParams`, grammar, tools; defaults, limits of model and operator.

Defaults are OpenAI's; a chat answer without a limit may fill the rest of the context, as far as an answer may be so
large. n answers with a seed use
seed, seed + 1, ...: each is reproducible alone.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from antiphon.base.errors import UserError
from antiphon.serve.api.answer_limits import num_affordable_tokens
from antiphon.serve.api.chat_messages import AllowedToolsChoice, FunctionDefinition, NamedToolChoice
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import bad_request, from_user_error, too_busy
from antiphon.serve.api.guard.input_limits import too_long
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from antiphon.serve.engine_api import QueueFull, ShuttingDown
from antiphon.serve.text.grammar_text import tool_grammar
from antiphon.serve.text.tool_calls import ToolCallReader, ToolFormat, tool_format
from antiphon.specs.sampling import SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
BadWords = tuple[tuple[int, ...], ...]
_GRAMMAR_PATIENCE_S = 60.0
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}


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


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call. `rules` makes the grammar it must follow (see `tool_grammar`), outside the event
    loop; None for no grammar."""

    form: ToolFormat
    names: frozenset[str]
    at_most_one: bool
    rules: Callable[[], str] | None

    def reader(self) -> ToolCallReader:
        """A reader for one answer."""
        return ToolCallReader(self.form, self.names, at_most_one=self.at_most_one)


def tool_use(context: ApiContext, request: ChatCompletionRequest) -> ToolUse | None:
    """None when nothing may be called; `ApiError` 400 when the request contradicts itself or the model cannot do it."""
    functions = {tool.function.name: tool.function for tool in request.tools or ()}
    choice = request.tool_choice
    _check_names(request, functions)
    if not functions or choice == "none":
        return None
    form = tool_format(context.tokenizer.chat_template)
    if form is None:
        raise bad_request(
            "tools: this model's chat template teaches a format of calls that this server does not read; leave them out"
            ' or send tool_choice "none"',
            param="tools",
        )
    at_most_one = request.parallel_tool_calls is False
    forced = choice == "required"
    if isinstance(choice, NamedToolChoice):
        functions = {choice.function.name: functions[choice.function.name]}
        at_most_one = forced = True
    elif isinstance(choice, AllowedToolsChoice):
        functions = {tool.function.name: functions[tool.function.name] for tool in choice.allowed_tools.tools}
        forced = choice.allowed_tools.mode == "required"
    return ToolUse(
        form, frozenset(functions), at_most_one, _rules(context, request, form, functions, forced, at_most_one)
    )


def _check_names(request: ChatCompletionRequest, functions: dict[str, FunctionDefinition]) -> None:
    choice = request.tool_choice
    if len(functions) < len(request.tools or ()):
        raise bad_request("tools has two functions of the same name: give each its own", param="tools")
    wants_call = isinstance(choice, NamedToolChoice | AllowedToolsChoice) or choice == "required"
    if wants_call and not functions:
        raise bad_request("tool_choice wants a call: send tools to choose from", param="tool_choice")
    named = [choice] if isinstance(choice, NamedToolChoice) else []
    if isinstance(choice, AllowedToolsChoice):
        named = choice.allowed_tools.tools
    for tool in named:
        if tool.function.name not in functions:
            raise bad_request(f"tool_choice names {tool.function.name!r}: it is not among tools", param="tool_choice")


def _rules(
    context: ApiContext,
    request: ChatCompletionRequest,
    form: ToolFormat,
    functions: dict[str, FunctionDefinition],
    forced: bool,
    at_most_one: bool,
) -> Callable[[], str] | None:
    answer_schema: dict[str, Any] | None = None
    if isinstance(request.response_format, JsonObjectFormat):
        answer_schema = {"type": "object"}
    elif isinstance(request.response_format, JsonSchemaFormat):
        answer_schema = request.response_format.json_schema.schema_
    strict = any(function.strict for function in functions.values())
    if not (forced or strict or answer_schema is not None):
        return None
    if context.grammars is None:
        raise bad_request("this model cannot follow a grammar (the server's log says why)", param="tools")
    added_id = context.tokenizer.token_bytes.added_id
    schemas: dict[str, dict[str, Any]] = {}
    for name, function in functions.items():
        own = _NO_PARAMETERS if function.parameters is None else function.parameters
        schemas[name] = own if forced or function.strict else {}
    return partial(
        tool_grammar,
        form,
        schemas,
        forced=forced,
        at_most_one=at_most_one,
        answer_schema=answer_schema,
        mark_ids=(added_id(form.begin), added_id(form.end)),
    )


async def compile_grammar(
    context: ApiContext, request: GenerationRequest, client: Hashable, tools: ToolUse | None = None
) -> str | None:
    """The grammar that `tools` or `response_format` ask for, None for free text; `ApiError` 400 when a schema cannot be
    followed, 429 when other schemas take too long; `client` takes turns with others."""
    if tools is not None and tools.rules is not None:
        assert context.grammars is not None
        return await _compiled(context.grammars.compile_rules(tools.rules, client), "tools")
    wanted = request.response_format
    if not isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
        return None
    if context.grammars is None:
        raise bad_request("this model cannot follow a grammar (the server's log says why)", param="response_format")
    if isinstance(wanted, JsonObjectFormat):
        return context.grammars.json_object()
    return await _compiled(context.grammars.compile(wanted.json_schema.schema_, client), "response_format")


async def _compiled(compiling: Future[str], param: str) -> str:
    try:
        async with asyncio.timeout(_GRAMMAR_PATIENCE_S):
            return await asyncio.wrap_future(compiling)
    except TimeoutError as error:
        raise too_busy("too many JSON schemas wait to be compiled: try again later", _GRAMMAR_PATIENCE_S) from error
    except (QueueFull, ShuttingDown) as error:
        raise from_user_error(error) from error
    except UserError as error:
        raise bad_request(str(error), param=param, code="grammar_error") from error


def completion_sampling(
    context: ApiContext, request: CompletionRequest, num_prompt_tokens: int, grammar: str | None, bad_words: BadWords
) -> SamplingParams:
    max_tokens = request.max_tokens
    of_prompt = request.logprobs if request.echo else None
    if request.prompt_logprobs is not None:
        if of_prompt not in (None, request.prompt_logprobs):
            raise bad_request(
                f"prompt_logprobs is {request.prompt_logprobs}, and echo reports logprobs ({of_prompt}) of the prompt:"
                " send the same number, or one of the two",
                param="prompt_logprobs",
            )
        of_prompt = request.prompt_logprobs
    if max_tokens is None:
        max_tokens = min(_DEFAULT_COMPLETION_TOKENS, _room(context, num_prompt_tokens))
    return _sampling(
        context,
        request,
        num_prompt_tokens,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=of_prompt,
        grammar=grammar,
        bad_words=bad_words,
    )


def chat_sampling(
    context: ApiContext,
    request: ChatCompletionRequest,
    num_prompt_tokens: int,
    grammar: str | None,
    bad_words: BadWords,
) -> SamplingParams:
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise bad_request("max_tokens and max_completion_tokens mean the same: send one of them", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.max_tokens == 0:
        raise bad_request("max_tokens is 0: a chat answer has at least 1 token", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is None:
        max_tokens = min(_room(context, num_prompt_tokens), num_affordable_tokens(context, request, logprobs))
    return _sampling(
        context,
        request,
        num_prompt_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
        bad_words=bad_words,
    )


def _room(context: ApiContext, num_prompt_tokens: int) -> int:
    """Tokens that still fit the context after the prompt; at least one, so that a full context is an error."""
    return max(1, context.engine.info.max_model_len - num_prompt_tokens)


def _sampling(
    context: ApiContext,
    request: GenerationRequest,
    num_prompt_tokens: int,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None,
    bad_words: BadWords,
) -> SamplingParams:
    reported_ids = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    if reported_ids and logprobs is None:
        raise bad_request("logprob_token_ids needs logprobs", param="logprob_token_ids")
    limit = context.engine.info.max_model_len
    if num_prompt_tokens + max_tokens > limit:
        raise too_long(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}:"
            f" the model's context is {limit}; shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens is {min_tokens}: at most max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or_default(request.temperature, 1.0),
        top_p=_or_default(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or_default(request.min_p, 0.0),
        presence_penalty=_or_default(request.presence_penalty, 0.0),
        frequency_penalty=_or_default(request.frequency_penalty, 0.0),
        repetition_penalty=_or_default(request.repetition_penalty, 1.0),
        logit_bias=request.logit_bias or {},
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=len(reported_ids) if reported_ids else logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
        logprob_token_ids=reported_ids,
        priority=request.priority or 0,
        grammar=grammar,
    )


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def with_seed(params: SamplingParams, seed: int | None, answer: int) -> SamplingParams:
    """The parameters of answer number `answer`; seeds reach the engine as 0 to 2**63 - 1, whatever sign was sent."""
    return params if seed is None else dataclasses.replace(params, seed=(seed + answer) % 2**63)
