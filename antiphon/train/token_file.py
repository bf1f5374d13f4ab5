"""The token ids of one split, and where documents and sources begin in them. `train.tokens` and `train.token_stream`
map it from disk."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.base.errors import UserError


@dataclass(frozen=True)
class SourceTokens:
    """Ids `first` to `end` of a split are those of one source. `is_chat`: its documents are packed whole.
    `is_evaluation`: it is a set of its own, of which nothing is trained on."""

    name: str
    first: int
    end: int
    is_chat: bool = False
    is_evaluation: bool = False


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split, and where its documents begin. `num_text_bytes`: of the text that the ids stand for.
    `learned`: for each id whether a loss is taken on it; None: on all. `digest`: of all of it."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    num_text_bytes: int = 0
    learned: np.ndarray[Any, Any] | None = None
    sources: tuple[SourceTokens, ...] = ()
    digest: str = ""

    def all_sources(self) -> tuple[SourceTokens, ...]:
        return self.sources or (SourceTokens("files", 0, self.ids.shape[0]),)


def joined(parts: Sequence[TokenFile]) -> TokenFile:
    """All of `parts`, one behind the other; of several, in memory."""
    if len(parts) == 1:
        return parts[0]
    learned = None
    if any(each.learned is not None for each in parts):
        learned = np.concatenate(
            [np.ones(each.ids.shape, np.uint8) if each.learned is None else each.learned for each in parts]
        )
    firsts = [0, *itertools.accumulate(each.ids.shape[0] for each in parts)]
    return TokenFile(
        ids=np.concatenate([each.ids for each in parts]),
        starts=np.concatenate([each.starts + first for each, first in zip(parts, firsts, strict=False)]),
        num_text_bytes=sum(each.num_text_bytes for each in parts),
        learned=learned,
        sources=tuple(
            replace(source, first=source.first + first, end=source.end + first)
            for each, first in zip(parts, firsts, strict=False)
            for source in each.sources
        ),
        digest="/".join(each.digest for each in parts),
    )


def mapped(file: Path, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray[Any, Any]:
    """Elements `first` to `first + count`; without any, an empty array."""
    if not count:
        return np.zeros(0, dtype)
    try:
        return np.memmap(file, dtype, "r", first * dtype.itemsize, (count,))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: shorter than was written: remove {file.parent}") from error
