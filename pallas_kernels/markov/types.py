"""What goes in and out of the markov op. Axes: B rows (requests), n slots, D hidden width, r rank, V vocabulary that is drafted
from, W the target's vocabulary (W = V unless the draft's is reduced)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

Kind = Literal["vanilla", "gated", "rnn"]


class Head(NamedTuple):
    """A sequential head: w1 ``[W, r]``, w2 ``[V, r]``; proj ``[r, D + r]`` and bias ``[r]`` over (hidden, w1) if gated,
    ``[3r, 2r + D]`` and ``[3r]`` over (memory, w1, hidden) if rnn, None if vanilla. kept: int32 ``[V]`` rising, the target's
    ids of a reduced draft vocabulary, or None."""

    w1: jax.Array
    w2: jax.Array
    proj: jax.Array | None = None
    bias: jax.Array | None = None
    kept: jax.Array | None = None


class Confidence(NamedTuple):
    """A confidence head: proj ``[1, D]`` or, with the Markov part, ``[1, D + r]``; bias ``[1]``."""

    proj: jax.Array
    bias: jax.Array


class Block(NamedTuple):
    """A drafted block.

    Attributes:
      tokens: int32 ``[B, n]``, target ids. A row of NaN, of +inf or of nothing but -inf gives the first id.
      confidence: float32 logits ``[B, n]``, or None.
      logits: float32 ``[B, n, V]``, with the bias; None for a greedy block, which needs no distribution.
      top, log_z: float32 ``[B, n]``: log q = (logits - top) / temperature - log_z, with temperature 1 for a greedy row.
    """

    tokens: jax.Array
    confidence: jax.Array | None
    logits: jax.Array | None
    top: jax.Array
    log_z: jax.Array
