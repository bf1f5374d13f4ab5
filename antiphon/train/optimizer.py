"""What moves the parameters: AdamW, or Muon for matrices and AdamW for the rest; and the rate over the steps.

Decayed are matrices: not norms, biases and sinks. The router is not decayed either: pulled towards zero it loses the
differences that it routes by.

Muon (Jordan 2024; Liu 2025, arXiv 2502.16982) steps along the orthogonal matrix nearest to the gradient's momentum. Per
token it learns faster than AdamW. Each expert's gate, up and down projection and each attention head is a matrix of its
own; embedding, head, router, norms and biases have no such form and stay with AdamW. A step's size is made to match
AdamW's, so one learning rate serves both. Where ranks hold slices of a matrix (tensor parallelism), the slices are
gathered first. Rejected: `torch.optim.Muon`, which takes matrices one by one, whole, and no stacks of experts.

Patterns freeze parameters or change their rate, by names such as "layers.3.router". What is frozen has no moments, is
not decayed, and does not count in the norm of the gradient; its gradient is computed all the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.collectives import AllGather, gather_sizes, run
from antiphon.comm.mesh import Group, Mesh
from antiphon.kernels import native_rows
from antiphon.specs.model import ModelSpec
from antiphon.train.bucket import Matrices, Piece
from antiphon.train.config_tables import CommunicationConfig, OptimizerConfig
from antiphon.train.device import HOST
from antiphon.train.model import MoeModel
from antiphon.train.offload import MOMENTS_OF_ADAMW, MappedParts, layer_of, moments_of
from antiphon.train.shards import Shards
from antiphon.train.weights import DOWN, GATE_UP, layer_parameters, outer_parameters

_MUON_MOMENTUM = 0.95


class Optimizer:
    """Over the pieces of `shards`. `offload_folder`: where AdamW's moments are mapped (`train.offload`), None: they are
    in memory; `experts`: where parameters are mapped already. `mapped`: both."""

    def __init__(
        self,
        model: MoeModel,
        shards: Shards,
        config: OptimizerConfig,
        offload_folder: Path | None = None,
        experts: MappedParts | None = None,
    ) -> None:
        self._config = config
        _check_patterns(config, parameter_names(model))
        self._frozen = [piece for piece in shards.pieces if is_frozen(piece.name, config)]
        self._pieces = [piece for piece in shards.pieces if not is_frozen(piece.name, config)]
        self._shards = shards
        plain = [piece for piece in self._pieces if piece.matrices is None]
        self._muon = Muon(
            [piece for piece in self._pieces if piece.matrices is not None],
            model.mesh,
            weight_decay=config.weight_decay,
            factors=config.rates,
        )
        self._moments = None if offload_folder is None else moments_of(plain, offload_folder)
        self.mapped = [each for each in (self._moments, experts) if each is not None]
        self._adamws = {number: self._adamw_of(pieces, number) for number, pieces in self._by_part(plain).items()}

    def _by_part(self, pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
        """By layer where moments are mapped, else all in one."""
        found: dict[int, list[Piece]] = {}
        for piece in pieces:
            found.setdefault(-1 if self._moments is None else layer_of(piece.name), []).append(piece)
        return found

    def _adamw_of(self, pieces: Sequence[Piece], number: int) -> torch.optim.AdamW:
        config, by_kind = self._config, dict[tuple[bool, float], list[Tensor]]()
        for piece in pieces:
            by_kind.setdefault((_is_decayed(piece), factor_of(piece.name, config.rates)), []).append(piece.values)
        groups = [
            {"params": values, "weight_decay": config.weight_decay if decayed else 0.0, "factor": factor}
            for (decayed, factor), values in by_kind.items()
        ]
        beta1, beta2 = config.betas
        adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(beta1, beta2), eps=config.eps, fused=True)
        if self._moments is not None:
            self._moments.begin(number)
            for piece in pieces:
                room = [self._moments.room(piece.values.numel(), piece.values.dtype) for _ in range(MOMENTS_OF_ADAMW)]
                adamw.state[piece.values] = {
                    "step": torch.tensor(0.0, device=HOST),
                    "exp_avg": room[0],
                    "exp_avg_sq": room[1],
                }
            self._moments.give_up(number)
        return adamw

    def forget_frozen(self) -> None:
        """Drop the gradients of what is frozen; to be called before their norm is taken."""
        for piece in self._frozen:
            piece.values.grad = None

    def step(self, rate: float, scale: Tensor | None = None) -> None:
        """Move every piece along its gradient times `scale`, AdamW's by `rate`, and forget the gradients. On CPUs
        AdamW's is one native pass, which scales too."""
        is_native = not self._muon.state and all(_has_kernel(piece.values) for piece in self._pieces)
        if scale is not None and not is_native:
            self._shards.scale(scale)
        numbers = list(self._adamws)
        for number, behind in zip(numbers, [*numbers[1:], -2], strict=False):  # -2: nothing is behind the last
            for parts in self.mapped:
                parts.fetch(behind)
            for group in self._adamws[number].param_groups:
                group["lr"] = rate * group["factor"]
            if is_native:
                _step_natively(self._adamws[number], 1.0 if scale is None else float(scale))
            else:
                self._adamws[number].step()
            for parts in self.mapped:
                parts.give_up(number)
        self._muon.step(rate * self._config.muon_scale)
        self._shards.zero_grad()

    def count_step(self) -> None:
        """As `step` counts, and nothing moves: AdamW's correction follows the steps of the run, as in a checkpoint."""
        for piece in self._pieces:
            if piece not in self._muon.state:
                self._adamw_state(piece)["step"] += 1

    def _adamw_state(self, piece: Piece) -> dict[str, Tensor]:
        return _state_of(self._adamws[-1 if self._moments is None else layer_of(piece.name)], piece.values)

    def moments(self, step: int) -> Iterator[tuple[str, Piece, Tensor]]:
        """All that is remembered between steps, `step` of which are done: what it is, whose, and the tensor itself,
        flat as the piece is."""
        for piece in self._pieces:
            if piece in self._muon.state:
                state: dict[str, Tensor] = self._muon.state[piece]
            else:
                state = self._adamw_state(piece)
                state["step"] = torch.tensor(float(step), device=piece.values.device)
            yield from ((key, piece, value) for key, value in state.items() if key != "step")


def _state_of(adamw: torch.optim.AdamW, values: Tensor) -> dict[str, Tensor]:
    state: dict[str, Tensor] = adamw.state[values]
    if not state:  # before its first step
        state |= {key: torch.zeros_like(values) for key in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.tensor(0.0, device=values.device)
        adamw.state[values] = state
    return state


def _has_kernel(values: Tensor) -> bool:
    return values.dtype == torch.float32 and native_rows.takes(values)


@torch.no_grad()
def _step_natively(adamw: torch.optim.AdamW, scale: float) -> None:
    """As `adamw.step` does it, along gradients times `scale`."""
    for group in adamw.param_groups:
        for values in group["params"]:
            if values.grad is None:
                continue
            state = _state_of(adamw, values)
            state["step"] += 1
            native_rows.adamw(
                *(values, values.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]),
                step=int(state["step"]),
                scale=scale,
                rate=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )


def parameter_names(model: MoeModel) -> list[str]:
    """The names of all parameters of the whole model, as patterns see them."""
    spec = model.spec
    outer = [each.attribute for each in outer_parameters(spec)]
    return (
        outer
        + [f"layers.{n}.{each.attribute}" for n in range(spec.num_layers) for each in layer_parameters(spec, n)]
        + [name for name, _ in model.named_parameters() if name.startswith(f"layers.{spec.num_layers}.")]
    )


def is_frozen(name: str, config: OptimizerConfig) -> bool:
    """Whether this parameter keeps its bits: the last pattern that matches decides."""
    frozen = False
    for pattern in config.frozen:
        if fnmatchcase(name, pattern.removeprefix("!")):
            frozen = not pattern.startswith("!")
    return frozen


def factor_of(name: str, rates: Mapping[str, float]) -> float:
    """The factor of the learning rate: that of the last pattern that matches."""
    return [1.0, *(factor for pattern, factor in rates.items() if fnmatchcase(name, pattern))][-1]


def _check_patterns(config: OptimizerConfig, names: Sequence[str]) -> None:
    for key, patterns in (("frozen", config.frozen), ("rates", config.rates)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
                kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
                raise UserError(
                    f"optimizer.{key}: {pattern!r} matches no parameter: names are like {names[0]} and {names[-1]}, "
                    f"their last parts {kinds}: write for example '*.{names[-1].rpartition('.')[2]}'"
                )
    if all(is_frozen(name, config) for name in names):
        raise UserError("optimizer.frozen freezes all parameters, so nothing would be trained: leave some out")


def shards_of(
    model: MoeModel,
    zero: int,
    config: OptimizerConfig,
    communication: CommunicationConfig = CommunicationConfig(),
) -> Shards:
    """The shards that the optimizer of `config` works on. Made by all ranks together."""
    if config.name != "muon":
        return Shards(model, zero, communication=communication)
    return Shards(model, zero, lambda purpose, shape: matrices_of(model.spec, purpose, shape), communication)


def _is_decayed(piece: Piece) -> bool:
    return len(piece.part.shape) > 1 and piece.purpose != "router" and not piece.purpose.endswith("bias")


def rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step `step` (the first is 0) of `num_steps`."""
    return config.learning_rate * _share_at(step, num_steps, config)


def _share_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.schedule == "wsd":
        left = max(0.0, 1.0 - step / num_steps)
        falling = min(1.0, left / config.decay_part) if config.decay_part else 1.0
        return config.final_rate + (1 - config.final_rate) * falling
    return 1.0


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def matrices_of(spec: ModelSpec, purpose: str, shape: tuple[int, ...]) -> tuple[Matrices, ...]:
    """What Muon takes of a parameter that is `shape` here, in the order of memory; nothing: AdamW takes it."""
    if len(shape) < 2:
        return ()
    attention, latent = spec.attention, spec.attention.latent
    rows_of = {
        GATE_UP: shape[-2] // 2,
        DOWN: shape[-2],
        "dense.gate_up": shape[-2] // 2,
        "dense.down": shape[-2],
        "shared.gate_up": shape[-2] // 2,
        "shared.down": shape[-2],
        "qkv": attention.head_dim,
        "q_up": attention.head_dim,
        "out": shape[-2],
    }
    if latent is not None:
        rows_of["kv_up"] = latent.qk_nope_head_dim + latent.v_head_dim
        if purpose == "down":  # of queries, by head unless they have a latent too; then of keys and values
            queries = shape[0] - latent.key_dim
            rows = attention.head_dim if latent.q_lora_rank is None else queries
            return Matrices(queries // rows, rows, shape[1]), Matrices(1, latent.key_dim, shape[1])
    rows = rows_of.get(purpose, 0)
    return (Matrices(math.prod(shape[:-1]) // rows, rows, shape[-1]),) if rows else ()


_SLICED = {"out": ("tensor", 1), GATE_UP: ("expert_tensor", 0), DOWN: ("expert_tensor", 1)}


class Muon:
    """Updates pieces that are matrices, in place. `momentum` of each is its state."""

    def __init__(
        self, pieces: Sequence[Piece], mesh: Mesh, *, weight_decay: float, factors: Mapping[str, float]
    ) -> None:
        """`factors`: of the rate, by pattern."""
        self.state = {piece: {"momentum": torch.zeros_like(piece.values)} for piece in pieces}
        self._weight_decay = weight_decay
        self._alike: dict[tuple[int, int, str, int, float], list[Piece]] = {}
        for piece in pieces:
            assert piece.matrices is not None
            axis, dim = _SLICED.get(piece.purpose, ("", 0))
            if axis not in piece.part.axes:
                axis = ""
            factor = factor_of(piece.name, factors)
            self._alike.setdefault((piece.matrices.rows, piece.matrices.columns, axis, dim, factor), []).append(piece)
        self._groups = {axis: mesh.group(axis) for axis in ("tensor", "expert_tensor")}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Waits for the ranks that hold slices of the same matrices."""
        for (rows, columns, axis, dim, factor), pieces in self._alike.items():
            own_rate = rate * factor
            updates = torch.cat([self._update(piece).view(-1, rows, columns) for piece in pieces])
            directions = self._directions(updates, own_rate, axis, dim).flatten()
            sizes = [piece.values.numel() for piece in pieces]
            for piece, each in zip(pieces, torch.split(directions, sizes), strict=True):
                piece.values.detach().mul_(1 - own_rate * self._weight_decay).sub_(each)

    def _update(self, piece: Piece) -> Tensor:
        gradient, momentum = piece.values.grad, self.state[piece]["momentum"]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - _MUON_MOMENTUM)
        return gradient.lerp(momentum, _MUON_MOMENTUM)

    def _directions(self, updates: Tensor, rate: float, axis: str, dim: int) -> Tensor:
        """[N, rows, columns]: what is to be subtracted; `axis`: whose ranks hold slices along dimension `dim` of each
        matrix."""
        whole, first = updates, 0
        if axis:
            whole, first = _joined(self._groups[axis], updates, dim + 1)
        scaled: Tensor = orthogonal(whole) * (rate * 0.2 * max(whole.shape[-2:]) ** 0.5)
        return scaled.narrow(dim + 1, first, updates.shape[dim + 1]) if axis else scaled


def _joined(group: Group, x: Tensor, dim: int) -> tuple[Tensor, int]:
    """(slices of all ranks along `dim`, where this rank's begins)."""
    sizes = gather_sizes(group, x.shape[dim], HOST)
    joined: Tensor = run(AllGather(group, "matrices", sizes), x.movedim(dim, 0).contiguous())
    found: Tensor = joined.movedim(0, dim)
    return found, sum(sizes[: group.index])


def orthogonal(x: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrices of [N, rows, columns], by five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=_EPS)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    found: Tensor = y.mT if tall else y
    return found
