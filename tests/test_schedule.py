"""Lengths: the published examples, the literal algorithm, exact output laws of every policy, and what may be remembered."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cost import CostTable
from dspark_jax.errors import RequestError
from dspark_jax.schedule import (
    Adaptive,
    Algorithm1,
    FixedLength,
    FullSearch,
    Lagged,
    Observed,
    RoundView,
    Threshold,
    pass_sizes,
)
from dspark_jax.schedule.base import Ranking, covering, survival, weights


def view_of(confidence, active=None, most=None, weight=None, rounds=5, memory=None, free=False):
    confidence = jnp.asarray(confidence, jnp.float32)
    rows, slots = confidence.shape
    active = jnp.ones(rows, bool) if active is None else jnp.asarray(active)
    most = jnp.full(rows, slots, jnp.int32) if most is None else jnp.asarray(most, jnp.int32)
    return RoundView(
        confidence,
        active,
        jnp.where(active, most, 0),
        jnp.broadcast_to(jnp.asarray(rounds, jnp.int32), (rows,)),
        jnp.ones(rows, jnp.float32) if weight is None else jnp.asarray(weight, jnp.float32),
        jnp.asarray(0, jnp.int32),
        jnp.zeros((), bool),
        jnp.asarray(free),
        memory,
    )


def table(seconds, tokens=None, **more):
    return CostTable.make(tokens or range(1, len(seconds) + 1), seconds, **more)


class Sized:
    """A policy whose passes are compiled for every token count, or for those given."""

    def __init__(self, policy, sizes=None, down=False):
        self.policy, self.sizes, self.down = policy, sizes, down

    def lengths(self, view):
        kind = type(self.policy)
        with pytest.MonkeyPatch.context() as patch:
            rows, slots = view.most.shape[0], view.confidence.shape[1]
            patch.setattr(kind, "token_sizes", lambda *_: self.sizes or tuple(range(1, rows * (slots + 1) + 1)))
            if self.down:
                import dspark_jax.schedule.algorithm1 as module

                def below(sizes, tokens):
                    at = jnp.asarray(sizes, jnp.int32)
                    return at[jnp.searchsorted(at, tokens, side="right") - 1]

                patch.setattr(module, "covering", below)
            return self.policy.lengths(view)


# Exact laws. A toy has two tokens; a row's conditional probabilities are tables over prefixes of at most two tokens.
PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
DRAFTS = list(itertools.product(range(2), repeat=2))


def row_law(p, q, drafted, length):
    """Law of the first three tokens of a row, given its drafts and how many are checked; ``p, q``: P(token 1 | prefix)."""

    def prob(table, prefix, token):
        return table[prefix] if token else 1 - table[prefix]

    law = np.zeros((2, 2, 2))

    def on(prefix, mass):
        if len(prefix) == 3:
            law[prefix] += mass
        elif mass > 0:
            for token in range(2):
                on((*prefix, token), mass * prob(p, prefix, token))

    prefix, mass = (), 1.0
    for token in drafted[:length]:
        keep = min(1.0, prob(p, prefix, token) / prob(q, prefix, token))
        left = np.array([max(prob(p, prefix, t) - prob(q, prefix, t), 0) for t in range(2)])
        if keep < 1:
            for t in range(2):
                on((*prefix, t), mass * (1 - keep) * left[t] / left.sum())
        prefix, mass = (*prefix, token), mass * keep
    on(prefix, mass)
    return law


def tables(rng):
    p, q = ({s: float(rng.uniform(0.02, 0.98)) for s in PREFIXES} for _ in range(2))
    return p, q


def chance(table, drafted):
    return np.prod([table[drafted[:k]] if drafted[k] else 1 - table[drafted[:k]] for k in range(len(drafted))])


def bias_of(policy, p, q, confidence, memory=None, weight=None, rounds=5):
    """Largest difference of any row's exact law from the target's. confidence: per row {prefix of 0 or 1 tokens: c}."""
    rows = len(p)
    combos = list(itertools.product(DRAFTS, repeat=rows))
    seen = np.asarray([[[c[()], c[x[:1]]] for c, x in zip(confidence, combo, strict=True)] for combo in combos], np.float32)

    def one(c):
        return policy.lengths(view_of(c, memory=memory, weight=weight, rounds=rounds))

    lengths = np.asarray(jax.vmap(one)(jnp.asarray(seen)))
    worst = 0.0
    for r in range(rows):
        law = np.zeros((2, 2, 2))
        for combo, ell in zip(combos, lengths, strict=True):
            mass = np.prod([chance(q[i], combo[i]) for i in range(rows)])
            law += mass * row_law(p[r], q[r], combo[r], int(ell[r]))
        true = row_law(p[r], q[r], (0, 0), 0)
        worst = max(worst, np.abs(law - true).max())
    return worst, lengths


def first_token(policy, p, q, confidence):
    """P(first token is 0) for one row."""
    law = np.zeros((2, 2, 2))
    for drafted in DRAFTS:
        view = view_of([[confidence[()], confidence[drafted[:1]]]])
        law += chance(q, drafted) * row_law(p, q, drafted, int(policy.lengths(view)[0]))
    return law[0].sum()


def constant(one):
    """Token 1 with probability ``one``, whatever came before."""
    return dict.fromkeys(PREFIXES, one)


def test_the_papers_example_and_its_control():
    """SPEC section 5: the early stop emits A with .70, the search past the first drop with .85."""
    p, q, c = constant(0.3), constant(0.5), {(): 0.8, (0,): 0.9, (1,): 0.0}
    cost = table(1 / np.array([1, 0.5, 0.45]))
    assert first_token(Sized(Algorithm1(cost)), p, q, c) == pytest.approx(0.70, abs=1e-12)
    assert first_token(Sized(FullSearch(cost)), p, q, c) == pytest.approx(0.85, abs=1e-12)


def test_selection_bias_of_a_budget_from_todays_confidence():
    """L16: current confidences choose K = 2 for A and 0 for B; every lossless policy gives (.5, .5)."""
    p, q, c = constant(0.5), constant(0.1), {(): 0.6, (0,): 0.99, (1,): 0.01}
    cost = table([1, 1.7, 1.75])
    wrong = Sized(FullSearch(cost))
    assert [int(wrong.lengths(view_of([[0.6, x]]))[0]) for x in (0.99, 0.01)] == [2, 0]
    assert first_token(wrong, p, q, c) == pytest.approx(0.55, abs=1e-12)
    assert first_token(Sized(Algorithm1(cost)), p, q, c) == pytest.approx(0.5, abs=1e-12)
    for past in ([0.6, 0.59], [0.6, 0.01], [0.1, 0.05]):
        memory = jnp.asarray([[[0.0, 0.0], past]], jnp.float32)
        views = [view_of([[0.6, x]], memory=memory) for x in (0.99, 0.01)]
        lagged = Sized(Lagged(cost))
        a, b = (int(lagged.lengths(v)[0]) for v in views)
        assert a == b == (2 if past[1] > 0.5 else 0)


def test_a_staircase_is_climbed_by_the_global_search_only():
    """B11: cost (1, 1.7, 1.75), survivals (.6, .594): Θ = (1, .941, 1.254)."""
    cost, c = table([1, 1.7, 1.75]), [[0.6, 0.99]]
    assert int(Sized(FullSearch(cost)).lengths(view_of(c))[0]) == 2
    assert int(Sized(Algorithm1(cost)).lengths(view_of(c))[0]) == 0
    memory = jnp.asarray([[[0, 0], [0.6, 0.594]]], jnp.float32)
    assert int(Sized(Lagged(cost)).lengths(view_of(c, memory=memory))[0]) == 2
    # The look-ahead climbs too, where survivals usually stay that high behind the first slot, and not where they fall.
    for usual, wanted in (([0.6, 0.594], 2), ([0.6, 0.05], 0)):
        policy = Adaptive(cost)
        learned = policy.memory(1, 2).replace(usual=jnp.asarray([usual], jnp.float32), tried=jnp.asarray(9, jnp.int32))
        assert int(Sized(policy).lengths(view_of(c, memory=learned))[0]) == wanted


def learned_of(policy, rng, rows, slots):
    """A memory as earlier rounds might have left it."""
    start = policy.memory(rows, slots)
    if isinstance(policy, Lagged):
        return jnp.asarray(np.cumprod(rng.random((rows, 2, slots)), -1), jnp.float32)
    seen = rng.random((rows, slots)) * 10
    arrays = dict(hit=seen * rng.random((rows, slots)), seen=seen, said=seen * rng.random((rows, slots)))
    arrays |= dict(usual=np.cumprod(rng.random((rows, slots)), -1), tokens=rng.uniform(0.8, 2), time=1.0)
    changes = {k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()}
    return start.replace(**changes, tried=jnp.asarray(rng.integers(0, 9), jnp.int32))


def random_cost(rng):
    """Jagged, as measured."""
    return table(np.cumsum(rng.choice([0.02, 0.1, 0.7], 6)) + 0.5, draft=float(rng.random()) / 4)


LOSSLESS = [Algorithm1, Lagged, Adaptive, Observed]
SIZES = [None, (1, 2, 3, 6), (2, 4, 6)]


@pytest.mark.parametrize("kind", [*LOSSLESS, Threshold, FixedLength])
def test_exact_law_of_random_toys(kind):
    """Two rows, γ = 2, random models, drafts, confidences, jagged costs, sizes, weights and memories: exact for every one."""
    rng, worst, varied = np.random.default_rng(1), 0.0, 0
    for _ in range(60):
        p, q = zip(*(tables(rng) for _ in range(2)), strict=True)
        confidence = [{s: float(rng.random()) for s in PREFIXES[:3]} for _ in range(2)]
        if kind in (Threshold, FixedLength):
            policy, memory = kind(float(rng.random())) if kind is Threshold else kind(1 + int(rng.integers(2))), None
        else:
            inner = kind(random_cost(rng))
            memory = learned_of(inner, rng, 2, 2) if hasattr(inner, "memory") else None
            policy = Sized(inner, SIZES[rng.integers(3)])
        bias, lengths = bias_of(policy, p, q, confidence, memory, rng.uniform(0.5, 2, 2))
        worst, varied = max(worst, bias), varied + (len(np.unique(lengths, axis=0)) > 1)
    assert worst < 1e-12
    if kind in (Algorithm1, Lagged, Adaptive, Threshold):
        assert varied > 2, "today's confidences decided nothing; the test would pass whatever the policy does"


@pytest.mark.parametrize("wrong", ["full search", "round down"])
def test_biased_variants_are_seen(wrong):
    rng, worst = np.random.default_rng(2), 0.0
    for _ in range(60):
        p, q = zip(*(tables(rng) for _ in range(2)), strict=True)
        confidence = [{s: float(rng.random()) for s in PREFIXES[:3]} for _ in range(2)]
        cost = random_cost(rng)
        policy = Sized(FullSearch(cost)) if wrong == "full search" else Sized(Algorithm1(cost), (2, 4, 6), down=True)
        worst = max(worst, bias_of(policy, p, q, confidence)[0])
    assert worst > 0.02


def literal(score, allowed, weight, active, seconds, sizes):
    """Algorithm 1 as the paper writes it: one token at a time, from a list that is sorted once."""
    rows, slots = score.shape
    tokens = sorted(((-score[r, j], r, j) for r in range(rows) for j in range(slots) if allowed[r, j]), key=lambda t: t)
    total, count = np.float32(weight[active].sum()), int(active.sum())
    lengths, position, best = np.zeros(rows, int), 0, total / seconds(count)
    for minus, *_ in tokens:
        theta = np.float32(total - minus) / seconds(count + position + 1)
        if not theta > best:
            break
        best, total, position = theta, np.float32(total - minus), position + 1
    room = next(s for s in sizes if s >= count + position) - count
    for _, r, _j in tokens[:room]:
        lengths[r] += 1
    return lengths


def test_the_vectorised_algorithm_is_the_literal_one():
    """10,000 random cases with idle rows, limits, weights and many ties; numbers are short binary fractions, so that both add
    up exactly and a tie is a tie."""
    rng = np.random.default_rng(0)
    for rows, slots in ((1, 4), (3, 3), (5, 2), (4, 4)):
        sizes, many = pass_sizes(rows, slots), 2500
        confidence = rng.choice([1.0, 0.5, 0.5, 0.25, 0.75, 0.0], (many, rows, slots))
        weight = rng.choice([1.0, 1.0, 2.0, 0.5], (many, rows))
        active = rng.random((many, rows)) < 0.8
        active[:, 0] |= ~active.any(1)
        most = rng.integers(0, slots + 1, (many, rows))
        steps = rng.choice([0, 1 / 8, 1 / 2, 1 / 64], (many, rows * (slots + 1)))
        seconds = 1 + np.cumsum(steps, 1)

        def one(c, a, m, w, s, rows=rows, slots=slots):
            grid = jnp.arange(1, rows * (slots + 1) + 1, dtype=jnp.float32)
            flat = jnp.broadcast_to(s, (2, 1, s.shape[0]))
            zero = jnp.zeros((2, 1), jnp.float32)
            cost = CostTable(grid, jnp.zeros(1, jnp.float32), flat, zero, zero + 1, jnp.zeros((), jnp.float32))
            return Algorithm1(cost).lengths(view_of(c, a, m, w))

        got = jax.jit(jax.vmap(one))(
            jnp.asarray(confidence, jnp.float32),
            jnp.asarray(active),
            jnp.asarray(most, jnp.int32),
            jnp.asarray(weight, jnp.float32),
            jnp.asarray(seconds, jnp.float32),
        )
        for i in range(many):
            a = np.cumprod(confidence[i], 1).astype(np.float32) * weight[i][:, None].astype(np.float32)
            allowed = active[i][:, None] & (np.arange(slots)[None] < most[i][:, None])
            cost = seconds[i].astype(np.float32)
            wanted = literal(a, allowed, weight[i].astype(np.float32), active[i], lambda n, c=cost: c[n - 1], sizes)
            np.testing.assert_array_equal(got[i], wanted, err_msg=f"case {i} of {rows} rows")


def test_allocation_yields_prefixes_and_is_deterministic_under_ties():
    """B14, B21, C10: the published allocations; survivals in float32; a token never goes without the one before it."""
    a = jnp.asarray([[0.9, 0.8 / 0.9, 0.1 / 0.8], [0.7, 0.65 / 0.7, 0.6 / 0.65]], jnp.float32)
    view = view_of(a)
    ranking = Ranking.of(survival(a), view)
    assert [ranking.take(jnp.asarray(k, jnp.int32)).tolist() for k in (4, 5)] == [[2, 2], [2, 3]]
    equal = view_of(jnp.ones((2, 3)) * jnp.asarray([[0.5, 1.0, 1.0]]))
    ties = Ranking.of(survival(equal.confidence), equal)
    assert [ties.take(jnp.asarray(k, jnp.int32)).tolist() for k in (1, 2, 4)] == [[1, 0], [2, 0], [3, 1]]
    halves = view_of(jnp.full((2, 2), 0.5))
    assert Ranking.of(survival(halves.confidence), halves).take(jnp.asarray(2, jnp.int32)).tolist() == [1, 1]
    assert float(survival(jnp.full((1, 7), 0.99, jnp.bfloat16).astype(jnp.float32))[0, -1]) == pytest.approx(0.99**7, abs=0.02)
    assert float(survival(jnp.full((1, 7), 0.99))[0, -1]) == pytest.approx(0.99**7, abs=1e-6)
    np.testing.assert_allclose(survival(jnp.asarray([[0.9, 0.8, 0.5]])), [[0.9, 0.72, 0.36]], rtol=1e-6)
    broken = survival(jnp.asarray([[0.9, jnp.nan, 0.9], [2.0, 0.5, -1.0]]))
    np.testing.assert_allclose(broken, [[0.9, 0, 0], [1, 0.5, 0]], rtol=1e-6)


@pytest.mark.parametrize("kind", [Algorithm1, Lagged, Adaptive, Observed, FullSearch])
def test_nothing_to_check_is_an_ordinary_round(kind):
    """B01: confidences of zero, rows without room and idle rows; no row is ever given more than fits."""
    policy = kind(table(np.linspace(1, 9, 20)))
    memory = None
    if hasattr(policy, "memory"):
        memory = policy.memory(4, 4)
        if not isinstance(policy, Lagged):
            memory = memory.replace(tried=jnp.asarray(9, jnp.int32))
    view = view_of(np.zeros((4, 4)), [True, True, False, True], [4, 0, 4, 2], memory=memory)
    lengths = np.asarray(policy.lengths(view))
    assert lengths.dtype == np.int32 and (lengths <= [4, 0, 0, 2]).all()
    if kind in (Algorithm1, Adaptive, FullSearch):
        assert lengths.sum() <= 1  # rounding up from three tokens to four
    assert np.asarray(policy.lengths(view.replace(confidence=jnp.full((4, 4), jnp.nan)))).sum() <= 6


def test_weights_move_room_between_rows():
    view = view_of([[0.6, 0.6], [0.6, 0.6]], weight=[1, 4])
    cost = table([1, 1, 1.2, 1.4, 9, 9])
    assert Sized(Algorithm1(cost)).lengths(view).tolist() == [0, 2]
    assert Sized(Algorithm1(cost)).lengths(view.replace(weight=jnp.asarray([4.0, 1.0]))).tolist() == [2, 0]


def test_a_new_request_does_not_inherit():
    """B05: what the slot held before counts neither in Lagged nor in the learning policies."""
    cost = table([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9])
    policy = Lagged(cost, prior=0.5)
    memory = jnp.stack([jnp.full((2, 4), 0.99), jnp.full((2, 4), 0.01)])
    past = [policy.past(view_of(np.ones((2, 4)), rounds=r, memory=memory)) for r in (0, 1, 2)]
    prior = np.cumprod(np.full(4, 0.5))
    for young in past[:2]:
        np.testing.assert_allclose(young, [prior, prior])
    np.testing.assert_allclose(past[2], [np.full(4, 0.99), np.full(4, 0.01)])
    rng = np.random.default_rng(0)
    for kind in (Adaptive, Observed):
        policy = kind(cost)
        old, other = (learned_of(policy, rng, 2, 4) for _ in range(2))
        mixed = jax.tree.map(lambda a, b: a.at[0].set(b[0]) if a.ndim == 2 else a, old, other)
        view = view_of(rng.random((2, 4)), rounds=jnp.asarray([0, 7]))
        a, b = (policy.lengths(view.replace(memory=m)) for m in (old, mixed))
        np.testing.assert_array_equal(a, b)
        after = [
            policy.remember(
                view.replace(memory=m), jnp.full(2, 3, jnp.int32), jnp.arange(1, 3, dtype=jnp.int32), jnp.ones((), bool)
            )
            for m in (old, mixed)
        ]
        for x, y in zip(*map(jax.tree.leaves, after), strict=True):
            np.testing.assert_array_equal(x, y)


def test_lagged_remembers_two_rounds():
    policy = Lagged(table([1, 2, 3]))
    memory = policy.memory(1, 2)
    for c in (0.2, 0.4, 0.6):
        view = view_of([[c, c]], memory=memory)
        memory = policy.remember(view, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones((), bool))
    np.testing.assert_allclose(policy.past(view_of([[1, 1]], memory=memory)), [[0.4, 0.16]], rtol=1e-6)


def simulate(policy, truth, said, rounds, cost_of_plain=1.0, seed=0, rows=1):
    """Rounds of a draft whose slots are accepted with the conditional probabilities ``truth(round)``; returns what happened."""
    rng, slots = np.random.default_rng(seed), len(said)
    memory, log = policy.memory(rows, slots), []

    @jax.jit
    def step(memory, age, c, chance):
        view = view_of(c, memory=memory, rounds=age)
        asleep = policy.asleep(view)
        lengths = jnp.where(asleep, 0, policy.lengths(view))
        slot = jnp.arange(slots)[None]
        accepted = jnp.sum(jnp.cumprod(((chance < 1) & (slot < lengths[:, None])).astype(jnp.int32), 1), 1, dtype=jnp.int32)
        return policy.remember(view, lengths, accepted, ~asleep), asleep, lengths, accepted

    for age in range(rounds):
        chance = rng.random((rows, slots)) / np.asarray(truth(age))
        memory, *happened = step(memory, jnp.asarray(age, jnp.int32), jnp.asarray([said] * rows), jnp.asarray(chance))
        log.append([np.asarray(x) for x in happened])
    return memory, [np.asarray(x) for x in zip(*log, strict=True)]


MANY = CostTable.make([64, 128, 192, 256, 320], [1.0, 1.1, 1.15, 1.2, 1.25], draft=0.2, rows=64)
CHEAP = dict(tokens=(1, 2, 3, 4, 5), seconds=[1.0, 1.1, 1.15, 1.2, 1.25], draft=0.2, rows=1)


def test_a_useless_draft_is_parked_and_tried_again():
    """An untrained draft with a confident head: few rounds are spent on it; where it starts to pay it is used again."""
    policy = Adaptive(CostTable.make(**CHEAP | dict(seconds=[1.0, 1.3, 1.4, 1.5, 1.6])))
    _, (asleep, lengths, _) = simulate(policy, lambda _: [0.01] * 4, [0.8] * 4, 400)
    assert asleep.mean() > 0.95 and 0 < (~asleep[50:]).sum() < 20
    assert lengths[asleep].sum() == 0
    _, (asleep, lengths, accepted) = simulate(policy, lambda age: [0.01 if age < 200 else 0.95] * 4, [0.8] * 4, 600)
    assert asleep[100:200].mean() > 0.9 and asleep[450:].mean() < 0.1 and accepted[450:].mean() > 2


def test_a_good_draft_is_not_parked():
    policy = Adaptive(CostTable.make(**CHEAP))
    for seed in range(5):
        _, (asleep, lengths, _) = simulate(policy, lambda _: [0.8] * 4, [0.8] * 4, 100, seed=seed)
        assert asleep.mean() < 0.2 and lengths[~asleep].mean() > 2


def test_observed_acceptance_converges():
    """C05: sane from the first round, and within 5 % of the truth."""
    policy, truth = Observed(CostTable.make(**CHEAP)), [0.9, 0.8, 0.7, 0.6]
    _, (_, lengths, _) = simulate(policy, lambda _: truth, [0.5] * 4, 400, rows=1)
    assert (lengths[:10] >= 1).all()
    from dspark_jax.schedule.adaptive import BATCH_PRIOR, PRIOR, _chain

    many, _ = simulate(Observed(MANY), lambda _: truth, [0.5] * 4, 200, rows=64)
    rates = np.asarray(_chain(many.hit.sum(0), many.seen.sum(0), BATCH_PRIOR, PRIOR))
    np.testing.assert_allclose(rates, truth, rtol=0.05)


def test_an_overconfident_head_is_corrected():
    from dspark_jax.schedule.adaptive import _bias

    policy = Adaptive(MANY)
    memory, _ = simulate(policy, lambda _: [0.4, 0.4, 0.4, 0.4], [0.8] * 4, 200, rows=64)
    np.testing.assert_allclose(_bias(memory)[:2], 0.5, atol=0.06)


def test_todays_tokens_do_not_reach_the_headless_policy():
    """L16: whatever the confidences, Observed answers the same."""
    policy = Observed(table(np.linspace(1, 2, 10)))
    memory = learned_of(policy, np.random.default_rng(3), 2, 4)
    answers = [policy.lengths(view_of(np.full((2, 4), c), memory=memory)).tolist() for c in (0.01, 0.5, 0.99)]
    assert answers[0] == answers[1] == answers[2]


def test_sizes():
    for rows in (1, 2, 3, 4, 5, 8, 16, 100):
        for slots in (1, 4, 7, 15):
            sizes = pass_sizes(rows, slots)
            assert list(sizes) == sorted(set(sizes)) and sizes[-1] == rows * (slots + 1) and rows in sizes and len(sizes) <= 13
            assert all(b <= 2 * a for a, b in itertools.pairwise(s for s in sizes if s >= rows))
    assert pass_sizes(1, 7) == (1, 2, 3, 4, 6, 8)
    assert covering((1, 2, 4), jnp.asarray([1, 2, 3, 4, 9], jnp.int32)).tolist() == [1, 2, 4, 4, 4]


def test_refusals():
    with pytest.raises(RequestError, match="cost=None"):
        Algorithm1().lengths(view_of([[0.5, 0.5]]))
    with pytest.raises(RequestError, match="rows=3, the batch has 1"):
        Lagged(table([1, 2, 3], rows=3)).lengths(view_of([[0.5, 0.5]], memory=jnp.zeros((1, 2, 2))))
    with pytest.raises(RequestError, match="prior"):
        Lagged(prior=2.0)
    with pytest.raises(RequestError, match="margin"):
        Adaptive(margin=float("nan"))
    assert float(weights(view_of([[0.5]], [False]))[0]) == 0
