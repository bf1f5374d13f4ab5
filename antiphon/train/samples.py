"""Which tokens the samples of a run are, by their global number: the same on every rank.

A window is one sequence and its targets. Windows of text follow one another in a source's stream; chats are packed, so
that a window begins with a chat. Sample g is window `order[g mod n]` of pass `g // n`: each pass has its own order over
all sources, from the seed. So a run that resumes on another number of ranks sees exactly what was not seen yet.

A source is seen `epochs` times in one pass. Weights are shares of the samples: they become epochs, of which the least
is 1, so that every window is seen.

Where text is tokenized beside the steps, samples are the same whenever the ids are written and wherever the run goes
on:

1. Of each `ROUND` samples every source has its share, at places from the seed. So sample g is the k-th of source s.
2. The k-th window of a source lies in the block that k reaches. Blocks follow one another; windows are shuffled within
   a block, from seed, pass and block.
3. Behind the last window of a source, which is known when all of it is written, its next pass begins.

So all that sample g depends on are the blocks of its source up to its own, and a rank waits for no other. Rejected: a
buffer of windows from which one is drawn at random. Its content would be a part of the state.

Letters: B sequences, S positions.
"""

import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.units import format_seconds
from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import DataConfig
from antiphon.train.device import HOST, moved
from antiphon.train.model import Batch
from antiphon.train.token_file import SourceTokens, TokenFile
from antiphon.train.token_stream import ROUND, TokenStream
from antiphon.train.tokens import Written

_POLL_S = 0.05
Numbers = np.ndarray[Any, Any]


class _NotYetError(Exception):
    """A block is not written yet."""


class Samples:
    """Windows of `length` tokens and their targets. `shuffled` False: in the order of the text, and all of it: the last
    window of a source may be shorter. `epochs`: of each source in one pass; empty: 1."""

    def __init__(
        self,
        tokens: TokenFile,
        length: int,
        *,
        seed: int,
        document_masks: bool,
        shuffled: bool = True,
        epochs: Sequence[float] = (),
    ) -> None:
        windows = [_windows(tokens, each, length, whole=not shuffled) for each in tokens.all_sources()]
        self._begins, self._ends = (np.concatenate(each) for each in zip(*windows, strict=True))
        self.sources = np.repeat(np.arange(len(windows)), [begins.shape[0] for begins, _ in windows])
        self._epochs = tuple(epochs) or (1.0,) * len(windows)
        counts = [self._num_of(source) for source in range(len(windows))]
        self.num_windows = sum(counts)
        if not self.num_windows:
            raise UserError(
                f"the text has {tokens.ids.shape[0]} tokens, sequence_length is {length}: "
                "give more text or shorten the sequences"
            )
        if len(counts) > 1 and shuffled and 0 in counts:
            short = tokens.all_sources()[counts.index(0)]
            raise UserError(
                f"source {short.name!r} has {short.end - short.first} tokens, sequence_length is {length}: give it "
                "more text, shorten the sequences, or leave it out"
            )
        self._tokens = tokens
        self._length = length
        self._document_masks = document_masks
        self._order = lru_cache(maxsize=2)(lambda turn: self._shuffle(turn, seed) if shuffled else None)

    @staticmethod
    def of(config: TrainConfig, tokens: TokenFile, *, shuffled: bool) -> "Samples":
        """The samples that a run of `config` sees."""
        sizes = [each.end - each.first for each in tokens.all_sources()]
        return Samples(
            tokens,
            config.sequence_length,
            seed=config.seed,
            document_masks=config.data.document_masks,
            shuffled=shuffled,
            epochs=epochs_of(config.data, sizes) if shuffled else (),
        )

    def _num_of(self, source: int) -> int:
        """Samples of a source in one pass."""
        num = int(np.count_nonzero(self.sources == source))
        return max(1, round(num * self._epochs[source])) if num else 0

    def _shuffle(self, turn: int, seed: int) -> Numbers:
        """The windows of pass `turn` in its order. Of a source that is not seen a whole number of times, each pass has
        other windows once more."""
        chosen = []
        for source in range(len(self._epochs)):
            own = np.flatnonzero(self.sources == source)
            wanted, whole = self._num_of(source), own.shape[0]
            if wanted != whole:
                again, part = divmod(wanted, whole)
                some = np.random.default_rng((seed, turn, source)).permutation(own)[:part]
                own = np.concatenate([np.tile(own, again), some])
            chosen.append(own)
        order: Numbers = np.concatenate(chosen)[np.random.default_rng((seed, turn)).permutation(self.num_windows)]
        return order

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """The samples with these global numbers."""
        windows = np.asarray([self._window(number) for number in numbers])
        begins, ends, tokens = self._begins[windows], self._ends[windows], self._tokens
        ids = np.stack([self._padded(tokens.ids, begin) for begin in begins]).astype(np.int64)
        inputs, targets = torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:].copy())
        positions_S = np.arange(self._length)
        places = begins[:, None] + positions_S
        unwanted = places + 1 >= ends[:, None]
        if tokens.learned is not None:
            unwanted |= np.stack([self._padded(tokens.learned, begin) for begin in begins])[:, 1:] == 0
        if not self._document_masks:
            targets[torch.from_numpy(unwanted)] = IGNORED
            positions = torch.from_numpy(np.broadcast_to(positions_S, inputs.shape).copy())
            return Batch(moved(inputs, device), moved(targets, device), moved(positions, device), None)
        documents = np.searchsorted(tokens.starts, places, side="right") - 1
        first = np.maximum(tokens.starts[documents], begins[:, None])
        following = np.searchsorted(tokens.starts, places + 1, side="right") - 1
        unwanted |= following != documents  # no document knows what the next begins with
        targets[torch.from_numpy(unwanted)] = IGNORED
        positions = torch.from_numpy(places - first)
        several = bool((documents != documents[:, :1]).any())
        masks = moved(torch.from_numpy(documents), device) if several else None
        return Batch(moved(inputs, device), moved(targets, device), moved(positions, device), masks)

    def _padded(self, values: Numbers, begin: int) -> Numbers:
        """The values of a window and of its last target; behind the last of all, the last one again."""
        found = values[begin : begin + self._length + 1]
        return found if len(found) > self._length else np.pad(found, (0, self._length + 1 - len(found)), mode="edge")

    def _window(self, number: int) -> int:
        turn, place = divmod(number, self.num_windows)
        order = self._order(turn)
        return place if order is None else int(order[place])


def _windows(tokens: TokenFile, source: SourceTokens, length: int, *, whole: bool) -> tuple[Numbers, Numbers]:
    """Where the windows of a source begin, and where what is learned in them ends. `whole`: the rest too that fills no
    window."""
    if source.is_chat:
        return packed_windows(tokens.starts, source, length)
    targets = max(0, source.end - source.first - 1)
    num = -(-targets // length) if whole else targets // length
    return source.first + np.arange(num) * length, np.full(num, source.end)


def packed_windows(starts: Numbers, source: SourceTokens, length: int) -> tuple[Numbers, Numbers]:
    """Windows that begin with a document and hold as many whole ones as fit; a longer document is cut."""
    first, last = np.searchsorted(starts, (source.first, source.end))
    own = [*starts[first:last].tolist(), source.end]
    begins, ends = list[int](), list[int]()
    for begin, end in itertools.pairwise(own):
        if not begins or end - begins[-1] > length + 1:
            begins.append(begin)
            ends.append(end)
            while end - begins[-1] > length + 1:
                ends[-1] = begins[-1] + length + 1
                begins.append(begins[-1] + length)
                ends.append(end)
        else:
            ends[-1] = end
    return np.asarray(begins, dtype=np.int64), np.asarray(ends, dtype=np.int64)


def epochs_of(config: DataConfig, sizes: Sequence[int]) -> tuple[float, ...]:
    """How often each source is seen in one pass; `sizes`: their tokens."""
    sources = config.all_sources()
    if sources[0].weight is None:
        return tuple(each.epochs or 1.0 for each in sources)
    wanted = [(each.weight or 0.0) / max(1, size) for each, size in zip(sources, sizes, strict=True)]
    return tuple(each / min(wanted) for each in wanted)


def numbers_of_rank(config: TrainConfig, mesh: Mesh, first: int) -> list[range]:
    """The samples of this rank in each pass of a step that begins with sample `first`."""
    size = config.batch // config.micro_batches
    own = size // mesh.sizes.data
    begin = first + mesh.sizes.place(mesh.rank, "data") * own
    return [range(begin + each, begin + each + own) for each in range(0, config.batch, size)]


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
        """The source of each sample of a round, and how many of that source come before it in the round."""
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
