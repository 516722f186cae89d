"""The birth certificate of every parameter: shape, logical axes, initialiser and checkpoint name.

Trees are nested dictionaries of arrays; the layers of a model are stacked on a leading axis. Matrices keep the
checkpoint's orientation [out, in]. Initialisation, conversion, restoring and sharding all derive from these tables.

Target: ``{"embed": [V,D], "layers": {...: [L, ...]}, "norm": [D], "head": [V,D]}`` (``head`` only when untied).
Draft: ``{"fc": [D, m D_target], "context_norm": [D], "layers": {...}, "norm": [D], "markov": {...}, "confidence": {...}}``;
embedding and LM head are the target's own and are not part of the tree. A reduced draft vocabulary adds ``"vocabulary"``,
int32 ``[W]``: the target ids that can be drafted, rising.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import ConfigError

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. ``name`` is its tensor in a checkpoint; ``{i}`` stands for the layer of a stacked one."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # "normal" | "ones" | "zeros" | "ids" (int32; in a checkpoint, offsets from the index: d2t)
    name: str

    def __post_init__(self) -> None:
        named = [a for a in self.axes if a is not None]
        if len(self.axes) != len(self.shape) or len(set(named)) != len(named):
            raise ConfigError(f"{self.name}: axes {self.axes} do not fit shape {self.shape}")

    @property
    def integer(self) -> bool:
        return self.init == "ids"

    @property
    def stacked(self) -> bool:
        """Whether axis 0 runs over layers, each of which is a tensor of its own in a checkpoint."""
        return "{i}" in self.name


def _layer_specs(cfg: TargetConfig | DraftConfig, qk_norm: bool, prefix: str) -> dict[str, ParamSpec]:
    n, d, f, h = cfg.num_layers, cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    q, kv = cfg.num_heads * h, cfg.num_kv_heads * h
    base = prefix + "layers.{i}."

    def spec(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "normal") -> ParamSpec:
        return ParamSpec((n, *shape), ("layers", *axes), init, f"{base}{name}.weight")

    specs = {
        "attn_norm": spec("input_layernorm", (d,), ("embed",), "ones"),
        "q": spec("self_attn.q_proj", (q, d), ("heads", "embed")),
        "k": spec("self_attn.k_proj", (kv, d), ("kv_heads", "embed")),
        "v": spec("self_attn.v_proj", (kv, d), ("kv_heads", "embed")),
        "o": spec("self_attn.o_proj", (d, q), ("embed", "heads")),
        "mlp_norm": spec("post_attention_layernorm", (d,), ("embed",), "ones"),
        "gate": spec("mlp.gate_proj", (f, d), ("mlp", "embed")),
        "up": spec("mlp.up_proj", (f, d), ("mlp", "embed")),
        "down": spec("mlp.down_proj", (d, f), ("embed", "mlp")),
    }
    if qk_norm:
        specs["q_norm"] = spec("self_attn.q_norm", (h,), (None,), "ones")
        specs["k_norm"] = spec("self_attn.k_norm", (h,), (None,), "ones")
    return specs


def target_specs(cfg: TargetConfig) -> dict[str, Any]:
    """The parameter table of a target, names as in a Hugging Face checkpoint."""
    v, d = cfg.vocab_size, cfg.hidden_size
    specs: dict[str, Any] = {
        "embed": ParamSpec((v, d), ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "layers": _layer_specs(cfg, cfg.qk_norm, "model."),
        "norm": ParamSpec((d,), ("embed",), "ones", "model.norm.weight"),
    }
    if not cfg.tie_embeddings:
        specs["head"] = ParamSpec((v, d), ("vocab", "embed"), "normal", "lm_head.weight")
    return specs


def draft_specs(cfg: DraftConfig) -> dict[str, Any]:
    """The parameter table of a draft, names as in a DeepSpec checkpoint (SPEC section 7).

    ``fc`` reads taps of the target's width; DeepSpec drafts have the target's hidden size.
    """
    v, d, r, taps = cfg.vocab_size, cfg.hidden_size, cfg.markov_rank, len(cfg.target_layer_ids)
    specs: dict[str, Any] = {
        "fc": ParamSpec((d, taps * d), ("embed", None), "normal", "fc.weight"),
        "context_norm": ParamSpec((d,), ("embed",), "ones", "hidden_norm.weight"),
        "layers": _layer_specs(cfg, True, ""),
        "norm": ParamSpec((d,), ("embed",), "ones", "norm.weight"),
    }
    if r:
        markov = {
            "w1": ParamSpec((v, r), (None, None), "normal", "markov_head.markov_w1.weight"),
            "w2": ParamSpec((cfg.head_size, r), (None, None), "normal", "markov_head.markov_w2.weight"),
        }
        width, name = {"vanilla": (0, ""), "gated": (r, "gate_proj"), "rnn": (3 * r, "joint_proj")}[cfg.markov_head_type]
        if width:
            inputs = d + (2 * r if cfg.markov_head_type == "rnn" else r)
            markov["proj"] = ParamSpec((width, inputs), (None, None), "normal", f"markov_head.{name}.weight")
            markov["bias"] = ParamSpec((width,), (None,), "zeros", f"markov_head.{name}.bias")
        specs["markov"] = markov
    if cfg.draft_vocab_size is not None:
        specs["vocabulary"] = ParamSpec((cfg.head_size,), (None,), "ids", "d2t")
    if cfg.confidence_head:
        inputs = d + (r if cfg.confidence_with_markov else 0)
        specs["confidence"] = {
            "proj": ParamSpec((1, inputs), (None, None), "normal", "confidence_head.proj.weight"),
            "bias": ParamSpec((1,), (None,), "zeros", "confidence_head.proj.bias"),
        }
    return specs


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def abstract(specs: dict[str, Any], dtype: Any) -> Params:
    """The tree of ``jax.ShapeDtypeStruct`` that ``specs`` describes."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.int32 if s.integer else dtype), specs, is_leaf=is_spec)


def init_params(specs: dict[str, Any], key: jax.Array, dtype: Any, scale: float = 0.02) -> Params:
    """Fresh parameters: normals of standard deviation ``scale``, ones for norms, zeros for biases, the first ids."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))

    def one(spec: ParamSpec, k: jax.Array) -> jax.Array:
        if spec.integer:
            return jnp.arange(spec.shape[0], dtype=jnp.int32)
        if spec.init == "normal":
            return (scale * jax.random.normal(k, spec.shape, jnp.float32)).astype(dtype)
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)

    return jax.tree.unflatten(tree, [one(s, k) for s, k in zip(leaves, keys, strict=True)])


def count_bytes(params: Params) -> int:
    """Memory of a parameter tree in bytes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
