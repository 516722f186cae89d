"""The target model: one flat-token forward for prefill, AR step and ragged verification (SPEC section 2, step 5).

Axes: N tokens of the pass, D hidden width, V vocabulary, L layers, K key/value heads, H head width, m tapped layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import attention, layers
from dspark_jax.cache import KVCache, TokenBatch, from_grid, to_grid
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.params import Params


class TargetOutput(NamedTuple):
    """hidden: ``[N, D]`` after the final norm; taps: ``[N, m D]``, outputs of the tapped layers side by side;
    k, v: ``[L, N, K, H]`` of the pass, not yet in the cache."""

    hidden: jax.Array
    taps: jax.Array
    k: jax.Array
    v: jax.Array


def qkv(
    x: jax.Array, layer: Params, cfg: TargetConfig | DraftConfig, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries ``[N, Q, H]`` and keys, and values ``[N, K, H]``, of ``x [N, D]``; per-head norms where they exist."""
    q = layers.linear(x, layer["q"]).reshape(-1, cfg.num_heads, cfg.head_dim)
    k, v = keys_values(x, layer, cfg, angles)
    if "q_norm" in layer:
        q = layers.rms_norm(q, layer["q_norm"], cfg.rms_norm_eps)
    return layers.apply_rope(q, angles), k, v


def keys_values(
    x: jax.Array, layer: Params, cfg: TargetConfig | DraftConfig, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Rotated keys and values ``[N, K, H]`` of ``x [N, D]``."""
    k = layers.linear(x, layer["k"]).reshape(-1, cfg.num_kv_heads, cfg.head_dim)
    v = layers.linear(x, layer["v"]).reshape(-1, cfg.num_kv_heads, cfg.head_dim)
    if "k_norm" in layer:
        k = layers.rms_norm(k, layer["k_norm"], cfg.rms_norm_eps)
    return layers.apply_rope(k, angles), v


def layer_windows(cfg: TargetConfig | DraftConfig) -> jax.Array | None:
    """Sliding-window width of every layer ``[L]``, or None when no layer slides (the mask is then not built)."""
    return jnp.asarray(cfg.windows, jnp.int32) if any(cfg.windows) else None


def forward(
    params: Params, cfg: TargetConfig, batch: TokenBatch, cache: KVCache | None, tap_ids: tuple[int, ...] = ()
) -> TargetOutput:
    """Run the tokens of ``batch`` after the cached context of their rows.

    Args:
      cache: read only; the caller writes the returned keys and values. None: every row starts at position 0.
      tap_ids: strictly rising layer ids; -1 is the embedding output. Taps are layer *outputs*, before any norm.
    """
    x = params["embed"][batch.tokens]
    angles = layers.rope_angles(cfg.rope, cfg.head_dim, batch.positions)
    bucket = None if cache is None else attention.context_bucket(batch.context, batch.counts > 0, cache.capacity)
    slot = jnp.arange(batch.width, dtype=jnp.int32)
    causal = slot[None, None, :] <= slot[None, :, None]
    causal = jnp.broadcast_to(causal, (batch.counts.shape[0], batch.width, batch.width))
    windows = layer_windows(cfg)

    # Taps go into a carried buffer: stacking every layer's output would hold L of them.
    tap_index = np.full(cfg.num_layers, len(tap_ids), np.int32)
    for i, tap in enumerate(tap_ids):
        if tap >= 0:
            tap_index[tap] = i
    taps = jnp.zeros((len(tap_ids), *x.shape), x.dtype)
    if tap_ids and tap_ids[0] == -1:
        taps = taps.at[0].set(x)

    def layer_step(carry: tuple[jax.Array, jax.Array], xs: Any) -> tuple[Any, Any]:
        x, taps = carry
        layer, index, tap, window = xs
        with jax.named_scope("target_attention"):
            y = layers.rms_norm(x, layer["attn_norm"], cfg.rms_norm_eps)
            q, k, v = qkv(y, layer, cfg, angles)
            grid_q, grid_k, grid_v = (to_grid(batch, a) for a in (q, k, v))
            if cache is None or bucket is None:
                out = attention.causal(grid_q, grid_k, grid_v, window)
            else:
                out = attention.attend(grid_q, grid_k, grid_v, causal, cache, index, batch.context, bucket, window)
            x = x + layers.linear(from_grid(batch, out).reshape(x.shape[0], -1), layer["o"])
        with jax.named_scope("target_mlp"):
            x = x + layers.gated_mlp(layers.rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps), layer)
        if tap_ids:
            taps = taps.at[tap].set(x, mode="drop")
        return (x, taps), (k, v)

    index = jnp.arange(cfg.num_layers, dtype=jnp.int32)
    xs = (params["layers"], index, jnp.asarray(tap_index), windows)
    (x, taps), (k, v) = jax.lax.scan(layer_step, (x, taps), xs)
    hidden = layers.rms_norm(x, params["norm"], cfg.rms_norm_eps)
    return TargetOutput(hidden, jnp.moveaxis(taps, 0, 1).reshape(x.shape[0], -1), k, v)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits ``[..., V]`` of ``hidden [..., D]``; a tied head is the embedding itself."""
    head: jax.Array = params["head"] if "head" in params else params["embed"]
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = jax.lax.dot_general(flat, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out.reshape(*hidden.shape[:-1], head.shape[0])
