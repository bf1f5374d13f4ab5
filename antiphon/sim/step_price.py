"""How long one step of one instance takes, from what its attention workers' micro-batches really hold.

1. Attention waits for the slowest worker of each micro-batch; experts for the fullest one.
2. Disaggregated: micro-batches go round attention, dispatch, experts, combine. In the steady state a layer of all of
   them takes as long as the busiest of the four, added up over micro-batches, or as the longest round of one, whichever
   is longer; with equal micro-batches that is `cost.ping_pong.layer_time`. Dense layers and head run on attention only.
3. Where a profile was measured, the engine's own turn between two steps is added.
4. Colocated: a micro-batch takes attention + exchange + experts in each layer of its stage; a step ends when all have
   passed all stages, limited by the longest of them or by all of them on one stage.

5. Where steps propose tokens (`WorkloadSpec.draft_tokens`), decoding sequences have more rows, and a step gives more
   than one token on average. The simulation adds one token a step, so its step is that part of the real one; what
   pieces of prompts add to a step counts in full.

Rejected: `sim.ping_pong` for every step. It is exact in how a step begins and ends, and a thousand times slower.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from antiphon.planner.candidates import Candidates
from antiphon.planner.setting import Setting
from antiphon.serve.policy.micro_batches import split_into_micro_batches
from antiphon.serve.policy.request import SequenceStep, chunk_cost
from antiphon.sim.expert_load import ExpertLoad
from antiphon.sim.step_tables import StepAttention, StepTables

LARGE, MANY = 0.25, 16  # of a micro-batch's share of the cost; sequences per micro-batch


@dataclass(slots=True)
class Rows:
    """One micro-batch of one attention worker. `visible`: tokens that decoding rows see in all; `chunks`: (new, cached)
    tokens of pieces of prompts; `sampled`: rows that get logits."""

    num: int = 0
    num_decode: int = 0
    visible: int = 0
    sampled: int = 0
    chunks: list[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class StepPrice:
    """`t_*_s`: means over micro-batches of one layer (T_c: the slower way; colocated: half of the exchange). Busy times
    are means over workers; colocated devices do both kinds of work, and both numbers are the sum. `turn_s`: the
    engine's part of the duration."""

    duration_s: float
    t_a_s: float
    t_e_s: float
    t_c_s: float
    attention_busy_s: float
    experts_busy_s: float
    turn_s: float = 0.0


def rows_of(
    sequences: Sequence[SequenceStep], num_rows: int, num_micro_batches: int, context_tokens_per_row: float
) -> list[Rows]:
    """What the engine's own cut makes of one attention worker's step of `num_rows` rows.

    Of many decodes, none of which costs a large part of a share, the cut comes out even: it is taken to be, which
    spares half of the time of a simulation."""
    if num_rows == len(sequences):
        starts = [step.start for step in sequences]
        visible = sum(starts) + num_rows
        if num_micro_batches == 1 or (
            num_rows >= MANY * num_micro_batches
            and _largest_share(max(starts), visible, num_rows, context_tokens_per_row) * num_micro_batches <= LARGE
        ):
            sampled = sum([step.samples for step in sequences])
            return _even(num_rows, visible, sampled, num_micro_batches)
    cut = []
    for steps in split_into_micro_batches(sequences, num_micro_batches, context_tokens_per_row):
        batch = Rows()
        for step in steps:
            _add(batch, step.start, len(step.token_ids), step.samples)
        cut.append(batch)
    return cut


def _largest_share(largest_start: int, visible: int, num_rows: int, context_tokens_per_row: float) -> float:
    """The share of all cost that the sequence with the longest context has, as the engine counts cost."""
    return chunk_cost(largest_start, 1, context_tokens_per_row) / (num_rows + visible / context_tokens_per_row)


def _even(num_rows: int, visible: int, sampled: int, num_micro_batches: int) -> list[Rows]:
    """Shares that differ by one row at most."""
    cut = []
    for index in range(min(num_micro_batches, num_rows)):
        num = num_rows // num_micro_batches + (index < num_rows % num_micro_batches)
        cut.append(
            Rows(
                num=num, num_decode=num, visible=round(visible * num / num_rows), sampled=-(-sampled * num // num_rows)
            )
        )
    return cut


def _add(batch: Rows, start: int, num_rows: int, samples: bool) -> None:
    batch.num += num_rows
    batch.sampled += samples
    if num_rows == 1:
        batch.num_decode += 1
        batch.visible += start + 1
    elif batch.chunks is None:
        batch.chunks = [(num_rows, start)]
    else:
        batch.chunks.append((num_rows, start))


class StepPricer:
    """Prices steps of one instance of a phase of a plan."""

    def __init__(self, setting: Setting, one: Candidates, tables: StepTables) -> None:
        model = setting.model
        self._tables = tables
        self._profile = setting.profile
        self._num_moe = model.num_moe_layers
        self._num_dense = model.num_layers - model.num_moe_layers
        self._num_layers = model.num_layers
        self._top_k = model.router.top_k
        self._pp = int(one.pp[0])
        self._num_workers = int(one.attention_dp[0])
        self._drafts = setting.workload.draft_tokens
        self._tokens_per_step = setting.workload.tokens_per_step

    def price(self, workers: Mapping[int, Sequence[Rows]], load: ExpertLoad) -> StepPrice:
        """The price of a step that gives one token. `workers`: micro-batches of each attention worker that takes
        part."""
        if not self._drafts:
            return self._whole(workers, load)
        step = self._whole({worker: [self._proposed(each) for each in cut] for worker, cut in workers.items()}, load)
        decoding = {
            worker: [
                self._proposed(Rows(each.num_decode, each.num_decode, each.visible, each.num_decode)) for each in cut
            ]
            for worker, cut in workers.items()
        }
        if not any(batch.num for cut in decoding.values() for batch in cut):
            return step
        has_chunks = any(batch.chunks for cut in workers.values() for batch in cut)
        decoding_s = self._whole(decoding, load, counts=False).duration_s if has_chunks else step.duration_s
        drafting = 1 + self._drafts / self._num_layers  # a layer makes each proposal, as in `planner.step_times`
        share = 1 - (1 - drafting / self._tokens_per_step) * min(decoding_s / step.duration_s, 1.0)
        return replace(
            step,
            duration_s=step.duration_s * share,
            attention_busy_s=step.attention_busy_s * share,
            experts_busy_s=step.experts_busy_s * share,
        )

    def _proposed(self, batch: Rows) -> Rows:
        """With the rows of the tokens that its decoding sequences propose."""
        more = self._drafts * batch.num_decode
        return replace(batch, num=batch.num + more, sampled=batch.sampled + more)

    def _whole(self, workers: Mapping[int, Sequence[Rows]], load: ExpertLoad, *, counts: bool = True) -> StepPrice:
        """All rows of a step. `counts`: they count as load of experts."""
        num_micro_batches = max(len(batches) for batches in workers.values())
        t_a, dense_s, head_s = ([0.0] * num_micro_batches for _ in range(3))
        rows, most_rows, busy_s = [0] * num_micro_batches, [0] * num_micro_batches, 0.0
        for batches in workers.values():
            for index, batch in enumerate(batches):
                layer_s = _attention_s(self._tables.moe, batch)
                logits_s = self._tables.head(batch.sampled) if batch.sampled else 0.0
                plain_s = 0.0
                if self._tables.dense is not None:
                    plain_s = self._num_dense * _attention_s(self._tables.dense, batch)
                t_a[index] = max(t_a[index], layer_s)
                dense_s[index] = max(dense_s[index], plain_s)
                head_s[index] = max(head_s[index], logits_s)
                rows[index] += batch.num
                most_rows[index] = max(most_rows[index], batch.num)
                busy_s += self._num_moe * layer_s + plain_s + logits_s
        pairs = [num * self._top_k for num in rows]
        fullest = [load.fullest(num) for num in pairs]
        for num, most in zip(pairs, fullest, strict=True):
            if counts:
                load.record(num * self._num_moe, most * self._num_moe)
        t_e = [self._tables.experts(most) for most in fullest]
        experts_busy_s = self._num_moe * sum(self._tables.experts(num / load.num_workers) for num in pairs)
        attention_busy_s = busy_s / self._num_workers
        if self._tables.messages is None:
            attention_busy_s = experts_busy_s = (attention_busy_s + experts_busy_s) / self._pp
            duration_s, t_c = self._colocated(t_a, t_e, dense_s, head_s, most_rows, fullest)
        else:
            layers_s, t_c = self._apart(t_a, t_e, rows, most_rows, fullest)
            duration_s = layers_s + sum(dense_s) + sum(head_s)
        turn_s = 0.0
        if self._profile is not None:
            most = max(sum(_num_sequences(batch) for batch in batches) for batches in workers.values())
            turn_s = float(self._profile.turn_s(most))
        duration_s += turn_s
        return StepPrice(
            duration_s=duration_s,
            t_a_s=sum(t_a) / num_micro_batches,
            t_e_s=sum(t_e) / num_micro_batches,
            t_c_s=sum(t_c) / num_micro_batches,
            attention_busy_s=min(attention_busy_s, duration_s),
            experts_busy_s=min(experts_busy_s, duration_s),
            turn_s=turn_s,
        )

    def _apart(
        self, t_a: list[float], t_e: list[float], rows: list[int], most_rows: list[int], fullest: list[float]
    ) -> tuple[float, list[float]]:
        """Time of all MoE layers, and the slower way of each micro-batch."""
        tables, messages = self._tables, self._tables.messages
        assert messages is not None
        arrived = [min(most * tables.distinct / self._top_k, num) for most, num in zip(fullest, rows, strict=True)]
        there, back = (
            [max(sending(num), receiving(full)) for num, full in zip(most_rows, arrived, strict=True)]
            for sending, receiving in messages
        )
        slower = [max(pair) for pair in zip(there, back, strict=True)]
        return self._num_moe * round_robin_s(t_a, there, t_e, back), slower

    def _colocated(
        self,
        t_a: list[float],
        t_e: list[float],
        dense_s: list[float],
        head_s: list[float],
        most_rows: list[int],
        fullest: list[float],
    ) -> tuple[float, list[float]]:
        """Time of the step, and half of the exchange of each micro-batch."""
        tables = self._tables
        # rows at which the planner expects as full a fullest rank: imbalance delays the collectives, too
        exchange = [
            tables.exchange(most * max(1.0, full / max(tables.mean_fullest(most), 1e-9)))
            for most, full in zip(most_rows, fullest, strict=True)
        ]
        share = math.ceil(self._num_layers / self._pp) / self._num_layers
        turns = [
            (self._num_moe * (attention + both + experts) + dense) * share + head + tables.hop(most)
            for attention, both, experts, dense, head, most in zip(
                t_a, exchange, t_e, dense_s, head_s, most_rows, strict=True
            )
        ]
        return max(sum(turns), self._pp * max(turns)), [both / 2 + 0.0 for both in exchange]  # no -0.0


def round_robin_s(*turns: Sequence[float]) -> float:
    """Steady time of one layer of micro-batches that go round the given resources in a fixed order, each resource
    taking them one after another: `turns[r][j]` is what resource r needs for micro-batch j."""
    busiest: float = max(sum(turn) for turn in turns)
    longest: float = max(sum(each) for each in zip(*turns, strict=True))
    return max(busiest, longest)


def _num_sequences(batch: Rows) -> int:
    return batch.num_decode + len(batch.chunks or ())


def _attention_s(table: StepAttention, batch: Rows) -> float:
    total = table.rows(batch.num)
    if batch.num_decode:
        total += table.decode_s(batch.num_decode, batch.visible)
    if batch.chunks:
        for num_tokens, num_cached in batch.chunks:
            total += table.chunk_s(num_tokens, num_cached)
    return total
