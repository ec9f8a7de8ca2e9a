"""Risks: an interval that does not cover, luck taken for progress, a NaN that disappears in a mean."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from models.statistics import (
    bootstrap_mean_interval,
    mcnemar_exact,
    paired_comparison,
    proportion,
    weighted_proportion,
    wilson_interval,
)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy_and_holds_the_estimate(counts):
    successes, n = counts
    low, high = wilson_interval(successes, n)
    expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert 0 <= low <= successes / n <= high <= 1


def test_wilson_keeps_a_width_when_everything_is_right():
    low, high = wilson_interval(60, 60)
    assert high == 1.0
    assert low < 0.95


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (0, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, n)


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_confidence_given_in_percent_is_refused(confidence):
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 2, confidence)
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_mean_interval([1.0, 2.0], confidence)


def test_nothing_counted_is_none_not_zero():
    assert proportion(0, 0).value is None
    assert weighted_proportion([(0, 0), (0, 0)], [600, 500]).value is None


def test_weighted_overall_is_the_published_weighting():
    # VSP's overall is (600 navigation + 500 verification) / 1100, whatever part of the items is at hand.
    overall = weighted_proportion([(9, 10), (10, 10)], [600, 500])
    assert overall.value == pytest.approx((600 * 0.9 + 500 * 1.0) / 1100)
    assert overall.n == 20
    assert overall.interval is not None
    assert overall.interval[0] < overall.value < overall.interval[1] <= 1


def test_weighted_overall_leaves_out_a_part_without_items():
    assert weighted_proportion([(3, 4), (0, 0)], [600, 500]).value == pytest.approx(0.75)


def test_weighted_overall_with_all_the_weight_on_nothing_is_refused():
    with pytest.raises(ValueError, match="weight 0"):
        weighted_proportion([(0, 0), (1, 2)], [1, 0])
    with pytest.raises(ValueError, match="finite"):
        weighted_proportion([(1, 2)], [math.nan])


def test_weighted_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    truth = (600 * 0.9 + 500 * 0.6) / 1100
    hits = 0
    for _ in range(400):
        parts = [(int(rng.binomial(60, 0.9)), 60), (int(rng.binomial(50, 0.6)), 50)]
        interval = weighted_proportion(parts, [600, 500]).interval
        assert interval is not None
        hits += interval[0] <= truth <= interval[1]
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 5), (10, 2), (3, 0), (200, 150)])
def test_mcnemar_equals_the_binomial_test(wins, losses):
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert mcnemar_exact(wins, losses) == pytest.approx(expected)


def test_bootstrap_is_reproducible_and_matches_the_normal_interval():
    values = np.random.default_rng(3).normal(5, 2, 400)
    first = bootstrap_mean_interval(values, seed=1)
    assert first == bootstrap_mean_interval(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(400)
    assert first == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_nan_is_never_averaged_away(values):
    with pytest.raises(ValueError, match=r"finite|at least one"):
        bootstrap_mean_interval(values)
    with pytest.raises(ValueError, match=r"finite|at least one"):
        paired_comparison(values, values)


def test_a_tie_is_not_better():
    assert not paired_comparison([1, 0, 1], [1, 0, 1]).better
    assert paired_comparison([True] * 3, [True] * 3).interval == (0.0, 0.0)


def test_luck_on_few_items_is_not_better():
    # 4 wins and no loss: the bootstrap interval excludes 0, yet chance alone does this one time in eight.
    comparison = paired_comparison([1] * 10, [1] * 6 + [0] * 4)
    assert comparison.interval[0] > 0
    assert comparison.p_value == pytest.approx(0.125)
    assert not comparison.better


def test_a_clear_gain_is_better_and_its_reverse_is_not():
    old, new = [1] * 50 + [0] * 50, [1] * 48 + [0] * 2 + [1] * 30 + [0] * 20
    gain = paired_comparison(new, old, seed=5)
    assert (gain.wins, gain.losses, gain.difference) == (30, 2, pytest.approx(0.28))
    assert gain.better
    assert gain == paired_comparison(new, old, seed=5)
    assert not paired_comparison(old, new).better


def test_results_of_other_items_are_refused():
    with pytest.raises(ValueError, match="same items"):
        paired_comparison([1, 0], [1])
    with pytest.raises(ValueError, match="0 or 1"):
        paired_comparison([0.5, 1], [1, 1])
