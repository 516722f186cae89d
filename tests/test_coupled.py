"""Coupled mode: the tokens of seeded plain decoding, whatever drafts, schedules and batches do (SPEC section 4)."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cost import CostTable
from dspark_jax.errors import RequestError
from dspark_jax.generate import generate
from dspark_jax.requests import Plan
from dspark_jax.sampling import Purpose, SamplingParams, SamplingState, draft_noise, gumbel
from dspark_jax.schedule import Adaptive, Algorithm1, Autoregressive, FixedLength, FullSearch, Lagged, Observed, Threshold
from tests.toys import toy_pair

COST = CostTable.make([1, 8, 40], [1.0, 1.2, 1.6], draft=0.1)
POLICIES = [FixedLength(), Threshold(0.5), Algorithm1(COST), Lagged(COST), Adaptive(COST), Observed(COST), FullSearch(COST)]


def ids(outputs):
    return [o.token_ids for o in outputs]


def requests(count, coupled=True, **more):
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, 37, int(rng.integers(1, 30))).tolist() for _ in range(count)]
    return prompts, [SamplingParams(temperature=1.0, seed=i, coupled=coupled, **more) for i in range(count)]


@pytest.fixture(scope="module")
def plain():
    """200 seeded requests, decoded without a draft."""
    prompts, params = requests(200)
    return ids(generate(toy_pair(), prompts, params, Autoregressive(), max_new_tokens=12, batch_size=50))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_two_hundred_seeded_requests_equal_plain_decoding(policy, plain):
    prompts, params = requests(200)
    out = generate(toy_pair(), prompts, params, policy, max_new_tokens=12, batch_size=8)
    assert ids(out) == plain
    assert max(max(o.accepted_per_round) for o in out) > 2, "no draft was ever accepted; the test would pass without any"


@pytest.mark.parametrize("batch", [1, 5])
def test_in_any_batch(batch, plain):
    prompts, params = requests(200)
    assert (
        ids(generate(toy_pair(), prompts[:20], params[:20], Adaptive(COST), max_new_tokens=12, batch_size=batch)) == plain[:20]
    )


def test_ordinary_plain_decoding_draws_the_same(plain):
    """One noise for the target's own draws: coupled and ordinary plain decoding are the same tokens."""
    prompts, params = requests(200, coupled=False)
    assert ids(generate(toy_pair(), prompts, params, Autoregressive(), max_new_tokens=12, batch_size=50)) == plain


def test_mixed_batches():
    """Coupled, ordinary and greedy rows side by side, filters included, are what they are alone."""
    pair = toy_pair()
    prompts, _ = requests(6)
    params = [
        SamplingParams(temperature=1.0, seed=1, coupled=True),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5, seed=4, coupled=True),
        SamplingParams(temperature=1.3, top_p=0.8, seed=5),
        SamplingParams(temperature=0.0, seed=6, coupled=True),
    ]
    together = ids(generate(pair, prompts, params, FixedLength(), max_new_tokens=20))
    alone = [ids(generate(pair, [p], s, FixedLength(), max_new_tokens=20))[0] for p, s in zip(prompts, params, strict=True)]
    plain = ids(generate(pair, prompts, params, Autoregressive(), max_new_tokens=20))
    assert together == alone
    assert [together[i] == plain[i] for i in (0, 2, 3, 5)] == [True] * 4
    assert together[1] != plain[1], "an ordinary row draws its drafts with noise of their own"


def test_the_noise_of_a_draft():
    """A coupled row drafts with the target's noise of the position; no other row ever uses a key twice."""
    params = [SamplingParams(temperature=1.0, seed=9, coupled=c) for c in (True, False)]
    sampling = SamplingState.from_params(params)

    def noise(length, slot):
        return np.asarray(draft_noise(sampling, jnp.full(2, length, jnp.int32), jnp.asarray(slot, jnp.int32), 5))

    own = np.asarray(gumbel(sampling.key, jnp.full((2, 1), 12, jnp.int32), Purpose.RESIDUAL, 5)[:, 0])
    np.testing.assert_array_equal(noise(12, 0)[0], own[0])
    np.testing.assert_array_equal(noise(10, 2)[0], own[0])
    seen = {noise(length, slot)[1].tobytes() for length in (10, 11, 12) for slot in (0, 1, 2)}
    seen |= {
        np.asarray(gumbel(sampling.key, jnp.full((2, 1), at, jnp.int32), p, 5)[1, 0]).tobytes()
        for at in range(10, 15)
        for p in (1, 2)
    }
    assert len(seen) == 9 + 10


def test_a_seed_is_coupled_where_lengths_depend_on_more_than_the_request():
    def coupled(policy, **more):
        plan = Plan.make(toy_pair(), [[1]], SamplingParams(temperature=1.0, **more), policy, 5, None, None, None)
        return plan.sampling[0].coupled

    for policy in (Adaptive(COST), Algorithm1(COST), Lagged(COST), Observed(COST)):
        assert coupled(policy, seed=1) and not coupled(policy) and not coupled(policy, seed=1, coupled=False)
    for policy in (FixedLength(), Threshold(0.5), Autoregressive()):
        assert not coupled(policy, seed=1) and coupled(policy, seed=1, coupled=True)


def test_a_full_search_is_refused_where_it_would_be_biased():
    with pytest.raises(RequestError, match=r"FullSearch is for greedy and coupled requests; sampling of prompts\[1\]"):
        generate(
            toy_pair(), [[1], [2]], [SamplingParams(), SamplingParams(temperature=1.0)], FullSearch(COST), max_new_tokens=3
        )
    for bad in (dict(coupled=1), dict(coupled="yes"), dict(weight=0), dict(weight=float("nan")), dict(weight=True)):
        with pytest.raises(RequestError, match=next(iter(bad))):
            SamplingParams(**bad)
