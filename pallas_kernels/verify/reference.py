"""The verify op in plain XLA, written from the definition and sharing nothing with the kernels: filters by a full sort.

Axes: B rows, n drafted slots, T = n + 1 positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.verify.types import Filters, Mode, QNorm, Verdict


def usable(rows: jax.Array) -> jax.Array:
    """Rows of ``[..., V]`` without NaN and +inf and with at least one finite entry."""
    hopeless = jnp.isnan(rows) | jnp.isposinf(rows)
    return ~jnp.any(hopeless, axis=-1) & jnp.any(jnp.isfinite(rows), axis=-1)


def target_log_probs(logits: jax.Array, filters: Filters) -> tuple[jax.Array, jax.Array]:
    """Processed log-probabilities float32 ``[B, T, V]`` (-inf throughout for an unusable row) and usable rows ``[B, T]``."""
    vocab = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    ok = usable(logits)
    temperature, top_k, top_p, min_p = (f[:, None, None] for f in filters)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=bool)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature == 0, 1.0, temperature)

    def filtered(scaled: jax.Array) -> jax.Array:
        rank = jnp.arange(vocab, dtype=jnp.int32)[None, None]
        down = -jnp.sort(-scaled, axis=-1)
        kth = jnp.min(jnp.where(rank < jnp.where(top_k > 0, top_k, vocab), down, jnp.inf), axis=-1, keepdims=True)
        mass = jnp.where(down >= kth, jnp.exp(down), 0.0)
        reached = jnp.cumsum(mass, axis=-1) >= top_p * jnp.sum(mass, axis=-1, keepdims=True)
        last = jnp.max(jnp.where(reached, down, -jnp.inf), axis=-1, keepdims=True)
        nucleus = jnp.where(top_p < 1, last, -jnp.inf)
        floor = jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)
        return jnp.where((scaled >= kth) & (scaled >= nucleus) & (scaled >= floor), scaled, -jnp.inf)

    any_filter = jnp.any((filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0))
    scaled = jax.lax.cond(any_filter, filtered, lambda x: x, scaled)
    soft = scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    log_p = jnp.where(temperature == 0, jnp.where(best, 0.0, -jnp.inf), soft)
    return jnp.where(ok[..., None], log_p, -jnp.inf), ok


def pick(table: jax.Array, ids: jax.Array) -> jax.Array:
    """``table [..., V]`` at ``ids [...]``."""
    return jnp.take_along_axis(table, ids[..., None], axis=-1)[..., 0]


def gumbel_max(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """Lowest id of the largest ``weights + noise`` (``[..., V]``) among the ids of non-zero mass."""
    return jnp.argmax(jnp.where(jnp.isneginf(weights), -jnp.inf, weights + noise), axis=-1).astype(jnp.int32)


def verify(
    logits: jax.Array,
    log_q: jax.Array | None,
    q_norm: QNorm | None,
    tokens: jax.Array,
    scheduled: jax.Array,
    filters: Filters,
    uniform: jax.Array | None,
    noise: jax.Array | Callable[[jax.Array], jax.Array] | None,
    mode: Mode,
    soft: bool,
) -> Verdict:
    """The whole op; arguments as in ``pallas_kernels.verify.verify``, already checked."""
    rows, width, vocab = logits.shape
    slots = width - 1
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    due = slot < scheduled[:, None]
    if mode == "greedy":
        ok = usable(logits.astype(jnp.float32))
        log_p = jnp.where(jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=bool), 0.0, -jnp.inf)
    else:
        log_p, ok = target_log_probs(logits, filters)
    if log_q is not None and q_norm is not None:
        scale = jnp.where(filters.temperature == 0, 1.0, filters.temperature)[:, None, None]
        log_q = (log_q - q_norm.top[..., None]) / scale - q_norm.log_z[..., None]
    q_ok = None if log_q is None else usable(log_q)
    overlap = None
    if soft:
        assert log_q is not None and q_ok is not None
        overlap = jnp.sum(jnp.minimum(jnp.exp(log_p[:, :slots]), jnp.exp(log_q)), axis=-1)
        overlap = jnp.where(ok[:, :slots] & q_ok, overlap, 0.0)

    if mode == "sample":
        assert log_q is not None and q_ok is not None and uniform is not None
        q_of_draft = jnp.exp(pick(log_q, tokens))
        honest = q_ok & (q_of_draft > 0)
        take = due & ok[:, :slots] & honest & (uniform * q_of_draft < jnp.exp(pick(log_p[:, :slots], tokens)))
        choice = None
    else:
        if mode == "greedy":
            choice = jnp.argmax(log_p, axis=-1).astype(jnp.int32)
        else:
            assert isinstance(noise, jax.Array)
            choice = gumbel_max(log_p, noise)
        take = due & ok[:, :slots] & (choice[:, :slots] == tokens)
    accepted = jnp.sum(jnp.cumprod(take.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    at_accepted = jnp.arange(width, dtype=jnp.int32)[None] == accepted[:, None]

    degenerate = jnp.zeros((rows,), bool)
    deciding = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
    if choice is None:
        assert log_q is not None and noise is not None
        refused = accepted < scheduled
        # One more row stands for the slot after the last: nothing was drafted there, so its q is zero and sound.
        padded_q = jnp.pad(log_q, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
        sound = jnp.any(jnp.pad(honest, ((0, 0), (0, 1)), constant_values=True) & at_accepted, axis=1)
        row_q = jnp.take_along_axis(padded_q, accepted[:, None, None], axis=1)[:, 0]
        subtract = (refused & sound)[:, None]
        left = jnp.maximum(jnp.exp(deciding) - jnp.where(subtract, jnp.exp(row_q), 0.0), 0.0)
        empty = ~jnp.any(left > 0, axis=-1)
        weights = jnp.where(subtract & ~empty[:, None], jnp.log(left), deciding)
        next_token = gumbel_max(weights, noise(accepted) if callable(noise) else noise)
        degenerate = (refused & ~sound) | (subtract[:, 0] & empty)
    else:
        next_token = jnp.sum(jnp.where(at_accepted, choice, 0), axis=1, dtype=jnp.int32)

    run = jnp.where(at_accepted, next_token[:, None], jnp.pad(tokens, ((0, 0), (0, 1))))
    committed = jnp.arange(width, dtype=jnp.int32)[None] <= accepted[:, None]
    log_prob = jnp.where(committed, pick(log_p, run), 0.0)
    return Verdict(accepted, next_token, jnp.any(ok & at_accepted, axis=1), degenerate, log_prob, overlap)
