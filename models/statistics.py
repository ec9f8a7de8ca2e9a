"""Intervals and paired comparisons for evaluation results: pure, seeded functions of counts and arrays.

NaN is never averaged away: every function that takes values raises ValueError when one is not finite, so a
broken metric stops a report instead of moving it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Proportion:
    """A success rate with its interval; `value` and `interval` are None when nothing was counted (n = 0)."""

    value: float | None
    n: int
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class PairedComparison:
    """Two policies on the same n items.

    `wins` are items that only the challenger solves, `losses` those that only the champion solves;
    `difference` = (wins - losses) / n, `interval` its paired bootstrap interval, `p_value` McNemar's exact.
    """

    n: int
    wins: int
    losses: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    confidence: float

    @property
    def better(self) -> bool:
        """Better beyond chance: both the interval and the exact test say so. A tie is not."""
        return self.interval[0] > 0 and self.p_value < 1 - self.confidence


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22, 209).

    Unlike p ± z·sqrt(p(1-p)/n) it keeps a width at 0 of n and n of n, where good policies live.
    Raises ValueError when n < 1, successes is outside 0..n, or confidence is outside (0, 1).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = _z(confidence)
    share = successes / n
    centre = share + z * z / (2 * n)
    margin = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends the exact limit is 0 or 1; rounding would miss it by one ulp.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    high = 1.0 if successes == n else (centre + margin) / scale
    return low, high


def proportion(successes: int, n: int, confidence: float = 0.95) -> Proportion:
    """Success rate with its Wilson interval; n = 0 gives None for both."""
    if n == 0:
        return Proportion(None, 0, None)
    return Proportion(successes / n, n, wilson_interval(successes, n, confidence))


def weighted_proportion(
    counts: Sequence[tuple[int, int]], weights: Sequence[float], confidence: float = 0.95
) -> Proportion:
    """Weighted mean of independent proportions, given as (successes, n) pairs.

    Pairs with n = 0 are left out, and the other weights rescaled to sum to 1. The interval joins the Wilson
    limits of the parts by MOVER: `mean ± sqrt(Σ w²·(p - limit)²)` (Zou & Donner 2008, Statistics in Medicine
    27, 1693).
    Raises ValueError for weights that are negative, not finite, all zero, or not one per pair.
    """
    if len(counts) != len(weights) or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ValueError(f"need one finite weight >= 0 per part, got {list(weights)} for {len(counts)} parts")
    parts = [
        (successes, n, weight) for (successes, n), weight in zip(counts, weights, strict=True) if n and weight
    ]
    if not parts:
        if any(n for _, n in counts):
            raise ValueError("every part that has items has weight 0")
        return Proportion(None, 0, None)
    total = sum(weight for _, _, weight in parts)
    mean = below = above = 0.0
    for successes, n, weight in parts:
        share, (low, high) = successes / n, wilson_interval(successes, n, confidence)
        mean += weight / total * share
        below += (weight / total * (share - low)) ** 2
        above += (weight / total * (high - share)) ** 2
    interval = (max(0.0, mean - math.sqrt(below)), min(1.0, mean + math.sqrt(above)))
    return Proportion(mean, sum(n for _, n, _ in parts), interval)


def bootstrap_mean_interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, shape (n,); the same seed, the same interval.

    Raises ValueError for an empty input or one that holds NaN or infinity.
    """
    array = _finite(values)
    counted, occurrences = np.unique(array, return_counts=True)
    # Drawing n of n with replacement is a multinomial draw over the distinct values: cheap for counts.
    draws = np.random.default_rng(seed).multinomial(array.size, occurrences / array.size, size=resamples)
    return _percentiles(draws @ counted / array.size, confidence)


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact McNemar p-value of the discordant pairs (binomial with p = 1/2); 1.0 without any."""
    if wins < 0 or losses < 0:
        raise ValueError(f"counts of discordant pairs cannot be negative, got {wins} and {losses}")
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_comparison(
    challenger: Sequence[bool] | np.ndarray,
    champion: Sequence[bool] | np.ndarray,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedComparison:
    """Compare two policies item by item: inputs of shape (n,) that hold 0/1 or booleans, in one item order.

    Raises ValueError for an empty input, unequal lengths, NaN, or values other than 0 and 1.
    """
    new, old = _finite(challenger), _finite(champion)
    if new.shape != old.shape:
        raise ValueError(f"a paired comparison needs the same items: {new.size} against {old.size}")
    if not np.isin(np.concatenate([new, old]), (0.0, 1.0)).all():
        raise ValueError("a paired comparison needs results that are 0 or 1")
    n = int(new.size)
    wins, losses = int(((new == 1) & (old == 0)).sum()), int(((new == 0) & (old == 1)).sum())
    probabilities = np.array([wins, losses, n - wins - losses]) / n
    draws = np.random.default_rng(seed).multinomial(n, probabilities, size=resamples)
    interval = _percentiles((draws[:, 0] - draws[:, 1]) / n, confidence)
    return PairedComparison(
        n, wins, losses, (wins - losses) / n, interval, mcnemar_exact(wins, losses), confidence
    )


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"need at least one value in one dimension, got shape {array.shape}")
    if bad := int((~np.isfinite(array)).sum()):
        raise ValueError(f"{bad} of {array.size} values are not finite")
    return array


def _percentiles(samples: np.ndarray, confidence: float) -> tuple[float, float]:
    _z(confidence)
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
