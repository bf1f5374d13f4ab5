"""A waiting line in which owners take turns: a grammar with sixty sequences, or a client with sixty schemas, delays
another one by one piece of work and not by sixty.

Rejected: one line in order of arrival, where the first to ask for much delays all others.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class TurnLine(Generic[_Item]):
    """Items by owner; an owner's own are served in their order. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[_Item]] = OrderedDict()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def num_of(self, owner: Hashable) -> int:
        """Items of one owner."""
        return len(self._lines.get(owner, ()))

    def add(self, owner: Hashable, item: _Item) -> None:
        self._lines.setdefault(owner, deque()).append(item)
        self._num_items += 1

    def take(self) -> _Item:
        """The next item. Its owner's next one comes after one of everybody else. The line must not be empty."""
        owner, line = self._lines.popitem(last=False)
        item = line.popleft()
        if line:
            self._lines[owner] = line
        self._num_items -= 1
        return item
