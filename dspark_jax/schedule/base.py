"""What a policy sees, what it must answer, and the parts that several share (SPEC section 5).

Axes: B rows, n slots drafted, M = B n drafted tokens of a round in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.cost import CostTable, Curve
from dspark_jax.errors import RequestError


class RoundView(flax.struct.PyTreeNode):
    """What a policy may look at.

    Attributes:
      confidence: float32 ``[B, n]``, the probability that slot k survives given that the slots before it did; None without a
        confidence head, and before the drafter has run.
      active: bool ``[B]``; most: int32 ``[B]``, drafts that still fit.
      rounds: int32 ``[B]``, rounds of this request so far; weight: float32 ``[B]``, what a token of it is worth.
      context: int32 scalar, cached tokens that attention reads in this round.
      greedy: bool scalar, all active rows are greedy. free: bool scalar, the output of no active row depends on what is
        checked: each is greedy or coupled.
      memory: what the policy's ``remember`` returned after the last round.
    """

    confidence: jax.Array | None
    active: jax.Array
    most: jax.Array
    rounds: jax.Array | None = None
    weight: jax.Array | None = None
    context: jax.Array | None = None
    greedy: jax.Array | None = None
    free: jax.Array | None = None
    memory: Any = None


class Policy(Protocol):
    """drafts: whether the drafter runs at all; needs_confidence: whether a draft without that head is refused."""

    drafts: ClassVar[bool]
    needs_confidence: ClassVar[bool]

    def slots(self, block_size: int) -> int:
        """Most drafts that this policy ever checks; static."""

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        """Rising compiled token counts of the verification pass; the last is ``rows * (slots + 1)``."""

    def lengths(self, view: RoundView) -> jax.Array:
        """Verify lengths int32 ``[B]``; the loop cuts them to ``view.most`` and to 0 for idle rows."""


class Remembering(Policy, Protocol):
    """A policy that also learns from one round to the next. Its decisions may use ``view.memory`` freely: nothing in it
    depends on tokens of the round that is decided about (see ``sampling.draft_noise``)."""

    def memory(self, rows: int, slots: int) -> Any:
        """The memory before the first round."""

    def asleep(self, view: RoundView) -> jax.Array:
        """Whether the drafter is left out of this round (bool scalar), decided before it runs; a None ``memory`` never."""

    def remember(self, view: RoundView, lengths: jax.Array, accepted: jax.Array, drafted: jax.Array) -> Any:
        """The memory after a round that checked ``lengths`` and kept ``accepted`` drafts (int32 ``[B]``), if it
        ``drafted`` (bool scalar)."""


class Priced:
    """Policies with a ``cost``: None until ``generate`` has put the machine's own table in its place."""

    cost: CostTable | None

    def curve(self, view: RoundView) -> Curve:
        """Costs of this round.

        Raises:
          RequestError: no table, or one of another batch size.
        """
        rows = view.most.shape[0]
        if self.cost is None:
            raise RequestError(f"{type(self).__name__}: cost=None; give a CostTable, or let generate measure one")
        if self.cost.rows not in (None, rows):
            raise RequestError(f"{type(self).__name__}: cost was measured with rows={self.cost.rows}, the batch has {rows}")
        assert view.context is not None and view.greedy is not None
        return self.cost.curve(view.context, view.greedy)


def pass_sizes(rows: int, slots: int) -> tuple[int, ...]:
    """Few sizes for passes of any length: powers of two and the middle between them, from ``rows`` to all drafts; and a quarter
    of ``rows``, for the end of a batch, when most rows have finished."""
    full = rows * (slots + 1)
    sizes, power = {-(-rows // 4), rows, full}, 1
    while power < full:
        sizes |= {size for size in (power, 3 * power // 2) if rows < size < full}
        power *= 2
    return tuple(sorted(sizes))


def survival(confidence: jax.Array) -> jax.Array:
    """The running product of ``confidence [B, n]``: the probability that slot k and all before it survive. What is not a
    number survives never."""
    usable = jnp.where(confidence > 0, jnp.minimum(confidence, 1.0), 0.0)
    return jnp.cumprod(usable.astype(jnp.float32), axis=1)


class Ranking(flax.struct.PyTreeNode):
    """Drafted tokens in the order in which they are worth checking: by score, on a tie lower rows and then earlier slots.

    Scores fall along a row, so every leading part of the order is a leading part of each row. order: int32 ``[M]``, indices
    into ``[B, n]``; score: float32 ``[M]``, 0 for tokens that may not be checked, which come last; allowed: bool ``[B, n]``.
    """

    order: jax.Array
    score: jax.Array
    allowed: jax.Array

    @staticmethod
    def of(score: jax.Array, view: RoundView) -> Ranking:
        """``score [B, n]``, at least 0."""
        slot = jnp.arange(score.shape[1], dtype=jnp.int32)[None, :]
        allowed = view.active[:, None] & (slot < view.most[:, None])
        flat = jnp.where(allowed, score, -1.0).reshape(-1)
        order = jnp.argsort(-flat, stable=True).astype(jnp.int32)
        return Ranking(order, jnp.maximum(flat[order], 0.0), allowed)

    @property
    def sums(self) -> jax.Array:
        """Score of the first 0, 1, … M tokens, ``[M + 1]``."""
        return jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(self.score)])

    def take(self, count: jax.Array) -> jax.Array:
        """Lengths int32 ``[B]`` of the first ``count`` tokens."""
        rank = jnp.zeros_like(self.order).at[self.order].set(jnp.arange(self.order.shape[0], dtype=jnp.int32))
        chosen = (rank < count).reshape(self.allowed.shape) & self.allowed
        return jnp.sum(chosen, axis=1, dtype=jnp.int32)


def weights(view: RoundView) -> jax.Array:
    """``view.weight``, 0 for idle rows, ``[B]``."""
    weight = jnp.ones(view.most.shape, jnp.float32) if view.weight is None else view.weight
    return jnp.where(view.active, weight, 0.0)


def active_rows(view: RoundView) -> jax.Array:
    return jnp.sum(view.active, dtype=jnp.int32)


def covering(sizes: Sequence[int], tokens: jax.Array) -> jax.Array:
    """The smallest compiled size that holds ``tokens`` (int32, any shape)."""
    table = jnp.asarray(sizes, jnp.int32)
    return table[jnp.minimum(jnp.searchsorted(table, tokens, side="left"), len(sizes) - 1)]


def check_policy(policy: Policy, draft: DraftConfig | None) -> int:
    """The number of slots that ``policy`` uses on ``draft``.

    Raises:
      RequestError: no draft, no confidence head where one is needed, or a length beyond the block.
    """
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("drafts", "slots", "token_sizes", "lengths")):
        raise RequestError(
            f"scheduler={policy!r} is not a policy; legal: FixedLength(), Threshold(value), Autoregressive(), Adaptive(),"
            " Observed(), Algorithm1(), Lagged(), FullSearch()"
        )
    if not policy.drafts:
        return 0
    if draft is None:
        raise RequestError(f"scheduler={type(policy).__name__} needs a draft; this pair has none: use Autoregressive()")
    if policy.needs_confidence and not draft.confidence_head:
        raise RequestError(
            f"scheduler={type(policy).__name__} needs a confidence head; this draft has none: use FixedLength() or Observed()"
        )
    return policy.slots(draft.block_size)
