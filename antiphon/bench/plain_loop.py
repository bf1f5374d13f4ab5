"""Training without anything of ours, to hold our trainer against: transformers' model, PyTorch's AdamW, a loop, and
`DistributedDataParallel`, or `fully_shard` (FSDP2), where there are several ranks.

Parameters are in float32; bfloat16 is autocast, as the documentation of PyTorch advises. Of the ways transformers has
to run experts, the fastest here is found by trial.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from antiphon.specs.model import ModelSpec
from antiphon.train.model import Batch

EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
COMPILED_EXPERTS = "grouped_mm"
MOST_COPIED_BYTES = 1 << 30  # batched_mm copies the matrices of every (row, expert) pair


class PlainLoop:
    """The loop over the checkpoint in `folder`. Gradients are limited to the norm `clip`. In an initialized process
    group it is one rank of several, which have equally many targets of a step; `sharded`: each holds a share of every
    parameter, gradient and moment, layer by layer."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        betas: tuple[float, ...],
        eps: float,
        clip: float,
        *,
        sharded: bool = False,
    ) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.train()
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._sharded = sharded and self._ranks > 1
        self._alone: Any = copy.deepcopy(self._model) if self._sharded else None  # for what a pass takes without others
        self._whole_bytes: int = sum(each.numel() * each.element_size() for each in self._model.parameters())
        self._forward: Any = self._model
        if self._sharded:
            self._shard()
        elif self._ranks > 1:
            self._forward = DistributedDataParallel(self._model)
        self._dtype = dtype
        self._clip = clip
        self.optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(betas[0], betas[1]), eps=eps, weight_decay=0.0, fused=not self._sharded
        )

    def _shard(self) -> None:
        mesh = init_device_mesh("cpu", (self._ranks,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._model.parameters())

    def compile(self) -> None:
        """Run the model through `torch.compile` from here on, with the experts that it takes as they are."""
        self.use_experts(COMPILED_EXPERTS)
        self._forward = torch.compile(self._model)

    def use_experts(self, implementation: str) -> None:
        self._model.set_experts_implementation(implementation)
        if self._alone is not None:
            self._alone.set_experts_implementation(implementation)

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in a step, as `comm.ledger` counts: an all-reduce, or two all-gathers and a
        reduce-scatter."""
        times = 3 if self._sharded else 2
        return times * (self._ranks - 1) * self._whole_bytes // self._ranks

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch whose sequences are one document each."""
        assert batch.documents_BS is None, "a plain loop knows no documents"
        with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            logits = self._forward(batch.ids_BS, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets_BS.flatten())

    def step(self, batch: Batch, rate: float) -> float:
        """One update; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._mean(loss.item())

    def exposed_s(self, batch: Batch) -> float:
        """What a pass takes longer than one whose gradients stay here, on the rank that waits longest; weights stay as
        they are."""
        if self._ranks == 1:
            return 0.0
        with_others = self._trial_s(batch)
        if self._sharded:
            self._forward, whole = self._alone, self._forward
            try:
                alone = self._trial_s(batch)
            finally:
                self._forward = whole
        else:
            with self._forward.no_sync():
                alone = self._trial_s(batch)
        longest = torch.tensor(max(0.0, with_others - alone), dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def _mean(self, value: float) -> float:
        """Over all ranks."""
        if self._ranks == 1:
            return value
        sum_of_all = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(sum_of_all)
        return sum_of_all.item() / self._ranks

    def choose_experts(self, spec: ModelSpec, batch: Batch, say: Callable[[str], None]) -> str:
        """Try every implementation on `batch`, keep the fastest; weights stay as they are."""
        times_s: dict[str, float] = {}
        for name in EXPERTS_IMPLEMENTATIONS:
            if name == "batched_mm" and copied_bytes(spec, batch.ids_BS.numel()) > MOST_COPIED_BYTES:
                say("transformers' batched_mm is left out: it copies an expert's matrices for every row")
                continue
            self.use_experts(name)
            times_s[name] = self._mean(min(self._trial_s(batch) for _ in range(2)))
            say(f"transformers' experts as {name}: {times_s[name]:.2f} s forward and backward")
        fastest = min(times_s, key=lambda name: times_s[name])
        self.use_experts(fastest)
        return fastest

    def _trial_s(self, batch: Batch) -> float:
        started_s = time.perf_counter()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self._forward.zero_grad()
        return time.perf_counter() - started_s


def copied_bytes(spec: ModelSpec, num_rows: int) -> int:
    """What `batched_mm` copies for a layer, in float32."""
    return num_rows * spec.router.top_k * 3 * spec.hidden_size * spec.feed_forward.intermediate * 4
