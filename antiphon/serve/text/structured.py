"""Output that must follow a JSON schema: compile the schema once, then say before every token which ones are allowed.

Two halves, because two threads need them:

- the API compiles: `GrammarCompiler.compile(...)` gives a *string* that travels in `SamplingParams.grammar`; a
  schema that cannot be followed is refused there, before the request is queued;
- the engine matches: `GrammarCompiler.matcher(grammar)` gives the state of one sequence. It fills a bit mask over the
  model's vocabulary before sampling and takes the sampled token after it, in threads of `serve/mask_pool`.

llguidance does the work (an Earley parser over token tries, microseconds per mask). Rejected: compiling a schema to a
finite automaton over tokens ahead of time; recursive schemas do not fit and large ones take seconds.

Sequences begin at copies of the built grammar. A copy is made by the thread that computes the first mask, so that a
request with sixty answers costs the accepting thread nothing. Rejected: building for each sequence; the first mask may
take twenty times what the later ones do.

A client's grammar is tried in another process first (`grammar_trial`); every step has the parser's own limits, all
masks of a grammar have a time they may take together, and all grammars that are kept a size. Building and masks leave
the interpreter's lock alone; what holds it takes a few milliseconds for the largest schema.
"""

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import llguidance
import numpy as np
import tokenizers
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.base.system import give_memory_back
from antiphon.serve.engine_api import QueueFull
from antiphon.serve.text.grammar_lanes import GrammarTrials, settle
from antiphon.serve.text.grammar_text import json_grammar
from antiphon.serve.text.grammar_trial import MaskTime, TrialVerdict, load_tokenizer, parser_limits, reason_of

_BITS_PER_WORD = 32
_MIN_GRAMMAR_BYTES = 32 * 1024  # what even a small one takes
_KEPT_BYTES = 32 * 1024 * 1024
_USED_BYTES = 256 * 1024 * 1024  # with those that are not kept any more, but still followed
_MAX_KEPT_VERDICTS = 1024  # some hundred bytes each
_SLOW_BUILD_S = 0.05
_TRIMMED_BYTES = 8 * 1024 * 1024


class BuiltGrammar:
    """One grammar, built by the first who asks for its start, and the time that its masks took. Any thread."""

    def __init__(self, text: str, tokenizer: llguidance.LLTokenizer, tried: TrialVerdict | None = None) -> None:
        self.text = text
        self.time_taken = MaskTime() if tried is None else MaskTime(tried.num_masks, tried.mask_s)
        self.kept_bytes = max(_MIN_GRAMMAR_BYTES, 2 * len(text) + (0 if tried is None else tried.grown_bytes))
        self._tokenizer = tokenizer
        self._start: Any = None
        self._building = threading.Lock()

    @property
    def is_built(self) -> bool:
        return self._start is not None

    def start(self) -> Any:
        """The library's matcher at the beginning, a copy. The first time, builds it and its first mask, of which later
        copies profit: what the trial took, without the interpreter's lock."""
        with self._building:
            if self._start is None:
                start = llguidance.LLMatcher(self._tokenizer, self.text, log_level=0, limits=parser_limits())
                start.compute_bitmask()
                self._start = start
            return self._start.deep_copy()


class GrammarMatcher:
    """Where one sequence stands in its grammar. Used by one thread at a time; one per sequence. Making it costs
    nothing: the first mask, or token, begins at a copy of the grammar's start."""

    def __init__(self, grammar: BuiltGrammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._own: Any = None
        self._num_words = -(-vocab_size // _BITS_PER_WORD)

    @property
    def _matcher(self) -> Any:
        if self._own is None:
            self._own = self._grammar.start()
        return self._own

    def fill_bitmask(self) -> NDArray[np.int32]:
        """Bits of the tokens allowed next: int32 `[ceil(V / 32)]`, token t at bit `t % 32` of word `t // 32`.

        Once the grammar is complete only end-of-sequence tokens are allowed. Releases the GIL while it computes.
        """
        words = np.empty(self._num_words, dtype=np.int32)
        began_s = time.thread_time()
        computed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._grammar.time_taken.add(time.thread_time() - began_s)
        words[: computed.size] = computed[: self._num_words]
        words[computed.size :] = 0
        return words

    def accept(self, token_id: int) -> bool:
        """Move on by one sampled token. False: the token is not allowed here, and the matcher is in error for
        good."""
        return bool(self._matcher.consume_token(token_id))

    @property
    def error(self) -> str | None:
        """Why matching broke off: a token that was not allowed, a grammar beyond the parser's limits, or one whose
        masks take too long."""
        return self._grammar.time_taken.problem or (None if self._own is None else reason_of(self._own))

    @property
    def is_slow(self) -> bool:
        """Masks of this grammar take long, or it has to be built again first."""
        return self._grammar.time_taken.is_slow or not self._grammar.is_built

    @property
    def grammar_id(self) -> Hashable:
        """The same object for all sequences of one grammar."""
        return self._grammar


class GrammarCompiler:
    """Grammars over one model's vocabulary. Building it takes up to a second: build one and share it between
    threads. `close` it when the server ends."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the model's: ids past the tokenizer's own are never allowed."""
        if not eos_token_ids:
            raise UserError("structured output needs an end-of-sequence token: the model's config names none")
        padded = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        described = (tokenizer.to_str(), padded, list(eos_token_ids))
        try:
            self._tokenizer = load_tokenizer(*described)
        except ValueError as error:
            raise UserError(f"structured output cannot use this tokenizer: {error}") from error
        self._vocab_size = vocab_size
        self._trials = GrammarTrials(*described)
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar texts")
        self._builders = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars") for _ in ("quick", "slow")]
        self._object = BuiltGrammar(json_grammar({"type": "object"}), self._tokenizer)
        self._object.start()
        self._kept: OrderedDict[str, BuiltGrammar] = OrderedDict()
        self._alive: weakref.WeakSet[BuiltGrammar] = weakref.WeakSet()
        self._untrimmed_bytes = 0
        self._verdicts: OrderedDict[bytes, TrialVerdict] = OrderedDict()
        self._compiling: dict[str, _Compiling] = {}
        self._lock = threading.Lock()

    def json_object(self) -> str:
        """The grammar of any JSON object."""
        return self._object.text

    def compile(self, make: Callable[[], str], client: Hashable = "", what: str = "the grammar") -> "Future[str]":
        """The grammar whose text, in llguidance's form, `make` returns in another thread; `what` names it in errors.
        Returns at once; cancel the answer when it is not wanted any more. `client` takes turns with others.

        The future's error is a `UserError` with the reason when the grammar is wrong, cannot be satisfied, asks for
        what we cannot enforce, or is beyond the limits; `QueueFull` when too many wait.
        """
        answer: Future[str] = Future()
        self._texts.submit(self._begin, make, what, client, answer)
        return answer

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of `grammar`, in microseconds; `UserError` when the grammar has taken too much time,
        `QueueFull` when it has to be kept again and those in use take too much memory.
        If it is long ago that the grammar was compiled, the first mask builds it again."""
        with self._lock:
            kept = self._object if grammar == self._object.text else self._kept.get(grammar)
            if kept is None:
                kept = self._keep(grammar)
            elif kept is not self._object:
                self._kept.move_to_end(grammar)
        if (problem := kept.time_taken.problem) is not None:
            raise UserError(f"the JSON schema cannot be used: {problem}")
        return GrammarMatcher(kept, self._vocab_size)

    def close(self) -> None:
        """End the threads and the processes for schemas. Matchers live on."""
        for executor in (self._texts, *self._builders):
            executor.shutdown(wait=False)  # what is in line there finds the trials closed, or takes milliseconds
        self._trials.close()

    # --- from a schema to a grammar that is kept ---------------------------------------------------------------------

    def _begin(self, make: Callable[[], str], what: str, client: Hashable, answer: "Future[str]") -> None:
        """In the thread for texts: answer what is known, join what is being compiled, have the rest tried."""
        try:
            grammar = make()
            with self._lock:
                verdict = self._verdicts.get(_digest(grammar))
                compiling = self._compiling.get(grammar)
                is_kept = compiling is None and grammar in self._kept
                is_new = compiling is None and not is_kept
                if compiling is None and is_new:
                    compiling = self._compiling[grammar] = _Compiling(what)
                if compiling is not None:
                    compiling.answers.append(answer)
            if is_kept:
                self.matcher(grammar)
                settle(answer, grammar)
        except Exception as error:
            settle(answer, error)
            return
        if is_new and verdict is not None:
            self._on_verdict(grammar, verdict)
        elif is_new and compiling is not None:
            self._try(grammar, client, compiling)
        if compiling is not None:
            answer.add_done_callback(compiling.on_answer)

    def _try(self, grammar: str, client: Hashable, compiling: "_Compiling") -> None:
        try:
            compiling.verdict = self._trials.submit(client, grammar)
        except UserError as error:
            self._finish(grammar, error)
        except RuntimeError:  # no thread can be started
            self._finish(grammar, QueueFull("the JSON schema cannot be tried out now: try again later", 5.0))
        else:
            compiling.verdict.add_done_callback(partial(self._on_trial, grammar))

    def _on_trial(self, grammar: str, tried: "Future[TrialVerdict]") -> None:
        try:
            verdict = tried.result()
        except CancelledError:
            self._finish(grammar, QueueFull("the JSON schema was given up: try again", 1.0))
        except UserError as error:
            self._finish(grammar, error)
        else:
            with self._lock:
                self._verdicts[_digest(grammar)] = verdict
                while len(self._verdicts) > _MAX_KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._on_verdict(grammar, verdict)

    def _on_verdict(self, grammar: str, verdict: TrialVerdict) -> None:
        if verdict.reason is not None:
            self._finish(grammar, UserError(f"{self._compiling[grammar].what} cannot be used: {verdict.reason}"))
            return
        with contextlib.suppress(RuntimeError):  # closed
            self._builders[verdict.compute_s > _SLOW_BUILD_S].submit(self._build, grammar)

    def _build(self, grammar: str) -> None:
        """In a thread of the builders."""
        try:
            with self._lock:
                kept = self._keep(grammar)
            kept.start()
        except QueueFull as error:
            self._finish(grammar, error)
        else:
            self._finish(grammar, None)
        with self._lock:
            is_trim_due = self._untrimmed_bytes > _TRIMMED_BYTES
            if is_trim_due:
                self._untrimmed_bytes = 0
        if is_trim_due:
            give_memory_back()

    def _keep(self, grammar: str) -> BuiltGrammar:
        """With the lock. Whatever is older and does not fit beside it is dropped."""
        kept = BuiltGrammar(grammar, self._tokenizer, self._verdicts.get(_digest(grammar)))
        kept_bytes = kept.kept_bytes + sum(each.kept_bytes for each in self._kept.values())
        while kept_bytes > _KEPT_BYTES and self._kept:
            kept_bytes -= self._kept.popitem(last=False)[1].kept_bytes
        used_bytes = kept.kept_bytes + sum(each.kept_bytes for each in self._alive)
        if used_bytes > _USED_BYTES:
            most = f"{_USED_BYTES >> 20} MiB"
            raise QueueFull(f"the JSON schemas in use would take more than {most} of memory: try again later", 5.0)
        self._kept[grammar] = kept
        self._alive.add(kept)
        self._untrimmed_bytes += kept.kept_bytes
        return kept

    def _finish(self, grammar: str, error: Exception | None) -> None:
        with self._lock:
            compiling = self._compiling.pop(grammar, None)
        for answer in compiling.answers if compiling is not None else ():
            settle(answer, error or grammar)


class _Compiling:
    """A grammar that is being tried or built, and the answers that wait for it. `what` names it in errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.answers: list[Future[str]] = []
        self.verdict: Future[TrialVerdict] | None = None

    def on_answer(self, _: "Future[str]") -> None:
        """When all answers are cancelled, the trial need not begin. Not to be called with a lock: it may end all."""
        if self.verdict is not None and all(answer.cancelled() for answer in self.answers):
            self.verdict.cancel()


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=32).digest()
