"""Whether this machine has the devices that a plan is to be made for. Asks the system: planning needs no torch."""

from pathlib import Path

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.specs.cluster import ClusterSpec

CLUSTER_FILE, PROFILE_FILE = "this-machine.json", "profile.json"  # of `antiphon profile`, in one folder

_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder for each


def check_is_here(cluster: ClusterSpec) -> None:
    """`UserError` unless this machine has the cluster's devices."""
    for group in cluster.groups:
        here = allowance().num_cores if group.device.kind == "cpu" else len(list(_GPUS.glob("*")))
        if group.num_devices > here:
            what = "core(s)" if group.device.kind == "cpu" else "GPU(s)"
            raise UserError(
                f"--cluster {cluster.name} has {group.num_devices} devices of {group.device.name}, this machine has "
                f"{here} {what}: give a smaller cluster, or its file as --nodes FILE if these machines are to run it"
            )
