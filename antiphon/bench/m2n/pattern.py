"""What messages hold while they are checked: bytes that depend on step, source, destination and position.

Word i of a message is `key + i * STRIDE` modulo 2^64, the key a mix of step, source and destination. A message that is
late, swapped, shifted, cut or torn therefore differs in every word concerned. Rejected: random bytes from a seeded
generator (ten times slower to make, and no better), a checksum (says that, not where).
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_STRIDE = 0x9E3779B97F4A7C15  # odd: all words of a message differ
_STEP, _SOURCE, _DESTINATION = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
_WORD = 8


class WrongData(ValueError):
    """A message is not what was sent."""


def pattern(num_bytes: int, step: int, source: int, destination: int) -> Bytes:
    """The bytes of one message, in new memory."""
    key = (step * _STEP + source * _SOURCE + destination * _DESTINATION) % 2**64
    words = np.arange(-(-num_bytes // _WORD), dtype=np.uint64)
    words *= np.uint64(_STRIDE)
    words += np.uint64(key)
    return words.view(np.uint8)[:num_bytes]


def check_pattern(message: Bytes, num_bytes: int, step: int, source: int, destination: int) -> None:
    """`WrongData` names the message and its first wrong byte."""
    what = f"the message of step {step} from rank {source} to rank {destination}"
    if message.nbytes != num_bytes:
        raise WrongData(f"{what} has {message.nbytes} bytes instead of {num_bytes}")
    expected = pattern(num_bytes, step, source, destination)
    if np.array_equal(message, expected):
        return
    wrong = np.flatnonzero(message != expected)
    first = int(wrong[0])
    raise WrongData(
        f"{what} has {wrong.size} wrong bytes of {num_bytes}, the first at {first}: {message[first]} instead of "
        f"{expected[first]}"
    )
