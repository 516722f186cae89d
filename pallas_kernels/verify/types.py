"""What goes in and out of the verify op. Axes: B rows (requests), n drafted slots, T = n + 1 positions, V vocabulary."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

Mode = Literal["sample", "greedy", "coupled"]


class Filters(NamedTuple):
    """Per-request sampling settings ``[B]``: temperature float32 (0: greedy), top_k int32 (0: all), top_p float32 (1: all)
    and min_p float32 (0: all)."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


class QNorm(NamedTuple):
    """How to read draft logits as log-probabilities: log q = (logits - top) / temperature - log_z, float32 ``[B, n]`` each,
    with the request's temperature, or 1 for a greedy request. The markov op returns both."""

    top: jax.Array
    log_z: jax.Array


class Verdict(NamedTuple):
    """The result of a round.

    Attributes:
      accepted: int32 ``[B]``, drafts kept.
      next_token: int32 ``[B]``, the target's own; in range, and without meaning where ``ok`` is False.
      ok: bool ``[B]``; False: the target row that decides is unusable (NaN, +inf, or -inf throughout).
      degenerate: bool ``[B]``; the draft row that decides was unusable or the residual had no mass.
      log_prob: float32 ``[B, T]``, log p of the tokens that are committed: ``accepted`` drafts, then ``next_token``; 0 behind.
      soft: float32 ``[B, n]``, 1 - TV(p, q) of every slot, scheduled or not, 0 where p or q is unusable; None if not asked for.
    """

    accepted: jax.Array
    next_token: jax.Array
    ok: jax.Array
    degenerate: jax.Array
    log_prob: jax.Array
    soft: jax.Array | None


class RowStats(NamedTuple):
    """What the first pass leaves of every position; all ``[B, T]``, float32 unless said. Slots without a draft hold garbage
    in what speaks of a draft or of q.

    Attributes:
      top: largest logit; best: int32, its lowest id; finite: int32 0 or 1.
      cut: tokens with a scaled logit (z - top) / temperature below it are filtered out; log_z: log normaliser of the rest.
      log_p: log p of the draft; log_q: log q of it; q_finite: int32 0 or 1; soft: sum of min(p, q).
      choice: int32, coupled mode: the target's own draw; choice_log_p: its log p.
    """

    top: jax.Array
    best: jax.Array
    finite: jax.Array
    cut: jax.Array
    log_z: jax.Array
    log_p: jax.Array
    log_q: jax.Array
    q_finite: jax.Array
    soft: jax.Array
    choice: jax.Array
    choice_log_p: jax.Array
