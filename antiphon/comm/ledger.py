"""What a rank sends and how long it waits, by purpose and collective: counted where it happens."""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """`sent_bytes` and `waited_s` by "purpose.collective", such as ``dispatch.all_to_all``.

    Bytes are those that leave this rank in the algorithm that sends least: (n - 1) / n of a tensor for an all-gather or
    reduce-scatter over n ranks, what is not its own for an all-to-all."""

    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def sent(self, name: str, num_bytes: int) -> None:
        self.sent_bytes[name] += num_bytes

    def waited(self, name: str, seconds: float) -> None:
        self.waited_s[name] += seconds

    def take(self) -> "Ledger":
        """What was counted so far; counting begins anew."""
        taken = Ledger(dict(self.sent_bytes), dict(self.waited_s))
        self.sent_bytes.clear()
        self.waited_s.clear()
        return taken
