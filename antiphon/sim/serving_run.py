"""A plan against requests, event by event: the engine's own scheduler and routing, steps priced by the cost model.

1. A request arrives, waits at the door while `max_batch` others are in flight, and goes to the worker the engine
   chooses.
2. Instances step (`sim.instances`); a step's tokens are delivered at its end.
3. With two pools requests go to the decode pool, whose workers have prompts computed for them (`sim.handovers`).
4. Where the profile has what HTTP and processes take, they share the machine's cores with the steps (`sim.host`);
   else steps and tokens may wait for cores as it was measured (`ServingOptions.core_waits`).
5. Failures, re-placement of experts and shifts of popularity happen at their times.
6. All events of one moment are handled before any instance begins a step. Same seed, same run.

Rejected: one event per token or layer. A step's sequences share its end, so 10,000 requests take seconds.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from antiphon.base.errors import UserError
from antiphon.serve.policy.request import Request, check_request, new_request
from antiphon.serve.policy.scheduler import choose_attention_worker
from antiphon.sim.demand import Demand
from antiphon.sim.handovers import SimulatedHandovers
from antiphon.sim.host import DrawnWaits, serving_host
from antiphon.sim.instances import Instance, start_pool
from antiphon.sim.pools import MOST_PERIODS, Kill, Pool, ServingOptions
from antiphon.sim.serve_log import Record, ServeLog, ServingRun
from antiphon.specs.sampling import SamplingParams

_TOKEN = 0


def simulate_serving(
    pools: list[Pool],
    demand: Demand,
    options: ServingOptions,
    *,
    record_steps: bool = False,
    on_progress: Callable[[float, float | None], None] | None = None,
) -> ServingRun:
    """Serve all of `demand`. `record_steps`: keep what a trace file needs. `on_progress(done, all)` counts requests."""
    return _ServingSimulation(pools, demand, options, record_steps, on_progress).run()


class _ServingSimulation:
    def __init__(
        self,
        pools: list[Pool],
        demand: Demand,
        options: ServingOptions,
        record_steps: bool,
        on_progress: Callable[[float, float | None], None] | None,
    ) -> None:
        self._demand = demand
        self._options = options
        self._on_progress = on_progress
        self._pools = [start_pool(pool, demand, options.seed) for pool in pools]
        self._log = ServeLog(record_steps)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._dirty: dict[tuple[int, int], Instance] = {}
        self._now_s = 0.0
        self._handovers: SimulatedHandovers | None = None
        if len(self._pools) > 1:
            prefill, decode = self._pools
            self._handovers = SimulatedHandovers(prefill, decode, options, at=self._at, touch=self._touch)
        self._records: list[Record] = []
        self._record_of: dict[str, Record] = {}
        self._door: deque[Record] = deque()
        self._num_in_flight = 0
        self._num_done = 0
        self._most_in_flight = pools[0].setting.workload.max_batch
        self._host = serving_host(
            pools[0].setting,
            lambda: self._now_s,
            self._at,
            has_client=options.client_here,
            hands_over=len(pools) > 1,
        )
        self._waits: DrawnWaits | None = None
        if options.core_waits is not None and self._host is None:
            self._waits = DrawnWaits(options.core_waits, options.seed)
        self._handed_out_s = 0.0  # until when the engine's thread and those that it wakes are late
        self._turns_s: dict[tuple[int, int], tuple[float, float]] = {}  # by instance, of its last two steps

    def run(self) -> ServingRun:
        self._at(float(self._demand.arrivals_s[0]), self._arrive, 0)
        for kill in self._options.kills:
            self._at(kill.time_s, self._kill, kill)
        for every_s, what in (
            (self._options.rebalance_every_s, self._rebalance),
            (self._options.shift_every_s, self._shift),
        ):
            if every_s is not None:
                if (span_s := float(self._demand.arrivals_s[-1])) > MOST_PERIODS * every_s:
                    raise UserError(
                        f"something every {every_s:g} s while requests come for {span_s:.3g} s: at most "
                        f"{MOST_PERIODS:,} times are simulated, give a longer time or a higher rate"
                    )
                self._at(every_s, what, every_s)
        while self._num_done < len(self._demand):
            self._now_s = min(self._heap[0][0] if self._heap else math.inf, self._next_of_host_s())
            assert self._now_s < math.inf, "requests are left, but nothing will happen any more"
            for then in () if self._host is None else self._host.cores.done(self._now_s):
                then()
            while self._heap and self._heap[0][0] == self._now_s:
                _, _, handler, arguments = heapq.heappop(self._heap)
                handler(*arguments)
            self._begin_steps()
            self._log.sample(self._now_s, self._pools)
        end_s = self._now_s
        self._end_quarantines()
        self._log.end(end_s, self._pools)
        return ServingRun(
            records=self._records,
            pools=self._pools,
            log=self._log,
            end_s=end_s,
            handovers=None if self._handovers is None else self._handovers.counts,
        )

    def _next_of_host_s(self) -> float:
        return math.inf if self._host is None else self._host.cores.next_s()

    def _at(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (time_s, self._num_events, handler, arguments))

    # --- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        demand = self._demand
        record = Record(
            index=index,
            arrival_s=self._now_s,
            input_tokens=int(demand.input_tokens[index]),
            output_tokens=int(demand.output_tokens[index]),
        )
        self._records.append(record)
        if index + 1 < len(demand):
            self._at(float(demand.arrivals_s[index + 1]), self._arrive, index + 1)
        if self._host is None:
            self._knock(record)
        else:
            self._host.request(partial(self._knock, record))

    def _knock(self, record: Record) -> None:
        """The engine has the request."""
        self._door.append(record)
        self._open_door()

    def _open_door(self) -> None:
        while self._door and (self._most_in_flight is None or self._num_in_flight < self._most_in_flight):
            self._admit(self._door.popleft())

    def _admit(self, record: Record) -> None:
        """Into the only pool, or the one that decodes, unless one of them could never finish it."""
        requests = [self._request(record, live.pool, record.output_tokens) for live in self._pools]
        try:
            for request, live in zip(requests, self._pools, strict=True):
                check_request(request, live.pool.config)
        except UserError as error:
            record.refused = str(error)
            self._done()
            return
        self._record_of[requests[-1].request_id] = record
        self._num_in_flight += 1
        self._route(len(self._pools) - 1, requests[-1])

    def _request(self, record: Record, pool: Pool, max_tokens: int) -> Request:
        cached = round(pool.setting.workload.prefix_hit * record.input_tokens)
        num_made = min(record.input_tokens, pool.config.max_model_len)  # a longer prompt is refused by its length
        shared = min(max(self._options.shared_prefix_tokens, cached), num_made)
        request = new_request(
            str(record.index),
            [_TOKEN] * shared + [record.index + 1] * (num_made - shared),
            SamplingParams(max_tokens=1 if pool.first_token_only else max_tokens, ignore_eos=True),
            arrival=record.index,
            seed=0,
            eos_token_ids=(),
        )
        request.num_prompt = record.input_tokens
        return request

    def _route(self, pool: int, request: Request) -> None:
        """To the worker that the engine would choose; none is alive: wait for one."""
        live = self._pools[pool]
        request.prefills_apart = self._handovers is not None and self._handovers.wanted_for(request)
        worker = choose_attention_worker(request, live.schedulers())
        if worker is None:
            live.waiting.append(request)
            return
        live.all_schedulers[worker].add(request)
        self._touch(pool, worker)

    def _touch(self, pool: int, worker: int) -> None:
        """Its instance may have work now."""
        self._look_again(pool, self._pools[pool].instance_of(worker))

    def _look_again(self, pool: int, instance: Instance) -> None:
        self._dirty[pool, instance.index] = instance

    def _done(self) -> None:
        self._num_done += 1
        if self._on_progress is not None:
            self._on_progress(self._num_done, len(self._demand))

    # --- steps -----------------------------------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        """On all instances that something has happened to; decode workers first, whose admissions are work for prefill
        workers."""
        self._settle()
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for (pool, _), instance in sorted(dirty.items(), key=lambda item: item[0], reverse=True):
                self._begin(pool, instance)
            self._settle()

    def _settle(self) -> None:
        if self._handovers is not None:
            self._handovers.settle(self._now_s)

    def _end_quarantines(self) -> None:
        """All requests are done; what targets have not said yet is all that is left to happen."""
        while self._handovers is not None and len(self._handovers):
            self._now_s, _, handler, arguments = heapq.heappop(self._heap)
            if handler == self._handovers.drained:
                handler(*arguments)
                self._settle()

    def _begin(self, pool: int, instance: Instance) -> None:
        planned_s, _ = self._turns_s.get((pool, instance.index), (0.0, 0.0))
        if planned_s > self._now_s and not instance.pool.is_apart:  # the engine is late with the plan
            self._at(planned_s, self._look_again, pool, instance)
            return
        step = instance.begin(self._now_s)
        if self._handovers is not None and pool == len(self._pools) - 1:
            self._handovers.admit(self._now_s, instance)
        if step is None:
            return
        ends = partial(self._step_ends, pool, instance, instance.version)
        if self._host is None or step.price is None:
            stalled_s = 0.0 if self._waits is None else self._waits.stalled_s(step.end_s - self._now_s)
            self._at(step.end_s + stalled_s, ends)
        else:
            phase, turn_s = instance.pool.phase, step.price.turn_s
            devices = sum(use.num_devices for use in phase.devices) // phase.num_instances
            work_s = step.price.duration_s - step.exposed_s - turn_s
            rows = list(step.rows.values())
            if sum(rows) == step.num_decode:
                work_s = self._host.decoding_s(work_s, max(rows))
            self._host.step(_thread_of(instance), devices, work_s, turn_s, ends, wait_s=step.exposed_s)

    def _step_ends(self, pool: int, instance: Instance, version: int) -> None:
        if version != instance.version:
            return  # given up meanwhile
        assert instance.step is not None
        self._log.step(instance, replace(instance.step, end_s=self._now_s))
        exposed_s = instance.step.exposed_s
        progress = instance.finish()
        self._dirty[pool, instance.index] = instance
        if self._handovers is not None and pool == 0:
            self._handovers.counts.exposed_s += exposed_s
            origins = [self._handovers.computed(prefill) for prefill in progress]
            progress = [origin for origin in origins if origin is not None]
            self._handovers.step_ended(self._now_s, instance)
        if self._waits is not None:  # once the engine is done with this step, there is a plan for the next but one
            self._handed_out_s = max(self._handed_out_s, self._now_s + self._waits.woken_s())
            _, before_s = self._turns_s.get((pool, instance.index), (0.0, 0.0))
            self._turns_s[pool, instance.index] = before_s, self._handed_out_s
        self._deliver(progress)

    def _deliver(self, progress: list[Request]) -> None:
        """Tokens of a step to their requests."""
        tokens = []
        for request in progress:
            record = self._record_of[request.request_id]
            record.num_output += 1
            if request.finish_reason is not None:
                del self._record_of[request.request_id]
            tokens.append((record, request.finish_reason is not None))
        if self._waits is not None and tokens:  # they wait until the engine has a core
            self._at(self._handed_out_s, self._arrived, tokens)
        elif self._host is None or not tokens:
            self._arrived(tokens)
        else:
            self._host.tokens(len(tokens), partial(self._arrived, tokens))

    def _arrived(self, tokens: list[tuple[Record, bool]]) -> None:
        """One token of each request is with its client; some are the last ones."""
        gaps: dict[float, int] = {}
        for record, is_last in tokens:
            if record.last_token_s is None:
                record.first_token_s = self._now_s
            else:
                gap = self._now_s - record.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
            record.last_token_s = self._now_s
            if is_last:
                record.finished_s = self._now_s
                self._num_in_flight -= 1
                self._done()
        self._log.delivered(self._now_s, len(tokens), gaps)
        self._open_door()

    # --- what else happens -----------------------------------------------------------------------------------------

    def _kill(self, kill: Kill) -> None:
        live = self._pools[kill.pool]
        until_s = self._now_s + self._options.restart_s
        if kill.role == "attention":
            instance = live.instance_of(kill.worker)
            if self._handovers is not None:
                (self._handovers.decode_dies if kill.pool else self._handovers.prefill_dies)(kill.worker)
            moved = instance.kill_attention(kill.worker, until_s)
        else:
            instance = live.instances[kill.worker // live.pool.phase.parallel.expert_workers]
            instance.kill_experts(kill.worker, until_s)
            moved = []
        if self._host is not None:
            self._host.cores.drop(self._now_s, _thread_of(instance))
        live.routes = None
        for request in moved:
            self._lost(kill.pool, request)
        self._log.failure(kill, live.pool, self._now_s, until_s, len(moved))
        self._at(until_s, self._recover, kill.pool, instance)
        self._dirty[kill.pool, instance.index] = instance

    def _lost(self, pool: int, request: Request) -> None:
        """Its keys and values are gone. What a prefill worker computed for others is offered anew, by these."""
        origin = request if request.origin is None else request.origin
        self._record_of[origin.request_id].num_losses += 1
        if request.origin is None:
            self._route(pool, request)

    def _recover(self, pool: int, instance: Instance) -> None:
        live = self._pools[pool]
        instance.recover(self._now_s)
        live.routes = None
        waiting, live.waiting = live.waiting, []
        for request in waiting:
            self._route(pool, request)
        self._dirty[pool, instance.index] = instance

    def _rebalance(self, every_s: float) -> None:
        for index, live in enumerate(self._pools):
            for instance in live.instances:
                move = instance.load.replace()
                if move is not None:
                    instance.pause(move.pause_s)
                    self._log.move(live.pool, instance.index, self._now_s, move)
                    self._dirty[index, instance.index] = instance
        self._at(self._now_s + every_s, self._rebalance, every_s)

    def _shift(self, every_s: float) -> None:
        for live in self._pools:
            live.popularity.shift()
        self._at(self._now_s + every_s, self._shift, every_s)


def _thread_of(instance: Instance) -> str:
    return f"{instance.pool.name} {instance.index}"
