"""A waiting line in which owners take turns.

Rejected: one line in order of arrival, where the first to ask for much delays all others; one line by size for all,
which a client that cuts its work into small requests would own.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class FairLine(Generic[_Item]):
    """A waiting line in which owners take turns: a client with sixty texts, or a grammar with sixty sequences, delays
    another one by one piece of work and not by sixty. Not thread-safe.

    The next item comes from the owner that has waited longest for its turn. Of one owner's items the one that is due
    first comes first; of those due at the same time, the one that was put first."""

    def __init__(self) -> None:
        self._of_owners: OrderedDict[Hashable, list[tuple[float, int, _Item]]] = OrderedDict()
        self._numbers = itertools.count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def num_of(self, owner: Hashable) -> int:
        """How many items of one owner wait."""
        return len(self._of_owners.get(owner, ()))

    def put(self, owner: Hashable, item: _Item, due_s: float = 0.0) -> None:
        """Add an item."""
        heapq.heappush(self._of_owners.setdefault(owner, []), (due_s, next(self._numbers), item))
        self._num_items += 1

    def take(self) -> _Item:
        """The next item. Its owner's next one comes after one of every other owner. The line must not be empty."""
        owner, items = self._of_owners.popitem(last=False)
        _, _, item = heapq.heappop(items)
        if items:
            self._of_owners[owner] = items
        self._num_items -= 1
        return item
