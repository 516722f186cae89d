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

# Windows of a model of four layers.
FULL = ["full_attention"] * 4
TAIL = [*FULL[:3], "sliding_attention"]
ON = dict(use_sliding_window=True, sliding_window=8, layer_types=None)


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
        (dict(layer_types=TAIL, sliding_window=8), ["use_sliding_window=false", "layer_types"]),
        (dict(ON, layer_types=TAIL, max_window_layers=2), ["layer_types", "max_window_layers=2"]),
        (dict(ON, layer_types=FULL, max_window_layers=3), ["layer_types", "max_window_layers=3"]),
        (dict(ON, sliding_window=None), ["use_sliding_window=true", "sliding_window", "None"]),
        (dict(ON, max_window_layers=-1), ["max_window_layers=-1"]),
        (dict(sliding_window=-4), ["sliding_window=-4"]),
        (dict(use_sliding_window="no"), ["use_sliding_window='no'", "bool"]),
        (dict(model_type=["qwen3"]), ["model_type=['qwen3']", "llama, qwen3"]),
        (dict(model_type={}), ["model_type={}"]),
        (dict(architectures=["LlamaForCausalLM"]), ["['LlamaForCausalLM']", "model_type='qwen3'", "Qwen3ForCausalLM"]),
        (dict(model_type="llama"), ["['Qwen3ForCausalLM']", "model_type='llama'"]),
        (dict(architectures="Qwen3ForCausalLM"), ["architectures='Qwen3ForCausalLM'", "list"]),
        (dict(is_causal=False), ["is_causal=False"]),
        (dict(rope_parameters=YARN | dict(beta_fast=1.0, beta_slow=32.0)), ["beta_fast=1.0", "beta_slow=32.0"]),
        (dict(rope_parameters=YARN | dict(beta_fast=2, beta_slow=2)), ["beta_fast=2.0", "beta_slow=2.0"]),
        (dict(rope_parameters=YARN | dict(beta_slow=0)), ["beta_slow=0.0"]),
        (dict(rope_parameters=YARN | dict(beta_slow=float("nan"))), ["beta_slow=nan"]),
        (dict(rope_parameters=YARN | dict(beta_fast=float("inf"))), ["beta_fast=inf"]),
        (dict(rope_parameters=YARN | dict(attention_factor=0.0)), ["attention_factor=0.0"]),
        (dict(rope_parameters=YARN | dict(rope_theta=1.0)), ["rope_theta=1.0"]),
        (dict(rope_parameters=YARN | dict(original_max_position_embeddings=4)), ["ramp", "[0, 0]", "=4"]),
        (dict(rope_parameters=YARN | dict(rope_theta=2.0)), ["ramp", "rope_theta=2.0"]),
        (dict(rope_parameters=YARN, original_max_position_embeddings=512), ["=512", "32768"]),
        (dict(rope_parameters=LLAMA3 | dict(low_freq_factor=0.0)), ["low_freq_factor=0.0"]),
        (dict(rope_parameters=LLAMA3 | dict(high_freq_factor=float("inf"))), ["high_freq_factor=inf"]),
        (dict(rope_parameters=None, rope_scaling=dict(factor=4.0)), ["factor=4.0", "'default'"]),
        (dict(final_logit_softcapping=30.0), ["final_logit_softcapping=30.0", "null"]),
        (dict(attn_logit_softcapping=50.0), ["attn_logit_softcapping=50.0"]),
        (dict(embedding_multiplier=12.0), ["embedding_multiplier=12.0", "null or 1"]),
        (dict(residual_multiplier=0.22), ["residual_multiplier=0.22"]),
        (dict(logits_scaling=8.0), ["logits_scaling=8.0"]),
        (dict(attention_multiplier=1.0), ["attention_multiplier=1.0", "0.25"]),
        (dict(scale_emb=12), ["scale_emb=12"]),
        (dict(scale_depth=1.4), ["scale_depth=1.4"]),
        (dict(no_rope_layers=[1, 1, 1, 0]), ["no_rope_layers=[1, 1, 1, 0]"]),
        (dict(mlp_multipliers=2), ["mlp_multipliers=2"]),
        (dict(num_experts=8), ["num_experts=8"]),
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
        (dict(model_type="llama"), ["model_type='llama'", "qwen3"]),
        (dict(model_type=["qwen3"]), ["model_type=['qwen3']"]),
        (dict(architectures=["Qwen3ForCausalLM"]), ["['Qwen3ForCausalLM']", "Qwen3DSparkModel"]),
        (dict(dflash_config=dict(output_multiplier=0.2)), ["output_multiplier=0.2"]),
        (dict(logit_scale=None, dflash_config=dict(logit_scale=0.5)), ["logit_scale=0.5"]),
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


@pytest.mark.parametrize(
    "change, windows",
    [
        (dict(sliding_window=4096), (0, 0, 0, 0)),  # switched off; the width stands there all the same
        (dict(sliding_window=4096, layer_types=None), (0, 0, 0, 0)),
        (dict(ON, max_window_layers=2), (0, 0, 8, 8)),
        (dict(ON, max_window_layers=0), (8, 8, 8, 8)),
        (dict(ON, max_window_layers=4), (0, 0, 0, 0)),
        (dict(ON, max_window_layers=None), (0, 0, 0, 0)),  # transformers: from layer 28 on
        (dict(ON, max_window_layers=28, layer_types=FULL), (0, 0, 0, 0)),
        (dict(ON, max_window_layers=3, layer_types=TAIL), (0, 0, 0, 8)),
        (dict(ON, max_window_layers=28, layer_types=TAIL), (0, 0, 0, 8)),  # transformers' default beside layer_types
        (dict(ON, max_window_layers=4, layer_types=["sliding_attention"] * 4), (8, 8, 8, 8)),  # as in published drafts
        (dict(use_sliding_window=None, sliding_window=8, layer_types=TAIL), (0, 0, 0, 8)),
    ],
)
def test_windows(target, change, windows):
    """As transformers 5.24 resolves them: layer_types first, then the switch and the split."""
    assert target_config_from_hf(target | change).windows == windows


def test_the_default_split_is_layer_28(target):
    cfg = {k: v for k, v in (target | ON | dict(num_hidden_layers=30)).items() if k != "max_window_layers"}
    assert target_config_from_hf(cfg).windows == (0,) * 28 + (8, 8)


def test_neutral_settings_of_other_families_are_accepted(target, draft):
    neutral = dict(
        final_logit_softcapping=None,
        attn_logit_softcapping=0.0,
        embedding_multiplier=1.0,
        residual_multiplier=1,
        logits_scaling=None,
        attention_multiplier=0.25,
        query_pre_attn_scalar=16,
        num_experts=0,
        no_rope_layers=[1, 1, 1, 1],
        architectures=None,
        is_causal=True,
    )
    assert target_config_from_hf(target | neutral) == target_config_from_hf(target)
    assert draft_config_from_hf(draft | neutral | dict(is_causal=False)) == draft_config_from_hf(draft)


def test_integers_of_numpy_are_integers(target, draft):
    numbers = dict(hidden_size=np.int32(64), vocab_size=np.int64(320), rope_parameters=dict(rope_theta=np.int64(10000)))
    cfg = target_config_from_hf(target | numbers | dict(eos_token_id=[np.int16(3)]))
    assert cfg == target_config_from_hf(target | dict(eos_token_id=3))
    assert all(type(x) is int for x in (cfg.hidden_size, cfg.vocab_size, *cfg.eos_token_ids))
    got = draft_config_from_hf(draft | dict(block_size=np.int8(7), target_layer_ids=[np.int64(i) for i in (0, 1, 2)]))
    assert got == draft_config_from_hf(draft)
    assert json.dumps(draft_config_to_hf(got)) == json.dumps(draft_config_to_hf(draft_config_from_hf(draft)))
    for wrong in (np.True_, np.float32(64), True):
        with pytest.raises(ConfigError, match="hidden_size="):
            target_config_from_hf(target | dict(hidden_size=wrong))


def test_explicit_head_dim_wins(target):
    """X11: 80 = 5120 / 64 would be wrong for Qwen3-32B, whose head_dim is 128."""
    cfg = target_config_from_hf(target | dict(hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128))
    assert cfg.head_dim == 128


def test_configurations_survive_the_round_trip(target, draft):
    sliding = dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=16, use_sliding_window=True)
    for change in ({}, sliding, dict(rope_parameters=LLAMA3), dict(rope_parameters=YARN), dict(eos_token_id=[1, 2])):
        cfg = target_config_from_hf(target | change)
        assert target_config_from_hf(json.loads(json.dumps(target_config_to_hf(cfg)))) == cfg
    cfg = draft_config_from_hf(draft)
    assert draft_config_from_hf(json.loads(json.dumps(draft_config_to_hf(cfg)))) == cfg
