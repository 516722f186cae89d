"""Policies: how many drafted tokens of each row the target checks (SPEC section 5).

A policy is a frozen pytree. What changes the compiled program (a static length, cumulative or not) is static; a threshold
is data, so that a new value never recompiles. Every policy decides about slot k from what was known before the token of
slot k was drawn, which keeps the output law (SPEC section 5, PITFALLS L16).
"""

from __future__ import annotations

import operator
from typing import ClassVar, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DraftConfig
from dspark_jax.errors import RequestError


class RoundView(flax.struct.PyTreeNode):
    """What a policy may look at. confidence: float32 ``[B, n]``, the probability that slot k survives given that the slots
    before it did (None without a confidence head); active: bool ``[B]``; most: int32 ``[B]``, drafts that still fit."""

    confidence: jax.Array | None
    active: jax.Array
    most: jax.Array


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
        try:
            whole = 0 if isinstance(self.length, bool) else operator.index(self.length)
        except TypeError:
            whole = 0
        if whole < 1:
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
        if rows == 1:
            return (*(n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n < slots + 1), slots + 1)
        full, sizes, size = rows * (slots + 1), [], rows
        while size < full:
            sizes.append(size)
            size *= 2
        return (*sizes, full)

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


def check_policy(policy: Policy, draft: DraftConfig | None) -> int:
    """The number of slots that ``policy`` uses on ``draft``.

    Raises:
      RequestError: no draft, no confidence head where one is needed, or a length beyond the block.
    """
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("drafts", "slots", "token_sizes", "lengths")):
        raise RequestError(f"scheduler={policy!r} is not a policy; legal: FixedLength(), Threshold(value), Autoregressive()")
    if not policy.drafts:
        return 0
    if draft is None:
        raise RequestError(f"scheduler={type(policy).__name__} needs a draft; this pair has none: use Autoregressive()")
    if policy.needs_confidence and not draft.confidence_head:
        raise RequestError(f"scheduler={type(policy).__name__} needs a confidence head; this draft has none: use FixedLength()")
    return policy.slots(draft.block_size)
