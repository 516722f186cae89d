"""Lengths that pay on this machine, corrected by what was accepted so far, and a drafter that may sleep.

Goes beyond SPEC section 5 in three ways, all decided from earlier rounds and from slots already admitted:

- **Look-ahead.** Measured costs are a staircase, at whose first step Algorithm 1 ends (PITFALLS B11). Here a token is
  admitted if some later size pays, given today's survivals so far and, behind them, the usual fall of survivals.
- **The price of time.** A round is worth its tokens less its seconds times the rate that the request runs at: maximising the
  tokens per second of each round by itself would spend too long on poor ones.
- **Parking.** Where the rate stays below plain decoding's, the drafter sleeps, and is tried again later.

Axes: B rows, n slots drafted, M = B n drafted tokens of a round in rank order.
"""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.cost import CostTable
from dspark_jax.errors import RequestError
from dspark_jax.schedule.base import Priced, Ranking, RoundView, active_rows, covering, pass_sizes, survival, weights

DECIDE, PLAIN = -1, -2  # of ``force``

PRIOR = 0.6  # of a slot of which nothing is known
ROW_PRIOR, BATCH_PRIOR, BIAS_PRIOR = 4.0, 2.0, 2.0  # rounds that a prior counts for
FORGET = 0.98  # a round, of what was accepted
WINDOW = 16  # rounds, of the usual survivals
FORGET_RATE = 0.97  # a round, of tokens and seconds
START, START_ROUNDS = 1.2, 4.0  # speed against plain decoding before anything is known, and the rounds it counts for
FIRST_TRY, TRY = 2, 1  # drafted rounds before the drafter may sleep: at first, and after a nap
SHORTEST_NAP, LONGEST_NAP = 16, 128
WELL = 8  # drafted rounds in a row after which the next nap is a short one again
MOST_BIAS = 4.0


class Learned(flax.struct.PyTreeNode):
    """What earlier rounds said; float32 unless said otherwise.

    Attributes:
      hit, seen, said: ``[B, n]``, fading counts of slots that were reached: accepted, reached, and sum of their confidence.
      usual: ``[B, n]``, mean survival as the head gave it.
      tokens, time: scalars, fading sums over drafted rounds, both in plain rounds: their ratio is the speed against plain.
      asleep, nap, tried: int32 scalars: rounds left without drafter, length of the next nap, drafted rounds since the last.
    """

    hit: jax.Array
    seen: jax.Array
    said: jax.Array
    usual: jax.Array
    tokens: jax.Array
    time: jax.Array
    asleep: jax.Array
    nap: jax.Array
    tried: jax.Array

    @property
    def speed(self) -> jax.Array:
        return self.tokens / self.time


class _Learning(flax.struct.PyTreeNode, Priced):
    """margin: the drafter sleeps while its speed is below 1 + margin times plain decoding's. force: DECIDE; or PLAIN, or the
    number of drafts to check in all, for measurements."""

    cost: CostTable | None = None
    margin: float | jax.Array = 0.02
    force: np.int32 | jax.Array = np.int32(DECIDE)
    drafts: ClassVar[bool] = True
    needs_confidence: ClassVar[bool] = False
    beyond_row: ClassVar[bool] = True
    by_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.margin, int | float | np.number) and not -1 <= self.margin <= 10:
            raise RequestError(f"{type(self).__name__}: margin={self.margin!r} must lie in [-1, 10]")

    def slots(self, block_size: int) -> int:
        return block_size

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return pass_sizes(rows, slots)

    def memory(self, rows: int, slots: int) -> Learned:
        def number(value: float) -> jax.Array:
            return jnp.asarray(np.float32(value))

        def count(value: int) -> jax.Array:
            return jnp.asarray(np.int32(value))

        # Every leaf its own buffer: the state is donated.
        hit, seen, said = (jnp.zeros((rows, slots), jnp.float32) for _ in range(3))
        usual = jnp.broadcast_to(_prior(slots), (rows, slots)) + 0.0
        speed = number(START * START_ROUNDS), number(START_ROUNDS)
        return Learned(hit, seen, said, usual, *speed, count(0), count(SHORTEST_NAP), count(0))

    def asleep(self, view: RoundView) -> jax.Array:
        force = jnp.asarray(self.force, jnp.int32)
        return (force == PLAIN) | ((force == DECIDE) & (view.memory.asleep > 0))

    def lengths(self, view: RoundView) -> jax.Array:
        learned = _known(view)
        rows, slots = learned.hit.shape
        sizes, first = self.token_sizes(rows, slots), active_rows(view)
        weight = weights(view)[:, None]
        base = jnp.maximum(jnp.sum(weight), 1e-6)
        ranking = Ranking.of(weight * self._survival(view, learned), view)
        gained = 1 + ranking.sums / base
        count = jnp.arange(rows * slots + 1, dtype=jnp.int32)
        time = self._time(view, covering(sizes, first + count), sizes)
        price = jnp.maximum(learned.speed, 1.0)
        value = gained - price * time
        chosen = jnp.argmax(value).astype(jnp.int32)
        if self.by_confidence:
            usual = Ranking.of(weight * learned.usual * jnp.cumprod(_bias(learned))[None, :], view)
            stop = _look_ahead(ranking.score / base, gained, usual.score, price * time)
            assert view.free is not None
            chosen = jnp.where(view.free, chosen, stop)
        force = jnp.asarray(self.force, jnp.int32)
        # A try learns nothing unless something is checked.
        trying = learned.tried < _patience(learned)
        chosen = jnp.where(trying, jnp.maximum(chosen, first), chosen)
        chosen = jnp.where(force >= 0, force, chosen)
        return ranking.take(covering(sizes, first + chosen) - first)

    def remember(self, view: RoundView, lengths: jax.Array, accepted: jax.Array, drafted: jax.Array) -> Learned:
        learned = _known(view)
        return jax.tree.map(
            lambda a, b: jnp.where(drafted, a, b), self._drafted(view, learned, lengths, accepted), _slept(learned)
        )

    def _drafted(self, view: RoundView, learned: Learned, lengths: jax.Array, accepted: jax.Array) -> Learned:
        rows, slots = learned.hit.shape
        slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
        # A slot has a label where all before it were accepted; what a refusal hides is missing, not refused.
        reached = view.active[:, None] & (slot < lengths[:, None]) & (slot <= accepted[:, None])
        hit = reached & (slot < accepted[:, None])
        said, usual = learned.said, learned.usual
        if view.confidence is not None:
            said = FORGET * said + jnp.where(reached, jnp.minimum(view.confidence, 1.0), 0.0)
            assert view.rounds is not None
            share = jnp.maximum(1 / (view.rounds.astype(jnp.float32) + 2), 1 / WINDOW)
            usual = usual + jnp.where(view.active, share, 0.0)[:, None] * (survival(view.confidence) - usual)
        weight = weights(view)
        base = jnp.maximum(jnp.sum(weight), 1e-6)
        checked = slot < lengths[:, None]
        foreseen = jnp.sum(jnp.where(checked, weight[:, None] * self._survival(view, learned), 0.0)) / base
        found = jnp.sum(weight * accepted.astype(jnp.float32)) / base
        sizes = self.token_sizes(rows, slots)
        used = covering(sizes, active_rows(view) + jnp.sum(lengths, dtype=jnp.int32))
        # Half what came true, half what was foreseen: the latter is less noisy, and right once the bias is known.
        tokens = FORGET_RATE * learned.tokens + 1 + (foreseen + found) / 2
        time = FORGET_RATE * learned.time + self._time(view, used[None], sizes)[0]
        tried = learned.tried + 1
        poor = (tokens < (1 + jnp.asarray(self.margin, jnp.float32)) * time) & (tried >= _patience(learned))
        nap = jnp.where(tried >= WELL, SHORTEST_NAP, learned.nap)
        return Learned(
            hit=FORGET * learned.hit + hit.astype(jnp.float32),
            seen=FORGET * learned.seen + reached.astype(jnp.float32),
            said=said,
            usual=usual,
            tokens=tokens,
            time=time,
            asleep=jnp.where(poor, nap, 0),
            nap=jnp.where(poor, jnp.minimum(2 * nap, LONGEST_NAP), nap),
            tried=jnp.where(poor, 0, tried),
        )

    def _survival(self, view: RoundView, learned: Learned) -> jax.Array:
        """Survivals ``[B, n]`` that today's decision goes by."""
        if not self.by_confidence:
            batch = _chain(jnp.sum(learned.hit, 0), jnp.sum(learned.seen, 0), BATCH_PRIOR, PRIOR)
            own = (learned.hit + ROW_PRIOR * batch[None, :]) / (learned.seen + ROW_PRIOR)
            return survival(own)
        assert view.confidence is not None  # check_policy refuses drafts without the head
        return survival(view.confidence * _bias(learned)[None, :])

    def _time(self, view: RoundView, tokens: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """Time of a drafted round over ``tokens``, in plain rounds of the rows that are left."""
        curve = self.curve(view)
        return curve.at(tokens) / curve.plain_at(covering(sizes, active_rows(view)))


class Adaptive(_Learning):
    """From the confidence head, corrected by how often it was right."""

    needs_confidence: ClassVar[bool] = True
    by_confidence: ClassVar[bool] = True


class Observed(_Learning):
    """For drafts without a confidence head: from how often each slot was accepted in earlier rounds, of the request and, where
    that is little, of its batch. Never from the tokens drafted today, nor from how likely they were."""


def _prior(slots: int) -> jax.Array:
    return jnp.asarray(np.cumprod(np.full((1, slots), PRIOR, np.float32), axis=1))


def _known(view: RoundView) -> Learned:
    """The memory, in which a request in its first round has no past: what its slot held before is forgotten (PITFALLS B05)."""
    learned: Learned = view.memory
    assert view.rounds is not None
    new = (view.rounds == 0)[:, None]
    prior = jnp.broadcast_to(_prior(learned.hit.shape[1]), learned.hit.shape)
    hit, seen, said = (jnp.where(new, 0.0, x) for x in (learned.hit, learned.seen, learned.said))
    return learned.replace(hit=hit, seen=seen, said=said, usual=jnp.where(new, prior, learned.usual))


def _chain(hit: jax.Array, total: jax.Array, prior: float, start: float) -> jax.Array:
    """``hit / total`` per slot ``[n]``; a slot of which little is known is taken to be like the one before it."""
    rates, last = [], jnp.asarray(start, jnp.float32)
    for k in range(hit.shape[0]):
        last = (hit[k] + prior * last) / (total[k] + prior)
        rates.append(last)
    return jnp.stack(rates)


def _bias(learned: Learned) -> jax.Array:
    """Accepted over foretold, per slot ``[n]``: what the confidence is to be multiplied with."""
    return jnp.minimum(_chain(jnp.sum(learned.hit, 0), jnp.sum(learned.said, 0), BIAS_PRIOR, 1.0), MOST_BIAS)


def _patience(learned: Learned) -> jax.Array:
    return jnp.where(learned.nap > SHORTEST_NAP, TRY, FIRST_TRY)


def _slept(learned: Learned) -> Learned:
    """After a round without drafter. Old evidence counts for less when it wakes: the text may have changed."""
    asleep = jnp.maximum(learned.asleep - 1, 0)
    woke = (learned.asleep > 0) & (asleep == 0)
    half = jnp.where(woke, 0.5, 1.0)
    fade = jnp.where(woke, 1 / jnp.maximum(learned.time, 1.0), 1.0)
    return learned.replace(
        hit=half * learned.hit,
        seen=half * learned.seen,
        said=half * learned.said,
        tokens=fade * learned.tokens,
        time=fade * learned.time,
        asleep=asleep,
    )


def _look_ahead(score: jax.Array, gained: jax.Array, usual: jax.Array, cost: jax.Array) -> jax.Array:
    """How many tokens to admit, one at a time: token i + 1 if some count beyond i promises more than stopping at i.

    What lies behind token i + 1 is foreseen from its own score and from the usual fall of scores behind that rank; so the
    decision about it rests on tokens already admitted and on earlier rounds.

    Args:
      score, usual: ``[M]``, falling, today's and the usual ones. gained: ``[M + 1]``, 1 + the sum of the first scores; cost:
        ``[M + 1]``, in the same unit.
    """
    count = score.shape[0]
    total = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(usual)])
    behind = (total[None, 1:] - total[1:, None]) / jnp.maximum(usual, 1e-6)[:, None]
    foreseen = gained[:-1, None] + score[:, None] * (1 + behind) - cost[None, 1:]
    index = jnp.arange(count, dtype=jnp.int32)
    later = jnp.where(index[None, :] >= index[:, None], foreseen, -jnp.inf)
    admit = jnp.max(later, axis=1) > gained[:-1] - cost[:-1]
    return jnp.sum(jnp.cumprod(admit.astype(jnp.int32)), dtype=jnp.int32)
