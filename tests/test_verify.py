"""The accept rule by exact enumeration on toy vocabularies, its corner cases, and the classic mistakes as controls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import verify
from dspark_jax.sampling import Purpose, SamplingParams, SamplingState, draw, gumbel, log_probs, uniforms
from dspark_jax.verify import accept, accept_greedy
from tests.stats import chi_square_p


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


def captured_round(patch=None):
    """The real ``accept``, jitted, returning (accepted, what it hands to the draw) so that nothing is sampled.

    ``patch`` replaces ``verify.residual`` while it is traced: a deliberate mistake.
    """

    @jax.jit
    def run(tokens, log_q, log_p, scheduled, uniform):
        caught = []

        def capture(weights, noise):
            caught.append(weights)
            return jnp.argmax(weights, axis=-1).astype(jnp.int32)

        finite = jnp.ones(log_p.shape[:2], bool)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(verify, "draw", capture)
            if patch is not None:
                monkeypatch.setattr(verify, "residual", patch)
            result = accept(tokens, log_q, log_p, finite, scheduled, uniform, lambda n: jnp.zeros_like(log_p[:, 0]))
        (weights,) = caught
        return result.accepted, weights

    return run


def laws_of_rounds(rounds, vocab, block, patch=None):
    """Exact laws of the first ``block + 1`` tokens: one round of the real rule, then the target on its own.

    Each round is (p, q, claimed, length): tables by prefix, drafts drawn from q, the rule told ``claimed``. The rule runs
    on every drafted sequence, once for every number n of accepted drafts, with uniforms just inside the threshold before
    n and just outside at n. All rounds go through one compiled call. Returns the laws and the target's own, ``[round, law]``.
    """
    cases = []
    for index, (p, q, claimed, length) in enumerate(rounds):
        for seq in itertools.product(range(vocab), repeat=block):
            at = [(seq[:k], seq[k]) for k in range(block)]
            drafted = np.prod([float(q[s][x]) for s, x in at])
            # A token that was drafted but has no claimed mass is refused (verify.py says why).
            chance = [min(1.0, float(p[s][x]) / float(claimed[s][x])) if claimed[s][x] > 0 else 0.0 for s, x in at]
            for n in range(length + 1):
                mass = drafted * np.prod(chance[:n]) * (1 - chance[n] if n < length else 1.0)
                if mass > 0:
                    u = [c * (1 - 1e-4) for c in chance]
                    if n < length:
                        u[n] = chance[n] * (1 + 1e-4) + 1e-9
                    cases.append((index, seq, n, mass, u))
    accepted, weights = captured_round(patch)(
        jnp.asarray([seq for _, seq, *_ in cases], jnp.int32),
        jnp.asarray(np.stack([[log(rounds[i][2][seq[:k]]) for k in range(block)] for i, seq, *_ in cases])),
        jnp.asarray(np.stack([[log(rounds[i][0][seq[:k]]) for k in range(block + 1)] for i, seq, *_ in cases])),
        jnp.asarray([rounds[i][3] for i, *_ in cases], jnp.int32),
        jnp.asarray([u for *_, u in cases], jnp.float32),
    )
    np.testing.assert_array_equal(accepted, [n for _, _, n, *_ in cases])
    weights = np.exp(np.asarray(weights, np.float64))
    weights /= weights.sum(1, keepdims=True)
    outcomes = list(itertools.product(range(vocab), repeat=block + 1))
    laws = [dict.fromkeys(outcomes, 0.0) for _ in rounds]

    def spread(index, prefix, mass):
        if len(prefix) == block + 1:
            laws[index][prefix] += mass
        elif mass > 0:
            for token in range(vocab):
                spread(index, (*prefix, token), mass * float(rounds[index][0][prefix][token]))

    for (index, seq, n, mass, _), row in zip(cases, weights, strict=True):
        for token in range(vocab):
            spread(index, (*seq[:n], token), mass * row[token])
    truths = [[np.prod([float(p[s[:k]][s[k]]) for k in range(block + 1)]) for s in outcomes] for p, *_ in rounds]
    return np.array([list(law.values()) for law in laws]), np.array(truths)


@pytest.mark.parametrize("vocab, block", [(3, 1), (3, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_one_round_has_exactly_the_targets_law(vocab, block, zeros):
    """Every verify length, nothing scheduled included: refused, all accepted and nothing scheduled are one rule (L17, L19)."""
    pairs = [tables(vocab, block, seed, zeros) for seed in range(3)]
    rounds = [(p, q, q, length) for p, q in pairs for length in range(block + 1)]
    laws, truths = laws_of_rounds(rounds, vocab, block)
    np.testing.assert_allclose(laws, truths, atol=1e-6)


def test_controls_have_another_law():
    """L15, L17: drawing from p after a refusal, or from the residual when everything was accepted, is told apart."""
    p, q = tables(4, 2, 0)
    real = verify.residual
    laws, truths = laws_of_rounds([(p, q, q, 2)], 4, 2, lambda a, b, use: (a, jnp.zeros_like(use)))
    assert np.abs(laws - truths).max() > 1e-2
    laws, truths = laws_of_rounds([(p, q, q, 1)], 4, 2, lambda a, b, use: real(a, b, jnp.ones_like(use)))
    assert np.abs(laws - truths).max() > 1e-2


def first_token(p, q, claimed=None, patch=None):
    """Exact law of the first token for one drafted slot; the second token's row of p is p again."""
    vocab = len(p)
    p, q, claimed = (np.asarray(x, np.float32) for x in (p, q, q if claimed is None else claimed))
    table = {s: p for n in range(2) for s in itertools.product(range(vocab), repeat=n)}
    laws, _ = laws_of_rounds([(table, {(): q}, {(): claimed}, 1)], vocab, 1, patch)
    return laws[0].reshape(vocab, vocab).sum(1)


def test_exact_laws_of_published_cases_and_their_mistakes():
    """L01, L02, L03, L15: the rule is right with the distribution that was sampled, and wrong by the published amount with
    another; so the harness sees each mistake."""
    p, raw, filtered = (0.5, 0.5, 0.0), (0.5, 0.3, 0.2), (0.625, 0.375, 0.0)
    np.testing.assert_allclose(first_token(p, filtered), p, atol=1e-6)
    np.testing.assert_allclose(first_token(p, filtered, claimed=raw), (0.625, 0.375, 0), atol=1e-6)
    p, soft, hard = (0.3, 0.5, 0.2), (0.4, 0.35, 0.25), (1.0, 0.0, 0.0)
    np.testing.assert_allclose(first_token(p, hard), p, atol=1e-6)
    np.testing.assert_allclose(first_token(p, hard, claimed=soft), (0.75, 0.25, 0), atol=1e-6)
    q = (0.6, 0.3, 0.1)
    np.testing.assert_allclose(first_token(p, q), p, atol=1e-6)
    again = first_token(p, q, patch=lambda a, b, use: (a, jnp.zeros_like(use)))
    np.testing.assert_allclose(again, (0.39, 0.45, 0.16), atol=1e-6)
    p, float32, rounded = (0.3, 0.7), (0.4925, 0.5075), (0.5, 0.5)
    np.testing.assert_allclose(first_token(p, rounded), p, atol=1e-6)
    assert np.abs(first_token(p, rounded, claimed=float32) - p).max() > 1e-3


def test_target_filters_decide_whatever_the_draft_is():
    """L26: p at T = .5 and top-p .8 against a raw q: the output is p's law, and nothing outside its nucleus appears."""
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    log_p, _ = log_probs(logits, SamplingState.from_params([SamplingParams(temperature=0.5, top_p=0.8)]))
    law = first_token(np.exp(log_p[0]), (0.1, 0.2, 0.3, 0.4))
    np.testing.assert_allclose(law, (0.25 / 0.34, 0.09 / 0.34, 0, 0), atol=1e-6)
    assert law[2] == law[3] == 0


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


TRIALS = 400_000


@jax.jit
def trials_of_one_slot(log_p, log_q, purposes):
    """Tokens and acceptances of ``TRIALS`` requests of one slot; ``purposes``: the draft's, the uniform's, the residual's."""
    key = jnp.stack([jnp.zeros(TRIALS, jnp.uint32), jnp.arange(TRIALS, dtype=jnp.uint32)], axis=1)
    at = jnp.zeros((TRIALS, 1), jnp.int32)
    rows_p, rows_q = (jnp.broadcast_to(x, (TRIALS, 1, x.shape[-1])) for x in (log_p[None, None], log_q[None, None]))
    tokens = draw(rows_q, gumbel(key, at, purposes[0], 3))
    result = accept(
        tokens,
        rows_q,
        jnp.concatenate([rows_p, rows_p], axis=1),
        jnp.ones((TRIALS, 2), bool),
        jnp.ones(TRIALS, jnp.int32),
        uniforms(key, at, purposes[1]),
        lambda n: gumbel(key, at, purposes[2], 3)[:, 0],
    )
    # L14: the equality rule is the greedy shortcut fed with the target's own samples.
    samples = draw(rows_p[:, 0], gumbel(key, at, purposes[1], 3)[:, 0])[:, None]
    equal = accept_greedy(
        tokens, jnp.concatenate([samples] * 2, axis=1), jnp.ones((TRIALS, 2), bool), jnp.ones(TRIALS, jnp.int32)
    )
    return [(jnp.where(r.accepted == 1, tokens[:, 0], r.next_token), r.accepted) for r in (result, equal)]


def monte_carlo(p, q, purposes=tuple(Purpose), rule=0):
    tokens, accepted = trials_of_one_slot(jnp.asarray(log(p)), jnp.asarray(log(q)), jnp.asarray(purposes, jnp.int32))[rule]
    return np.bincount(np.asarray(tokens), minlength=3), float(np.asarray(accepted).mean())


@pytest.mark.parametrize(
    "p, q, rate",
    [
        ((0.5, 0.5, 0), (0.625, 0.375, 0), 0.875),  # L02
        ((0.3, 0.5, 0.2), (1, 0, 0), 0.3),  # L03
        ((0.3, 0.5, 0.2), (0.6, 0.3, 0.1), 0.7),  # L15
        ((0.5, 0.5, 0), (0.9, 0.1, 0), 0.6),  # L14
        ((0.1, 0.5, 0.4), (0.5, 0.3, 0.2), 0.6),  # L04
    ],
)
def test_real_draws_follow_the_law_and_the_published_acceptance(p, q, rate):
    """Chi-square of draft, uniform and residual together, with the package's own noise."""
    counts, accepted = monte_carlo(p, q)
    assert chi_square_p(counts, p) > 1e-4
    assert accepted == pytest.approx(rate, abs=0.004)


def test_equality_rule_has_the_same_law_and_accepts_less():
    """L14: taking the target's own sample always is exact too, but p = (.5, .5), q = (.9, .1) accepts .5 instead of .6."""
    counts, accepted = monte_carlo((0.5, 0.5, 0), (0.9, 0.1, 0), rule=1)
    assert chi_square_p(counts, (0.5, 0.5, 0)) > 1e-4
    assert accepted == pytest.approx(0.5, abs=0.004)


def test_a_shared_key_is_seen():
    """L04: the draft's key used again for the replacement gives the published wrong law; used again for u, another one.

    The published law of the latter, (.020, .540, .440), is not asserted: it depends on which of the noise's bits u repeats.
    """
    p, q = (0.1, 0.5, 0.4), (0.5, 0.3, 0.2)
    counts, _ = monte_carlo(p, q, purposes=(Purpose.DRAFT, Purpose.ACCEPT, Purpose.DRAFT))
    np.testing.assert_allclose(counts / TRIALS, (0.099, 0.483, 0.418), atol=0.004)
    assert chi_square_p(counts, p) < 1e-6
    counts, _ = monte_carlo(p, q, purposes=(Purpose.DRAFT, Purpose.DRAFT, Purpose.RESIDUAL))
    assert chi_square_p(counts, p) < 1e-6


def test_an_unusable_draft_row_neither_wins_nor_zeroes_the_residual():
    """L08: q all NaN, p = (0, .97, .03), draft 0: the answer is drawn from p, and the round is counted."""
    for q_value in (np.nan, 0.0):
        result = one_slot((0, 0.97, 0.03), [q_value] * 3, 0, 0.0)
        assert int(result.accepted[0]) == 0 and int(result.next_token[0]) == 1
        assert bool(result.degenerate[0]) and bool(result.ok[0])
    # Even a token that p likes is refused: it was not drawn from q. One bad entry, drafted or not, spoils the row.
    for q in ([np.nan] * 3, [0.5, np.nan, 0.5], [np.inf, 0.0, 0.0], [0.5, np.inf, 0.5]):
        result = one_slot((0.9, 0.05, 0.05), q, 0, 0.0)
        assert int(result.accepted[0]) == 0 and int(result.next_token[0]) == 0 and bool(result.degenerate[0])
    # Where q does not decide, it is not reported: here nothing was scheduled.
    assert not bool(one_slot((0.9, 0.05, 0.05), [np.nan] * 3, 0, 0.0, scheduled=0).degenerate[0])


def test_a_residual_without_mass_falls_back_to_p():
    """A refusal at p = q (u rounded up to 1) leaves nothing: the answer is p's, never the token at index 0."""
    result = one_slot((0.0, 0.25, 0.75), (0.0, 0.25, 0.75), 1, 1.0)
    assert int(result.accepted[0]) == 0 and int(result.next_token[0]) == 2 and bool(result.degenerate[0])


def test_one_broken_target_row_leaves_the_others_alone():
    """L09: a NaN row in a batch of 4 ends that request; the other three are the same bits as without it."""
    rng = np.random.default_rng(4)
    rows, slots, vocab = 4, 3, 5
    sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=s) for s in range(rows)])
    log_q, _ = log_probs(jnp.asarray(rng.normal(0, 1, (rows, slots, vocab)), jnp.float32), sampling)
    at = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, slots))
    tokens = draw(log_q, gumbel(sampling.key, at, Purpose.DRAFT, vocab))
    uniform = uniforms(sampling.key, at, Purpose.ACCEPT)

    @jax.jit
    def run(logits, tokens, log_q, uniform, sampling):
        log_p, finite = log_probs(logits, sampling)
        scheduled = jnp.full(tokens.shape[0], slots, jnp.int32)

        def noise(n):
            return gumbel(sampling.key, n[:, None], Purpose.RESIDUAL, vocab)[:, 0]

        return accept(tokens, log_q, log_p, finite, scheduled, uniform, noise)

    logits = jnp.asarray(rng.normal(0, 1, (rows, slots + 1, vocab)), jnp.float32)
    clean = run(logits, tokens, log_q, uniform, sampling)
    broken = run(logits.at[1, 0, 2].set(jnp.nan), tokens, log_q, uniform, sampling)
    assert np.asarray(clean.ok).all()
    np.testing.assert_array_equal(broken.ok, [True, False, True, True])
    assert int(broken.accepted[1]) == 0 and 0 <= int(broken.next_token[1]) < vocab
    for row in (0, 2, 3):
        # and a row alone gives what it gave in the batch (L05, L06)
        alone = run(*jax.tree.map(lambda x, at=row: x[at : at + 1], (logits, tokens, log_q, uniform, sampling)))
        for name in ("accepted", "next_token", "degenerate"):
            assert getattr(broken, name)[row] == getattr(clean, name)[row] == getattr(alone, name)[0]


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
    np.testing.assert_array_equal(slow.degenerate, fast.degenerate)
    assert len(set(np.asarray(fast.accepted).tolist())) == slots + 1
