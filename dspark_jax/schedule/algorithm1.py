"""Algorithm 1 of the paper: admit tokens by falling survival while the expected throughput rises (SPEC section 5)."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.cost import CostTable
from dspark_jax.schedule.base import Priced, Ranking, RoundView, active_rows, covering, pass_sizes, survival, weights


class _ByConfidence(Priced):
    drafts: ClassVar[bool] = True
    needs_confidence: ClassVar[bool] = True
    beyond_row: ClassVar[bool] = True

    def slots(self, block_size: int) -> int:
        return block_size

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return pass_sizes(rows, slots)


class Algorithm1(flax.struct.PyTreeNode, _ByConfidence):
    """Stop at the first token that does not raise Θ = τ / seconds, then fill the pass up to its compiled size.

    The early stop and the rounding up keep the output law: whether a token is checked is settled before that token is looked
    at. Rounding down, or a search past the first drop, would not. Between measured sizes the cost is a straight line, not the
    staircase of the compiled sizes, at whose first step every search would end.
    """

    cost: CostTable | None = None

    def lengths(self, view: RoundView) -> jax.Array:
        assert view.confidence is not None  # check_policy refuses drafts without the head
        rows, slots = view.confidence.shape
        ranking = Ranking.of(weights(view)[:, None] * survival(view.confidence), view)
        first = active_rows(view)
        tokens = first + jnp.arange(rows * slots + 1, dtype=jnp.int32)
        theta = (jnp.sum(weights(view)) + ranking.sums) / self.curve(view).at(tokens)
        admitted = jnp.sum(jnp.cumprod((theta[1:] > theta[:-1]).astype(jnp.int32)), dtype=jnp.int32)
        # Past the last token that may be checked nothing is gained and Θ cannot rise, unless time falls: it does not.
        return ranking.take(covering(self.token_sizes(rows, slots), first + admitted) - first)


class FullSearch(flax.struct.PyTreeNode, _ByConfidence):
    """The best Θ over all sizes with today's survivals. Biased for ordinary sampling, and refused there: it is for greedy and
    coupled requests, whose tokens do not depend on what is checked."""

    cost: CostTable | None = None
    free_only: ClassVar[bool] = True

    def lengths(self, view: RoundView) -> jax.Array:
        assert view.confidence is not None
        rows, slots = view.confidence.shape
        ranking = Ranking.of(weights(view)[:, None] * survival(view.confidence), view)
        first = active_rows(view)
        tokens = covering(self.token_sizes(rows, slots), first + jnp.arange(rows * slots + 1, dtype=jnp.int32))
        theta = (jnp.sum(weights(view)) + ranking.sums) / self.curve(view).at(tokens)
        best = jnp.argmax(theta).astype(jnp.int32)
        return ranking.take(tokens[best] - first)
