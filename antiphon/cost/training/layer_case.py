"""One layer of a model under one setup on one kind of device: what operators, activations and memory are made from."""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.exchange import Spread, expected_distinct
from antiphon.cost.network import Network, network
from antiphon.cost.parts import Number
from antiphon.cost.roofline import Roofs, roofs
from antiphon.cost.shapes import share_of
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What a layer's tensors are sized by. `tokens`: of one micro-batch of the whole group."""

    model: ModelSpec
    setup: TrainingSetup
    sequence_length: int

    @property
    def tokens(self) -> Number:
        return self.setup.micro_batch * self.sequence_length

    @property
    def rows(self) -> Number:
        """Rows of one rank, the busiest where tokens do not divide."""
        return share_of(self.tokens, self.setup.model_parallel)

    @property
    def copies(self) -> Number:
        """How many ranks an all-to-all sends a token to."""
        router = self.model.router
        if not self.setup.deduplicate:
            return router.top_k
        return expected_distinct(router.num_experts, router.top_k, self.setup.expert_parallel)

    @property
    def expert_rows(self) -> Number:
        """(token, expert) rows of the busiest rank."""
        router, degree = self.model.router, self.setup.expert_parallel
        if self.setup.experts == "tensor":
            return self.tokens * router.top_k
        return (
            self.tokens
            * self.setup.expert_copies
            * router.top_k
            * share_of(router.num_experts, degree)
            / router.num_experts
            * self.setup.imbalance
        )


@dataclass(frozen=True, kw_only=True)
class LayerCase(LayerSizes):
    """What an operator list is made from."""

    roofs: Roofs
    network: Network

    @property
    def spread(self) -> Spread:
        """Where a token's experts lie, if it may travel once per node."""
        router, ranks = self.model.router, self.setup.expert_parallel
        together = np.minimum(np.asarray(ranks, dtype=np.float64), self.network.domain)

        def touched(workers: Number) -> Number:
            groups = {"num_groups": router.num_groups, "top_k_groups": router.top_k_groups}
            return expected_distinct(router.num_experts, router.top_k, workers, **groups)

        return Spread(
            num_ranks=ranks,
            ranks_per_domain=together,
            ranks_per_row=touched(ranks),
            domains_per_row=touched(np.ceil(ranks / together)),
        )


def layer_case(training: Training, setup: TrainingSetup) -> LayerCase:
    device, efficiency = training.group.device, training.cluster.efficiency
    return LayerCase(
        model=training.model,
        setup=setup,
        roofs=roofs(device, efficiency, setup.precision.compute),
        network=network(training.cluster, training.group),
        sequence_length=training.sequence_length,
    )
