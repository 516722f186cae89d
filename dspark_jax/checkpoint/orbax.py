"""The package's own form: Orbax arrays beside a configuration, restorable on any number of devices."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.checkpoint.files import copy_text_files, new_directory, read_json, write_json
from dspark_jax.checkpoint.hf import read_target_config
from dspark_jax.checkpoint.tensors import (
    DTYPES,
    INTEGERS,
    as_dtype,
    build_tree,
    check_finite,
    check_tree,
    shape_text,
    sharding_of,
    spec_leaves,
    tree_leaf,
)
from dspark_jax.config import (
    DraftConfig,
    TargetConfig,
    draft_config_from_hf,
    draft_config_to_hf,
    target_config_to_hf,
)
from dspark_jax.errors import CheckpointError
from dspark_jax.params import Params, ParamSpec, draft_specs, target_specs

MARKER = "dspark.json"
VERSION = 1
_BLOCK = 1 << 20


def is_own(directory: Path) -> bool:
    return (directory / MARKER).is_file()


def specs_of(config: TargetConfig | DraftConfig) -> dict[str, Any]:
    return target_specs(config) if isinstance(config, TargetConfig) else draft_specs(config)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _checksums(params: Path) -> dict[str, int]:
    """CRC-32 of every file that Orbax wrote: its storage alone does not notice a changed bit inside a weight."""
    return {f.relative_to(params).as_posix(): _checksum(f) for f in sorted(params.rglob("*")) if f.is_file()}


def _verify_files(params: Path, marker: Path) -> None:
    files = read_json(marker).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{marker}: files={files!r} must map file names to checksums")
    for name, value in files.items():
        path = params / name
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist")
        if _checksum(path) != value:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one in {marker.name}")


def save_own(
    directory: str | Path,
    config: TargetConfig | DraftConfig,
    params: Params,
    text_dir: Path | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a target or a draft in own form, in the types its parameters have; it appears whole or not at all.

    Args:
      text_dir: for a target, a directory whose tokenizer files are copied.

    Raises:
      CheckpointError: the directory holds something and ``overwrite`` is False, or the tree does not fit ``config``.
    """
    target = isinstance(config, TargetConfig)
    specs = specs_of(config)
    check_tree(specs, params)
    stored = {
        path: {"shape": list(spec.shape), "dtype": str(tree_leaf(params, path).dtype)} for path, spec in spec_leaves(specs)
    }
    with new_directory(Path(directory), overwrite) as temp:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temp / "params", params)
            checkpointer.wait_until_finished()
        write_json(
            temp / "config.json",
            target_config_to_hf(config) if isinstance(config, TargetConfig) else draft_config_to_hf(config),
        )
        copy_text_files(text_dir if target else None, temp)
        write_json(
            temp / MARKER,
            {
                "version": VERSION,
                "kind": "target" if target else "draft",
                "params": stored,
                "files": _checksums(temp / "params"),
            },
        )


def read_own_config(directory: Path) -> tuple[TargetConfig | DraftConfig, dict[str, np.dtype[Any]]]:
    """Configuration and stored leaf types of an own-form directory; no parameters are read.

    Raises:
      CheckpointError, ConfigError: a file is missing, damaged, of another version, or contradicts the configuration.
    """
    marker = directory / MARKER
    about = read_json(marker)
    if about.get("version") != VERSION:
        raise CheckpointError(f"{marker}: version={about.get('version')!r} is not supported; supported: {VERSION}")
    config: TargetConfig | DraftConfig
    if about.get("kind") == "target":
        config = read_target_config(directory)
    elif about.get("kind") == "draft":
        config = draft_config_from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
    else:
        raise CheckpointError(f"{marker}: kind={about.get('kind')!r} is not legal; legal: target, draft")
    stored, specs = about.get("params"), dict(spec_leaves(specs_of(config)))
    if not isinstance(stored, dict) or stored.keys() != specs.keys():
        names = sorted(stored if isinstance(stored, dict) else [])
        raise CheckpointError(f"{marker}: params {names} are not those of the configuration, {sorted(specs)}")
    dtypes: dict[str, np.dtype[Any]] = {}
    for path, spec in specs.items():
        entry = stored[path] if isinstance(stored[path], dict) else {}
        legal: Mapping[str, np.dtype[Any]] = INTEGERS if spec.integer else DTYPES
        if entry.get("shape") != list(spec.shape) or entry.get("dtype") not in legal:
            raise CheckpointError(
                f"{marker}: {path} is {entry}, expected shape {shape_text(spec.shape)} and one of {', '.join(legal)}"
            )
        dtypes[path] = legal[entry["dtype"]]
    return config, dtypes


def _abstract(path: str, spec: ParamSpec, dtype: np.dtype[Any], shardings: Any) -> jax.ShapeDtypeStruct:
    sharding = sharding_of(shardings, path) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)


def _restore_leaf(checkpointer: ocp.Checkpointer, path: Path, leaf: str, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    item = build_tree([(leaf, abstract)])
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    try:
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        array: jax.Array = tree_leaf(checkpointer.restore(path, args=args), leaf)
    except Exception as error:  # whatever Orbax and its storage raise on damaged files
        reason = next(iter(str(error).splitlines()), "")[:300]
        raise CheckpointError(f"{path}: {leaf} cannot be restored: {type(error).__name__}: {reason}") from error
    if array.shape != abstract.shape or array.dtype != abstract.dtype:
        raise CheckpointError(f"{path}: {leaf} has shape {shape_text(array.shape)}, expected {shape_text(abstract.shape)}")
    return array


def load_own(directory: str | Path, dtype: Any = None, shardings: Any = None) -> tuple[TargetConfig | DraftConfig, Params]:
    """Restore a target or a draft from own form.

    Args:
      dtype: of the parameters; None keeps the stored types.
      shardings: where every leaf goes: one sharding for all or a tree like the parameters; None: the first device.
        How the checkpoint was sharded when it was saved does not matter.

    Raises:
      CheckpointError, ConfigError: a file is missing or damaged, or values are not finite.
    """
    directory = Path(directory).absolute()
    config, stored = read_own_config(directory)
    wanted = as_dtype(dtype)
    path = directory / "params"
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    _verify_files(path, directory / MARKER)
    specs = spec_leaves(specs_of(config))
    leaves = []
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for leaf, spec in specs:  # one at a time, so that the host holds one leaf in its stored form besides the result
            array = _restore_leaf(
                checkpointer,
                path,
                leaf,
                _abstract(leaf, spec, stored[leaf] if spec.integer else wanted or stored[leaf], shardings),
            )
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    check_finite(np.asarray(shard.data), str(path), leaf)
            leaves.append((leaf, array))
    return config, build_tree(leaves)
