import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import units

PAIRS = [
    (units.parse_bytes_per_s, units.format_rate),
    (units.parse_seconds, units.format_time),
    (units.parse_flops_per_s, units.format_flops_per_s),
    (units.parse_hz, units.format_hz),
]


@given(value=st.integers(min_value=0, max_value=2**60))
def test_bytes_and_counts_read_back_exactly(value):
    assert units.parse_bytes(units.format_bytes(value, digits=None)) == value
    assert units.parse_count(units.format_count(value, digits=None)) == value


@pytest.mark.parametrize(("parse", "render"), PAIRS)
@given(value=st.floats(min_value=1e-12, max_value=1e18))
def test_floats_read_back_exactly(parse, render, value):
    assert parse(render(value, digits=None)) == value


@pytest.mark.parametrize(("parse", "render"), PAIRS[:1] + PAIRS[2:])
@given(value=st.floats(min_value=1.0, max_value=1e17))
def test_three_digits_are_within_half_a_unit_of_the_last(parse, render, value):
    assert parse(render(value)) == pytest.approx(value, rel=5.01e-3)
