"""The pieces that target and draft layers share: linear map, RMS norm, rotary embedding, gated MLP (SPEC section 3).

Axes: N tokens, D hidden width, H head width. Norms, rotations and softmaxes run in float32; matrices in their own dtype.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import RopeConfig


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [..., in]`` times ``weight [out, in]`` transposed, in the dtype of ``x``."""
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32, returned in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    shape = (1,) * (x.ndim - 1) + weight.shape
    return (wide * scale).astype(x.dtype) * weight.reshape(shape)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies ``[H/2]`` (float32) and the factor on cosine and sine, for every supported rope type."""
    inv = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scale = 1.0
    if rope.type == "linear":
        inv = inv / rope.factor
    elif rope.type == "llama3":
        wavelength = 2 * math.pi / inv
        ratio = rope.original_max_positions / wavelength
        smooth = np.clip((ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    elif rope.type == "yarn":

        def dimension(rotations: float) -> float:
            span = rope.original_max_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(span) / (2 * math.log(rope.theta))

        low = max(math.floor(dimension(rope.beta_fast)), 0)
        high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
        inv = inv / rope.factor * ramp + inv * (1 - ramp)
        scale = rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1.0
    return inv.astype(np.float32), scale


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[..., H/2]`` (float32) at integer ``positions [...]``; the first token of a request has position 0."""
    inv, scale = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * inv.reshape((1,) * positions.ndim + inv.shape)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate ``x [N, heads, H]`` by ``angles`` of ``[N, H/2]``; the halves of a head are the rotated pairs."""
    cos, sin = (a[..., None, :] for a in angles)
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def gated_mlp(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    """``down(silu(gate(x)) * up(x))`` for ``x [N, D]``."""
    return linear(jax.nn.silu(linear(x, layer["gate"])) * linear(x, layer["up"]), layer["down"])
