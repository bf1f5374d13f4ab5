"""cos and sin of every position from a `RopeSpec`, for each long-context scaling of the supported families.

A table is made once, for a fixed number of positions, so a row's rotation depends on its own position only: never on
its neighbours, on chunking, or on how long the sequence will become. Two scalings in the wild do depend on the length:
- dynamic NTK: the base follows the number of positions of the table; up to the trained length nothing changes;
- LongRoPE: positions below the trained length use the short factors, the others the long ones, which is what
  a model that decodes past that length with a cache does.
Rejected: switching tables by sequence length, which makes cached keys of a shared prefix wrong for one of its users.

Letters: P positions, R half the rotated width.
"""

import math

import torch
from torch import Tensor

from antiphon.kernels.api import RotaryTable
from antiphon.models.families.config_keys import yarn_magnitude
from antiphon.specs.model import RopeSpec


def rotary_table(rope: RopeSpec, num_positions: int, device: torch.device) -> RotaryTable:
    """Table for positions 0 to `num_positions` - 1."""
    if rope.scaling == "longrope":
        split = min(num_positions, rope.original_max_position)
        parts = [
            _angles(_longrope_frequencies(rope, "short"), 0, split, _longrope_magnitude(rope, "short")),
            _angles(_longrope_frequencies(rope, "long"), split, num_positions, _longrope_magnitude(rope, "long")),
        ]
        cos, sin = (torch.cat(halves) for halves in zip(*parts, strict=True))
    else:
        frequencies, magnitude = _frequencies(rope, num_positions)
        cos, sin = _angles(frequencies, 0, num_positions, magnitude)
    return RotaryTable(cos=cos.to(device), sin=sin.to(device), interleaved=rope.interleaved)


def unrotated(table: RotaryTable) -> RotaryTable:
    """The table that rotates nothing, for rows whose rotation was done before."""
    return RotaryTable(cos=table.cos[:, :0], sin=table.sin[:, :0], interleaved=table.interleaved)


def _angles(frequencies_R: Tensor, first: int, last: int, magnitude: float) -> tuple[Tensor, Tensor]:
    angles_PR = torch.arange(first, last, dtype=torch.float32).unsqueeze(1) * frequencies_R
    return angles_PR.cos().mul_(magnitude), angles_PR.sin().mul_(magnitude)


def _base_frequencies(dim: int, theta: float) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _frequencies(rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """Frequencies [R] and the factor on cos and sin."""
    if rope.scaling == "linear":
        return _base_frequencies(rope.dim, rope.theta) / _number(rope, "factor"), 1.0
    if rope.scaling == "dynamic":
        return _base_frequencies(rope.dim, _dynamic_theta(rope, num_positions)), 1.0
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope), 1.0
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope), _yarn_factor(rope)
    return _base_frequencies(rope.dim, rope.theta), 1.0


def _dynamic_theta(rope: RopeSpec, num_positions: int) -> float:
    """NTK-aware base that keeps the lowest frequency within the trained range."""
    factor, stretch = _number(rope, "factor"), max(num_positions, rope.max_position) / rope.max_position
    return rope.theta * float((factor * stretch - (factor - 1)) ** (rope.dim / (rope.dim - 2)))


def _llama3_frequencies(rope: RopeSpec) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    frequencies = _base_frequencies(rope.dim, rope.theta)
    low, high, factor = (_number(rope, key) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def _yarn_frequencies(rope: RopeSpec) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dims between full interpolation and none."""
    frequencies = _base_frequencies(rope.dim, rope.theta)
    fast, slow = _number(rope, "beta_fast", 32.0), _number(rope, "beta_slow", 1.0)

    def dim_of(rotations: float) -> float:
        wave = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dim_of(fast), dim_of(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / _number(rope, "factor") * ramp + frequencies * (1.0 - ramp)


def _yarn_factor(rope: RopeSpec) -> float:
    if rope.parameters.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    factor = _number(rope, "factor")
    mscale, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def _longrope_frequencies(rope: RopeSpec, length: str) -> Tensor:
    """LongRoPE (arXiv 2402.13753): each frequency divided by a searched factor."""
    factors = rope.parameters[f"{length}_factor"]
    return _base_frequencies(rope.dim, rope.theta) / torch.tensor(factors, dtype=torch.float32)


def _longrope_magnitude(rope: RopeSpec, length: str) -> float:
    for key in (f"{length}_mscale", "attention_factor"):
        if rope.parameters.get(key) is not None:
            return _number(rope, key)
    stretch = _number(rope, "factor", rope.max_position / rope.original_max_position)
    if stretch <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(stretch) / math.log(rope.original_max_position))


def _number(rope: RopeSpec, key: str, default: float | None = None) -> float:
    value = rope.parameters.get(key, default)
    assert isinstance(value, (int, float)), f"{rope.scaling} needs the number {key}, got {value!r}"
    return float(value)
