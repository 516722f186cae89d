"""The accept rule: what the target keeps of a drafted block, and the token it adds (SPEC section 4).

Noise comes in as arguments. Axes: B rows, n drafted slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.sampling import draw, is_finite_row


class AcceptResult(flax.struct.PyTreeNode):
    """accepted: int32 ``[B]``, drafts kept; next_token: int32 ``[B]``, the target's own; ok: bool ``[B]``, False where a
    target row that decides is unusable; degenerate: bool ``[B]``, a draft row was unusable or the residual had no mass."""

    accepted: jax.Array
    next_token: jax.Array
    ok: jax.Array
    degenerate: jax.Array


def residual(log_p: jax.Array, log_q: jax.Array, use_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log weights of ``max(p - q, 0)``, of p itself where ``use_q`` is False or nothing is left.

    Args:
      log_p, log_q: float32 ``[B, V]``; use_q: bool ``[B]``.

    Returns: log weights ``[B, V]`` (not normalised), and bool ``[B]`` where the residual had no mass.
    """
    left = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)
    empty = use_q & ~jnp.any(left > 0, axis=-1)
    plain = ~use_q | empty
    return jnp.where(plain[:, None], log_p, jnp.log(left)), empty


def accept(
    tokens: jax.Array,
    log_q: jax.Array,
    log_p: jax.Array,
    p_finite: jax.Array,
    scheduled: jax.Array,
    uniform: jax.Array,
    residual_noise: Callable[[jax.Array], jax.Array],
) -> AcceptResult:
    """Accept ``x_k`` iff ``u q(x_k) < p(x_k)``, stop at the first refusal, draw one more token from what p has left over q.

    "Refused", "all accepted" and "nothing scheduled" are one rule: q counts as zero behind the last scheduled slot.

    Args:
      tokens: int32 ``[B, n]``, drawn from log_q: float32 ``[B, n, V]``, the same numbers; log_p: float32 ``[B, n + 1, V]``.
      p_finite: bool ``[B, n + 1]``; scheduled: int32 ``[B]`` in [0, n]; uniform: float32 ``[B, n]``.
      residual_noise: accepted ``[B]`` -> Gumbel noise ``[B, V]`` of the position that the next token takes.
    """
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    considered = slot < scheduled[:, None]
    picked_q = jnp.exp(jnp.take_along_axis(log_q, tokens[..., None], axis=2)[..., 0])
    picked_p = jnp.exp(jnp.take_along_axis(log_p[:, :slots], tokens[..., None], axis=2)[..., 0])
    # A token of a non-finite row, or of q(x) = 0, was not drawn from q. Taking it whenever p allows would bias the output,
    # so it is refused, and with q as zero the next token comes from p (PITFALLS L08).
    usable = is_finite_row(log_q) & (picked_q > 0)
    take = considered & usable & (uniform * picked_q < picked_p) & p_finite[:, :slots]
    accepted = jnp.cumprod(take.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    at = accepted[:, None, None]
    row_p = jnp.take_along_axis(log_p, at, axis=1)[:, 0]
    use_q = accepted < scheduled
    if slots:
        # take_along_axis fills with NaN past the end, where use_q is False; clip to stay with numbers.
        row_q = jnp.take_along_axis(log_q, jnp.minimum(at, slots - 1), axis=1)[:, 0]
        refused_usable = jnp.take_along_axis(usable, jnp.minimum(accepted, slots - 1)[:, None], axis=1)[:, 0]
    else:
        row_q, refused_usable = jnp.full_like(row_p, -jnp.inf), jnp.ones_like(use_q)
    weights, empty = residual(row_p, row_q, use_q & refused_usable)
    ok = jnp.take_along_axis(p_finite, accepted[:, None], axis=1)[:, 0]
    return AcceptResult(accepted, draw(weights, residual_noise(accepted)), ok, empty | (use_q & ~refused_usable))


def accept_greedy(tokens: jax.Array, best: jax.Array, p_finite: jax.Array, scheduled: jax.Array) -> AcceptResult:
    """``accept`` where every p and q is one-hot, without the distributions.

    A draft from an unusable q row is no danger here: it is kept only if it is the target's own choice.

    Args:
      best: int32 ``[B, n + 1]``, the target's largest logit (lowest id on a tie); the rest as in ``accept``.
    """
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    take = (slot < scheduled[:, None]) & (tokens == best[:, :slots]) & p_finite[:, :slots]
    accepted = jnp.cumprod(take.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    next_token = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    ok = jnp.take_along_axis(p_finite, accepted[:, None], axis=1)[:, 0]
    return AcceptResult(accepted, next_token, ok, jnp.zeros_like(ok))


def accept_coupled(
    tokens: jax.Array, log_p: jax.Array, p_finite: jax.Array, scheduled: jax.Array, noise: jax.Array
) -> AcceptResult:
    """Coupled mode: the target draws at every position with the noise that drafted there; drafts stand while they agree.

    Every emitted token is the target's own draw, so the output is that of plain decoding with the same noise.

    Args:
      noise: float32 ``[B, n + 1, V]``; the rest as in ``accept``.
    """
    return accept_greedy(tokens, draw(log_p, noise), p_finite, scheduled)
