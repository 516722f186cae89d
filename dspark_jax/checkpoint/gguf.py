"""Targets in GGUF form (llama and qwen3 architectures): metadata to a configuration, quantised tensors to float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dspark_jax.checkpoint.hf import plan_target
from dspark_jax.checkpoint.tensors import DTYPES, Assignment, LazyTensor, as_dtype, build_tree, materialise
from dspark_jax.config import ARCHITECTURES, TargetConfig, target_config_from_hf
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.params import Params

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFFile:
    """An open GGUF file: metadata by key, and tensors by name without reading their data.

    Raises:
      CheckpointError: the file is missing, truncated or not a GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path} does not exist")
        try:
            self.reader = gguf.GGUFReader(self.path)
        except Exception as error:  # the reader fails in many ways on files that end early
            raise CheckpointError(f"{self.path} is truncated or no GGUF file: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key; float32 values as their shortest decimal."""
        field = self.reader.get_field(key)
        if field is None:
            return default
        if field.types[-1] == gguf.GGUFValueType.FLOAT32 and len(field.types) == 1:
            return float(np.format_float_scientific(field.parts[field.data[0]][0], unique=True))
        return field.contents()

    @property
    def architecture(self) -> str:
        """Raises ConfigError if it is not a supported one."""
        name = self.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ConfigError(
                f"{self.path}: general.architecture={name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        return name


def _rope(file: GGUFFile, arch: str, max_positions: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": file.get(f"{arch}.rope.freq_base", 10000.0), "rope_type": "default"}
    legacy = file.get(f"{arch}.rope.scale_linear")
    kind = file.get(f"{arch}.rope.scaling.type", "none" if legacy in (None, 1.0) else "linear")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: {arch}.rope.scaling.type={kind!r} is not supported; supported: none, linear, yarn")
    factor = file.get(f"{arch}.rope.scaling.factor", legacy)
    if factor is None:
        raise ConfigError(f"{file.path}: {arch}.rope.scaling.factor is missing, which scaling type {kind!r} needs")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        attention = file.get(f"{arch}.rope.scaling.attn_factor", 1.0)
        if attention != 1.0:
            raise ConfigError(f"{file.path}: {arch}.rope.scaling.attn_factor={attention} is not supported; only 1.0 is")
        rope["original_max_position_embeddings"] = file.get(f"{arch}.rope.scaling.original_context_length", max_positions)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := file.get(f"{arch}.rope.scaling.{theirs}")) is not None:
                rope[ours] = value
    return rope


# Metadata that change what is computed, and the values that do not.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": False,
}


def read_config(file: GGUFFile) -> TargetConfig:
    """The configuration that a file's metadata describe.

    Raises:
      ConfigError: an unsupported architecture, rope scaling or feature, or a missing key.
    """
    arch = file.architecture

    def need(key: str) -> Any:
        value = file.get(f"{arch}.{key}")
        if value is None:
            raise ConfigError(f"{file.path}: key {arch}.{key} is missing")
        return value

    names = {t.name: t for t in file.reader.tensors}
    if "rope_freqs.weight" in names:
        raise ConfigError(f"{file.path}: rope_freqs.weight (per-frequency rope factors) is not supported")
    for key in ("expert_count", "attention.sliding_window"):
        if file.get(f"{arch}.{key}"):
            raise ConfigError(f"{file.path}: {arch}.{key}={file.get(f'{arch}.{key}')!r} is not supported")
    for key, neutral in _NEUTRAL.items():
        if (value := file.get(f"{arch}.{key}", neutral)) != neutral:
            raise ConfigError(f"{file.path}: {arch}.{key}={value!r} is not supported; only {neutral!r} is")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    kv_heads = file.get(f"{arch}.attention.head_count_kv", heads)
    for key, value in (
        ("head_count", heads),
        ("head_count_kv", kv_heads),
        ("feed_forward_length", need("feed_forward_length")),
    ):
        if isinstance(value, list):
            raise ConfigError(f"{file.path}: {arch}.{key}={value} differs between layers, which is not supported")
    head_dim = file.get(f"{arch}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{arch}.{key}", head_dim) != head_dim:
            raise ConfigError(f"{file.path}: {arch}.{key}={file.get(f'{arch}.{key}')} must equal the head dimension {head_dim}")
    embed = names.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    max_positions = need("context_length")
    eos = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return target_config_from_hf(
        {
            "model_type": arch,
            "vocab_size": int(embed.shape[1]),
            "hidden_size": hidden,
            "intermediate_size": need("feed_forward_length"),
            "num_hidden_layers": need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
            "rope_parameters": _rope(file, arch, max_positions),
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(i for i in eos if i is not None)),
        },
        str(file.path),
    )


def interleaved_to_half(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives q and k of the llama architecture: pairs (0,1),(2,3),... of every head
    become (0, h/2), (1, h/2+1), ..., which rotary embeddings of Hugging Face weights expect. ``weight``: [heads·h, D].
    """
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


@functools.cache
def _can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _reader(tensor: Any, shape: tuple[int, ...], permuted_heads: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        return interleaved_to_half(data, permuted_heads) if permuted_heads else data

    return read


def read_tensors(file: GGUFFile, config: TargetConfig) -> list[LazyTensor]:
    """A file's tensors under their Hugging Face names, dequantised to float32 when read.

    A name without a counterpart is kept, so that ``tensors.plan`` refuses it. A quantisation that cannot be read gives a
    tensor without a type, which ``plan`` refuses too.
    """
    found = []
    for tensor in file.reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        name, dot, suffix = tensor.name.rpartition(".")
        parts = name.split(".")
        mapped = _NAMES.get(name)
        heads = 0
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            mapped = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
            if config.architecture == "llama" and suffix == "weight":
                heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(parts[2], 0)
        kind = tensor.tensor_type
        found.append(
            LazyTensor(
                f"{mapped}.{suffix}" if mapped and dot else tensor.name,
                shape,
                DTYPES["float32"] if _can_dequantise(kind) else None,
                kind.name,
                str(file.path),
                _reader(tensor, shape, heads),
            )
        )
    return found


def plan_target_gguf(file: GGUFFile) -> tuple[TargetConfig, list[Assignment]]:
    """Configuration and matched tensors of a file.

    Raises:
      CheckpointError, ConfigError: as ``read_config`` and ``tensors.plan``.
    """
    config = read_config(file)
    assignments, _ = plan_target(config, read_tensors(file, config), str(file.path))
    return config, assignments


def load_target_gguf(source: str | Path | GGUFFile, dtype: Any = None, shardings: Any = None) -> tuple[TargetConfig, Params]:
    """Load a target from a GGUF file; ``dtype`` None: float32, the result of dequantising.

    Raises:
      CheckpointError, ConfigError: as ``plan_target_gguf``.
    """
    config, assignments = plan_target_gguf(source if isinstance(source, GGUFFile) else GGUFFile(source))
    return config, build_tree(materialise(assignments, as_dtype(dtype), shardings))
