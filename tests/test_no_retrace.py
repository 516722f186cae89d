"""After warm-up nothing compiles, and the loop never leaves the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cost import CostTable
from dspark_jax.decode import decode, remembering
from dspark_jax.generate import generate
from dspark_jax.profile import profile
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Adaptive, Autoregressive, FixedLength, Lagged, Threshold
from dspark_jax.state import new_state
from tests.toys import toy_pair

compilations = []


def listen(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(listen)


def test_two_hundred_random_calls_compile_nothing():
    """J01, J02: lengths, thresholds, seeds, temperatures, stop tokens and limits roam; shapes do not."""
    pair = toy_pair()
    rng = np.random.default_rng(0)

    def priced():
        table = profile(pair, 3, 256, quick=True).table
        other = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * np.float32(rng.uniform(0.5, 2))), table)
        return Adaptive(other, margin=float(rng.random()))

    def call():
        rows = 3
        prompts = [rng.integers(0, 37, int(rng.integers(1, 33))).tolist() for _ in range(rows)]
        params = [
            SamplingParams(temperature=float(rng.choice([0.0, 0.7, 1.0])), seed=int(rng.integers(2**31))) for _ in range(rows)
        ]
        policies = [FixedLength(), Threshold(float(rng.random())), Autoregressive(), None, priced()]
        policy = policies[int(rng.integers(5))]
        generate(
            pair,
            prompts,
            params,
            policy,
            max_new_tokens=int(rng.integers(1, 30)),
            stop_token_ids=[int(rng.integers(37))],
        )

    generate(pair, [[1], [2], [3]], SamplingParams(temperature=1.0), FixedLength(), max_new_tokens=9)
    generate(pair, [[1], [2], [3]], SamplingParams(temperature=1.0), Threshold(0.1), max_new_tokens=9)
    generate(pair, [[1], [2], [3]], SamplingParams(temperature=1.0), Autoregressive(), max_new_tokens=9)
    generate(pair, [[1], [2], [3]], SamplingParams(temperature=1.0), max_new_tokens=9)
    generate(pair, [[1], [2], [3]], SamplingParams(temperature=1.0), priced(), max_new_tokens=9)
    jax.jit(lambda x: x + 1)(np.float32(len(compilations)))
    assert compilations, "the listener hears nothing; the test would pass whatever happens"
    before = len(compilations)
    for _ in range(200):
        call()
    assert len(compilations) == before


COST = CostTable.make([1, 10], [1.0, 2.0])


@pytest.mark.parametrize("policy", [FixedLength(), Threshold(0.5), Autoregressive(), Lagged(COST), Adaptive(COST)])
def test_the_loop_holds_no_host_transfer(policy):
    """One program, one loop: no callback, infeed, outfeed, send or receive; and the caches are donated, not copied."""
    pair = toy_pair()
    sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=1)] * 2)
    state = new_state(pair.model, [[1, 2], [3]], sampling, [60, 60], (), 256, jnp.float32)
    state = remembering(state, policy, 4)
    compiled = decode.lower(pair.model, pair.params, state, policy, np.int32(100)).compile()
    text = compiled.as_text()
    assert "while(" in text
    for word in ("callback", "infeed", "outfeed", "send(", "recv("):
        assert word not in text
    caches = sum(x.nbytes for x in jax.tree.leaves((state.target_cache, state.draft_cache)))
    assert compiled.memory_analysis().alias_size_in_bytes >= caches
