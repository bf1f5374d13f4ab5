"""Whether MegaScale-MoE's Table 3 agrees with itself, and the MFU that follows from its throughputs."""

from functools import partial

from antiphon.cost.training.flops import model_flops_utilization, tokens_per_s
from antiphon.cost.training.megascale_models import (
    SEQUENCE_LENGTH,
    TABLE_3,
    TABLE_3_BATCH,
    Measured,
    Name,
)
from antiphon.reproduce import shipped
from antiphon.reproduce.claim import Claim, digit

PRINTED_DAYS = {
    "megatron": {240: 76.61, 480: 38.38, 720: 26.88, 960: 21.23, 1440: 15.50},
    "megascale": {240: 42.41, 480: 23.21, 720: 15.64, 960: 12.01, 1440: 8.22},
}
PRINTED_MFU = {240: 0.3248, 1440: 0.2789}


def claims() -> tuple[Claim, ...]:
    return (
        *_table_3(),
        *_utilization(),
    )


def _table_3() -> tuple[Claim, ...]:
    found = []
    for system, lines in TABLE_3.items():
        for line in lines:
            printed_days = PRINTED_DAYS[system][line.num_devices]
            found += [
                Claim(
                    id=f"msm-table3-{system}-{line.num_devices}-tokens",
                    paper="MSM",
                    source="Table 3",
                    what=f"{system}, {line.num_devices} GPUs: 720 sequences of 8192 tokens over the printed time",
                    theirs=line.printed_tokens_per_s,
                    ours=partial(_rate, line),
                    unit="tokens/s",
                    tolerance=digit(line.printed_tokens_per_s, 100) + digit(line.iteration_s, 0.01),
                    kind="counted",
                    reason=_table_3_reason(system, line),
                ),
                Claim(
                    id=f"msm-table3-{system}-{line.num_devices}-days",
                    paper="MSM",
                    source="Table 3",
                    what=f"{system}, {line.num_devices} GPUs: days for 10^12 tokens at the printed throughput",
                    theirs=printed_days,
                    ours=partial(_days, line),
                    unit="days",
                    tolerance=digit(printed_days, 0.01) + digit(line.printed_tokens_per_s, 100),
                    kind="counted",
                    reason=f"{printed_days} days follow from the printed iteration time, not from the printed "
                    "throughput, which is a misprint (the tokens row of the same line).",
                ),
            ]
    return tuple(found)


def _rate(line: Measured) -> float:
    return float(tokens_per_s(SEQUENCE_LENGTH, TABLE_3_BATCH, line.iteration_s))


def _days(line: Measured) -> float:
    return 1e12 / line.printed_tokens_per_s / 86400


def _table_3_reason(system: Name, line: Measured) -> str:
    ours = float(tokens_per_s(SEQUENCE_LENGTH, TABLE_3_BATCH, line.iteration_s))
    wrong = (
        "the printed speed-up (1.81) and days (76.61) follow from the throughput, so the time is the misprint (39.03 "
        "s fits)"
        if line.num_devices == 240
        else "the printed speed-up and days follow from the time, so the throughput is the misprint"
    )
    return (
        f"The table contradicts itself: {line.iteration_s} s for 5,898,240 tokens are {ours / 1e3:.1f}k tokens/s, "
        f"printed are {line.printed_tokens_per_s / 1e3:.1f}k ({system}, {line.num_devices} GPUs); {wrong}."
    )


def _utilization() -> tuple[Claim, ...]:
    lines = {line.num_devices: line for line in TABLE_3["megascale"]}
    return tuple(
        Claim(
            id=f"msm-mfu-{num_devices}",
            paper="MSM",
            source="section 6.1",
            what=f"MFU from the printed throughput, {num_devices} GPUs",
            theirs=theirs,
            ours=partial(_mfu, lines[num_devices].printed_tokens_per_s, num_devices),
            tolerance=0.005,
            kind="counted",
            note="causal attention, one shared expert, 989 TFLOP/s",
        )
        for num_devices, theirs in PRINTED_MFU.items()
    )


def _mfu(rate_tokens_per_s: float, num_devices: int) -> float:
    model = shipped.model("msm-internal-352b")
    return float(model_flops_utilization(model, SEQUENCE_LENGTH, rate_tokens_per_s, num_devices, 989e12))
