"""A conversation's messages as chat templates read them.

Templates differ in what they read. What one does not read would be dropped in silence, so it is refused here, by name:
calls in earlier turns, results of tools, names.
"""

import json
from typing import Any

from antiphon.serve.api.chat_messages import AssistantMessage, Content, Message, ToolMessage
from antiphon.serve.api.errors import bad_request
from antiphon.serve.text.tokenizer import ChatMessage, TextTokenizer

# Stands behind the last message while it is rendered, so that the text can be cut there.
CUT_HERE = "\ue000\ue001cut here\ue001\ue000"


def turn_of(tokenizer: TextTokenizer, message: Message, param: str) -> ChatMessage:
    """One message as templates want it; text parts are joined by line breaks."""
    role: str = message.role
    if role == "developer" and not tokenizer.template_reads("developer"):
        role = "system"  # OpenAI's newer name for it; templates drop roles that they do not know
    turn: ChatMessage = {"role": role, "content": _text(message.content)}
    if isinstance(message, ToolMessage):
        if not tokenizer.template_reads("tool"):
            raise _not_read(f"{param}.role", "results of tools")
        turn["tool_call_id"] = message.tool_call_id
    elif isinstance(message, AssistantMessage) and message.tool_calls:
        if not tokenizer.template_reads("tool_calls"):
            raise _not_read(f"{param}.tool_calls", "calls of tools")
        turn["tool_calls"] = _calls(message, param)
    elif message.content is None:
        raise bad_request(f"{param}.content is missing: send a text, or tool_calls", param=f"{param}.content")
    if message.name is not None:
        if tokenizer.template_reads("name"):
            turn["name"] = message.name
        elif not isinstance(message, ToolMessage):  # the call's id says it too
            raise _not_read(f"{param}.name", "names")
    return turn


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _not_read(param: str, what: str) -> Exception:
    return bad_request(f"{param}: this model's chat template does not read {what}; leave it out", param=param)


def _calls(message: AssistantMessage, param: str) -> list[dict[str, Any]]:
    calls = []
    for number, call in enumerate(message.tool_calls or ()):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            where = f"{param}.tool_calls[{number}].function.arguments"
            raise bad_request(f"{where} is not a JSON object as text: send one", param=where)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def with_arguments_as_text(turns: list[ChatMessage]) -> list[ChatMessage]:
    """Copies in which the arguments of calls are texts of JSON."""
    copies = []
    for turn in turns:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls", ())
        ]
        copies.append(turn | {"tool_calls": calls} if calls else turn)
    return copies


def mark_end(message: Message, turn: ChatMessage, param: str) -> None:
    """Add `CUT_HERE` to the turn of the last message, which `param` holds; `ApiError` 400 when it is none to go on."""
    if message.role != "assistant" or "tool_calls" in turn or not turn["content"]:
        raise bad_request(
            f"continue_final_message: {param} must be the assistant's and have text, and no calls",
            param="continue_final_message",
        )
    turn["content"] += CUT_HERE
