"""What a rank sends, how long it waits and what narrow numbers lose: counted where it happens."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """`sent_bytes` and `waited_s` by "purpose.collective", such as ``dispatch.all_to_all``.

    Bytes are those that leave this rank in the algorithm that sends least: (n - 1) / n of a tensor for an all-gather or
    reduce-scatter over n ranks, what is not its own for an all-to-all.

    `lost_numbers` by "purpose.clipped" and "purpose.flushed": of rows that travel as E4M3, those that were beyond its
    range and those that became zero."""

    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_numbers: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # a wire's threads count too

    def sent(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes[name] += num_bytes

    def waited(self, name: str, seconds: float) -> None:
        with self._lock:
            self.waited_s[name] += seconds

    @property
    def all_waited_s(self) -> float:
        """Since the last `take`."""
        with self._lock:
            return sum(self.waited_s.values())

    def lost(self, name: str, count: int) -> None:
        with self._lock:
            self.lost_numbers[name] += count

    def take(self) -> "Ledger":
        """What was counted so far; counting begins anew."""
        with self._lock:
            taken = Ledger(dict(self.sent_bytes), dict(self.waited_s), dict(self.lost_numbers))
            self.sent_bytes.clear()
            self.waited_s.clear()
            self.lost_numbers.clear()
        return taken
