"""Targets in Hugging Face form: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.files import copy_text_files, new_directory, read_json, write_json
from dspark_jax.checkpoint.safetensor_files import open_directory, write_directory
from dspark_jax.checkpoint.tensors import (
    Assignment,
    LazyTensor,
    as_dtype,
    build_tree,
    by_canonical_name,
    materialise,
    named_tensors,
    plan,
    read_checked,
    shape_text,
)
from dspark_jax.config import TargetConfig, target_config_from_hf, target_config_to_hf
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.params import Params, target_specs

MAX_SHARD_BYTES = 5_000_000_000


def read_target_config(directory: Path) -> TargetConfig:
    """The configuration of a target directory. Stop tokens of generation_config.json come first, then config.json's.

    Raises:
      CheckpointError, ConfigError: a file is missing or illegal.
    """
    config = target_config_from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
    path = directory / "generation_config.json"
    if not path.exists():
        return config
    eos = read_json(path).get("eos_token_id")
    ids = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < config.vocab_size:
            raise ConfigError(f"{path}: eos_token_id={eos!r} must hold token ids in [0, {config.vocab_size})")
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*ids, *config.eos_token_ids])))


def plan_target(config: TargetConfig, tensors: Iterable[LazyTensor], source: str) -> tuple[list[Assignment], LazyTensor | None]:
    """Match a target's table with a checkpoint's headers; also the redundant LM head of a tied model, if there is one.

    Raises:
      CheckpointError: as ``tensors.plan``.
    """
    tensors = list(tensors)
    spare = by_canonical_name(tensors).get("lm_head.weight") if config.tie_embeddings else None
    shape = (config.vocab_size, config.hidden_size)
    if spare is not None and (spare.shape != shape or spare.dtype is None):
        raise CheckpointError(
            f"{spare.where}: {spare.name} has shape {shape_text(spare.shape)} and type {spare.dtype_name}, expected"
            f" {shape_text(shape)} and a copy of the embedding, which the configuration ties to it"
        )
    return plan(target_specs(config), tensors, source, consumed=["lm_head.weight"] if spare else []), spare


def check_tied_head(spare: LazyTensor, assignments: Iterable[Assignment]) -> None:
    """Compare the LM head that a tied checkpoint carries with its embedding.

    Raises:
      CheckpointError: they differ.
    """
    embed = next(a for a in assignments if a.path == "embed").tensors[0]
    if not np.array_equal(read_checked(spare), read_checked(embed)):
        raise CheckpointError(
            f"{spare.where}: {spare.name} differs from {embed.name}, but config.json says tie_word_embeddings=true"
        )


def load_target_hf(directory: str | Path, dtype: Any = None, shardings: Any = None) -> tuple[TargetConfig, Params]:
    """Load a target from a Hugging Face directory.

    Args:
      dtype: of the parameters; None keeps the stored type.
      shardings: None, one sharding, or a tree like the parameters.

    Raises:
      CheckpointError, ConfigError: what was read is not legal; before any data is read where headers tell.
    """
    directory = Path(directory)
    config = read_target_config(directory)
    assignments, spare = plan_target(config, open_directory(directory), str(directory))
    if spare is not None:
        check_tied_head(spare, assignments)
    return config, build_tree(materialise(assignments, as_dtype(dtype), shardings))


def save_target_hf(
    directory: str | Path,
    config: TargetConfig,
    params: Params,
    text_dir: Path | None = None,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a target as a Hugging Face directory in the types its parameters have; it appears whole or not at all.

    Args:
      text_dir: a directory whose tokenizer files are copied.

    Raises:
      CheckpointError: the directory holds something and ``overwrite`` is False, or the tree does not fit ``config``.
    """
    with new_directory(Path(directory), overwrite) as temp:
        write_directory(temp, named_tensors(target_specs(config), params), max_shard_bytes)
        dtype = str(params["embed"].dtype)
        write_json(temp / "config.json", target_config_to_hf(config) | {"dtype": dtype, "torch_dtype": dtype})
        copy_text_files(text_dir, temp)
