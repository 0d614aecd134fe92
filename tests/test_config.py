from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpaged.config import DEFAULT_BLOCK_SIZE, check_block_size, check_num_blocks, format_bytes, parse_bytes
from hfpaged.errors import HfpagedError, InvalidConfigError

SIZES = [
    (1, 1),
    (4096, 4096),
    ("7", 7),
    ("7b", 7),
    ("1kb", 1000),
    ("1KiB", 1024),
    ("512 MB", 512 * 1000**2),
    ("512MiB", 512 * 1024**2),
    ("2GiB", 2 * 1024**3),
    (" 2 gib ", 2 * 1024**3),
    ("1.5GiB", 3 * 1024**3 // 2),
    ("1TB", 1000**4),
    ("1TiB", 1024**4),
    ("0.5kib", 512),
]


@pytest.mark.parametrize(("memory", "count"), SIZES)
def test_sizes_are_bytes_or_texts_with_decimal_and_binary_units(memory, count):
    assert parse_bytes(memory) == count
    assert isinstance(parse_bytes(memory), int)


@pytest.mark.parametrize("memory", ["", "GiB", "2 GiG", "2G", "-1GB", "1e9", "1,5GB", "two", None, True, [1]])
def test_what_is_no_size_is_named_with_two_that_are(memory):
    with pytest.raises(InvalidConfigError) as caught:
        parse_bytes(memory)
    assert f"memory={memory!r} is no size" in str(caught.value)
    assert '"2GiB" or "512MB"' in str(caught.value)


@pytest.mark.parametrize(("memory", "count"), [(0, 0), (-5, -5), ("0", 0), ("0GiB", 0), ("0.1", 0)])
def test_a_size_of_nothing_is_refused_with_its_bytes(memory, count):
    with pytest.raises(InvalidConfigError, match=rf"memory={memory!r} is {count} bytes"):
        parse_bytes(memory)


TEXTS = [
    (0, "0 B"),
    (1, "1 B"),
    (1023, "1023 B"),
    (1024, "1.0 KiB"),
    (1536, "1.5 KiB"),
    (1024**2, "1.0 MiB"),
    (5 * 1024**3 // 2, "2.5 GiB"),
    (3 * 1024**4, "3.0 TiB"),
    (5000 * 1024**4, "5000.0 TiB"),
    (-1536, "-1.5 KiB"),
]


@pytest.mark.parametrize(("count", "text"), TEXTS)
def test_bytes_are_written_in_the_unit_that_people_would_use(count, text):
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_a_written_size_reads_back_to_within_its_one_decimal(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)


def test_powers_of_two_up_to_1024_are_block_sizes():
    assert [check_block_size(2**power) for power in range(11)] == [2**power for power in range(11)]
    assert check_block_size(DEFAULT_BLOCK_SIZE) == DEFAULT_BLOCK_SIZE


def test_no_other_number_is_a_block_size():
    for size in set(range(-2, 2050)) - {2**power for power in range(11)}:
        with pytest.raises(InvalidConfigError, match=f"block_size={size} is .* use 16 or 32"):
            check_block_size(size)


def test_the_rule_that_a_block_size_broke_is_said():
    with pytest.raises(InvalidConfigError, match="block_size=24 is not a power of two, which the kernels need"):
        check_block_size(24)
    with pytest.raises(InvalidConfigError, match="block_size=2048 is above 1024"):
        check_block_size(2048)


@pytest.mark.parametrize("size", [16.0, "16", None])
def test_a_block_size_is_an_integer(size):
    with pytest.raises(InvalidConfigError, match=f"block_size={size}"):
        check_block_size(size)


def test_a_pool_has_at_least_one_block_for_each_group():
    assert check_num_blocks(3, 3) == 3
    with pytest.raises(InvalidConfigError, match=r"num_blocks=2 is too few .* at least 3 "):
        check_num_blocks(2, 3)
    for wrong in (0, -1, 4.0, "4"):
        with pytest.raises(InvalidConfigError, match=f"num_blocks={wrong} "):
            check_num_blocks(wrong, 1)


def test_a_wrong_size_is_a_value_error_and_an_error_of_ours():
    assert issubclass(InvalidConfigError, ValueError)
    assert issubclass(InvalidConfigError, HfpagedError)
