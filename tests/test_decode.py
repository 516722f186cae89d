"""The decode loop: speculative equals plain decoding, rows are independent, and the clock ends rows where it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import decode, prefill
from dspark_jax.errors import RequestError
from dspark_jax.generate import generate, stream
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive, FixedLength, Threshold
from dspark_jax.state import new_state
from tests.toys import draft_config, target_config, toy_pair


def prompts_of(lengths, vocab=37, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def ids(outputs):
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize("block", [1, 3, 7])
def test_greedy_speculative_equals_plain(block):
    """γ 1, 3, 7; batch 1, 4, 7; prompts of 1 to 200 tokens: any fault in clock, cache or mask changes a token."""
    pair = toy_pair(draft=draft_config(target_config(), block_size=block))
    prompts = prompts_of([1, 2, 17, 64, 65, 128, 200])
    plain = ids(generate(pair, prompts, scheduler=Autoregressive(), max_new_tokens=24))
    every = (FixedLength(), Threshold(0.5), Threshold(0.3, cumulative=True))
    for batch, policies in ((1, every[:2]), (4, every[:1]), (7, every[1:])):
        for policy in policies:
            assert ids(generate(pair, prompts, scheduler=policy, max_new_tokens=24, batch_size=batch)) == plain


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_does_not_depend_on_its_neighbours(kind, temperature):
    """The same seeded request alone, and in any slot of a batch, gives the same tokens (L05, L06, L23)."""
    rank = 0 if kind == "none" else 6
    changes = dict(markov_rank=rank, confidence_with_markov=rank > 0, markov_head_type="vanilla" if rank == 0 else kind)
    pair = toy_pair(draft=draft_config(target_config(), **changes))
    prompts = prompts_of([5, 40, 1, 90])
    params = [SamplingParams(temperature=temperature, seed=11 + i) for i in range(4)]
    for policy in (FixedLength(),) if kind != "vanilla" else (FixedLength(), Threshold(0.4)):
        together = ids(generate(pair, prompts, params, policy, max_new_tokens=20))
        alone = [generate(pair, [p], s, policy, max_new_tokens=20)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        backwards = ids(generate(pair, prompts[::-1], params[::-1], policy, max_new_tokens=20))[::-1]
        assert together == alone == backwards


def test_seeds_decide_and_unseeded_requests_differ():
    """L06: one shared stream, or an ignored seed, would make these equal (or unequal)."""
    pair, prompt = toy_pair(), prompts_of([6])[0]
    seeded = [SamplingParams(temperature=1.0, seed=s) for s in (1, 2, 1)]
    a, b, c = ids(generate(pair, [prompt] * 3, seeded, max_new_tokens=24))
    assert a == c != b
    free = [ids(generate(pair, [prompt], SamplingParams(temperature=1.0), max_new_tokens=24))[0] for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
def test_prefill_chunks_leave_the_same_caches_and_first_token(chunk):
    """K08, K09, K10: chunk-local positions, or features of the last chunk only, would change the draft context."""
    pair = toy_pair()
    prompts = prompts_of([100, 33])

    def read(chunk):
        sampling = SamplingState.from_params([SamplingParams()] * 2)
        state = new_state(pair.model, prompts, sampling, [128, 128], (), 128, jnp.float32)
        return prefill(pair.model, pair.params, state, chunk=chunk)

    whole, parts = read(128), read(chunk)
    np.testing.assert_array_equal(whole.length, [101, 34])
    np.testing.assert_array_equal(whole.length, parts.length)
    np.testing.assert_array_equal(whole.tokens, parts.tokens)
    for row, end in enumerate([100, 33]):
        for name in ("target_cache", "draft_cache"):
            a, b = (getattr(s, name) for s in (whole, parts))
            np.testing.assert_allclose(a.k[:, row, :, :end], b.k[:, row, :, :end], atol=1e-5)
            np.testing.assert_allclose(a.v[:, row, :, :end], b.v[:, row, :, :end], atol=1e-5)


def test_garbage_past_the_clock_is_never_read():
    """K02, K17, K18: filling every unused cache entry with NaN changes nothing."""
    pair = toy_pair()
    prompts = prompts_of([9, 30])

    def run(poison):
        sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=s) for s in (1, 2)])
        state = new_state(pair.model, prompts, sampling, [60, 60], (), 256, jnp.float32)
        state = prefill(pair.model, pair.params, state, chunk=32)
        for _ in range(6):
            if poison:
                beyond = jnp.arange(256)[None, :] >= state.context[:, None]
                mask = beyond[None, :, None, :, None]

                def spoil(cache, mask=mask):
                    return jax.tree.map(lambda x: jnp.where(mask, jnp.nan, x), cache)

                state = state.replace(target_cache=spoil(state.target_cache), draft_cache=spoil(state.draft_cache))
            state = decode(pair.model, pair.params, state, FixedLength(), np.int32(1))
        return state

    clean, dirty = run(False), run(True)
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)
    np.testing.assert_array_equal(clean.status, dirty.status)
    assert int(clean.length.min()) > 12


def test_caches_equal_a_fresh_prefill_after_many_rounds():
    """K01, K20: after mixed accepts and refusals both caches are those of reading the committed tokens afresh."""
    pair = toy_pair()
    prompts = prompts_of([9, 30])

    def sampling():
        return SamplingState.from_params([SamplingParams(temperature=1.0, seed=s) for s in (1, 2)])

    state = new_state(pair.model, prompts, sampling(), [120, 120], (), 128, jnp.float32)
    state = prefill(pair.model, pair.params, state, chunk=32)
    state = decode(pair.model, pair.params, state, FixedLength(), np.int32(25))
    committed = [np.asarray(state.tokens[r, : int(state.length[r]) - 1]).tolist() for r in range(2)]
    fresh = new_state(pair.model, committed, sampling(), [128, 128], (), 128, jnp.float32)
    fresh = prefill(pair.model, pair.params, fresh, chunk=128)
    for row in range(2):
        end = len(committed[row])
        for name in ("target_cache", "draft_cache"):
            a, b = getattr(state, name), getattr(fresh, name)
            np.testing.assert_allclose(a.k[:, row, :, :end], b.k[:, row, :, :end], atol=2e-5)
            np.testing.assert_allclose(a.v[:, row, :, :end], b.v[:, row, :, :end], atol=2e-5)


def test_stop_tokens_and_limits_cut_inside_a_round():
    """S01, S08, S12: the stop token is the last id, nothing follows it; the limit is exact; counts exclude what was cut."""
    pair = toy_pair()
    prompt = prompts_of([12])[0]
    full = generate(pair, [prompt], scheduler=Autoregressive(), max_new_tokens=40)[0].token_ids
    for policy in (FixedLength(), Autoregressive()):
        for at in (0, 1, 5, 13):
            stop = full[at]
            first = full.index(stop)
            (out,) = generate(pair, [prompt], scheduler=policy, max_new_tokens=40, stop_token_ids=[stop])
            assert out.token_ids == full[: first + 1] and out.finish_reason == "stop"
        for limit in (1, 2, 3, 8):
            (out,) = generate(pair, [prompt], scheduler=policy, max_new_tokens=limit)
            assert out.token_ids == full[:limit] and out.finish_reason == "length"
            assert sum(out.accepted_per_round) == limit - 1
            assert all(v <= limit - 1 for v in out.verified_per_round)
    (none,) = generate(pair, [prompt], max_new_tokens=0)
    assert none.token_ids == [] and none.stats.rounds == 0


def test_narrow_numpy_numbers_do_not_wrap():
    """np.int8(126) + 3 prompt tokens would be a negative limit, and a loop without an end."""
    pair = toy_pair()
    prompt = np.asarray([1, 2, 3], np.uint8)
    (out,) = generate(pair, [prompt], max_new_tokens=np.int8(126))
    assert len(out.token_ids) == 126
    (out,) = generate(pair, [prompt], max_new_tokens=np.int32(2**31 - 1))
    assert len(out.token_ids) == 512 - 3 and out.finish_reason == "length"


def test_the_context_ends_a_request_exactly():
    """K16: max length 32, prompt 28, block 7: four new tokens, reason length, no write past the end."""
    cfg = target_config(max_positions=32)
    pair = toy_pair(cfg, draft_config(cfg, block_size=7))
    (out,) = generate(pair, prompts_of([28]), max_new_tokens=100)
    assert len(out.token_ids) == 4 and out.finish_reason == "length"


def test_a_row_with_unusable_logits_ends_alone():
    """L09: a NaN in one row's embedding ends that row with "error"; the others are bit-identical to a run without it."""
    pair = toy_pair()
    target = dict(pair.params["target"])
    target["embed"] = target["embed"].at[36].set(jnp.nan)
    broken = dataclasses.replace(pair, params=pair.params | {"target": target})
    prompts = prompts_of([8, 9, 10, 11], vocab=36)
    # The mask token's embedding is what drafts with, so let another id be the mask.
    draft = dataclasses.replace(pair.model.draft, mask_token_id=35)
    broken = dataclasses.replace(broken, model=dataclasses.replace(pair.model, draft=draft))
    clean = generate(broken, prompts, max_new_tokens=12)
    prompts[2] = [*prompts[2][:4], 36, *prompts[2][5:]]
    for policy in (FixedLength(), Autoregressive()):
        outs = generate(broken, prompts, scheduler=policy, max_new_tokens=12)
        assert outs[2].finish_reason == "error"
        assert [outs[i].token_ids for i in (0, 1, 3)] == [clean[i].token_ids for i in (0, 1, 3)]


def test_sliding_layers_do_not_see_old_tokens():
    """K12: with every draft layer sliding, a context row older than the window does not change the block."""
    from dspark_jax.cache import KVCache
    from dspark_jax.draft import block_hidden

    cfg = target_config()
    window = 8
    pair = toy_pair(cfg, draft_config(cfg, windows=(window, window)))
    d, rng = pair.model.draft, np.random.default_rng(0)
    shape = (d.num_layers, 1, d.num_kv_heads, 64, d.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))

    def hidden(k, v):
        context = jnp.asarray([24], jnp.int32)
        return block_hidden(
            pair.params["draft"], d, pair.params["target"]["embed"], jnp.asarray([3], jnp.int32), context, KVCache(k, v)
        )

    base = hidden(k, v)
    # Slot 0 stands at 24 and sees 17..23; slot 3 sees 20..23.
    old = hidden(k.at[:, :, :, :17].add(1.0), v.at[:, :, :, :17].add(1.0))
    np.testing.assert_array_equal(base, old)
    edge = hidden(k.at[:, :, :, 17].add(1.0), v)
    assert np.abs(edge - base).max() > 1e-4
    full = dataclasses.replace(d, windows=(0, 0))
    other = block_hidden(
        pair.params["draft"],
        full,
        pair.params["target"]["embed"],
        jnp.asarray([3], jnp.int32),
        jnp.asarray([24], jnp.int32),
        KVCache(k, v),
    )
    assert np.abs(other - base).max() > 1e-4


def test_target_windows_equal_a_masked_oracle():
    """A windowed target, read in one chunk, in small chunks, or decoded: one answer, and not the full-attention one."""
    cfg = target_config(windows=(16, 0, 16))
    pair = toy_pair(cfg)
    prompts = prompts_of([50, 7])
    plain = ids(generate(pair, prompts, scheduler=Autoregressive(), max_new_tokens=30))
    assert ids(generate(pair, prompts, scheduler=FixedLength(), max_new_tokens=30, prefill_chunk=5)) == plain
    full = dataclasses.replace(pair, model=dataclasses.replace(pair.model, target=target_config()))
    assert ids(generate(full, prompts, scheduler=Autoregressive(), max_new_tokens=30)) != plain


def test_streamed_ids_are_the_answer():
    """Deltas, joined, are the answer; every request ends with exactly one output."""
    pair = toy_pair()
    prompts = prompts_of([4, 20, 33])
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(3)]
    outs = generate(pair, prompts, params, max_new_tokens=25, stop_token_ids=[5], batch_size=2)
    got, last = {0: [], 1: [], 2: []}, {}
    for delta in stream(pair, prompts, params, max_new_tokens=25, stop_token_ids=[5], batch_size=2):
        got[delta.index] += delta.token_ids
        if delta.output is not None:
            assert delta.index not in last
            last[delta.index] = delta.output
    assert [got[i] for i in range(3)] == ids(outs)
    assert [repr(last[i]) for i in range(3)] == [repr(o) for o in outs]  # nan equals nan in text


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(prompts=[[]]), "prompts[0] is empty"),
        (dict(prompts=[[1, 37]]), "37, outside [0, 37)"),
        (dict(prompts=[[1, -1]]), "-1"),
        (dict(prompts=[[1.5]]), "1.5"),
        (dict(prompts=["text"]), "no tokenizer"),
        (dict(prompts="text"), "prompts must be a list"),
        (dict(prompts=[[1] * 512]), "context of 512"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
        (dict(max_new_tokens=1.5), "max_new_tokens=1.5"),
        (dict(stop_token_ids=[99]), "stop_token_ids"),
        (dict(sampling=[SamplingParams()] * 2), "1 prompts, 2 given"),
        (dict(scheduler=FixedLength(5)), "block_size=4"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(scheduler="fixed"), "scheduler='fixed'"),
        (dict(scheduler=FixedLength), "is not a policy"),
        (dict(scheduler=Threshold("0.5")), "value='0.5'"),
        (dict(scheduler=Threshold(None)), "value=None"),
        (dict(scheduler=Threshold(True)), "value=True"),
        (dict(scheduler=Threshold(np.ones(3))), "must be a number"),
        (dict(sampling=0.5), "got float"),
        (dict(sampling=[0.5]), "SamplingParams"),
        (dict(stop_token_ids=5), "got int"),
        (dict(prompts=[1, 2]), "prompts[0] must be text"),
        (dict(prompts=[[[1, 2]]]), "token ids are integers"),
        (dict(prefill_chunk=0), "prefill_chunk=0"),
    ],
)
def test_bad_requests_are_refused_by_name(change, words):
    call = dict(prompts=[[1, 2]], max_new_tokens=3) | change
    with pytest.raises(RequestError) as caught:
        generate(toy_pair(), **call)
    assert words in str(caught.value)


def test_policies_that_need_what_a_draft_lacks_are_refused():
    """C07: no head, no silent substitute."""
    pair = toy_pair(draft=draft_config(target_config(), confidence_head=False, confidence_with_markov=False))
    with pytest.raises(RequestError, match="confidence head"):
        generate(pair, [[1]], scheduler=Threshold(0.5), max_new_tokens=3)
    alone = dataclasses.replace(pair, model=dataclasses.replace(pair.model, draft=None))
    with pytest.raises(RequestError, match="needs a draft"):
        generate(alone, [[1]], scheduler=FixedLength(), max_new_tokens=3)
    for bad in (0, -1, True, 1.5, 2.0, "a", float("nan")):
        with pytest.raises(RequestError, match="length"):
            FixedLength(bad)
    for bad in (-0.1, 1.1, float("nan"), np.float32(2)):
        with pytest.raises(RequestError, match="value"):
            Threshold(bad)


def test_bfloat16_differs_from_float32_only_at_near_ties(fixtures_dir):
    """L21: every token of a bfloat16 run is, teacher-forced through one plain pass, within rounding of the largest logit."""
    from dspark_jax import target
    from dspark_jax.cache import empty_cache, pack
    from dspark_jax.pair import load_pair

    root = fixtures_dir / "qwen3_tiny"
    pair = load_pair(root / "target", root / "dspark_vanilla" / "draft", dtype="bfloat16")
    assert pair.params["target"]["embed"].dtype == jnp.bfloat16
    prompts = [list(b"12+7=19; 3+4=7; "), list(b"the old man")]
    cfg = pair.model.target
    for policy in (FixedLength(), Autoregressive()):
        for prompt, out in zip(prompts, generate(pair, prompts, scheduler=policy, max_new_tokens=30), strict=True):
            assert len(out.token_ids) == 30
            grid = jnp.asarray([prompt + out.token_ids], jnp.int32)
            width = grid.shape[1]
            cache = empty_cache(cfg.num_layers, 1, cfg.num_kv_heads, width, cfg.head_dim, jnp.bfloat16)
            batch = pack(grid, jnp.asarray([width], jnp.int32), jnp.zeros(1, jnp.int32), width)
            hidden = target.forward(pair.params["target"], cfg, batch, cache).hidden
            logits = np.asarray(target.unembed(pair.params["target"], hidden))[len(prompt) - 1 : -1]
            gap = logits.max(-1) - logits[np.arange(30), out.token_ids]
            assert gap.max() < 0.25


def test_drafts_before_an_unusable_row_stand():
    """A stop token among the accepted drafts ends a row before the target's unusable row behind it could."""
    from dspark_jax.decode import commit
    from dspark_jax.heads import Proposal
    from dspark_jax.state import ERROR, LENGTH, RUNNING, STOP
    from dspark_jax.verify import AcceptResult

    pair = toy_pair()
    sampling = SamplingState.from_params([SamplingParams()] * 3)
    state = new_state(pair.model, [[1, 2]] * 3, sampling, [9, 9, 9], [5], 16, jnp.float32)
    state = state.replace(length=jnp.full(3, 3, jnp.int32), tokens=state.tokens.at[:, 2].set(7))
    drafts = jnp.asarray([[5, 8, 9], [8, 9, 9], [8, 9, 5]], jnp.int32)
    proposal = Proposal(drafts, jnp.zeros((3, 3, 37)), None)
    full = jnp.full(3, 3, jnp.int32)
    result = AcceptResult(jnp.asarray([2, 2, 0], jnp.int32), full, jnp.asarray([False, False, True]), jnp.zeros(3, bool))
    after = commit(state, proposal, full, result)
    np.testing.assert_array_equal(after.status, [STOP, ERROR, RUNNING])
    np.testing.assert_array_equal(after.length, [4, 5, 4])
    np.testing.assert_array_equal(after.tokens[:, :6], [[1, 2, 7, 5, 0, 0], [1, 2, 7, 8, 9, 0], [1, 2, 7, 3, 0, 0]])
    np.testing.assert_array_equal(after.log.committed[:, 0], [1, 2, 1])
    assert LENGTH not in np.asarray(after.status)


def test_ids_beyond_the_tokenizer_have_no_text():
    """A padded vocabulary: sampling a padding id must not lose the answers of the whole batch."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    from dspark_jax.text import Tokenizer

    backend = Backend(WordLevel({str(i): i for i in range(20)}, unk_token="0"))
    pair = dataclasses.replace(toy_pair(), tokenizer=Tokenizer(backend, source="toy"))
    params = SamplingParams(temperature=2.0, seed=3)
    (out,) = generate(pair, [[1, 2]], params, max_new_tokens=30)
    assert max(out.token_ids) >= 20 and out.text is not None
    assert out.text.split() == [str(i) for i in out.token_ids if i < 20]
    assert "".join(d.text for d in stream(pair, [[1, 2]], params, max_new_tokens=30)) == out.text
