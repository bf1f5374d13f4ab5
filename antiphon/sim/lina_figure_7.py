"""The backward pass of Lina's Figure 7 (419M parameters, 16 experts), its numbers as data, its timelines simulated.

Printed: all-to-all 7.6 ms, FFN 1.6, gate 2.1, bucket all-reduce 7.9, gradients ready at 4.1, combine done at 5.7.
Not printed, and what is taken here:
- how the 7.9 ms divide over the three gradients. The last one takes 23.8 - 22.5 = 1.3 ms in (d); the second fits the
  FFN's gap of 1.6 ms; the first then takes 5.0 ms, so that it ends at 5.7 only if it is ready by 0.7 ms. With pieces of
  a third of it Figure 8(a) follows too: three micro-ops before the first all-to-all, one in the gap, one after.
- how two transfers slow each other down in the measured (a): from 5.7 to 14.7 ms the all-reduce does its last 6.3 ms of
  work, rate 6.3/9.0; the all-to-all does 7.6 - 3.0 ms, rate 4.6/9.0. With fair halves (a) ends at 30.9 like (b), which
  is what the paper says of theory. Rejected: fitting a rate to each schedule.
"""

from antiphon.comm.micro_ops import DEFAULT_CHUNK_BYTES
from antiphon.sim.schedules import SCHEDULES, Contention, Schedule
from antiphon.sim.training_step import BackwardLayer, BackwardOptions, BackwardTimeline, Gradient, simulate_backward

MEASURED_CONTENTION = Contention(all_to_all_rate=4.6 / 9.0, all_reduce_rate=6.3 / 9.0)
BYTES_PER_S = 3 * DEFAULT_CHUNK_BYTES / 5.0e-3  # gradient i is three micro-ops in Figure 8(a)

LAYER = BackwardLayer(
    gradient_s=4.1e-3,
    gradients=(
        Gradient(name="G_i", size_bytes=round(5.0e-3 * BYTES_PER_S), all_reduce_s=5.0e-3, ready_s=0.7e-3),
        Gradient(name="G_i-1", size_bytes=round(1.6e-3 * BYTES_PER_S), all_reduce_s=1.6e-3, ready_s=4.1e-3),
        Gradient(name="G_i-2", size_bytes=round(1.3e-3 * BYTES_PER_S), all_reduce_s=1.3e-3, ready_s=4.1e-3),
    ),
    combine_s=1.6e-3,
    all_to_all_s=7.6e-3,
    ffn_s=1.6e-3,
    gate_s=2.1e-3,
    all_to_all_bytes=round(7.6e-3 * BYTES_PER_S),
)


def figure_7() -> dict[Schedule, BackwardTimeline]:
    """(a) `baseline`, (b) `priority`, (c) `deferral`, (d) `known`; and Figure 8(a), `micro_ops`."""
    return {
        schedule: simulate_backward(
            [LAYER], BackwardOptions(schedule=schedule, contention=MEASURED_CONTENTION, chunk_bytes=DEFAULT_CHUNK_BYTES)
        )
        for schedule in SCHEDULES
    }


def figure_8b() -> BackwardTimeline:
    """Micro-ops with all-to-all in parts and the FFN pipelined."""
    return simulate_backward([LAYER], BackwardOptions(schedule="micro_ops", pipeline=True))
