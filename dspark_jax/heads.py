"""The drafter's sequential part: Markov heads and the confidence head (SPEC sections 2.2, 2.3 and 3).

Axes: B rows, n slots in use (at most the block size), D hidden width, V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.layers import linear
from dspark_jax.params import Params

Pick = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Proposal(flax.struct.PyTreeNode):
    """tokens: int32 ``[B, n]``; log_q: float32 ``[B, n, V]``, what each was drawn from;
    confidence: float32 logits ``[B, n]``, or None without a confidence head."""

    tokens: jax.Array
    log_q: jax.Array
    confidence: jax.Array | None


def markov_features(
    markov: Params, kind: str, previous: jax.Array, hidden: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What W2 is applied to, and the new memory; all ``[B, r]`` but ``hidden [B, D]``.

    ``previous`` is W1 of the previous token. ``memory`` is used by the rnn head alone and is zero at the start of a block.
    """
    if kind == "vanilla":
        return previous, memory
    if kind == "gated":
        inputs = jnp.concatenate([hidden, previous], axis=-1)
        return jax.nn.sigmoid(linear(inputs, markov["proj"]) + markov["bias"][None]) * previous, memory
    inputs = jnp.concatenate([memory, previous, hidden], axis=-1)
    gate, candidate, out = jnp.split(linear(inputs, markov["proj"]) + markov["bias"][None], 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    memory = gate * memory + (1 - gate) * jnp.tanh(candidate)
    return jnp.tanh(out), memory


def confidence_logits(params: Params, cfg: DraftConfig, hidden: jax.Array, previous: jax.Array | None) -> jax.Array:
    """Float32 logits ``[B]`` that the slot's token survives, from ``hidden [B, D]`` and W1 of the token before it."""
    head = params["confidence"]
    inputs = hidden
    if cfg.confidence_with_markov:
        assert previous is not None  # the configuration refuses a Markov part without a Markov head
        inputs = jnp.concatenate([hidden, previous], axis=-1)
    return (linear(inputs, head["proj"]) + head["bias"][None])[:, 0].astype(jnp.float32)


def propose(
    params: Params, cfg: DraftConfig, hidden: jax.Array, base_logits: jax.Array, anchor: jax.Array, pick: Pick
) -> Proposal:
    """Draw the block from left to right; every token biases the next.

    Args:
      hidden: ``[B, n, D]``; base_logits: float32 ``[B, n, V]``; anchor: int32 ``[B]``, the token before slot 0.
      pick: ``(slot, logits [B, V]) -> (token int32 [B], log_q float32 [B, V])``; the drawing rule.
    """
    rows, slots, _ = hidden.shape
    markov = params.get("markov")
    memory = jnp.zeros((rows, cfg.markov_rank), hidden.dtype)

    def step(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        token, memory = carry
        slot, h, logits = xs
        previous = None
        if markov is not None:
            previous = markov["w1"][token]
            features, memory = markov_features(markov, cfg.markov_head_type, previous, h, memory)
            bias = jax.lax.dot_general(features, markov["w2"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            logits = logits + bias
        confidence = confidence_logits(params, cfg, h, previous) if cfg.confidence_head else None
        token, log_q = pick(slot, logits)
        return (token, memory), (token, log_q, confidence)

    xs = (jnp.arange(slots, dtype=jnp.int32), jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(base_logits, 0, 1))
    _, (tokens, log_q, confidence) = jax.lax.scan(step, (anchor, memory), xs)
    return Proposal(
        jnp.swapaxes(tokens, 0, 1),
        jnp.swapaxes(log_q, 0, 1),
        None if confidence is None else jnp.swapaxes(confidence, 0, 1),
    )
