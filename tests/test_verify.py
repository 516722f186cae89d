"""The accept rule by exact enumeration on toy vocabularies, its corner cases, and the classic mistakes as controls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import verify
from dspark_jax.sampling import Purpose, SamplingParams, SamplingState, draw, gumbel, log_probs, uniforms
from dspark_jax.verify import accept, accept_greedy


def tables(vocab, block, seed, zeros=False):
    """Random p(.|prefix) for prefixes up to ``block`` tokens, and q(.|prefix) for shorter ones; float32."""
    rng = np.random.default_rng(seed)

    def row():
        x = rng.dirichlet(np.full(vocab, 0.7))
        if zeros:
            x[rng.integers(vocab)] = 0.0
        return (x / x.sum()).astype(np.float32)

    prefixes = [s for n in range(block + 1) for s in itertools.product(range(vocab), repeat=n)]
    return {s: row() for s in prefixes}, {s: row() for s in prefixes if len(s) < block}


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float32))


def law_of_a_round(p, q, vocab, block, length, monkeypatch, uniform_shift=0.0):
    """Exact law of the first ``block + 1`` tokens: one round of the real rule, then the target on its own.

    The rule runs on every drafted sequence, once for every number n of accepted drafts, with uniforms just inside the
    threshold before n and just outside at n. What it hands to the draw is captured, so nothing is sampled.
    """
    captured = []

    def capture(weights, noise):
        captured.append(np.asarray(weights, np.float64))
        return jnp.argmax(weights, axis=-1).astype(jnp.int32)

    monkeypatch.setattr(verify, "draw", capture)
    law = dict.fromkeys(itertools.product(range(vocab), repeat=block + 1), 0.0)

    def spread(prefix, mass):
        if len(prefix) == block + 1:
            law[prefix] += mass
        else:
            for token in range(vocab):
                spread((*prefix, token), mass * float(p[prefix][token]))

    cases = []
    for seq in itertools.product(range(vocab), repeat=block):
        drafted = np.prod([float(q[seq[:k]][seq[k]]) for k in range(block)])
        chance = [min(1.0, float(p[seq[:k]][seq[k]]) / max(float(q[seq[:k]][seq[k]]), 1e-30)) for k in range(block)]
        for n in range(length + 1):
            mass = drafted * np.prod(chance[:n]) * (1 - chance[n] if n < length else 1.0)
            if mass > 0:
                u = [c * (1 - 1e-4) for c in chance]
                if n < length:
                    u[n] = chance[n] * (1 + 1e-4) + 1e-9
                cases.append((seq, n, mass, u))
    log_q = np.stack([[log(q[seq[:k]]) for k in range(block)] for seq, *_ in cases])
    log_p = np.stack([[log(p[seq[:k]]) for k in range(block + 1)] for seq, *_ in cases])
    result = accept(
        jnp.asarray([c[0] for c in cases], jnp.int32),
        jnp.asarray(log_q),
        jnp.asarray(log_p),
        jnp.ones((len(cases), block + 1), bool),
        jnp.full(len(cases), length, jnp.int32),
        jnp.asarray([c[3] for c in cases], jnp.float32) + uniform_shift,
        lambda n: jnp.zeros((n.shape[0], vocab), jnp.float32),
    )
    if not uniform_shift:
        np.testing.assert_array_equal(result.accepted, [c[1] for c in cases])
    weights = np.exp(captured[0])
    weights /= weights.sum(1, keepdims=True)
    for (seq, n, mass, _), row in zip(cases, weights, strict=True):
        for token in range(vocab):
            spread((*seq[:n], token), mass * row[token])
    truth = {}
    for s in law:
        truth[s] = np.prod([float(p[s[:k]][s[k]]) for k in range(block + 1)])
    return np.array(list(law.values())), np.array(list(truth.values()))


@pytest.mark.parametrize("vocab, block", [(3, 1), (3, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_one_round_has_exactly_the_targets_law(vocab, block, zeros, monkeypatch):
    """Every verify length, nothing scheduled included: refused, all accepted and nothing scheduled are one rule (L17)."""
    for seed in range(3):
        p, q = tables(vocab, block, seed, zeros)
        for length in range(block + 1):
            law, truth = law_of_a_round(p, q, vocab, block, length, monkeypatch)
            np.testing.assert_allclose(law, truth, atol=1e-6)


def test_controls_have_another_law(monkeypatch):
    """L15, L17: drawing from p after a refusal, or from the residual when everything was accepted, is told apart."""
    p, q = tables(4, 2, 0)
    real = verify.residual
    monkeypatch.setattr(verify, "residual", lambda a, b, use: (a, jnp.zeros_like(use)))
    law, truth = law_of_a_round(p, q, 4, 2, 2, monkeypatch)
    assert np.abs(law - truth).max() > 1e-2
    monkeypatch.setattr(verify, "residual", lambda a, b, use: real(a, b, jnp.ones_like(use)))
    law, truth = law_of_a_round(p, q, 4, 2, 1, monkeypatch)
    assert np.abs(law - truth).max() > 1e-2


def one_slot(p, q, token, u, scheduled=1, noise=None, finite=(True, True)):
    p, q = log([p, p]), log([q])
    vocab = p.shape[-1]
    noise = np.zeros(vocab, np.float32) if noise is None else noise
    return accept(
        jnp.asarray([[token]], jnp.int32),
        jnp.asarray(q)[None],
        jnp.asarray(p)[None],
        jnp.asarray([finite]),
        jnp.asarray([scheduled], jnp.int32),
        jnp.asarray([[u]], jnp.float32),
        lambda n: jnp.asarray(noise, jnp.float32)[None],
    )


def monte_carlo(p, q, draft="sample", soft=True, purposes=(0, 1, 2), trials=200_000):
    """Output law of one position: draft, accept or replace; ``purposes`` of the draft, uniform and residual draws."""
    key = jnp.stack([jnp.zeros(trials, jnp.uint32), jnp.arange(trials, dtype=jnp.uint32)], axis=1)
    at = jnp.zeros((trials, 1), jnp.int32)
    vocab = len(p)
    log_p, log_q = (jnp.broadcast_to(jnp.asarray(log(x)), (trials, 1, vocab)) for x in (p, q))

    @jax.jit
    def run():
        noise = gumbel(key, at, purposes[0], vocab)
        tokens = jnp.argmax(log_q, axis=-1) if draft == "argmax" else draw(log_q, noise)
        given = log_q if soft else jnp.where(tokens[..., None] == jnp.arange(vocab)[None, None], 0.0, -jnp.inf)
        result = accept(
            tokens.astype(jnp.int32),
            given,
            jnp.concatenate([log_p, log_p], axis=1),
            jnp.ones((trials, 2), bool),
            jnp.ones(trials, jnp.int32),
            uniforms(key, at, purposes[1]),
            lambda n: gumbel(key, at, purposes[2], vocab)[:, 0],
        )
        return jnp.where(result.accepted == 1, tokens[:, 0], result.next_token), result.accepted.astype(jnp.float32).mean()

    out, rate = run()
    return np.bincount(np.asarray(out), minlength=vocab) / trials, float(rate)


@pytest.mark.parametrize(
    "p, q, kwargs, law, rate",
    [
        # L02: the distribution that was sampled
        ((0.5, 0.5, 0), (0.625, 0.375, 0), {}, (0.5, 0.5, 0), 0.875),
        # L03: argmax drafts are one-hot
        ((0.3, 0.5, 0.2), (0.4, 0.35, 0.25), dict(draft="argmax", soft=False), (0.3, 0.5, 0.2), 0.3),
        # L15
        ((0.3, 0.5, 0.2), (0.6, 0.3, 0.1), {}, (0.3, 0.5, 0.2), 0.7),
        # L14
        ((0.5, 0.5), (0.9, 0.1), {}, (0.5, 0.5), 0.6),
        # L04
        ((0.1, 0.5, 0.4), (0.5, 0.3, 0.2), {}, (0.1, 0.5, 0.4), 0.6),
    ],
)
def test_published_numbers(p, q, kwargs, law, rate):
    got, accepted = monte_carlo(p, q, **kwargs)
    np.testing.assert_allclose(got, law, atol=0.005)
    assert accepted == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize(
    "p, q, kwargs, wrong",
    [
        ((0.3, 0.5, 0.2), (0.4, 0.35, 0.25), dict(draft="argmax"), (0.75, 0.25, 0)),
        ((0.1, 0.5, 0.4), (0.5, 0.3, 0.2), dict(purposes=(0, 1, 0)), (0.099, 0.483, 0.418)),
    ],
)
def test_published_mistakes_give_their_published_law(p, q, kwargs, wrong):
    """L03 with soft q, L04 with the draft's key for the replacement: the harness sees both."""
    got, _ = monte_carlo(p, q, **kwargs)
    np.testing.assert_allclose(got, wrong, atol=0.006)
    assert np.abs(got - p).max() > 0.01


def test_an_unusable_draft_row_neither_wins_nor_zeroes_the_residual():
    """L08: q all NaN, p = (0, .97, .03), draft 0: the answer is drawn from p, and the round is counted."""
    for q_value in (np.nan, 0.0):
        result = one_slot((0, 0.97, 0.03), [q_value] * 3, 0, 0.0)
        assert int(result.accepted[0]) == 0 and int(result.next_token[0]) == 1
        assert bool(result.degenerate[0]) and bool(result.ok[0])
    # Even a token that p likes is refused: it was not drawn from q.
    assert int(one_slot((0.9, 0.05, 0.05), [np.nan] * 3, 0, 0.0).accepted[0]) == 0


def test_an_unusable_target_row_is_reported_only_where_it_decides():
    """L09: behind the accepted prefix a NaN row means nothing."""
    good = one_slot((0.5, 0.5), (0.5, 0.5), 0, 0.999, finite=(True, False), scheduled=0)
    assert bool(good.ok[0])
    assert not bool(one_slot((0.5, 0.5), (0.5, 0.5), 0, 0.5, finite=(True, False)).ok[0])
    first = one_slot((0.5, 0.5), (0.5, 0.5), 0, 0.0, finite=(False, True))
    assert int(first.accepted[0]) == 0 and not bool(first.ok[0])


def test_equal_distributions_accept_everything_and_leave_nothing():
    result = one_slot((0.25, 0.75), (0.25, 0.75), 1, np.float32(1 - 2**-24))
    assert int(result.accepted[0]) == 1 and not bool(result.degenerate[0])


def test_greedy_shortcut_is_the_rule_on_one_hots():
    rng = np.random.default_rng(0)
    rows, slots, vocab = 400, 4, 6
    logits = jnp.asarray(rng.integers(0, 3, (rows, slots + 1, vocab)), jnp.float32)  # many ties
    tokens = jnp.asarray(np.where(rng.random((rows, slots)) < 0.7, np.argmax(logits[:, :slots], -1), 5), jnp.int32)
    scheduled = jnp.asarray(rng.integers(0, slots + 1, rows), jnp.int32)
    sampling = SamplingState.from_params([SamplingParams()] * rows)
    log_p, finite = log_probs(logits, sampling)
    log_q = jnp.where(tokens[..., None] == jnp.arange(vocab)[None, None], 0.0, -jnp.inf)
    at = jnp.zeros((rows, slots), jnp.int32)
    slow = accept(
        tokens,
        log_q,
        log_p,
        finite,
        scheduled,
        uniforms(sampling.key, at, Purpose.ACCEPT),
        lambda n: gumbel(sampling.key, n[:, None], Purpose.RESIDUAL, vocab)[:, 0],
    )
    fast = accept_greedy(tokens, jnp.argmax(logits, -1).astype(jnp.int32), finite, scheduled)
    np.testing.assert_array_equal(slow.accepted, fast.accepted)
    np.testing.assert_array_equal(slow.next_token, fast.next_token)
    np.testing.assert_array_equal(slow.ok, fast.ok)
    assert len(set(np.asarray(fast.accepted).tolist())) == slots + 1
