"""A process that evaluates what comes from a checkpoint or a client, one job at a time: a tokenizer's patterns, a chat
template, the texts they work on.

    python -m antiphon.serve.text.text_process --fd N        # works on a tokenizer that the server hands over
    python -m antiphon.serve.text.tokenizer_reading --fd N   # reads it from a checkpoint first

The server talks to it over the inherited socket N and ends it with SIGKILL when a job takes too long. Memory is limited
by the kernel, relative to what the process has once it is ready: a job that wants more fails in here. When the server
goes, however it goes, the socket closes; in the middle of a job the kernel ends the process (Linux).
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

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.system import address_space_bytes, give_memory_back
from antiphon.serve import signals
from antiphon.serve.text.chat_rendering import ChatTemplate, TooMuchText
from antiphon.serve.text.text_messages import (
    Answer,
    CompileTemplate,
    Decode,
    Encode,
    Job,
    RenderChat,
    TemplateNames,
    TextConfigure,
    TextReady,
    TextRefused,
    TextResult,
    TokenIds,
    TokenizerSource,
)
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.worker.channel import Channel

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CONFIGURE_TIMEOUT_S = 60.0
_LOOK_UP_S = 3600.0  # an idle process wakes up this often, for nothing
_CHARACTERS_PER_TOKEN = 8  # more than texts have; the first look at a text that may be too long
_CUT_TOKENS = 64  # a text's beginning may have up to this many tokens more than the whole: where it was cut
_MAX_REASON_CHARACTERS = 200
_LONG_JOB_S = 0.05  # it may have needed memory that later ones do not


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
            return TextRefused(str(error), too_long=isinstance(error, TooMuchText))
        except MemoryError:
            return TextRefused("this needs more memory than one request is given: shorten the text")
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise  # the tokenizer's library raises nothing but these two, and exports neither
            return TextRefused(f"the tokenizer cannot do this: {' '.join(str(error).split())[:_MAX_REASON_CHARACTERS]}")

    def answer(self, job: Job) -> Answer:
        """As `do`, but raises what was wrong."""
        if isinstance(job, Encode):
            return TokenIds([self._encode(job, text) for text in job.texts])
        if isinstance(job, Decode):
            token_ids = array.array("I", job.token_ids).tolist()
            return TextResult(self._tokenizer.decode(token_ids, skip_special_tokens=job.skip_special_tokens))
        if isinstance(job, CompileTemplate):
            return TemplateNames(sorted(self._compiled().variables))
        assert isinstance(job, RenderChat), f"this process takes no {type(job).__name__}"
        return TextResult(self._compiled().render(job))

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
                raise TooMuchText(f"has more than {max_tokens} tokens, which is the limit: shorten it")
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
    channel.send(TextReady())
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
    signals.ignore()
    die_with_parent()
    with contextlib.suppress(PeerLost), socket.socket(fileno=arguments.fd) as end:  # the server has ended, or ends us
        serve_jobs(Channel(end, "the server", TextConfigure), make_work)


if __name__ == "__main__":
    main()
