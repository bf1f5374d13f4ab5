"""Optima by HiGHS: of a split, a linear program, and of a placement, a mixed integer one. Too slow for serving."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, eye_array, hstack, kron, vstack


def best_split(counts: np.ndarray, held: np.ndarray, speeds: np.ndarray | None) -> float:
    """Time of the busiest worker: min t over x >= 0 with sum_j x_ij = n_i and sum_i x_ij <= speed_j t."""
    experts, workers = np.nonzero(held)
    num_experts, num_workers = held.shape
    speeds = np.ones(num_workers) if speeds is None else speeds
    ones, parts = np.ones(len(experts)), np.arange(len(experts))
    of_experts = coo_array((ones, (experts, parts)), shape=(num_experts, len(parts)))
    of_workers = coo_array((ones, (workers, parts)), shape=(num_workers, len(parts)))
    result = linprog(
        np.append(np.zeros(len(parts)), 1.0),
        A_ub=hstack([of_workers, -speeds[:, None]]),
        b_ub=np.zeros(num_workers),
        A_eq=hstack([of_experts, np.zeros((num_experts, 1))]),
        b_eq=counts,
    )
    assert result.success, result.message
    return float(result.fun)


def best_placement(costs: np.ndarray, num_workers: int, slots: int, speeds: np.ndarray) -> float:
    """Time of the busiest worker, within 0.1%: as above with x_ij <= y_ij, y_ij 0 or 1, sum_i y_ij <= slots, where x
    are shares of an expert's cost. Variables: x by expert and worker, y the same, t."""
    num_experts = costs.size
    size = num_experts * num_workers
    of_expert = kron(eye_array(num_experts), np.ones((1, num_workers)))
    of_worker = kron(np.ones((1, num_experts)), eye_array(num_workers))
    load = kron(costs[None], eye_array(num_workers))
    none, last = coo_array((num_workers, size)), coo_array((num_workers, 1))
    rows = vstack(
        [
            hstack([of_expert, coo_array((num_experts, size + 1))]),
            hstack([eye_array(size), -eye_array(size), coo_array((size, 1))]),
            hstack([none, of_worker, last]),
            hstack([load, none, -speeds[:, None]]),
        ]
    )
    ones = np.ones(num_experts)
    upper = np.concatenate([ones, np.zeros(size), np.full(num_workers, slots), np.zeros(num_workers)])
    lower = np.concatenate([ones, np.full(size + 2 * num_workers, -np.inf)])
    result = milp(
        np.append(np.zeros(2 * size), 1.0),
        constraints=LinearConstraint(rows.tocsr(), lower, upper),
        integrality=np.concatenate([np.zeros(size), np.ones(size), [0.0]]),
        bounds=Bounds(0.0, np.append(np.ones(2 * size), np.inf)),
        options={"mip_rel_gap": 1e-3, "time_limit": 60.0},
    )
    assert result.success, result.message
    return float(result.fun)
