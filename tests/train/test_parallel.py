"""Loss and every parameter's gradient of the parallel forms, against one process, in float64."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.models.config import model_spec
from antiphon.specs.model import ModelSpec
from antiphon.train.config import LossConfig, ParallelConfig
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing, balance_of
from antiphon.train.weights import FirstValues, parts_of
from tests.comm.ranks import on_ranks
from tests.train.harness import CONFIG

RANKS, LENGTH, BATCH = 4, 11, 4
LOSSES = LossConfig(balance=0.1, device_balance=0.05, device_groups=2, z=0.01)
DROPPING = replace(LOSSES, capacity=1.0, device_capacity=0.9)
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 21,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "max_position_embeddings": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
OLMOE = CONFIG | {"model_type": "olmoe", "num_key_value_heads": 4, "intermediate_size": 24, "num_experts": 5}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": CONFIG,
    "odd_heads": CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 3},
    "olmoe": OLMOE,
    "deepseek_v3": LATENT,
    "dropping": OLMOE,
}


@dataclass(frozen=True)
class Form:
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    dispatch: str = "all_to_all"
    deduplicate: bool = True
    row_budget: float = 1.1

    def sizes(self) -> Sizes:
        return Sizes(
            world_size=RANKS,
            sequence=self.sequence,
            tensor=self.tensor,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            dispatch=self.dispatch,  # type: ignore[arg-type]
            deduplicate=self.deduplicate,
            row_budget=self.row_budget,
        )


FORMS = (
    Form(),
    Form(expert=4),
    Form(expert=2, dispatch="gather_scatter"),
    Form(sequence=4, expert=4, deduplicate=False),
    Form(sequence=2, expert=2),
    Form(tensor=2, expert_tensor=2),
    Form(tensor=4, expert_tensor=4),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2),
    Form(tensor=2, expert=4, dispatch="gather_scatter"),
)
OVER_BUDGET = (  # some rows are worked on again in backward
    Form(row_budget=0.5),
    Form(expert=4, row_budget=0.5),
    Form(sequence=2, expert=2, deduplicate=False, row_budget=0.3),
    Form(sequence=2, tensor=2, expert=2, expert_tensor=2, row_budget=0.5),
    Form(tensor=2, expert=4, dispatch="gather_scatter", row_budget=0.5),
)
FORMS_OF = dict.fromkeys(MODELS, FORMS) | {
    "olmoe": FORMS + OVER_BUDGET,
    "dropping": (FORMS[0], FORMS[3], FORMS[6], FORMS[7], OVER_BUDGET[4]),
}
CASES = [(name, form) for name, forms in FORMS_OF.items() for form in forms]


def batch_of(rows: slice) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 320, (BATCH, LENGTH + 1), generator=generator)
    documents = (torch.arange(LENGTH) >= 6).long().expand(BATCH, LENGTH)
    positions = torch.arange(LENGTH) - 6 * documents
    targets = ids[:, 1:].clone()
    targets[:, 5] = -100
    return Batch(ids[rows, :-1], targets[rows], positions[rows], documents[rows])


def one_pass(
    spec: ModelSpec, mesh: Mesh, parallel: ParallelConfig, losses: LossConfig
) -> tuple[MoeModel, float, list[float]]:
    """The model with its gradients; cross-entropy of the step; balance of each layer, and what each layer dropped."""
    model = MoeModel(
        spec, mesh, max_positions=LENGTH, dtype=torch.float64, first=FirstValues(1, 0.2), parallel=parallel
    )
    model.double()
    size = BATCH // mesh.sizes.data
    data = mesh.sizes.place(mesh.rank, "data")
    routing = Routing(spec.router, losses, mesh.stage, num_layers=spec.num_moe_layers)
    loss = model(batch_of(slice(data * size, (data + 1) * size)), torch.tensor(BATCH * (LENGTH - 1)), routing)
    loss.backward()
    total = run(AllReduce(mesh.stage, "loss"), loss.detach().view(1))
    assert all(routing.dropped) == (losses.capacity > 0)
    return model, float(total), [*(float(balance_of(facts)) for facts in routing.all_facts()), *routing.dropped]


def gradients(model: MoeModel, mesh: Mesh) -> dict[str, tuple[Tensor, Any]]:
    """Summed over the ranks that hold the same, by name, with what this rank holds."""
    found = {}
    for where, module in (("", model), *((f"layers.{index}.", layer) for index, layer in enumerate(model.layers))):
        for purpose, part in parts_of(module).items():
            parameter = getattr(module, purpose.replace(".", "_"))
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[where + purpose] = (run(AllReduce(mesh.replicas(part.axes), "gradients"), grad), part)
    return found


def differences(rank: int) -> dict[tuple[str, Form], tuple[float, float, float, str]]:
    """By case: difference of the loss, of the balance losses (and of what was dropped), and of the gradient that
    differs most, relative to the largest number in it."""
    found = {}
    for name, config in MODELS.items():
        spec = model_spec(config)
        losses = DROPPING if name == "dropping" else LOSSES
        one, loss, balance = one_pass(spec, connect(Sizes(), 0), ParallelConfig(), losses)
        expected = gradients(one, one.mesh)
        for form in FORMS_OF[name]:
            mesh = connect(form.sizes(), rank, 60)
            model, ours, our_balance = one_pass(spec, mesh, form.parallel, losses)
            worst = (0.0, "")
            for purpose, (grad, part) in gradients(model, mesh).items():
                wanted = part.of(expected[purpose][0])
                scale = float(expected[purpose][0].abs().max()) or 1.0
                if grad.numel():
                    worst = max(worst, (float((grad - wanted).abs().max()) / scale, purpose))
            uneven = max(abs(first - second) for first, second in zip(our_balance, balance, strict=True))
            found[name, form] = (abs(ours - loss), uneven, *worst)
    return found


@pytest.fixture(scope="module")
def all_differences(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, tuple[float, float, float, str]]]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), differences)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_loss_and_gradients_are_those_of_one_process(all_differences: list[dict[Any, Any]], case: Any) -> None:
    for of_rank in all_differences:
        loss, balance, gradient, purpose = of_rank[case]
        assert loss < 1e-10
        assert balance < 1e-10
        assert gradient < 1e-10, purpose
