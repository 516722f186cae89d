"""Goodness of fit for counts against an exact law."""

import math

import numpy as np


def chi_square_tail(x: float, dof: int) -> float:
    """P(chi-square with ``dof`` degrees of freedom > x), by the recurrence from dof to dof + 2."""
    tail = math.erfc(math.sqrt(x / 2)) if dof % 2 else math.exp(-x / 2)
    for n in range(2 - dof % 2, dof, 2):
        # tail(n + 2) = tail(n) + (x/2)^(n/2) e^(-x/2) / Gamma(n/2 + 1)
        tail += math.exp(n / 2 * math.log(x / 2) - x / 2 - math.lgamma(n / 2 + 1)) if x > 0 else 0.0
    return min(tail, 1.0)


def chi_square_p(counts: np.ndarray, law: np.ndarray, least: float = 5.0) -> float:
    """The p-value of Pearson's test; cells expected fewer than ``least`` times are pooled into one."""
    counts, law = np.asarray(counts, np.float64), np.asarray(law, np.float64)
    expected = law / law.sum() * counts.sum()
    rare = expected < least
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    live = expected > 0
    if counts[~live].any():
        return 0.0
    counts, expected = counts[live], expected[live]
    if len(counts) < 2:
        return 1.0
    return chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)
