"""Tries clients' grammars in processes of their own, which the kernel ends when they take too much time or memory.

A JSON schema of two lines can ask for an automaton of a hundred million states. The library does not notice, and a
thread that computes in it cannot be stopped. So a grammar is built here first, and a few tokens are matched; only one
that passed is built in the server.

One process loads the tokenizer and forks for every trial, which takes milliseconds; the fork has the limits. What it
says, or how it ended, goes to the server (`grammar_lanes`), which decides what is tried when. Trials and answers are
lines of JSON over pipes. Rejected: limits inside the server's process, as above; a process that tries one grammar after
the other (one bad grammar ends it, and the next ones wait for its restart); a wall-clock limit, which would refuse good
schemas on a busy machine.
"""

import json
import os
import re
import resource
import selectors
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import llguidance
import msgspec

from antiphon.base.system import address_space_bytes

MEMORY_LIMIT_BYTES = 512 * 1024**2  # address space that a trial may take
_KEPT_LIMIT_BYTES = 64 * 1024**2  # of that, what may be in use: the server is to take as much
_THREAD_STACK_BYTES = 2 * 1024**2  # of a thread where the stack has no limit; else it has the limit
_NUM_TOKENS = 16
_MAX_REASON_CHARACTERS = 400
_MASK_CREDIT_S = 0.5
_MASK_PACE_S = 0.01
_SLOW_CREDIT_S = 0.02
_SLOW_PACE_S = 0.001
# The library's own words: others quote what a client wrote.
_LISTED_RULES = re.compile(r"\n *[0-9]+ \| ")
_OPTION = re.compile(r"\.? Enable 'coerce_one_of' option[^\n]*")  # the library's, which no request has
_TOO_MANY_ITEMS = re.compile(r"(?i)parser error: (current row has \d+ items|too many items)")


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


@dataclass
class MaskTime:
    """Processor time that masks of one grammar took, for all sequences together."""

    num_masks: int = 0
    spent_s: float = 0.0

    def add(self, spent_s: float) -> None:
        self.num_masks += 1
        self.spent_s += spent_s

    @property
    def is_slow(self) -> bool:
        """Others had better not wait for these masks."""
        return self.spent_s > _SLOW_CREDIT_S + _SLOW_PACE_S * self.num_masks

    @property
    def problem(self) -> str | None:
        """Why the grammar may not be followed any further; None if it may."""
        if self.spent_s <= _MASK_CREDIT_S + _MASK_PACE_S * self.num_masks:
            return None
        return f"its masks take more than {_MASK_PACE_S * 1e3:.0f} ms a token: simplify the JSON schema"


class TrialVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`reason`: why the grammar cannot be used, None if it can. `compute_s`: processor time, of which `num_masks` masks
    took `mask_s`; `grown_bytes`: by so much its process grew."""

    reason: str | None
    compute_s: float = 0.0
    mask_s: float = 0.0
    num_masks: int = 0
    grown_bytes: int = 0


class TrialEnd(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` None: the process was ended by signal `signal` before it had one, or could not be started (0)."""

    number: int
    signal: int = 0
    verdict: TrialVerdict | None = None


# --- the process -----------------------------------------------------------------------------------------------------


class TrialProcess:
    """Forks trials as orders come in, until the server closes the pipe."""

    def __init__(self, orders: int, answers: int) -> None:
        """File descriptors. The first line of `orders` describes the tokenizer."""
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._orders, self._answers = orders, answers
        self._received = bytearray()  # of a line that is not complete
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, 256 * 1024)
                if key.data is not None:
                    self._on_said(key.fd, data, *key.data)
                    continue
                if not data:
                    return
                self._received += data
                if b"\n" in data:
                    *lines, self._received = self._received.split(b"\n")
                    for line in lines:
                        self._begin(json.loads(line))

    def _begin(self, line: Any) -> None:
        """The first line describes the tokenizer, each further one is a trial: its number, and what it is to try."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(*line)
            return
        number, descriptors = line.pop("number"), list[int]()
        try:
            descriptors += os.pipe()
            pid = os.fork()
        except OSError:  # no process, descriptor or memory to be had now
            for descriptor in descriptors:
                os.close(descriptor)
            self._answer(TrialEnd(number=number))
            return
        ours, theirs = descriptors
        if pid == 0:
            self._be_the_trial(theirs, **line)
        os.close(theirs)
        self._selector.register(ours, selectors.EVENT_READ, (number, pid, bytearray()))

    def _be_the_trial(self, answer: int, *, grammar: str, cpu_limit_s: float, niceness: int) -> None:
        """In the fork; does not return. `cpu_limit_s` is processor time."""
        code = 1
        try:
            os.close(self._orders)
            os.close(self._answers)
            os.nice(niceness)
            size = address_space_bytes() + MEMORY_LIMIT_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            stack, most = resource.getrlimit(resource.RLIMIT_STACK)
            stack = _THREAD_STACK_BYTES if stack == resource.RLIM_INFINITY else stack
            resource.setrlimit(resource.RLIMIT_STACK, (stack // 2, most))  # what passes here fits a thread there
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # SIGPROF ends it
            os.write(answer, msgspec.json.encode(try_grammar(self._tokenizer, grammar)))
            code = 0
        finally:
            os._exit(code)

    def _on_said(self, descriptor: int, data: bytes, number: int, pid: int, said: bytearray) -> None:
        said += data
        if data:
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        verdict = msgspec.json.decode(said, type=TrialVerdict) if said else None
        self._answer(TrialEnd(number=number, signal=ended_by, verdict=verdict))

    def _answer(self, end: TrialEnd) -> None:
        os.write(self._answers, msgspec.json.encode(end) + b"\n")


def try_grammar(tokenizer: llguidance.LLTokenizer, grammar: str) -> TrialVerdict:
    """Build it and match some tokens, always the allowed one with the lowest number: in most vocabularies those are
    single characters, brackets and quotes first."""
    before, started_s = _peak_bytes(), time.thread_time()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    took = MaskTime()
    for _ in range(_NUM_TOKENS):
        began_s = time.thread_time()
        mask: bytes = matcher.compute_bitmask()
        took.add(time.thread_time() - began_s)
        if matcher.is_error() or matcher.is_stopped() or matcher.is_accepting():
            break
        first_byte = next((index for index, byte in enumerate(mask) if byte), None)
        if first_byte is None:
            break
        lowest_bit = (mask[first_byte] & -mask[first_byte]).bit_length() - 1
        matcher.consume_token(first_byte * 8 + lowest_bit)
    grown_bytes = _peak_bytes() - before
    reason = reason_of(matcher) or _reason_of_parts(tokenizer, grammar) or took.problem
    if reason is None and grown_bytes > _KEPT_LIMIT_BYTES:
        reason = f"it takes {grown_bytes >> 20} MiB of memory, the limit is {_KEPT_LIMIT_BYTES >> 20} MiB"
    return TrialVerdict(
        reason=reason,
        compute_s=time.thread_time() - started_s,
        mask_s=took.spent_s,
        num_masks=took.num_masks,
        grown_bytes=grown_bytes,
    )


def _reason_of_parts(tokenizer: llguidance.LLTokenizer, grammar: str) -> str | None:
    """Why a grammar that another leads to has no text: reasoning may come first, and only then would matching end."""
    parts = json.loads(grammar)["grammars"][1:] if grammar.startswith("{") else []
    for part in parts:
        text = json.dumps({"grammars": [part]})
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        if (reason := reason_of(matcher)) is not None:
            return reason
    return None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reason_of(matcher: Any) -> str | None:
    """Why matching broke off, in one line; None when it has not."""
    if not matcher.is_error():
        return None
    reason, _, _parser_state = str(matcher.get_error()).partition("<")
    _, has_schema, of_schema = reason.partition("failed to compile JSON schema: ")
    if has_schema:  # behind it stand all the rules around the schema, which are not the client's
        reason = f"a JSON schema in it: {_LISTED_RULES.split(of_schema)[0]}"
    short = " ".join(_OPTION.sub(": use anyOf", reason).split())[:_MAX_REASON_CHARACTERS]
    if "Unimplemented keys" in short:
        return f"{short}: leave them out"
    if short.startswith("NoExtension"):
        return "no text can satisfy it; does a $ref lead back to itself?"
    if _TOO_MANY_ITEMS.match(short):
        return f"it allows too many things at once, as an object with thousands of properties does ({short})"
    if any(word in short for word in ("too many", "fuel")):
        return f"its patterns are too complex ({short})"
    return short


def main() -> None:
    """Serve until the server closes the pipe; then nothing is left of the trials, either."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the server, whose end is the end of this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    TrialProcess(sys.stdin.fileno(), sys.stdout.fileno()).serve()
    if os.getpgrp() == os.getpid():  # else the group is of others, too
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
