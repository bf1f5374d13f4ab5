"""Activations of one MoE layer, tensor by tensor (MegaScale-MoE, Figure 9), and which of them the backward pass needs.

1. Sizes are in elements per tokens * hidden / n, the share of one rank of a model-parallel group of n: `width`.
2. "All" adds up to 2n + 2k + 3kf + 12 + 5/m, what MegaScale-MoE keeps to 2kf + 4 + 2/m (m query heads per key/value
   head, f = expert width / hidden).
3. Many of "all" no backward operator reads (sums, rotated copies, what was gathered before a scatter): a framework that
   frees them holds `needed`, and that is what rematerialization really saves.
4. With all-to-all dispatch nothing is gathered: k rows stand where all-gather has n.

The figure's colours are not in the text: which tensors are kept is inferred from the sum, which leaves one choice
(attention's output before or after its all-to-all has the same size; before is what attention's backward reads).
Rejected: one coefficient per strategy. It cannot say what a tensor costs to make again.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from antiphon.cost.parts import Number
from antiphon.specs.model import ModelSpec

Dispatch = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class SavedActivation:
    """One tensor. `kept`: by MegaScale-MoE's rematerialization; `needed`: some backward operator reads it."""

    name: str
    width: Number
    kept: bool = False
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The ratios that decide a layer's activations. `sent`: copies of a token in an all-to-all (k, or less). `query`,
    `value`: widths of all heads' queries and of attention's output over hidden (1 in all of the paper's models)."""

    degree: Number
    top_k: Number
    width_ratio: Number
    heads_per_kv_head: Number
    sent: Number
    query: Number = 1.0
    value: Number = 1.0

    @staticmethod
    def of(model: ModelSpec, degree: Number, copies: Number | None = None) -> "LayerShape":
        """The shape of `model`'s MoE layers on `degree` ranks. Latent attention counts as m = 1: expanded, every
        head has keys and values of its own."""
        attention = model.attention
        latent = attention.latent
        heads_per_kv_head = 1.0 if latent is not None else attention.num_heads / attention.num_kv_heads
        value_dim = attention.head_dim if latent is None else latent.v_head_dim
        return LayerShape(
            degree=degree,
            top_k=model.router.top_k,
            width_ratio=model.feed_forward.intermediate / model.hidden_size,
            heads_per_kv_head=heads_per_kv_head,
            sent=model.router.top_k if copies is None else copies,
            query=attention.num_heads * attention.head_dim / model.hidden_size,
            value=attention.num_heads * value_dim / model.hidden_size,
        )


def layer_activations(
    shape: LayerShape, dispatch: Dispatch = "all_gather", *, gate_after_down: bool = False
) -> tuple[SavedActivation, ...]:
    """Figure 9's tensors in order. `gate_after_down`: the router's weight multiplies after the down projection (section
    7, for FP8) and not before it (section 4.1), so that its gradient needs the down projection's output."""
    k, f, m = shape.top_k, shape.width_ratio, np.asarray(shape.heads_per_kv_head, dtype=np.float64)
    query = shape.query
    around = shape.degree if dispatch == "all_gather" else shape.sent
    return (
        SavedActivation(name="hidden", width=1.0, kept=True, needed=True),
        SavedActivation(name="ln1_out", width=1.0, needed=True),
        SavedActivation(name="qkv", width=query * (1 + 2 / m)),
        SavedActivation(name="q_rope", width=query),
        SavedActivation(name="k_rope", width=query / m),
        SavedActivation(name="qkv_a2a", width=query * (1 + 2 / m), kept=True, needed=True),
        SavedActivation(name="attn", width=shape.value, kept=True, needed=True),
        SavedActivation(name="attn_a2a", width=shape.value, needed=True),
        SavedActivation(name="attn_out", width=1.0),
        SavedActivation(name="ln2_in", width=1.0, kept=True, needed=True),
        SavedActivation(name="ln2_out", width=1.0, needed=True),
        SavedActivation(name="ln2_out_ag", width=around),
        SavedActivation(name="ffn_in", width=k, needed=True),
        SavedActivation(name="fc1_out", width=k * f, kept=True, needed=True),
        SavedActivation(name="fc3_out", width=k * f, kept=True, needed=True),
        SavedActivation(name="fc2_in", width=k * f, needed=True),
        SavedActivation(name="fc2_out", width=k, kept=gate_after_down, needed=gate_after_down),
        SavedActivation(name="fc2_out_rs", width=around),
        SavedActivation(name="ffn_out", width=1.0),
        SavedActivation(name="hidden_next", width=1.0),
    )


def total_width(activations: tuple[SavedActivation, ...], which: Literal["all", "needed", "kept"] = "all") -> Number:
    """Sum of the widths of all tensors, of those a backward operator reads, or of those that are kept."""
    total: Number = 0.0
    for activation in activations:
        if which == "all" or (activation.needed if which == "needed" else activation.kept):
            total = total + activation.width
    return total
