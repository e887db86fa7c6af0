from __future__ import annotations

import pytest

from lowdiff.persistence.writer.orders import (
    END,
    MAX_TOLD_BATCH_SIZE,
    WRITE_THROUGH,
    batch_size_word,
    told_batch_size,
)


def test_every_batch_size_is_a_word_of_its_own_and_of_one_byte() -> None:
    sizes = [1 << level for level in range(MAX_TOLD_BATCH_SIZE.bit_length())]
    words = [batch_size_word(size) for size in sizes]
    assert len({*words, END, WRITE_THROUGH}) == len(words) + 2
    assert {len(word) for word in words} == {1}
    assert [told_batch_size(word) for word in words] == sizes


def test_the_last_of_several_words_counts() -> None:
    said = batch_size_word(4) + WRITE_THROUGH + batch_size_word(64) + END
    assert told_batch_size(said) == 64
    assert told_batch_size(WRITE_THROUGH + END) is None


@pytest.mark.parametrize("size", [3, 2 * MAX_TOLD_BATCH_SIZE])
def test_only_powers_of_two_can_be_told(size: int) -> None:
    with pytest.raises(AssertionError):
        batch_size_word(size)
