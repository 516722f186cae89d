"""The markov op on GPU (Pallas to Triton), one kernel a slot, enqueued by one program without a visit to the host.

A grid of vocabulary tiles cannot agree on a token inside a Triton kernel, since its programs do not wait for each other. So
each slot is one kernel over all tiles, which adds the bias, writes the logits over the base logits and leaves statistics of
its tile; the small rest (merging them, a row of w1, the gates) is XLA's.

Axes: B rows, n slots, r rank, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.markov import tiles
from pallas_kernels.markov.types import Block, Confidence, Head, Kind

COLUMNS = 8
MIN_DOT = 16  # Triton's matrix products have no smaller side


class BlockSizes(NamedTuple):
    """rows and tile of one program, both powers of two; rank: r rounded up to one; warps."""

    rows: int
    tile: int
    rank: int
    warps: int


def _power(x: int) -> int:
    return max(MIN_DOT, 1 << (x - 1).bit_length())


def block_sizes_for(batch: int, vocab: int, rank: int, dtype: jnp.dtype) -> BlockSizes:
    """As many rows as there are, up to 64, so that w2 is read once or twice; fewer ids where w2 is wide."""
    rows = min(64, _power(batch))
    tile = min(128 if jnp.dtype(dtype).itemsize < 4 else 64, _power(vocab))
    return BlockSizes(rows, tile, _power(rank), 8 if rows * tile >= 4096 else 4)


def _kernel(*refs: Any, batch: int, vocab: int, rank: int, blocks: BlockSizes, sampled: bool) -> None:
    slot_ref, features_ref, w2_ref, base_ref = refs[:4]
    noise_ref, temperature_ref = refs[4:6] if sampled else (None, None)
    logits_ref, table_ref = refs[-2:]
    program, group = pl.program_id(0), pl.program_id(1)
    slot = slot_ref[0]
    rows = group * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    ids = program * blocks.tile + jnp.arange(blocks.tile, dtype=jnp.int32)
    columns = jnp.arange(blocks.rank, dtype=jnp.int32)
    row_span, id_span = pl.ds(group * blocks.rows, blocks.rows), pl.ds(program * blocks.tile, blocks.tile)
    live, seen = rows < batch, ids < vocab
    rank_span, real = pl.ds(0, blocks.rank), columns < rank

    features = plgpu.load(features_ref.at[row_span, rank_span], mask=live[:, None] & real[None, :], other=0.0)
    weights = plgpu.load(w2_ref.at[id_span, rank_span], mask=seen[:, None] & real[None, :], other=0.0)
    inside = live[:, None] & seen[None, :]
    bias = jnp.dot(
        features.astype(weights.dtype),
        weights.T,
        precision=tiles.precision_of(weights.dtype),
        preferred_element_type=jnp.float32,
    )
    where = (row_span, slot, id_span)
    logits = plgpu.load(base_ref.at[where], mask=inside, other=-jnp.inf) + bias
    noise = None
    if noise_ref is None or temperature_ref is None:
        scale, greedy = jnp.ones((blocks.rows, 1), jnp.float32), jnp.ones((blocks.rows, 1), jnp.bool_)
    else:
        plgpu.store(logits_ref.at[where], logits, mask=inside)
        noise = plgpu.load(noise_ref.at[where], mask=inside, other=0.0)
        temperature = plgpu.load(temperature_ref.at[row_span], mask=live, other=1.0)[:, None]
        greedy = temperature == 0
        scale = jnp.where(greedy, 1.0, temperature)
    spread = jnp.broadcast_to(ids[None, :], logits.shape)
    here = tiles.of_tile(logits, noise, spread, jnp.broadcast_to(seen[None, :], logits.shape), scale, greedy)
    for i, column in enumerate(here):
        plgpu.store(table_ref.at[row_span, program, pl.ds(i, 1)], column.astype(jnp.float32), mask=live[:, None])


def propose(
    hidden: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    head: Head,
    confidence: Confidence | None,
    temperature: jax.Array | None,
    noise: jax.Array | None,
    kind: Kind,
    interpret: bool,
) -> Block:
    """The whole op; arguments as in ``pallas_kernels.markov.propose``, already checked."""
    batch, slots, _ = hidden.shape
    vocab, rank = head.w2.shape
    sampled = noise is not None
    blocks = block_sizes_for(batch, vocab, rank, head.w2.dtype)
    known = tiles.prepare(hidden, head, confidence, kind)
    programs = pl.cdiv(vocab, blocks.tile)
    scale = jnp.ones((batch, 1), jnp.float32)
    if temperature is not None:
        scale = jnp.where(temperature == 0, 1.0, temperature)[:, None]
    call = pl.pallas_call(
        functools.partial(_kernel, batch=batch, vocab=vocab, rank=rank, blocks=blocks, sampled=sampled),
        grid=(programs, pl.cdiv(batch, blocks.rows)),
        out_shape=[
            jax.ShapeDtypeStruct(base.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, programs, COLUMNS), jnp.float32),
        ],
        input_output_aliases={3: 0},  # a program reads its tile of the base logits before it writes it
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=1),
        interpret=interpret,
        name="dspark_markov_slot",
    )

    def step(carry: Any, slot: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        previous, memory, logits = carry
        drive = None if known.drive is None else jax.lax.dynamic_index_in_dim(known.drive, slot, 1, keepdims=False)
        features, memory = tiles.features(kind, previous, memory, drive, known.mix)
        sure = jax.lax.dynamic_index_in_dim(known.sure, slot, 1, keepdims=False)
        sure = sure + jnp.sum(previous * known.sure_mix, axis=1)
        logits, table = call(slot[None], features, head.w2, logits, *([noise, temperature] if sampled else []))
        top, mass, score, index, broken = (table[..., i] for i in range(5))
        # All tiles at once: the lowest of the best ids, everything relative to the row's top.
        highest = jnp.max(top, axis=1, keepdims=True)
        down = (top - jnp.where(highest > -jnp.inf, highest, 0.0)) / scale
        mass = jnp.sum(mass * jnp.exp(down), axis=1)
        winner = jnp.argmax(score + down, axis=1)
        index = jnp.take_along_axis(index, winner[:, None], axis=1)[:, 0].astype(jnp.int32)
        sound = (jnp.max(broken, axis=1) == 0) & (highest[:, 0] > -jnp.inf)
        index = jnp.where(sound, index, 0)
        out = (index, jnp.where(sound, highest[:, 0], 0.0), jnp.where(sound, jnp.log(mass), 0.0), sure)
        return (known.w1[index].astype(jnp.float32), memory, logits), out

    start = (head.w1[anchor].astype(jnp.float32), jnp.zeros((batch, rank), jnp.float32), base)
    (_, _, logits), columns = jax.lax.scan(step, start, jnp.arange(slots, dtype=jnp.int32))
    index, top, log_z, sure = (jnp.swapaxes(x, 0, 1) for x in columns)
    return Block(
        index if head.kept is None else head.kept[index],
        None if confidence is None else sure,
        logits if sampled else None,
        top,
        log_z,
    )
