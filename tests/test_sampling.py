"""Sampling settings, the distribution they define, and the noise of a request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.errors import RequestError
from dspark_jax.sampling import Purpose, SamplingParams, SamplingState, best_token, draw, gumbel, log_probs, uniforms
from tests.stats import chi_square_p


def oracle(logits, params):
    """The same definition by sorting, in float64."""
    x = np.asarray(logits, np.float64)
    if params.temperature == 0 or params.top_k == 1:
        return (np.arange(len(x)) == np.argmax(x)).astype(float)
    p = np.exp((x - x.max()) / params.temperature)
    if params.top_k:
        kth = np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
        p = np.where(p >= kth, p, 0)
    p /= p.sum()
    if params.top_p < 1:
        order = np.sort(p)[::-1]
        cut = order[np.searchsorted(np.cumsum(order), params.top_p - 1e-9)]
        p = np.where(p >= cut, p, 0)
        p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(),
    SamplingParams(temperature=None, top_k=5),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=1e-6),
]


@pytest.mark.parametrize("vocab", [1, 7, 33, 1000])
@pytest.mark.parametrize("kind", ["normal", "ties", "half_masked"])
def test_filters_equal_a_sort(vocab, kind):
    """One batch holds every setting, so a setting that leaks into its neighbours shows too."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (len(SETTINGS), 3, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "half_masked" and vocab > 1:
        logits[..., ::2] = -np.inf
    log_p, finite = jax.jit(log_probs)(jnp.asarray(logits), SamplingState.from_params(SETTINGS))
    assert np.asarray(finite).all()
    for row, params in enumerate(SETTINGS):
        for j in range(3):
            np.testing.assert_allclose(np.exp(log_p[row, j]), oracle(logits[row, j], params), atol=2e-6, err_msg=str(params))


def test_thresholds_are_exact_to_the_last_bit():
    """Neighbouring floats are told apart: a bisection that stops early would keep more than k."""
    logits = jnp.asarray(np.append(0.0, -1 - np.arange(30) * 2.0**-23)[None], jnp.float32)
    ks = np.arange(1, 31)
    sampling = SamplingState.from_params([SamplingParams(temperature=1.0, top_k=int(k)) for k in ks])
    log_p, _ = log_probs(jnp.broadcast_to(logits, (30, 31)), sampling)
    np.testing.assert_array_equal(np.isfinite(log_p), np.arange(31)[None] < ks[:, None])


def test_target_filters_of_l26():
    """T = .5 and top-p .8: what lies outside the nucleus has no mass at all."""
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    log_p, _ = log_probs(logits, SamplingState.from_params([SamplingParams(temperature=0.5, top_p=0.8)]))
    np.testing.assert_allclose(np.exp(log_p[0]), [0.25 / 0.34, 0.09 / 0.34, 0, 0], atol=1e-6)


def test_bfloat16_logits_are_widened_first():
    """L01: the softmax of 9.00 and 9.03 in float32 is .4925 and .5075, not the .5 of bfloat16."""
    logits = jnp.asarray([[9.00, 9.03]], jnp.float32)
    sampling = SamplingState.from_params([SamplingParams(temperature=1.0)])
    np.testing.assert_allclose(np.exp(log_probs(logits, sampling)[0][0]), [0.4925, 0.5075], atol=1e-4)
    narrow = logits.astype(jnp.bfloat16)
    np.testing.assert_array_equal(log_probs(narrow, sampling)[0], log_probs(narrow.astype(jnp.float32), sampling)[0])


def test_a_row_does_not_depend_on_its_neighbours():
    """A neighbour that switches a filter or the greedy branch on, or a NaN beside it, changes no bit of a row (L09)."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (len(SETTINGS), 37)), jnp.float32)
    full, _ = log_probs(logits.at[0].set(jnp.nan), SamplingState.from_params(SETTINGS))
    for row, params in list(enumerate(SETTINGS))[1:]:
        alone, _ = log_probs(logits[row : row + 1], SamplingState.from_params([params]))
        np.testing.assert_array_equal(alone[0], full[row], err_msg=str(params))


def test_greedy_rows_switch_no_filter_on():
    """A request at T = 1e-6 with filters is greedy: its filters would otherwise slow every neighbour down."""
    state = SamplingState.from_params([SamplingParams(temperature=1e-6, top_p=0.9, min_p=0.1, top_k=9)])
    assert [float(x[0]) for x in (state.temperature, state.top_k, state.top_p, state.min_p)] == [0, 0, 1, 0]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 1000)])
def test_best_token_is_the_lowest_argmax(shape):
    x = np.round(np.random.default_rng(1).normal(0, 1, shape)).astype(np.float32)
    x[0] = -np.inf
    np.testing.assert_array_equal(best_token(jnp.asarray(x)), np.argmax(x, -1))
    assert 0 <= int(best_token(jnp.full(3, jnp.nan))) < 3


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.7, 1.0])
def test_unusable_and_extreme_rows(temperature):
    """L09, L10: NaN, +inf and all -inf rows are reported and empty; tiny temperatures give no NaN."""
    rows = np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf], [-np.inf, 3.0], [1e38, -1e38]])
    sampling = SamplingState.from_params([SamplingParams(temperature=temperature)] * len(rows))
    log_p, finite = log_probs(jnp.asarray(rows, jnp.float32), sampling)
    np.testing.assert_array_equal(finite, [True, False, False, False, True, True])
    assert not np.isnan(log_p).any()
    assert (np.asarray(log_p)[1:4] == -np.inf).all()
    np.testing.assert_allclose(np.exp(log_p).sum(-1), [1, 0, 0, 0, 1, 1], atol=1e-6)
    if temperature < 1e-5:
        assert np.asarray(log_p)[0].tolist() == [-np.inf, 0.0]


def test_unset_temperature_samples_and_top_1_is_greedy():
    """L11."""
    logits = jnp.broadcast_to(jnp.asarray([0.0, 0.1, 0.2, 0.0]), (100, 4))

    def tokens(**kwargs):
        sampling = SamplingState.from_params([SamplingParams(**kwargs, seed=s) for s in range(100)])
        log_p, _ = log_probs(logits, sampling)
        noise = gumbel(sampling.key, jnp.zeros((100, 1), jnp.int32), Purpose.DRAFT, 4)[:, 0]
        return set(np.asarray(draw(log_p, noise)).tolist())

    assert len(tokens(temperature=None, top_k=50)) > 1
    assert tokens(temperature=1.0, top_k=1) == {2}
    assert tokens(temperature=0.0) == {2}


def test_noise_depends_on_request_position_and_purpose_alone():
    """L05: another batch, slot or neighbour leaves a request's noise unchanged; another purpose or position does not."""
    sampling = SamplingState.from_params([SamplingParams(seed=s) for s in (5, 6, 7)])
    at = jnp.asarray([[3, 4], [9, 9], [4, 3]], jnp.int32)
    full = gumbel(sampling.key, at, Purpose.DRAFT, 11)
    np.testing.assert_array_equal(gumbel(sampling.key[2:], at[2:, ::-1], Purpose.DRAFT, 11)[0, ::-1], full[2])
    np.testing.assert_array_equal(full[1, 0], full[1, 1])
    draws = [np.asarray(gumbel(sampling.key[:1], at[:1], purpose, 11)) for purpose in Purpose]
    assert all(np.abs(a - b).max() > 0.1 for a, b in [(draws[0], draws[1]), (draws[1], draws[2]), (draws[0], draws[2])])
    assert np.abs(full[0, 0] - full[0, 1]).max() > 0.1 and np.abs(full[0] - full[2, ::-1]).max() > 0.1
    u = uniforms(sampling.key, at, Purpose.ACCEPT)
    np.testing.assert_array_equal(uniforms(sampling.key[2:], at[2:], Purpose.ACCEPT)[0], u[2])
    assert u.shape == (3, 2) and u.dtype == jnp.float32 and bool(jnp.all((u >= 0) & (u < 1)))


def test_no_two_purposes_and_positions_share_a_key():
    """L04, L05: folding in a sum of position and purpose would hand one position's replacement to a later draft."""
    key = SamplingState.from_params([SamplingParams(seed=5)]).key
    at = jnp.arange(16, dtype=jnp.int32)[None]
    noise = np.stack([np.asarray(gumbel(key, at, purpose, 4)) for purpose in Purpose]).reshape(-1, 4)
    assert len(np.unique(noise, axis=0)) == 16 * len(Purpose)


def test_seeds_use_all_their_bits_and_missing_seeds_are_fresh():
    keys = SamplingState.from_params([SamplingParams(seed=s) for s in (0, 1, 2**31, 2**32 - 1)]).key
    assert len({tuple(k) for k in np.asarray(keys).tolist()}) == 4
    free = SamplingState.from_params([SamplingParams()] * 2).key
    assert np.asarray(free[0]).tolist() != np.asarray(free[1]).tolist()


def test_noise_reaches_beyond_the_default_resolution():
    """L20: of 2**25 values about 3.8 exceed 16; JAX's default noise ends at 15.95 and can never draw such a token."""
    key = SamplingState.from_params([SamplingParams(seed=3)]).key
    noise = jax.jit(lambda: gumbel(key, jnp.arange(8, dtype=jnp.int32)[None], Purpose.DRAFT, 2**22))()
    assert 1 <= int(jnp.sum(noise > 16)) <= 12
    assert float(jnp.max(jax.random.gumbel(jax.random.key(0), (2**22,), jnp.float32))) < 16


@pytest.mark.slow
def test_rare_tokens_can_be_drawn():
    """L20: 2000 draws from one logit 0 and 262,144 logits -18 should hit the tail about 8 times; default noise never does."""
    vocab, draws = 262_145, 2000
    logits = jnp.full(vocab, -18.0).at[0].set(0.0)
    sampling = SamplingState.from_params([SamplingParams(seed=1)])

    @jax.jit
    def hits():
        def one(i, total):
            noise = gumbel(sampling.key, jnp.full((1, 1), i, jnp.int32), Purpose.DRAFT, vocab)[0, 0]
            return total + (draw(logits, noise) != 0).astype(jnp.int32)

        return jax.lax.fori_loop(0, draws, one, jnp.zeros((), jnp.int32))

    assert 1 <= int(hits()) <= 20


def test_a_token_without_mass_is_never_drawn():
    log_p = jnp.asarray([[-jnp.inf, -50.0, -jnp.inf]])
    assert int(draw(log_p, jnp.asarray([[1e9, -1e9, jnp.inf]]))[0]) == 1


@pytest.mark.parametrize(
    "kwargs, name",
    [
        (dict(temperature=-1), "temperature=-1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(temperature=1e300), "temperature=1e"),
        (dict(temperature=True), "temperature=True"),
        (dict(temperature="1"), "temperature='1'"),
        (dict(temperature=1, top_k=-1), "top_k=-1"),
        (dict(temperature=1, top_k=1.5), "top_k=1.5"),
        (dict(temperature=1, top_p=0), "top_p=0"),
        (dict(temperature=1, top_p=1.1), "top_p=1.1"),
        (dict(temperature=1, top_p=float("nan")), "top_p=nan"),
        (dict(temperature=1, top_k=True), "top_k=True"),
        (dict(temperature=1, min_p=1), "min_p=1"),
        (dict(temperature=1, min_p=-0.1), "min_p=-0.1"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=2**32), f"seed={2**32}"),
        (dict(seed=True), "seed=True"),
        (dict(temperature=0, top_p=0.9), "contradicts"),
        (dict(temperature=0.0, top_k=5), "contradicts"),
        (dict(temperature=0.0, min_p=0.1), "contradicts"),
    ],
)
def test_illegal_settings_are_refused_by_name(kwargs, name):
    with pytest.raises(RequestError, match="(?i)" + name.replace(".", r"\.")):
        SamplingParams(**kwargs)


def test_jitted_draws_follow_their_law():
    """Chi-square of 400,000 draws under jit, through temperature and top-k; the control law is off by a temperature."""
    trials, params = 400_000, SamplingParams(temperature=0.8, top_k=4, seed=11)
    logits = jnp.asarray([[0.3, -1.0, 0.9, 0.1, -0.2]])
    sampling = SamplingState.from_params([params])

    @jax.jit
    def run():
        at = jnp.arange(trials, dtype=jnp.int32)[None]
        log_p, _ = log_probs(logits, sampling)
        return draw(jnp.broadcast_to(log_p[:, None], (1, trials, 5)), gumbel(sampling.key, at, Purpose.DRAFT, 5))

    counts = np.bincount(np.asarray(run()[0]), minlength=5)
    assert chi_square_p(counts, oracle(logits[0], params)) > 1e-4
    assert chi_square_p(counts, oracle(logits[0], SamplingParams(temperature=1.0, top_k=4))) < 1e-6
