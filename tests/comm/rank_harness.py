"""All ranks of a group in one process, each in a thread of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from antiphon.comm.rank_group import NativeRankGroup
from tests.comm.m2n.backends import BACKENDS, PATIENCE_S, Backend

Result = TypeVar("Result")


class Ranks:
    """Groups by rank; `each` runs one call on all of them at once."""

    def __init__(self, backend: Backend, size: int, **options: Any) -> None:
        self.backend = backend
        self.options: dict[str, Any] = {"timeout_s": PATIENCE_S, **options}
        self.groups = [self._make(rank, size, "") for rank in range(size)]
        self._pool = ThreadPoolExecutor(size)

    def _make(self, rank: int, size: int, mark: str) -> NativeRankGroup:
        endpoint = self.backend.endpoint(f"rank[{rank}]{mark}")
        return NativeRankGroup(endpoint, rank, size, **self.options)

    def replace(self, rank: int) -> None:
        """A new rank in the place of one that says goodbye."""
        self.groups[rank].close()
        self.groups[rank] = self._make(rank, len(self.groups), "again")

    def each(self, call: Callable[[NativeRankGroup], Result]) -> list[Result]:
        """The results by rank; raises what one of them raised, once all have ended."""
        futures = [self._pool.submit(call, group) for group in self.groups]
        return [future.result() for future in futures]

    def outcomes(self, call: Callable[[NativeRankGroup], Any]) -> list[BaseException | None]:
        """What each rank raised."""
        return [future.exception() for future in [self._pool.submit(call, group) for group in self.groups]]

    def reset(self, epoch: int) -> None:
        tickets = [group.ticket for group in self.groups]
        self.each(lambda group: group.reset(epoch, tickets))

    def close(self) -> None:
        for group in self.groups:
            group.abort(1 << 14)
        self._pool.shutdown()
        for group in self.groups:
            group.close()


@contextmanager
def ranks(size: int, backend: Backend = BACKENDS[0], **options: Any) -> Iterator[Ranks]:
    """A group that has begun its first epoch."""
    made = Ranks(backend, size, **options)
    try:
        made.reset(0)
        yield made
    finally:
        made.close()
