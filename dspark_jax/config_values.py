"""Values of a ``config.json`` dictionary, checked one by one: types, ranges, contradictions, and settings that are not ours.

``source`` names the file in errors; every error says the key, the value and what is legal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.errors import ConfigError

MAX_WINDOW_LAYERS = 28  # what transformers' Qwen3Config assumes, and writes into every config.json
_MISSING = object()


def whole_number(value: Any) -> int | None:
    """``value`` as a Python integer, whatever integer type it has; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def get(cfg: Mapping[str, Any], key: str, source: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
    value = cfg.get(key, _MISSING)
    if value is _MISSING or (value is None and default is not _MISSING):
        if default is _MISSING:
            raise ConfigError(f"{source}: key {key!r} is missing")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds:
        raise ConfigError(f"{source}: {key}={value!r} is not a number")
    if int in kinds and (whole := whole_number(value)) is not None:
        return whole
    if not isinstance(value, kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ConfigError(f"{source}: {key}={value!r} must be {names}")
    return value


def positive(cfg: Mapping[str, Any], key: str, source: str, default: Any = _MISSING) -> int:
    value = get(cfg, key, source, int, default)
    if value < 1:
        raise ConfigError(f"{source}: {key}={value} must be at least 1")
    return int(value)


def windows(cfg: Mapping[str, Any], source: str, num_layers: int) -> tuple[int, ...]:
    """Per-layer window widths. ``layer_types`` decides where it is given, as in transformers; otherwise
    ``use_sliding_window`` switches windows on for the layers from ``max_window_layers`` on. What contradicts is refused."""
    on = get(cfg, "use_sliding_window", source, bool, None)
    width = get(cfg, "sliding_window", source, int, 0)
    first = get(cfg, "max_window_layers", source, int, MAX_WINDOW_LAYERS)
    for key, value in (("sliding_window", width), ("max_window_layers", first)):
        if value < 0:
            raise ConfigError(f"{source}: {key}={value} must be at least 0")
    if on and width < 1:
        raise ConfigError(f"{source}: use_sliding_window=true needs sliding_window >= 1, got {cfg.get('sliding_window')!r}")
    split = ["sliding_attention" if on and i >= first else "full_attention" for i in range(num_layers)]
    types = get(cfg, "layer_types", source, (list, tuple), None)
    if types is None:
        return tuple(width if kind == "sliding_attention" else 0 for kind in split)
    if len(types) != num_layers:
        raise ConfigError(f"{source}: layer_types has {len(types)} entries, the model has {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{source}: layer type {kind!r} is unknown; legal: full_attention, sliding_attention")
        if kind == "sliding_attention" and width < 1:
            raise ConfigError(f"{source}: a sliding layer needs sliding_window >= 1, got {cfg.get('sliding_window')!r}")
    slides = "sliding_attention" in types
    if on is False and slides:
        raise ConfigError(
            f"{source}: use_sliding_window=false contradicts layer_types={list(types)!r}; use_sliding_window must be true"
        )
    # A split at or beyond the last layer, and transformers' own default, stand in files whose layer_types say otherwise.
    stated = first < num_layers and first != MAX_WINDOW_LAYERS
    if on and list(types) != split and (stated or not slides):
        raise ConfigError(
            f"{source}: layer_types={list(types)!r} contradicts use_sliding_window=true with max_window_layers={first}, by"
            " which the layers from that one on slide"
        )
    return tuple(width if kind == "sliding_attention" else 0 for kind in types)


def _off(value: Any) -> bool:
    return value in (None, False, 0)


def _one(value: Any) -> bool:
    return value is None or value == 1


# Settings of related families that change what a model computes and leave no trace in its tensors; nothing here reads
# them, so only the value that changes nothing is legal. The words say which one that is.
_FOREIGN: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "attn_temperature_tuning",
            "attention_chunk_size",
            "attention_sink_bias",
            "clip_qkv",
            "no_rope_layer_interval",
            "num_experts",
            "num_kv_shared_layers",
            "num_local_experts",
            "parallel_attn",
            "rope_interleave",
            "rope_interleaved",
            "use_parallel_residual",
            "use_swa",
        ),
        (_off, "null, false or 0"),
    ),
    **dict.fromkeys(
        (
            "attention_in_multiplier",
            "attention_out_multiplier",
            "attention_value_scale",
            "embedding_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "logit_scale",
            "logits_scaling",
            "output_multiplier",
            "residual_multiplier",
            "rotary_pct",
            "scale_emb",
        ),
        (_one, "null or 1"),
    ),
    "no_rope_layers": (lambda value: value is None or all(value), "null or all 1"),
    "mlp_multipliers": (lambda value: value is None or all(x == 1 for x in value), "null or all 1"),
}


def refuse_foreign(cfg: Mapping[str, Any], source: str, fields: Mapping[str, Any]) -> None:
    """Refuse settings of other families that change the function; ``fields`` are the decoder's own sizes."""
    sizes = {
        "attention_multiplier": fields["head_dim"] ** -0.5,
        "query_pre_attn_scalar": fields["head_dim"],
        "v_head_dim": fields["head_dim"],
        "dim_model_base": fields["hidden_size"],
        "scale_depth": fields["num_layers"] ** 0.5,
    }
    for key, value in cfg.items():
        if key in _FOREIGN:
            neutral, words = _FOREIGN[key]
            try:
                legal = neutral(value)
            except TypeError:  # a list where a number belongs, or the other way round
                legal = False
        elif key in sizes:
            words = f"null or {sizes[key]:.9g}"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            legal = value is None or (number and math.isclose(value, sizes[key], rel_tol=1e-6))
        else:
            continue
        if not legal:
            raise ConfigError(f"{source}: {key}={value!r} is not supported; only {words} is")


def check_architectures(cfg: Mapping[str, Any], source: str, legal: str) -> None:
    """Refuse ``architectures`` that does not name the class which ``model_type`` stands for."""
    names = get(cfg, "architectures", source, (list, tuple), None)
    if names and legal not in names:
        raise ConfigError(
            f"{source}: architectures={list(names)!r} does not match model_type={cfg.get('model_type')!r}; legal: [{legal!r}]"
        )


def token_ids(value: Any, key: str, source: str, vocab: int) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    whole = tuple(i for i in map(whole_number, ids) if i is not None and 0 <= i < vocab)
    if len(whole) != len(ids):
        raise ConfigError(f"{source}: {key}={value!r} must hold token ids in [0, {vocab})")
    return whole
