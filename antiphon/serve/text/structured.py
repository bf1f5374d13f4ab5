"""Output that must follow a JSON schema: compile the schema once, then say before every token which ones are allowed.

Two halves, because two threads need them:

- the API compiles: `GrammarCompiler.json_schema(...)` gives a *string* that travels in `SamplingParams.grammar`; a
  schema that cannot be followed is refused there, before the request is queued;
- the engine matches: `GrammarCompiler.matcher(grammar)` gives the state of one sequence, which fills a bit mask
  over the model's vocabulary before sampling and takes the sampled token after it.

llguidance does the work (an Earley parser over token tries, microseconds per mask). Rejected: compiling a schema to a
finite automaton over tokens ahead of time; recursive schemas do not fit and large ones take seconds.

White space between JSON tokens is limited: a small model that may write white space without end will do so.
"""

import json
from typing import Any

import llguidance
import numpy as np
import tokenizers
from numpy.typing import NDArray

from antiphon.base.errors import UserError

_BITS_PER_WORD = 32
_MAX_SCHEMA_CHARACTERS = 256 * 1024
_MAX_REASON_CHARACTERS = 400
_WHITE_SPACE = r"[ \n\r\t]{0,32}"


class GrammarMatcher:
    """Where one sequence stands in its grammar. Not thread-safe; one per sequence."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // _BITS_PER_WORD)

    def fill_bitmask(self, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """Bits of the tokens allowed next: int32 `[ceil(V / 32)]`, token t at bit `t % 32` of word `t // 32`.

        Written into `out` when given (contiguous, same shape). Once the grammar is complete only end-of-sequence
        tokens are allowed. Releases the GIL while it computes.
        """
        words = np.empty(self._num_words, dtype=np.int32) if out is None else out
        assert words.shape == (self._num_words,), f"bit mask of shape {words.shape}, expected ({self._num_words},)"
        assert words.dtype == np.int32
        assert words.flags.c_contiguous
        computed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        words[: computed.size] = computed[: self._num_words]
        words[computed.size :] = 0
        return words

    def accept(self, token_id: int) -> bool:
        """Move on by one sampled token. False: the token is not allowed here, and the matcher is in error for
        good."""
        return bool(self._matcher.consume_token(token_id))

    @property
    def is_finished(self) -> bool:
        """Nothing but an end-of-sequence token may follow (also true after an error: look at `error`)."""
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        """The text so far is complete, though more may follow."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why matching broke off: a token that was not allowed, or a grammar beyond the parser's limits."""
        if not self._matcher.is_error():
            return None
        reason, _, _parser_state = str(self._matcher.get_error()).partition("<state>")
        return " ".join(reason.split())[:_MAX_REASON_CHARACTERS]


class GrammarCompiler:
    """Grammars over one model's vocabulary. Building it takes up to a second: build one and share it between
    threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the model's: ids past the tokenizer's own are never allowed."""
        if not eos_token_ids:
            raise UserError("structured output needs an end-of-sequence token: the model's config names none")
        padded = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=padded, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise UserError(f"structured output cannot use this tokenizer: {error}") from error
        self._vocab_size = vocab_size

    def json_object(self) -> str:
        """The grammar of any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> str:
        """The grammar of JSON that fits `schema`. May take a while: call it in a thread.

        `UserError` with the reason when the schema is wrong, cannot be satisfied, uses a keyword we cannot enforce, or
        is beyond the parser's limits.
        """
        text = json.dumps(schema, ensure_ascii=False)
        if len(text) > _MAX_SCHEMA_CHARACTERS:
            raise UserError(f"the JSON schema has {len(text)} characters: at most {_MAX_SCHEMA_CHARACTERS} are allowed")
        try:
            grammar: str = llguidance.LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": _WHITE_SPACE}, overrides={"lenient": False}
            )
        except ValueError as error:
            raise UserError(f"the JSON schema cannot be used: {error}") from error
        trial = self.matcher(grammar)
        trial.fill_bitmask()
        _refuse_broken(trial)
        return grammar

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of `grammar`; `UserError` when the grammar cannot be used."""
        matcher = GrammarMatcher(llguidance.LLMatcher(self._tokenizer, grammar, log_level=0), self._vocab_size)
        _refuse_broken(matcher)
        return matcher


def _refuse_broken(matcher: GrammarMatcher) -> None:
    if matcher.error is not None:
        raise UserError(f"the JSON schema cannot be used: {matcher.error}")
