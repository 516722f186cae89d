"""The markov op on TPU (Mosaic), one kernel for the whole block: grid (slot, vocabulary tile).

At the first tile of a slot the features come from w1 of the token that the slot before drew; every tile streams its part of
w2, the base logits and the noise once and keeps running statistics of all rows; the last tile settles the tokens and fetches
their rows of w1 from HBM. Nothing leaves the kernel between slots.

Axes: B rows, n slots, r rank, V vocabulary; arrays are laid out slot first, ``[n, B, V]``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.markov import tiles
from pallas_kernels.markov.types import Block, Confidence, Head, Kind

LANES = 128
TILE_BYTES = 2 * 2**20  # of one streamed block: long enough to hide the cost of a grid step, short enough for VMEM
VMEM = 60 * 2**20  # all supported chips have at least 64 MiB
SLACK = 6 * 2**20  # tokens, features and what the compiler needs
MAX_ROWS = 512


class BlockSizes(NamedTuple):
    """tile: ids of one grid step; group: rows of w1 that are fetched to get one; vmem: bytes, double buffers included."""

    tile: int
    group: int
    vmem: int


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def block_sizes_for(batch: int, vocab: int, rank: int, dtype: jnp.dtype, kind: Kind) -> BlockSizes:
    """Blocks for ``[n, batch, vocab]`` float32 logits and w2 ``[vocab, rank]`` of ``dtype``.

    Raises:
      ValueError: too many rows for one kernel.
    """
    if batch > MAX_ROWS:
        raise ValueError(f"{batch} rows; the TPU kernel drafts for at most {MAX_ROWS} at once; name backend='reference'")
    itemsize = jnp.dtype(dtype).itemsize
    wide = max(rank * itemsize, _round_up(batch, 8) * 4)
    tile = min(max(TILE_BYTES // wide // LANES, 1) * LANES, _round_up(vocab, LANES))
    lanes = _round_up(rank, LANES)
    mix = {"vanilla": 0, "gated": rank, "rnn": 6 * rank}[kind] * lanes * itemsize
    group = 1 if itemsize == 4 else 16
    fetched = batch * group * lanes * itemsize if group > 1 else 0
    streamed = 2 * tile * (lanes * itemsize + 3 * _round_up(batch, 8) * 4)
    rows = _round_up(batch, 8) * lanes * 4 * 10  # features, memory, drives and the values in flight
    vmem = streamed + 2 * mix + fetched + rows + SLACK
    if vmem > VMEM:
        raise ValueError(
            f"{batch} rows of rank {rank} need {vmem} bytes of VMEM and {VMEM} are to be used; name backend='reference'"
        )
    return BlockSizes(tile, group, vmem)


def _kernel(*refs: Any, vocab: int, kind: Kind, sampled: bool, group: int, last_group: int) -> None:
    refs_in = iter(refs)
    base_ref, w2_ref, w1_hbm, first_ref, sure_ref, sure_mix_ref = (next(refs_in) for _ in range(6))
    noise_ref, temperature_ref = (next(refs_in), next(refs_in)) if sampled else (None, None)
    drive_ref, mix_ref = (next(refs_in), next(refs_in)) if kind != "vanilla" else (None, None)
    table_ref = next(refs_in)
    logits_ref = next(refs_in) if sampled else None
    previous, memory, features, running, token_vmem, token_smem, fetched, sem = refs_in
    slot, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    batch, tile = base_ref.shape[1:]
    if temperature_ref is None:
        scale, greedy = jnp.ones((batch, 1), jnp.float32), jnp.ones((batch, 1), bool)
    else:
        greedy = temperature_ref[...] == 0
        scale = jnp.where(greedy, 1.0, temperature_ref[...])

    @pl.when((slot == 0) & (step == 0))
    def _() -> None:
        previous[...] = first_ref[...].astype(jnp.float32)
        memory[...] = jnp.zeros_like(memory)

    @pl.when(step == 0)
    def _() -> None:
        drive, mix = (None, None) if drive_ref is None or mix_ref is None else (drive_ref[0], mix_ref[...])
        made, kept = tiles.features(kind, previous[...], memory[...], drive, mix)
        features[...] = made
        memory[...] = kept
        running[...] = _pack(
            tiles.Running(
                jnp.full((batch, 1), -jnp.inf),
                jnp.zeros((batch, 1)),
                jnp.full((batch, 1), -jnp.inf),
                jnp.zeros((batch, 1), jnp.int32),
                jnp.zeros((batch, 1)),
            )
        )

    ids = step * tile + jax.lax.broadcasted_iota(jnp.int32, (batch, tile), 1)
    logits = base_ref[0] + tiles.times(features[...], w2_ref[...])
    if logits_ref is not None:
        logits_ref[0] = logits
    noise = None if noise_ref is None else noise_ref[0]
    here = tiles.of_tile(logits, noise, ids, ids < vocab, scale, greedy)
    now = tiles.merge(_unpack(running[...]), here, scale)
    running[...] = _pack(now)

    @pl.when(step == steps - 1)
    def _() -> None:
        sound = (now.broken == 0) & (now.top > -jnp.inf)
        index = jnp.where(sound, now.best_id, 0)
        sure = sure_ref[0] + jnp.sum(previous[...] * sure_mix_ref[...], axis=1, keepdims=True)
        top, log_z = jnp.where(sound, now.top, 0.0), jnp.where(sound, jnp.log(now.mass), 0.0)
        table_ref[0] = _columns((index.astype(jnp.float32), top, log_z, sure))
        token_vmem[...] = jnp.broadcast_to(index, token_vmem.shape)
        pltpu.sync_copy(token_vmem, token_smem)

        def source(row: jax.Array) -> Any:
            return w1_hbm.at[pl.ds(_start(row), group)]

        def _start(row: jax.Array) -> Any:
            token = token_smem[row, 0]
            # The last group may not be whole; it then starts earlier.
            return token if group == 1 else pl.multiple_of(jnp.minimum(token & -group, last_group), 8)

        def target(row: jax.Array) -> Any:
            return previous.at[pl.ds(row, 1)] if group == 1 else fetched.at[row]

        def start(row: jax.Array, carry: jax.Array) -> jax.Array:
            pltpu.make_async_copy(source(row), target(row), sem).start()
            return carry

        def finish(row: jax.Array, carry: jax.Array) -> jax.Array:
            pltpu.make_async_copy(source(row), target(row), sem).wait()
            return carry

        def pick(row: jax.Array, carry: jax.Array) -> jax.Array:
            lines = fetched[row].astype(jnp.float32)
            mine = jax.lax.broadcasted_iota(jnp.int32, lines.shape, 0) == token_smem[row, 0] - _start(row)
            previous[pl.ds(row, 1), :] = jnp.sum(jnp.where(mine, lines, 0.0), axis=0, keepdims=True)
            return carry

        for turn in (start, finish) if group == 1 else (start, finish, pick):
            jax.lax.fori_loop(0, batch, turn, jnp.int32(0))


def _columns(values: tuple[jax.Array, ...]) -> jax.Array:
    rows = values[0].shape[0]
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    table = jnp.zeros((rows, LANES), jnp.float32)
    for i, value in enumerate(values):
        table = jnp.where(lane == i, value, table)
    return table


def _pack(running: tiles.Running) -> jax.Array:
    return _columns(tuple(x.astype(jnp.float32) for x in running))


def _unpack(table: jax.Array) -> tiles.Running:
    top, mass, score, index, broken = (table[:, i : i + 1] for i in range(5))
    return tiles.Running(top, mass, score, index.astype(jnp.int32), broken)


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
    blocks = block_sizes_for(batch, vocab, rank, head.w2.dtype, kind)
    known = tiles.prepare(hidden, head, confidence, kind)
    w1 = known.w1
    if w1.dtype.itemsize < 4 and vocab % 8:
        w1 = jnp.pad(w1, ((0, -vocab % 8), (0, 0)))  # a copy of w1, for vocabularies that no released model has
    group = 1 if blocks.group == 1 else min(blocks.group, w1.shape[0])
    grid = (slots, pl.cdiv(vocab, blocks.tile))

    def per_slot(x: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        x = jnp.swapaxes(x, 0, 1)
        return x, pl.BlockSpec((1, batch, x.shape[2]), lambda k, v: (k, 0, 0))

    def streamed(x: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        return jnp.swapaxes(x, 0, 1), pl.BlockSpec((1, batch, blocks.tile), lambda k, v: (k, 0, v))

    def constant(x: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        return x, pl.BlockSpec(x.shape, lambda k, v: (0, 0))

    inputs = [
        streamed(base),
        (head.w2, pl.BlockSpec((blocks.tile, rank), lambda k, v: (v, 0))),
        (w1, pl.BlockSpec(memory_space=pl.ANY)),
        constant(head.w1[anchor]),
        per_slot(known.sure[..., None]),
        constant(known.sure_mix),
    ]
    if noise is not None and temperature is not None:
        inputs += [streamed(noise), constant(temperature[:, None])]
    if known.drive is not None and known.mix is not None:
        inputs += [per_slot(known.drive), constant(known.mix)]
    out_shape = [jax.ShapeDtypeStruct((slots, batch, LANES), jnp.float32)]
    out_specs = [pl.BlockSpec((1, batch, LANES), lambda k, v: (k, 0, 0))]
    if sampled:
        out_shape.append(jax.ShapeDtypeStruct((slots, batch, vocab), jnp.float32))
        out_specs.append(pl.BlockSpec((1, batch, blocks.tile), lambda k, v: (k, 0, v)))
    table, *logits = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, kind=kind, sampled=sampled, group=group, last_group=w1.shape[0] - group),
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((batch, rank), jnp.float32),  # w1 of the token before
            pltpu.VMEM((batch, rank), jnp.float32),  # memory of the rnn
            pltpu.VMEM((batch, rank), jnp.float32),  # features
            pltpu.VMEM((batch, LANES), jnp.float32),  # running statistics
            pltpu.VMEM((batch, LANES), jnp.int32),
            pltpu.SMEM((batch, LANES), jnp.int32),
            pltpu.VMEM((batch, group, rank) if group > 1 else (1, 8, LANES), w1.dtype),
            pltpu.SemaphoreType.DMA(()),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=blocks.vmem, dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="dspark_markov",
    )(*(x for x, _ in inputs))
    index, top, log_z, sure = (jnp.swapaxes(table[..., i], 0, 1) for i in range(4))
    index = index.astype(jnp.int32)
    return Block(
        index if head.kept is None else head.kept[index],
        None if confidence is None else sure,
        jnp.swapaxes(logits[0], 0, 1) if sampled else None,
        top,
        log_z,
    )
