"""The layout that both attention kernels work in: the query heads of one key/value head are rows of one product.

Axes: B rows, K key/value heads, G = Q/K, T slots, R = G T, H head width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # below every score, and its exponential is zero beside any


class Folded(NamedTuple):
    """q: ``[B, K, R, H]``, scaled; k, v: ``[B, K, T, H]``, spoilt values moved into the keys; seen: int32 ``[B, R, T]``, 1
    where a query sees a slot; oldest: int32 ``[B, R, 1]``, a cached position at or below it is out of the window."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    seen: jax.Array
    oldest: jax.Array


def fold(
    q: jax.Array, k: jax.Array, v: jax.Array, block_mask: jax.Array, context: jax.Array, window: jax.Array | None
) -> Folded:
    """Small arrays of the pass, rearranged outside the kernel."""
    rows, width, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = (q * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(rows, width, kv_heads, group, head_dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * width, head_dim)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    spoilt = ~jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    k = jnp.where(spoilt, jnp.full((), jnp.nan, k.dtype), k)
    v = jnp.where(spoilt, jnp.zeros((), v.dtype), v)
    slot = jnp.arange(width, dtype=jnp.int32)
    oldest = jnp.full((rows, width), -1, jnp.int32)
    if window is not None:
        near = (window == 0) | (jnp.abs(slot[:, None] - slot[None, :]) < window)
        block_mask = block_mask & near[None]
        oldest = jnp.where(window == 0, -1, context[:, None] + slot[None] - window)
    seen = jnp.tile(block_mask.astype(jnp.int32), (1, group, 1))
    return Folded(q, k, v, seen, jnp.tile(oldest, (1, group))[..., None])


def unfold(out: jax.Array, width: int) -> jax.Array:
    """``[B, K, R, H]`` back to ``[B, T, Q, H]``."""
    rows, kv_heads, lines, head_dim = out.shape
    out = out.reshape(rows, kv_heads, lines // width, width, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, width, -1, head_dim)


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Float32 is multiplied as such, not rounded to bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
