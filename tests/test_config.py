"""Configurations: every form that is read, and every contradiction that is refused by file, key and value."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import (
    RopeConfig,
    draft_config_from_hf,
    draft_config_to_hf,
    rope_from_hf,
    target_config_from_hf,
    target_config_to_hf,
)
from dspark_jax.errors import ConfigError
from dspark_jax.layers import apply_rope, rope_angles, rope_frequencies
from dspark_jax.params import draft_specs


@pytest.fixture
def target(fixtures_dir):
    return json.loads((fixtures_dir / "qwen3_tiny" / "target" / "config.json").read_text())


@pytest.fixture
def draft(fixtures_dir):
    return json.loads((fixtures_dir / "qwen3_tiny" / "dspark_gated" / "draft" / "config.json").read_text())


@pytest.mark.parametrize(
    "keys, theta",
    [
        (dict(rope_theta=5e5), 5e5),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1e6),
        (dict(rope_scaling=dict(rope_type="default", rope_theta=2e5)), 2e5),
        (dict(rope_theta=1e4, rope_parameters=dict(rope_theta=1e6)), 1e6),
        (dict(rope_theta=3e4, rope_parameters=dict(rope_type="default")), 3e4),
        ({}, 1e4),
        (dict(rope_theta=7e4, rope_scaling=None), 7e4),
    ],
)
def test_rope_theta_is_found_in_every_form(keys, theta):
    """X01: a bare look-up would silently give 10000."""
    assert rope_from_hf(keys, "c", 512) == RopeConfig(theta=theta)


# First, some middle and last inverse frequencies of Hugging Face transformers 5.24, head width 64.
AT = [0, 1, 5, 10, 12, 14, 16, 18, 20, 24, 31]
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(
    "keys, scale, expected",
    [
        (
            LLAMA3,
            1.0,
            "1.0 0.66360128 0.12868738 0.016560441 0.0072926651 0.0032114461 0.00052484602 7.7846555e-05 3.4281024e-05"
            " 6.6478697e-06 3.7673226e-07",
        ),
        (
            YARN,
            1.138629436111989,
            "1.0 0.64938164 0.1154782 0.013335215 0.0051547955 0.0017785303 0.00058333337 0.00017570687 4.4456985e-05"
            " 7.9056936e-06 3.8498163e-07",
        ),
        (
            dict(rope_type="linear", rope_theta=1e4, factor=2.0),
            1.0,
            "0.5 0.3749471 0.11856868 0.028117064 0.015811389 0.0088913972 0.0049999999 0.0028117066 0.0015811389"
            " 0.00050000002 6.6676075e-05",
        ),
    ],
)
def test_scaled_rope_frequencies(keys, scale, expected):
    inv, factor = rope_frequencies(rope_from_hf(dict(rope_parameters=keys), "c", 131072), 64)
    np.testing.assert_allclose(inv[AT], [float(x) for x in expected.split()], rtol=2e-6)
    assert factor == pytest.approx(scale)


def test_position_zero_is_unrotated_and_halves_are_pairs():
    """K21: the first token has position 0; a rotation keeps the length of every (i, i + H/2) pair."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)), jnp.float32)
    y = apply_rope(x, rope_angles(RopeConfig(), 8, jnp.asarray([0, 5], jnp.int32)))
    np.testing.assert_array_equal(y[0], x[0])
    np.testing.assert_allclose(x[1, :, :4] ** 2 + x[1, :, 4:] ** 2, y[1, :, :4] ** 2 + y[1, :, 4:] ** 2, rtol=1e-5)
    assert np.abs(y[1] - x[1]).max() > 0.1


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(model_type="gemma2"), ["model_type='gemma2'", "llama, qwen3"]),
        (dict(hidden_size=None), ["hidden_size"]),
        (dict(hidden_size="64"), ["hidden_size='64'", "int"]),
        (dict(vocab_size=0), ["vocab_size=0"]),
        (dict(num_key_value_heads=3), ["num_attention_heads=4", "num_key_value_heads=3"]),
        (dict(head_dim=15), ["head_dim=15"]),
        (dict(attention_bias=True), ["attention_bias=True"]),
        (dict(hidden_act="gelu"), ["hidden_act='gelu'"]),
        (dict(quantization_config={"bits": 4}), ["quantization_config"]),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), ["'dynamic'", "yarn"]),
        (dict(rope_parameters=dict(rope_type="llama3", factor=2.0)), ["low_freq_factor"]),
        (dict(rope_parameters=dict(rope_type="linear", factor=0.5)), ["factor=0.5"]),
        (dict(rope_parameters=dict(rope_theta=-1.0)), ["rope_theta=-1.0"]),
        (dict(rope_parameters=dict(rope_theta=float("inf"))), ["rope_theta=inf"]),
        (dict(rope_parameters=dict(rope_type="linear", factor=float("nan"))), ["factor=nan"]),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), ["rope_type='default'", "'linear'"]),
        (dict(rope_parameters=dict(rope_type="default", type="yarn")), ["'yarn'", "'default'"]),
        (dict(rope_parameters=dict(full_attention={"rope_theta": 1e4})), ["per layer type"]),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]),
        (dict(layer_types=["full_attention"]), ["layer_types", "4 layers"]),
        (dict(layer_types=["full_attention"] * 3 + ["linear"]), ["'linear'"]),
        (dict(layer_types=["full_attention"] * 3 + ["sliding_attention"]), ["sliding_window"]),
        (dict(eos_token_id=[0, 320]), ["eos_token_id", "320"]),
        (dict(rms_norm_eps=0.0), ["rms_norm_eps=0.0"]),
    ],
)
def test_illegal_targets_are_refused(target, change, words):
    with pytest.raises(ConfigError) as caught:
        target_config_from_hf(target | change, "dir/config.json")
    assert all(w in str(caught.value) for w in ["dir/config.json", *words])


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(mask_token_id=320), ["mask_token_id=320", "320"]),
        (dict(mask_token_id=-1), ["mask_token_id=-1"]),
        (dict(mask_token_id=None), ["mask_token_id"]),
        (dict(target_layer_ids=[0, 1, 3]), ["target_layer_ids=[0, 1, 3]", "last"]),
        (dict(target_layer_ids=[-2, 1]), ["-2"]),
        (dict(target_layer_ids=[1, 0]), ["rise strictly"]),
        (dict(target_layer_ids=[]), ["target_layer_ids=[]"]),
        (dict(block_size=0), ["block_size=0"]),
        (dict(markov_rank=-1), ["markov_rank=-1"]),
        (dict(markov_head_type="lstm"), ["'lstm'", "vanilla"]),
        (dict(markov_rank=0), ["confidence_head_with_markov", "markov_rank"]),
        (dict(dspark_config=dict(block_size=8)), ["block_size=7", "dspark_config"]),
    ],
)
def test_illegal_drafts_are_refused(draft, change, words):
    """A06, A08, A15, X13."""
    with pytest.raises(ConfigError) as caught:
        draft_config_from_hf(draft | change, "draft/config.json")
    assert all(w in str(caught.value) for w in ["draft/config.json", *words])


def test_draft_keys_may_stand_in_a_section(draft):
    """X13."""
    keys = ("block_size", "mask_token_id", "target_layer_ids")
    moved = {k: v for k, v in draft.items() if k not in keys} | {"dspark_config": {k: draft[k] for k in keys}}
    assert draft_config_from_hf(moved) == draft_config_from_hf(draft)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("with_markov", [False, True])
def test_every_combination_of_heads_builds_or_is_refused(draft, rank, confidence, with_markov):
    """A15."""
    keys = dict(markov_rank=rank, enable_confidence_head=confidence, confidence_head_with_markov=with_markov)
    if rank == 0 and confidence and with_markov:
        with pytest.raises(ConfigError):
            draft_config_from_hf(draft | keys)
        return
    specs = draft_specs(draft_config_from_hf(draft | keys))
    assert ("markov" in specs) == (rank > 0) and ("confidence" in specs) == confidence
    if confidence:
        assert specs["confidence"]["proj"].shape == (1, 64 + (rank if with_markov else 0))


def test_explicit_head_dim_wins(target):
    """X11: 80 = 5120 / 64 would be wrong for Qwen3-32B, whose head_dim is 128."""
    cfg = target_config_from_hf(target | dict(hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128))
    assert cfg.head_dim == 128


def test_configurations_survive_the_round_trip(target, draft):
    sliding = dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=16)
    for change in ({}, sliding, dict(rope_parameters=LLAMA3), dict(rope_parameters=YARN), dict(eos_token_id=[1, 2])):
        cfg = target_config_from_hf(target | change)
        assert target_config_from_hf(json.loads(json.dumps(target_config_to_hf(cfg)))) == cfg
    cfg = draft_config_from_hf(draft)
    assert draft_config_from_hf(json.loads(json.dumps(draft_config_to_hf(cfg)))) == cfg
