"""Statistics of rounds and of confidences, in NumPy alone: what was observed, how sure that is, how well it was predicted.

Axes: R rounds, n slots of a block, P prompts. Slots count from 1 in words and from 0 in arrays. A slot's *conditional*
outcome is whether its token was accepted given that all before it were; its *survival* is whether it and all before it were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

BINS = 20
RESAMPLES = 2000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval; the interval is nan where there is nothing to resample."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """What the rounds tell about every slot.

    Attributes:
      conditional, survival: bool ``[R, n]``, the outcomes; they mean something only where they were seen.
      conditional_seen, survival_seen: bool ``[R, n]``, whether the round tells. A slot that was not checked tells nothing. A
        conditional outcome needs all slots before it accepted. Where a stop token among the accepted drafts ended the
        request, or the target's own row was unusable, nothing after the kept drafts was judged.
    """

    conditional: np.ndarray
    conditional_seen: np.ndarray
    survival: np.ndarray
    survival_seen: np.ndarray


def outcomes(verified: np.ndarray, accepted: np.ndarray, committed: np.ndarray, slots: int) -> Outcomes:
    """Outcomes of rounds from their counts, int ``[R]``: drafts checked, drafts kept, tokens committed.

    A round that committed no token besides its kept drafts was cut after them: what would have followed is unknown.
    """
    slot = np.arange(1, slots + 1)[None, :]
    verified, accepted, committed = (np.asarray(x).reshape(-1, 1) for x in (verified, accepted, committed))
    kept = slot <= accepted
    judged = (slot <= verified) & (kept | (committed > accepted))
    return Outcomes(kept, judged & (slot <= accepted + 1), kept, judged)


def share(outcome: np.ndarray, seen: np.ndarray) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Per slot: the share of seen outcomes that are true (nan where none was seen), and how many were seen."""
    count = seen.sum(axis=0)
    good = (outcome & seen).sum(axis=0)
    values = np.divide(good, count, out=np.full(count.shape, np.nan), where=count > 0)
    return tuple(float(x) for x in values), tuple(int(x) for x in count)


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Equal-width bins of predictions over [0, 1]: how many fell in, their mean, and the share that came true; nan where
    empty. 1.0 belongs to the last bin."""

    count: tuple[int, ...]
    predicted: tuple[float, ...]
    observed: tuple[float, ...]


def reliability(predicted: np.ndarray, observed: np.ndarray, bins: int = BINS) -> Reliability:
    predicted, observed = np.asarray(predicted, np.float64).ravel(), np.asarray(observed, np.float64).ravel()
    which = np.clip((predicted * bins).astype(np.int64), 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    sums = [np.bincount(which, weights=x, minlength=bins) for x in (predicted, observed)]
    means = [np.divide(s, count, out=np.full(bins, np.nan), where=count > 0) for s in sums]
    return Reliability(tuple(count.tolist()), tuple(means[0].tolist()), tuple(means[1].tolist()))


def expected_calibration_error(predicted: np.ndarray, observed: np.ndarray, bins: int = BINS) -> float:
    """Mean distance of bin means, weighted by the predictions in the bin; nan without predictions."""
    table = reliability(predicted, observed, bins)
    count = np.asarray(table.count)
    if not count.sum():
        return float("nan")
    gap = np.abs(np.asarray(table.predicted) - np.asarray(table.observed))
    return float(np.nansum(np.where(count > 0, gap * count, 0.0)) / count.sum())


def auc(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Chance that a true outcome was predicted higher than a false one, ties counting half; nan unless both occur."""
    predicted, observed = np.asarray(predicted, np.float64).ravel(), np.asarray(observed, bool).ravel()
    good, bad = int(observed.sum()), int((~observed).sum())
    if not good or not bad:
        return float("nan")
    _, inverse, count = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank of every tied group, from 1
    return float((rank[inverse.ravel()][observed].sum() - good * (good + 1) / 2) / (good * bad))


def brier(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Mean squared distance of prediction and outcome; nan without predictions."""
    predicted, observed = np.asarray(predicted, np.float64).ravel(), np.asarray(observed, np.float64).ravel()
    return float(np.mean((predicted - observed) ** 2)) if predicted.size else float("nan")


def bias(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Mean prediction less the share that came true: above 0 is overconfident; nan without predictions."""
    predicted, observed = np.asarray(predicted, np.float64).ravel(), np.asarray(observed, np.float64).ravel()
    return float(np.mean(predicted) - np.mean(observed)) if predicted.size else float("nan")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How well probabilities were predicted: over all slots together, and per slot (nan where nothing was seen).

    Attributes:
      base_rate: share of seen outcomes that came true; predicting it always would have a Brier score of b(1-b).
    """

    count: int
    base_rate: float
    ece: float
    auc: float
    brier: float
    bias: float
    count_by_position: tuple[int, ...]
    ece_by_position: tuple[float, ...]
    auc_by_position: tuple[float, ...]
    brier_by_position: tuple[float, ...]
    bias_by_position: tuple[float, ...]
    reliability: Reliability


def calibration(predicted: np.ndarray, outcome: np.ndarray, seen: np.ndarray, bins: int = BINS) -> Calibration:
    """Of probabilities ``[R, n]`` against outcomes ``[R, n]``, where ``seen [R, n]``."""
    p, o = predicted[seen], outcome[seen]
    slots = [(predicted[seen[:, k], k], outcome[seen[:, k], k]) for k in range(seen.shape[1])]
    return Calibration(
        count=int(seen.sum()),
        base_rate=float(o.mean()) if o.size else float("nan"),
        ece=expected_calibration_error(p, o, bins),
        auc=auc(p, o),
        brier=brier(p, o),
        bias=bias(p, o),
        count_by_position=tuple(x.size for x, _ in slots),
        ece_by_position=tuple(expected_calibration_error(x, y, bins) for x, y in slots),
        auc_by_position=tuple(auc(x, y) for x, y in slots),
        brier_by_position=tuple(brier(x, y) for x, y in slots),
        bias_by_position=tuple(bias(x, y) for x, y in slots),
        reliability=reliability(p, o, bins),
    )


def probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 of a sigmoid, without overflow."""
    z = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e))


def resample(groups: Sequence[int], count: int = RESAMPLES, seed: int = 0) -> list[np.ndarray]:
    """Bootstrap draws: for every group of that many prompts, how often each is drawn, float64 ``[count, P_g]``.

    Each group keeps its size, so a mean over groups is resampled within each (stratified). One draw serves every quantity of
    the same prompts, which makes differences between them paired.
    """
    random = np.random.default_rng(seed)
    return [random.multinomial(n, np.full(n, 1 / n), size=count).astype(np.float64) for n in groups]


def mean_of_ratios(
    numerators: Sequence[np.ndarray], denominators: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """The mean over groups of each group's (sum of numerators) / (sum of denominators), all ``[P_g]``.

    Args:
      weights: per group ``[count, P_g]``, how often each prompt counts; None: once, and the result has one entry.
    """
    means = []
    for g, (a, b) in enumerate(zip(numerators, denominators, strict=True)):
        w = np.ones((1, len(a))) if weights is None else weights[g]
        top, bottom = w @ np.asarray(a, np.float64), w @ np.asarray(b, np.float64)
        means.append(np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0))
    return np.mean(means, axis=0) if means else np.full(1, np.nan)


def estimate(value: float, draws: np.ndarray, level: float = LEVEL) -> Estimate:
    """A value with the percentile interval of its bootstrap draws; draws that are not finite are left out."""
    draws = draws[np.isfinite(draws)]
    if draws.size < 2:
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high))


def ratio_estimate(
    numerators: Sequence[np.ndarray], denominators: Sequence[np.ndarray], count: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """``mean_of_ratios`` with an interval by prompt, resampled within groups. A single prompt has no interval."""
    value = float(mean_of_ratios(numerators, denominators)[0])
    if max((len(a) for a in numerators), default=0) < 2:
        return Estimate(value, float("nan"), float("nan"))
    weights = resample([len(a) for a in numerators], count, seed)
    return estimate(value, mean_of_ratios(numerators, denominators, weights))


def paired_difference(
    first: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    second: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    count: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Second less first, each (numerators, denominators) as in ``mean_of_ratios`` over the *same* prompts in the same order;
    a bootstrap draw takes the same prompts of both."""
    sizes = [len(a) for a in first[0]]
    if sizes != [len(a) for a in second[0]]:
        raise ValueError(f"a paired comparison needs the same prompts: {sizes} and {[len(a) for a in second[0]]} in the groups")
    value = float(mean_of_ratios(*second)[0] - mean_of_ratios(*first)[0])
    if max(sizes, default=0) < 2:
        return Estimate(value, float("nan"), float("nan"))
    weights = resample(sizes, count, seed)
    return estimate(value, mean_of_ratios(*second, weights) - mean_of_ratios(*first, weights))
