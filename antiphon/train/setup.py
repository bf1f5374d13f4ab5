"""What a run is made of before its first step: its ranks, token ids, the way of its rows, and the model.

run = prepare(config)              # checked, joined, tokenized; nothing is built yet
model = build_model(run.spec, run.config, run.config.sequence_length, run.mesh)
"""

import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.comm.float8 import SCALE_BYTES
from antiphon.comm.m2n.tile_links import TileLinks, ranks_on_this_machine
from antiphon.comm.mesh import Group, Mesh, Sizes, connect
from antiphon.kernels import native_rows
from antiphon.kernels.ops.feed_forward import RowBuffers
from antiphon.kernels.ops.products import Products
from antiphon.models.config import load_model_spec, read_config
from antiphon.specs.checked import read_text
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingPlan
from antiphon.train.attention import heads_leave_in_tiles
from antiphon.train.config import TrainConfig
from antiphon.train.device import HOST, device_of, free_bytes
from antiphon.train.further_token import check_further, with_further
from antiphon.train.layer_plan import PlanOptions
from antiphon.train.measured_choices import DispatchChoice, Packing, choose_dispatch, with_choice, with_expert
from antiphon.train.memory import check_memory, dropped_to_fit, setup_of, tensors_of
from antiphon.train.model import MoeModel, experts_axis
from antiphon.train.ranks import (
    gathered,
    join,
    local_rank,
    local_ranks,
    rank,
    refusal_shared,
    sizes_of,
    sums,
    world_size,
)
from antiphon.train.resume import Former
from antiphon.train.run_folder import OutputLock, check_boards, write_run_facts
from antiphon.train.samples import Samples, StreamedSamples
from antiphon.train.sequence_parallel import SequenceParallel
from antiphon.train.token_file import TokenFile
from antiphon.train.token_stream import StreamWriter, TokenStream
from antiphon.train.tokens import open_held_out, open_tokens, tokenize
from antiphon.train.weights import FirstValues, RankShare

_log = get_logger("train")
NUMBER_BYTES = 8  # of float64, the widest that travels in tiles; E4M3 with its scales is narrower than float32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that can begin. `config`: as it runs, all that was left open decided. `dispatch`: what was measured for the
    way of rows; `packing` None: the same ranks share the experts throughout. `former`: the run that this one goes on
    with. `text`: the digest of what is trained on. `writer`: of token ids beside the steps, and `lock`: of the output
    folder, both held by the first rank until the run ends."""

    config: TrainConfig
    spec: ModelSpec
    device: torch.device
    model_config: dict[str, Any]
    mesh: Mesh
    samples: Samples | StreamedSamples
    held_out: TokenFile
    dispatch: DispatchChoice | None
    packing: Packing | None
    former: Former
    text: str
    writer: StreamWriter | None
    lock: OutputLock | None


def prepare(config: TrainConfig, plan: TrainingPlan | None = None, allowed: Collection[str] = ()) -> TrainingRun:
    """Check what can be checked, join the other ranks, write the token ids and `run.json`. Waits for all ranks. `plan`:
    the one that `config` obeys, for the page that closes the run. `allowed`: keys that may differ from the run that
    this one goes on with."""
    with refusal_shared():
        lock = OutputLock(Path(config.output.folder)) if rank() == 0 else None
    try:
        return _prepared(config, plan, allowed, lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _prepared(
    config: TrainConfig, plan: TrainingPlan | None, allowed: Collection[str], lock: OutputLock | None
) -> TrainingRun:
    path = Path(config.model.path)
    with refusal_shared():
        former = Former(config, allowed)
        config = former.config(config)
        spec = load_model_spec(path)
        check_further(config, read_config(path))
        check_boards(config.output.wandb)
        if config.sequence_length > spec.max_position:
            raise UserError(
                f"sequence_length is {config.sequence_length}, the model's positions end at {spec.max_position}: "
                "shorten the sequences"
            )
        packing = Packing(config, spec) if config.communication.packing else None
        if packing is not None:
            config = with_expert(config, packing.expert_at(former.step))
        sizes = sizes_of(config, spec, world_size())
        device = device_of(config.device, local_rank(), local_ranks())
        check_device(config, device)
        sharing = local_ranks() if device == HOST else 1
        held = with_further(spec) if config.loss.mtp else spec
        counted = config
        if device != HOST:  # a GPU's copies lie in host memory
            counted = replace(config, output=replace(config.output, save_beside=False))
        need = check_memory(held, counted, setup_of(config, sizes), ranks_here=sharing, free_bytes=free_bytes(device))
    mesh = join(sizes, config.communication, device)
    native_rows.share_threads()
    prepare_data_together(config, spec, mesh)
    samples, held_out, text = open_data(config)
    former.check_text(text)
    dispatch = choose_dispatch(spec, config, mesh, device)
    config = with_choice(config, dispatch)
    if mesh.rank == 0:
        chosen = None if dispatch is None else asdict(dispatch)
        write_run_facts(config, spec, need, num_ranks=sizes.world_size, plan=plan, dispatch=chosen)
    writer = None
    if config.data.stream_tokens and mesh.rank == 0:
        writer = StreamWriter(stream_of(config))
        samples = StreamedSamples(stream_of(config), writer.check, timeout_s=config.communication.timeout_s)
    return TrainingRun(
        config=config,
        spec=spec,
        device=device,
        model_config=read_config(path),
        mesh=mesh,
        samples=samples,
        held_out=held_out,
        dispatch=dispatch,
        packing=packing,
        former=former,
        text=text,
        writer=writer,
        lock=lock,
    )


def cache_of(config: TrainConfig) -> Path:
    return Path(config.data.cache) if config.data.cache else Path(config.output.folder) / "tokens"


def tokenizer_of(config: TrainConfig) -> Path:
    """A folder, or a `tokenizer.json`."""
    path = Path(config.data.tokenizer or config.model.path)
    return path.parent if path.name == "config.json" else path


def prepare_data(config: TrainConfig, spec: ModelSpec) -> None:
    """Write the token ids unless they are there; of a text that is tokenized beside the steps, those of the begin."""
    if config.data.stream_tokens:
        stream_of(config).prepare()
        return
    tokenize(config.data, tokenizer_of(config), spec, cache_of(config), config.seed)


def stream_of(config: TrainConfig) -> TokenStream:
    """The text of a run with `data.stream_tokens`."""
    return TokenStream(
        data=config.data,
        tokenizer=tokenizer_of(config),
        model=Path(config.model.path),
        cache=cache_of(config),
        seed=config.seed,
        length=config.sequence_length,
    )


def open_data(config: TrainConfig) -> tuple[Samples | StreamedSamples, TokenFile, str]:
    """(samples, held-out text, digest of what is trained on) of what `prepare_data` wrote."""
    if config.data.stream_tokens:
        stream = stream_of(config)
        samples = StreamedSamples(stream, timeout_s=config.communication.timeout_s)
        return samples, stream.held_out(), stream.digest
    text = open_tokens(cache_of(config), "train")
    return Samples.of(config, text, shuffled=True), open_held_out(config.data, cache_of(config)), text.digest


def check_device(config: TrainConfig, device: torch.device) -> None:
    """`UserError` for what works in host memory alone."""
    if device == HOST:
        return
    if config.memory.offload != "none":
        raise UserError(
            f"memory.offload maps the memory of the processor, and the run computes on {device}: set it to 'none', or "
            "device to 'cpu'"
        )
    if config.memory.reuse_rows:
        raise UserError(
            f"memory.reuse_rows is true and the device is {device}, whose allocator does this: set it to false, and "
            "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8"
        )
    if config.overlap.inside:
        raise UserError(
            f"overlap.inside is true and the device is {device}: tiles travel through host memory: set device to "
            "'cpu', or overlap.inside to false"
        )
    if config.parallel.pipeline > 1:
        raise UserError(
            f"parallel.pipeline is {config.parallel.pipeline} and the device is {device}: stages tell rows apart by "
            "tags, which NCCL does not know: set device to 'cpu', or pipeline to 1"
        )


def build_model(
    spec: ModelSpec,
    config: TrainConfig,
    max_positions: int,
    mesh: Mesh | None = None,
    device: torch.device = HOST,
) -> MoeModel:
    """The model with its first weights: what the rank of `mesh` holds of it; None: all. Waits for the ranks of `mesh`
    where rows travel in tiles."""
    mesh = connect(Sizes(), 0) if mesh is None else mesh
    overlap = config.overlap
    model = MoeModel(
        spec,
        mesh,
        max_positions=max_positions,
        dtype=DTYPES[config.dtype],
        first=FirstValues(config.seed, config.model.initializer_range, device),
        parallel=config.parallel,
        communication=config.communication,
        options=plan_options(spec, config, mesh.sizes),
        mtp=config.loss.mtp,
        links=connect_tiles(spec, overlap.tile_rows, mesh, first=overlap.tiles_first) if overlap.inside else (),
    )
    return model.double() if config.dtype == "float64" else model


def connect_tiles(spec: ModelSpec, tile_rows: int, mesh: Mesh, *, first: bool = False) -> tuple[TileLinks, ...]:
    """Links between the ranks whose rows the experts here work on, between those that share positions, and between
    those that share heads: one for all where they are the same ranks. They wait for each other."""
    sequence, tensor = mesh.group("sequence"), mesh.group("tensor")
    share = RankShare.of(spec, mesh.sizes, mesh.rank)
    parallel = SequenceParallel(spec.attention, share, sequence, tensor, sequence.size * tensor.size)
    widths = dict[tuple[int, ...], tuple[Group, int]]()
    for group, width in (
        (mesh.group(experts_axis(mesh.sizes)), spec.hidden_size),
        (sequence, parallel.widest_row),
        (tensor, spec.hidden_size),
    ):
        if group.size > 1:
            _, known = widths.get(group.ranks, (group, 0))
            widths[group.ranks] = group, max(known, width)
    if mesh.rank == 0 and sequence.size > 1 and not heads_leave_in_tiles(spec.attention):
        why = "a norm is over all heads" if spec.attention.latent is None else "heads are made of a latent row"
        _log.warning("overlap.inside: the all-to-all before attention is not cut into tiles, because %s", why)
    here = ranks_on_this_machine(mesh.world) if widths else 1
    return tuple(
        TileLinks.connect(group, tile_rows, NUMBER_BYTES * width, mesh.timeout_s, first=first, local_processes=here)
        for group, width in widths.values()
    )


def plan_options(spec: ModelSpec, config: TrainConfig, sizes: Sizes) -> PlanOptions:
    """How layers run under this configuration."""
    memory, file = config.memory, config.overlap.schedule
    found = PlanOptions(
        keep=memory.keep or memory.remake,
        dropped=tensors_of(memory.again) or dropped_to_fit(spec, config, setup_of(config, sizes)),
        beside=config.overlap.beside,
        parts=parts_of(spec, config, sizes),
        late_weights=_heads_are_wide(spec, config, sizes),
        products=Products(config.products, RowBuffers() if memory.reuse_rows else None),
    )
    return replace(found, schedule=read_text(Path(file)), where=file) if file else found


def _heads_are_wide(spec: ModelSpec, config: TrainConfig, sizes: Sizes) -> bool:
    """Whether heads take so long to travel, beside rows of experts, that each of them hides work of its own better than
    rows hide all of it: two thirds as long, because the first weights of experts are two thirds of the work."""
    attention, copies = spec.attention, min(spec.router.top_k, sizes.expert)
    if sizes.sequence == 1 or config.parallel.dispatch == "gather_scatter" or attention.latent is not None:
        return False
    width = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return 3 * width >= 2 * copies * spec.hidden_size


def parts_of(spec: ModelSpec, config: TrainConfig, sizes: Sizes) -> int:
    """In how many parts rows travel to experts: as many as leave no rank more than `chunk_bytes` to send in one. The
    same on all ranks and in every step, whatever the router does."""
    communication, experts = config.communication, max(sizes.expert, sizes.expert_tensor)
    if not communication.pipeline_experts or sizes.world_size == 1:
        return 1
    if experts == 1 and not communication.packing:
        raise UserError(
            "communication.pipeline_experts is true, but every rank has all experts, so no rows travel: share them "
            "(parallel.expert), or set it to false"
        )
    sequences = config.batch // config.micro_batches // sizes.data
    rows = -(-config.sequence_length // (sizes.sequence * sizes.tensor)) * sequences * sizes.expert_tensor
    if config.parallel.dispatch == "all_to_all" and sizes.expert > 1:
        rows *= min(spec.router.top_k, sizes.expert) if config.parallel.deduplicate else spec.router.top_k
    wide = DTYPES[config.dtype].itemsize
    row_bytes = spec.hidden_size * wide if communication.activations == "plain" else spec.hidden_size + SCALE_BYTES
    return max(1, -(-rows * row_bytes // communication.chunk_bytes))


def prepare_data_together(config: TrainConfig, spec: ModelSpec, mesh: Mesh) -> None:
    """Token ids are written by the first rank, however long that takes: the others hear that it is at work."""
    if mesh.sizes.world_size == 1:
        prepare_data(config, spec)
        return
    failures: list[BaseException] = []

    def work() -> None:
        try:
            prepare_data(config, spec)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="tokens", daemon=True) if mesh.rank == 0 else None
    if thread is not None:
        thread.start()
    busy = failed = 1.0
    while busy:
        if thread is not None:
            thread.join(min(30.0, config.communication.timeout_s / 4))
        busy, failed = sums(mesh.world, "barrier", thread is not None and thread.is_alive(), bool(failures))
    if failed:
        why = gathered(mesh.world, "barrier", str(failures[0]) if failures else "")[0]
        raise failures[0] if failures else UserError(f"rank 0 could not write the token ids: {why}")
