"""The prefixes that one engine was sent."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.prefix_table import (
    BLOCK_BYTES,
    COARSE_BLOCK_BYTES,
    FINE_BYTES,
    MAX_PROMPT_BLOCKS,
    MAX_PROMPT_BYTES,
    PrefixTable,
    block_checksums,
    prefix_bytes,
)

MANY = 10**9
CHANCE = random.Random(7)


def text(blocks: float) -> bytes:
    return CHANCE.randbytes(int(blocks * BLOCK_BYTES))


def known(table: PrefixTable, prompt: bytes) -> int:
    return table.count_known(block_checksums(prompt))


@given(st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=3 * BLOCK_BYTES))
@settings(max_examples=50, deadline=None)
def test_checksums_agree_as_far_as_whole_blocks_do(one: bytes, two: bytes) -> None:
    same = 0
    limit = min(len(one), len(two))
    while same < limit and one[same] == two[same]:
        same += 1
    pairs = zip(block_checksums(one), block_checksums(two), strict=False)
    assert sum(a == b for a, b in pairs) == same // BLOCK_BYTES


def test_blocks_of_a_long_prompt_are_longer_and_end_at_1_mib() -> None:
    prompt = bytes(MAX_PROMPT_BYTES + 100 * COARSE_BLOCK_BYTES)
    assert len(block_checksums(prompt)) == MAX_PROMPT_BLOCKS
    assert prefix_bytes(MAX_PROMPT_BLOCKS) == MAX_PROMPT_BYTES
    for length in (0, 511, 512, FINE_BYTES, FINE_BYTES + COARSE_BLOCK_BYTES, 500_000):
        covered = prefix_bytes(len(block_checksums(prompt[:length])))
        assert 0 <= length - covered < (BLOCK_BYTES if length < FINE_BYTES else COARSE_BLOCK_BYTES)


def test_end_of_a_prompt_is_forgotten_before_its_prefix() -> None:
    table, prompt = PrefixTable(0.0), text(4)
    table.remember(block_checksums(prompt), MANY)
    table.remember(block_checksums(text(3)), 5 * BLOCK_BYTES)
    assert known(table, prompt) == 2


def test_table_holds_as_many_bytes_as_the_engine() -> None:
    """Of long blocks it holds fewer."""
    table, long = PrefixTable(0.0), CHANCE.randbytes(FINE_BYTES + 10 * COARSE_BLOCK_BYTES)
    table.remember(block_checksums(long), FINE_BYTES + 4 * COARSE_BLOCK_BYTES)
    assert prefix_bytes(known(table, long)) == FINE_BYTES + 4 * COARSE_BLOCK_BYTES


def test_age_of_a_prompt_is_counted_from_the_end_of_its_request() -> None:
    table, long, short = PrefixTable(0.0), block_checksums(text(3)), block_checksums(text(3))
    table.remember(long, MANY)
    table.remember(short, MANY, (0, 0))
    table.remember(long, MANY, (0, 0))
    table.remember(block_checksums(text(2)), 6 * BLOCK_BYTES)
    assert (table.count_known(long), table.count_known(short)) == (3, 1)


def test_answer_is_expected_behind_its_prompt() -> None:
    table, prompt = PrefixTable(0.0), text(2.5)
    next_turn = block_checksums(prompt + text(6))
    table.remember(block_checksums(prompt), MANY)
    assert table.find(next_turn) == (2 * BLOCK_BYTES, 0)
    table.remember(block_checksums(prompt), MANY, (256, 1000))
    assert table.find(next_turn) == (2 * BLOCK_BYTES + 256, 1000)
    assert table.find(next_turn[:3]) == (2 * BLOCK_BYTES + 256, 256)
    assert table.find(next_turn[:2]) == (2 * BLOCK_BYTES, 0)
    assert table.find(block_checksums(text(4))) == (0, 0)


def test_answer_is_forgotten_with_the_end_of_its_prompt() -> None:
    table, prompt = PrefixTable(0.0), text(2)
    table.remember(block_checksums(prompt), MANY, (0, 1000))
    assert len(table) == 3
    table.forget(1)
    assert table.find(block_checksums(prompt + text(3))) == (BLOCK_BYTES, 0)
    assert len(table) == 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.lists(st.integers(0, 2), max_size=5),
            st.none() | st.tuples(st.integers(0, 511), st.integers(0, 10**30)),
        ),
        max_size=25,
    ),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_known_blocks_are_always_a_beginning_of_their_prompt(
    turns: list[tuple[int, list[int], tuple[int, int] | None]], most: int
) -> None:
    """The search by halves relies on it, whatever was forgotten."""
    table = PrefixTable(0.0)
    sent: list[list[int]] = []
    for system, rest, tail in turns:
        blocks = block_checksums(b"".join(bytes([n]) * BLOCK_BYTES for n in (system, *rest)))
        table.remember(blocks, most * BLOCK_BYTES, tail)
        sent.append(blocks)
        assert len(table._sizes) <= most
        assert table._tails.keys() <= table._sizes.keys()
        for each in sent:
            found = [checksum in table._sizes for checksum in each]
            assert table.count_known(each) == sum(found)
            assert found == sorted(found, reverse=True)
            whole = prefix_bytes(len(each))
            assert prefix_bytes(sum(found)) <= sum(table.find(each)) <= whole
