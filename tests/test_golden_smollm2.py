"""SmolLM2-135M-Instruct, the real model: logits and greedy answers of Hugging Face transformers, rounds of the reference."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import target
from dspark_jax.cache import empty_cache, pack
from dspark_jax.decode import decode, prefill, propose
from dspark_jax.generate import generate
from dspark_jax.pair import load_pair
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive, FixedLength
from dspark_jax.state import new_state


@pytest.fixture(scope="module")
def golden(fixtures_dir):
    return json.loads((fixtures_dir / "smollm2" / "greedy.json").read_text())


@pytest.fixture(scope="module")
def alone(smollm2_dir):
    return load_pair(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir, shared_dir):
    path = shared_dir / "drafts" / "smollm2_ref"
    if not path.is_dir():
        pytest.skip("the reference-trained draft is not here")
    return load_pair(smollm2_dir, path)


def test_chat_template_ids(alone, golden):
    for entry in golden:
        assert alone.tokenizer.encode_chat(entry["prompt"]) == entry["input_ids"]


def test_top_logits(alone, golden):
    """Catches a wrong q/k permutation, rope base, norm epsilon or dequantisation."""
    cfg = alone.model.target
    for entry in golden:
        grid = jnp.asarray([entry["input_ids"]], jnp.int32)
        n = grid.shape[1]
        cache = empty_cache(cfg.num_layers, 1, cfg.num_kv_heads, 128, cfg.head_dim, jnp.float32)
        batch = pack(grid, jnp.asarray([n], jnp.int32), jnp.zeros(1, jnp.int32), n)
        out = target.forward(alone.params["target"], cfg, batch, cache)
        logits = np.asarray(target.unembed(alone.params["target"], out.hidden[-1:]))[0]
        order = np.argsort(-logits)[:5]
        assert order.tolist() == entry["top5_ids"]
        np.testing.assert_allclose(logits[order], entry["top5_logits"], atol=2e-3, rtol=0)


def test_greedy_answers_by_plain_decoding(alone, golden):
    for entry in golden:
        (out,) = generate(alone, [entry["input_ids"]], scheduler=Autoregressive(), max_new_tokens=len(entry["greedy_new_ids"]))
        assert out.token_ids == entry["greedy_new_ids"]
        assert out.text == entry["text"]


def test_greedy_answers_by_speculative_decoding_in_one_batch(reference, golden):
    longest = max(len(e["greedy_new_ids"]) for e in golden)
    outs = generate(reference, [e["input_ids"] for e in golden], scheduler=FixedLength(), max_new_tokens=longest)
    for out, entry in zip(outs, golden, strict=True):
        assert out.token_ids[: len(entry["greedy_new_ids"])] == entry["greedy_new_ids"]


def test_rounds_of_the_reference(reference, golden, shared_dir):
    """Anchors, drafted blocks, accepted counts and confidence logits of every round, at most 1 % of drafts differing."""
    traces = json.loads((shared_dir / "golden" / "smollm2" / "dspark_ref_traces.json").read_text())
    prompts = {e["prompt"]: e["input_ids"] for e in golden}
    drafted = differing = 0
    drafter = jax.jit(propose, static_argnums=(0, 3))
    for trace in traces:
        ids = prompts[trace["prompt"]]
        total = len(ids) + len(trace["new_ids"])
        sampling = SamplingState.from_params([SamplingParams()])
        state = new_state(reference.model, [ids], sampling, [total], [2], 256, jnp.float32)
        state = prefill(reference.model, reference.params, state, chunk=64)
        for i, round_ in enumerate(trace["rounds"]):
            at = int(state.length[0]) - 1
            assert at == round_["start"]
            assert int(state.tokens[0, at]) == round_["anchor"]
            proposal = drafter(reference.model, reference.params, state, 7, jnp.asarray(True))
            same = np.asarray(proposal.tokens[0]) == np.asarray(round_["draft"])
            drafted, differing = drafted + 7, differing + int((~same).sum())
            agreed = np.logical_and.accumulate(np.concatenate([[True], same[:-1]]))  # confidence sees the token before
            np.testing.assert_allclose(
                np.asarray(proposal.confidence[0])[agreed], np.asarray(round_["confidence_logits"])[agreed], atol=1e-2
            )
            before = int(state.length[0])
            state = decode(reference.model, reference.params, state, FixedLength(), np.int32(1))
            if before + 7 < total and same.all():
                assert int(state.log.accepted[0, i]) == round_["accepted"]
                assert int(state.length[0]) - before == trace["acceptance_lengths"][i]
        assert np.asarray(state.tokens[0, len(ids) : int(state.length[0])]).tolist() == trace["new_ids"]
    assert drafted > 500 and differing <= drafted // 100
