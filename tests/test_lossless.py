"""The law of the real loop: chi-square of the jitted, batched, speculative output against the exact law of the target.

The exact law comes from enumerating every prefix with a plain forward pass. Controls repeat the run with one classic
mistake each and must be told apart by the same test (PITFALLS group 1).
"""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode as loop
from dspark_jax import target, verify
from dspark_jax.cache import empty_cache, pack
from dspark_jax.cost import CostTable
from dspark_jax.decode import prefill, remembering
from dspark_jax.sampling import Purpose, SamplingParams, SamplingState, gumbel, log_probs
from dspark_jax.schedule import Adaptive, Algorithm1, FixedLength, Lagged, Observed, Threshold
from dspark_jax.state import new_state
from tests.stats import chi_square_p
from tests.toys import draft_config, target_config, toy_pair

VOCAB, LOOK, PROMPT = 5, 4, [1, 3, 0]
SETTINGS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=0.9, top_k=3),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.15),
}


def make_pair(kind="vanilla"):
    cfg = target_config(vocab_size=VOCAB)
    rank = 0 if kind == "none" else 6
    draft = draft_config(
        cfg,
        block_size=3,
        markov_rank=rank,
        markov_head_type=kind if rank else "vanilla",
        confidence_with_markov=rank > 0,
    )
    return toy_pair(cfg, draft, seed=3, scale=0.2)


def repeat(params, rows, first_seed=0):
    from dataclasses import replace

    return SamplingState.from_params([replace(params, seed=first_seed + i) for i in range(rows)])


def exact_law(pair, params):
    """Probability of every continuation of LOOK tokens, in the order of ``itertools.product``."""
    sequences = list(itertools.product(range(VOCAB), repeat=LOOK))
    grid = jnp.asarray([PROMPT + list(s) for s in sequences], jnp.int32)
    rows, width = grid.shape
    cfg = pair.model.target
    cache = empty_cache(cfg.num_layers, rows, cfg.num_kv_heads, width, cfg.head_dim, jnp.float32)
    batch = pack(grid, jnp.full(rows, width, jnp.int32), jnp.zeros(rows, jnp.int32), rows * width)
    out = target.forward(pair.params["target"], cfg, batch, cache)
    logits = target.unembed(pair.params["target"], out.hidden).reshape(rows, width, VOCAB)
    logp, _ = log_probs(logits, repeat(params, rows))
    start = len(PROMPT)
    picked = jnp.take_along_axis(logp[:, start - 1 : -1], grid[:, start:, None], axis=2)[..., 0]
    return np.exp(np.asarray(picked, np.float64).sum(1))


PRICED = [Algorithm1, Lagged, Adaptive, Observed]


def priced(kind, rows):
    """Costs at which some drafts pay and others do not, with a step."""
    tokens = [rows, 2 * rows, 3 * rows, 4 * rows]
    return kind(CostTable.make(tokens, [1.0, 1.35, 1.4, 1.8], draft=0.1))


def observed(pair, params, policy, batches, rows=2048):
    """Counts of every continuation over ``batches`` runs of the real prefill and loop with ``rows`` seeded requests."""
    # A fresh function every time: controls change what is traced, and a cached trace would hide it.
    run = jax.jit(lambda model, *rest: loop.decode.__wrapped__(model, *rest), static_argnums=0)
    counts = np.zeros(VOCAB**LOOK, np.int64)
    limit = len(PROMPT) + LOOK + 4
    weights, checked = VOCAB ** np.arange(LOOK - 1, -1, -1), set()
    for batch in range(batches):
        state = new_state(pair.model, [PROMPT] * rows, repeat(params, rows, batch * rows), [limit] * rows, (), 16, jnp.float32)
        state = prefill(pair.model, pair.params, state, chunk=4)
        state = remembering(state, policy, pair.model.drafter.block_size)
        state = run(pair.model, pair.params, state, policy, np.int32(1000))
        assert int(state.length.min()) == limit
        checked.update(np.unique(state.log.verified).tolist())
        ids = np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + LOOK])
        counts += np.bincount(ids @ weights, minlength=len(counts))
    assert len(checked) > 2, "lengths hardly vary; the test would pass whatever decides them"
    return counts


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("policy", [FixedLength(), Threshold(0.5)], ids=["fixed", "threshold"])
def test_output_law_under_every_sampling_setting(setting, policy):
    pair, params = make_pair(), SETTINGS[setting]
    law = exact_law(pair, params)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    counts = observed(pair, params, policy, 8)
    assert counts[law < 1e-12].sum() == 0, "a token outside the filter was emitted"
    assert chi_square_p(counts, law) > 1e-4


@pytest.mark.parametrize("kind", ["gated", "rnn", "none"])
def test_output_law_with_every_head(kind):
    pair, params = make_pair(kind), SETTINGS["temperature"]
    assert chi_square_p(observed(pair, params, Threshold(0.25, cumulative=True), 8), exact_law(pair, params)) > 1e-4


@pytest.mark.parametrize("kind", PRICED, ids=lambda k: k.__name__)
def test_output_law_under_priced_policies(kind):
    """Rows share the room of a batch, and what earlier rounds left behind decides with them."""
    pair, params = make_pair(), SETTINGS["temperature"]
    assert chi_square_p(observed(pair, params, priced(kind, 256), 64, 256), exact_law(pair, params)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rows, batches", [(1, 6000), (5, 3000)])
@pytest.mark.parametrize("kind", PRICED, ids=lambda k: k.__name__)
def test_output_law_under_priced_policies_in_small_batches(kind, rows, batches):
    pair, params = make_pair(), SETTINGS["temperature"]
    assert chi_square_p(observed(pair, params, priced(kind, rows), batches, rows), exact_law(pair, params)) > 1e-4


def test_output_law_of_coupled_requests():
    pair, params = make_pair(), SamplingParams(temperature=1.0, coupled=True)
    assert chi_square_p(observed(pair, params, FixedLength(), 8), exact_law(pair, params)) > 1e-4


class Echo(flax.struct.PyTreeNode):
    """Checks everything where the last round's third confidence was high, which has seen its second token."""

    drafts, needs_confidence = True, True

    def slots(self, block_size):
        return block_size

    def token_sizes(self, rows, slots):
        return (rows * (slots + 1),)

    def memory(self, rows, slots):
        return jnp.zeros(rows, jnp.float32)

    def lengths(self, view):
        return jnp.where(view.memory > jnp.mean(view.memory), view.most, 0)

    def remember(self, view, lengths, accepted, drafted):
        return view.confidence[:, 2]


def test_memories_of_drafts_need_fresh_noise(monkeypatch):
    """A draft that was not committed left its mark in the confidences behind it. A policy may remember them, because the next
    round draws with other noise; with noise by position alone it would know the token that it decides about."""
    pair, params = make_pair(), SETTINGS["temperature"]
    law = exact_law(pair, params)
    assert chi_square_p(observed(pair, params, Echo(), 8), law) > 1e-4

    def by_position(sampling, length, slot, vocab):
        return gumbel(sampling.key, (length + slot)[:, None], Purpose.DRAFT, vocab)[:, 0]

    monkeypatch.setattr(loop, "draft_noise", by_position)
    assert chi_square_p(observed(pair, params, Echo(), 8), law) < 1e-6


def same_purpose(monkeypatch):
    class Shared:
        DRAFT = ACCEPT = RESIDUAL = loop.Purpose.DRAFT

    monkeypatch.setattr(loop, "Purpose", Shared)


def argmax_drafts(monkeypatch):
    monkeypatch.setattr(loop, "draw", lambda log_q, noise: jnp.argmax(log_q, axis=-1).astype(jnp.int32))


def residual_from_p(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda log_p, log_q, use_q: (log_p, jnp.zeros_like(use_q)))


def raw_q(monkeypatch):
    """Drafts are drawn from the filtered q, the unfiltered one is reported."""
    real, draw = loop.log_probs, loop.draw

    def unfiltered(logits, sampling):
        if logits.ndim == 2:
            return jax.nn.log_softmax(logits, axis=-1), jnp.ones(logits.shape[0], bool)
        return real(logits, sampling)

    def filtered_draw(log_q, noise):
        return draw(jnp.where(log_q >= jax.lax.top_k(log_q, 2)[0][:, 1:], log_q, -jnp.inf), noise)

    monkeypatch.setattr(loop, "log_probs", unfiltered)
    monkeypatch.setattr(loop, "draw", filtered_draw)


@pytest.mark.parametrize("mistake", [same_purpose, argmax_drafts, residual_from_p, raw_q])
def test_controls_are_told_apart(mistake, monkeypatch):
    pair, params = make_pair(), SETTINGS["temperature"]
    law = exact_law(pair, params)
    mistake(monkeypatch)
    assert chi_square_p(observed(pair, params, FixedLength(), 8), law) < 1e-6
