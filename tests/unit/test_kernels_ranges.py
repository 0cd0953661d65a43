"""Ranges by length: coverage on rows drawn from a known scatter, and the ends between and beyond knots."""

import numpy as np
import pytest

from calibrate.fit_ranges import MIN_DEVICE_SHARE, range_parameters, widest
from perfmodel.kernels.ranges import knots_of, range_frac


def sample(n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates from 1 us to 10 ms whose measurements scatter by 2 % when short and 30 % when long."""
    generator = np.random.default_rng(3)
    time_s = np.exp(generator.uniform(np.log(1e-6), np.log(1e-2), n_rows))
    sigma = np.where(time_s < 1e-4, 0.02, 0.3)
    return time_s, time_s * np.exp(generator.normal(0.0, 1.0, n_rows) * sigma)


def test_four_fifths_of_new_rows_lie_inside_short_and_long() -> None:
    time_s, measured_s = sample(4000)
    seen, new = slice(0, 2000), slice(2000, 4000)
    knots = range_parameters(time_s[seen], measured_s[seen], np.ones(2000))
    low, high = range_frac(knots, time_s[new], (0.5, 2.0))
    inside = (low * time_s[new] <= measured_s[new]) & (measured_s[new] <= high * time_s[new])
    for part in (time_s[new] < 3e-5, time_s[new] > 3e-4):
        assert inside[part].mean() == pytest.approx(0.8, abs=0.04)
    # The 10 % and 90 % points of a normal scatter lie 1.2816 deviations out.
    longest = np.argmax(time_s[new])
    assert high[longest] == pytest.approx(np.exp(1.2816 * 0.3), rel=0.08)


def test_rows_that_read_their_launch_have_no_say() -> None:
    time_s, measured_s = sample(400)
    share = np.where(np.arange(400) % 2 == 0, 1.0, MIN_DEVICE_SHARE / 2)
    spoilt = np.where(share < MIN_DEVICE_SHARE, 50 * measured_s, measured_s)
    assert range_parameters(time_s, spoilt, share) == range_parameters(time_s[::2], measured_s[::2], share[::2])


def test_few_rows_give_no_knots_and_the_ends_alone_count() -> None:
    assert range_parameters(*(np.ones(30) for _ in range(3))) == {}
    low, high = range_frac({}, np.array([1e-6, 1.0]), (0.9, 1.2))
    assert low.tolist() == [0.9, 0.9]
    assert high.tolist() == [1.2, 1.2]


def test_between_knots_over_log_time_and_flat_beyond() -> None:
    knots = {
        "low_frac": 0.8, "high_frac": 1.25,
        "range_0_s": 1e-6, "range_0_low": 0.9, "range_0_high": 1.1,
        "range_1_s": 1e-4, "range_1_low": 0.7, "range_1_high": 1.3,
    }  # fmt: skip
    assert knots_of(knots) == 2
    asked = np.array([1e-9, 1e-5, 1.0])
    low, high = range_frac(knots, asked, (0.8, 1.25))
    assert low == pytest.approx([0.9, 0.8, 0.7])
    assert high == pytest.approx([1.1, 1.2, 1.3])
    # On another chip the ends are wider by 1.25, and so are the knots.
    low, high = range_frac(knots, asked, (0.8 / 1.25, 1.25 * 1.25))
    assert low == pytest.approx(np.array([0.9, 0.8, 0.7]) / 1.25)
    assert high == pytest.approx(np.array([1.1, 1.2, 1.3]) * 1.25)


def test_the_widest_of_two_sets_covers_both() -> None:
    time_s, measured_s = sample(1000)
    narrow = range_parameters(time_s, time_s * np.linspace(0.99, 1.01, 1000), np.ones(1000))
    wide = range_parameters(time_s, measured_s, np.ones(1000))
    both = widest([narrow, wide, {}])
    assert knots_of(both) == knots_of(narrow) + knots_of(wide)
    places = np.array([both[f"range_{i}_s"] for i in range(knots_of(both))])
    assert (np.diff(places) >= 0).all()
    for part in (narrow, wide):
        low, high = range_frac(part, places, (1.0, 1.0))
        joined_low, joined_high = range_frac(both, places, (1.0, 1.0))
        assert (joined_low <= low + 1e-12).all()
        assert (joined_high >= high - 1e-12).all()
    assert widest([{}, {}]) == {}
