"""Instances that fit: against packing worker by worker, on nodes of odd sizes too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.planner.candidates import HYBRID, Candidates
from antiphon.planner.rate_match import pools_fit
from antiphon.planner.room import domains_of, instances_that_fit, widest_domain
from tests.planner.serving_specimens import candidates, cluster, device, group


def apart(tp_a: int, dp: int, tp_e: int, workers: int, expert_kind: int = 0) -> Candidates:
    return candidates(expert_kind=expert_kind, attention_tp=tp_a, attention_dp=dp, expert_tp=tp_e, expert_ep=workers)


@pytest.mark.parametrize(
    ("domain", "devices", "nodes", "domains"),
    [
        (4, 4, 2, ((4, 2),)),
        (4, 7, 3, ((4, 3), (3, 3))),
        (72, 4, 18, ((72, 1),)),
        (16, 4, 5, ((16, 1), (4, 1))),
        (1, 3, 2, ((1, 6),)),
    ],
)
def test_domains(domain: int, devices: int, nodes: int, domains: tuple[tuple[int, int], ...]) -> None:
    spec = group(device(scale_up_domain=domain), nodes, devices)
    spec = type(spec)(**{**spec.__dict__, "scale_up_domain": domain})
    assert domains_of(spec) == domains
    assert widest_domain(spec) == domains[0][0]
    assert sum(size * count for size, count in domains) == nodes * devices


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_what_is_said_to_fit_can_be_packed(
    devices: int, nodes: int, tp_a: int, dp: int, tp_e: int, workers: int, expert_kind: int
) -> None:
    machines = cluster(group(device("a"), nodes, devices), group(device("b"), 2, 4))
    one = apart(tp_a, dp, tp_e, workers, expert_kind)
    fit = int(instances_that_fit(machines, one)[0])
    assert fit * tp_a * dp <= machines.groups[0].num_devices
    assert fit == 0 or pools_fit(machines, [(one, 0, fit)])
    assert fit * (tp_a * dp + (tp_e * workers if expert_kind == 0 else 0)) <= machines.groups[0].num_devices


def test_three_by_three_do_not_fit_on_eight() -> None:
    machines = cluster(group(device(scale_up_domain=8), 1, 8))
    assert instances_that_fit(machines, apart(3, 1, 3, 1)).tolist() == [1]
    assert instances_that_fit(machines, apart(3, 2, 3, 1)).tolist() == [0]
    assert instances_that_fit(machines, apart(3, 1, 1, 2)).tolist() == [1]
    assert instances_that_fit(machines, apart(2, 1, 1, 2)).tolist() == [2]


def test_pieces_of_a_stage_lie_in_different_domains() -> None:
    """Two nodes of 4: a stage of 2 x 2 has one piece on each, so two of them fit; three pieces have nowhere to go."""
    stages = candidates(
        layout=HYBRID,
        attention_tp=2,
        attention_dp=np.array([2, 3]),
        expert_tp=2,
        expert_ep=np.array([2, 3]),
        slots=4,
        piece_devices=2,
    )
    assert instances_that_fit(cluster(), stages).tolist() == [2, 0]
