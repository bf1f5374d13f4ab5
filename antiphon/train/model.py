"""The trainable model: embedding, layers, final norm, and the loss of its head.

A rank of a pipeline has some stages of it, each a run of layers. The embedding belongs to the first stage, final norm
and head to the last; a tied embedding is held by both.

It is built from the same `ModelSpec` and tensor names as the one that serves. Parameters stay in float32 (or wider);
the arithmetic runs in `dtype`.

Letters: B sequences, S positions, T = B * S rows, H hidden, E experts, W vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.dispatch import AllToAllWay, Dispatcher, GatherScatter, Way, two_level_ways
from antiphon.comm.float8 import RowFormat
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Group, Mesh, Sizes
from antiphon.comm.replicas import connect_levels
from antiphon.kernels.ops.cross_entropy import linear_cross_entropy
from antiphon.models.rotary import rotary_table
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import CommunicationConfig, ParallelConfig
from antiphon.train.further_token import FurtherLayer, next_tokens
from antiphon.train.layer import MoeLayer, layer_graph, norm
from antiphon.train.layer_plan import PlanOptions, check_names
from antiphon.train.layer_run import Turns
from antiphon.train.operators import HeldBytes
from antiphon.train.pipeline import PipelineSchedule
from antiphon.train.routing import Routing, row_numbers
from antiphon.train.row_budget import RowBudget
from antiphon.train.sequence_parallel import SequenceParallel, Sequences
from antiphon.train.spans import StepSpans
from antiphon.train.weights import FirstValues, RankShare, Weights, outer_parameters, part_of, register


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `positions_BS` count within documents; `documents_BS` None: one document a sequence.
    `targets_BS`: the next token, or -100 where nothing is to be learned."""

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None


class Layers(nn.Module):
    """The layers of one rank, by their numbers in the whole model."""

    def __init__(self, layers: Iterable[MoeLayer]) -> None:
        super().__init__()
        for each in layers:
            self.add_module(str(each.layer), each)

    def __getitem__(self, layer: int) -> MoeLayer:
        found = self._modules[str(layer)]
        assert isinstance(found, MoeLayer)
        return found

    def __contains__(self, layer: int) -> bool:
        return str(layer) in self._modules

    def __iter__(self) -> Iterator[MoeLayer]:
        return (self[int(name)] for name in self._modules)


class MoeModel(nn.Module):
    """A decoder of `spec`: the parts of its parameters that the rank of `mesh` holds. `links`: what carries rows in
    tiles, each between the ranks of one group; other rows travel in whole. `close` when the model is done with."""

    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        *,
        max_positions: int,
        dtype: torch.dtype,
        first: FirstValues = FirstValues(),
        parallel: ParallelConfig = ParallelConfig(),
        communication: CommunicationConfig = CommunicationConfig(),
        options: PlanOptions = PlanOptions(),
        links: Sequence[TileLinks] = (),
        mtp: float = 0.0,
    ) -> None:
        """`mtp`: weight of the loss of a layer that predicts a token further; 0: there is none."""
        super().__init__()
        self.spec = spec
        self._mtp = mtp
        self.further_losses: list[Tensor] = []  # of passes since they were taken, unweighted
        self.mesh = mesh
        self.links = links
        self.dtype = dtype
        self.spans = StepSpans()
        self._narrow_attention = communication.attention == "float8"
        self.share = RankShare.of(spec, mesh.sizes, mesh.rank)
        self.schedule = PipelineSchedule(pipeline=mesh.sizes.pipeline, virtual_stages=parallel.virtual_stages)
        self.stages = self.schedule.stages_of(mesh.sizes.place(mesh.rank, "pipeline"))
        outer = [each for each in outer_parameters(spec) if self._holds(each.purpose)]
        register(self, outer, "outer", first, partial(part_of, spec, self.share))
        dispatcher = dispatcher_of(mesh, spec.router.num_experts, parallel, communication, dtype)
        dispatcher = replace(dispatcher, links=links_between(mesh.group(experts_axis(mesh.sizes)), links))
        of_attention = [links_between(mesh.group(axis), links) for axis in ("sequence", "tensor")]
        budget = RowBudget(mesh, spec.router.num_experts, parallel.row_budget)
        own = [layer for stage in self.stages for layer in self._layers_of(stage)]
        if isinstance(options.keep, tuple):
            kinds = {routes: layer for layer, routes in enumerate(spec.moe_layers)}.values()
            check_names(
                options.keep,
                [layer_graph(spec, each, self.share, dispatcher, budget, options, *of_attention) for each in kinds],
            )

        def made(kind: type[MoeLayer], layer: int) -> MoeLayer:
            return kind(spec, layer, self.share, dispatcher, budget, first, options, *of_attention)

        layers = [made(MoeLayer, layer) for layer in own]
        if mtp:
            layers.append(made(FurtherLayer, spec.num_layers))
        self.layers = Layers(layers)
        self.held = HeldBytes()
        self.turns = Turns()
        for each in self.layers:
            each.held, each.turns = self.held, self.turns
        table = rotary_table(spec.attention.rope, max_positions, first.device)
        self.register_buffer("cos_PR", table.cos, persistent=False)
        self.register_buffer("sin_PR", table.sin, persistent=False)

    def close(self) -> None:
        """Say goodbye to other ranks."""
        for each in self.links:
            each.close()

    @property
    def device(self) -> torch.device:
        """Where its parameters lie."""
        return self.cos_PR.device

    def _holds(self, purpose: str) -> bool:
        """Whether a stage of this rank has this parameter of those outside of layers."""
        if purpose == "embedding":
            return self.is_first or (self.is_last and self.spec.tie_embeddings)
        return self.is_last

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, whose result is the loss."""
        return self.schedule.num_stages - 1 in self.stages

    def _layers_of(self, stage: int) -> range:
        return range(*split_evenly(self.spec.num_layers, self.schedule.num_stages)[stage])

    def moe_layers(self, stage: int) -> range:
        """The layers of `stage` that route, by their numbers among all that do."""
        layers, routes = self._layers_of(stage), self.spec.moe_layers
        return range(sum(routes[: layers.start]), sum(routes[: layers.stop]))

    def stage(self, stage: int, x_BSH: Tensor | None, batch: Batch, num_targets: Tensor, routing: Routing) -> Tensor:
        """The rows behind stage number `stage` from those before it (None before the first), at this rank's positions;
        of the last stage the loss."""
        x_BSH = self._rows(stage, x_BSH, batch, routing)
        return x_BSH if stage < self.schedule.num_stages - 1 else self._loss(x_BSH, batch, num_targets, routing)

    def rows_buffer(self, batch: Batch) -> Tensor:
        """Room for the rows between two stages."""
        shape = (*self.own_targets(batch).shape, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _loss(self, x_BSH: Tensor, batch: Batch, num_targets: Tensor, routing: Routing) -> Tensor:
        """This rank's part of the cross-entropy: its sum over the targets here, divided by `num_targets`, those of the
        whole step on all ranks. The parts of all ranks add up to the mean."""
        with self.spans.of("norm"):
            y_BSH = norm(self.spec, Weights(self, self.dtype), "final_norm", x_BSH)
        loss = self._cross_entropy(y_BSH, self.own_targets(batch), num_targets)
        if not self._mtp or not torch.is_grad_enabled():
            return loss
        further = self._further_loss(y_BSH, batch, num_targets, routing)
        self.further_losses.append(further.detach())
        return loss + self._mtp * (further - further.detach())  # its gradient alone: the loss is the model's

    def _further_loss(self, y_BSH: Tensor, batch: Batch, num_targets: Tensor, routing: Routing) -> Tensor:
        """As `_loss`, of the tokens after the next ones."""
        layer, parallel = self.layers[self.spec.num_layers], self._parallel(batch)
        assert isinstance(layer, FurtherLayer)
        own = slice(*parallel.own)
        following_BS, targets_BS = next_tokens(batch.ids_BS, batch.targets_BS, batch.positions_BS)
        sequences = Sequences.of(self.spec, parallel, self.cos_PR, self.sin_PR, batch.positions_BS, batch.documents_BS)
        with self.spans.of("further token"):
            x_BSH = layer.rows(self.dtype, self._embedded(following_BS[:, own]), y_BSH)
        x_BSH = layer(x_BSH, sequences, routing.apart())
        with self.spans.of("further token"):
            y_BSH = layer.normed(self.dtype, x_BSH)
        return self._cross_entropy(y_BSH, targets_BS[:, own], num_targets)

    def _cross_entropy(self, y_BSH: Tensor, targets_BS: Tensor, num_targets: Tensor) -> Tensor:
        weights = Weights(self, self.dtype)
        with self.spans.of("cross-entropy"):
            return linear_cross_entropy(
                y_BSH.flatten(0, 1),
                weights["embedding" if self.spec.tie_embeddings else "head"],
                weights.optional("head_bias"),
                targets_BS.flatten(),
                num_targets,
                self.spec.logits_divisor,
            )

    def _embedded(self, ids_BS: Tensor) -> Tensor:
        x_BSH = Weights(self, self.dtype)["embedding"][ids_BS]
        return x_BSH if self.spec.embedding_multiplier == 1.0 else x_BSH * self.spec.embedding_multiplier

    def own_targets(self, batch: Batch) -> Tensor:
        """The targets at this rank's positions."""
        return batch.targets_BS[:, slice(*self._parallel(batch).own)]

    def _parallel(self, batch: Batch) -> SequenceParallel:
        sequence, tensor = self.mesh.group("sequence"), self.mesh.group("tensor")
        positions = batch.ids_BS.shape[1]
        return SequenceParallel(
            self.spec.attention, self.share, sequence, tensor, positions, narrow=self._narrow_attention
        )

    def _rows(self, stage: int, x_BSH: Tensor | None, batch: Batch, routing: Routing) -> Tensor:
        """The residual stream behind the last layer of `stage`, at this rank's positions."""
        parallel = self._parallel(batch)
        num_sequences, length = batch.ids_BS.shape
        first_sequence = self.mesh.sizes.place(self.mesh.rank, "data") * num_sequences
        routing.number_rows(
            partial(row_numbers, first_sequence, num_sequences, parallel.own, length, batch.ids_BS.device)
        )
        sequences = Sequences.of(self.spec, parallel, self.cos_PR, self.sin_PR, batch.positions_BS, batch.documents_BS)
        if x_BSH is None:
            with self.spans.of("embedding"):
                x_BSH = self._embedded(batch.ids_BS[:, slice(*parallel.own)])
        for layer in self._layers_of(stage):
            x_BSH = self.layers[layer](x_BSH, sequences, routing)
        return x_BSH


def experts_axis(sizes: Sizes) -> str:
    """Along which the ranks stand whose rows the experts here work on, of the last way there."""
    return "expert" if sizes.expert > 1 else "expert_tensor"


def links_between(group: Group, links: Sequence[TileLinks]) -> TileLinks | None:
    """What carries tiles between the ranks of `group`."""
    return next((each for each in links if each.group.ranks == group.ranks), None)


def dispatcher_of(
    mesh: Mesh,
    num_experts: int,
    config: ParallelConfig,
    communication: CommunicationConfig = CommunicationConfig(),
    dtype: torch.dtype = torch.float32,
) -> Dispatcher:
    """The way of this rank's rows, which are in `dtype`, to all experts."""
    group, slices = mesh.group("expert"), mesh.group("expert_tensor")
    experts = split_evenly(num_experts, group.size)
    first, last = experts[group.index]
    assert group.size == 1 or config.dispatch != "auto", "choose_dispatch first"
    formats, early = RowFormat(communication.activations, dtype), communication.gate_weights == "experts"
    ways: list[Way] = [GatherScatter(slices, formats=formats)] if slices.size > 1 else []
    if group.size > 1 and config.dispatch == "gather_scatter":
        ways.append(GatherScatter(group, (first, last), formats))
    elif group.size > 1 and config.dispatch == "two_level":
        inside, across = connect_levels(mesh, group, communication.node_ranks)
        ways += two_level_ways(inside, across, experts, formats, weights_inside=early)
    elif group.size > 1:
        ways.append(AllToAllWay(group, experts, deduplicate=config.deduplicate, formats=formats, weights_inside=early))
    return Dispatcher(last - first, tuple(ways), early_weights=early)
