"""Where training starts: a draft's shape from its target, kept ids of a reduced vocabulary, and initial parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DraftConfig, TargetConfig, draft_config_from_hf, draft_config_to_hf
from dspark_jax.errors import ConfigError
from dspark_jax.params import Params, draft_specs, init_params
from dspark_jax.train.rows import Example


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layer ids from 1 to the last but two, evenly spread, as the released drafts have them."""
    last = max(1, num_layers - 3)
    return tuple(sorted({round(x) for x in np.linspace(min(1, last), last, count)}))


def new_draft_config(
    target: TargetConfig,
    *,
    layers: int = 2,
    block_size: int = 7,
    mask_token_id: int,
    taps: Sequence[int] | None = None,
    rank: int = 256,
    head: str = "vanilla",
    confidence: bool = True,
    confidence_with_markov: bool = True,
    draft_vocab_size: int | None = None,
    anchors: int = 512,
) -> DraftConfig:
    """A draft of ``target``'s width. ``taps`` default to five layers, spread evenly.

    Raises:
      ConfigError: an illegal value, by name.
    """
    config = DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_positions=target.max_positions,
        windows=(0,) * layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(taps) if taps is not None else spread_taps(target.num_layers, 5),
        num_target_layers=target.num_layers,
        markov_rank=rank,
        markov_head_type=head if rank else "vanilla",
        confidence_head=confidence,
        confidence_with_markov=confidence and confidence_with_markov and rank > 0,
        num_anchors=anchors,
        draft_vocab_size=draft_vocab_size,
    )
    if layers < 1 or layers > target.num_layers:
        raise ConfigError(f"layers={layers} must lie in [1, {target.num_layers}], the target's")
    return draft_config_from_hf(draft_config_to_hf(config), "the new draft")  # the reader owns the rules


def choose_vocabulary(examples: Iterable[Example], size: int, vocab: int, always: Iterable[int] = ()) -> np.ndarray:
    """The ``size`` ids that training text holds most often (supervised tokens count; the rest breaks ties), rising.

    Args:
      always: ids that are kept in any case (stop tokens).

    Raises:
      ConfigError: ``size`` does not lie in [1, vocab].
    """
    if not 1 <= size <= vocab:
        raise ConfigError(f"draft_vocab_size={size} must lie in [1, {vocab}]")
    counts = np.zeros(vocab)
    for example in examples:
        np.add.at(counts, example.tokens[example.mask], 1.0)
        np.add.at(counts, example.tokens[~example.mask], 0.01)
    counts[list(always)] = np.inf
    order = np.argsort(-counts, kind="stable")[:size]
    return np.sort(order).astype(np.int32)


def initial_params(config: DraftConfig, target: Params, target_config: TargetConfig, seed: int, fresh: bool = False) -> Params:
    """Initial parameters of everything that is trained.

    Layers start as the target's last ones, the context projection as its last tap plus a little of the others, and W1 as
    the leading directions of the target's embedding, so that tokens which training never shows have a place too. W2 and the
    confidence head start at zero. With ``fresh`` all matrices are random instead.
    """
    specs = draft_specs(config)
    specs.pop("vocabulary", None)
    params = init_params(specs, jax.random.key(seed), jnp.float32)
    if "markov" in params:
        params["markov"]["w2"] = jnp.zeros_like(params["markov"]["w2"])
    if "confidence" in params:
        params["confidence"]["proj"] = jnp.zeros_like(params["confidence"]["proj"])
    if fresh:
        return params
    copied = {k: v for k, v in target["layers"].items() if k in params["layers"]}
    for name, stack in copied.items():
        own = params["layers"][name]
        last = stack[-config.num_layers :].astype(jnp.float32)
        if last.shape == own.shape:
            params["layers"][name] = last
    width = target_config.hidden_size
    if config.hidden_size == width:
        eye = jnp.eye(width, dtype=jnp.float32)
        params["fc"] = (0.1 * params["fc"]).at[:, -width:].add(eye)
        params["context_norm"] = target["layers"]["attn_norm"][-1].astype(jnp.float32)
        params["norm"] = target["norm"].astype(jnp.float32)
    if "markov" in params and config.markov_rank <= width:
        params["markov"]["w1"] = leading_directions(target["embed"], config.markov_rank)
    return params


def leading_directions(embed: jax.Array, rank: int) -> jax.Array:
    """Float32 ``[V, rank]``: the centred embedding in its leading principal directions, each of variance 1."""
    x = embed.astype(jnp.float32)
    x = x - x.mean(0, keepdims=True)
    values, vectors = jnp.linalg.eigh(x.T @ x / x.shape[0])
    top = vectors[:, ::-1][:, :rank] / jnp.sqrt(values[::-1][:rank])[None]
    return x @ top


def split(count: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A partition of ``range(count)``, by ``seed``: indices to train on, and ``held_out`` for the curve of unseen text.

    Raises:
      ConfigError: nothing would be left to train on.
    """
    if not 0 <= held_out < count:
        raise ConfigError(f"held_out={held_out} must lie in [0, {count - 1}]: there are {count} conversations")
    order = np.random.default_rng((seed, 2)).permutation(count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
