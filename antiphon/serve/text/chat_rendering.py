"""A checkpoint's chat template: a Jinja program that writes a conversation as one text.

The environment is that of `models/chat_environment`. Rejected: calling `transformers` for it, which would cost the
process that renders seconds and 200 MB at its start.

Nothing here limits time or memory, and even looking for a template's variables evaluates parts of it. A template is a
program that may do anything: only a process can be stopped, so all of this runs in one (`text_process`).
"""

from jinja2 import meta
from jinja2.exceptions import TemplateSyntaxError

from antiphon.base.errors import UserError
from antiphon.models.chat_environment import chat_environment
from antiphon.serve.text.text_messages import RenderChat
from antiphon.serve.text.tokenizer import ChatMessage

MAX_TEMPLATE_CHARACTERS = 1024 * 1024  # published ones have up to some ten thousand
_MAX_VARIABLES = 1024
# What the server itself gives to a template, or to the function that renders it.
_NOT_FOR_REQUESTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
# What a template receives by these names is not for a client to replace.
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# A message's reasoning has had several names; templates read one of the first two.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def settable_variables(names: frozenset[str]) -> frozenset[str]:
    """Which of the variables that a template reads a request may set: not the conversation, the tools, or the
    tokenizer's special tokens. A value for a variable that it does not read would be dropped in silence."""
    return frozenset(name for name in names - _NOT_FOR_REQUESTS if not name.endswith("_token"))


class TooMuchText(UserError):
    """A text that cannot fit the context. The message lacks its subject: which parameter held it."""


class ChatTemplate:
    """The compiled template. `sources`: one template, or several of which `tool_use` serves requests with tools.
    `variables`: the names it reads without setting them."""

    def __init__(self, sources: str | dict[str, str], special_tokens: dict[str, str]) -> None:
        """`UserError` when a template cannot be compiled or none is the default."""
        by_name = {"default": sources} if isinstance(sources, str) else sources
        if "default" not in by_name:
            raise UserError(f"the model has chat templates {', '.join(sorted(by_name))}, but none is named default")
        used = {name: by_name[name] for name in ("default", "tool_use") if name in by_name}
        num_characters = sum(map(len, used.values()))
        if num_characters > (most := MAX_TEMPLATE_CHARACTERS):
            raise UserError(f"the model's chat template has {num_characters} characters: at most {most} are read")
        environment = chat_environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in used.items()}
            parsed = map(environment.parse, used.values())
            self.variables = frozenset[str]().union(*map(meta.find_undeclared_variables, parsed))
        except TemplateSyntaxError as error:
            raise UserError(
                f"the model's chat template cannot be used: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # it is compiled in the sandbox, but may still be anything
            raise UserError(f"the model's chat template cannot be used: {_reason(error)}") from error
        if len(self.variables) > _MAX_VARIABLES:
            raise UserError(
                f"the model's chat template reads {len(self.variables)} variables: at most {_MAX_VARIABLES}"
            )
        self._special_tokens = special_tokens

    def render(self, job: RenderChat) -> str:
        """The conversation as one text. `UserError` when the template refuses it, `TooMuchText` beyond the job's
        `max_characters`."""
        if taken := RESERVED_NAMES & (job.template_kwargs or {}).keys():
            raise UserError(f"chat_template_kwargs may not set {min(taken)}: the request says it elsewhere")
        template = self._templates.get("tool_use") if job.tools is not None else None
        names = {
            **self._special_tokens,
            **(job.template_kwargs or {}),
            "messages": [_as_templates_read(message) for message in job.messages],
            "tools": job.tools,
            "documents": None,
            "add_generation_prompt": job.add_generation_prompt,
        }
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in (template or self._templates["default"]).generate(names):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > job.max_characters:
                    break
        except Exception as error:  # a program of the checkpoint: it may raise anything at all
            raise UserError(f"the model's chat template does not accept these messages: {_reason(error)}") from error
        if num_characters > job.max_characters:
            raise TooMuchText(
                f"has more than {job.max_characters} characters after the chat template, more than fit the context:"
                " shorten it"
            )
        return "".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than it is given"
    if isinstance(error, RecursionError):
        return "it calls itself without an end"
    return " ".join(str(error).split())[:400] or type(error).__name__


def _as_templates_read(message: ChatMessage) -> ChatMessage:
    """Without nulls, which templates would write out, and with reasoning under the names they know."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING_NAMES if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}
