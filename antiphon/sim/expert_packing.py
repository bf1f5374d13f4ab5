"""What packing several experts on a device does to a layer's all-to-all and to pipelining (Lina sections 4.2, 7.2.1).

N experts on N devices, p per device: all-to-all runs in groups of N/p devices, each device sending an equal share of
its rows to every member of its group. Fewer members means a larger share stays on the device or its node; the slower of
the two networks sets the time. The rows a device computes stay the same in number; each expert gets 1/p of them, so
that the FFN takes between as long as before (`ffn_growth` 1: time follows rows) and p times as long (time follows
kernels). Rejected: one measured factor for all packings, which says nothing about another cluster.
"""

from dataclasses import dataclass, replace

from antiphon.base.errors import UserError
from antiphon.comm.micro_ops import PackingStep, choose_experts_per_device
from antiphon.sim.training_step import BackwardLayer


@dataclass(frozen=True, kw_only=True)
class PackingNetwork:
    """Devices and what each can send: `inter_bytes_per_s` is a device's share of its node's network card."""

    num_devices: int
    devices_per_node: int
    inter_bytes_per_s: float
    intra_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node", "inter_bytes_per_s", "intra_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"packing network: {name} is {getattr(self, name)}: give more than 0")

    def all_to_all_s(self, size_bytes: float, experts_per_device: int) -> float:
        """`size_bytes` of rows per device, spread evenly over its group of N / experts_per_device devices."""
        if experts_per_device < 1 or self.num_devices % experts_per_device:
            raise UserError(
                f"{experts_per_device} experts per device for {self.num_devices} experts on as many devices: "
                "give a divisor, so that every group holds each expert once"
            )
        group = self.num_devices // experts_per_device
        inside = min(group, self.devices_per_node)
        intra_bytes = size_bytes * (inside - 1) / group
        inter_bytes = size_bytes * (group - inside) / group
        return max(intra_bytes / self.intra_bytes_per_s, inter_bytes / self.inter_bytes_per_s)


def packed_layer(
    layer: BackwardLayer, network: PackingNetwork, experts_per_device: int, ffn_growth: float = 1.0
) -> BackwardLayer:
    """`layer`, whose times are of one expert per device, with more; its FFN takes `ffn_growth` times as long."""
    if not 1 <= ffn_growth <= experts_per_device:
        raise UserError(f"ffn_growth of {ffn_growth}: give 1 to {experts_per_device}, the number of packed experts")
    unpacked_s = network.all_to_all_s(1.0, 1)
    shrunk = network.all_to_all_s(1.0, experts_per_device) / unpacked_s if unpacked_s else 0.0
    return replace(layer, all_to_all_s=layer.all_to_all_s * shrunk, ffn_s=layer.ffn_s * ffn_growth)


def choose_packing(layer: BackwardLayer, network: PackingNetwork) -> list[PackingStep]:
    """Lina's search with the times of this model, FFN time following rows."""

    def measure(experts_per_device: int) -> tuple[float, float]:
        packed = packed_layer(layer, network, experts_per_device)
        return packed.ffn_s, packed.all_to_all_s

    return choose_experts_per_device(measure, network.num_devices)
