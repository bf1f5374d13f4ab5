"""`make_attention_batch` against a loop over sequences, at odd sizes, and its time for a thousand of them."""

import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.models.batch import BlockTables, DecodeBuffers, make_attention_batch, select_sequences
from antiphon.serve.policy.request import SequenceStep

SEQUENCE = st.integers(1, 40).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))


@settings(max_examples=60, deadline=None)
@given(st.lists(SEQUENCE, min_size=0, max_size=6), st.integers(1, 9), st.randoms(use_true_random=False))
def test_rows_stand_where_a_loop_puts_them(sequences, block_size, random) -> None:  # type: ignore[no-untyped-def]
    blocks = list(range(300))
    random.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-context // block_size))] for _, context in sequences]
    queries, contexts = [q for q, _ in sequences], [c for _, c in sequences]
    batch = make_attention_batch(queries, contexts, tables, block_size, "cpu")
    positions, slots, starts = [], [], [0]
    for (query, context), table in zip(sequences, tables, strict=True):
        for position in range(context - query, context):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(positions))
    assert batch.positions_T.tolist() == positions
    assert batch.slots_T.tolist() == slots
    assert batch.query_starts.tolist() == starts
    assert batch.context_lens_S.tolist() == contexts
    assert batch.num_tokens == sum(queries)
    assert (batch.query_lens, batch.context_lens) == (tuple(queries), tuple(contexts))
    for row, table in zip(batch.block_tables_SB.tolist(), tables, strict=True):
        assert row[: len(table)] == table
    for tensor in (batch.positions_T, batch.slots_T, batch.query_starts, batch.context_lens_S, batch.block_tables_SB):
        assert tensor.dtype == torch.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 35), min_size=1, max_size=6), st.integers(1, 9), st.randoms(use_true_random=False))
def test_buffers_of_single_rows_hold_the_same(starts, block_size, random) -> None:  # type: ignore[no-untyped-def]
    """Steps of one row a sequence, in any order of slots, on buffers that hold an earlier step's."""
    slots, width = random.sample(range(8), len(starts)), 37
    tables = BlockTables(block_size, 8, width, torch.device("cpu"))
    made = [torch.full((7 * size,), 99, dtype=torch.int32) for size in (1, 1, 1, width)]
    buffers = DecodeBuffers(*(each.numpy().data for each in made))
    for later in (0, 1):
        sequences = [
            SequenceStep("", slot, (5,), start + later, 0, tuple(random.choices(range(200), k=width)), True, 0, 0)
            for slot, start in zip(slots, starts, strict=True)
        ]
        for sequence in sequences:
            tables.update(sequence)
        tables.write_decode_rows(sequences, buffers)
        batch, count = tables.attention_batch(sequences), len(starts)
        expected = batch.positions_T, batch.slots_T, batch.context_lens_S
        assert [each[:count].tolist() for each in made[:3]] == [each.tolist() for each in expected]
        assert all((each[count:] == 99).all() for each in made[:3])
        for row, own, start in zip(made[3].view(7, width), batch.block_tables_SB, starts, strict=False):
            num_blocks = (start + later) // block_size + 1
            assert row[:num_blocks].tolist() == own[:num_blocks].tolist()


def test_selected_sequences_are_the_batch_they_would_make_alone() -> None:
    lens, contexts, tables = [3, 1, 2, 1], [3, 9, 8, 1], [[5], [1, 2, 3], [7, 8], [4]]
    rows, found = select_sequences(make_attention_batch(lens, contexts, tables, 4, "cpu"), [1, 2])
    alone = make_attention_batch(lens[1:3], contexts[1:3], tables[1:3], 4, "cpu")
    assert rows.tolist() == [3, 4, 5]
    assert (found.query_lens, found.context_lens) == (alone.query_lens, alone.context_lens)
    for name in ("positions_T", "slots_T", "query_starts", "context_lens_S"):
        assert torch.equal(getattr(found, name), getattr(alone, name)), name
    assert torch.equal(found.block_tables_SB[:, :3][0], alone.block_tables_SB[0])


def test_a_thousand_decoding_sequences_take_milliseconds() -> None:
    contexts = [1 + 37 * s % 512 for s in range(1000)]
    tables = [list(range(-(-context // 16))) for context in contexts]
    make_attention_batch([1] * 1000, contexts, tables, 16, "cpu")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        make_attention_batch([1] * 1000, contexts, tables, 16, "cpu")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
