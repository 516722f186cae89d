"""What both markov kernels share: the part of the heads that no draw can change, and the running statistics of a row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.markov.types import Confidence, Head, Kind

NO_ID = 2**31 - 1


class Known(NamedTuple):
    """Computed for all slots at once, before the first draw; float32.

    drive: ``[B, n, r]`` or ``[B, n, 3r]``, the hidden state's part of the gates with their bias, or None (vanilla);
    mix: ``[r, r]`` or ``[3r, 2r]``, the rest of the projection, for (w1) or (memory, w1); sure: ``[B, n]``, the hidden state's
    part of the confidence; sure_mix: ``[1, r]``, the rest of it, zero without a Markov part; w1: ``[V, r]`` by drafted id.
    """

    drive: jax.Array | None
    mix: jax.Array | None
    sure: jax.Array
    sure_mix: jax.Array
    w1: jax.Array


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Float32 weights are multiplied as such, not rounded to bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def times(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [rows, in]`` by ``weight [out, in]`` transposed, float32."""
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision_of(weight.dtype),
        preferred_element_type=jnp.float32,
    )


def prepare(hidden: jax.Array, head: Head, confidence: Confidence | None, kind: Kind) -> Known:
    """Everything that does not depend on a draw."""
    batch, slots, width = hidden.shape
    rank = head.w1.shape[1]
    flat = hidden.reshape(batch * slots, width)
    drive = mix = None
    if kind != "vanilla":
        assert head.proj is not None and head.bias is not None
        known, mix = (
            (head.proj[:, :width], head.proj[:, width:])
            if kind == "gated"
            else (
                head.proj[:, 2 * rank :],
                head.proj[:, : 2 * rank],
            )
        )
        drive = (times(flat, known) + head.bias.astype(jnp.float32)[None]).reshape(batch, slots, -1)
    sure, sure_mix = jnp.zeros((batch, slots), jnp.float32), jnp.zeros((1, rank), jnp.float32)
    if confidence is not None:
        sure = (times(flat, confidence.proj[:, :width]) + confidence.bias.astype(jnp.float32)[None]).reshape(batch, slots)
        if confidence.proj.shape[1] > width:
            sure_mix = confidence.proj[:, width:].astype(jnp.float32)
    return Known(drive, mix, sure, sure_mix, head.w1 if head.kept is None else head.w1[head.kept])


def features(
    kind: Kind, previous: jax.Array, memory: jax.Array, drive: jax.Array | None, mix: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What w2 is applied to, and the new memory, float32 ``[rows, r]``; ``previous`` is w1 of the token before."""
    if kind == "vanilla":
        return previous, memory
    assert drive is not None and mix is not None
    if kind == "gated":
        return jax.nn.sigmoid(drive + times(previous, mix)) * previous, memory
    rank = previous.shape[1]
    z = drive + times(memory, mix[:, :rank]) + times(previous, mix[:, rank:])
    gate = jax.nn.sigmoid(z[:, :rank])
    memory = gate * memory + (1 - gate) * jnp.tanh(z[:, rank : 2 * rank])
    return jnp.tanh(z[:, 2 * rank :]), memory


class Running(NamedTuple):
    """Of the ids seen so far, ``[rows, 1]``: top, the largest logit; mass: sum of exp((logit - top) / temperature); score: of
    the best id, relative to top; best_id: int32, that id; broken: 1 if any logit was NaN or +inf."""

    top: jax.Array
    mass: jax.Array
    score: jax.Array
    best_id: jax.Array
    broken: jax.Array


def merge(a: Running, b: Running, scale: jax.Array) -> Running:
    """Statistics of two sets of ids, those of ``a`` before those of ``b``. The best id is kept relative to the top, so that a
    low temperature blows up differences only."""
    top = jnp.maximum(a.top, b.top)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    down_a, down_b = (a.top - safe) / scale, (b.top - safe) / scale
    score_a, score_b = a.score + down_a, b.score + down_b
    wins = score_b > score_a
    return Running(
        top,
        a.mass * jnp.exp(down_a) + b.mass * jnp.exp(down_b),
        jnp.where(wins, score_b, score_a),
        jnp.where(wins, b.best_id, a.best_id),
        jnp.maximum(a.broken, b.broken),
    )


def of_tile(
    logits: jax.Array, noise: jax.Array | None, ids: jax.Array, seen: jax.Array, scale: jax.Array, greedy: jax.Array
) -> Running:
    """Statistics of one tile ``[rows, tile]``; ``seen``: ids that exist; ``scale``, ``greedy [rows, 1]``: temperature, or 1 and
    True."""
    broken = jnp.max(jnp.where(seen & ((logits != logits) | (logits == jnp.inf)), 1.0, 0.0), axis=1, keepdims=True)
    clean = jnp.where(seen & (logits == logits) & (logits < jnp.inf), logits, -jnp.inf)
    top = jnp.max(clean, axis=1, keepdims=True)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    down = (clean - safe) / scale
    score = down
    if noise is not None:
        score = jnp.where(greedy | (clean == -jnp.inf), down, down + noise)
    best = jnp.max(score, axis=1, keepdims=True)
    index = jnp.min(jnp.where((score == best) & seen, ids, NO_ID), axis=1, keepdims=True)
    return Running(top, jnp.sum(jnp.exp(down), axis=1, keepdims=True), best, index, broken)
