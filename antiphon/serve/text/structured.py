"""Output that must follow a JSON schema: compile the schema once, then say before every token which ones are allowed.

Two halves, because two threads need them:

- the API compiles: `GrammarCompiler.json_schema(...)` gives a *string* that travels in `SamplingParams.grammar`; a
  schema that cannot be followed is refused there, before the request is queued;
- the engine matches: `GrammarCompiler.matcher(grammar)` gives the state of one sequence, a copy made in microseconds.
  It fills a bit mask over the model's vocabulary before sampling and takes the sampled token after it.

llguidance does the work (an Earley parser over token tries, microseconds per mask). Rejected: compiling a schema to a
finite automaton over tokens ahead of time; recursive schemas do not fit and large ones take seconds.

What a client's grammar may cost is limited three times: it is tried in another process first (`grammar_trial`), every
step has the parser's own limits, and all masks of a grammar together have a time they may take.

White space between JSON tokens is limited: a small model that may write white space without end will do so.
"""

import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
import tokenizers
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.serve.text.grammar_trial import GrammarTrial, load_tokenizer, parser_limits, reason_of

_BITS_PER_WORD = 32
_MAX_SCHEMA_CHARACTERS = 256 * 1024
_MAX_KEPT_GRAMMARS = 32
_MASK_CREDIT_S = 0.5
_MASK_PACE_S = 0.01
_WHITE_SPACE = r"[ \n\r\t]{0,32}"


class MaskTime:
    """Processor time that all masks of one grammar took, for all sequences together. They run in the engine's
    thread, where everybody's next token waits for them."""

    def __init__(self) -> None:
        self._num_masks = 0
        self._spent_s = 0.0

    def add(self, spent_s: float) -> None:
        self._num_masks += 1
        self._spent_s += spent_s

    @property
    def is_exhausted(self) -> bool:
        return self._spent_s > _MASK_CREDIT_S + _MASK_PACE_S * self._num_masks


class GrammarMatcher:
    """Where one sequence stands in its grammar. Not thread-safe; one per sequence."""

    def __init__(self, matcher: Any, vocab_size: int, time_taken: MaskTime) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // _BITS_PER_WORD)
        self._vocab_size = vocab_size
        self._time_taken = time_taken

    def copy(self) -> "GrammarMatcher":
        """Another sequence at the same place."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._time_taken)

    def fill_bitmask(self) -> NDArray[np.int32]:
        """Bits of the tokens allowed next: int32 `[ceil(V / 32)]`, token t at bit `t % 32` of word `t // 32`.

        Once the grammar is complete only end-of-sequence tokens are allowed. Releases the GIL while it computes.
        """
        words = np.empty(self._num_words, dtype=np.int32)
        began_s = time.thread_time()
        computed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._time_taken.add(time.thread_time() - began_s)
        words[: computed.size] = computed[: self._num_words]
        words[computed.size :] = 0
        return words

    def accept(self, token_id: int) -> bool:
        """Move on by one sampled token. False: the token is not allowed here, and the matcher is in error for
        good."""
        return bool(self._matcher.consume_token(token_id))

    @property
    def is_accepting(self) -> bool:
        """The text so far is complete, though more may follow."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why matching broke off: a token that was not allowed, a grammar beyond the parser's limits, or one whose
        masks take too long."""
        if self._time_taken.is_exhausted:
            return f"its masks take more than {_MASK_PACE_S * 1e3:.0f} ms a token: simplify the JSON schema"
        return reason_of(self._matcher)


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
        self._trial = GrammarTrial(*described)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._starts: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def json_object(self) -> str:
        """The grammar of any JSON object."""
        return _grammar_of('{"type": "object"}')

    def compile(self, schema: dict[str, Any]) -> "Future[str]":
        """`json_schema` in this compiler's own thread, one schema after the other; cancel what nobody waits for."""
        return self._executor.submit(self.json_schema, schema)

    def json_schema(self, schema: dict[str, Any]) -> str:
        """The grammar of JSON that fits `schema`. May take seconds; not for two threads at once (`compile`).

        `UserError` with the reason when the schema is wrong, cannot be satisfied, uses a keyword we cannot enforce, or
        is beyond the limits.
        """
        text = json.dumps(schema, ensure_ascii=False)
        if len(text) > _MAX_SCHEMA_CHARACTERS:
            raise UserError(f"the JSON schema has {len(text)} characters: at most {_MAX_SCHEMA_CHARACTERS} are allowed")
        grammar = _grammar_of(text)
        self._try(grammar, "the JSON schema")
        return grammar

    def compile_rules(self, rules: str) -> "Future[str]":
        """As `compile`, for rules in llguidance's form of Lark."""
        return self._executor.submit(self.lark, rules)

    def lark(self, rules: str) -> str:
        """The grammar of `rules`, in llguidance's form of Lark. Limits, errors and time are those of `json_schema`."""
        if len(rules) > _MAX_SCHEMA_CHARACTERS:
            raise UserError(f"the grammar has {len(rules)} characters: at most {_MAX_SCHEMA_CHARACTERS} are allowed")
        try:
            grammar: str = llguidance.LLMatcher.grammar_from_lark(rules)
        except ValueError as error:
            raise UserError(f"the grammar cannot be used: {error}") from error
        self._try(grammar, "the grammar")
        return grammar

    def _try(self, grammar: str, what: str) -> None:
        """`UserError` when `grammar` cannot be followed within the limits."""
        if grammar not in self._starts:
            reason = self._trial.reason_against(grammar)
            if reason is not None:
                raise UserError(f"{what} cannot be used: {reason}")
        self.matcher(grammar)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of `grammar`; `UserError` when the grammar cannot be used. A copy, unless it is long
        ago that the grammar was compiled."""
        with self._lock:
            start = self._starts.get(grammar)
            if start is not None:
                self._starts.move_to_end(grammar)
                _refuse_broken(start)
                return start.copy()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        start = GrammarMatcher(matcher, self._vocab_size, MaskTime())
        _refuse_broken(start)
        with self._lock:
            self._starts[grammar] = start
            while len(self._starts) > _MAX_KEPT_GRAMMARS:
                self._starts.popitem(last=False)
            return start.copy()

    def close(self) -> None:
        """End the thread and the process for schemas. Matchers live on."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._trial.close()


def _grammar_of(schema: str) -> str:
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": _WHITE_SPACE}, overrides={"lenient": False}
        )
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error
    return grammar


def _refuse_broken(matcher: GrammarMatcher) -> None:
    if matcher.error is not None:
        raise UserError(f"the JSON schema cannot be used: {matcher.error}")
