"""What `antiphon serve` was asked to run, validated once; long because all options are checked in one place.

Threads and cores: worker processes share the cores they may use (`base/allowance`) evenly. When they divide them
exactly each is pinned to its own, otherwise the kernel schedules them. Waiting: a worker spins briefly before it sleeps
only if every worker has a core, because spinning with more processes than cores takes the core from the process it
waits for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.allowance import allowance, share_of_threads
from antiphon.base.errors import UserError
from antiphon.base.units import split_address
from antiphon.comm.two_level.levels import TwoLevel
from antiphon.models.families.config_keys import check_rope_scaling
from antiphon.models.families.config_values import MAX_POSITIONS
from antiphon.placement.split import Phases
from antiphon.serve.joining import refuse_wildcard
from antiphon.serve.layout_text import Layout, layout_name, size_name, sizes_text
from antiphon.serve.placement_control import FORECASTING, Policy
from antiphon.serve.policy.handover import HandOver
from antiphon.serve.worker.messages import ExchangeLibrary, Pool, Role
from antiphon.specs.checked import Count, Positive, Whole, checked
from antiphon.specs.model import KVStorage, ModelSpec
from antiphon.specs.placement import ExpertPlacement, contiguous_placement
from antiphon.specs.plan import MAX_ATTENTION_WORKERS, MAX_INSTANCES, MAX_MICRO_BATCHES, Collectives

Switch = Literal["auto", "on", "off"]
WeightFormatName = Literal["as-stored", "int8", "int4", "mxfp4"]
Stepping = Literal["barrier", "free"]
TRANSPORTS = ("auto", "shm", "tcp", "libfabric")
MAX_THREADS = 256  # as many as the native kernels' pool holds
MAX_BATCH_TOKENS = 2**20
MAX_EXPERT_SLOTS = 65_536  # of a layer; more is a slip
MAX_TIMEOUT_S = 1e6  # eleven days; poll(2) counts milliseconds in 31 bits
_OPTIONS = {"num_threads": "--threads", "expert_bytes": "--expert-memory", "timeout_s": "--timeout"}


def _name(field: str, values: Mapping[str, Any]) -> str:
    """``num_threads`` -> ``--threads``: what a user calls a field of the configuration with these values."""
    option = _OPTIONS.get(field, f"--{field.replace('_', '-')}")
    return size_name(field, values.get("written_in", "")) or option


@dataclass(frozen=True, kw_only=True)
class OneRole:
    """What the workers of one role have of their own, in place of the server's; empty or None: as the server."""

    device: str = ""
    dtype: str = ""
    num_threads: int | None = None

    def given(self, role: str) -> str:
        """The first option of these that was given, with its value; empty: none."""
        options = {"device": self.device, "dtype": self.dtype, "threads": self.num_threads}
        return next((f"--{role}-{name} {value}" for name, value in options.items() if value), "")


@checked("", _name)
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One running server. `num_attention` counts attention workers, or replicas in the colocated layout. Disaggregated
    and hybrid, there are `num_instances` of all workers, which know nothing of each other. In a hybrid instance
    `num_attention` replicas of `attention_tp` ranks share one set of experts, each expert on `expert_tp` of all ranks.

    `stepping`: attention workers of an instance step together, or each for itself (`serve/group`).

    An attention worker or replica is `attention_tp` processes, an expert worker `expert_tp` (`models/shares`). A
    replica may have `num_stages` stages of that many processes, each with some of the layers (`comm/stages`).
    `kv_bytes` is the KV budget of the whole server, split evenly over the attention workers; None: a share of free
    memory. `max_model_len` None: the model's own; `rope_scaling`: JSON in place of the model's (`config_keys`);
    `weights`: what experts that are stored in floats are rounded to (`models/rounding`); `expert_bytes`: of each
    replica's or expert worker's memory (of each of its ranks), for experts that stay in the checkpoint's file while
    they are not used (None: all are loaded);
    `num_threads` None: `OMP_NUM_THREADS`, or the cores are shared.
    `max_batch_tokens` bounds the rows of one step of one attention worker, over all its micro-batches. `exchange` names
    the transport between workers. `prefill_collectives`, `decode_collectives`: the form of a hybrid instance's
    exchanges in steps with and without rows of prompts, the first also of sums over ranks (`sums_in_blocks`). Of the
    attention workers (or replicas) and expert workers, the last `joined_attention` and `joined_experts` come from other
    machines: they connect to `join_address` and know `join_secret`. With several instances these are numbers of each,
    and all workers join or none. Of the first of them `ranks_here` ranks are on this machine: it is spread over
    several.

    `written_in`: where the sizes of the layout were written, for refusals (`serve/layout_text`); empty: as options.

    `prefill`: where prompts are computed in workers of their own, those; the rest is then about the workers that
    decode. `pools` has one configuration for each of the two, `pool` says which it is, and `workers_beside` and
    `caches_beside` what the other one has (processes on this machine, KV caches).
    """

    model: Path
    layout: Layout
    written_in: str = ""
    num_attention: Annotated[Whole, Field(ge=1, le=MAX_ATTENTION_WORKERS)] = 1
    num_experts: Count = 1
    num_instances: Annotated[Whole, Field(ge=1, le=MAX_INSTANCES)] = 1
    attention_tp: Count = 1
    expert_tp: Count = 1
    num_stages: Count = 1
    num_micro_batches: Annotated[Whole, Field(ge=1, le=MAX_MICRO_BATCHES)] = 1
    stepping: Stepping = "barrier"
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    graphs: Switch = "auto"
    streams: Switch = "auto"
    max_model_len: Annotated[Whole, Field(ge=1, le=MAX_POSITIONS)] | None = None
    rope_scaling: str = ""
    weights: WeightFormatName = "as-stored"
    kv_bytes: Count | None = None
    kv_dtype: KVStorage = "auto"
    block_size: Annotated[Count, Field(multiple_of=16)] = 16
    max_batch_tokens: Annotated[Whole, Field(ge=1, le=MAX_BATCH_TOKENS)] = 2048
    max_running: Count = 256
    max_waiting: Count = 1024
    num_threads: Annotated[Whole, Field(ge=1, le=MAX_THREADS)] | None = None
    timeout_s: Annotated[Positive, Field(le=MAX_TIMEOUT_S)] = 30.0
    exchange: str = "auto"
    prefill_collectives: Collectives = "auto"
    decode_collectives: Collectives = "auto"
    join_address: str = ""
    join_secret: bytes = field(default=b"", repr=False)
    joined_attention: int = 0
    joined_experts: int = 0
    ranks_here: int = 0
    trace: bool = False
    placement: ExpertPlacement | None = None
    balance: Policy = "off"
    expert_slots: int | None = None
    record_routing: Path | None = None
    path_profile: Path | None = None
    expert_bytes: Count | None = None
    phases: Phases = "both"  # for `antiphon bench balance`, as of `worker/expert_prefetch`
    exchange_library: ExchangeLibrary = "m2n"  # for `antiphon bench apart`, as in `comm/gloo_exchange`
    replay_routing: Path | None = None  # for `antiphon bench balance`: texts make no sense
    hand_over: HandOver = "layers"  # for `antiphon bench pools`: when keys and values leave prefill workers
    of_attention: OneRole = OneRole()
    of_experts: OneRole = OneRole()
    prefill: "ServeConfig | None" = None
    pool: Pool = ""
    workers_beside: int = 0
    caches_beside: int = 0

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_running:
            raise UserError(
                f"--max-batch-tokens is {self.max_batch_tokens}: it must be at least --max-running, which is "
                f"{self.max_running}"
            )
        if self.exchange not in TRANSPORTS:
            raise UserError(f"--transport is {self.exchange}: it must be {', '.join(TRANSPORTS)}")
        check_rope_scaling(self.rope_scaling)
        self._check_graphs()
        self._check_streams()
        self._check_layout()
        self._check_exchange()
        self._check_joining()
        if self.prefill is not None:
            self._check_prefill(self.prefill)

    def size_name(self, field: str) -> str:
        """What the user calls a size of the layout."""
        return _name(field, {"written_in": self.written_in})

    def sizes(self, *names: str) -> str:
        """Some of these with their values."""
        return sizes_text({name: getattr(self, name) for name in names}, self.written_in)

    def _layouts(self, *layouts: Layout) -> str:
        return layout_name(self.written_in, *layouts)

    def _check_prefill(self, prefill: "ServeConfig") -> None:
        """Keys and values go from one pool to the other as they are."""
        for what, theirs, ours in (
            ("model", prefill.model, self.model),
            ("--dtype", prefill.own("attention").dtype, self.own("attention").dtype),
            ("--kv-dtype", prefill.kv_dtype, self.kv_dtype),
            ("--kernels", prefill.kernels, self.kernels),
            ("--max-model-len", prefill.max_model_len, self.max_model_len),
            ("--rope-scaling", prefill.rope_scaling, self.rope_scaling),
        ):
            if theirs != ours:
                raise UserError(
                    f"{what} is {theirs} for --prefill and {ours} for --decode: what one side writes the other reads, "
                    "so they must be the same"
                )

    def _check_graphs(self) -> None:
        if self.graphs != "on":
            return
        if why := self._no_graphs:
            raise UserError(f"--graphs on: {why}; leave it out or use --graphs off")
        if self.device == "cpu" and self.kernels not in ("reference", "triton"):
            raise UserError(
                "--graphs on: the native kernels of a CPU work on the host; add --kernels reference (to check steps "
                "without a GPU), or leave it out"
            )

    def _check_streams(self) -> None:
        if self.streams == "on" and self.exchange_library != "m2n":
            raise UserError(f"--streams on: {self.exchange_library} knows no streams; leave it out")
        if self.streams == "on" and self.layout != "disaggregated":
            raise UserError(
                f"--streams on needs {self._layouts('disaggregated')}: {self.layout}, no rows go to expert workers"
            )

    def uses_streams(self, role: Role) -> bool:
        """Whether these workers exchange rows in the order of their device's stream: if asked for, and on GPUs."""
        on_gpu = self.own(role).device != "cpu"
        has_streams = self.layout == "disaggregated" and self.exchange_library == "m2n"
        return has_streams and (self.streams == "on" or (self.streams == "auto" and on_gpu))

    @property
    def _no_graphs(self) -> str:
        """Why decode steps cannot run without the host; empty: they can."""
        if self.layout != "colocated":
            return f"a {self.layout} layout exchanges rows between layers, which the host sends"
        if self.attention_ranks > 1:
            sizes = self.sizes("attention_tp", "num_stages")
            return f"the ranks of a worker ({sizes}) add their parts up through the host"
        if self.record_routing is not None or self.replay_routing is not None:
            return "a record of the routing is read and written by the host"
        return ""

    def uses_graphs(self, role: Role) -> bool:
        """Whether decode steps of these workers run without the host: where it was asked for, and on GPUs that can."""
        on_gpu = self.own(role).device != "cpu"
        return self.graphs == "on" or (self.graphs == "auto" and on_gpu and not self._no_graphs)

    def _check_exchange(self) -> None:
        if self.expert_bytes is not None and not self._may_offload:
            raise UserError(
                f"--expert-memory {self.expert_bytes} needs experts on CPUs that stay where they are: "
                f"{self._layouts('colocated')} on this machine, of one rank and one stage and without --graphs, or "
                f"{self._layouts('disaggregated')} without --balance and --expert-slots"
            )
        if self.exchange_library == "gloo" and (
            (self.layout, self.attention_tp, self.expert_tp, self.balance) != ("disaggregated", 1, 1, "off")
            or self.placement is not None
            or self.stepping != "barrier"
        ):
            raise UserError(
                "gloo carries rows of --layout disaggregated only, without --tp, --balance, --placement and --stepping"
            )

    @property
    def _may_offload(self) -> bool:
        if self.layout == "disaggregated":
            return self.own("experts").device == "cpu" and self.balance == "off" and self.expert_slots is None
        is_alone = self.layout == "colocated" and self.attention_ranks == 1 and not self.joined_attention
        return is_alone and self.device == "cpu" and self.graphs != "on"

    def _check_layout(self) -> None:
        for name, own in (("attention", self.of_attention), ("expert", self.of_experts)):
            if (option := own.given(name)) and self.layout != "disaggregated":
                raise UserError(
                    f"{option} needs {self._layouts('disaggregated')}: a replica is one place; leave it out"
                )
            if own.num_threads is not None and not 1 <= own.num_threads <= MAX_THREADS:
                raise UserError(f"--{name}-threads is {own.num_threads}: it must be 1 to {MAX_THREADS}")
        for phase, form in (("prefill", self.prefill_collectives), ("decode", self.decode_collectives)):
            if form != "auto" and self.layout != "hybrid" and (phase == "decode" or self.attention_tp == 1):
                or_ranks = " or several ranks of an attention worker" if phase == "prefill" else ""
                raise UserError(
                    f"--{phase}-collectives {form} needs {self._layouts('hybrid')}{or_ranks}: elsewhere there is one "
                    "form; leave it out"
                )
        if self.layout == "colocated" and (self.balance != "off" or self.expert_slots is not None):
            option = f"--expert-slots {self.expert_slots}" if self.balance == "off" else f"--balance {self.balance}"
            raise UserError(
                f"{option} needs {self._layouts('disaggregated', 'hybrid')}: here every replica has all experts; leave "
                "it out"
            )
        if (self.path_profile is not None) != (self.balance == "paths"):
            raise UserError(
                "--balance paths and --path-profile go together: give both, or leave both out ('antiphon placement' "
                "writes a profile)"
            )
        self._check_stepping()
        if self.layout == "hybrid" and self.balance in FORECASTING and self.expert_tp > self.attention_tp:
            raise UserError(
                f"--balance {self.balance} with {self.sizes('attention_tp', 'expert_tp')}: what a replica asks of an "
                "expert's ranks reaches all of them where they are no more than its own; raise the first, or use "
                "--balance window"
            )
        if self.num_stages > 1 and self.balance != "off":
            raise UserError(
                f"--balance {self.balance} with {self.sizes('num_stages')}: a pipeline's leader counts the rows of its "
                "own layers only: leave --balance out or use one stage"
            )
        if self.num_stages > 1 and self.layout == "disaggregated":
            raise UserError(
                f"{self.sizes('num_stages')}: apart from experts, an attention worker has all layers; leave it out, or "
                f"use {self._layouts('colocated', 'hybrid')}"
            )
        if self.num_stages > 1 and self.record_routing is not None:
            raise UserError(
                f"--record-routing with {self.sizes('num_stages')}: a pipeline's leader sees the choices of its own "
                "layers only; use one stage"
            )

    def _check_stepping(self) -> None:
        if self.stepping == "barrier":
            return
        if self.layout != "disaggregated":
            why = "replicas exchange rows in every layer" if self.layout == "hybrid" else "replicas step freely anyway"
            raise UserError(
                f"--stepping {self.stepping} needs {self._layouts('disaggregated')}: {self.layout}, {why}; leave it out"
            )
        if self.balance in FORECASTING:
            raise UserError(
                f"--balance {self.balance} with --stepping {self.stepping}: copies ahead of a layer are for rows of "
                "steps that all take together; use --balance window or --stepping barrier"
            )

    def _check_joining(self) -> None:
        for name, joined, size in (
            ("attention", self.joined_attention, "num_attention"),
            ("experts", self.joined_experts, "num_experts"),
        ):
            if not 0 <= joined <= (all_workers := getattr(self, size)):
                raise UserError(
                    f"--join-workers has {joined} {name}: it must be 0 to {all_workers}, which is "
                    f"{self.size_name(size)}"
                )
        joined_of_each = self.joined_attention, self.joined_experts
        num_joined = sum(joined_of_each)
        if self.layout == "hybrid":
            self._check_hybrid()
        if self.num_instances > 1 and self.layout == "colocated":
            raise UserError(
                f"{self.sizes('num_instances')}: a colocated layout has replicas in their place "
                f"({self.size_name('num_attention')}); write these, or use {self._layouts('disaggregated', 'hybrid')}"
            )
        if self.joined_experts and self.layout != "disaggregated":
            raise UserError(
                f"--join-workers {self.joined_attention}+{self.joined_experts}: a {self.layout} layout has no expert "
                f"workers, only replicas: write {num_joined}+0"
            )
        everyone = self.num_attention, self.num_expert_workers
        if num_joined and self.num_instances > 1 and ((*everyone, 0) != (*joined_of_each, self.ranks_here)):
            raise UserError(
                f"--join-workers {self.joined_attention}+{self.joined_experts} with {self.sizes('num_instances')}: "
                f"all workers join or none; write {everyone[0]}+{everyone[1]}, those of one instance"
            )
        if num_joined and not self.join_address:
            raise UserError(f"{num_joined} workers are to join: say where with --join-address HOST:PORT")
        if self.join_address and not num_joined and not self.pool:
            raise UserError("--join-address without --join-workers: say how many workers join")
        if self.join_address:
            refuse_wildcard("--join-address", self.join_address, split_address(self.join_address)[0])
        spread = self.attention_ranks if self.joined_attention else self.expert_tp
        most = spread - 1 if num_joined else 0
        if not 0 <= self.ranks_here <= most:
            raise UserError(
                f"--ranks-here is {self.ranks_here}: it must be 0 to {most}: of the {num_joined} workers that join "
                f"(--join-workers) the first has {spread} ranks, and one at least joins"
            )
        if num_joined and self.exchange == "shm":
            raise UserError("--transport shm does not reach other machines: use tcp or libfabric")

    def _check_hybrid(self) -> None:
        try:
            _ = self.topology
        except UserError as error:
            raise UserError(
                f"{self.sizes('attention_tp', 'expert_tp')} on {self.num_attention * self.attention_tp} ranks: one "
                "must divide the other, and the larger the number of ranks"
            ) from error

    @property
    def side_by_side(self) -> bool:
        """Whether each micro-batch of an attention worker is a step of its own. Not where they cannot be told apart:
        several ranks follow their leader's steps one by one, a record of routing is by step, and a device's stream is
        one order of work."""
        is_recorded = self.record_routing is not None or self.replay_routing is not None
        is_simple = self.attention_tp == 1 and not is_recorded and not self.uses_streams("attention")
        return self.stepping == "free" and is_simple

    @property
    def plans_ahead(self) -> bool:
        """Whether a replica's next step waits at the replica, planned before its tokens are known. Not where a record
        of routing is by step, micro-batches take turns, or other ranks follow each step."""
        is_recorded = self.record_routing is not None or self.replay_routing is not None
        is_simple = self.attention_ranks == 1 and self.num_micro_batches == 1 and not is_recorded
        return self.layout == "colocated" and is_simple

    @property
    def topology(self) -> TwoLevel:
        """The ranks of one stage of a hybrid instance."""
        return TwoLevel.of_ranks(self.num_attention * self.attention_tp, self.attention_tp, self.expert_tp)

    @property
    def num_expert_parts(self) -> int:
        """Into how many parts the experts of an instance are dealt."""
        if self.layout == "hybrid":
            return self.topology.expert_ep
        return self.num_expert_workers or 1

    @property
    def num_expert_workers(self) -> int:
        """Those of an instance; 0 where attention workers hold the experts."""
        return self.num_experts if self.layout == "disaggregated" else 0

    @property
    def pools(self) -> "tuple[ServeConfig, ...]":
        """One configuration for each pool, the one for decode (or for both phases) first."""
        if self.prefill is None:
            return (self,)
        decode, prefill = replace(self, prefill=None, pool="decode"), replace(self.prefill, pool="prefill")
        return (
            replace(decode, workers_beside=prefill.num_workers, caches_beside=prefill.num_kv_caches),
            replace(prefill, workers_beside=decode.num_workers, caches_beside=decode.num_kv_caches),
        )

    @property
    def layout_text(self) -> str:
        """The layout as `--prefill` and `--decode` take it: what `parse_layout` makes these fields of."""
        text = (f"{self.num_instances}x" if self.num_instances > 1 else "") + str(self.num_attention)
        text += f"t{self.attention_tp}" if self.attention_tp > 1 else ""
        text += f"p{self.num_stages}" if self.num_stages > 1 else ""
        apart, turns = self.layout == "disaggregated", self.num_micro_batches
        if self.layout == "hybrid":
            text += f"*{self.expert_tp}"
        elif apart:
            text += f"+{self.num_experts}" + (f"t{self.expert_tp}" if self.expert_tp > 1 else "")
        return text + (f"/m{turns}" if turns > 1 or apart else "")

    @property
    def num_workers(self) -> int:
        """Worker processes on this machine: the ranks of all workers of all pools."""
        num_local = self.num_attention - self.joined_attention, self.num_expert_workers - self.joined_experts
        whole = self.num_instances * (num_local[0] * self.attention_ranks + num_local[1] * self.expert_tp)
        beside = self.workers_beside if self.prefill is None else self.prefill.num_workers
        return whole + self.ranks_here + beside

    @property
    def attention_ranks(self) -> int:
        """Processes of an attention worker or replica, on all its stages."""
        return self.attention_tp * self.num_stages

    @property
    def num_kv_caches(self) -> int:
        """Attention workers and replicas of all instances of all pools."""
        beside = self.caches_beside if self.prefill is None else self.prefill.num_kv_caches
        return self.num_instances * self.num_attention + beside

    def own(self, role: Role) -> OneRole:
        """Device, dtype and threads of the workers of a role; no field is empty but `dtype` where it is the model's."""
        given = self.of_experts if role == "experts" else self.of_attention
        return OneRole(
            device=given.device or self.device,
            dtype=given.dtype or self.dtype,
            num_threads=given.num_threads or self.num_threads or self._share_of_threads(role),
        )

    def _share_of_threads(self, role: Role) -> int:
        """An even share of the cores. Where one role is on GPUs and the other on CPUs, workers on GPUs need a thread
        each, to drive them, and those on CPUs share the rest."""
        on_gpu = [(each.device or self.device) != "cpu" for each in (self.of_attention, self.of_experts)]
        if self.layout != "disaggregated" or on_gpu[0] == on_gpu[1]:
            return share_of_threads(self.num_workers)
        if on_gpu[role == "experts"]:
            return 1
        sizes = self.num_attention * self.attention_tp, self.num_experts * self.expert_tp
        driving, computing = (self.num_instances * sizes[on_gpu.index(which)] for which in (True, False))
        cores = allowance().num_cores - driving
        return max(1, min(cores // computing, share_of_threads(computing)))

    @staticmethod
    def cores_of(worker: int, everyone: Sequence[OneRole]) -> list[int]:
        """The cores that process number `worker` of this machine is pinned to, given what all have; empty: not
        pinned. They are, if they share out all cores among them."""
        cores = allowance().cpus  # not a quota's part of them: others may have chosen the same ones
        threads = [own.num_threads or 1 for own in everyone]
        on_cpu = all(own.device == "cpu" for own in everyone)
        if not on_cpu or len(everyone) == 1 or sum(threads) != len(cores):
            return []
        first = sum(threads[:worker])
        return list(cores[first : first + threads[worker]])

    @property
    def transport(self) -> str:
        """The exchange's transport: shared memory on one machine, TCP between several, unless another was asked for."""
        if self.exchange != "auto":
            return self.exchange
        return "tcp" if self.join_address else "shm"

    @property
    def rank_transport(self) -> str:
        """Between ranks of one worker: shared memory where they are on one machine, unless another was asked for."""
        return self.exchange if self.exchange != "auto" else "tcp" if self.ranks_here else "shm"

    def sums_in_blocks(self, role: Role) -> bool:
        """Whether ranks of such a worker sum rows of prompts block by block beside their products: as asked for, else
        where they do not share memory. In shared memory a sum waits for no link, and its copies need the cores."""
        if role == "experts" or self.attention_tp == 1 or self.layout == "hybrid":
            return False
        fused = self.prefill_collectives
        return fused == "fused" or (fused == "auto" and self.rank_transport != "shm")

    @property
    def exchange_host(self) -> str:
        """Where workers of this machine can be reached."""
        return split_address(self.join_address)[0] if self.join_address else "127.0.0.1"

    @property
    def waiting(self) -> str:
        """Workers spin where each has a core. They never poll without end: an idle server would burn its cores."""
        return "spin" if self.spins and self.num_workers <= allowance().num_cores else "block"

    @property
    def spins(self) -> bool:
        """Whether threads that wait may spin: not where a quota of processor time has less than a core for each thread
        of the workers on this machine."""
        most = max(self.own(role).num_threads or 1 for role in ("attention", "experts"))
        return allowance().may_spin(self.num_workers * most)

    def expert_placement(self, spec: ModelSpec) -> ExpertPlacement:
        """The given placement, checked against the model, or a contiguous one."""
        num_experts = spec.router.num_experts
        if self.num_expert_workers > num_experts:
            raise UserError(
                f"{self.size_name('num_experts')} is {self.num_experts}: the model has {num_experts} experts a layer, "
                "so it must be at most that"
            )
        if self.layout == "hybrid" and self.num_expert_parts > num_experts:
            raise UserError(
                f"{self.sizes('num_attention', 'attention_tp', 'expert_tp')}: experts are in {self.num_expert_parts} "
                f"parts, and the model has {num_experts} a layer: use fewer ranks, or more for an expert"
            )
        moe_layers = list(spec.expert_layers)
        if self.placement is None:
            return contiguous_placement(num_experts, self.num_expert_parts, moe_layers)
        self.placement.check_fits(moe_layers, num_experts, self.num_expert_parts, self.expert_slots or num_experts)
        return self.placement

    def slots_of(self, placement: ExpertPlacement) -> int:
        """Experts that an expert worker may hold in a layer: what was asked for, or what `placement` needs."""
        needed = placement.most_held()
        if self.expert_slots is not None and self.expert_slots < needed:
            raise UserError(
                f"--expert-slots is {self.expert_slots}: the fullest worker holds {needed} experts; give at least that"
            )
        if self.expert_slots is not None and self.expert_slots > MAX_EXPERT_SLOTS:
            raise UserError(f"--expert-slots is {self.expert_slots}: it must be at most {MAX_EXPERT_SLOTS}")
        return needed if self.expert_slots is None else self.expert_slots

    def context_length(self, spec: ModelSpec) -> int:
        """Tokens a sequence may have: what was asked for, which may be more than the model was trained for. All forms
        of rotation that we have go on; the launcher warns."""
        return spec.max_position if self.max_model_len is None else self.max_model_len
