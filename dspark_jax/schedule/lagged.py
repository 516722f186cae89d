"""Lagged mode, the paper's production form: room from the survivals of two rounds ago, ranks of today (SPEC section 5)."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.cost import CostTable
from dspark_jax.errors import RequestError
from dspark_jax.schedule.base import Priced, Ranking, RoundView, active_rows, covering, pass_sizes, survival, weights

LAG = 2


class Lagged(flax.struct.PyTreeNode, Priced):
    """The best Θ over all sizes with the survivals of two rounds ago; today's tokens, by today's survival, fill that room.

    The room cannot depend on today's tokens, so the search may cross any dip of the measured costs. A request in its first two
    rounds counts with ``prior``, the same for every slot, never with what the slot held before.
    """

    cost: CostTable | None = None
    prior: float | jax.Array = 0.6
    drafts: ClassVar[bool] = True
    needs_confidence: ClassVar[bool] = True
    beyond_row: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.prior, int | float | np.number) and not 0 <= self.prior <= 1:
            raise RequestError(f"Lagged: prior={self.prior!r} must lie in [0, 1]")

    def slots(self, block_size: int) -> int:
        return block_size

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return pass_sizes(rows, slots)

    def memory(self, rows: int, slots: int) -> jax.Array:
        """Survivals of the last rounds, float32 ``[B, LAG, n]``, the newest first."""
        return jnp.zeros((rows, LAG, slots), jnp.float32)

    def past(self, view: RoundView) -> jax.Array:
        """The survivals that decide about the room, ``[B, n]``."""
        _, _, slots = view.memory.shape
        assert view.rounds is not None
        prior = jnp.cumprod(jnp.full((1, slots), self.prior, jnp.float32), axis=1)
        return jnp.where((view.rounds >= LAG)[:, None], view.memory[:, LAG - 1], prior)

    def lengths(self, view: RoundView) -> jax.Array:
        assert view.confidence is not None  # check_policy refuses drafts without the head
        rows, slots = view.confidence.shape
        weight, first = weights(view)[:, None], active_rows(view)
        tokens = covering(self.token_sizes(rows, slots), first + jnp.arange(rows * slots + 1, dtype=jnp.int32))
        expected = jnp.sum(weight) + Ranking.of(weight * self.past(view), view).sums
        best = jnp.argmax(expected / self.curve(view).at(tokens)).astype(jnp.int32)
        return Ranking.of(weight * survival(view.confidence), view).take(tokens[best] - first)

    def asleep(self, view: RoundView) -> None:
        return None

    def remember(self, view: RoundView, lengths: jax.Array, accepted: jax.Array, drafted: jax.Array) -> jax.Array:
        assert view.confidence is not None
        today = survival(view.confidence)[:, None]
        return jnp.concatenate([today, view.memory[:, : LAG - 1]], axis=1)
