"""The layer that predicts a token further (multi-token prediction; DeepSeek-V3, section 2.2), trained beside the model.

At position i it has the model's row behind the final norm and the embedding of token i + 1, each normed; a projection
of both goes through one more decoder layer and a norm, and the model's own head predicts token i + 2. Its loss, times
`loss.mtp`, adds gradients to this layer, the embedding, the head, and the model below. The loss that is shown is the
model's alone. Evaluation and serving do without the layer; an export has it under its published names.

Its parameters are those of layer number `num_layers`, so patterns, shards and checkpoints know them like any others.
Rejected: more than one such layer, which no checkpoint that we serve has.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import tensor_names
from antiphon.models.tensors import LoadPlan, TensorRef
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.layer import MoeLayer, norm
from antiphon.train.weights import ParameterSpec, Weights, part_of, parts_of, register

FURTHER_LAYERS = "num_nextn_predict_layers"  # in config.json
PROJECTION, EMBEDDING_NORM, ROW_NORM, HEAD_NORM = (
    "mtp_projection",
    "mtp_embedding_norm",
    "mtp_row_norm",
    "mtp_head_norm",
)
COPIES = {"embedding": "embed_tokens.weight", "head": "shared_head.head.weight"}  # of the model's own, in checkpoints
_NAMES = {
    EMBEDDING_NORM: "enorm.weight",
    ROW_NORM: "hnorm.weight",
    PROJECTION: "eh_proj.weight",
    HEAD_NORM: "shared_head.norm.weight",
}


def check_further(config: TrainConfig, model_config: Mapping[str, Any]) -> None:
    """`UserError` where `loss.mtp` asks for what is not there, or for what is not built."""
    weight, parallel = config.loss.mtp, config.parallel
    if not weight:
        return
    if (layers := model_config.get(FURTHER_LAYERS) or 0) != 1:
        raise UserError(
            f"loss.mtp is {weight} and the model's {FURTHER_LAYERS} is {layers}: it is for models with 1, set it to 0"
        )
    wrong = {
        f"parallel.pipeline is {parallel.pipeline}": parallel.pipeline > 1,
        f"parallel.zero is {parallel.zero}": parallel.zero > 1,
        f"communication.sums is {config.communication.sums!r}": config.communication.sums != "behind",
        "overlap.pairs is true": config.overlap.pairs,
        "overlap.inside is true": config.overlap.inside,
    }
    if found := [what for what, is_so in wrong.items() if is_so]:
        raise UserError(
            f"loss.mtp is {weight} and {found[0]}: the layer for a further token needs pipeline 1, zero 0 or 1, sums "
            "'behind', and neither pairs nor inside: change it, or set loss.mtp to 0"
        )


def with_further(spec: ModelSpec) -> ModelSpec:
    """`spec` with the layer behind its last one."""
    return replace(spec, num_layers=spec.num_layers + 1, moe_layers=(*spec.moe_layers, True))


def further_parameters(spec: ModelSpec) -> list[ParameterSpec]:
    """What the layer has beside those of any other."""
    hidden = spec.hidden_size
    norms = [ParameterSpec(purpose, (hidden,), "ones") for purpose in (EMBEDDING_NORM, ROW_NORM, HEAD_NORM)]
    return [ParameterSpec(PROJECTION, (hidden, 2 * hidden), "normal"), *norms]


def further_plan(spec: ModelSpec, layer: int) -> LoadPlan:
    """The same as tensors of a checkpoint; `layer`: its number."""
    prefix = tensor_names(spec).layer.format(layer=layer)
    return {each.purpose: (TensorRef(prefix + _NAMES[each.purpose], each.shape),) for each in further_parameters(spec)}


class FurtherLayer(MoeLayer):
    """A decoder layer, with what comes before and behind it. `arguments`: as of a `MoeLayer`."""

    def __init__(self, spec: ModelSpec, *arguments: Any) -> None:
        layer, share, _, _, first = arguments[:5]
        super().__init__(with_further(spec), *arguments)
        of_layer = parts_of(self)
        register(self, further_parameters(spec), f"layers.{layer}", first, partial(part_of, spec, share))
        self.parts = of_layer | parts_of(self)

    def rows(self, dtype: torch.dtype, embedded_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        """What goes into the layer: of the next tokens' embeddings, and the model's rows."""
        weights = Weights(self, dtype)
        both = (norm(self.spec, weights, EMBEDDING_NORM, embedded_BSH), norm(self.spec, weights, ROW_NORM, y_BSH))
        return F.linear(torch.cat(both, -1), weights[PROJECTION])

    def normed(self, dtype: torch.dtype, x_BSH: Tensor) -> Tensor:
        """What goes into the head."""
        return norm(self.spec, Weights(self, dtype), HEAD_NORM, x_BSH)


def next_tokens(ids_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """(token i + 1, the target i + 2) of each position. Where token i + 1 is of another document or sequence, nothing
    is to be learned."""
    following_BS, further_BS = ids_BS.roll(-1, 1), targets_BS.roll(-1, 1)
    begins_BS = positions_BS.roll(-1, 1) == 0
    begins_BS[:, -1] = True
    return following_BS, further_BS.masked_fill(begins_BS, IGNORED)
