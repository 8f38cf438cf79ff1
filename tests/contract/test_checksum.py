"""Whatever computes CRC-32, its values are zlib's."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.common import checksum


@given(st.binary(max_size=1 << 15), st.integers(0, (1 << 32) - 1), st.integers(0, 9))
def test_values_are_those_of_zlib(data, before, skip):
    view = memoryview(data)[skip:]
    assert checksum.crc32(view, before) == zlib.crc32(view, before)


def test_the_fastest_installed_implementation_is_used():
    isal = pytest.importorskip("isal.isal_zlib")
    assert checksum.crc32 is isal.crc32
