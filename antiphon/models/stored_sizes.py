"""How many layers and experts a checkpoint holds, from the names of its tensors alone. No torch.

`config.json` says how much is allocated and how often loops run, so it is held against the weights first
(`models/tensors.check_sizes`). One pass over the names suffices: layers and experts are numbered in them. Layers that
predict further tokens (DeepSeek's multi-token prediction) lie behind the others and do not count.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import CheckpointError
from antiphon.models.names import PerExpertLayout, TensorNames
from antiphon.models.safetensors_header import read_header
from antiphon.models.shard_index import file_of_each_tensor

FURTHER_TOKENS = "eh_proj.weight"  # a tensor that only a layer for further tokens has
_NUMBER = "([0-9]{1,9})"


@dataclass(frozen=True)
class StoredCounts:
    """The layers there are, and how many experts a layer has where each has tensors of its own."""

    layers: frozenset[int]
    experts: dict[int, int]


def stored_counts(tensors: Iterable[str], names: TensorNames) -> StoredCounts:
    """What the names of all stored tensors say."""
    layer_name = re.compile(re.escape(names.layer).replace(re.escape("{layer}"), _NUMBER) + "(.+)")
    prefixes = [layout.names.prefix for layout in names.experts if isinstance(layout, PerExpertLayout)]
    expert_names = [re.compile(re.escape(prefix).replace(re.escape("{expert}"), _NUMBER)) for prefix in prefixes]
    layers: set[int] = set()
    further: set[int] = set()
    experts: dict[int, set[int]] = defaultdict(set)
    for name in tensors:
        if (found := layer_name.match(name)) is None:
            continue
        layer, rest = int(found[1]), found[2]
        (further if rest == FURTHER_TOKENS else layers).add(layer)
        for pattern in expert_names:
            if (expert := pattern.match(rest)) is not None:
                experts[layer].add(int(expert[1]))
    return StoredCounts(frozenset(layers - further), {layer: len(found) for layer, found in experts.items()})


def evidence_of(folder: Path, names: TensorNames) -> str:
    """What the weights in `folder` say of the sizes, for an error about config.json; nothing if there are none."""
    try:
        file_of, _ = file_of_each_tensor(folder)
        file = file_of.get(names.embedding)
        embedding = None if file is None else read_header(folder / file).get(names.embedding)
    except CheckpointError:
        return ""
    stored = stored_counts(file_of, names)
    parts = [f"{len(stored.layers)} layers"]
    if stored.experts:
        parts.append(f"{max(stored.experts.values())} experts")
    if embedding is not None and len(embedding.shape) == 2:
        parts += [f"{embedding.shape[0]} tokens", f"a hidden size of {embedding.shape[1]}"]
    return "the weights have " + ", ".join(parts)
