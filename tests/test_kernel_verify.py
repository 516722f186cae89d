"""The verify op: reference and both kernels (interpreted) against the accept rule of dspark_jax, on random and hostile rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import SamplingParams, SamplingState, best_token, draw, is_finite_row, log_probs
from dspark_jax.verify import accept, accept_greedy
from pallas_kernels.verify import Filters, QNorm, pallas_gpu, pallas_tpu, verify

BACKENDS = ("reference", "pallas_tpu", "pallas_gpu")
SLOTS, VOCAB = 3, 4200  # three tiles of the TPU kernel and two of the GPU kernel, the last one broken
INF = np.inf


def settings(rows):
    return Filters(*(jnp.asarray(c, d) for c, d in zip(zip(*rows, strict=True), "fiff", strict=True)))


def plain(rows):
    """A state for the oracle, whose filters are put in later."""
    return SamplingState.from_params([SamplingParams(seed=0)] * rows)


def hostile(seed):
    """A batch whose rows are one trap each; the name says which."""
    rng = np.random.default_rng(seed)
    cases = {}

    def case(name, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, scheduled=SLOTS, near=0.5):
        logits = (2 * rng.standard_normal((SLOTS + 1, VOCAB))).astype(np.float32)
        logits[np.arange(SLOTS + 1), rng.integers(0, VOCAB, SLOTS + 1)] += 9
        q = logits[:SLOTS] + near * rng.standard_normal((SLOTS, VOCAB)).astype(np.float32)
        cases[name] = {"logits": logits, "q": q, "filters": (temperature, top_k, top_p, min_p), "scheduled": scheduled}
        return cases[name]

    case("random")
    case("far", near=3.0)
    case("warm", temperature=1.7)
    case("cold", temperature=1e-4)
    case("nothing scheduled", scheduled=0)
    case("one scheduled", scheduled=1, near=0.01)
    case("top_k", top_k=40)
    case("top_k beyond the vocabulary", top_k=VOCAB + 7)
    case("top_p", top_p=0.7)
    case("min_p", min_p=0.01)
    case("all filters", 0.8, 300, 0.9, 0.001)
    row = case("ties", top_k=17)
    row["logits"] = np.round(row["logits"])
    row = case("exact mass", top_p=0.75)  # 2^-1, 2^-2, 2^-2: the first two reach .75 exactly, and the tie brings the third
    row["logits"][:] = -INF
    row["logits"][:, [5, 2047, 2048]] = np.log(np.float32([0.5, 0.25, 0.25]))
    row = case("greedy ties", temperature=0.0)
    row["logits"] = np.round(row["logits"])
    row["logits"][:, [70, 4100]] = 50
    row["q"][:, 70] += 50
    row = case("p = q")
    row["q"] = row["logits"][:SLOTS]
    row = case("few finite")
    row["logits"][:, rng.permutation(VOCAB)[7:]] = -INF
    row = case("reduced draft vocabulary")
    row["q"][:, rng.permutation(VOCAB)[50:]] = -INF
    row = case("one-hot p and q")
    row["logits"][:], row["q"][:] = -INF, -INF
    row["logits"][:, 3], row["q"][:2, 3], row["q"][2, 4199] = 1, 1, 1
    row = case("one-hot p on the last id")
    row["logits"][:] = -INF
    row["logits"][:, VOCAB - 1] = -3
    case("q NaN", near=0.01)["q"][1, 2] = np.nan
    case("q +inf", near=0.01)["q"][1, 4199] = INF
    case("q nothing", near=0.01)["q"][0] = -INF
    case("p NaN", near=0.01)["logits"][1, 4199] = np.nan
    case("p all NaN", near=0.01)["logits"][0] = np.nan
    case("p +inf", near=0.01)["logits"][2, 0] = INF
    case("p nothing", near=0.01)["logits"][3] = -INF
    case("draft outside q", near=0.01)

    stacked = {k: np.stack([c[k] for c in cases.values()]) for k in ("logits", "q")}
    with np.errstate(invalid="ignore"):
        top = stacked["q"].max(-1, keepdims=True)
        log_q = stacked["q"] - top - np.log(np.exp(stacked["q"] - top).sum(-1, keepdims=True))
        log_q = np.where(np.isneginf(top), -INF, log_q).astype(np.float32)
        tokens = np.where(np.isnan(log_q), -INF, log_q + rng.gumbel(size=log_q.shape)).argmax(-1).astype(np.int32)
    names = list(cases)
    log_q[names.index("draft outside q"), 0, tokens[names.index("draft outside q"), 0]] = -INF
    return names, {
        "logits": jnp.asarray(stacked["logits"]),
        "log_q": jnp.asarray(log_q),
        "tokens": jnp.asarray(tokens),
        "scheduled": jnp.asarray([c["scheduled"] for c in cases.values()], jnp.int32),
        "filters": settings([c["filters"] for c in cases.values()]),
        "sampling": plain(len(cases)),
        "uniform": jnp.asarray(rng.uniform(size=tokens.shape), jnp.float32),
        "noise": jnp.asarray(rng.gumbel(size=(len(cases), SLOTS + 1, VOCAB)), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("mode", "backend"))
def ours(data, mode, backend):
    noise = data["noise"]
    arguments = {"mode": mode, "backend": backend, "interpret": backend != "reference"}
    if mode == "sample":
        arguments |= {"uniform": data["uniform"], "soft": True, "noise": lambda accepted: at(noise, accepted)}
        arguments["q_norm"] = data.get("q_norm")
    elif mode == "coupled":
        arguments["noise"] = noise
    log_q = data["log_q"] if mode == "sample" else None
    return verify(data["logits"], log_q, data["tokens"], data["scheduled"], data["filters"], **arguments)


def at(x, index):
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("mode",))
def oracle(data, mode):
    logits, tokens, scheduled = data["logits"].astype(jnp.float32), data["tokens"], data["scheduled"]
    log_p, finite = log_probs(logits, data["sampling"].replace(**data["filters"]._asdict()))
    if mode == "greedy":
        best = best_token(logits)
        ids = jnp.arange(logits.shape[2], dtype=jnp.int32)
        log_p = jnp.where(best[..., None] == ids[None, None], 0.0, -jnp.inf)
        return accept_greedy(tokens, best, is_finite_row(logits), scheduled), log_p, None
    if mode == "coupled":
        return accept_greedy(tokens, draw(log_p, data["noise"]), finite, scheduled), log_p, None
    result = accept(tokens, data["log_q"], log_p, finite, scheduled, data["uniform"], lambda a: at(data["noise"], a))
    overlap = jnp.minimum(jnp.exp(log_p[:, :-1]), jnp.exp(data["log_q"])).sum(-1)
    sound = finite[:, :-1] & is_finite_row(data["log_q"])
    return result, log_p, jnp.where(sound, overlap, 0.0)


def check(data, mode, backend, names):
    got = jax.tree.map(np.asarray, ours(data, mode, backend))
    (accepted, next_token, ok, degenerate), log_p, overlap = jax.tree.map(
        np.asarray, (lambda r, *rest: ((r.accepted, r.next_token, r.ok, r.degenerate), *rest))(*oracle(data, mode))
    )
    for row, name in enumerate(names):
        assert got.accepted[row] == accepted[row], name
        assert got.ok[row] == ok[row], name
        if ok[row]:
            assert got.next_token[row] == next_token[row], name
            assert got.degenerate[row] == degenerate[row], name
        assert 0 <= got.next_token[row] < data["logits"].shape[2], name
        run = [*np.asarray(data["tokens"])[row, : accepted[row]], next_token[row]]
        want = log_p[row, np.arange(len(run)), run]
        count = len(run) if ok[row] else len(run) - 1
        np.testing.assert_allclose(got.log_prob[row, :count], want[:count], atol=2e-5, rtol=1e-5, err_msg=name)
        assert not got.log_prob[row, len(run) :].any(), name
    if mode == "sample":
        np.testing.assert_allclose(got.soft, overlap, atol=2e-5)
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["sample", "greedy", "coupled"])
def test_contract(mode, backend):
    accepted = set()
    for seed in range(4):
        names, data = hostile(seed)
        if mode != "sample":  # drafts that the target would pick itself, so that some are kept
            _, log_p, _ = oracle(data, mode)
            choice = jnp.argmax(
                jnp.where(log_p > -jnp.inf, log_p + (data["noise"] if mode == "coupled" else 0.0), -jnp.inf), -1
            )
            luck = np.random.default_rng(seed).uniform(size=data["tokens"].shape) < 0.7
            data["tokens"] = jnp.where(luck, choice[:, :SLOTS], data["tokens"]).astype(jnp.int32)
        got = check(data, mode, backend, names)
        accepted |= set(got.accepted.tolist())
        if mode == "sample":
            assert got.degenerate[[names.index("q nothing"), names.index("draft outside q")]].all()
            assert not got.ok[names.index("p all NaN")]
    assert accepted == set(range(SLOTS + 1)), "the cases must reach every length"


@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_logits_instead_of_log_q(backend):
    """What the markov op returns: logits and how to read them."""
    names, data = hostile(5)
    temperature = np.asarray(data["filters"].temperature)
    scale = jnp.asarray(np.where(temperature == 0, 1, temperature))[:, None, None]
    logits = data["log_q"] * scale + 3.0  # log q is then exactly what it is without the detour, up to rounding
    top = jnp.max(jnp.where(jnp.isfinite(logits), logits, 0.0), axis=-1)
    log_z = jax.nn.logsumexp((logits - top[..., None]) / scale, axis=-1)
    norm = QNorm(top, jnp.where(jnp.isfinite(log_z), log_z, 0.0))
    read = (logits - norm.top[..., None]) / scale - norm.log_z[..., None]
    want = ours(data | {"log_q": read}, "sample", backend)
    got = ours(data | {"log_q": logits, "q_norm": norm}, "sample", backend)
    sound = np.asarray(want.ok)
    for name in ("accepted", "next_token", "degenerate"):
        np.testing.assert_array_equal(getattr(got, name)[sound], getattr(want, name)[sound])
    np.testing.assert_allclose(got.soft, want.soft, atol=2e-5)
    assert names and got.accepted.max() == SLOTS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "slots", "vocab", "dtype"),
    [(1, 2, 1, "float32"), (1, 16, 131, "bfloat16"), (2, 0, 257, "float32"), (9, 2, 128, "bfloat16"), (24, 1, 130, "bfloat16")],
)
def test_shapes(rows, slots, vocab, dtype, backend):
    rng = np.random.default_rng(vocab)
    logits = jnp.asarray(rng.standard_normal((rows, slots + 1, vocab)), dtype)
    log_q = jax.nn.log_softmax(logits[:, :slots].astype(jnp.float32) + 0.2)
    tokens = jnp.argmax(log_q + jnp.asarray(rng.gumbel(size=log_q.shape), jnp.float32), -1).astype(jnp.int32)
    data = {
        "logits": logits,
        "log_q": log_q,
        "tokens": tokens,
        "scheduled": jnp.full((rows,), slots, jnp.int32),
        "filters": settings([(1.0, 0, 0.9, 0.0)] * rows),
        "sampling": plain(rows),
        "uniform": jnp.asarray(rng.uniform(size=tokens.shape), jnp.float32),
        "noise": jnp.asarray(rng.gumbel(size=(rows, slots + 1, vocab)), jnp.float32),
    }
    check(data, "sample", backend, [str(i) for i in range(rows)])


def test_refused_arguments():
    logits, tokens, rows = jnp.zeros((2, 3, 8)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2,), jnp.int32)
    call = functools.partial(verify, logits, None, tokens, rows, settings([(1.0, 0, 1.0, 0.0)] * 2))
    for message, arguments in {
        "mode='other' is unknown": {"mode": "other"},
        "needs log_q, uniform and noise": {},
        "takes no noise": {"mode": "greedy", "noise": jnp.zeros((2, 8))},
        "needs noise": {"mode": "coupled"},
        "noise has shape": {"mode": "coupled", "noise": jnp.zeros((2, 8))},
        "does not look at q": {"mode": "greedy", "soft": True},
        "backend='cudnn' is unknown": {"mode": "greedy", "backend": "cudnn"},
        "interpret=True needs a named kernel": {"mode": "greedy", "interpret": True},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**arguments)
    filters = Filters(*(jnp.zeros((2,)),) * 4)
    with pytest.raises(ValueError, match="top_k is float32"):
        verify(logits, None, tokens, rows, filters, mode="greedy")


def test_a_named_kernel_runs_or_raises():
    """Compiled for a CPU there is no kernel, and nothing takes its place."""
    arguments = (jnp.zeros((2, 3, 8)), None, jnp.zeros((2, 2), jnp.int32), jnp.zeros((2,), jnp.int32))
    with pytest.raises(ValueError, match="interpret"):
        verify(*arguments, settings([(1.0, 0, 1.0, 0.0)] * 2), mode="greedy", backend="pallas_tpu")


def test_block_sizes():
    qwen, bf16 = 151_936, jnp.dtype(jnp.bfloat16)
    blocks = pallas_tpu.block_sizes_for(128, 17, qwen, bf16, 1)
    assert blocks.slot_major and blocks.rows == 16 and blocks.width % blocks.tile == 0 and blocks.width >= qwen
    assert not pallas_tpu.block_sizes_for(1, 8, qwen, bf16, 1).slot_major
    with pytest.raises(ValueError, match="bytes of VMEM"):
        pallas_tpu.block_sizes_for(16, 8, 2**21, jnp.dtype(jnp.float32), 1)
    assert pallas_gpu.block_sizes_for(qwen, bf16).tile == 8192
    assert pallas_gpu.block_sizes_for(37, jnp.dtype(jnp.float32)).tile == 64
