"""The markov op: reference and both kernels (interpreted) against the heads of dspark_jax, for every kind of head."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import heads
from dspark_jax.sampling import SamplingParams, SamplingState, best_token, draw, log_probs
from pallas_kernels.markov import Confidence, Head, log_q, pallas_gpu, pallas_tpu, propose

BACKENDS = ("reference", "pallas_tpu", "pallas_gpu")
KINDS = ("vanilla", "gated", "rnn")
ROWS, SLOTS, WIDTH, RANK, VOCAB = 5, 3, 24, 8, 300
INF = np.inf


def block(
    kind, seed, rows=ROWS, slots=SLOTS, vocab=VOCAB, dtype=jnp.float32, kept=None, with_markov=True, rank=RANK, width=WIDTH
):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    inputs = {"vanilla": None, "gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}[kind]
    w2 = normal(vocab, rank)
    if kept is not None:
        w2 = w2[: len(kept)]
    head = Head(
        normal(vocab, rank),
        w2,
        None if inputs is None else normal(*inputs, scale=0.3),
        None if inputs is None else normal(inputs[0]),
        None if kept is None else jnp.asarray(kept, jnp.int32),
    )
    drafted = w2.shape[0]
    return {
        "hidden": normal(rows, slots, width),
        "base": jnp.asarray(2 * rng.standard_normal((rows, slots, drafted)), jnp.float32),
        "anchor": jnp.asarray(rng.integers(0, vocab, rows), jnp.int32),
        "head": head,
        "confidence": Confidence(normal(1, width + rank * with_markov), normal(1)),
        "temperature": jnp.asarray(([1.0, 0.0, 0.6, 1e-5, 1.8] * rows)[:rows], jnp.float32),
        "noise": jnp.asarray(rng.gumbel(size=(rows, slots, drafted)), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("kind", "backend", "sampled"))
def ours(data, kind, backend, sampled):
    draws = {"temperature": data["temperature"], "noise": data["noise"]} if sampled else {}
    arguments = (data["hidden"], data["base"], data["anchor"], data["head"], data["confidence"])
    return propose(*arguments, kind=kind, backend=backend, interpret=backend != "reference", **draws)


@functools.partial(jax.jit, static_argnames=("kind", "sampled"))
def oracle(data, kind, sampled):
    head, confidence = data["head"], data["confidence"]
    rank, width = head.w1.shape[1], data["hidden"].shape[2]
    with_markov = confidence.proj.shape[1] > width
    cfg = SimpleNamespace(markov_rank=rank, markov_head_type=kind, confidence_head=True, confidence_with_markov=with_markov)
    markov = {"w1": head.w1, "w2": head.w2, "proj": head.proj, "bias": head.bias}
    params = {"markov": markov, "confidence": confidence._asdict()}
    sampling = SamplingState.from_params([SamplingParams(seed=0)] * data["hidden"].shape[0])
    sampling = sampling.replace(temperature=data["temperature"])

    def whole(x, fill):
        if head.kept is None:
            return x
        return jnp.full((x.shape[0], head.w1.shape[0]), fill, x.dtype).at[:, head.kept].set(x)

    def pick(slot, logits):
        if not sampled:
            token = best_token(logits)
            return token if head.kept is None else head.kept[token], logits
        q, _ = log_probs(whole(logits, -jnp.inf), sampling)
        return draw(q, whole(data["noise"][:, slot], 0.0)), q

    return heads.propose(params, cfg, data["hidden"], data["base"], data["anchor"], pick)


def check(data, kind, backend, sampled, skip=()):
    got, want = ours(data, kind, backend, sampled), oracle(data, kind, sampled)
    rows = [r for r in range(data["hidden"].shape[0]) if r not in skip]
    np.testing.assert_array_equal(np.asarray(got.tokens)[rows], np.asarray(want.tokens)[rows])
    np.testing.assert_allclose(np.asarray(got.confidence)[rows], np.asarray(want.confidence)[rows], atol=2e-5, rtol=1e-5)
    if not sampled:
        assert got.logits is None
        return got
    head = data["head"]
    q = np.asarray(log_q(got, data["temperature"], head.kept, head.w1.shape[0]))
    tolerance = 1e-5 / np.maximum(np.asarray(data["temperature"]), 1e-5)[:, None, None] + 2e-5
    both = np.isneginf(q) & np.isneginf(want.log_q)
    difference = np.abs(np.where(both, 0, q) - np.where(both, 0, want.log_q))
    likely = np.asarray(want.log_q) > -20  # what has weight; a low temperature blows up the rest
    assert (difference <= tolerance)[likely | both].all()
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind, backend, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "TILE_BYTES", 128 * RANK * 4)  # three tiles, the last one broken
    for seed in range(3):
        data = block(kind, seed)
        check(data, kind, backend, sampled=True)
        check(data, kind, backend, sampled=False)
    ties = data | {"base": jnp.round(data["base"] / 4)}
    ties["head"] = data["head"]._replace(w2=jnp.zeros_like(data["head"].w2))
    check(ties, kind, backend, sampled=False)
    check(ties | {"temperature": jnp.zeros((ROWS,))}, kind, backend, sampled=True)
    base = np.array(data["base"])
    base[0, :, 5:] = -INF  # few finite
    base[1, 1], base[2, 0, 299], base[3, 2, 0] = -INF, np.nan, INF  # unusable rows, at different slots
    base[4, :, :], base[4, :, 299] = -INF, 0  # one-hot on the last id
    hostile = data | {"base": jnp.asarray(base), "temperature": jnp.ones((ROWS,))}
    got = check(hostile, kind, backend, sampled=True)
    assert [int(got.tokens[r, s]) for r, s in ((1, 1), (2, 0), (3, 2))] == [0, 0, 0]
    assert (np.asarray(got.tokens)[4] == 299).all() and (np.asarray(got.tokens)[0] < 5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_reduced_vocabulary(backend):
    """Drafted indices go through the map before they are looked up or returned (PITFALLS A10)."""
    kept = np.sort(np.random.default_rng(3).permutation(VOCAB)[:70])
    data = block("vanilla", 7, kept=kept)
    got = check(data, "vanilla", backend, sampled=True)
    assert np.isin(np.asarray(got.tokens), kept).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "slots", "vocab"), [(1, 1, 1), (17, 2, 37)])
def test_shapes(rows, slots, vocab, backend):
    data = block("vanilla", 1, rows=rows, slots=slots, vocab=vocab, with_markov=False)
    check(data, "vanilla", backend, sampled=True)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights(kind, backend):
    """Against the reference, which rounds where the kernels do."""
    data = block(kind, 2, dtype=jnp.bfloat16)
    want, got = ours(data, kind, "reference", True), ours(data, kind, backend, True)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logits, want.logits, atol=0.02)
    np.testing.assert_allclose(got.confidence, want.confidence, atol=0.02)


def test_refused_arguments():
    data = block("vanilla", 0)
    call = functools.partial(propose, data["hidden"], data["base"], data["anchor"])
    head = data["head"]
    for message, arguments in {
        "kind='lstm' is unknown": {"kind": "lstm"},
        "needs proj and bias": {"kind": "gated"},
        "come together": {"noise": data["noise"]},
        "noise has shape": {"noise": data["noise"][:1], "temperature": data["temperature"]},
        "interpret=True needs a named kernel": {"interpret": True},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(head, **arguments)
    with pytest.raises(ValueError, match="base_logits has shape"):
        call(head._replace(w2=head.w2[:7]))
    with pytest.raises(ValueError, match="interpret"):
        call(head, backend="pallas_tpu")


def test_block_sizes():
    bf16 = jnp.dtype(jnp.bfloat16)
    blocks = pallas_tpu.block_sizes_for(128, 151_936, 256, bf16, "rnn")
    assert blocks.tile % 128 == 0 and blocks.vmem < pallas_tpu.VMEM and blocks.group == 16
    with pytest.raises(ValueError, match="at most 512"):
        pallas_tpu.block_sizes_for(513, 151_936, 256, bf16, "vanilla")
    assert pallas_gpu.block_sizes_for(3, 151_936, 256, bf16) == (16, 128, 256, 4)
