"""What the tools of a chat request mean for its answers: what may or must be called, and how calls are read."""

from dataclasses import dataclass
from typing import Any

from antiphon.serve.api.chat_messages import FunctionDefinition, NamedToolChoice
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.requests import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.serve.text.tool_calls import ToolCallReader, ToolFormat, tool_format
from antiphon.serve.text.tool_grammar import tool_grammar

_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call. `rules`: the grammar it must follow (see `tool_grammar`), None for no grammar."""

    form: ToolFormat
    names: frozenset[str]
    at_most_one: bool
    rules: str | None

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
    return ToolUse(
        form, frozenset(functions), at_most_one, _rules(context, request, form, functions, forced, at_most_one)
    )


def _check_names(request: ChatCompletionRequest, functions: dict[str, FunctionDefinition]) -> None:
    choice = request.tool_choice
    if len(functions) < len(request.tools or ()):
        raise bad_request("tools has two functions of the same name: give each its own", param="tools")
    wants_call = isinstance(choice, NamedToolChoice) or choice == "required"
    if wants_call and not functions:
        raise bad_request("tool_choice wants a call: send tools to choose from", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in functions:
        raise bad_request(f"tool_choice names {choice.function.name!r}: it is not among tools", param="tool_choice")


def _rules(
    context: ApiContext,
    request: ChatCompletionRequest,
    form: ToolFormat,
    functions: dict[str, FunctionDefinition],
    forced: bool,
    at_most_one: bool,
) -> str | None:
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
    return tool_grammar(
        form,
        schemas,
        forced=forced,
        at_most_one=at_most_one,
        answer_schema=answer_schema,
        mark_ids=(added_id(form.begin), added_id(form.end)),
    )
