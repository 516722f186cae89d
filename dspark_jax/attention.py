"""Attention over (a row's cached context) ∪ (the tokens of this pass), for verification and for the drafter's block alike.

Axes: B rows, T slots, Q query heads, K key/value heads, G = Q/K, S cached positions read, H head width. The context read
is the smallest compiled size that covers the longest row, so a pass costs what is in use and not what is allocated.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dspark_jax.cache import KVCache, context_sizes

MASKED = -1e30


def context_bucket(context: jax.Array, active: jax.Array, capacity: int) -> jax.Array:
    """Index of the smallest compiled context size that covers every ``active`` row (bool ``[B]``); one number per pass.

    What the other rows get may miss a part of their context, and is not to be used."""
    sizes = jnp.asarray(context_sizes(capacity), jnp.int32)
    longest = jnp.max(jnp.where(active, context, 0))
    return jnp.searchsorted(sizes, longest, side="left").astype(jnp.int32)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_mask: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    context: jax.Array,
    bucket: jax.Array,
    window: jax.Array | None,
) -> jax.Array:
    """Softmax attention of one layer.

    Args:
      q: ``[B, T, Q, H]``, rotated; k, v: ``[B, T, K, H]`` of this pass.
      block_mask: bool ``[B, T, T]``, which slot sees which.
      cache: read only, valid on ``[0, context[b])``; layer: index into it.
      bucket: from ``context_bucket``; rows that it did not count come out as garbage.
      window: int32 scalar, width of the sliding window (0: none), or None when no layer has one. A query at position p
        sees keys at positions above p - window; slot t stands at position context + t.

    Returns: ``[B, T, Q, H]`` in the dtype of ``q``.
    """
    rows, width, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Fold the query group into the rows of one product per (row, kv head): [B, K, G*T, H].
    folded = q.reshape(rows, width, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    folded = (folded * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(rows, kv_heads, group * width, head_dim)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    # A drafted token whose values overflow must not reach the slots before it, where its weight is zero (0 * inf is NaN);
    # the slots that do see it are spoilt through its key instead, and are reported if they decide.
    broken = ~jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    k = jnp.where(broken, jnp.full((), jnp.nan, k.dtype), k)
    v = jnp.where(broken, jnp.zeros((), v.dtype), v)
    slot = jnp.arange(width, dtype=jnp.int32)
    if window is not None:
        distance = jnp.abs(slot[:, None] - slot[None, :])
        block_mask = block_mask & ((window == 0) | (distance < window))[None]
    block_mask = jnp.broadcast_to(block_mask[:, None, None], (rows, 1, group, width, width))
    block_mask = block_mask.reshape(rows, 1, group * width, width)
    own = jnp.where(block_mask, _scores(folded, k), MASKED)

    def over(size: int) -> jax.Array:
        shape = (1, rows, kv_heads, size, head_dim)
        start = (layer, *(jnp.zeros((), layer.dtype),) * 4)
        old_k = jax.lax.dynamic_slice(cache.k, start, shape)[0].astype(q.dtype)
        old_v = jax.lax.dynamic_slice(cache.v, start, shape)[0].astype(q.dtype)
        at = jnp.arange(size, dtype=jnp.int32)
        live = at[None, :] < context[:, None]
        seen = jnp.broadcast_to(live[:, None, None, :], (rows, 1, 1, size))
        if window is not None:
            oldest = context[:, None] + slot[None, :] - window
            near = (window == 0) | (at[None, None, :] > oldest[:, :, None])
            near = jnp.broadcast_to(near[:, None, None], (rows, 1, group, width, size))
            seen = seen & near.reshape(rows, 1, group * width, size)
        # Garbage past the clock may be anything, NaN included: a zero weight alone would not silence it.
        old_v = jnp.where(live[:, None, :, None], old_v, jnp.zeros((), q.dtype))
        past = jnp.where(seen, _scores(folded, old_k), MASKED)
        top = jnp.maximum(past.max(-1, keepdims=True), own.max(-1, keepdims=True))
        past_weight, own_weight = jnp.exp(past - top), jnp.exp(own - top)
        total = past_weight.sum(-1, keepdims=True) + own_weight.sum(-1, keepdims=True)
        out = _mix(past_weight.astype(q.dtype), old_v) + _mix(own_weight.astype(q.dtype), v)
        return (out / total).astype(q.dtype)

    sizes = context_sizes(cache.capacity)
    if len(sizes) == 1:
        out = over(sizes[0])
    else:
        out = jax.lax.switch(bucket, [functools.partial(over, size) for size in sizes])
    out = out.reshape(rows, kv_heads, group, width, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, width, heads, head_dim)


def causal(q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array | None) -> jax.Array:
    """Causal softmax attention of whole sequences that all start at position 0, without a cache.

    Queries are taken in blocks, each against the keys up to its own end: half the work, and scores that stay in a
    processor's cache.

    Args:
      q: ``[B, T, Q, H]``, rotated; k, v: ``[B, T, K, H]``; window: as in ``attend``.

    Returns: ``[B, T, Q, H]`` in the dtype of ``q``; a padded slot sees what lies before it.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    block = max(64, -(-length // 8))
    q = (q * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(rows, length, kv_heads, group, head_dim)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        size = stop - start
        mine = q[:, start:stop].transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * size, head_dim)
        at = jnp.arange(start, stop, dtype=jnp.int32)[:, None]
        # Keys before the block are seen by all of it; a window hides some of those too.
        pieces = [(0, start, window is not None)] if start else []
        scores = []
        for first, last, masked in [*pieces, (start, stop, True)]:
            score = _scores(mine, k[:, :, first:last])
            if masked:
                key = jnp.arange(first, last, dtype=jnp.int32)[None]
                seen = key <= at
                if window is not None:
                    seen = seen & ((window == 0) | (key > at - window))
                seen = jnp.broadcast_to(seen[None], (group, size, last - first)).reshape(group * size, last - first)
                score = jnp.where(seen[None, None], score, MASKED)
            scores.append((score, v[:, :, first:last]))
        top = functools.reduce(jnp.maximum, [score.max(-1, keepdims=True) for score, _ in scores])
        weights = [(jnp.exp(score - top), value) for score, value in scores]
        total = functools.reduce(jnp.add, [weight.sum(-1, keepdims=True) for weight, _ in weights])
        out = functools.reduce(jnp.add, [_mix(weight.astype(q.dtype), value) for weight, value in weights]) / total
        out = out.reshape(rows, kv_heads, group, size, head_dim).transpose(0, 3, 1, 2, 4)
        parts.append(out.astype(q.dtype))
    return jnp.concatenate(parts, axis=1).reshape(rows, length, heads, head_dim)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """``[B, K, R, H] x [B, K, S, H] -> [B, K, R, S]`` in float32."""
    return jax.lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """``[B, K, R, S] x [B, K, S, H] -> [B, K, R, H]`` in float32."""
    return jax.lax.dot_general(weights, v, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
