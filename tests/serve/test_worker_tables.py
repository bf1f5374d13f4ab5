"""Block tables and the metadata of a micro-batch, against a computation row by row."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.kernels.api import AttentionBatch
from antiphon.models.batch import BlockTables
from antiphon.serve.policy.request import SequenceStep

CPU = torch.device("cpu")


def naive(sequences: list[SequenceStep], tables: dict[int, list[int]], block_size: int) -> dict[str, list[int]]:
    positions, slots, starts = [], [], [0]
    for sequence in sequences:
        for position in range(sequence.start, sequence.start + len(sequence.token_ids)):
            positions.append(position)
            slots.append(tables[sequence.slot][position // block_size] * block_size + position % block_size)
        starts.append(len(positions))
    return {"positions": positions, "slots": slots, "starts": starts}


def check(batch: AttentionBatch, sequences: list[SequenceStep], tables: dict[int, list[int]], block_size: int) -> None:
    expected = naive(sequences, tables, block_size)
    assert batch.positions_T.tolist() == expected["positions"]
    assert batch.slots_T.tolist() == expected["slots"]
    assert batch.query_starts.tolist() == expected["starts"]
    assert batch.query_lens == tuple(len(sequence.token_ids) for sequence in sequences)
    assert batch.context_lens == tuple(sequence.start + len(sequence.token_ids) for sequence in sequences)
    assert batch.context_lens_S.tolist() == list(batch.context_lens)
    assert batch.num_tokens == len(expected["positions"])
    for row, sequence in zip(batch.block_tables_SB.tolist(), sequences, strict=True):
        num_blocks = -(-(sequence.start + len(sequence.token_ids)) // block_size)
        assert row[:num_blocks] == tables[sequence.slot][:num_blocks]
    for tensor in (batch.positions_T, batch.slots_T, batch.query_starts, batch.context_lens_S, batch.block_tables_SB):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]))
def test_metadata_equals_a_naive_computation(data: st.DataObject, block_size: int) -> None:
    """Several steps: sequences grow, end, give their slot to others; every step is applied twice, as after a loss."""
    num_slots, max_len = 5, 60
    tables = BlockTables(block_size, num_slots, -(-max_len // block_size) + 1, CPU)
    mirror: dict[int, list[int]] = {}
    lengths = dict.fromkeys(range(num_slots), 0)
    next_block = 0
    for _ in range(data.draw(st.integers(1, 6), "steps")):
        slots = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, unique=True), "slots")
        sequences = []
        for slot in slots:
            if lengths[slot] and data.draw(st.integers(0, 4), "again") == 0:
                lengths[slot], mirror[slot] = 0, []
            num_rows = data.draw(st.integers(1, 12), "rows")
            if lengths[slot] + num_rows > max_len:
                lengths[slot], mirror[slot] = 0, []
            start, table = lengths[slot], mirror.setdefault(slot, [])
            first, lengths[slot] = len(table), start + num_rows
            while len(table) * block_size < lengths[slot]:
                table.append(next_block)
                next_block += 1
            new = tuple(table[first:])
            sequences.append(SequenceStep(str(slot), slot, (7,) * num_rows, start, first, new, True, 0, 0))
        for _ in range(2):
            for sequence in sequences:
                tables.update(sequence)
            check(tables.attention_batch(sequences), sequences, mirror, block_size)


def test_a_thousand_decodes_and_one_token() -> None:
    tables = BlockTables(16, 1024, 9, CPU)
    first = [SequenceStep(str(slot), slot, (5,) * 100, 0, 0, tuple(range(slot * 7, slot * 7 + 7)), False, 0, 0)
             for slot in range(1024)]  # fmt: skip
    for sequence in first:
        tables.update(sequence)
    mirror = {sequence.slot: list(sequence.new_blocks) for sequence in first}
    decodes = [SequenceStep(str(slot), slot, (5,), 100 + slot % 12, 7, (), True, 0, 0) for slot in range(1024)]
    check(tables.attention_batch(decodes), decodes, mirror, 16)
    check(tables.attention_batch(decodes[3:4]), decodes[3:4], mirror, 16)
