"""Model configurations: frozen, hashable, read from Hugging Face / DeepSpec ``config.json`` dictionaries.

``source`` is the name of the file a dictionary came from; every error names it together with the key, the value and
what is legal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dspark_jax.config_values import check_architectures, get, positive, refuse_foreign, token_ids, whole_number, windows
from dspark_jax.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DRAFT_MODEL_TYPE, DRAFT_ARCHITECTURE = "qwen3", "Qwen3DSparkModel"
HEAD_TYPES = ("vanilla", "gated", "rnn")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base ``theta`` and, beyond ``default``, the scaling of long contexts."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A dense decoder-only transformer of the Llama or Qwen3 family."""

    architecture: str  # "llama" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    windows: tuple[int, ...]  # one a layer; 0: full attention, else the width of the sliding window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A DSpark drafter (SPEC section 3). Its layers are of the Qwen3 form; ``markov_rank`` 0 means no sequential head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    windows: tuple[int, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str  # "vanilla" | "gated" | "rnn"; without meaning at rank 0
    confidence_head: bool
    confidence_with_markov: bool
    num_anchors: int = 512  # training only; kept so that a checkpoint survives the round trip
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary; else the number of ids that can be drafted

    @property
    def head_size(self) -> int:
        """Number of ids that the drafter's head and W2 range over."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def rope_from_hf(cfg: Mapping[str, Any], source: str, max_positions: int) -> RopeConfig:
    """Resolve rope settings in either form: flat ``rope_theta`` (+ ``rope_scaling``), or nested ``rope_parameters``.

    A nested theta wins over a flat one; without any the documented default of both families, 10000, is used.
    """
    nested: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = get(cfg, key, source, dict, {})
        if any(isinstance(v, dict) for v in value.values()):
            raise ConfigError(f"{source}: {key} holds one setting per layer type, which Llama and Qwen3 models do not use")
        for name, setting in value.items():
            name = "rope_type" if name == "type" else name
            if name in nested and nested[name] != setting:
                raise ConfigError(
                    f"{source}: {key}.{name}={setting!r} contradicts {nested[name]!r} elsewhere in the rope settings"
                )
            nested[name] = setting
    theta = nested.get("rope_theta", cfg.get("rope_theta"))
    theta = 10000.0 if theta is None else theta if (whole := whole_number(theta)) is None else whole
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ConfigError(f"{source}: rope_theta={theta!r} must be a positive number")
    kind = nested.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{source}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = nested.get("partial_rotary_factor", cfg.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"{source}: partial_rotary_factor={partial!r} is not supported; only 1.0 is")
    if kind == "default":
        if nested.get("factor") not in (None, 1):
            raise ConfigError(
                f"{source}: rope factor={nested['factor']!r} contradicts rope type 'default', which does not scale; name the"
                f" type: {', '.join(ROPE_TYPES[1:])}"
            )
        return RopeConfig(theta=float(theta))
    factor = get(nested, "factor", f"{source}: rope ({kind})", (int, float))
    if not 1 <= factor < math.inf:
        raise ConfigError(f"{source}: rope factor={factor!r} must be a finite number of at least 1")
    rope = RopeConfig(theta=float(theta), type=kind, factor=float(factor))
    if kind == "linear":
        return rope
    where = f"{source}: rope ({kind})"
    key = "original_max_position_embeddings"  # transformers prefers one beside the rope settings
    original = positive(nested, key, where, positive(cfg, key, source, max_positions))
    if cfg.get(key) not in (None, original):
        raise ConfigError(f"{source}: {key}={cfg[key]!r} contradicts {original} in the rope settings")
    if kind == "llama3":
        low = float(get(nested, "low_freq_factor", where, (int, float)))
        high = float(get(nested, "high_freq_factor", where, (int, float)))
        if not 0 < low < high < math.inf:
            raise ConfigError(f"{where}: low_freq_factor={low} must be above 0 and below high_freq_factor={high}, both finite")
        return dataclasses.replace(rope, original_max_positions=original, low_freq_factor=low, high_freq_factor=high)
    for key in ("mscale", "mscale_all_dim"):
        if nested.get(key) is not None:
            raise ConfigError(f"{where}: {key}={nested[key]!r} is not supported")
    if nested.get("truncate", True) is not True:
        raise ConfigError(f"{where}: truncate={nested['truncate']!r} is not supported; only true is")
    attention = get(nested, "attention_factor", where, (int, float), None)
    if attention is not None and not 0 < attention < math.inf:
        raise ConfigError(f"{where}: attention_factor={attention!r} must be a positive, finite number")
    fast = float(get(nested, "beta_fast", where, (int, float), 32.0))
    slow = float(get(nested, "beta_slow", where, (int, float), 1.0))
    if not 0 < slow < fast < math.inf:
        raise ConfigError(f"{where}: beta_fast={fast} must be finite and above beta_slow={slow}, which must be above 0")
    return dataclasses.replace(
        rope,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=None if attention is None else float(attention),
    )


def _check_yarn(rope: RopeConfig, head_dim: int, source: str) -> None:
    """Refuse a ramp from unscaled to scaled frequencies that has no room between the first and the last of them."""
    if rope.theta <= 1:
        raise ConfigError(f"{source}: rope (yarn): rope_theta={rope.theta} must be above 1")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(dimension(rope.beta_fast)), 0), min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    if low >= min(high, head_dim // 2):
        raise ConfigError(
            f"{source}: rope (yarn): beta_fast={rope.beta_fast} and beta_slow={rope.beta_slow} put the ramp at [{low}, {high}]"
            f" of {head_dim // 2} frequencies (rope_theta={rope.theta}, original_max_position_embeddings="
            f"{rope.original_max_positions}); its start must lie below its end and below the last frequency"
        )


def _decoder_fields(cfg: Mapping[str, Any], source: str) -> dict[str, Any]:
    hidden = positive(cfg, "hidden_size", source)
    heads = positive(cfg, "num_attention_heads", source)
    kv_heads = positive(cfg, "num_key_value_heads", source, heads)
    if heads % kv_heads:
        raise ConfigError(f"{source}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    if cfg.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{source}: no head_dim, and hidden_size={hidden} is not a multiple of {heads} heads")
    head_dim = positive(cfg, "head_dim", source, hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim={head_dim} must be even")
    for key in ("attention_bias", "mlp_bias"):
        if cfg.get(key):
            raise ConfigError(f"{source}: {key}={cfg[key]!r} is not supported; only false is")
    act = cfg.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"{source}: hidden_act={act!r} is not supported; only 'silu' is")
    if cfg.get("quantization_config"):
        raise ConfigError(f"{source}: quantization_config is not supported; convert the model to bfloat16 or float32")
    layers = positive(cfg, "num_hidden_layers", source)
    max_positions = positive(cfg, "max_position_embeddings", source)
    eps = float(get(cfg, "rms_norm_eps", source, (int, float)))
    if not 0 < eps < 1:
        raise ConfigError(f"{source}: rms_norm_eps={eps} must lie between 0 and 1")
    rope = rope_from_hf(cfg, source, max_positions)
    if rope.type == "yarn":
        _check_yarn(rope, head_dim, source)
    refuse_foreign(cfg, source, {"head_dim": head_dim, "hidden_size": hidden, "num_layers": layers})
    return dict(
        vocab_size=positive(cfg, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=positive(cfg, "intermediate_size", source),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope=rope,
        max_positions=max_positions,
        windows=windows(cfg, source, layers),
    )


def target_config_from_hf(cfg: Mapping[str, Any], source: str = "config.json") -> TargetConfig:
    """Read a target's ``config.json``. The architecture is chosen by ``model_type``.

    Raises:
      ConfigError: a missing key, an illegal value, an unsupported architecture, rope type or feature.
    """
    kind = cfg.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"{source}: model_type={kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    check_architectures(cfg, source, ARCHITECTURES[kind])
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):  # a draft's block is not causal
        if cfg.get(key) not in (None, causal):
            raise ConfigError(f"{source}: {key}={cfg[key]!r} is not supported in a target; only {str(causal).lower()} is")
    fields = _decoder_fields(cfg, source)
    bos = token_ids(cfg.get("bos_token_id"), "bos_token_id", source, fields["vocab_size"])
    return TargetConfig(
        architecture=kind,
        tie_embeddings=get(cfg, "tie_word_embeddings", source, bool, False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(cfg.get("eos_token_id"), "eos_token_id", source, fields["vocab_size"]),
        **fields,
    )


_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_anchors",
    "draft_vocab_size",
)


_DRAFT_SECTIONS = ("dspark_config", "dflash_config")


def _flatten_draft(cfg: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Drafter keys may stand at the top or under ``dspark_config`` / ``dflash_config``; two different values are an error."""
    flat = dict(cfg)
    for section in _DRAFT_SECTIONS:
        for key, value in (get(cfg, section, source, dict, {})).items():
            if key in _DRAFT_KEYS and flat.get(key, value) != value:
                raise ConfigError(f"{source}: {key}={flat[key]!r} at the top contradicts {section}.{key}={value!r}")
            flat.setdefault(key, value)
    return flat


def draft_config_from_hf(cfg: Mapping[str, Any], source: str = "config.json") -> DraftConfig:
    """Read a draft's ``config.json`` in DeepSpec form (SPEC section 7).

    Raises:
      ConfigError: a missing key, an illegal value, the last target layer as a tap, a mask id outside the vocabulary,
        a confidence head that wants a Markov part which rank 0 does not have.
    """
    sections = [cfg.get(name) or {} for name in _DRAFT_SECTIONS]
    cfg = _flatten_draft(cfg, source)
    if cfg.get("model_type") not in (None, DRAFT_MODEL_TYPE):
        raise ConfigError(
            f"{source}: model_type={cfg['model_type']!r} is not supported in a draft; supported: {DRAFT_MODEL_TYPE}"
        )
    check_architectures(cfg, source, DRAFT_ARCHITECTURE)
    fields = _decoder_fields(cfg, source)
    for section in sections:  # a value at the top hides one of the same name in a section
        refuse_foreign(section, source, fields)
    vocab = fields["vocab_size"]
    mask = get(cfg, "mask_token_id", source, int)
    if not 0 <= mask < vocab:
        raise ConfigError(f"{source}: mask_token_id={mask} must lie in [0, vocab_size={vocab})")
    num_target_layers = positive(cfg, "num_target_layers", source)
    ids = get(cfg, "target_layer_ids", source, (list, tuple))
    if not ids or any(whole_number(i) is None for i in ids):
        raise ConfigError(f"{source}: target_layer_ids={ids!r} must be a non-empty list of integers")
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"{source}: target_layer_ids={ids!r} must rise strictly")
    if ids[0] < -1 or ids[-1] > num_target_layers - 2:
        raise ConfigError(
            f"{source}: target_layer_ids={ids!r} must lie in [-1, {num_target_layers - 2}]: -1 is the embedding, and the"
            f" last of the {num_target_layers} layers cannot be tapped"
        )
    rank = get(cfg, "markov_rank", source, int, 0)
    if rank < 0:
        raise ConfigError(f"{source}: markov_rank={rank} must be at least 0")
    head = get(cfg, "markov_head_type", source, str, "vanilla")
    if rank and head not in HEAD_TYPES:
        raise ConfigError(f"{source}: markov_head_type={head!r} is unknown; legal: {', '.join(HEAD_TYPES)}")
    confidence = get(cfg, "enable_confidence_head", source, bool, False)
    with_markov = get(cfg, "confidence_head_with_markov", source, bool, False)
    if confidence and with_markov and rank == 0:
        raise ConfigError(f"{source}: confidence_head_with_markov=true needs markov_rank > 0, got 0")
    reduced = get(cfg, "draft_vocab_size", source, int, None)
    if reduced is not None and not 1 <= reduced <= vocab:
        raise ConfigError(f"{source}: draft_vocab_size={reduced} must lie in [1, vocab_size={vocab}]")
    return DraftConfig(
        draft_vocab_size=reduced,
        block_size=positive(cfg, "block_size", source),
        mask_token_id=mask,
        target_layer_ids=tuple(map(int, ids)),
        num_target_layers=num_target_layers,
        markov_rank=rank,
        markov_head_type=head if rank else "vanilla",
        confidence_head=confidence,
        confidence_with_markov=confidence and with_markov,
        num_anchors=positive(cfg, "num_anchors", source, 512),
        **fields,
    )


def _hf_decoder(cfg: TargetConfig | DraftConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": cfg.rope.theta, "rope_type": cfg.rope.type}
    if cfg.rope.type != "default":
        rope["factor"] = cfg.rope.factor
    if cfg.rope.type in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = cfg.rope.original_max_positions
    if cfg.rope.type == "llama3":
        rope |= {"low_freq_factor": cfg.rope.low_freq_factor, "high_freq_factor": cfg.rope.high_freq_factor}
    if cfg.rope.type == "yarn":
        rope |= {"beta_fast": cfg.rope.beta_fast, "beta_slow": cfg.rope.beta_slow}
        if cfg.rope.attention_factor is not None:
            rope["attention_factor"] = cfg.rope.attention_factor
    return {
        "attention_bias": False,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in cfg.windows],
        "max_position_embeddings": cfg.max_positions,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "num_key_value_heads": cfg.num_kv_heads,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": cfg.rope.theta,
        "sliding_window": max(cfg.windows) or None,
        "use_sliding_window": any(cfg.windows),
        "vocab_size": cfg.vocab_size,
    }


def target_config_to_hf(cfg: TargetConfig) -> dict[str, Any]:
    """The ``config.json`` dictionary of a target; ``target_config_from_hf`` reads it back unchanged."""
    eos = cfg.eos_token_ids
    return _hf_decoder(cfg) | {
        "architectures": [ARCHITECTURES[cfg.architecture]],
        "model_type": cfg.architecture,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }


def draft_config_to_hf(cfg: DraftConfig) -> dict[str, Any]:
    """The DeepSpec ``config.json`` dictionary of a draft; ``draft_config_from_hf`` reads it back unchanged."""
    return (
        _hf_decoder(cfg)
        | {
            "architectures": [DRAFT_ARCHITECTURE],
            "model_type": DRAFT_MODEL_TYPE,
            "tie_word_embeddings": False,
            "block_size": cfg.block_size,
            "mask_token_id": cfg.mask_token_id,
            "target_layer_ids": list(cfg.target_layer_ids),
            "num_target_layers": cfg.num_target_layers,
            "markov_rank": cfg.markov_rank,
            "markov_head_type": cfg.markov_head_type,
            "enable_confidence_head": cfg.confidence_head,
            "confidence_head_with_markov": cfg.confidence_with_markov,
            "num_anchors": cfg.num_anchors,
        }
        | ({} if cfg.draft_vocab_size is None else {"draft_vocab_size": cfg.draft_vocab_size})
    )
