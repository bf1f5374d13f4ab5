"""A grammar as the server keeps it, and the place of one sequence in it.

Sequences begin at copies of the built grammar. A copy is made by the thread that computes the first mask, so that a
request with sixty answers costs those who accept it nothing. Rejected: building for each sequence; the first mask may
take twenty times what the later ones do.
"""

import threading
import time
from collections.abc import Hashable
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from antiphon.serve.text.grammar_trial import MaskTime, TrialVerdict, parser_limits, reason_of

_BITS_PER_WORD = 32
_MIN_GRAMMAR_BYTES = 32 * 1024  # what even a small one takes


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
    def is_accepting(self) -> bool:
        """The text so far is complete, though more may follow."""
        return bool(self._matcher.is_accepting())

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
