"""The verify op on TPU (Mosaic), in two kernels.

First pass: a block holds whole vocabulary rows in VMEM, so logits and q are read from HBM once and every further sweep
(normaliser, filter thresholds by bisection, 1 - TV, coupled draw) runs on the chip. What leaves is one line of 128 numbers a
row. Second pass: copies the one row of p and of q that decides, and draws.

Axes: rows are laid out as ``[outer, inner, V]``: ``[T, B, V]`` or ``[B, T, V]``, whichever wastes less of a register's
sublanes; V is padded to W by the pipeline and masked here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.verify import tiles
from pallas_kernels.verify.types import Filters, Mode, QNorm, RowStats, Verdict

LANES = 128
MAX_TILE = 2048  # 8 x 2048 float32 are 16 of 64 vector registers
VMEM = 60 * 2**20  # all supported chips have at least 64 MiB
SLACK = 4 * 2**20  # what the compiler needs besides the blocks


class BlockSizes(NamedTuple):
    """slot_major: rows as ``[T, B, V]``; rows: of one block; tile: ids per sweep step; width: V rounded up to tiles; group:
    lines that are copied to get one; vmem: bytes of both kernels' larger one, double buffers included."""

    slot_major: bool
    rows: int
    tile: int
    width: int
    group: int
    vmem: int


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def block_sizes_for(batch: int, width: int, vocab: int, dtype: jnp.dtype, wide_inputs: int) -> BlockSizes:
    """Blocks for ``[batch, width, vocab]`` logits of ``dtype`` and ``wide_inputs`` float32 arrays of the same rows.

    Raises:
      ValueError: whole rows of this vocabulary do not fit the chip's VMEM.
    """
    itemsize = jnp.dtype(dtype).itemsize
    sublanes = 8 * 4 // itemsize
    slot_major = width * _round_up(batch, sublanes) <= batch * _round_up(width, sublanes)
    inner = batch if slot_major else width
    tile = min(MAX_TILE, _round_up(vocab, LANES))
    padded = _round_up(vocab, tile)
    # Lines of 32 bits can be copied one by one; of a packed dtype only aligned groups, or all of them.
    group = 1 if itemsize == 4 else next((g for g in (sublanes, 8) if inner % g == 0), inner)

    def first_pass(rows: int) -> int:
        bytes_in = _round_up(rows, sublanes) * itemsize + wide_inputs * _round_up(rows, 8) * 4
        return 2 * padded * bytes_in + SLACK

    second_pass = padded * (_round_up(group, sublanes) * itemsize + 2 * 8 * 4 + 2 * 8 * 4) + SLACK
    rows = min(_round_up(inner, 8), sublanes)
    needed = max(first_pass(rows), second_pass)
    if needed > VMEM:
        raise ValueError(
            f"logits [{batch}, {width}, {vocab}] {jnp.dtype(dtype).name}: blocks of whole rows need {needed} bytes of VMEM and"
            f" {VMEM} are to be used; name backend='reference'"
        )
    return BlockSizes(slot_major, rows, tile, padded, group, needed)


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(flags, 1.0, 0.0), axis=-1, keepdims=True)


def _any(flags: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(flags, 1.0, 0.0), axis=-1, keepdims=True)


def _least_id(where: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.min(jnp.where(where, ids, tiles.NO_ID), axis=-1, keepdims=True)


def _first_pass(*refs: Any, vocab: int, tile: int, mode: Mode, has_q: bool, soft: bool) -> None:
    refs_in = list(refs[:-1])
    out_ref = refs[-1]
    x_ref, token_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref = refs_in[:6]
    extra_ref = refs_in[6] if len(refs_in) > 6 else None  # q in sample mode, noise in coupled mode
    norm = (refs_in[7][0], refs_in[8][0]) if len(refs_in) > 7 else None
    token, temperature = token_ref[0], temperature_ref[0]
    rows = token.shape[0]
    steps = pl.cdiv(vocab, tile)

    def part(ref: Any, step: jax.Array) -> jax.Array:
        return ref[0, :, pl.ds(pl.multiple_of(step * tile, tile), tile)].astype(jnp.float32)

    def ids_of(step: jax.Array) -> jax.Array:
        return step * tile + jax.lax.broadcasted_iota(jnp.int32, (rows, tile), 1)

    def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((rows, 1), value, dtype)

    def extremes(ref: Any) -> tuple[jax.Array, ...]:
        """Largest entry, its lowest id, the entry at the draft, and whether the row is usable (0 or 1)."""

        def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, best, picked, broken = carry
            ids, raw = ids_of(step), part(ref, step)
            broken = jnp.maximum(broken, _any((ids < vocab) & tiles.is_broken(raw)))
            x = jnp.where(ids < vocab, tiles.without_nan(raw), -jnp.inf)
            here = jnp.max(x, axis=-1, keepdims=True)
            best = jnp.where(here > top, _least_id(x == here, ids), best)
            picked = jnp.maximum(picked, jnp.max(jnp.where(ids == token, x, -jnp.inf), axis=-1, keepdims=True))
            return jnp.maximum(top, here), best, picked, broken

        start = (full(-jnp.inf), full(0, jnp.int32), full(-jnp.inf), full(0.0))
        top, best, picked, broken = jax.lax.fori_loop(0, steps, body, start)
        return top, best, picked, jnp.where((broken == 0) & (top > -jnp.inf), 1.0, 0.0)

    top, best, picked, finite = extremes(x_ref)

    def scaled(step: jax.Array) -> jax.Array:
        x = jnp.where(ids_of(step) < vocab, part(x_ref, step), -jnp.inf)
        return tiles.scale(x, top, temperature)

    def total(term: Any) -> jax.Array:
        """Sum over the row of ``term(scaled tile, ids)``."""

        def body(step: jax.Array, acc: jax.Array) -> jax.Array:
            return acc + jnp.sum(term(scaled(step), ids_of(step)), axis=-1, keepdims=True)

        return jax.lax.fori_loop(0, steps, body, full(0.0))

    def largest(enough: Any) -> jax.Array:
        """The largest non-positive float at which ``enough`` holds, by bisection over its bit pattern; -inf if none."""

        def halve(_: jax.Array, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = span
            middle = low + ((high - low) >> 1)
            ok = enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
            return jnp.where(ok, low, jnp.minimum(middle + 1, high)), jnp.where(ok, middle, high)

        start = (full(tiles.MINUS_ZERO, jnp.int32), full(tiles.MINUS_INF, jnp.int32))
        return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, halve, start)[1], jnp.float32)

    def if_any(on: jax.Array, threshold: Any) -> jax.Array:
        """``threshold()`` for the rows that are ``on``; a block without any skips the search."""
        found = jax.lax.cond(jnp.max(jnp.where(on, 1.0, 0.0)) > 0, threshold, lambda: full(-jnp.inf))
        return jnp.where(on, found, -jnp.inf)

    log_z, cut, soft_sum = full(0.0), full(-jnp.inf), full(0.0)
    log_p = jnp.where(token == best, 0.0, -jnp.inf)
    if mode != "greedy":
        top_k, top_p, min_p = top_k_ref[0], top_p_ref[0], min_p_ref[0]
        wanted = top_k.astype(jnp.float32)
        kth = if_any(top_k > 0, lambda: largest(lambda t: total(lambda s, _: jnp.where(s >= t, 1.0, 0.0)) >= wanted))

        def nucleus() -> jax.Array:
            goal = top_p * total(lambda s, _: jnp.where(s >= kth, jnp.exp(s), 0.0))
            return largest(lambda t: total(lambda s, _: jnp.where((s >= kth) & (s >= t), jnp.exp(s), 0.0)) >= goal)

        cut = jnp.maximum(kth, if_any(top_p < 1, nucleus))
        cut = jnp.maximum(cut, jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, tiles.TINY)), -jnp.inf))
        log_z = jnp.log(total(lambda s, _: jnp.where(s >= cut, jnp.exp(s), 0.0)))
        log_p = tiles.log_prob(tiles.scale(picked, top, temperature), token, temperature, best, cut, log_z)

    def log_probs(step: jax.Array) -> jax.Array:
        return tiles.log_prob(scaled(step), ids_of(step), temperature, best, cut, log_z)

    log_q, q_finite = full(-jnp.inf), full(0.0)
    choice, choice_log_p = best, full(0.0)
    if has_q:
        _, _, log_q, q_finite = extremes(extra_ref)
        log_q = tiles.log_q_of(log_q, norm, temperature)
    if soft:

        def overlap(step: jax.Array, acc: jax.Array) -> jax.Array:
            q = tiles.log_q_of(part(extra_ref, step), norm, temperature)
            q = jnp.where(ids_of(step) < vocab, q, -jnp.inf)
            return acc + jnp.sum(jnp.minimum(jnp.exp(log_probs(step)), jnp.exp(q)), axis=-1, keepdims=True)

        soft_sum = jax.lax.fori_loop(0, steps, overlap, full(0.0))
    if mode == "coupled":

        def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return _better(carry, log_probs(step), jnp.where(ids_of(step) < vocab, part(extra_ref, step), 0.0), ids_of(step))

        _, choice, choice_log_p = jax.lax.fori_loop(0, steps, body, (full(-jnp.inf), full(0, jnp.int32), full(-jnp.inf)))
    columns = RowStats(top, best, finite, cut, log_z, log_p, log_q, q_finite, soft_sum, choice, choice_log_p)
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    table = jnp.zeros((rows, LANES), jnp.float32)
    for i, column in enumerate(columns):
        table = jnp.where(lane == i, column.astype(jnp.float32), table)
    out_ref[0] = table


def _better(carry: tuple[jax.Array, ...], weights: jax.Array, noise: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Fold a tile into (best score, its lowest id, its log p) of a Gumbel-max draw over log weights that are log p."""
    return _better_of(carry, tiles.perturbed(weights, noise), weights, ids)


def _better_of(carry: tuple[jax.Array, ...], score: jax.Array, log_p: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    best, token, at = carry
    here = jnp.max(score, axis=-1, keepdims=True)
    first = _least_id(score == here, ids)
    its = jnp.max(jnp.where(ids == first, log_p, -jnp.inf), axis=-1, keepdims=True)
    wins = here > best
    return jnp.where(wins, here, best), jnp.where(wins, first, token), jnp.where(wins, its, at)


def _sweep(vocab: int, tile: int, body: Any, carry: Any) -> Any:
    """``body(start, size, carry)`` over whole tiles and the shorter rest."""
    whole = vocab // tile
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(pl.multiple_of(i * tile, tile), tile, c), carry)
    return body(whole * tile, vocab % tile, carry) if vocab % tile else carry


def _second_pass(
    *refs: Any, vocab: int, tile: int, has_q: bool, normed: bool, batch: int, slot_major: bool, group: int, inner: int
) -> None:
    at_ref, q_at_ref, stats_ref, noise_ref = refs[:4]
    refs = refs[4:]
    x_hbm, q_hbm = (refs[0], refs[1]) if has_q else (refs[0], None)
    out_ref, x_rows, q_rows, x_group, sem, group_sem = refs[2 if has_q else 1 :]
    rows = x_rows.shape[0]
    first = pl.program_id(0) * rows

    def where(row: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (position, row) if slot_major else (row, position)

    def direct(j: int) -> list[Any]:
        """Copies that bring one line each into row ``j``."""
        row = first + j
        copies = []
        for hbm, at, rows_ref in ((x_hbm, at_ref, x_rows), (q_hbm, q_at_ref, q_rows)):
            if hbm is not None and (hbm is q_hbm or group == 1):
                outer, line = where(row, at[row])
                target = rows_ref.at[pl.ds(j, 1)]
                copies.append(pltpu.make_async_copy(hbm.at[outer, pl.ds(line, 1)], target, sem))
        return copies

    def grouped(j: int) -> None:
        """Lines of a packed dtype cannot be addressed one by one: fetch the aligned group and pick the line."""
        row = first + j
        outer, line = where(row, at_ref[row])
        start = 0 if group == inner else pl.multiple_of(line & -group, group)  # 8 or 16, if not the whole

        copy = pltpu.make_async_copy(x_hbm.at[outer, pl.ds(start, group)], x_group, group_sem)
        copy.start()
        copy.wait()

        def select(start_id: Any, size: int, carry: jax.Array) -> jax.Array:
            span = pl.ds(start_id, size)
            lines = x_group[:, span].astype(jnp.float32)
            mine = jax.lax.broadcasted_iota(jnp.int32, lines.shape, 0) == line - start
            # A sum would let the other lines' NaN in; the maximum of the selected line with -inf is that line.
            x_rows[pl.ds(j, 1), span] = jnp.max(jnp.where(mine, tiles.without_nan(lines), -jnp.inf), axis=0, keepdims=True)
            return carry

        _sweep(vocab, tile, select, jnp.int32(0))

    for j in range(rows):

        @pl.when(first + j < batch)
        def _(j: int = j) -> None:
            for copy in direct(j):
                copy.start()

    for j in range(rows):

        @pl.when(first + j < batch)
        def _(j: int = j) -> None:
            if group > 1:
                grouped(j)
            for copy in direct(j):
                copy.wait()

    top, best, temperature, cut, log_z, q_top, q_log_z = (stats_ref[:, i : i + 1] for i in range(7))
    norm = (q_top, q_log_z) if normed else None
    best = best.astype(jnp.int32)

    def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((rows, 1), value, dtype)

    def body(start: Any, size: int, carry: tuple[Any, Any, jax.Array]) -> tuple[Any, Any, jax.Array]:
        residual, plain, left_over = carry
        span = pl.ds(start, size)
        ids = start + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1)
        noise = noise_ref[:, span]
        log_p = tiles.log_prob(tiles.scale(x_rows[:, span], top, temperature), ids, temperature, best, cut, log_z)
        plain = _better(plain, log_p, noise, ids)
        if q_hbm is not None:
            left = jnp.maximum(jnp.exp(log_p) - jnp.exp(tiles.log_q_of(q_rows[:, span], norm, temperature)), 0.0)
            weights = jnp.where(left > 0, jnp.log(left), -jnp.inf)
            residual = _better_of(residual, tiles.perturbed(weights, noise), log_p, ids)
            left_over = jnp.maximum(left_over, _any(left > 0))
        return residual, plain, left_over

    nothing = (full(-jnp.inf), full(0, jnp.int32), full(-jnp.inf))
    residual, plain, left_over = _sweep(vocab, tile, body, (nothing, nothing, full(0.0)))
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    table = jnp.zeros((rows, LANES), jnp.float32)
    for i, column in enumerate((residual[1], residual[2], plain[1], plain[2], left_over)):
        table = jnp.where(lane == i, column.astype(jnp.float32), table)
    out_ref[...] = table


def verify(
    logits: jax.Array,
    log_q: jax.Array | None,
    q_norm: QNorm | None,
    tokens: jax.Array,
    scheduled: jax.Array,
    filters: Filters,
    uniform: jax.Array | None,
    noise: Any,
    mode: Mode,
    soft: bool,
    interpret: bool,
) -> Verdict:
    """The whole op; arguments as in ``pallas_kernels.verify.verify``, already checked."""
    batch, width, vocab = logits.shape
    has_q = log_q is not None and width > 1
    extra = log_q if has_q else noise if mode == "coupled" else None
    blocks = block_sizes_for(batch, width, vocab, logits.dtype, 0 if extra is None else 1)
    arrange = (lambda x: jnp.swapaxes(x, 0, 1)) if blocks.slot_major else (lambda x: x)
    params = pltpu.CompilerParams(vmem_limit_bytes=blocks.vmem)
    x = arrange(logits)
    outer, inner = x.shape[:2]

    def rows() -> RowStats:
        def lines(v: jax.Array) -> jax.Array:
            return arrange(jnp.broadcast_to(v[:, None], (batch, width)))[..., None]

        drafts = arrange(jnp.pad(tokens, ((0, 0), (0, 1))))[..., None]
        whole, line = (1, blocks.rows, blocks.width), (1, blocks.rows, 1)
        operands = [x, drafts, *(lines(f) for f in filters)]
        specs = [pl.BlockSpec(whole, lambda i, j: (i, j, 0)), *[pl.BlockSpec(line, lambda i, j: (i, j, 0))] * 5]
        if extra is not None:
            # q has one slot less than p; the last position reads any, and nothing looks at what it makes of it.
            wide = arrange(extra)
            last = (wide.shape[0] - 1, pl.cdiv(wide.shape[1], blocks.rows) - 1)
            operands.append(wide)
            # Python's min would need concrete indices.
            specs.append(pl.BlockSpec(whole, lambda i, j: (jnp.minimum(i, last[0]), jnp.minimum(j, last[1]), 0)))
        if has_q and q_norm is not None:
            for per_slot in q_norm:
                operands.append(arrange(jnp.pad(per_slot, ((0, 0), (0, 1))))[..., None])
                specs.append(pl.BlockSpec(line, lambda i, j: (i, j, 0)))
        table = pl.pallas_call(
            functools.partial(_first_pass, vocab=vocab, tile=blocks.tile, mode=mode, has_q=has_q, soft=soft and has_q),
            grid=(outer, pl.cdiv(inner, blocks.rows)),
            in_specs=specs,
            out_specs=pl.BlockSpec((1, blocks.rows, LANES), lambda i, j: (i, j, 0)),
            out_shape=jax.ShapeDtypeStruct((outer, inner, LANES), jnp.float32),
            compiler_params=params,
            interpret=interpret,
            name="dspark_verify_rows",
        )(*operands)
        return tiles.unpack(arrange(table))

    def draw(here: RowStats, accepted: jax.Array, behind: jax.Array) -> tiles.Draw:
        g = noise(accepted) if callable(noise) else noise
        columns = (here.top, here.best.astype(jnp.float32), filters.temperature, here.cut, here.log_z)
        norm = [jnp.zeros_like(here.top)] * 2
        if has_q and q_norm is not None:
            norm = [jnp.take_along_axis(x, behind[:, None], axis=1)[:, 0] for x in q_norm]
        stats = jnp.stack([*columns, *norm, here.top], axis=1)
        step_rows = min(batch, 8)
        packed = blocks.group > 1
        hbm = [x] if not has_q else [x, arrange(log_q)]
        scratch = [
            pltpu.VMEM((step_rows, vocab), jnp.float32),
            pltpu.VMEM((step_rows, vocab if has_q else LANES), jnp.float32),
            pltpu.VMEM((blocks.group, vocab if packed else LANES), logits.dtype),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.DMA(()),
        ]
        table = pl.pallas_call(
            functools.partial(
                _second_pass,
                vocab=vocab,
                tile=blocks.tile,
                has_q=has_q,
                normed=q_norm is not None,
                batch=batch,
                slot_major=blocks.slot_major,
                group=blocks.group,
                inner=inner,
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(pl.cdiv(batch, step_rows),),
                in_specs=[
                    pl.BlockSpec((step_rows, 8), lambda i, *_: (i, 0)),
                    pl.BlockSpec((step_rows, blocks.width), lambda i, *_: (i, 0)),
                    *[pl.BlockSpec(memory_space=pl.ANY)] * len(hbm),
                ],
                out_specs=pl.BlockSpec((step_rows, LANES), lambda i, *_: (i, 0)),
                scratch_shapes=scratch,
            ),
            out_shape=jax.ShapeDtypeStruct((batch, LANES), jnp.float32),
            compiler_params=params,
            interpret=interpret,
            name="dspark_verify_draw",
        )(accepted, behind, stats, g, *hbm)
        token, log_p, plain_token, plain_log_p, left = (table[:, i] for i in range(5))
        return tiles.Draw(token.astype(jnp.int32), log_p, plain_token.astype(jnp.int32), plain_log_p, left.astype(jnp.int32))

    return tiles.accept(rows, draw, tokens, scheduled, filters, uniform, mode, soft)
