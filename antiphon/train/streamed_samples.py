"""Which tokens the samples of a run are whose text is tokenized beside the steps: the same on every rank, whenever the
ids are written and wherever the run goes on.

1. Of each `ROUND` samples every source has its share, at places from the seed. So sample g is the k-th of source s.
2. The k-th window of a source lies in the block that k reaches. Blocks follow one another; windows are shuffled within
   a block, from seed, pass and block.
3. Behind the last window of a source, which is known when all of it is written, its next pass begins.

So all that sample g depends on are the blocks of its source up to its own, and a rank waits for no other.

Rejected: a buffer of windows from which one is drawn at random. Its content would be a part of the state.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_seconds
from antiphon.train.device import HOST, moved
from antiphon.train.model import Batch
from antiphon.train.samples import Numbers, Samples, packed_windows
from antiphon.train.token_stream import ROUND, TokenStream
from antiphon.train.tokens import Written

_POLL_S = 0.05


class _NotYetError(Exception):
    """A block is not there at the end of the time."""


class StreamedSamples:
    """Samples of `stream`. `check`: called while a block is waited for. `timeout_s`: how long a wait lasts while
    nothing more is written."""

    def __init__(
        self, stream: TokenStream, check: Callable[[], None] = lambda: None, timeout_s: float = math.inf
    ) -> None:
        self._stream = stream
        self._check = check
        self._timeout_s = timeout_s
        self._seen: tuple[int, int, int] | None = None  # source, block and ids of the wait that has lasted longest
        self._since_s = 0.0
        self._ends: list[list[int]] = [[] for _ in stream.sources]  # of each source, windows up to the end of a block
        self._whole = [False] * len(stream.sources)
        self._block = lru_cache(maxsize=4 * len(stream.sources))(self._open)
        self._order = lru_cache(maxsize=4 * len(stream.sources))(self._shuffle)
        self._round = lru_cache(maxsize=2)(self._sources_of)

    def are_there(self, numbers: Sequence[int], most_s: float) -> bool:
        """Whether the windows of these samples are written, within `most_s` seconds. `UserError` if they never will
        be, or if nothing more was written for the whole timeout."""
        end_s = time.monotonic() + most_s
        try:
            for number in numbers:
                self._place(number, end_s)
        except _NotYetError:
            return False
        return True

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """The samples with these global numbers. Waits for them."""
        rows = []
        for number in numbers:
            source, block, window = self._place(number)
            rows.append(self._block(source, block).batch([window], HOST))
        documents = [torch.zeros_like(each.ids_BS) if each.documents_BS is None else each.documents_BS for each in rows]
        several = any(each.documents_BS is not None for each in rows)
        return Batch(
            moved(torch.cat([each.ids_BS for each in rows]), device),
            moved(torch.cat([each.targets_BS for each in rows]), device),
            moved(torch.cat([each.positions_BS for each in rows]), device),
            moved(torch.cat(documents), device) if several else None,
        )

    def _place(self, number: int, end_s: float = math.inf) -> tuple[int, int, int]:
        """(source, block, window of the block) of sample `number`."""
        turn, place = divmod(number, ROUND)
        sources, ranks = self._round(turn)
        source = int(sources[place])
        return self._window(source, turn * self._stream.sources[source].per_round + int(ranks[place]), end_s)

    def _sources_of(self, turn: int) -> tuple[Numbers, Numbers]:
        """Of each sample of a round, its source and how many of that source come before it in the round."""
        counts = [each.per_round for each in self._stream.sources]
        sources = np.repeat(np.arange(len(counts)), counts)
        sources = sources[np.random.default_rng((self._stream.seed, turn)).permutation(ROUND)]
        ranks = np.empty(ROUND, np.int64)
        for source, count in enumerate(counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks

    def _window(self, source: int, number: int, end_s: float) -> tuple[int, int, int]:
        ends = self._ends[source]
        while not self._whole[source] and number >= (ends[-1] if ends else 0):
            self._count_block(source, end_s)
        if not ends or not ends[-1]:
            name, num_ids = self._stream.sources[source].source.name, self._stream.written(source).num_ids
            raise UserError(
                f"source {name!r} has {num_ids} tokens, sequence_length is {self._stream.length}: give it more text, "
                "shorten the sequences, or leave it out"
            )
        turn, place = divmod(number, ends[-1]) if self._whole[source] else (0, number)
        block = bisect_right(ends, place)
        place -= ends[block - 1] if block else 0
        return source, block, int(self._order(source, block, turn)[place])

    def _await(self, source: int, block: int, end_s: float) -> Written:
        """What is written of `source` once this block of it is there; `_NotYetError` at `end_s`."""
        each = self._stream.sources[source]
        while not (written := self._stream.written(source)).has_block(block, each.block_tokens):
            self._stream.check_failed()
            self._check()
            now_s, seen = time.monotonic(), (source, block, written.num_ids)
            if seen != self._seen:
                self._seen, self._since_s = seen, now_s
            elif now_s - self._since_s > self._timeout_s:
                raise ResourceError(
                    f"block {block} of source {each.source.name!r} is not there, and tokenizing beside the first "
                    f"rank has written nothing for {format_seconds(self._timeout_s)}: see what the first rank "
                    "says; the same command goes on"
                )
            if now_s > end_s:
                raise _NotYetError
            time.sleep(_POLL_S)
        return written

    def _count_block(self, source: int, end_s: float) -> None:
        """One more block's windows; waits for it."""
        ends, each = self._ends[source], self._stream.sources[source]
        written = self._await(source, len(ends), end_s)
        left = written.num_ids - len(ends) * each.block_tokens
        if left <= 0:
            self._whole[source] = True
            return
        if each.source.is_chat:
            tokens = self._stream.block(source, len(ends))
            num = len(packed_windows(tokens.starts, tokens.all_sources()[0], self._stream.length)[0])
        else:
            num = min(each.block_tokens, left - 1) // self._stream.length
        ends.append(num + (ends[-1] if ends else 0))

    def _open(self, source: int, block: int) -> Samples:
        stream = self._stream
        masks = stream.data.document_masks
        tokens = stream.block(source, block)
        return Samples(tokens, stream.length, seed=stream.seed, document_masks=masks, shuffled=False)

    def _shuffle(self, source: int, block: int, turn: int) -> Numbers:
        ends = self._ends[source]
        num = ends[block] - (ends[block - 1] if block else 0)
        return np.random.default_rng((self._stream.seed, turn, source, block)).permutation(num)
