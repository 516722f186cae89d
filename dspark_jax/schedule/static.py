"""Policies that no measurement enters: fixed lengths, thresholds on the confidence, plain decoding (SPEC section 5).

What changes the compiled program (a static length, cumulative or not) is static; a threshold is data, so that a new value
never recompiles.
"""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config_values import whole_number
from dspark_jax.errors import RequestError
from dspark_jax.schedule.base import RoundView, pass_sizes


def _whole(rows: int, slots: int) -> tuple[int, ...]:
    """One size for full blocks, and a quarter of it for the end of a larger batch, when most rows have finished."""
    full = rows * (slots + 1)
    return (-(-full // 4), full) if rows >= 4 else (full,)


class FixedLength(flax.struct.PyTreeNode):
    """Check the first ``length`` drafts of every block (None: all of them)."""

    length: int | None = flax.struct.field(pytree_node=False, default=None)
    drafts: ClassVar[bool] = True
    needs_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.length is None:
            return
        whole = whole_number(self.length)
        if whole is None or whole < 1:
            raise RequestError(f"FixedLength: length={self.length!r} must be None or an integer of at least 1")
        object.__setattr__(self, "length", whole)  # a narrow integer of NumPy would wrap where it is added to

    def slots(self, block_size: int) -> int:
        if self.length is not None and self.length > block_size:
            raise RequestError(f"FixedLength: length={self.length} exceeds the draft's block_size={block_size}")
        return block_size if self.length is None else self.length

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return _whole(rows, slots)

    def lengths(self, view: RoundView) -> jax.Array:
        return view.most


class Threshold(flax.struct.PyTreeNode):
    """Stop before the first slot whose confidence, or with ``cumulative`` whose survival (the running product), is below
    ``value``."""

    value: float | jax.Array
    cumulative: bool = flax.struct.field(pytree_node=False, default=False)
    drafts: ClassVar[bool] = True
    needs_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.value, int | float | np.number) and not 0 <= self.value <= 1:
            raise RequestError(f"Threshold: value={self.value!r} must lie in [0, 1]")
        if isinstance(self.value, int | np.number) and not isinstance(self.value, bool):
            object.__setattr__(self, "value", float(self.value))  # another type would be another program

    def slots(self, block_size: int) -> int:
        # Checked here and not at construction: JAX also builds policies around placeholders.
        number = isinstance(self.value, int | float | np.number) and not isinstance(self.value, bool)
        if not number and (not isinstance(self.value, jax.Array) or self.value.shape != ()):
            raise RequestError(f"Threshold: value={self.value!r} must be a number in [0, 1]")
        return block_size

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return pass_sizes(rows, slots)

    def lengths(self, view: RoundView) -> jax.Array:
        assert view.confidence is not None  # check_policy refuses drafts without the head
        score = view.confidence
        if self.cumulative:
            score = jnp.cumprod(score, axis=1)
        keep = score >= jnp.asarray(self.value, jnp.float32)
        return jnp.cumprod(keep.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


class Autoregressive(flax.struct.PyTreeNode):
    """Plain decoding through the same loop: no drafter, one token a round."""

    drafts: ClassVar[bool] = False
    needs_confidence: ClassVar[bool] = False

    def slots(self, block_size: int) -> int:
        return 0

    def token_sizes(self, rows: int, slots: int) -> tuple[int, ...]:
        return _whole(rows, slots)

    def lengths(self, view: RoundView) -> jax.Array:
        return jnp.zeros_like(view.most)
