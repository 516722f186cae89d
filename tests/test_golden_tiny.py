"""The reference implementation's numbers on the tiny Qwen3 pair: logits, confidences and every greedy trace."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax import draft, heads, target
from dspark_jax.cache import empty_cache, pack, write
from dspark_jax.generate import generate
from dspark_jax.pair import load_pair
from dspark_jax.schedule import Autoregressive, FixedLength, Threshold

DRAFTS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash")


@pytest.fixture(scope="module", params=DRAFTS)
def tiny(request, fixtures_dir):
    root = fixtures_dir / "qwen3_tiny"
    pair = load_pair(root / "target", root / request.param / "draft")
    return pair, root / request.param


def test_target_taps_and_final_hidden_match_the_reference(tiny):
    """Catches a wrong norm, rope phase, tap offset, or taps read after a norm (A06, A07, K21)."""
    pair, root = tiny
    golden = load_file(root / "train_forward.safetensors")
    rows, width = golden["input_ids"].shape
    cfg = pair.model.target
    cache = empty_cache(cfg.num_layers, rows, cfg.num_kv_heads, width, cfg.head_dim, jnp.float32)
    counts, context = jnp.full(rows, width, jnp.int32), jnp.zeros(rows, jnp.int32)
    batch = pack(jnp.asarray(golden["input_ids"]), counts, context, rows * width)
    out = target.forward(pair.params["target"], cfg, batch, cache, pair.model.draft.target_layer_ids)
    np.testing.assert_allclose(out.taps.reshape(rows, width, -1), golden["target_hidden_states"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(out.hidden.reshape(rows, width, -1), golden["target_last_hidden_states"], atol=1e-4, rtol=0)


def test_draft_and_confidence_logits_match_the_reference(tiny):
    """The serving path, fed the training forward's tokens, gives the training forward's logits (A03, T19): a shifted
    Markov input, a wrong mask or features at the anchor would move them."""
    pair, root = tiny
    golden = load_file(root / "train_forward.safetensors")
    cfg, params = pair.model.draft, pair.params["draft"]
    rows, anchors = golden["anchor_positions"].shape
    ids, length = jnp.asarray(golden["input_ids"]), golden["input_ids"].shape[1]
    taps = jnp.asarray(golden["target_hidden_states"])
    positions = jnp.arange(length, dtype=jnp.int32)
    checked = 0
    for row in range(rows):
        k, v = draft.context_keys_values(params, cfg, taps[row], positions)
        cache = empty_cache(cfg.num_layers, 1, cfg.num_kv_heads, length, cfg.head_dim, jnp.float32)
        cache = write(cache, k, v, jnp.zeros(length, jnp.int32), positions, jnp.ones(length, bool))
        for i in range(anchors):
            if not golden["block_keep_mask"][row, i]:
                continue
            at = int(golden["anchor_positions"][row, i])
            context = jnp.asarray([at], jnp.int32)
            hidden = draft.block_hidden(params, cfg, pair.params["target"]["embed"], ids[row, at][None], context, cache)
            labels = jnp.asarray(golden["target_ids"][row, i])

            def teacher(slot, logits, labels=labels):
                return labels[slot][None], logits

            base = target.unembed(pair.params["target"], hidden)
            proposal = heads.propose(params, cfg, hidden, base, ids[row, at][None], teacher)
            inside = np.arange(cfg.block_size) + at + 1 < length
            np.testing.assert_allclose(proposal.log_q[0][inside], golden["draft_logits"][row, i][inside], atol=1e-4, rtol=0)
            if cfg.confidence_head:
                np.testing.assert_allclose(
                    proposal.confidence[0][inside], golden["confidence_logits"][row, i][inside], atol=1e-4, rtol=0
                )
            checked += int(inside.sum())
    assert checked > 50


def test_greedy_traces_match_the_reference(tiny):
    """Tokens of every prompt and threshold; counts of every round that lies a whole block before the token limit."""
    pair, root = tiny
    entries = json.loads((root / "greedy_traces.json").read_text())
    assert len(entries) >= 5
    for entry in entries:
        prompt = list(entry["prompt"].encode())
        start = entry["num_input_tokens"]
        assert len(prompt) == start
        expected = entry["output_ids"][start:]
        stops = entry.get("stop_token_ids", [])
        threshold = entry["confidence_threshold"]
        limit = 64
        policy = Threshold(threshold) if pair.model.draft.confidence_head else FixedLength()
        (out,) = generate(pair, [prompt], scheduler=policy, max_new_tokens=limit, stop_token_ids=stops)
        assert out.token_ids == expected, (entry["prompt"], threshold)
        assert out.finish_reason == ("stop" if stops else "length")
        whole = [r["start"] - start + 1 + pair.model.draft.block_size < limit for r in entry["rounds"]]
        assert sum(whole) >= 2
        for i, round_ in enumerate(entry["rounds"]):
            if whole[i]:
                assert out.verified_per_round[i] == round_["verified"], (entry["prompt"], threshold, i)
                assert out.accepted_per_round[i] == entry["acceptance_lengths"][i], (entry["prompt"], threshold, i)
        if "ar_output_ids" in entry:
            (plain,) = generate(pair, [prompt], scheduler=Autoregressive(), max_new_tokens=limit, stop_token_ids=stops)
            assert plain.token_ids == entry["ar_output_ids"][start:]
