"""Drafts in DeepSpec form (SPEC section 7), and whether a draft belongs to a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoint.files import new_directory, read_json, write_json
from dspark_jax.checkpoint.safetensor_files import open_directory, write_directory
from dspark_jax.checkpoint.tensors import (
    Assignment,
    LazyTensor,
    as_dtype,
    build_tree,
    by_canonical_name,
    check_tree,
    materialise,
    named_tensors,
    plan,
    read_checked,
    shape_text,
)
from dspark_jax.config import DraftConfig, TargetConfig, draft_config_from_hf, draft_config_to_hf
from dspark_jax.errors import CheckpointError, PairError
from dspark_jax.params import Params, draft_specs

SHARED = ("embed_tokens.weight", "lm_head.weight")
OPTIONAL = ("confidence_head.proj.bias",)  # absent: zero
MAX_SHARD_BYTES = 5_000_000_000
_ROWS = 8192  # compared at a time


def check_pair(draft: DraftConfig, target: TargetConfig, where: str) -> None:
    """Refuse a draft that was not made for a target. ``where`` names the draft in errors.

    Raises:
      PairError: naming both values.
    """
    for key in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(draft, key), getattr(target, key)
        if ours != theirs:
            raise PairError(f"{where}: the draft has {key}={ours}, the target {key}={theirs}")
    if draft.num_target_layers != target.num_layers:
        raise PairError(
            f"{where}: the draft was made for num_target_layers={draft.num_target_layers}, the target has"
            f" {target.num_layers} layers"
        )
    if draft.target_layer_ids[-1] > target.num_layers - 2:
        raise PairError(
            f"{where}: target_layer_ids={list(draft.target_layer_ids)} must lie below the last of the target's"
            f" {target.num_layers} layers"
        )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise PairError(f"{where}: mask_token_id={draft.mask_token_id}, the target has vocab_size={target.vocab_size}")


def read_draft_config(directory: Path) -> DraftConfig:
    """The configuration of a draft directory.

    Raises:
      CheckpointError, ConfigError: config.json is missing or illegal.
    """
    path = directory / "config.json"
    return draft_config_from_hf(read_json(path), str(path))


def plan_draft(
    config: DraftConfig, tensors: Iterable[LazyTensor], source: str, target: TargetConfig | None
) -> tuple[list[Assignment], dict[str, LazyTensor]]:
    """Match a draft's table with a checkpoint's headers; also the copies of the target's tensors that it carries.

    Raises:
      CheckpointError: as ``tensors.plan``. PairError: ``fc`` or a copy does not have the target's width.
    """
    tensors = list(tensors)
    named = by_canonical_name(tensors)
    hidden = config.hidden_size if target is None else target.hidden_size
    taps, fc = len(config.target_layer_ids), named.get("fc.weight")
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != taps * hidden:
        raise PairError(
            f"{fc.where}: fc.weight reads {fc.shape[1]} features, but {taps} target layers of width {hidden} give"
            f" {taps * hidden}"
        )
    shared = {name: named[name] for name in SHARED if name in named}
    shape = (config.vocab_size, config.hidden_size)
    for tensor in shared.values():
        if tensor.shape != shape or tensor.dtype is None:
            raise PairError(
                f"{tensor.where}: {tensor.name} has shape {shape_text(tensor.shape)} and type {tensor.dtype_name},"
                f" the target's own has shape {shape_text(shape)}"
            )
    return plan(draft_specs(config), tensors, source, consumed=SHARED, optional=OPTIONAL), shared


def target_tensors(params: Params) -> dict[str, jax.Array]:
    """The target's own tensors under the names of a draft's copies; a tied target's LM head is its embedding."""
    return {SHARED[0]: params["embed"], SHARED[1]: params.get("head", params["embed"])}


def check_shared(shared: dict[str, LazyTensor], target_params: Params) -> None:
    """Compare a draft's copies with the target's own tensors, after rounding to the checkpoint's type (or to the type
    the target was loaded in, where that is the shorter).

    Raises:
      PairError: they differ; nothing is replaced.
    """
    for name, tensor in shared.items():
        copy, own = read_checked(tensor), np.asarray(target_tensors(target_params)[name])
        dtype = copy.dtype if own.dtype.itemsize > copy.dtype.itemsize else own.dtype
        differ = sum(
            int(np.count_nonzero(copy[i : i + _ROWS].astype(dtype) != own[i : i + _ROWS].astype(dtype)))
            for i in range(0, own.shape[0], _ROWS)
        )
        if differ:
            raise PairError(
                f"{tensor.where}: {tensor.name} differs from the target's own in {differ} of {own.size} values: the draft"
                " belongs to another target"
            )


def check_vocabulary(config: DraftConfig, params: Params, where: str) -> None:
    """Refuse a reduced draft vocabulary that is not made of rising ids of the target.

    Raises:
      CheckpointError: naming the value.
    """
    if config.draft_vocab_size is None:
        return
    ids = np.asarray(params["vocabulary"])
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        raise CheckpointError(
            f"{where}: the draft vocabulary must hold rising ids in [0, {config.vocab_size}); it runs"
            f" from {ids[0]} to {ids[-1]}"
        )


def load_draft(
    source: str | Path,
    dtype: Any,
    target_config: TargetConfig | None,
    target_params: Params | None,
    shardings: Any = None,
) -> tuple[DraftConfig, Params]:
    """Load a draft from a directory in DeepSpec form and check it against its target.

    Embedding and LM head are not part of the result. Without a target (both None) the draft must not carry them.

    Raises:
      CheckpointError, ConfigError: what was read is not legal. PairError: it does not belong to the target.
    """
    directory = Path(source)
    config = read_draft_config(directory)
    if target_config is not None:
        check_pair(config, target_config, str(directory))
    assignments, shared = plan_draft(config, open_directory(directory), str(directory), target_config)
    if shared and target_params is None:
        raise CheckpointError(
            f"{directory} carries {' and '.join(shared)}, which must be compared with the target's own: name the target"
        )
    if target_params is not None:
        check_shared(shared, target_params)
    params = build_tree(materialise(assignments, as_dtype(dtype), shardings))
    check_vocabulary(config, params, str(directory))
    return config, params


def _tensors(
    config: DraftConfig, params: Params, shared: tuple[Any, Any] | None, dtype: np.dtype[Any] | None
) -> Iterator[tuple[str, np.ndarray]]:
    stored = np.dtype(params["fc"].dtype) if dtype is None else dtype
    if shared is not None:
        shape = (config.vocab_size, config.hidden_size)
        for name, array in zip(SHARED, shared, strict=True):
            if tuple(array.shape) != shape:
                raise PairError(
                    f"{name} of the target has shape {shape_text(array.shape)}, the draft needs {shape_text(shape)}"
                )
            yield name, np.asarray(array).astype(stored, copy=False)
    for name, array in named_tensors(draft_specs(config), params):
        kept = dtype is None or np.issubdtype(array.dtype, np.integer)
        yield name, array if kept else array.astype(dtype, copy=False)


def save_draft(
    directory: str | Path,
    config: DraftConfig,
    params: Params,
    shared: tuple[Any, Any] | None = None,
    dtype: Any = None,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a draft as a DeepSpec directory; it appears whole or not at all.

    Args:
      shared: (embedding, LM head) of the target to store as well, in ``dtype`` or the type of ``fc``; None: neither.
      dtype: None keeps the types of the parameters.

    Raises:
      CheckpointError: the directory holds something and ``overwrite`` is False, or the tree does not fit ``config``.
    """
    wanted = as_dtype(dtype)
    check_tree(draft_specs(config), params)
    with new_directory(Path(directory), overwrite) as temp:
        write_directory(temp, _tensors(config, params, shared, wanted), max_shard_bytes)
        name = str(params["fc"].dtype if wanted is None else wanted)
        write_json(temp / "config.json", draft_config_to_hf(config) | {"dtype": name, "torch_dtype": name})
