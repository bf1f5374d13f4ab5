"""The ping-pong pipeline as an event graph: for small cases, for traces of every worker, and to check the recurrence.

The same rules as `ping_pong`, told in activities: one per worker or link, layer and micro-batch, for any number of
workers. They keep to the order (layer, micro-batch); `first_come` serves in order of arrival, which is the same.
Rejected: only the recurrence, which nothing independent would check.
"""

import itertools
from dataclasses import dataclass

from antiphon.sim.events import EventGraph, Run
from antiphon.sim.ping_pong import LINES, PingPong
from antiphon.sim.resources import Discipline, InOrder

Ends = dict[int, int]  # worker -> the activity after whose end it has what it needs


@dataclass(frozen=True)
class PingPongRun:
    """`replies[l, i][a]`: the activity whose end is attention worker a's complete reply."""

    run: Run
    replies: dict[tuple[int, int], Ends]

    def replied_s(self, layer: int, micro_batch: int) -> float:
        return max(self.run.ends_s[index] for index in self.replies[layer, micro_batch].values())


def simulate_ping_pong_events(
    pipeline: PingPong, num_attention: int = 1, num_experts: int = 1, *, first_come: bool = False
) -> PingPongRun:
    """Simulate the iteration event by event; thousands of cells take seconds."""
    builder = _Builder(pipeline, num_attention, num_experts, first_come)
    replies: dict[tuple[int, int], Ends] = {}
    for layer, micro_batch in itertools.product(range(pipeline.num_layers), range(pipeline.num_micro_batches)):
        replies[layer, micro_batch] = builder.cell(layer, micro_batch, replies.get((layer - 1, micro_batch), {}))
    return PingPongRun(builder.graph.run(), replies)


class _Builder:
    def __init__(self, pipeline: PingPong, num_attention: int, num_experts: int, first_come: bool) -> None:
        self._pipeline = pipeline
        self._attention, self._experts = range(num_attention), range(num_experts)
        self.graph = EventGraph()
        for track, _ in LINES.values():
            for worker in self._attention if track.startswith("attention") else self._experts:
                self.graph.resource(track.replace("[]", f"[{worker}]"), Discipline() if first_come else InOrder())

    def cell(self, layer: int, micro_batch: int, ready: Ends) -> Ends:
        cell = (layer, micro_batch)
        computed = {a: self._work("attention_s", cell, a, [ready[a]] if ready else []) for a in self._attention}
        sent = {a: self._work("attention_send_s", cell, a, [computed[a]]) for a in self._attention}
        complete = self._receive("experts_receive_s", cell, self._experts, sent)
        fed = {e: self._work("experts_s", cell, e, [index]) for e, index in complete.items()}
        replied = {e: self._work("experts_send_s", cell, e, [index]) for e, index in fed.items()}
        return self._receive("attention_receive_s", cell, self._attention, replied)

    def _receive(self, name: str, cell: tuple[int, int], workers: range, sent: Ends) -> Ends:
        """The link carries bytes once the first sender begins; complete when it is through and the last has sent."""
        complete = {}
        activities = list(sent.values())
        for worker in workers:
            carried = self._work(name, cell, worker, [], first_start=activities)
            arrived = self.graph.add("last sender", 0.0, after=activities, latency_s=self._pipeline.latency_s)
            complete[worker] = self.graph.add("complete", 0.0, after=[carried, arrived])
        return complete

    def _work(
        self, name: str, cell: tuple[int, int], worker: int, after: list[int], first_start: list[int] | None = None
    ) -> int:
        track, kind = LINES[name]
        layer, micro_batch = cell
        return self.graph.add(
            f"{layer}.{micro_batch}",
            getattr(self._pipeline, name),
            track.replace("[]", f"[{worker}]"),
            after=after,
            after_first_start=first_start or (),
            latency_s=self._pipeline.latency_s if first_start else 0.0,
            kind=kind,
            layer=layer,
            micro_batch=micro_batch,
        )
