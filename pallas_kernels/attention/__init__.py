"""Attention over (a row's cached context) ∪ (the tokens of this pass): the verification's flat pass and the drafter's block."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention import pallas_gpu, pallas_tpu, reference

__all__ = ["attend"]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_mask: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    context: jax.Array,
    window: jax.Array | None = None,
    *,
    backend: dispatch.Backend | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of one layer. Axes: B rows, T slots, Q query heads, K key/value heads (Q a multiple), H head width,
    L layers, S capacity.

    Reads the cache of ``layer`` in place and only up to every row's own context. Scores are scaled by H^-½ (q before the
    product) and kept in float32. A slot of this pass whose value is not finite spoils the slots that see it, through its
    key, and no others; what lies past the context may be anything.

    Args:
      q: ``[B, T, Q, H]``, rotated; k, v: ``[B, T, K, H]``; float32 or bfloat16.
      block_mask: bool ``[B, T, T]``, which slot sees which; every slot must see at least one key, its own or a cached one.
      cache_k, cache_v: ``[L, B, K, S, H]``, of the dtype of q; layer: int32 scalar; context: int32 ``[B]`` in [0, S].
      window: int32 scalar, width of the sliding window, 0: none. A query at position p sees keys at positions above
        p - window; slot t stands at position context + t.
      backend: "reference", "pallas_tpu", "pallas_gpu" (Triton); a named one runs or raises. None: the platform's kernel, the
        reference on a CPU.
      interpret: run a named kernel in Pallas' interpreter (tests).

    Returns: ``[B, T, Q, H]`` in the dtype of ``q``.

    Raises:
      ValueError: arguments that do not fit each other; a backend that cannot serve them.
    """
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {q.shape}; legal: [B, T, Q, H], none of them 0")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q is {q.dtype}; legal: float32, bfloat16")
    rows, width, heads, head_dim = q.shape
    if cache_k.ndim != 5:
        raise ValueError(f"cache_k has shape {cache_k.shape}; legal: [L, B, K, S, H]")
    layers, _, kv_heads, capacity, _ = cache_k.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads; legal: a multiple of the {kv_heads} key/value heads")
    for name, x, dtype, shape in (
        ("k", k, q.dtype, (rows, width, kv_heads, head_dim)),
        ("v", v, q.dtype, (rows, width, kv_heads, head_dim)),
        ("block_mask", block_mask, jnp.bool_, (rows, width, width)),
        ("cache_k", cache_k, q.dtype, (layers, rows, kv_heads, capacity, head_dim)),
        ("cache_v", cache_v, q.dtype, (layers, rows, kv_heads, capacity, head_dim)),
        ("layer", layer, jnp.int32, ()),
        ("context", context, jnp.int32, (rows,)),
        *([] if window is None else [("window", window, jnp.int32, ())]),
    ):
        _check(name, x, dtype, shape)

    operands = (q, k, v, block_mask, cache_k, cache_v, layer, context, window)
    kernels = (functools.partial(module.attend, interpret=interpret) for module in (pallas_tpu, pallas_gpu))
    result = dispatch.run(backend, interpret, reference.attend, *kernels, *operands)
    assert isinstance(result, jax.Array)
    return result


def _check(name: str, x: jax.Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if x.dtype != jnp.dtype(dtype):
        raise ValueError(f"{name} is {x.dtype}; legal: {jnp.dtype(dtype).name}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; legal: {shape}")
