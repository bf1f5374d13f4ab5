"""One rank of a ladder, which the box starts. The first one writes what was found.

python -m antiphon.bench.ladder.rank FOLDER        with FOLDER/case.json
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from antiphon.bench.ladder.ladders import LadderCase, Variant, variants_of
from antiphon.bench.ladder.prediction import predicted_step_s
from antiphon.bench.ladder.turns import (
    WARM,
    Contestant,
    LoopTurns,
    Record,
    TrainerTurns,
    configuration,
)
from antiphon.bench.ladder.wire import Links
from antiphon.train.ranks import leave
from antiphon.train.row_budget import part_over_budget

LINK = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of this rank's node


def main(workplace: Path) -> None:
    case = LadderCase.read(workplace / "case.json")
    rank, variants = int(os.environ["RANK"]), variants_of(case)
    contestants = [_contestant(case, each, number, workplace, rank) for number, each in enumerate(variants)]
    link_bytes: list[list[int]] = [[] for _ in variants]
    for number in range(WARM + case.rounds + 1):  # what trainers do in the last step is not recorded
        for index, contestant in enumerate(contestants):
            before, started_s = _link_bytes(), time.monotonic()
            contestant.step()
            link_bytes[index].append(_link_bytes() - before)
            if rank == 0:
                print(f"step {number}, {variants[index].name}: {time.monotonic() - started_s:.2f} s", flush=True)
    records = [each.end() for each in contestants]
    leave()
    if rank == 0:
        check_losses(variants, records)
        rows = _rows(case, variants, contestants, records)
        for row, counted in zip(rows, link_bytes, strict=True):
            row["link_bytes"] = statistics.median(counted[WARM:])
        (workplace / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def _contestant(case: LadderCase, variant: Variant, number: int, workplace: Path, rank: int) -> Contestant:
    config = configuration(case, variant, number, workplace)
    if variant.kind == "antiphon":
        return TrainerTurns(config)
    return LoopTurns(case, config, rank, sharded=variant.kind == "fsdp2")


def _link_bytes() -> int:
    return int(LINK.read_text(encoding="utf-8")) if LINK.exists() else 0


def check_losses(variants: tuple[Variant, ...], records: list[Record]) -> None:
    """`AssertionError` if a variant does not train as the first one does: a time of something else says nothing."""
    for variant, record in zip(variants, records, strict=True):
        for step, (loss, first) in enumerate(zip(record.losses[:WARM], records[0].losses, strict=False)):
            difference = abs(loss - first) / max(1.0, abs(first))
            assert difference <= variant.band, (
                f"step {step}: the loss of {variant.name} is {loss:.6f}, that of {variants[0].name} {first:.6f}"
            )


def _rows(
    case: LadderCase, variants: tuple[Variant, ...], contestants: list[Contestant], records: list[Record]
) -> list[dict[str, Any]]:
    rows, plain_s = [], dict[str, dict[str, float]]()
    for variant, contestant, record in zip(variants, contestants, records, strict=True):
        steps = slice(max(WARM, variant.settles), WARM + case.rounds)
        step_s = statistics.median(record.step_s[steps])
        row = {
            "ladder": case.ladder,
            "variant": variant.name,
            "world_size": case.ranks,
            "nodes": case.nodes,
            "mbit": case.mbit,
            "tokens_per_s": case.tokens_per_step / step_s,
            "step_s_median": step_s,
            "steps_s": record.step_s[steps],
            "exposed_comm_s": statistics.median(record.exposed_s[steps] or record.exposed_s),
            "comm_bytes": record.sent_bytes,
            "activation_bytes": record.activation_bytes,
            "first_losses": record.losses[:WARM],
            "predicted_step_s": None,
        }
        if isinstance(contestant, TrainerTurns):
            own_s = {
                name: statistics.median(each.get(name, 0.0) for each in record.operator_s[steps])
                for name in record.operator_s[-1]
            }
            # Operators beside an exchange are slowed by it: the variant without overlap has their own times. Packing
            # ends in a form of its own, with fewer exchanges.
            form, first = str(contestant.trainer.mesh.sizes), not (variant.overlaps and not variant.settles)
            assert form in plain_s or first, f"{variant.name} is the first of its form, and overlaps"
            plain = plain_s.setdefault(form, own_s)
            if not contestant.trainer.config.overlap.pairs:  # turns of two micro-batches are not simulated
                row["predicted_step_s"] = _predicted_s(case, contestant, plain, record.expert_rows)
            row["operator_s"] = own_s
        rows.append(row)
    return rows


def _predicted_s(
    case: LadderCase, contestant: TrainerTurns, operator_s: dict[str, float], expert_rows: list[list[int]]
) -> float:
    trainer, factor = contestant.trainer, contestant.trainer.config.parallel.row_budget
    links = Links(nodes=case.nodes, ranks_per_node=case.ranks_per_node, bytes_per_s=case.mbit * 1e6 / 8)
    plans = [layer.plan for layer in trainer.model.layers]
    over = statistics.fmean(part_over_budget(rows, trainer.mesh.sizes.expert, factor) for rows in expert_rows)
    return predicted_step_s(trainer.spec, trainer.config, trainer.mesh.sizes, plans, operator_s, links, over)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
