"""Output that must follow a JSON schema: compile the schema once, then say before every token which ones are allowed.

Two halves, because two threads need them:

- the API compiles: `GrammarCompiler.compile(...)` gives a *string* that travels in `SamplingParams.grammar`; a
  schema that cannot be followed is refused there, before the request is queued;
- the engine matches: `GrammarCompiler.matcher(grammar)` gives the state of one sequence. It fills a bit mask over the
  model's vocabulary before sampling and takes the sampled token after it, in threads of `serve/mask_pool`.

llguidance does the work (an Earley parser over token tries, microseconds per mask). Rejected: compiling a schema to a
finite automaton over tokens ahead of time; recursive schemas do not fit and large ones take seconds.

What a client's grammar may cost is limited four times: it is tried in another process first (`grammar_trial`), every
step has the parser's own limits, all masks of a grammar together have a time they may take, and all grammars that are
kept together have a size. Building and masks leave the interpreter's lock alone; what holds it takes a few milliseconds
for the largest schema.
"""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any

import tokenizers

from antiphon.base.errors import UserError
from antiphon.base.system import give_memory_back
from antiphon.serve.engine_api import QueueFull
from antiphon.serve.text.grammar_lanes import GrammarTrials
from antiphon.serve.text.grammar_matcher import BuiltGrammar, GrammarMatcher
from antiphon.serve.text.grammar_text import json_grammar, lark_grammar
from antiphon.serve.text.grammar_trial import TrialVerdict, load_tokenizer

_KEPT_BYTES = 64 * 1024 * 1024
_USED_BYTES = 256 * 1024 * 1024  # with those that are not kept any more, but still followed
_MAX_KEPT_VERDICTS = 1024  # some hundred bytes each
_SLOW_BUILD_S = 0.05
_TRIMMED_BYTES = 8 * 1024 * 1024


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

    def compile(self, schema: dict[str, Any], client: Hashable = "") -> "Future[str]":
        """The grammar of JSON that fits `schema`. Returns at once; cancel what nobody waits for. `client` takes turns
        with others.

        The future's error is a `UserError` with the reason when the schema is wrong, cannot be satisfied, uses a
        keyword we cannot enforce, or is beyond the limits; `QueueFull` when too many schemas wait.
        """
        return self._ask(partial(json_grammar, schema), "the JSON schema", client)

    def compile_rules(self, rules: Callable[[], str], client: Hashable = "") -> "Future[str]":
        """As `compile`, for rules in llguidance's form of Lark, which another thread asks for."""
        return self._ask(partial(lark_grammar, rules), "the grammar", client)

    def json_schema(self, schema: dict[str, Any]) -> str:
        """`compile`, waited for: seconds."""
        return self.compile(schema).result()

    def lark(self, rules: str) -> str:
        """`compile_rules`, waited for: seconds."""
        return self.compile_rules(lambda: rules).result()

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

    def _ask(self, make: Callable[[], str], what: str, client: Hashable) -> "Future[str]":
        answer: Future[str] = Future()
        self._texts.submit(self._begin, make, what, client, answer)
        return answer

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
                _settle(answer, grammar)
        except Exception as error:
            _settle(answer, error)
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
            _settle(answer, error or grammar)


class _Compiling:
    """A grammar that is being tried or built, and those who wait for it. `what` names it in errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.answers: list[Future[str]] = []
        self.verdict: Future[TrialVerdict] | None = None

    def on_answer(self, _: "Future[str]") -> None:
        """Once nobody waits any more, the trial need not begin. Not to be called with a lock: it may end all."""
        if self.verdict is not None and all(answer.cancelled() for answer in self.answers):
            self.verdict.cancel()


def _settle(answer: "Future[str]", told: str | Exception) -> None:
    """Unless it was cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(told, Exception):
            answer.set_exception(told)
        else:
            answer.set_result(told)


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=32).digest()
