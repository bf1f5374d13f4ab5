"""Decode steps of candidates on measured machines: put together from the engine's own pieces (`local_prediction`), and
from the cluster's network for what its shared memory does not carry.

Of one machine: replicas, of one device or of several in ranks and stages, attention and experts apart, and hybrid
layouts. Of several machines: the same, with workers on any of them. `OnNetwork` has the network's share of each
candidate; for what stays inside one machine, and is not hybrid, the profile has measured it.

Rejected: everything from the network's model. A wire's time it knows from bytes; how long two processes of a machine
take to wake each other it does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.cost.local_times import LocalTimes
from antiphon.cost.parts import FloatArray, Number
from antiphon.cost.roofline import row_bytes_of
from antiphon.planner.candidates import BoolArray, Candidates, real
from antiphon.planner.local_prediction import LocalChoice, LocalPrediction, Wires, predict_decode
from antiphon.planner.setting import Setting
from antiphon.planner.worker_times import decode_context, rows_each

_LOGIT_BYTES = 4


@dataclass(frozen=True)
class OnNetwork:
    """Columns: the fields of `Wires`, and whether a candidate is on several machines."""

    layer_s: FloatArray
    dense_layer_s: FloatArray
    hop_s: FloatArray
    head_s: FloatArray
    is_wide: BoolArray

    @classmethod
    def empty(cls, count: int) -> "OnNetwork":
        layer_s, dense_layer_s, hop_s, head_s = np.zeros((4, count))
        return cls(layer_s, dense_layer_s, hop_s, head_s, np.zeros(count, dtype=np.bool_))

    def note(
        self,
        setting: Setting,
        candidates: Candidates,
        where: BoolArray,
        *,
        kind: int,
        layer_s: Number,
        hop_s: Number,
    ) -> None:
        """What the candidates at `where`, which have attention on devices of `kind`, send over the network: `layer_s`
        and `hop_s` as they were estimated, and what no layer has."""
        some = candidates.take(where)
        pieces: Any = some.piece_devices
        net = replace(setting.networks[kind], domain=pieces)  # ranks of a stage that share a domain
        tp, rows = real(some.attention_tp), rows_each(setting, some)
        sum_s = net.all_reduce(rows * setting.model.hidden_size * row_bytes_of(setting.precision), tp).total_s
        logits_bytes = rows * some.micro_batches * setting.model.vocab_size * _LOGIT_BYTES
        self.layer_s[where] = layer_s
        self.dense_layer_s[where] = 2 * sum_s
        self.hop_s[where] = hop_s
        self.head_s[where] = some.micro_batches * sum_s + net.all_gather(logits_bytes, tp).total_s

    def wires(self, index: int) -> Wires:
        return Wires(
            layer_s=float(self.layer_s[index]),
            dense_layer_s=float(self.dense_layer_s[index]),
            hop_s=float(self.hop_s[index]),
            head_s=float(self.head_s[index]),
        )


def measured_steps(
    setting: Setting, candidates: Candidates, network: OnNetwork
) -> Iterator[tuple[int, LocalPrediction]]:
    """Steps of the candidates that were measured; none without a profile, and none but of decode."""
    engine = None if setting.profile is None else setting.profile.engine
    if engine is None or setting.phase != "decode" or setting.workload.draft_tokens:
        return
    contexts = np.broadcast_to(decode_context(setting, candidates), (len(candidates),))
    times = _of_all_machines(setting, engine)
    known = {threads.num_threads for threads in times.threads}
    apart = candidates.is_disaggregated & (candidates.attention_tp == 1) & (candidates.expert_tp == 1)
    for index in np.flatnonzero(apart | ~candidates.is_disaggregated):
        choice, num_instances = _choice(times, candidates, int(index))
        if max(1, times.num_cores // choice.num_workers) not in known:
            continue
        travels = bool(network.is_wide[index]) or choice.layout == "hybrid"
        yield (
            int(index),
            predict_decode(
                times,
                setting.model,
                choice,
                concurrency=int(candidates.instance_batch[index]) * num_instances,
                context=max(1.0, float(contexts[index])),
                wires=network.wires(int(index)) if travels else None,
            ),
        )


def _of_all_machines(setting: Setting, engine: LocalTimes) -> LocalTimes:
    """The times with the cores of all nodes, where these are CPUs."""
    cores = sum(group.num_devices for group in setting.groups if group.device.kind == "cpu")
    return replace(engine, num_cores=max(engine.num_cores, cores))


def _choice(times: LocalTimes, candidates: Candidates, index: int) -> tuple[LocalChoice, int]:
    """What the engine is asked for, and how many instances of the candidate that is. Replicas are on all cores, for
    idle ones would take none of the load."""
    one = {name: int(getattr(candidates, name)[index]) for name in candidates.__dataclass_fields__}
    if candidates.is_disaggregated[index]:
        apart = LocalChoice(
            layout="disaggregated",
            num_attention=one["attention_dp"],
            num_experts=one["expert_ep"],
            num_micro_batches=one["micro_batches"],
        )
        return apart, 1
    tp, num_stages = one["attention_tp"], one["pp"]
    if one["attention_dp"] == one["expert_ep"] == 1:
        replicas = max(1, times.num_cores // (tp * num_stages))
        return LocalChoice(layout="colocated", num_attention=replicas, tp=tp, num_stages=num_stages), replicas
    hybrid = LocalChoice(
        layout="hybrid",
        num_attention=one["attention_dp"],
        num_experts=one["expert_ep"],
        tp=tp,
        expert_tp=one["expert_tp"],
        num_stages=num_stages,
    )
    return hybrid, 1
