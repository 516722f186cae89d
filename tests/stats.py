"""Goodness of fit for counts against an exact law."""

import numpy as np
from scipy.stats import chi2


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
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))
