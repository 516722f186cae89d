"""Arithmetic on one vocabulary tile that both kernels do alike, and the accept rule on what the first pass left of the rows.

A tile is ``[rows, tile]`` with per-row values ``[rows, 1]`` (TPU), or ``[tile]`` with scalars (GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.verify.types import Filters, Mode, RowStats, Verdict

NO_ID = 2**31 - 1
# Typed, since Pallas' Triton lowering takes a choice between two untyped scalars for one of booleans.
ZERO, ONE, MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)
TINY = 1.1754943508222875e-38  # the least normal float32
# Bit patterns of non-positive floats as int32: -0.0 is the least, and they rise as the numbers fall, up to -inf.
MINUS_ZERO, MINUS_INF = -(2**31), -0x00800000


class Draw(NamedTuple):
    """The second pass of a row ``[B]``: id from the residual and from p, log p of both, and whether any residual was left
    (int32)."""

    token: jax.Array
    log_p: jax.Array
    plain_token: jax.Array
    plain_log_p: jax.Array
    left: jax.Array


def is_broken(x: jax.Array) -> jax.Array:
    """Entries that make a row unusable."""
    return (x != x) | (x == jnp.inf)


def without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(x != x, -jnp.inf, x)


def scale(x: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
    """Scaled logits, at most 0. A row whose top is not finite is unusable; it only has to stay out of the way."""
    top = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)
    return jnp.minimum((without_nan(x) - top) / jnp.where(temperature == 0, 1.0, temperature), 0.0)


def log_prob(
    scaled: jax.Array, ids: jax.Array, temperature: jax.Array, best: jax.Array, cut: jax.Array, log_z: jax.Array
) -> jax.Array:
    """Processed log-probabilities of a tile; one-hot for a greedy row."""
    soft = jnp.where(scaled >= cut, scaled - log_z, -jnp.inf)
    hot = jnp.where(ids == best, ZERO, MINUS_INFINITY)
    return jnp.where(temperature == 0, hot, soft)


def log_q_of(x: jax.Array, norm: tuple[jax.Array, jax.Array] | None, temperature: jax.Array) -> jax.Array:
    """log q of draft logits and their (top, log_z), or of what is log q already."""
    return without_nan(x) if norm is None else scale(x, norm[0], temperature) - norm[1]


def perturbed(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """Scores of the Gumbel-max rule; a token of zero mass never wins."""
    return jnp.where(weights > -jnp.inf, weights + noise, -jnp.inf)


def accept(
    rows: Callable[[], RowStats],
    draw: Callable[[RowStats, jax.Array, jax.Array], Draw],
    tokens: jax.Array,
    scheduled: jax.Array,
    filters: Filters,
    uniform: jax.Array | None,
    mode: Mode,
    soft: bool,
) -> Verdict:
    """First pass, accepted prefix ``[B]``, second pass on the row that decides; only ``[B, T]`` numbers in between.

    Args:
      rows: the first pass; draw: the second one, from (the deciding position's stats ``[B]``, accepted, slot of q to read).
    """
    batch, slots = tokens.shape
    stats = rows()
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    take = (slot < scheduled[:, None]) & (stats.finite[:, :slots] > 0)
    if mode == "sample":
        assert uniform is not None
        q = jnp.exp(stats.log_q[:, :slots])
        usable = (stats.q_finite[:, :slots] > 0) & (q > 0)
        take &= usable & (uniform * q < jnp.exp(stats.log_p[:, :slots]))
    else:
        choice = stats.best if mode == "greedy" else stats.choice
        take &= choice[:, :slots] == tokens
    accepted = jnp.cumprod(take.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

    def decided(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, accepted[:, None], axis=1)[:, 0]

    here = RowStats(*(decided(x) for x in stats))
    degenerate = jnp.zeros((batch,), bool)
    if mode == "greedy":
        next_token, next_log_p = here.best, jnp.zeros((batch,), jnp.float32)
        draft_log_p = jnp.where(tokens == stats.best[:, :slots], 0.0, -jnp.inf)
    elif mode == "coupled":
        next_token, next_log_p, draft_log_p = here.choice, here.choice_log_p, stats.log_p[:, :slots]
    else:
        refused = accepted < scheduled
        if slots:
            behind = jnp.minimum(accepted, slots - 1)
            sound = jnp.take_along_axis(usable, behind[:, None], axis=1)[:, 0]
        else:
            behind, sound = accepted, jnp.ones((batch,), bool)
        out = draw(here, accepted, behind)
        subtract = refused & sound
        empty = subtract & (out.left == 0)
        residual = subtract & ~empty
        next_token = jnp.where(residual, out.token, out.plain_token)
        next_log_p = jnp.where(residual, out.log_p, out.plain_log_p)
        degenerate = empty | (refused & ~sound)
        draft_log_p = stats.log_p[:, :slots]
    at = jnp.arange(slots + 1, dtype=jnp.int32)[None]
    run = jnp.where(at == accepted[:, None], next_log_p[:, None], jnp.pad(draft_log_p, ((0, 0), (0, 1))))
    run = jnp.where(at <= accepted[:, None], run, 0.0)
    overlap = None
    if soft:
        sound_rows = (stats.finite[:, :slots] > 0) & (stats.q_finite[:, :slots] > 0)
        overlap = jnp.where(sound_rows, stats.soft[:, :slots], 0.0)
    return Verdict(accepted, next_token, here.finite > 0, degenerate, run, overlap)


def unpack(table: jax.Array) -> RowStats:
    """The first pass's table ``[B, T, >= 11]`` float32, a column a value; integers below 2**24 are exact in it."""
    integers = {"best", "finite", "q_finite", "choice"}
    columns = {name: table[..., i] for i, name in enumerate(RowStats._fields)}
    return RowStats(**{name: x.astype(jnp.int32) if name in integers else x for name, x in columns.items()})
