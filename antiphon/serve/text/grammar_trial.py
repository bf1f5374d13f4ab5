"""Tries a client's grammar in a process of its own, which the kernel ends when it computes too long or grows too large.

A JSON schema of two lines can ask for an automaton of a hundred million states. The library does not notice, and a
thread that computes in it cannot be stopped. So a grammar is built here first, and a few tokens are matched; only one
that passed is built in the server. The process starts with the first schema and is kept; after a grammar that
ended it, the next one starts another.

Requests and answers are lines of JSON over pipes. Rejected: limits inside the server's process, as above; a wall-clock
limit, which would refuse good schemas on a busy machine.
"""

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import IO, Any

import llguidance

from antiphon.base.errors import UserError
from antiphon.base.programs import python_module

CPU_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 4 * 1024**3
_WALL_LIMIT_S = 60.0  # for a machine that stands still: a trial in good order ends by itself or by its CPU limit
_NUM_TOKENS = 16
_MAX_REASON_CHARACTERS = 400


def parser_limits() -> llguidance.LLParserLimits:
    """What one grammar may cost at every token: some milliseconds of computing and some megabytes. A row of 4,500
    items is an object with about 1,100 optional properties."""
    return llguidance.LLParserLimits(
        max_items_in_row=4_500,
        step_max_items=20_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        initial_lexer_fuel=400_000,
        verbose_errors=False,
    )


def load_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    """llguidance's form of a tokenizer; `ValueError` when it cannot use it."""
    return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids)


class GrammarTrial:
    """The process, started when needed. One caller at a time."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = [tokenizer_json, vocab_size, eos_token_ids]
        self._process: subprocess.Popen[bytes] | None = None

    def reason_against(self, grammar: str) -> str | None:
        """Why this grammar cannot be used; None when it can. Blocks for some seconds at most, unless the machine
        stands still."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, grammar)
            answer = _read(process.stdout)
        except OSError:  # it ended before it had read all
            answer = b""
        if answer:
            reason: str | None = json.loads(answer)
            return reason
        self.close()
        if process.returncode == -signal.SIGXCPU:
            return f"building it takes more than {CPU_LIMIT_S} s"
        return f"building it takes too much time or more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory"

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = subprocess.Popen(
            python_module("antiphon.serve.text.grammar_trial"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's interrupt is for the server, whose end is the end of this process
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, self._tokenizer)
            ready = _read(process.stdout)
        except OSError:
            ready = b""
        if not ready:
            self.close()
            raise UserError("the JSON schema cannot be tried out: the process for it does not start; try again later")
        return process

    def close(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()


def _write(pipe: IO[bytes], value: object) -> None:
    pipe.write(json.dumps(value).encode() + b"\n")
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """The next answer, which is short enough to come in one piece; empty when there is none."""
    readable, _, _ = select.select([pipe], [], [], _WALL_LIMIT_S)
    return os.read(pipe.fileno(), 64 * 1024) if readable else b""


# --- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Read a tokenizer, then grammars, until the server closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = load_tokenizer(*json.loads(sys.stdin.buffer.readline()))
    _write(sys.stdout.buffer, "ready")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin.buffer:
        grammar: str = json.loads(line)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_LIMIT_S, hard))
        reason = try_grammar(llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()))
        _write(sys.stdout.buffer, reason)


def try_grammar(matcher: Any) -> str | None:
    """Match some tokens, always the allowed one with the lowest number: in most vocabularies those are single
    characters, brackets and quotes first. None, or why that failed."""
    for _ in range(_NUM_TOKENS):
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped() or matcher.is_accepting():
            break
        first_byte = next((index for index, byte in enumerate(mask) if byte), None)
        if first_byte is None:
            break
        lowest_bit = (mask[first_byte] & -mask[first_byte]).bit_length() - 1
        matcher.consume_token(first_byte * 8 + lowest_bit)
    return reason_of(matcher)


def reason_of(matcher: Any) -> str | None:
    """Why matching broke off, in one line; None when it has not."""
    if not matcher.is_error():
        return None
    reason, _, _parser_state = str(matcher.get_error()).partition("<")
    short = " ".join(reason.split())[:_MAX_REASON_CHARACTERS]
    if short.startswith("NoExtension"):
        return "no text can satisfy it; does a $ref lead back to itself?"
    if "items" in short:
        return f"it allows too many things at once, as an object with thousands of properties does ({short})"
    if any(word in short for word in ("too many", "fuel")):
        return f"its patterns are too complex ({short})"
    return short


if __name__ == "__main__":
    main()
