"""`--record-routing`: every row of every step, with the experts it chose, in either layout."""

from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.serve.launch import Launcher
from tests.serve.engine_harness import NUM_TOKENS, Prompts, TinyModel, Tokens, complete, config, running


@pytest.mark.parametrize("layout", ["2", "2+2/m2"])
def test_each_row_is_recorded_once(
    layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path
) -> None:
    file = tmp_path / "routing.trace"
    with running(config(tiny_model, layout, record_routing=file)) as engine:
        assert complete(engine, prompts[:8]) == reference[:8]
    trace = read_routing_trace(file)
    assert (trace.header.layers, trace.header.num_experts) == ((0, 1), 5)
    # The last token of an answer is not computed with; equal prompts share what the prefix cache has.
    assert trace.num_rows <= sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts[:8])
    assert trace.num_rows >= 8 * (NUM_TOKENS - 1)
    ids = trace.ids_LTK()
    assert ids.shape == (2, trace.num_rows, trace.header.top_k)
    assert (np.sort(ids, axis=2)[:, :, 1:] != np.sort(ids, axis=2)[:, :, :-1]).all(), "a row chooses an expert once"
    assert {rows.worker for rows in trace.rows} == {0, 1}
    counts = trace.counts_of_steps()
    assert counts.sum() == ids.size


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        Launcher(config(tiny_model, "1", record_routing=tmp_path / "none" / "routing.trace")).engine()
