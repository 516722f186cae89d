"""Key/value caches with one clock per row, and the flat list of tokens that a pass runs over (STYLE: one clock, one forward).

Axes: L layers, B rows (requests), K key/value heads, S capacity in tokens, H head width, N tokens of a pass, T the most
tokens that one row has in a pass. A cache is valid on ``[0, context)`` of a row; what lies beyond is garbage by contract.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

SMALLEST_CONTEXT = 128


class KVCache(flax.struct.PyTreeNode):
    """Keys and values ``[L, B, K, S, H]``."""

    k: jax.Array
    v: jax.Array

    @property
    def capacity(self) -> int:
        return self.k.shape[3]


def empty_cache(layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """A zeroed cache; allocated once at full capacity."""
    shape = (layers, rows, kv_heads, capacity, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def context_sizes(capacity: int) -> tuple[int, ...]:
    """The context lengths that a pass is compiled for: powers of two from 128, and the capacity."""
    sizes = []
    size = SMALLEST_CONTEXT
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


class TokenBatch(flax.struct.PyTreeNode):
    """The N tokens of one pass, grouped by row, in rising position within a row.

    Attributes:
      tokens, rows, slots, positions: int32 ``[N]``; ``slots`` counts from 0 within the row.
      valid: bool ``[N]``; an invalid entry fills up the compiled size and writes nowhere.
      counts: int32 ``[B]``, tokens of every row; context: int32 ``[B]``, cached tokens before the first of them.
      width: T, static.
      dense: static: the list is the ``[B, T]`` grid itself, so that regrouping is a reshape.
    """

    tokens: jax.Array
    rows: jax.Array
    slots: jax.Array
    positions: jax.Array
    valid: jax.Array
    counts: jax.Array
    context: jax.Array
    width: int = flax.struct.field(pytree_node=False)
    dense: bool = flax.struct.field(pytree_node=False, default=False)


def pack(grid: jax.Array, counts: jax.Array, context: jax.Array, size: int) -> TokenBatch:
    """Flatten the first ``counts[b]`` tokens of every row of ``grid [B, T]`` into a list of ``size`` tokens.

    ``size`` must be at least the sum of ``counts`` (or a whole grid); tokens beyond it would be dropped.
    """
    rows_total, width = grid.shape
    width = min(width, size)
    index = jnp.arange(size, dtype=jnp.int32)
    dense = size == rows_total * width
    if dense:
        rows, slots = index // width, index % width
        valid = slots < counts[rows]
    else:
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        valid = rows < rows_total
        rows = jnp.minimum(rows, rows_total - 1)
        slots = jnp.where(valid, index - (ends - counts)[rows], 0)
    tokens = jnp.where(valid, grid[rows, slots], 0)
    positions = jnp.where(valid, context[rows] + slots, 0)
    return TokenBatch(tokens, rows, slots, positions, valid, counts, context, width, dense)


def to_grid(batch: TokenBatch, x: jax.Array) -> jax.Array:
    """Regroup ``x [N, ...]`` as ``[B, T, ...]``; slots that a row does not have are zero (or garbage when dense)."""
    rows, width = batch.counts.shape[0], batch.width
    if batch.dense:
        return x.reshape(rows, width, *x.shape[1:])
    starts = jnp.cumsum(batch.counts, dtype=jnp.int32) - batch.counts
    slot = jnp.arange(width, dtype=jnp.int32)[None, :]
    index = jnp.where(slot < batch.counts[:, None], starts[:, None] + slot, x.shape[0])
    return x.at[index].get(mode="fill", fill_value=0)


def from_grid(batch: TokenBatch, x: jax.Array) -> jax.Array:
    """The inverse of ``to_grid`` for ``x [B, T, ...]``: ``[N, ...]``."""
    if batch.dense:
        return x.reshape(-1, *x.shape[2:])
    return x[batch.rows, batch.slots]


def write(cache: KVCache, k: jax.Array, v: jax.Array, rows: jax.Array, positions: jax.Array, keep: jax.Array) -> KVCache:
    """Store ``k, v [L, N, K, H]`` at (row, position); entries not kept or outside the capacity are dropped on purpose."""
    at = jnp.where(keep, positions, cache.capacity)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.swapaxes(new, 0, 1).astype(old.dtype)  # indexed axes come first: [N, L, K, H]
        return old.at[:, rows, :, at].set(new, mode="drop")

    return KVCache(put(cache.k, k), put(cache.v, v))
