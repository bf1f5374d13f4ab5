"""Hand-overs between the two pools of a simulated plan, by the engine's own protocol (`serve/policy/handover`).

1. A decode worker admits a request, with blocks for all its tokens; the offer covers what its prefix cache lacks. While
   it has no room, requests wait there and prefill workers get nothing, as in the engine.
2. The prefill worker with the least work computes the prompt. Its keys and values leave layer by layer while the next
   layer is computed, or all at the end. Its step ends when the target's slots hold what is left; the rest of the wire's
   work is beside the next step.
3. The decode worker counts what lands, by layer. The request goes on when everything is there and the prompt is done.
4. A worker dies: its offers are withdrawn. Pages are out of quarantine once the target has said that nothing writes
   them any more. Then the prompt is offered anew, the second time the decode worker computes it itself.

What is modelled is time alone: `wire_s` of a pool, spread evenly over layers, and a latency for each message. A wire
belongs to a prefill worker. Rejected: one event for each layer's bytes. Nothing happens between the layers of a step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.serve.engine_api import HandoverCounts
from antiphon.serve.policy.handover import (
    MAX_LOST,
    CachePart,
    ExpectKV,
    Handover,
    HandoverBook,
    KVOffer,
    KVSource,
    KVTarget,
)
from antiphon.serve.policy.handover_sides import LandingBook, SendingBook
from antiphon.serve.policy.request import Request, StepPlan, prefill_of
from antiphon.serve.policy.scheduler import choose_attention_worker
from antiphon.sim.instances import Instance, LivePool
from antiphon.sim.pools import ServingOptions
from antiphon.specs.counts import blocks_of

_LAYOUT = "simulated"
At = Callable[..., None]  # (seconds, handler, *arguments)


@dataclass(eq=False, kw_only=True)
class _Underway:
    """A request on decode worker `target`, and what prefill worker `source` computes for it. `charged`: if it fails,
    the request may be why."""

    origin: Request
    prefill: Request
    source: int
    target: int
    handover: Handover
    charged: bool = False


@dataclass
class _Departures:
    """What a worker's step sends: the plan it belongs to, runs of tokens (offer, layer, first, last + 1), their time on
    the wire, when it is free for them, and when the last of them is through it."""

    plan: StepPlan
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    wire_s: float = 0.0
    free_s: float = 0.0
    left_s: float = 0.0


class SimulatedHandovers:
    """The hand-overs of one run. `at` plans an event; `touch(pool, worker)` says that a worker may have work now
    (pool 0: prefill, 1: decode). Times are seconds of the simulation."""

    def __init__(
        self, prefill: LivePool, decode: LivePool, options: ServingOptions, *, at: At, touch: Callable[[int, int], None]
    ) -> None:
        self.counts = HandoverCounts()
        self._prefill = prefill
        self._decode = decode
        self._at_end = options.hand_over == "end"
        self._at = at
        self._touch = touch
        self._book = HandoverBook()
        self._num_layers = prefill.pool.setting.model.num_layers
        self._part = CachePart(0, self._num_layers, (0,))
        self._sending = {worker: SendingBook(worker) for worker in prefill.all_schedulers}
        self._landing = {worker: LandingBook() for worker in decode.all_schedulers}
        self._underway: dict[int, _Underway] = {}  # by the offer's number
        self._computing: dict[str, _Underway] = {}  # by the name of what the prefill worker computes
        self._outgoing: dict[int, _Departures] = {}  # by prefill worker
        self._wire_free_s: dict[int, float] = {}
        self._again: set[int] = set()  # decode workers with requests whose earlier try is still in a step
        self._num_prefills = 0
        for instance in prefill.instances:
            instance.lengthen = self._with_sending

    def __len__(self) -> int:
        """Offers that have not ended: their pages may be in quarantine."""
        return len(self._book)

    # --- from admission to the first token --------------------------------------------------------------------------

    def wanted_for(self, request: Request) -> bool:
        """Whether a prefill worker is to compute its prompt once a decode worker has admitted it."""
        return request.num_lost_handovers < MAX_LOST and bool(self._prefill.schedulers())

    def admit(self, now_s: float, instance: Instance) -> None:
        """Offer what decode workers of `instance` have admitted."""
        for target in instance.schedulers:
            self._admit(now_s, target)

    def _admit(self, now_s: float, target: int) -> None:
        for origin in self._decode.all_schedulers[target].take_arriving():
            self._begin(now_s, origin, target)

    def _begin(self, now_s: float, origin: Request, target: int) -> None:
        scheduler = self._decode.all_schedulers[target]
        live = self._prefill.schedulers() if origin.num_lost_handovers < MAX_LOST else {}
        source = choose_attention_worker(origin, live)
        has_blocks = blocks_of(len(origin.token_ids), scheduler.config.block_size) <= len(origin.block_table)
        if source is None or not has_blocks:
            scheduler.stop_arriving(origin)
            self.counts.num_recomputed += 1
            self._touch(1, target)
            return
        if any(each.origin is origin for each in live[source].requests.values()):
            scheduler.ask_again(origin)
            self._again.add(target)
            return
        self._num_prefills += 1
        prefill = prefill_of(origin, f"{origin.request_id}/{self._num_prefills}")
        handover = self._book.offer(
            prefill.request_id,
            source=self._prefill.pool.name_of("attention", source),
            target=self._decode.pool.name_of("attention", target),
            num_target_ranks=1,
            first=origin.num_computed,
            end=len(origin.token_ids),
            pages=origin.block_table,
            now_s=now_s,
            timeout_s=math.inf,
        )
        found = _Underway(origin=origin, prefill=prefill, source=source, target=target, handover=handover)
        self._underway[handover.number] = self._computing[prefill.request_id] = found
        self._open(found)
        live[source].add(prefill)
        self.counts.num_begun += 1
        self._touch(0, source)

    def _open(self, found: _Underway) -> None:
        """Both ends know of the offer."""
        handover = found.handover
        sources, targets = [KVSource(found.source, self._part)], [KVTarget(b"", self._part)]
        tokens: dict[str, Any] = {"number": handover.number, "first": handover.first, "end": handover.end}
        ends: dict[str, Any] = {"layout": _LAYOUT, "sources": sources, "targets": targets}
        self._landing[found.target].expect(ExpectKV(**tokens, **ends, blocks=list(handover.pages), rank=0))
        self._sending[found.source].open(KVOffer(**tokens, **ends, request_id=handover.request_id))

    def computed(self, prefill: Request) -> Request | None:
        """A prefill worker has the next token of what it computes: the request that it belongs to, which the client
        gets the token of; None if nothing waits for it any more."""
        found = self._computing.pop(prefill.request_id, None)
        if found is None:
            return None
        number, end = found.handover.number, found.handover.end
        token_id = prefill.newest_token_id if prefill.num_output > found.origin.num_output else None
        if self._decode.all_schedulers[found.target].take_token(found.origin, token_id):
            self._book.withdraw(number, "the request has ended")
        else:
            self._book.done(number, end)
        return found.origin

    # --- keys and values on their way --------------------------------------------------------------------------------

    def _with_sending(self, now_s: float, plans: Mapping[int, StepPlan], compute_s: float) -> float:
        """How long a step of prefill workers takes until slots hold what keys and values are left. A layer leaves while
        the next one is computed, behind what the step before left on the wire."""
        step_s, layer_s = compute_s, compute_s / self._num_layers
        for worker, plan in plans.items():
            if worker not in self._outgoing or self._outgoing[worker].plan is not plan:
                self._outgoing[worker] = self._queued(worker, plan)
            outgoing = self._outgoing[worker]
            free_s, wire_s = max(outgoing.free_s - now_s, 0.0), outgoing.wire_s
            if self._at_end:
                sent_s = max(compute_s, free_s) + wire_s
            else:
                sent_s = max(compute_s + wire_s / self._num_layers, max(layer_s, free_s) + wire_s)
            if wire_s > 0:
                self._wire_free_s[worker] = outgoing.left_s = now_s + sent_s
                step_s = max(step_s, sent_s - self._prefill.pool.slots_s)
        return step_s

    def _queued(self, worker: int, plan: StepPlan) -> _Departures:
        outgoing, num_tokens = _Departures(plan, free_s=self._wire_free_s.get(worker, 0.0)), 0
        for step in plan.sequences:
            for layer in range(self._num_layers):
                news = self._sending[worker].advance(step.request_id, layer, step.start + len(step.token_ids))
                if news is not None:
                    outgoing.runs.append((news[0].number, layer, news[1], news[2]))
                    num_tokens += news[2] - news[1]
        outgoing.wire_s = self._prefill.pool.wire_s(num_tokens / self._num_layers)
        return outgoing

    def step_ended(self, now_s: float, instance: Instance) -> None:
        """What prefill workers of `instance` have sent will land."""
        latency_s = self._prefill.pool.latency_s
        for worker in instance.schedulers:
            if (outgoing := self._outgoing.pop(worker, None)) is not None and outgoing.runs:
                self._at(max(now_s, outgoing.left_s) + latency_s, self._land, worker, outgoing.runs)

    def _land(self, source: int, runs: list[tuple[int, int, int, int]]) -> None:
        for number, layer, first, last in runs:
            if (found := self._underway.get(number)) is None:
                continue
            landing, run = self._landing[found.target], (number, source, layer, first, last - first)
            if landing.place(*run) is not None and landing.landed(*run):
                self._book.landed(number, 0)

    # --- how it ends -------------------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> None:
        """Do what the protocol's news ask for, and try again where an earlier try was in the way."""
        again, self._again = self._again, set()
        for target in sorted(again):
            self._admit(now_s, target)
        while events := self._book.take_events():
            for kind, handover in events:
                number = handover.number
                if (found := self._underway.get(number)) is None:
                    continue  # its target is gone
                if kind == "withdraw":
                    self._stop(found)
                    self._at(now_s + 2 * self._prefill.pool.latency_s, self.drained, number, found.target)
                    continue
                del self._underway[number]
                if kind == "ready":
                    self._arrive(found)
                else:
                    self._give_up(now_s, found)

    def drained(self, number: int, target: int) -> None:
        """The target has heard of the withdrawal, and says that it writes nothing of the offer any more."""
        self._landing[target].withdraw(number)
        self._book.drained(number, 0)

    def _arrive(self, found: _Underway) -> None:
        found.origin.num_lost_handovers = 0
        self.counts.num_done += 1
        self.counts.num_tokens += found.handover.end - found.handover.first
        self._sending[found.source].close(found.handover.number)
        self._decode.all_schedulers[found.target].arrive(found.origin, found.handover.end)
        self._touch(1, found.target)

    def _give_up(self, now_s: float, found: _Underway) -> None:
        """Its pages are out of quarantine: it has ended, or tries again."""
        scheduler = self._decode.all_schedulers[found.target]
        if found.origin.status == "finished":
            scheduler.remove(found.origin, nothing_comes=True)
        else:
            self.counts.num_failed += 1
            found.origin.num_lost_handovers += found.charged
            scheduler.ask_again(found.origin)
            self._admit(now_s, found.target)
        self._touch(1, found.target)

    def _stop(self, found: _Underway) -> None:
        self._computing.pop(found.prefill.request_id, None)
        self._sending[found.source].close(found.handover.number)
        self._prefill.all_schedulers[found.source].end(found.prefill.request_id)

    def prefill_dies(self, worker: int) -> None:
        """Before its instance hears of it. Requests in its step may be why."""
        scheduler = self._prefill.all_schedulers[worker]
        for found in self._underway.values():
            if found.source == worker:
                found.charged = scheduler.is_in_flight(found.prefill)
        self._book.source_lost(self._prefill.pool.name_of("attention", worker))
        self._outgoing.pop(worker, None)
        self._wire_free_s.pop(worker, None)

    def decode_dies(self, worker: int) -> None:
        """Its pages are gone, and its requests leave for other workers."""
        for number, found in list(self._underway.items()):
            if found.target == worker:
                self._stop(found)
                del self._underway[number]
        self._book.target_lost(self._decode.pool.name_of("attention", worker))
        self._landing[worker] = LandingBook()
        self._again.discard(worker)
