"""Attention over context and block: reference and both kernels (interpreted) against dspark_jax.attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import attend as theirs
from dspark_jax.attention import context_bucket
from dspark_jax.cache import KVCache
from pallas_kernels.attention import attend, pallas_gpu, pallas_tpu

BACKENDS = ("reference", "pallas_tpu", "pallas_gpu")
LAYERS, ROWS, KV_HEADS, GROUP, CAPACITY, HEAD = 2, 5, 2, 3, 150, 16
CONTEXT = (0, 1, 64, 150, 149)


def inputs(width, seed=0, dtype=jnp.float32, poison=True):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    cache = [normal(LAYERS, ROWS, KV_HEADS, CAPACITY, HEAD) for _ in range(2)]
    if poison:  # what lies past the clock may be anything
        for row, context in enumerate(CONTEXT):
            for x, bad in zip(cache, (np.nan, np.inf), strict=True):
                x[:, row, :, context:] = bad
    return {
        "q": jnp.asarray(normal(ROWS, width, KV_HEADS * GROUP, HEAD), dtype),
        "k": jnp.asarray(normal(ROWS, width, KV_HEADS, HEAD), dtype),
        "v": jnp.asarray(normal(ROWS, width, KV_HEADS, HEAD), dtype),
        "cache_k": jnp.asarray(cache[0], dtype),
        "cache_v": jnp.asarray(cache[1], dtype),
        "layer": jnp.int32(1),
        "context": jnp.asarray(CONTEXT, jnp.int32),
    }


def masks(width, kind):
    mask = np.ones((width, width), bool) if kind == "block" else np.tri(width, dtype=bool)
    return jnp.broadcast_to(jnp.asarray(mask), (ROWS, width, width))


@functools.partial(jax.jit, static_argnames=("backend",))
def ours(data, mask, window, backend):
    return attend(**data, block_mask=mask, window=window, backend=backend, interpret=backend != "reference")


@jax.jit
def oracle(data, mask, window):
    cache = KVCache(data["cache_k"], data["cache_v"])
    bucket = context_bucket(data["context"], jnp.ones((ROWS,), bool), CAPACITY)
    own = (data["q"], data["k"], data["v"])
    return theirs(*own, mask, cache, data["layer"], data["context"], bucket, window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kind", ["block", "causal"])
def test_contract(kind, width, backend, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "TILE_BYTES", 1)  # two tiles of 128, the second one broken
    data, mask = inputs(width), masks(width, kind)
    for window in (0, 3, 70):
        want, got = oracle(data, mask, jnp.int32(window)), ours(data, mask, jnp.int32(window), backend)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-5, err_msg=f"window {window}")
    np.testing.assert_allclose(ours(data, mask, None, backend), oracle(data, mask, None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_overflowed_spoils_only_what_sees_it(backend):
    data, mask = inputs(4), masks(4, "causal")
    data["v"] = data["v"].at[2, 2, 1, 0].set(jnp.inf)
    want, got = np.asarray(oracle(data, mask, None)), np.asarray(ours(data, mask, None, backend))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[2, 2:, GROUP:]).all() and np.isfinite(got[2, :2]).all() and np.isfinite(got[2, :, :GROUP]).all()
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    data, mask = inputs(4, dtype=jnp.bfloat16), masks(4, "block")
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, data)
    got = ours(data, mask, None, backend)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), oracle(exact, mask, None), atol=0.02, rtol=0.02)


def test_refused_arguments():
    data, mask = inputs(2), masks(2, "block")
    for message, change in {
        "k has shape": {"k": data["k"][:1]},
        "q is float16": {"q": data["q"].astype(jnp.float16)},
        "cache_v is bfloat16": {"cache_v": data["cache_v"].astype(jnp.bfloat16)},
        "5 query heads": {"q": data["q"][:, :, :5]},
        "window is float32": {"window": jnp.zeros(())},
        "backend='splash' is unknown": {"backend": "splash"},
    }.items():
        with pytest.raises(ValueError, match=message):
            attend(**(data | {"block_mask": mask} | change))
    with pytest.raises(ValueError, match="interpret"):
        attend(**data, block_mask=mask, backend="pallas_tpu")


def test_block_sizes():
    bf16 = jnp.dtype(jnp.bfloat16)
    assert pallas_tpu.block_sizes_for(68, 17, 4096, 128, bf16).tile == 1024
    with pytest.raises(ValueError, match="query rows"):
        pallas_tpu.block_sizes_for(10_000, 17, 4096, 128, bf16)
    with pytest.raises(ValueError, match="query rows"):
        pallas_gpu.block_sizes_for(1000, 17, 4096, 128, bf16)
