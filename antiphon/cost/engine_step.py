"""What engines' constants multiply in a step of an aggregated server, and from it the times that clients of a closed
loop see.

1. A step is `cost.layers.server_step`, as in the planner's search, with the exchange of engines that send no rows.
2. Its time is linear in an engine's constants (`EngineSpec`). `step_work` says what they multiply: seconds by the
   roofline, kernels, collectives. So the constants can be fitted by linear least squares.
3. Kernels that no roofline counts are counted by the model's structure (`num_small_kernels`): rows brought into a
   narrow format before each product, norms of queries and keys, latent attention's copies, an indexer, a state.
4. In steady state every sequence brings `prompt / output` tokens of prompts into each step that decodes it. A prompt
   waits for the step that runs and for prompts of requests that began with it: clients of a closed loop begin together,
   and equal lengths keep them together. Arrivals at random are the planner's (`planner.mixed_steps`).

Rejected: a constant efficiency. It cannot be right for one request and for a thousand.

`EngineSpec` is what an engine's steps cost beside the roofline: it launches kernels one by one, plans each step,
samples, and waits for the slowest of its ranks. The constants are of an engine (`vllm`, `sglang`, `trtllm`; TOML files,
shipped or a user's own), the same for every model and device, and are fitted to measured deployments
(`antiphon reproduce --deployments --fit`). Rejected: constants for each model or device. They explain what was measured
and say nothing about the next one.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.cost.exchange import Degrees, summed_exchange
from antiphon.cost.layers import StepRows, server_step
from antiphon.cost.network import Network, network
from antiphon.cost.roofline import FloatArray, Number, Roofs, roofs, row_bytes_of
from antiphon.cost.skew import expected_max_rows
from antiphon.specs.catalog import LISTED, shipped_file
from antiphon.specs.checked import NotNegative, Positive, Text, checked, read, read_mapping
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec, PrecisionSpec

IndexArray = NDArray[np.int64]
LONGEST_CHUNK = 8192
"""Tokens of prompts that engines put into one step at most, by default."""


@checked("engine")
@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Constants of one engine.

    `step_s`: of a step, whatever is in it; `sequence_s`: of each sequence that it decodes on a data-parallel rank;
    `kernel_s`: of each kernel; `collective_s`: of each collective, beside its bytes. `dense`, `experts`, `wire`,
    `prompt`: time over the roofline's, of everything but the experts, of the experts, of bytes between devices, and of
    a prompt's tokens. Time to first token: `first_s` + `waits` * the time between two tokens + `alone` * the prompt's
    prefill + `queued` * that of all requests in flight. `low`, `high`: between these multiples of a prediction lie four
    of five measured times per token. `source`: how they were found.
    """

    name: Text
    step_s: NotNegative
    sequence_s: NotNegative
    kernel_s: NotNegative
    collective_s: NotNegative
    dense: NotNegative
    experts: NotNegative
    wire: NotNegative
    prompt: NotNegative
    first_s: NotNegative
    waits: NotNegative
    alone: NotNegative
    queued: NotNegative
    low: Positive = 1.0
    high: Positive = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UserError(f"engine {self.name}: low is {self.low} and high {self.high}: low must not be above high")


def load_engine(name_or_path: str | Path) -> EngineSpec:
    """A shipped engine (``"vllm"``) or that of a TOML file; `UserError` names what is wrong and where."""
    path = shipped_file("engine", name_or_path)
    values = {key: value for key, value in read_mapping(path).items() if key not in LISTED}
    return read(EngineSpec, values, str(path))


def num_small_kernels(model: ModelSpec, precision: PrecisionSpec) -> int:
    """Kernels of a layer that no roofline counts, because they move next to nothing."""
    narrow = precision.compute in ("fp8", "fp4")
    latent, shared = model.attention.latent is not None, model.feed_forward.shared_intermediate > 0
    quantizing = (5 if latent else 2) + 2 + 2 * shared if narrow else 0
    return (
        quantizing
        + (6 if latent else 2)
        + 10 * (model.attention.sparse is not None)
        + 6 * (model.state is not None)
        + 3 * (model.attention.qk_norm != "none")
        + 2 * shared
    )


def step_work(
    model: ModelSpec,
    unit_roofs: Roofs,
    wires: Network,
    degrees: Degrees,
    precision: PrecisionSpec,
    *,
    decoding: Number,
    context: Number,
    prompt_tokens: Number = 0.0,
    prompt: Number = 1.0,
) -> tuple[Number, Number, Number, Number, Number]:
    """What an engine's constants multiply, of one step: kernels and collectives of the whole step on one device, then
    the roofline's seconds of dense layers, experts and wires, without any fixed time; may be arrays.

    A step is that of the busiest device of a server with these degrees (single numbers). `decoding`: sequences of each
    data-parallel rank that get a token, with `context` tokens each; `prompt_tokens` of each rank belong to prompts of
    `prompt` tokens. Roofs and wires are those of `counting`."""
    rows = StepRows(
        decoding=decoding,
        context=context,
        prompt_tokens=prompt_tokens,
        prompt=prompt,
        sampled=np.maximum(decoding + prompt_tokens / np.maximum(prompt, 1.0), 1e-9),
    )
    pairs = rows.total * degrees.attention_dp * model.router.top_k
    step = server_step(
        model,
        unit_roofs,
        wires,
        degrees,
        precision,
        rows,
        pairs=expected_max_rows(pairs, float(degrees.expert_ep)) if degrees.expert_ep > 1 else pairs,
        held=model.router.num_experts / degrees.expert_ep,
        exchange=summed_exchange(wires, degrees, rows.total * model.hidden_size * row_bytes_of(precision)),
    )
    num_moe, num_dense = model.num_moe_layers, model.num_layers - model.num_moe_layers
    attention, experts = step.attention, num_moe * step.experts
    dense = num_moe * attention.moe_layer + num_dense * attention.dense_layer + attention.head
    wire = num_moe * step.exchange + num_dense * step.sums
    # the mean square of a norm over all heads is a sum over ranks, too
    whole_norms = model.num_layers * float(degrees.attention_tp > 1) * (model.attention.qk_norm == "full")
    return (
        dense.fixed_s + experts.fixed_s + model.num_layers * num_small_kernels(model, precision),
        wire.fixed_s + whole_norms,
        dense.total_s - dense.fixed_s,
        experts.total_s - experts.fixed_s,
        wire.total_s - wire.fixed_s,
    )


def counting(cluster: ClusterSpec, precision: PrecisionSpec) -> tuple[Roofs, Network]:
    """Roofs and network of the cluster's first group for `step_work`: a kernel and a collective take 1 s beside their
    work, so that fixed times count them; nothing else has a fixed time."""
    efficiency = replace(
        cluster.efficiency, kernel_s=1.0, layer_overhead_s=0.0, collective_s=1.0, exchange_s=0.0, round_s=0.0
    )
    cluster = replace(cluster, efficiency=efficiency)
    group = cluster.groups[0]
    return roofs(group.device, efficiency, precision.compute), network(cluster, group)


CONSTANTS = ("step_s", "sequence_s", "kernel_s", "collective_s", "dense", "experts", "wire", "prompt")
FIRST_CONSTANTS = ("first_s", "waits", "alone", "queued")


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Servers under closed loops, one a row: `in_flight` requests on each data-parallel rank; another begins when one
    ends. `terms` [rows, 8]: what `CONSTANTS` multiply in the time between two tokens. `prompt_s`: one prompt's prefill
    by the roofline."""

    in_flight: FloatArray
    terms: FloatArray
    prompt_s: FloatArray

    def tpot_s(self, engine: EngineSpec) -> FloatArray:
        """Time between two tokens of a request."""
        return np.asarray(self.terms @ [getattr(engine, name) for name in CONSTANTS])

    def ttft_s(self, engine: EngineSpec) -> FloatArray:
        """Time to the first token, at the median."""
        return np.asarray(self.first_terms(engine) @ [getattr(engine, name) for name in FIRST_CONSTANTS])

    def first_terms(self, engine: EngineSpec) -> FloatArray:
        """[rows, 4] what `FIRST_CONSTANTS` multiply in the time to the first token."""
        own = engine.prompt * self.prompt_s
        return np.stack(np.broadcast_arrays(1.0, self.tpot_s(engine), own, self.in_flight * own), axis=-1)

    def take(self, index: IndexArray) -> "ServerLoad":
        return ServerLoad(in_flight=self.in_flight[index], terms=self.terms[index], prompt_s=self.prompt_s[index])


def server_load(
    model: ModelSpec,
    cluster: ClusterSpec,
    degrees: Degrees,
    precision: PrecisionSpec,
    *,
    in_flight: FloatArray,
    prompt: FloatArray,
    output: FloatArray,
    decodes_only: bool = False,
) -> ServerLoad:
    """A step of one layout on the cluster's first group of nodes; `in_flight` (of each data-parallel rank), `prompt`
    and `output` (tokens) by row. `decodes_only`: prompts are computed elsewhere, so no step has any."""
    unit_roofs, wires = counting(cluster, precision)
    work = partial(step_work, model, unit_roofs, wires, degrees, precision)
    context, chunk = prompt + output / 2, np.minimum(prompt, LONGEST_CHUNK)
    step = work(decoding=in_flight, context=context)
    _, _, *mixed_s = work(decoding=in_flight, context=context, prompt_tokens=chunk, prompt=prompt)
    added_s = sum(mixed_s) - sum(step[2:])
    prompt_s = np.asarray(added_s * prompt / chunk)
    into_step_s = np.zeros_like(prompt_s) if decodes_only else in_flight * prompt_s / output
    terms = np.stack(np.broadcast_arrays(1.0, in_flight, *step, into_step_s), axis=-1)
    return ServerLoad(in_flight=in_flight, terms=terms, prompt_s=prompt_s)
