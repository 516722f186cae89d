"""The verify op on GPU (Pallas to Triton), in two kernels.

First pass: one program a row sweeps the vocabulary; a row's later sweeps (filter thresholds, 1 - TV, coupled draw) come out of
the L2 cache. Thresholds are found four bits of their pattern a sweep. Second pass: one program a request reads the row of p
and of q that decides, and draws.

Axes: B rows, T positions, n slots, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.verify import tiles
from pallas_kernels.verify.types import Filters, Mode, QNorm, RowStats, Verdict

WARP = 32
DIGIT_BITS = 4
COLUMNS = 16  # of the table that the first pass writes
DRAW_COLUMNS = 8


class BlockSizes(NamedTuple):
    """tile: ids a sweep step; search_tile: ids a step of a threshold search, which holds 16 comparisons of each; warps."""

    tile: int
    search_tile: int
    warps: int


def block_sizes_for(vocab: int, dtype: jnp.dtype) -> BlockSizes:
    """Powers of two; a thread holds 32 bytes of a row at a time, so that its loads are as wide as they can be."""
    warps = 8
    per_thread = 64 // jnp.dtype(dtype).itemsize
    tile = min(warps * WARP * per_thread, max(WARP, 1 << (vocab - 1).bit_length()))
    return BlockSizes(tile, min(1024, tile), warps)


def _row(ref: Any, index: tuple[Any, ...], vocab: int) -> Any:
    """``(step, tile) -> (float32 tile, ids)``; -inf behind the end."""

    def load(step: Any, tile: int) -> tuple[jax.Array, jax.Array]:
        ids = step * tile + jnp.arange(tile, dtype=jnp.int32)
        x = plgpu.load(ref.at[(*index, pl.ds(step * tile, tile))], mask=ids < vocab, other=-jnp.inf)
        return x.astype(jnp.float32), ids

    return load


def _fold(carry: tuple[jax.Array, ...], score: jax.Array, log_p: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Fold a tile into (best score, its lowest id, its log p)."""
    best, token, at = carry
    here = jnp.max(score)
    first = jnp.min(jnp.where(score == here, ids, tiles.NO_ID))
    its = jnp.max(jnp.where(ids == first, log_p, -jnp.inf))
    wins = here > best
    return jnp.where(wins, here, best), jnp.where(wins, first, token), jnp.where(wins, its, at)


def _first_pass(*refs: Any, vocab: int, slots: int, blocks: BlockSizes, mode: Mode, has_q: bool, soft: bool) -> None:
    x_ref, token_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref = refs[:6]
    extra_ref = refs[6] if len(refs) > 7 else None  # q in sample mode, noise in coupled mode
    out_ref = refs[-1]
    request, position = pl.program_id(0), pl.program_id(1)
    token, temperature = token_ref[request, position], temperature_ref[request]
    tile, steps = blocks.tile, pl.cdiv(vocab, blocks.tile)
    p_row = _row(x_ref, (request, position), vocab)
    minus_inf, zero = jnp.float32(-jnp.inf), jnp.float32(0)

    def extremes(row: Any) -> tuple[jax.Array, ...]:
        """Largest entry, its lowest id, the entry at the draft, and whether the row is usable (0 or 1)."""

        def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, best, picked, broken = carry
            raw, ids = row(step, tile)
            broken = jnp.maximum(broken, jnp.max(jnp.where(tiles.is_broken(raw), 1.0, 0.0)))
            x = tiles.without_nan(raw)
            here = jnp.max(x)
            first = jnp.min(jnp.where(x == here, ids, tiles.NO_ID))
            picked = jnp.maximum(picked, jnp.max(jnp.where(ids == token, x, -jnp.inf)))
            return jnp.maximum(top, here), jnp.where(here > top, first, best), picked, broken

        top, best, picked, broken = jax.lax.fori_loop(0, steps, body, (minus_inf, jnp.int32(0), minus_inf, zero))
        return top, best, picked, jnp.where((broken == 0) & (top > -jnp.inf), tiles.ONE, tiles.ZERO)

    top, best, picked, finite = extremes(p_row)

    def scaled(step: jax.Array, tile: int = tile) -> tuple[jax.Array, jax.Array]:
        x, ids = p_row(step, tile)
        return tiles.scale(x, top, temperature), ids

    def total(term: Any, steps: Any = steps) -> jax.Array:
        def body(step: jax.Array, acc: jax.Array) -> jax.Array:
            return acc + jnp.sum(term(scaled(step)[0]))

        return jax.lax.fori_loop(0, steps, body, zero)

    def largest(on: jax.Array, weight: Any, goal: jax.Array) -> jax.Array:
        """The largest non-positive float t for which the weights of the entries at or above t reach ``goal``; -inf if none,
        or if not ``on``, and then without a sweep.

        Its bit pattern, counted from -0.0, digit by digit: the digit is the number of candidates that are not enough.
        """
        digit = jnp.arange(1 << DIGIT_BITS, dtype=jnp.int32)
        search_steps = pl.cdiv(vocab, blocks.search_tile)

        def refine(turn: jax.Array, base: jax.Array) -> jax.Array:
            shift = (7 - turn) * DIGIT_BITS
            last = jnp.where(
                turn == 0, np.int32(7), np.int32(15)
            )  # 31 bits: the first digit has three; the last candidate always is enough
            offset = base + jnp.left_shift(jnp.minimum(digit, last - 1) + 1, shift) - 1
            threshold = jax.lax.bitcast_convert_type(jnp.minimum(tiles.MINUS_ZERO + offset, tiles.MINUS_INF), jnp.float32)

            def body(step: jax.Array, acc: jax.Array) -> jax.Array:
                s, _ = scaled(step, blocks.search_tile)
                return acc + jnp.sum(jnp.where(s[None, :] >= threshold[:, None], weight(s)[None, :], 0.0), axis=1)

            reached = jax.lax.fori_loop(0, search_steps, body, jnp.zeros((1 << DIGIT_BITS,), jnp.float32))
            short = jnp.sum(jnp.where((digit < last) & (reached < goal), 1, 0))
            return base + jnp.left_shift(short, shift)

        base = jax.lax.fori_loop(0, jnp.where(on, np.int32(32 // DIGIT_BITS), np.int32(0)), refine, jnp.int32(0))
        found = jax.lax.bitcast_convert_type(jnp.minimum(tiles.MINUS_ZERO + base, tiles.MINUS_INF), jnp.float32)
        return jnp.where(on, found, -jnp.inf)

    log_z, cut = zero, minus_inf
    log_p = jnp.where(token == best, tiles.ZERO, tiles.MINUS_INFINITY)
    if mode != "greedy":
        top_k, top_p, min_p = top_k_ref[request], top_p_ref[request], min_p_ref[request]
        kth = largest(top_k > 0, jnp.ones_like, top_k.astype(jnp.float32))

        def kept(s: jax.Array) -> jax.Array:
            return jnp.where(s >= kth, jnp.exp(s), 0.0)

        nucleus = largest(top_p < 1, kept, top_p * total(kept, jnp.where(top_p < 1, np.int32(steps), np.int32(0))))
        floor = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, tiles.TINY)), -jnp.inf)
        cut = jnp.maximum(jnp.maximum(kth, nucleus), floor)
        log_z = jnp.log(total(lambda s: jnp.where(s >= cut, jnp.exp(s), 0.0)))
        log_p = tiles.log_prob(tiles.scale(picked, top, temperature), token, temperature, best, cut, log_z)

    def log_probs(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        s, ids = scaled(step)
        return jnp.where(ids < vocab, tiles.log_prob(s, ids, temperature, best, cut, log_z), -jnp.inf), ids

    log_q, q_finite, soft_sum = minus_inf, zero, zero
    choice, choice_log_p = best, zero
    if has_q:
        # The last position has no draft; what it reads of another slot is looked at by nobody.
        slot = jnp.minimum(position, slots - 1)
        q_row = _row(extra_ref, (request, slot), vocab)
        norm = (refs[7][request, slot], refs[8][request, slot]) if len(refs) > 8 else None
        _, _, log_q, q_finite = extremes(q_row)
        log_q = tiles.log_q_of(log_q, norm, temperature)
        if soft:

            def overlap(step: jax.Array, acc: jax.Array) -> jax.Array:
                raw, ids = q_row(step, tile)
                q = jnp.where(ids < vocab, tiles.log_q_of(raw, norm, temperature), -jnp.inf)
                return acc + jnp.sum(jnp.minimum(jnp.exp(log_probs(step)[0]), jnp.exp(q)))

            soft_sum = jax.lax.fori_loop(0, steps, overlap, zero)
    if mode == "coupled":
        noise_row = _row(extra_ref, (request, position), vocab)

        def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            weights, ids = log_probs(step)
            return _fold(carry, tiles.perturbed(weights, noise_row(step, tile)[0]), weights, ids)

        _, choice, choice_log_p = jax.lax.fori_loop(0, steps, body, (minus_inf, jnp.int32(0), minus_inf))
    columns = {"top": top, "best": best, "finite": finite, "log_p": log_p}
    if mode != "greedy":
        columns |= {"cut": cut, "log_z": log_z}
    if has_q:
        columns |= {"log_q": log_q, "q_finite": q_finite}
    if soft:
        columns["soft"] = soft_sum
    if mode == "coupled":
        columns |= {"choice": choice, "choice_log_p": choice_log_p}
    # What a mode does not compute stays unwritten, and nothing reads it.
    for name, column in columns.items():
        out_ref[request, position, RowStats._fields.index(name)] = column.astype(jnp.float32)


def _second_pass(*refs: Any, vocab: int, blocks: BlockSizes, has_q: bool, normed: bool) -> None:
    at_ref, q_at_ref, stats_ref, noise_ref, x_ref = refs[:5]
    out_ref = refs[-1]
    request = pl.program_id(0)
    tile, steps = blocks.tile, pl.cdiv(vocab, blocks.tile)
    p_row = _row(x_ref, (request, at_ref[request]), vocab)
    noise_row = _row(noise_ref, (request,), vocab)
    q_row = _row(refs[5], (request, q_at_ref[request]), vocab) if has_q else None
    top, best, temperature, cut, log_z = (stats_ref[request, i] for i in range(5))
    best = best.astype(jnp.int32)
    norm = (stats_ref[request, 5], stats_ref[request, 6]) if normed else None
    minus_inf, zero = jnp.float32(-jnp.inf), jnp.float32(0)

    def body(step: jax.Array, carry: tuple[Any, Any, jax.Array]) -> tuple[Any, Any, jax.Array]:
        residual, plain, left_over = carry
        x, ids = p_row(step, tile)
        noise, _ = noise_row(step, tile)
        log_p = tiles.log_prob(tiles.scale(x, top, temperature), ids, temperature, best, cut, log_z)
        log_p = jnp.where(ids < vocab, log_p, -jnp.inf)
        plain = _fold(plain, tiles.perturbed(log_p, noise), log_p, ids)
        if q_row is not None:
            left = jnp.maximum(jnp.exp(log_p) - jnp.exp(tiles.log_q_of(q_row(step, tile)[0], norm, temperature)), 0.0)
            weights = jnp.where(left > 0, jnp.log(left), -jnp.inf)
            residual = _fold(residual, tiles.perturbed(weights, noise), log_p, ids)
            left_over = jnp.maximum(left_over, jnp.max(jnp.where(left > 0, 1.0, 0.0)))
        return residual, plain, left_over

    nothing = (minus_inf, jnp.int32(0), minus_inf)
    residual, plain, left_over = jax.lax.fori_loop(0, steps, body, (nothing, nothing, zero))
    columns = (plain[1], plain[2], residual[1], residual[2], left_over)
    for i, column in enumerate(columns if has_q else columns[:2]):
        out_ref[request, i] = column.astype(jnp.float32)


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
    blocks = block_sizes_for(vocab, logits.dtype)
    params = plgpu.CompilerParams(num_warps=blocks.warps, num_stages=2)

    def rows() -> RowStats:
        operands = [logits, jnp.pad(tokens, ((0, 0), (0, 1))), *filters]
        if extra is not None:
            operands.append(extra)
        if has_q and q_norm is not None:
            operands += q_norm
        table = pl.pallas_call(
            functools.partial(
                _first_pass, vocab=vocab, slots=width - 1, blocks=blocks, mode=mode, has_q=has_q, soft=soft and has_q
            ),
            grid=(batch, width),
            out_shape=jax.ShapeDtypeStruct((batch, width, COLUMNS), jnp.float32),
            compiler_params=params,
            interpret=interpret,
            name="dspark_verify_rows",
        )(*operands)
        return tiles.unpack(table)

    def draw(here: RowStats, accepted: jax.Array, behind: jax.Array) -> tiles.Draw:
        g = noise(accepted) if callable(noise) else noise
        stats = [here.top, here.best.astype(jnp.float32), filters.temperature, here.cut, here.log_z]
        if has_q and q_norm is not None:
            stats += [jnp.take_along_axis(x, behind[:, None], axis=1)[:, 0] for x in q_norm]
        table = pl.pallas_call(
            functools.partial(_second_pass, vocab=vocab, blocks=blocks, has_q=has_q, normed=has_q and q_norm is not None),
            grid=(batch,),
            out_shape=jax.ShapeDtypeStruct((batch, DRAW_COLUMNS), jnp.float32),
            compiler_params=params,
            interpret=interpret,
            name="dspark_verify_draw",
        )(accepted, behind, jnp.stack(stats, axis=1), g, logits, *([log_q] if has_q else []))
        if not has_q:  # nothing was drafted, so nothing is taken from p
            table = jnp.concatenate([table[:, :2], table[:, :2], jnp.zeros((batch, 1), jnp.float32)], axis=1)
        plain_token, plain_log_p, token, log_p, left = (table[:, i] for i in range(5))
        return tiles.Draw(token.astype(jnp.int32), log_p, plain_token.astype(jnp.int32), plain_log_p, left.astype(jnp.int32))

    return tiles.accept(rows, draw, tokens, scheduled, filters, uniform, mode, soft)
