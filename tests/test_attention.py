"""Attention without a cache against the cached one: the same tokens, the same outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import target_config

from dspark_jax import target
from dspark_jax.cache import empty_cache, pack
from dspark_jax.params import init_params, target_specs


@pytest.mark.parametrize("windows", [(0, 0, 0), (0, 5, 90)])
@pytest.mark.parametrize("length", [7, 64, 150])
def test_whole_sequences_equal_the_cached_pass(windows: tuple[int, ...], length: int) -> None:
    cfg = target_config(windows=windows)
    params = init_params(target_specs(cfg), jax.random.key(0), jnp.float32, 0.2)
    grid = jax.random.randint(jax.random.key(1), (3, length), 0, cfg.vocab_size, jnp.int32)
    counts = jnp.asarray([length, length // 2, 1], jnp.int32)
    batch = pack(grid, counts, jnp.zeros(3, jnp.int32), int(counts.sum()))
    cache = empty_cache(cfg.num_layers, 3, cfg.num_kv_heads, 256, cfg.head_dim, jnp.float32)
    cached = target.forward(params, cfg, batch, cache, (-1, 1))
    plain = target.forward(params, cfg, batch, None, (-1, 1))
    np.testing.assert_allclose(plain.hidden, cached.hidden, atol=2e-5)
    np.testing.assert_allclose(plain.taps, cached.taps, atol=2e-5)
