"""Checksums and seals: what they notice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_adpsgd.gossip.wire import checksum, read_seal, write_seal

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", 0x2D06800538D394C2), (b"a", 0xE6C632B61E964E1F)],
)
def test_a_checksum_is_that_of_the_published_algorithm(
    content: bytes, expected: int
) -> None:
    """Known answers: members of different builds must agree on it."""
    payload = torch.tensor(list(content), dtype=torch.uint8)
    assert checksum(payload) % 2**64 == expected
    assert -(2**63) <= checksum(payload) < 2**63


@given(content=st.binary(min_size=1, max_size=100), data=st.data())
def test_every_flipped_bit_changes_it(content: bytes, data: st.DataObject) -> None:
    payload = torch.tensor(list(content), dtype=torch.uint8)
    before = checksum(payload)
    place = data.draw(st.integers(0, len(content) - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(payload) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 3, 1000])
def test_a_checksum_is_of_bytes_whatever_they_mean(
    dtype: torch.dtype, length: int
) -> None:
    payload = torch.randn(length).to(dtype)
    assert checksum(payload) == checksum(payload.view(torch.uint8).clone())


@given(words=WORDS)
def test_a_seal_is_read_as_it_was_written(words: list[int]) -> None:
    seal = torch.zeros(len(words) + 1, dtype=torch.int64)
    write_seal(seal, words)
    assert read_seal(seal) == words


@given(words=WORDS, data=st.data())
def test_a_seal_notices_every_flipped_bit_of_its_own(
    words: list[int], data: st.DataObject
) -> None:
    seal = torch.zeros(len(words) + 1, dtype=torch.int64)
    write_seal(seal, words)
    place = data.draw(st.integers(0, seal.nbytes - 1))
    seal.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert read_seal(seal) is None
