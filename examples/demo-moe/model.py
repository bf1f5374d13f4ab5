"""A training-only Qwen3-MoE: the architecture of transformers' Qwen3MoeForCausalLM, made quick on a CPU.

Shape letters: B sequences, S positions, T = B * S tokens, K experts a token, A = T * K assignments,
E experts, H hidden, I expert hidden, V vocabulary, N query heads, D head size.

Parameters carry transformers' in-memory names, so `state_dict()` loads into Qwen3MoeForCausalLM as it is.
Three things differ from that class, none of them in the function computed: products run in bfloat16 (measured
four times float32 on a CPU with avx512_bf16), tokens are sorted by expert once so that each expert sees one
slice, and a layer compiles as a whole because the expert loop is one custom operator of static output shape.
Training transformers' own class was rejected: its norms, rotations and expert gathers are separate passes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

_ROPE_THETA = 10000.0


def model_config(*, vocab_size: int) -> Qwen3MoeConfig:
    """The demo model's shape: five million parameters, 2.3 of them used by a token.

    Four layers of experts 64 wide, not seven of 32: as large, quicker, and ahead after equal time on a CPU.
    """
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        router_aux_loss_coef=0.01,
    )


def _slices(counts_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows, for rows sorted by expert."""
    ends = counts_E.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    slices = [(expert, start, end) for expert, (start, end) in enumerate(zip(starts, ends, strict=True))]
    return [(expert, start, end) for expert, start, end in slices if end > start]


@torch.library.custom_op("demo_moe::grouped_linear", mutates_args=())
def grouped_linear(x_AH: Tensor, weight_EOH: Tensor, counts_E: Tensor) -> Tensor:
    """Rows sorted by expert times their expert's weight: [A, H] x [E, O, H] -> [A, O]."""
    y_AO = x_AH.new_empty(x_AH.shape[0], weight_EOH.shape[1])
    for expert, start, end in _slices(counts_E):
        torch.mm(x_AH[start:end], weight_EOH[expert].t(), out=y_AO[start:end])
    return y_AO


@grouped_linear.register_fake
def _(x_AH: Tensor, weight_EOH: Tensor, counts_E: Tensor) -> Tensor:
    return x_AH.new_empty(x_AH.shape[0], weight_EOH.shape[1])


@torch.library.custom_op("demo_moe::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad_AO: Tensor, x_AH: Tensor, weight_EOH: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_linear` for its rows and its weights."""
    grad_AO = grad_AO.contiguous()
    grad_x_AH, grad_weight_EOH = torch.empty_like(x_AH), torch.zeros_like(weight_EOH)
    for expert, start, end in _slices(counts_E):
        torch.mm(grad_AO[start:end], weight_EOH[expert], out=grad_x_AH[start:end])
        torch.mm(grad_AO[start:end].t(), x_AH[start:end], out=grad_weight_EOH[expert])
    return grad_x_AH, grad_weight_EOH


@grouped_linear_backward.register_fake
def _(grad_AO: Tensor, x_AH: Tensor, weight_EOH: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_AH), torch.empty_like(weight_EOH)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_linear_gradients(ctx: Any, grad_AO: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_linear_backward(grad_AO, *ctx.saved_tensors), None


grouped_linear.register_autograd(_grouped_linear_gradients, setup_context=_keep_inputs)


class Permute(torch.autograd.Function):
    """Reorder rows; the gradient gathers by the inverse order, where index_select's would scatter."""

    @staticmethod
    def forward(ctx: Any, x_AH: Tensor, order_A: Tensor, inverse_A: Tensor) -> Tensor:
        """Row i of the result is row order_A[i] of `x_AH`."""
        ctx.save_for_backward(inverse_A)
        return x_AH.index_select(0, order_A)

    @staticmethod
    def backward(ctx: Any, grad_AH: Tensor) -> tuple[Tensor, None, None]:
        """Put the gradient's rows back."""
        return grad_AH.index_select(0, ctx.saved_tensors[0]), None, None


class Router(nn.Module):
    """Softmax over the experts, best K, weights of the K made to sum to one."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * 0.02)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns probabilities [T, E], weights [T, K] and expert numbers [T, K]; float32 throughout."""
        probs_TE = F.linear(x_TH, self.weight).softmax(dim=-1)
        top_TK, experts_TK = probs_TE.topk(self.num_chosen, dim=-1)
        return probs_TE, top_TK / top_TK.sum(dim=-1, keepdim=True), experts_TK


class Experts(nn.Module):
    """SwiGLU experts, gate and up projections stacked as in transformers: [E, 2I, H] and [E, H, I]."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inner, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden, inner) * 0.02)

    def forward(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of each token's experts [T, H], and assignments per expert [E]."""
        (num_tokens, hidden), num_chosen = x_TH.shape, experts_TK.shape[1]
        order_A = experts_TK.flatten().argsort(stable=True)
        inverse_A = order_A.argsort()
        counts_E = F.one_hot(experts_TK.flatten(), self.gate_up_proj.shape[0]).sum(dim=0)
        rows_AH = x_TH.bfloat16()[:, None].expand(-1, num_chosen, -1).reshape(-1, hidden)
        rows_AH = Permute.apply(rows_AH, order_A, inverse_A)
        gate_AI, up_AI = grouped_linear(rows_AH, self.gate_up_proj.bfloat16(), counts_E).chunk(2, dim=-1)
        out_AH = grouped_linear(F.silu(gate_AI) * up_AI, self.down_proj.bfloat16(), counts_E)
        out_TKH = Permute.apply(out_AH, inverse_A, order_A).view(num_tokens, num_chosen, hidden)
        return (out_TKH * weights_TK[:, :, None]).sum(dim=1), counts_E


class SparseMlp(nn.Module):
    """Router and experts, with the loss that keeps the experts evenly used."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns output [T, H], balance loss (1 when even) and assignments per expert [E].

        Balance loss: E * sum_e f_e P_e, with f the shares of assignments and P the mean probabilities
        (Switch Transformer, arXiv 2101.03961, equation 4).
        """
        probs_TE, weights_TK, experts_TK = self.gate(x_TH)
        out_TH, counts_E = self.experts(x_TH, weights_TK, experts_TK)
        shares_E = counts_E / counts_E.sum()
        return out_TH, probs_TE.shape[1] * (shares_E * probs_TE.mean(dim=0)).sum(), counts_E


def _linear(num_in: int, num_out: int) -> nn.Linear:
    layer = nn.Linear(num_in, num_out, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = _linear(config.hidden_size, config.num_attention_heads * self.head_dim)
        self.k_proj = _linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.v_proj = _linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.o_proj = _linear(config.num_attention_heads * self.head_dim, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x_BSH: Tensor, projection: nn.Linear) -> Tensor:
        heads_BSND = F.linear(x_BSH, projection.weight.bfloat16()).unflatten(-1, (-1, self.head_dim))
        return heads_BSND.transpose(1, 2).float()

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        """Attention over the sequence; written-out scores beat the fused CPU kernel at S = 256."""
        x_BSH = x_BSH.bfloat16()
        query_BNSD = rotate(self.q_norm(self._heads(x_BSH, self.q_proj)), cos_SD, sin_SD).bfloat16()
        key_BNSD = rotate(self.k_norm(self._heads(x_BSH, self.k_proj)), cos_SD, sin_SD).bfloat16()
        value_BNSD = self._heads(x_BSH, self.v_proj).bfloat16()
        key_BNSD = key_BNSD.repeat_interleave(self.num_groups, dim=1)
        value_BNSD = value_BNSD.repeat_interleave(self.num_groups, dim=1)
        scores_BNSS = (query_BNSD @ key_BNSD.transpose(-1, -2)).float() * self.head_dim**-0.5
        positions_S = torch.arange(x_BSH.shape[1])
        scores_BNSS = scores_BNSS.masked_fill(positions_S[None] > positions_S[:, None], -1e9)
        mixed_BNSD = scores_BNSS.softmax(dim=-1).bfloat16() @ value_BNSD
        return F.linear(mixed_BNSD.transpose(1, 2).flatten(2), self.o_proj.weight.bfloat16())


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary position embedding, halves convention (RoFormer, arXiv 2104.09864, as in transformers)."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat([-second, first], dim=-1) * sin_SD


class Layer(nn.Module):
    """Attention and sparse MLP, each behind a norm and added to the residual stream (float32)."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SparseMlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the stream behind the layer, the balance loss and the assignments per expert [E]."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), cos_SD, sin_SD)
        out_TH, balance, counts_E = self.mlp(self.post_attention_layernorm(x_BSH).flatten(0, 1))
        return x_BSH + out_TH.view_as(x_BSH), balance, counts_E


class Decoder(nn.Module):
    """Embedding, layers and last norm, under the names transformers gives them."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class TrainableMoe(nn.Module):
    """The language model with tied embeddings; its forward returns losses, not logits."""

    def __init__(self, config: Qwen3MoeConfig, *, seq_len: int) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.token_loss = token_loss
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles_SD = torch.outer(torch.arange(seq_len), _ROPE_THETA**-exponents).repeat(1, 2)
        self.register_buffer("cos_SD", angles_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angles_SD.sin(), persistent=False)

    def forward(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean cross-entropy in nats, mean balance loss and assignments [layers, E]."""
        x_BSH = self.model.embed_tokens(ids_BS)
        balances, counts = [], []
        for layer in self.model.layers:
            x_BSH, balance, counts_E = layer(x_BSH, self.cos_SD, self.sin_SD)
            balances.append(balance)
            counts.append(counts_E)
        x_TH = self.model.norm(x_BSH).flatten(0, 1)
        loss = self.token_loss(x_TH, self.model.embed_tokens.weight, targets_BS.flatten())
        return loss, torch.stack(balances).mean(), torch.stack(counts)

    def compile_parts(self) -> None:
        """Compile one layer (the code serves them all); costs about a minute, doubles the speed."""
        for layer in self.model.layers:
            layer.compile()
        self.token_loss = torch.compile(token_loss)


def token_loss(x_TH: Tensor, embedding_VH: Tensor, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy of the tied output head."""
    logits_TV = F.linear(x_TH.bfloat16(), embedding_VH.bfloat16())
    return F.cross_entropy(logits_TV.float(), targets_T)
