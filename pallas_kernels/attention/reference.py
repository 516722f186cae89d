"""Attention over context and block in plain XLA: one softmax over the concatenated keys, sharing nothing with the kernels.

Axes: B rows, T slots, Q query heads, K key/value heads, S capacity, H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_mask: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    context: jax.Array,
    window: jax.Array | None,
) -> jax.Array:
    """The whole op; arguments as in ``pallas_kernels.attention.attend``, already checked."""
    rows, width, heads, head_dim = q.shape
    capacity = cache_k.shape[3]
    group = heads // k.shape[2]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def whole(cache: jax.Array, own: jax.Array) -> jax.Array:
        """``[B, S + T, Q, H]``"""
        both = jnp.concatenate([jnp.swapaxes(cache[layer], 1, 2), own], axis=1)
        return jnp.repeat(both, group, axis=2)

    position = jnp.arange(capacity, dtype=jnp.int32)
    at = context[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.concatenate([jnp.broadcast_to(position[None], (rows, capacity)), at], axis=1)
    cached = position[None] < context[:, None]
    seen = jnp.concatenate([jnp.broadcast_to(cached[:, None], (rows, width, capacity)), block_mask], axis=2)
    if window is not None:
        far = jnp.abs(positions[:, None, :] - at[:, :, None]) >= window
        seen &= ~((window > 0) & far)
    keys, values = whole(cache_k, k), whole(cache_v, v)
    exists = jnp.concatenate([cached, jnp.ones((rows, width), bool)], axis=1)[..., None, None]
    own = jnp.concatenate([jnp.zeros((capacity,), bool), jnp.ones((width,), bool)])[None, :, None, None]
    spoilt = own & ~jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
    keys = jnp.where(spoilt, jnp.full((), jnp.nan, q.dtype), keys)
    values = jnp.where(spoilt | ~exists, jnp.zeros((), q.dtype), values)
    scaled = q * jnp.asarray(head_dim**-0.5, q.dtype)
    scores = jnp.einsum("btqh,bsqh->bqts", scaled, keys, precision=precision, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "bqts,bsqh->btqh", weights.astype(q.dtype), values, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype)
