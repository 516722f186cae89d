"""The drafter's parallel part: context injection and the bidirectional block (SPEC sections 2.1 and 3).

Axes: B rows, γ block size, N tokens, D hidden width, m tapped layers, J draft layers, K key/value heads, H head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import attention, layers
from dspark_jax.cache import KVCache
from dspark_jax.config import DraftConfig
from dspark_jax.params import Params
from dspark_jax.target import keys_values, layer_windows, qkv


def context_keys_values(params: Params, cfg: DraftConfig, taps: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every draft layer's context keys and values ``[J, N, K, H]`` from the target's ``taps [N, m D]``.

    Context rows depend on target features alone, so they are computed once and stay; they do not pass the input norm.
    """
    features = layers.rms_norm(layers.linear(taps, params["fc"]), params["context_norm"], cfg.rms_norm_eps)
    angles = layers.rope_angles(cfg.rope, cfg.head_dim, positions)

    def one(_: None, layer: Params) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, keys_values(features, layer, cfg, angles)

    return jax.lax.scan(one, None, params["layers"])[1]


def block_hidden(
    params: Params,
    cfg: DraftConfig,
    embed: jax.Array,
    anchor: jax.Array,
    context: jax.Array,
    cache: KVCache,
    active: jax.Array | None = None,
) -> jax.Array:
    """Hidden states ``[B, γ, D]`` (after the final norm) of one block per row.

    Args:
      embed: the target's embedding ``[V, D]``; anchor: int32 ``[B]``; context: int32 ``[B]``, the anchor's position and
        the number of valid context rows of ``cache``.
      active: bool ``[B]``, rows whose block is wanted; the others may come out as garbage. None: all of them.
    """
    rows, width = anchor.shape[0], cfg.block_size
    masks = jnp.full((rows, width - 1), cfg.mask_token_id, jnp.int32)
    x = embed[jnp.concatenate([anchor[:, None], masks], axis=1)].reshape(rows * width, -1)
    positions = (context[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]).reshape(-1)
    angles = layers.rope_angles(cfg.rope, cfg.head_dim, positions)
    bucket = attention.context_bucket(context, jnp.ones(rows, bool) if active is None else active, cache.capacity)
    everything = jnp.ones((rows, width, width), bool)

    def layer_step(x: jax.Array, xs: Any) -> tuple[jax.Array, None]:
        layer, index, window = xs
        q, k, v = qkv(layers.rms_norm(x, layer["attn_norm"], cfg.rms_norm_eps), layer, cfg, angles)
        q, k, v = (a.reshape(rows, width, *a.shape[1:]) for a in (q, k, v))
        out = attention.attend(q, k, v, everything, cache, index, context, bucket, window)
        x = x + layers.linear(out.reshape(rows * width, -1), layer["o"])
        return x + layers.gated_mlp(layers.rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps), layer), None

    index = jnp.arange(cfg.num_layers, dtype=jnp.int32)
    x, _ = jax.lax.scan(layer_step, x, (params["layers"], index, layer_windows(cfg)))
    return layers.rms_norm(x, params["norm"], cfg.rms_norm_eps).reshape(rows, width, -1)
