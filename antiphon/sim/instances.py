"""One instance of a plan while it runs: attention workers with the engine's own schedulers, steps, failures, pauses.

1. A step: every live attention worker with work plans it (`serve.policy.scheduler`), the step is cut and priced, and
   at its end every plan is committed. All attention workers of an instance step together.
2. An attention worker dies: its requests leave; the others' plans are sent again, the step begins anew.
3. An expert worker dies (or a colocated rank): no worker steps until it is back, then the same plans are sent again.
4. A pause (experts move) takes the place of a step.

Rejected: a model of the scheduler. The engine's is plain Python on integers and runs here as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from antiphon.serve.policy.request import Request, SequenceStep, StepPlan
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.sim.demand import Demand
from antiphon.sim.expert_load import ExpertLoad, Popularity, fractions_of
from antiphon.sim.pools import Pool
from antiphon.sim.step_price import Rows, StepPrice, StepPricer, rows_of
from antiphon.sim.step_tables import step_tables


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps of a pool. `*_weighted`: times rows of the step, so that means are what a token sees."""

    num_steps: int = 0
    step_s: float = 0.0
    num_rows: int = 0
    attention_busy_s: float = 0.0
    experts_busy_s: float = 0.0
    t_a_weighted: float = 0.0
    t_e_weighted: float = 0.0
    t_c_weighted: float = 0.0
    step_s_weighted: float = 0.0
    rows_weighted: float = 0.0
    decode_rows_weighted: float = 0.0

    def add(self, price: StepPrice, num_rows: int, num_decode: int) -> None:
        self.num_steps += 1
        self.step_s += price.duration_s
        self.num_rows += num_rows
        self.attention_busy_s += price.attention_busy_s
        self.experts_busy_s += price.experts_busy_s
        self.t_a_weighted += price.t_a_s * num_rows
        self.t_e_weighted += price.t_e_s * num_rows
        self.t_c_weighted += price.t_c_s * num_rows
        self.step_s_weighted += price.duration_s * num_rows
        self.rows_weighted += num_rows * num_rows
        self.decode_rows_weighted += num_decode * num_rows


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun. `rows`: by attention worker; empty for a pause. `exposed_s`: the part of it in which all
    is computed, and keys and values still leave."""

    start_s: float
    end_s: float
    rows: dict[int, int] = field(default_factory=dict)
    num_decode: int = 0
    price: StepPrice | None = None
    exposed_s: float = 0.0


class Instance:
    """Attention workers go by their numbers in the pool. `version` grows with every step that ends or is given up.
    `lengthen`: from now, plans and the time to compute them to the time that the step takes, where it hands over."""

    def __init__(self, index: int, pool: Pool, pricer: StepPricer, load: ExpertLoad, totals: StepTotals) -> None:
        self.index = index
        self.pool = pool
        self.load = load
        self.version = 0
        self.step: Step | None = None
        self.lengthen: Callable[[float, Mapping[int, StepPlan], float], float] | None = None
        first = index * pool.attention_per_instance
        self.schedulers = {first + place: Scheduler(pool.config) for place in range(pool.attention_per_instance)}
        self._pricer = pricer
        self._totals = totals
        self._plans: dict[int, StepPlan] = {}
        self._down: dict[int, float] = {}
        self._experts_down: dict[int, float] = {}
        self._pause_s = 0.0

    @property
    def live(self) -> list[int]:
        return [worker for worker in self.schedulers if worker not in self._down]

    @property
    def can_step(self) -> bool:
        return not self._experts_down and len(self._down) < len(self.schedulers)

    def pause(self, seconds: float) -> None:
        """Stand still for so long, after the step that runs."""
        self._pause_s += seconds

    def begin(self, now_s: float) -> Step | None:
        """Begin a step, if none runs, all that are needed live, and there is work."""
        if self.step is not None or not self.can_step:
            return None
        if self._pause_s > 0:
            self.step = Step(now_s, now_s + self._pause_s)
            return self.step
        if not self._plans:
            for worker in self.live:
                scheduler = self.schedulers[worker]
                if scheduler.has_work and (plan := scheduler.schedule()) is not None:
                    self._plans[worker] = plan
        if not self._plans:
            return None
        batches = {worker: self._rows(worker, plan) for worker, plan in self._plans.items()}
        price = self._pricer.price(batches, self.load)
        rows = {worker: sum(batch.num for batch in cut) for worker, cut in batches.items()}
        num_decode = sum(batch.num_decode for cut in batches.values() for batch in cut)
        computed_s = price.duration_s
        exposed_s = 0.0 if self.lengthen is None else self.lengthen(now_s, self._plans, computed_s) - computed_s
        price = replace(price, duration_s=computed_s + exposed_s)
        self.step = Step(now_s, now_s + price.duration_s, rows, num_decode, price, exposed_s)
        return self.step

    def finish(self) -> list[Request]:
        """The running step has ended: the requests that got a token or ended."""
        assert self.step is not None
        step, self.step = self.step, None
        self.version += 1
        if step.price is None:
            self._pause_s = 0.0
            return []
        self._totals.add(step.price, sum(step.rows.values()), step.num_decode)
        progress = []
        for worker, plan in self._plans.items():
            sampled = [0] * sum([sequence.samples for sequence in plan.sequences])
            progress += self.schedulers[worker].commit(plan, sampled)
        self._plans = {}
        return progress

    def kill_attention(self, worker: int, until_s: float) -> list[Request]:
        """`worker` is gone until then. Returns its requests, oldest first, for others to take."""
        self._give_up()
        self._down[worker] = max(until_s, self._down.get(worker, 0.0))
        if not self.pool.is_apart:
            self._experts_down[worker] = self._down[worker]
        self._plans.pop(worker, None)
        return self.schedulers[worker].remove_all(cache_lost=True)

    def kill_experts(self, worker: int, until_s: float) -> None:
        """No worker steps until then."""
        self._give_up()
        self._experts_down[worker] = max(until_s, self._experts_down.get(worker, 0.0))

    def recover(self, now_s: float) -> None:
        """Workers whose time is over are back."""
        self._down = {worker: until for worker, until in self._down.items() if until > now_s}
        self._experts_down = {worker: until for worker, until in self._experts_down.items() if until > now_s}

    def _give_up(self) -> None:
        """The running step is void; its plans stay, to be sent again."""
        if self.step is not None:
            self.step = None
            self.version += 1

    def _rows(self, worker: int, plan: StepPlan) -> list[Rows]:
        sequences: Sequence[SequenceStep] = plan.sequences
        num_rows = plan.num_tokens
        if self.pool.kv_arrives and num_rows > len(sequences):
            requests = self.schedulers[worker].requests
            sequences = [_arrived(step, requests[step.request_id]) for step in sequences]
            num_rows = sum(len(step.token_ids) for step in sequences)
        return rows_of(sequences, num_rows, self.pool.phase.micro_batches, self.pool.config.context_tokens_per_row)


def _arrived(step: SequenceStep, request: Request) -> SequenceStep:
    """The first step of a request whose keys and values come from elsewhere computes one row; one that was pushed out
    is computed again here."""
    if len(step.token_ids) == 1 or request.num_admissions > 1:
        return step
    last = len(step.token_ids) - 1
    return step._replace(token_ids=step.token_ids[last:], start=step.start + last)


@dataclass
class LivePool:
    """A pool while it runs. `waiting`: requests that no live worker could take. `all_schedulers`: by worker, those of
    dead ones, too."""

    pool: Pool
    instances: list[Instance]
    popularity: Popularity
    totals: StepTotals
    waiting: list[Request] = field(default_factory=list)
    routes: dict[int, Scheduler] | None = None
    all_schedulers: dict[int, Scheduler] = field(init=False)

    def __post_init__(self) -> None:
        every = [instance.schedulers for instance in self.instances]
        self.all_schedulers = {worker: scheduler for each in every for worker, scheduler in each.items()}

    def instance_of(self, worker: int) -> Instance:
        return self.instances[worker // self.pool.attention_per_instance]

    def schedulers(self) -> dict[int, Scheduler]:
        """Live attention workers; those of instances that stand still only if no other is left."""
        if self.routes is None:
            able = [instance for instance in self.instances if instance.can_step]
            self.routes = {
                worker: instance.schedulers[worker] for instance in able or self.instances for worker in instance.live
            }
        return self.routes


def start_pool(pool: Pool, demand: Demand, seed: int) -> LivePool:
    """All instances idle, tables for the sizes that `demand` can lead to."""
    setting, one = pool.setting, pool.one
    most_rows = min(pool.config.max_batch_tokens, pool.config.max_running * int(demand.input_tokens.max()))
    if pool.kv_arrives:
        most_rows = pool.config.max_running + int(demand.input_tokens.max())
    longest = int((demand.input_tokens + demand.output_tokens).max())
    tables = step_tables(setting, one, most_rows=most_rows, most_context=longest)
    pricer, popularity, totals = StepPricer(setting, one, tables), Popularity(setting.shares, seed), StepTotals()
    fractions = fractions_of(pool.phase, pool.experts_per_instance)
    instances = [
        Instance(index, pool, pricer, ExpertLoad(setting, one, fractions, popularity, seed + index), totals)
        for index in range(pool.phase.num_instances)
    ]
    return LivePool(pool, instances, popularity, totals)
