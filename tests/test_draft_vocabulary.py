"""A reduced draft vocabulary: its ids, its checkpoint form, and an output law that it does not touch (PITFALLS A10, A11)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toys import draft_config, target_config, toy_pair

from dspark_jax import FixedLength, SamplingParams, generate
from dspark_jax.checkpoint import deepspec
from dspark_jax.checkpoint.orbax import load_own, save_own
from dspark_jax.checkpoint.tensors import ids_from_offsets
from dspark_jax.decode import propose
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.pair import Pair
from dspark_jax.sampling import SamplingState
from dspark_jax.schedule import Autoregressive
from dspark_jax.state import new_state

KEPT = (2, 5, 9, 11, 17, 30)


def reduced_pair(**changes) -> Pair:
    target = target_config()
    draft = draft_config(target, draft_vocab_size=len(KEPT), **changes)
    pair = toy_pair(target, draft)
    ids = jnp.asarray(KEPT, jnp.int32)
    return dataclasses.replace(pair, params={"target": pair.params["target"], "draft": _draft_of(pair) | {"vocabulary": ids}})


def _draft_of(pair: Pair) -> dict:
    """The draft's own parameters, without the head that a pair adds."""
    return {k: v for k, v in pair.params["draft"].items() if k != "head"}


def test_offsets_are_those_of_d2t() -> None:
    np.testing.assert_array_equal(ids_from_offsets(np.asarray([2, 4, 7]), "here"), [2, 5, 9])
    np.testing.assert_array_equal(ids_from_offsets(np.zeros(3, np.int64), "here"), [0, 1, 2])
    for bad in ([0, -1, 0], [-1, 0, 0], [3, 1, 0]):
        with pytest.raises(CheckpointError, match="rising"):
            ids_from_offsets(np.asarray(bad), "here")


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_shapes_w1_over_the_target_w2_over_the_draft(head: str) -> None:
    pair = reduced_pair(markov_head_type=head)
    markov = pair.params["draft"]["markov"]
    assert markov["w1"].shape[0] == 37 and markov["w2"].shape[0] == len(KEPT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_lie_in_the_kept_ids_and_q_is_zero_outside(temperature: float) -> None:
    pair = reduced_pair()
    sampling = SamplingState.from_params([SamplingParams(temperature, seed=s) for s in range(3)])
    state = new_state(pair.model, [[1, 2, 3]] * 3, sampling, [20] * 3, (), 64, jnp.float32)
    state = state.replace(length=jnp.full(3, 4, jnp.int32))
    out = propose(pair.model, pair.params, state, 4, jnp.asarray(temperature == 0))
    assert set(np.asarray(out.tokens).ravel().tolist()) <= set(KEPT)
    if temperature:
        mass = np.exp(np.asarray(out.log_q))
        np.testing.assert_allclose(mass[..., list(KEPT)].sum(-1), 1, atol=1e-5)
        assert mass.sum() == pytest.approx(mass[..., list(KEPT)].sum())


def test_the_next_slot_reads_w1_at_the_target_s_id() -> None:
    """Draft index 1 is target id 5: W1's row 5, not row 1, biases the next slot."""
    pair = reduced_pair()
    state = new_state(pair.model, [[1, 2, 3]], SamplingState.from_params([SamplingParams()]), [20], (), 64, jnp.float32)
    state = state.replace(length=jnp.full(1, 4, jnp.int32))
    before = propose(pair.model, pair.params, state, 4, jnp.asarray(True))
    first = int(before.tokens[0, 0])
    for row, changes in ((first, True), (KEPT.index(first), False)):
        params = jax.tree.map(lambda x: x, pair.params)
        params["draft"]["markov"]["w1"] = params["draft"]["markov"]["w1"].at[row].add(3.0)
        after = propose(pair.model, params, state, 4, jnp.asarray(True))
        assert int(after.tokens[0, 0]) == first
        assert bool(jnp.any(after.confidence[0, 1] != before.confidence[0, 1])) == changes


def test_greedy_output_is_the_target_s() -> None:
    pair = reduced_pair()
    prompts = [[1, 2, 3], [4] * 9, [7, 8]]
    plain = generate(pair, prompts, max_new_tokens=24, scheduler=Autoregressive())
    spec = generate(pair, prompts, max_new_tokens=24, scheduler=FixedLength())
    assert [o.token_ids for o in plain] == [o.token_ids for o in spec]
    assert sum(o.stats.drafts_accepted for o in spec) > 0


def test_every_pair_has_the_head_rows_of_its_ids() -> None:
    """However a pair is made (loaded, with a second draft, by the doctor), its drafter finds its head."""
    pair = reduced_pair()
    np.testing.assert_array_equal(pair.params["draft"]["head"], pair.params["target"]["head"][jnp.asarray(KEPT)])
    other = jnp.asarray([0, 1, 2, 3, 4, 36], jnp.int32)
    again = dataclasses.replace(
        pair, params={"target": pair.params["target"], "draft": _draft_of(pair) | {"vocabulary": other}}
    )
    np.testing.assert_array_equal(again.params["draft"]["head"], pair.params["target"]["head"][other])


def test_both_forms_keep_the_ids(tmp_path) -> None:
    pair = reduced_pair()
    params = _draft_of(pair)
    deepspec.save_draft(tmp_path / "a", pair.model.draft, params, dtype="bfloat16")
    config, back = deepspec.load_draft(tmp_path / "a", "float32", pair.model.target, pair.params["target"])
    assert config == pair.model.draft
    np.testing.assert_array_equal(back["vocabulary"], KEPT)
    assert back["vocabulary"].dtype == jnp.int32 and back["fc"].dtype == jnp.float32
    save_own(tmp_path / "b", config, back)
    config2, again = load_own(tmp_path / "b", "bfloat16")
    assert config2 == config and again["fc"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(again["vocabulary"], KEPT)


def test_a_missing_or_wrong_table_is_refused(tmp_path) -> None:
    pair = reduced_pair()
    params = _draft_of(pair)
    deepspec.save_draft(tmp_path / "a", pair.model.draft, params)
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["d2t"], np.asarray(KEPT) - np.arange(len(KEPT)))
    for name, change, message in (
        ("missing", lambda t: t.pop("d2t"), "d2t of shape"),
        ("beyond", lambda t: t.update(d2t=t["d2t"] + 30), "in \\[0, 37\\)"),
        ("floats", lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "I32, I64"),
        ("short", lambda t: t.update(d2t=t["d2t"][:-1]), "expected \\[6\\]"),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=message):
            deepspec.load_draft(tmp_path / "a", "float32", pair.model.target, pair.params["target"])
        assert name


def test_a_vocabulary_larger_than_the_target_s_is_refused() -> None:
    from dspark_jax.config import draft_config_from_hf, draft_config_to_hf

    good = draft_config_to_hf(draft_config(target_config(), draft_vocab_size=8))
    assert draft_config_from_hf(good).draft_vocab_size == 8
    for value in (0, 38, True, 2.5):
        with pytest.raises(ConfigError, match="draft_vocab_size"):
            draft_config_from_hf(good | {"draft_vocab_size": value})
