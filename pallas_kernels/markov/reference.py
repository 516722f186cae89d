"""The markov op in plain XLA, one slot after the other, sharing nothing with the kernels.

Axes: B rows, n slots, D hidden width, r rank, V vocabulary that is drafted from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.markov.types import Block, Confidence, Head, Kind


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [B, in]`` by ``weight [out, in]``, float32; float32 weights are not rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum("bi,oi->bo", x.astype(weight.dtype), weight, precision=precision, preferred_element_type=jnp.float32)


def propose(
    hidden: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    head: Head,
    confidence: Confidence | None,
    temperature: jax.Array | None,
    noise: jax.Array | None,
    kind: Kind,
) -> Block:
    """The whole op; arguments as in ``pallas_kernels.markov.propose``, already checked."""
    batch, slots, width = hidden.shape
    rank = head.w1.shape[1]
    token, memory = anchor, jnp.zeros((batch, rank), jnp.float32)
    columns: list[tuple[jax.Array, ...]] = []
    for slot in range(slots):
        h, previous = hidden[:, slot].astype(jnp.float32), head.w1[token].astype(jnp.float32)
        features = previous
        if kind == "gated":
            assert head.proj is not None and head.bias is not None
            z = matmul(jnp.concatenate([h, previous], axis=1), head.proj) + head.bias.astype(jnp.float32)[None]
            features = jax.nn.sigmoid(z) * previous
        if kind == "rnn":
            assert head.proj is not None and head.bias is not None
            z = matmul(jnp.concatenate([memory, previous, h], axis=1), head.proj) + head.bias.astype(jnp.float32)[None]
            gate, candidate, out = jnp.split(z, 3, axis=1)
            memory = jax.nn.sigmoid(gate) * memory + (1 - jax.nn.sigmoid(gate)) * jnp.tanh(candidate)
            features = jnp.tanh(out)
        logits = base[:, slot] + matmul(features, head.w2)
        sure = jnp.zeros((batch,), jnp.float32)
        if confidence is not None:
            both = h if confidence.proj.shape[1] == width else jnp.concatenate([h, previous], axis=1)
            sure = (matmul(both, confidence.proj) + confidence.bias.astype(jnp.float32)[None])[:, 0]

        top = jnp.max(logits, axis=1, keepdims=True)
        sound = jnp.isfinite(top)
        score = logits - top
        scale = jnp.ones((batch, 1), jnp.float32)
        if temperature is not None and noise is not None:
            scale = jnp.where(temperature == 0, 1.0, temperature)[:, None]
            score = jnp.where((temperature == 0)[:, None], score, score / scale + noise[:, slot])
        index = jnp.argmax(jnp.where(sound & ~jnp.isneginf(logits), score, -jnp.inf), axis=1).astype(jnp.int32)
        log_z = jax.nn.logsumexp(jnp.where(sound, (logits - top) / scale, 0.0), axis=1)
        token = index if head.kept is None else head.kept[index]
        columns.append((token, sure, logits, jnp.where(sound, top, 0.0)[:, 0], jnp.where(sound[:, 0], log_z, 0.0)))
    tokens, sure, logits, top, log_z = (jnp.stack(column, axis=1) for column in zip(*columns, strict=True))
    return Block(tokens, None if confidence is None else sure, None if noise is None else logits, top, log_z)
