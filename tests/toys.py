"""Small random pairs for tests: every dimension of the draft that may differ from the target's does."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.pair import Pair
from dspark_jax.params import draft_specs, init_params, target_specs
from dspark_jax.state import ModelConfig


def target_config(**changes) -> TargetConfig:
    base = TargetConfig(
        architecture="qwen3",
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        max_positions=512,
        tie_embeddings=False,
        windows=(0, 0, 0),
        eos_token_ids=(),
    )
    return dataclasses.replace(base, **changes)


def draft_config(target: TargetConfig, **changes) -> DraftConfig:
    base = DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=56,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=10,
        rms_norm_eps=1e-6,
        rope=RopeConfig(5000.0),
        max_positions=512,
        windows=(0, 0),
        block_size=4,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(-1, 0, target.num_layers - 2),
        num_target_layers=target.num_layers,
        markov_rank=6,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_with_markov=True,
    )
    return dataclasses.replace(base, **changes)


def toy_pair(target: TargetConfig | None = None, draft: DraftConfig | None = None, seed: int = 0, scale: float = 0.25) -> Pair:
    """A pair with random weights, large enough that distributions are far from uniform."""
    target = target or target_config()
    draft = draft or draft_config(target)
    keys = jax.random.split(jax.random.key(seed))
    params = {
        "target": init_params(target_specs(target), keys[0], jnp.float32, scale),
        "draft": init_params(draft_specs(draft), keys[1], jnp.float32, scale),
    }
    return Pair(ModelConfig(target, draft), params, jnp.float32, None, "toy", "toy")
