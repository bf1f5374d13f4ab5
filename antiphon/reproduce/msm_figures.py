"""MegaScale-MoE's ablations by the cost model: Figures 14 to 17, memory of sequence parallelism, compression.

None of them chose the cluster's calibration: all rows are checks.
"""

from functools import cache, partial

from antiphon.cost.network import network
from antiphon.cost.training.gradient_sync import SyncBytes, sync_time
from antiphon.cost.training.megascale_models import NODE_DEVICES, TABLE_2
from antiphon.cost.training.memory import fullest_stage, rank_parameters, state_bytes
from antiphon.reproduce import shipped
from antiphon.reproduce.claim import Claim, ClaimMaker
from antiphon.reproduce.msm_cases import (
    H800,
    SETUPS,
    Variant,
    number,
    setup_of_one_node,
    step_for_memory,
    step_one_node,
)
from antiphon.reproduce.msm_fused import pair_speedups

MODELLED, GAIN, LEVEL = 0.2, 0.1, 0.15
_claim = ClaimMaker(paper="MSM", kind="modelled", cluster=H800)
KEPT_TENSORS = (
    "Tensor by tensor (Figure 9), those that some backward operator reads shrink by 41%. 57% is reached if the "
    "baseline also keeps what nothing reads (the gathered rows and the output of FC2), but then Mixtral-8x7B "
    "would save 54%, not 45.5%: no one list of tensors gives both."
)
NOT_STATED = (
    "The configuration is not stated. The two printed reductions imply that activations are {share} of all "
    "memory; with the shortest pipeline that fits and one sequence per micro-batch, as here, they are {ours}."
)


def claims() -> tuple[Claim, ...]:
    return (
        *_layouts(),
        *_overlap(),
        *_memory(),
        *_states(),
        *_sync(),
    )


def _layouts() -> tuple[Claim, ...]:
    return (
        _claim(
            "fig14-least",
            "Figure 14, section 6.2",
            "MFU of SP+EP over TP+TP on one node: least of the six models",
            1.149,
            lambda: min(_gains()),
            GAIN,
        ),
        _claim(
            "fig14-most",
            "Figure 14, section 6.2",
            "the same: most of the six models",
            1.329,
            lambda: max(_gains()),
            GAIN,
        ),
        _claim(
            "fig14-best",
            "Figure 14, section 6.2",
            "models of the six for which SP+EP is the best of the four layouts",
            6.0,
            lambda: float(sum(_best_layout(name) == "sp_ep" for name in TABLE_2)),
            unit="models",
        ),
    )


@cache
def _gains() -> tuple[float, ...]:
    return tuple(
        number(step_one_node(name, "sp_ep").mfu) / number(step_one_node(name, "tp_tp").mfu) for name in TABLE_2
    )


def _best_layout(name: str) -> Variant:
    layouts: tuple[Variant, ...] = ("tp_tp", "sp_tp", "tp_ep", "sp_ep")
    return max(layouts, key=lambda layout: number(step_one_node(name, layout).mfu))


def _overlap() -> tuple[Claim, ...]:
    return (
        _claim(
            "fig16-least",
            "Figure 16, section 6.2",
            "fused communication and product over one after the other: least of four pairs, six models",
            1.2,
            lambda: min(pair_speedups()),
            GAIN,
            reason="The least is the dispatch of Mixtral-8x22B: its grouped product takes nine times as long as the "
            "all-to-all, so that hiding all of it could gain 1.11 at most. The paper's fused kernel also scatters "
            "rows on the way.",
        ),
        _claim(
            "fig16-most",
            "Figure 16, section 6.2",
            "the same: most",
            4.7,
            lambda: max(pair_speedups()),
            LEVEL,
            reason="Overlap alone cannot give more than 2: the longer of two remains. 4.7 must include faster "
            "kernels (the fused ones scatter and gather rows on the way), which their baseline without overlap does "
            "not have.",
        ),
        _claim(
            "fig16-iteration-least",
            "section 6.2",
            "iteration time saved by intra-operator overlap: least of the six models",
            0.071,
            lambda: min(_intra_savings()),
            0.25,
            reason="On the 352B model, whose gain Table 5 prints as 5% (1.22 to 1.28), we find 3%, and section 6.2 "
            "prints at least 7.1%: the two sections cannot be met at once. The calibration was chosen with Table 5.",
        ),
        _claim(
            "fig16-iteration-most",
            "section 6.2",
            "the same: most",
            0.129,
            lambda: max(_intra_savings()),
            0.25,
            reason="Ours is DeepSeekMoE, whose narrow experts (1408) are small beside their exchange, so that hiding "
            "it gains more than in the paper. Without DeepSeekMoE our range ends at 11%.",
        ),
    )


@cache
def _intra_savings() -> tuple[float, ...]:
    return tuple(
        1 - number(step_one_node(name, "intra").iteration_s) / number(step_one_node(name, "inter").iteration_s)
        for name in TABLE_2
    )


def _memory() -> tuple[Claim, ...]:
    cases = (
        ("fig17-activations-8x7b", "Mixtral-8x7B", "activations", 0.455, ""),
        ("fig17-activations-8x22b", "Mixtral-8x22B", "activations", 0.572, KEPT_TENSORS),
        ("fig17-total-8x7b", "Mixtral-8x7B", "total", 0.213, NOT_STATED.format(share="47%", ours="about 15%")),
        ("fig17-total-8x22b", "Mixtral-8x22B", "total", 0.35, NOT_STATED.format(share="61%", ours="about 28%")),
    )
    reductions = tuple(
        _claim(
            id,
            "Figure 17, section 6.2",
            f"{name} on 128 H800: {'activation' if part == 'activations' else 'total'} memory saved by SAR",
            theirs,
            partial(_saved, name, part),
            MODELLED,
            reason=reason,
        )
        for id, name, part, theirs, reason in cases
    )
    return (
        *reductions,
        *(
            _claim(
                f"fig17-speed-{name.lower()}",
                "Figure 17, section 6.2",
                f"{name}: MFU with SAR over without, 'within 0.5%'",
                0.995,
                partial(_speed, name),
                0.005,
                relation="at_least",
                reason="What is made again are four memory-bound operators (two norms, the scatter, the activation) "
                "of a layer, 2% of its time. The paper hides them behind communication, our model adds computation "
                "up.",
            )
            for name in ("Mixtral-8x7B", "Mixtral-8x22B")
        ),
    )


def _states() -> tuple[Claim, ...]:
    return (
        _claim(
            "sp-memory-least",
            "section 6.2",
            "parameters, gradients, optimizer states: SP over TP attention, least of the models",
            1.017,
            lambda: min(_state_ratios()),
            0.02,
        ),
        _claim(
            "sp-memory-most",
            "section 6.2",
            "the same: most of the models",
            1.081,
            lambda: max(_state_ratios()),
            0.02,
            note="of Table 2's six models without shared experts; 'seven' in the text",
        ),
    )


def _saved(name: str, part: str) -> float:
    kept, everything = (step_for_memory(name, 128, how).memory for how in ("cheap", "none"))
    if part == "total":
        return 1 - number(kept.total) / number(everything.total)
    return 1 - number(kept.activations) / number(everything.activations)


def _speed(name: str) -> float:
    return number(step_for_memory(name, 128, "cheap").mfu) / number(step_for_memory(name, 128, "none").mfu)


@cache
def _state_ratios() -> tuple[float, ...]:
    """EP for experts on both sides, attention by SP against TP, one node (section 6.2)."""
    found = []
    for row in TABLE_2.values():
        if row.num_shared:
            continue
        model = row.model()
        layers = fullest_stage(model, 1)
        sizes = []
        for variant in ("sp_ep", "tp_ep"):
            setup = setup_of_one_node(SETUPS[variant], data_parallel=1)
            sizes.append(sum(number(part) for part in state_bytes(rank_parameters(model, setup, layers), setup)))
        found.append(sizes[0] / sizes[1])
    return tuple(found)


def _sync() -> tuple[Claim, ...]:
    return (
        _claim(
            "fig15-sync",
            "Figure 15, section 6.2",
            "parameter synchronisation, SP over TP attention: most of 384 to 1536 MB, 4 and 8 DP groups",
            1.031,
            lambda: max(_sync_ratios()),
            0.05,
        ),
        _claim(
            "compression-bytes",
            "section 5",
            "bytes of gradients on the wire, BF16 over FP32",
            0.5,
            lambda: _gradient_time(2.0) / _gradient_time(4.0),
            0.02,
        ),
    )


@cache
def _sync_ratios() -> tuple[float, ...]:
    """10 GB of experts per GPU; attention of P bytes on each GPU (SP) or P / 8 (TP)."""
    cluster = shipped.cluster(H800)
    net = network(cluster, cluster.groups[0])
    found = []
    for data_parallel in (4, 8):
        for attention_bytes in (384e6, 768e6, 1536e6):
            times = []
            for size in (
                SyncBytes(sharded=10e9, replicated=attention_bytes),
                SyncBytes(sharded=10e9 + attention_bytes / NODE_DEVICES, replicated=0.0),
            ):
                total = sync_time(
                    net, degree=NODE_DEVICES, data_parallel=data_parallel, gradients=size, parameters=size
                ).total
                times.append(number(total.total_s))
            found.append(times[0] / times[1])
    return tuple(found)


def _gradient_time(element_bytes: float) -> float:
    cluster = shipped.cluster(H800)
    size = SyncBytes(sharded=5e9 * element_bytes, replicated=0.0)
    return number(
        sync_time(
            network(cluster, cluster.groups[0]), degree=NODE_DEVICES, data_parallel=8, gradients=size, parameters=size
        ).gradients.total_s
    )
