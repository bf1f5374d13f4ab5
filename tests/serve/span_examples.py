"""Spans of few steps, small enough to work out by hand."""

from antiphon.serve.worker.spans import NAMES, Spans


def recorded(*spans: tuple[int, int, int, int], step: int = 7) -> Spans:
    """(name, start, end, rows) each; times in ns. Of one step, whose layer is 3 and micro-batch 1."""
    return joined(*((name, step, start, end, rows) for name, start, end, rows in spans))


def joined(*spans: tuple[int, int, int, int, int]) -> Spans:
    """(name, step, start, end, rows) each."""
    is_step = [NAMES[name] == "step" for name, _, _, _, _ in spans]
    return Spans(
        names=NAMES,
        name_index=[name for name, _, _, _, _ in spans],
        layers=[-1 if step else 3 for step in is_step],
        micro_batches=[-1 if step else 1 for step in is_step],
        rows=[rows for _, _, _, _, rows in spans],
        steps=[step for _, step, _, _, _ in spans],
        starts_ns=[start for _, _, start, _, _ in spans],
        ends_ns=[end for _, _, _, end, _ in spans],
    )
