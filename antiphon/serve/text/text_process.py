"""A process that evaluates what comes from a checkpoint or a client, one job at a time: a tokenizer's patterns, a chat
template, the texts they work on.

    python -m antiphon.serve.text.text_process --fd N        # works on a tokenizer that the server hands over
    python -m antiphon.serve.text.tokenizer_reading --fd N   # reads it from a checkpoint first

The server talks to it over the inherited socket N, in MessagePack of declared types: `TextConfigure`, and after an
empty `TextResult` one job at a time. It ends it with SIGKILL when a job takes too long. Memory is limited by the
kernel, relative to what the process has once it is ready: a job that wants more fails in here. When the server goes,
however it goes, the socket closes; in the middle of a job the kernel ends the process (Linux).

A chat template is a Jinja program that writes a conversation as one text, in the environment of
`models/chat_environment`. Even looking for its variables evaluates parts of it. Nothing in `ChatTemplate` limits time
or memory: only a process can be stopped. Rejected: calling `transformers` for it, which would cost the process that
renders seconds and 200 MB at its start.
"""

import argparse
import array
import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import tokenizers
from jinja2 import meta
from jinja2.exceptions import TemplateSyntaxError

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.system import address_space_bytes, give_memory_back, ignore_ending_signals
from antiphon.models.chat_environment import chat_environment
from antiphon.serve.engine_api import RequestTooLong
from antiphon.serve.text.tokenizer import ChatMessage, TextTokenizer
from antiphon.serve.worker.channel import Channel

MAX_TEMPLATE_CHARACTERS = 1024 * 1024  # published ones have up to some ten thousand
_MAX_VARIABLES = 1024
# What a template receives by these names is not for a client to replace.
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# A message's reasoning has had several names; templates read one of the first two.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CONFIGURE_TIMEOUT_S = 60.0
_LOOK_UP_S = 3600.0  # an idle process wakes up this often, for nothing
_CHARACTERS_PER_TOKEN = 8  # more than texts have; the first look at a text that may be too long
_CUT_TOKENS = 64  # a text's beginning may have up to this many tokens more than the whole: where it was cut
_MAX_REASON_CHARACTERS = 200
_LONG_JOB_S = 0.05  # it may have needed memory that later ones do not


class TokenizerSource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All that a checkpoint says about texts. `tokenizer_json` is the tokenizer's own form."""

    tokenizer_json: str
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "TokenizerSource":
        return cls(
            tokenizer_json=tokenizer.backend.to_str(),
            chat_template=tokenizer.template_sources,
            special_tokens=tokenizer.special_tokens,
        )

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer this describes. Holds the interpreter's lock for up to seconds."""
        backend = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        return TextTokenizer(backend, self.chat_template, self.special_tokens)


class TextConfigure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message. `source` None: a `ReadTokenizer` comes before other jobs. `memory_bytes` is what may be added
    to the memory the process has once it is ready; `niceness` how far it steps back behind others."""

    source: TokenizerSource | None
    memory_bytes: int
    niceness: int


class ReadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """Read the checkpoint in `folder`, for jobs that come later. Answered by `TokenizerSource`, or `TextRefused`."""

    folder: str


class TryGrammars(msgspec.Struct, frozen=True, tag=True):
    """Make what grammars need of the tokenizer, for a model of `vocab_size` ids. Answered by an empty `TextResult`,
    or `TextRefused`."""

    vocab_size: int


class CompileTemplate(msgspec.Struct, frozen=True, tag=True):
    """Answered by the names of variables, or `TextRefused` with what is wrong with the template."""


class RenderChat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A conversation as one text. `template_kwargs` are further names for the template and replace special tokens.
    Answered by a text, or `TextRefused` when the template refuses it or beyond `max_characters`."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    max_characters: int
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answered by token ids, or by `TextRefused` as soon as a text certainly has more than `max_tokens` tokens."""

    texts: list[str]
    add_special_tokens: bool
    max_tokens: int | None


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Answered by a text. Ids are 32-bit words in this machine's byte order."""

    token_ids: bytes
    skip_special_tokens: bool


class TextResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a job asked for: a text; the ids of each text, 32-bit words in this machine's byte order; or the variables
    that a chat template reads without setting them. Empty once the tokenizer is loaded, if there is one: jobs may
    come."""

    text: str = ""
    token_ids: list[bytes] = []
    names: list[str] = []


class TextRefused(msgspec.Struct, frozen=True, tag=True):
    """Why the client gets no answer. `too_long`: its input does not fit the context."""

    reason: str
    too_long: bool = False


Job = ReadTokenizer | TryGrammars | CompileTemplate | RenderChat | Encode | Decode
Answer = TokenizerSource | TextResult | TextRefused


# --- the process -----------------------------------------------------------------------------------------------------


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
        """The conversation as one text. `UserError` when the template refuses it, `RequestTooLong` beyond the job's
        `max_characters`; its message lacks its subject, the parameter."""
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
            raise RequestTooLong(
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


class TextWork:
    """The jobs, on one tokenizer and one chat template."""

    def __init__(self, source: TokenizerSource | None) -> None:
        self._loaded = None if source is None else source.tokenizer()
        self._template: ChatTemplate | None = None

    def do(self, job: Job) -> Answer:
        """The answer to one job; mistakes of the client and of the checkpoint are `TextRefused`."""
        try:
            return self.answer(job)
        except UserError as error:
            return TextRefused(str(error), too_long=isinstance(error, RequestTooLong))
        except MemoryError:
            return TextRefused("this needs more memory than one request is given: shorten the text")
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise  # the tokenizer's library raises nothing but these two, and exports neither
            return TextRefused(f"the tokenizer cannot do this: {' '.join(str(error).split())[:_MAX_REASON_CHARACTERS]}")

    def answer(self, job: Job) -> Answer:
        """As `do`, but raises what was wrong."""
        if isinstance(job, Encode):
            return TextResult(token_ids=[self._encode(job, text) for text in job.texts])
        if isinstance(job, Decode):
            token_ids = array.array("I", job.token_ids).tolist()
            return TextResult(text=self._tokenizer.decode(token_ids, skip_special_tokens=job.skip_special_tokens))
        if isinstance(job, CompileTemplate):
            return TextResult(names=sorted(self._compiled().variables))
        assert isinstance(job, RenderChat), f"this process takes no {type(job).__name__}"
        return TextResult(text=self._compiled().render(job))

    @property
    def _tokenizer(self) -> TextTokenizer:
        assert self._loaded is not None, "a tokenizer is read before it is used"
        return self._loaded

    def _compiled(self) -> ChatTemplate:
        """Compiled at the first use, which is a job like any other: compiling runs parts of the template."""
        if self._template is None:
            sources = self._tokenizer.template_sources
            assert sources, "the server asks only where there is a template"
            self._template = ChatTemplate(sources, self._tokenizer.special_tokens)
        return self._template

    def _encode(self, job: Encode, text: str) -> bytes:
        if job.max_tokens is not None:
            self._refuse_too_long(job, text, job.max_tokens)
        return array.array("I", self._tokenizer.encode(text, add_special_tokens=job.add_special_tokens)).tobytes()

    def _refuse_too_long(self, job: Encode, text: str, max_tokens: int) -> None:
        """Tokenize beginnings of the text, each four times as long as the one before, and stop when one has too many
        tokens: a text that does not fit costs what the context costs, not what the text would."""
        num_characters = _CHARACTERS_PER_TOKEN * (max_tokens + _CUT_TOKENS)
        while num_characters < len(text):
            ids = self._tokenizer.encode(text[:num_characters], add_special_tokens=job.add_special_tokens)
            if len(ids) > max_tokens + _CUT_TOKENS:
                raise RequestTooLong(f"has more than {max_tokens} tokens, which is the limit: shorten it")
            num_characters *= 4


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Nothing is written to the error stream within the block: a library that panics writes a page there, every time.
    What ends the block is written."""
    try:
        kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no error stream
        yield
        return
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def limit_memory(extra_bytes: int) -> None:
    """Let this process have `extra_bytes` more address space than now. Kernels other than Linux may not enforce it."""
    most = address_space_bytes() + extra_bytes
    with contextlib.suppress(ValueError, OSError):  # the server was started with a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends. Linux; elsewhere the socket's end does."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_jobs(channel: Channel, make_work: type[TextWork]) -> None:
    """Do jobs until the server hangs up."""
    channel.speak("the server", TextConfigure)
    configure = channel.receive(_CONFIGURE_TIMEOUT_S)
    work = make_work(configure.source)
    os.nice(configure.niceness)
    limit_memory(configure.memory_bytes)
    channel.speak("the server", Job)
    channel.send(TextResult())
    with _without_stderr():
        while True:
            try:
                job = channel.receive(_LOOK_UP_S)
            except PeerTimeout:
                continue
            started_s = time.monotonic()
            channel.send(work.do(job))
            del job
            if time.monotonic() - started_s > _LONG_JOB_S:
                give_memory_back()


def main(make_work: type[TextWork] = TextWork) -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the server")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread is a memory arena, and a core of the workers
    ignore_ending_signals()
    die_with_parent()
    with contextlib.suppress(PeerLost), socket.socket(fileno=arguments.fd) as end:  # the server has ended, or ends us
        serve_jobs(Channel(end, "the server", TextConfigure), make_work)


if __name__ == "__main__":
    main()
