"""The models and cluster of MegaScale-MoE's evaluation, as its tables state them (arXiv 2505.11432, Tables 2 and 4).

The 352B row, read literally, has 341.3 billion parameters; with one shared expert of equal width, as its name and its
printed MFU ask for, it has 351.9 billion. The vocabulary of 65,536 is section 6.1's and is used for all models; head
width is hidden / heads. Only what the table states is modelled: DeepSeekMoE has neither shared experts nor a dense
layer.
"""

from dataclasses import dataclass
from typing import Literal

from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec

VOCABULARY = 65_536
SEQUENCE_LENGTH = 8192
NODE_DEVICES = 8


@dataclass(frozen=True)
class TableRow:
    """One row of Table 2. `num_shared`: shared experts of equal width, which the table does not state."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    heads_per_kv_head: int
    expert_width: int
    num_experts: int
    top_k: int
    num_shared: int = 0

    def model(self, num_layers: int | None = None) -> ModelSpec:
        """The row as a model, with fewer layers if asked (section 6.2 cuts them to fit one node)."""
        layers = self.num_layers if num_layers is None else num_layers
        head_dim = self.hidden_size // self.num_heads
        return ModelSpec(
            family="mixtral",
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            num_layers=layers,
            moe_layers=(True,) * layers,
            attention=AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_heads // self.heads_per_kv_head,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=RopeSpec(dim=head_dim, theta=1e6),
            ),
            router=RouterSpec(num_experts=self.num_experts, top_k=self.top_k),
            feed_forward=FeedForwardSpec(
                intermediate=self.expert_width, shared_intermediate=self.num_shared * self.expert_width
            ),
        )


TABLE_2 = {
    row.name: row
    for row in (
        TableRow("Internal-352B", 60, 4096, 32, 4, 14336, 32, 3, num_shared=1),
        TableRow("Mixtral-8x7B", 32, 4096, 32, 4, 14336, 8, 2),
        TableRow("Mixtral-8x22B", 56, 6144, 48, 6, 16384, 8, 2),
        TableRow("Hunyuan-Large", 64, 6400, 80, 10, 18304, 16, 1),
        TableRow("Phi-3.5-MoE", 32, 4096, 32, 4, 6400, 16, 2),
        TableRow("DeepSeekMoE", 28, 2048, 16, 1, 1408, 64, 6),
    )
}
INTERNAL_352B_AS_PRINTED = TableRow("Internal-352B as printed", 60, 4096, 32, 4, 14336, 32, 3)

Name = Literal["megatron", "megascale"]


TABLE_3: dict[Name, dict[int, tuple[float, float]]] = {
    "megatron": {
        240: (39.94, 151.1e3),
        480: (19.56, 301.1e3),
        720: (13.70, 430.5e3),
        960: (10.82, 550.2e3),
        1440: (7.90, 746.6e3),
    },
    "megascale": {
        240: (21.61, 272.9e3),
        480: (11.83, 498.6e3),
        720: (7.97, 740.1e3),
        960: (6.12, 963.8e3),
        1440: (4.19, 1407.7e3),
    },
}
"""By number of devices: seconds of an iteration and tokens/s as printed (batch 720, sequences of 8,192)."""
TABLE_3_BATCH = 720
TABLE_3_PIPELINE = 15
