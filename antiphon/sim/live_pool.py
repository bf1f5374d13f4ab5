"""A pool while it runs: its instances, who can be routed to, requests that wait for a worker to live."""

from dataclasses import dataclass, field

from antiphon.serve.policy.request import Request
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.sim.arrivals import Demand
from antiphon.sim.expert_load import ExpertLoad, Popularity, fractions_of
from antiphon.sim.instances import Instance, StepTotals
from antiphon.sim.pools import Pool
from antiphon.sim.step_price import StepPricer
from antiphon.sim.step_tables import step_tables


@dataclass
class LivePool:
    """A pool while it runs. `waiting`: requests that no live worker could take."""

    pool: Pool
    instances: list[Instance]
    popularity: Popularity
    totals: StepTotals
    waiting: list[Request] = field(default_factory=list)
    routes: dict[int, Scheduler] | None = None

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
