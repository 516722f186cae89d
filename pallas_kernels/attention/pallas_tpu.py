"""Attention over context and block on TPU (Mosaic): grid (row, key/value head, context tile), online softmax.

Tiles behind a row's context are neither fetched nor computed: their block index stays at the last one that counts.

Axes as in ``folding``; L layers, S capacity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import folding

LANES = 128
TILE_BYTES = 256 * 2**10  # of keys or values; two of each are in flight
VMEM = 48 * 2**20
SLACK = 4 * 2**20


class BlockSizes(NamedTuple):
    """tile: cached positions of one grid step; vmem: bytes."""

    tile: int
    vmem: int


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def block_sizes_for(lines: int, width: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> BlockSizes:
    """Blocks for ``lines`` query rows a head, ``width`` own slots and a cache of ``capacity``.

    Raises:
      ValueError: so many query rows that the scores do not fit.
    """
    itemsize, lanes = jnp.dtype(dtype).itemsize, _round_up(head_dim, LANES)
    tile = min(max(TILE_BYTES // (lanes * itemsize) // LANES, 1) * LANES, _round_up(capacity, 8 * 4 // itemsize))
    wide = _round_up(lines, 16)
    blocks = 2 * (2 * tile + 2 * _round_up(width, 16) + 2 * wide) * lanes * itemsize + 2 * wide * _round_up(width, LANES) * 4
    vmem = blocks + wide * (lanes * 3 + 3 * _round_up(tile, LANES) + 4 * LANES) * 4 + SLACK
    if vmem > VMEM:
        raise ValueError(f"{lines} query rows a head need {vmem} bytes of VMEM and {VMEM} are to be used; name another backend")
    return BlockSizes(tile, vmem)


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
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    *,
    tile: int,
) -> None:
    del layer_ref  # the index maps have used it
    row, step = pl.program_id(0), pl.program_id(2)
    context = context_ref[row]
    q = q_ref[0, 0]
    precision = folding.precision_of(q.dtype)

    def scores(keys: jax.Array) -> jax.Array:
        return jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    @pl.when(step == 0)
    def _() -> None:
        own = jnp.where(seen_ref[0] > 0, scores(k_ref[0, 0]), folding.MASKED)
        top = jnp.max(own, axis=1, keepdims=True)
        weights = jnp.exp(own - top)
        top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
        total_ref[...] = jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), total_ref.shape)
        sum_ref[...] = mix(weights, v_ref[0, 0])

    @pl.when(step * tile < context)
    def _() -> None:
        values = cache_v_ref[0, 0, 0]
        at = step * tile + jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], tile), 1)
        line = step * tile + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        # Garbage past the clock may be anything, NaN included: a zero weight alone would not silence it.
        values = jnp.where(line < context, values.astype(jnp.float32), 0.0).astype(values.dtype)
        past = scores(cache_k_ref[0, 0, 0])
        past = jnp.where((at < context) & (at > oldest_ref[0]), past, folding.MASKED)
        before = top_ref[:, :1]
        top = jnp.maximum(before, jnp.max(past, axis=1, keepdims=True))
        weights, shrink = jnp.exp(past - top), jnp.exp(before - top)
        top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
        total = total_ref[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        sum_ref[...] = sum_ref[...] * shrink + mix(weights, values)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        out_ref[0, 0] = (sum_ref[...] / total_ref[:, :1]).astype(out_ref.dtype)


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
    _, _, kv_heads, capacity, _ = cache_k.shape
    folded = folding.fold(q, k, v, block_mask, context, window)
    lines = folded.q.shape[2]
    blocks = block_sizes_for(lines, width, capacity, head_dim, q.dtype)

    def cached(b: jax.Array, h: jax.Array, s: jax.Array, layer: Any, context: Any) -> tuple[Any, ...]:
        last = jnp.maximum(jax.lax.div(context[b] + blocks.tile - 1, blocks.tile) - 1, 0)
        return layer[0], b, h, jnp.minimum(s, last), 0

    queries = pl.BlockSpec((1, 1, lines, head_dim), lambda b, h, s, *_: (b, h, 0, 0))
    own = pl.BlockSpec((1, 1, width, head_dim), lambda b, h, s, *_: (b, h, 0, 0))
    cache = pl.BlockSpec((1, 1, 1, blocks.tile, head_dim), cached)
    out = pl.pallas_call(
        functools.partial(_kernel, tile=blocks.tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, pl.cdiv(capacity, blocks.tile)),
            in_specs=[
                queries,
                own,
                own,
                pl.BlockSpec((1, lines, width), lambda b, h, s, *_: (b, 0, 0)),
                pl.BlockSpec((1, lines, 1), lambda b, h, s, *_: (b, 0, 0)),
                cache,
                cache,
            ],
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((lines, LANES), jnp.float32),  # largest score
                pltpu.VMEM((lines, LANES), jnp.float32),  # sum of weights
                pltpu.VMEM((lines, head_dim), jnp.float32),  # weighted values
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(folded.q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=blocks.vmem, dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="dspark_attend",
    )(layer[None], context, *folded, cache_k, cache_v)
    return folding.unfold(out, width)
