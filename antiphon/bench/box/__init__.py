"""A cluster in a box: network namespaces as nodes of one Linux machine. The guide is docs/box.md.

`cluster.py` has the interface, `Box`. `topology.py` says what a box consists of (addresses, shaping) and why, and who
runs what in it; `namespaces.py` is the process that holds it, without names on disk, and says why nothing survives its
owner; `keeper.py` talks to that process, and to those that it starts. `benchmarks/box.py` is the command.
"""

from .cluster import Box, LinkCounters
from .keeper import BoxError, BoxUnavailable, NodeProcess, box_unavailable

__all__ = ["Box", "BoxError", "BoxUnavailable", "LinkCounters", "NodeProcess", "box_unavailable"]
