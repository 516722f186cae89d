"""Attention over context and block on GPU (Pallas to Triton): one program a row and key/value head, online softmax.

Axes as in ``folding``; L layers, S capacity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import folding

MIN_DOT = 16  # Triton's matrix products have no smaller side


class BlockSizes(NamedTuple):
    """lines, width, head_dim: query rows, own slots and H rounded up to powers of two; tile: cached positions a step; warps."""

    lines: int
    width: int
    head_dim: int
    tile: int
    warps: int


def _power(x: int) -> int:
    return max(MIN_DOT, 1 << (x - 1).bit_length())


def block_sizes_for(lines: int, width: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> BlockSizes:
    """Blocks for ``lines`` query rows a head, ``width`` own slots and a cache of ``capacity``.

    Raises:
      ValueError: so many query rows that a program's registers do not hold their sums.
    """
    blocks = BlockSizes(
        _power(lines),
        _power(width),
        _power(head_dim),
        min(64 if jnp.dtype(dtype).itemsize < 4 else 32, _power(capacity)),
        4 if lines <= 32 else 8,
    )
    if blocks.lines * blocks.head_dim > 2**15:
        raise ValueError(
            f"{lines} query rows of width {head_dim} a head; the GPU kernel holds 32768 numbers; name another backend"
        )
    return blocks


def _kernel(
    layer_ref: Any,
    context_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    seen_ref: Any,
    oldest_ref: Any,
    cache_k_ref: Any,
    cache_v_ref: Any,
    out_ref: Any,
    *,
    lines: int,
    width: int,
    head_dim: int,
    blocks: BlockSizes,
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    layer, context = layer_ref[0], context_ref[row]
    line = jnp.arange(blocks.lines, dtype=jnp.int32) < lines
    slot = jnp.arange(blocks.width, dtype=jnp.int32) < width
    column = jnp.arange(blocks.head_dim, dtype=jnp.int32) < head_dim
    line_span, slot_span, column_span = pl.ds(0, blocks.lines), pl.ds(0, blocks.width), pl.ds(0, blocks.head_dim)
    q_mask = line[:, None] & column[None, :]
    q = plgpu.load(q_ref.at[row, head, line_span, column_span], mask=q_mask, other=0.0)
    precision = folding.precision_of(q.dtype)

    def scores(keys: jax.Array) -> jax.Array:
        return jnp.dot(q, keys.T, precision=precision, preferred_element_type=jnp.float32)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.dot(weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)

    own_mask = slot[:, None] & column[None, :]
    keys = plgpu.load(k_ref.at[row, head, slot_span, column_span], mask=own_mask, other=0.0)
    values = plgpu.load(v_ref.at[row, head, slot_span, column_span], mask=own_mask, other=0.0)
    seen = plgpu.load(seen_ref.at[row, line_span, slot_span], mask=line[:, None] & slot[None, :], other=0)
    oldest = plgpu.load(oldest_ref.at[row, line_span, pl.ds(0, 1)], mask=line[:, None], other=-1)
    own = jnp.where((seen > 0) & slot[None, :], scores(keys), folding.MASKED)
    top = jnp.max(own, axis=1)
    weights = jnp.exp(own - top[:, None])
    start = (top, jnp.sum(weights, axis=1), mix(weights, values))

    def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before, total, mixed = carry
        at = step * blocks.tile + jnp.arange(blocks.tile, dtype=jnp.int32)
        where = (layer, row, head, pl.ds(step * blocks.tile, blocks.tile), column_span)
        # What lies past the clock is not even read.
        live = (at < context)[:, None] & column[None, :]
        past = scores(plgpu.load(cache_k_ref.at[where], mask=live, other=0.0))
        past = jnp.where((at < context)[None, :] & (at[None, :] > oldest), past, folding.MASKED)
        top = jnp.maximum(before, jnp.max(past, axis=1))
        weights, shrink = jnp.exp(past - top[:, None]), jnp.exp(before - top)
        values = plgpu.load(cache_v_ref.at[where], mask=live, other=0.0)
        return top, total * shrink + jnp.sum(weights, axis=1), mixed * shrink[:, None] + mix(weights, values)

    steps = jax.lax.div(context + blocks.tile - 1, blocks.tile)
    _, total, mixed = jax.lax.fori_loop(0, steps, body, start)
    out = (mixed / total[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, head, line_span, column_span], out, mask=q_mask)


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
    interpret: bool,
) -> jax.Array:
    """The whole op; arguments as in ``pallas_kernels.attention.attend``, already checked."""
    rows, width, _, head_dim = q.shape
    folded = folding.fold(q, k, v, block_mask, context, window)
    lines = folded.q.shape[2]
    blocks = block_sizes_for(lines, width, cache_k.shape[3], head_dim, q.dtype)
    out = pl.pallas_call(
        functools.partial(_kernel, lines=lines, width=width, head_dim=head_dim, blocks=blocks),
        grid=(rows, cache_k.shape[2]),
        out_shape=jax.ShapeDtypeStruct(folded.q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=interpret,
        name="dspark_attend",
    )(layer[None], context, *folded, cache_k, cache_v)
    return folding.unfold(out, width)
