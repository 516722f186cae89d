"""Small file operations that checkpoints share: JSON objects with typed errors, and directories that appear whole."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax.errors import CheckpointError

# Files beside the weights that belong to a target's text side; copied as they are.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
      CheckpointError: the file is missing, unreadable, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_text_files(text_dir: Path | None, dst: Path) -> list[str]:
    """Copy those of ``TEXT_FILES`` that ``text_dir`` holds into ``dst``; their names."""
    if text_dir is None:
        return []
    names = [name for name in TEXT_FILES if (text_dir / name).is_file()]
    for name in names:
        shutil.copyfile(text_dir / name, dst / name)
    return names


def check_destination(dst: Path, overwrite: bool, how: str = "overwrite=True") -> None:
    """Refuse a destination that holds anything, unless it may be replaced. ``how`` is what the caller writes to allow it.

    Raises:
      CheckpointError: ``dst`` is a file, or a non-empty directory and ``overwrite`` is False.
    """
    if dst.exists() and not dst.is_dir():
        raise CheckpointError(f"{dst} is a file; a checkpoint needs a directory")
    if not overwrite and dst.is_dir() and any(dst.iterdir()):
        raise CheckpointError(f"{dst} is not empty; choose another directory or pass {how}")


@contextlib.contextmanager
def new_directory(dst: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes ``dst`` when the block ends, and vanishes if it fails.

    ``dst`` either does not change or holds everything; an older ``dst`` is moved away only after the new one is whole.

    Raises:
      CheckpointError: as ``check_destination``.
    """
    dst = dst.absolute()
    check_destination(dst, overwrite)
    dst.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex[:12]
    temp = dst.parent / f".{dst.name}.{tag}.tmp"
    temp.mkdir()
    try:
        yield temp
        check_destination(dst, overwrite)
        old = dst.parent / f".{dst.name}.{tag}.old"
        if dst.exists() and any(dst.iterdir()):
            dst.rename(old)
        try:
            temp.rename(dst)  # replaces an empty directory
        except OSError:
            if old.exists():
                old.rename(dst)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
