"""Conversion between checkpoint forms: own form <-> Hugging Face targets, DeepSpec drafts; GGUF targets to either."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint import deepspec, gguf, hf, orbax
from dspark_jax.checkpoint.files import TEXT_FILES, check_destination
from dspark_jax.checkpoint.gguf_text import write_text_files
from dspark_jax.checkpoint.safetensor_files import open_directory
from dspark_jax.checkpoint.source import LoadedTarget, Source, detect, load_target, resolve_target
from dspark_jax.checkpoint.tensors import Assignment, as_dtype, spec_leaves
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import CheckpointError, TextError
from dspark_jax.params import Params, ParamSpec

_FORMS = {"target": ("own", "hf"), "draft": ("own", "deepspec")}


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of a checkpoint file and the leaf it is, or becomes part of; either may be on the source side."""

    source: str
    source_shape: tuple[int, ...]
    source_dtype: str
    destination: str
    destination_shape: tuple[int, ...]
    destination_dtype: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did, or would do. ``str()`` gives a table, a line a tensor."""

    src: Path
    dst: Path
    kind: str  # "target" | "draft"
    src_form: str  # "hf" | "gguf" | "deepspec" | "own"
    dst_form: str
    written: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        verb = "converted" if self.written else "would convert"
        head = f"{verb} the {self.kind} {self.src} ({self.src_form}) to {self.dst} ({self.dst_form})"
        cells = [
            (
                r.source,
                f"{list(r.source_shape)} {r.source_dtype}",
                r.destination,
                f"{list(r.destination_shape)} {r.destination_dtype}",
            )
            for r in self.rows
        ]
        table = [("source", "shape and type", "destination", "shape and type"), *cells]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = ["  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([head, *lines, *self.notes])


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A source whose headers were read and matched. Exactly one of ``assignments`` and ``stored`` describes its tensors."""

    config: TargetConfig | DraftConfig
    assignments: tuple[Assignment, ...] = ()
    stored: dict[str, np.dtype[Any]] = dataclasses.field(default_factory=dict)  # own form: type of each leaf
    shared: tuple[str, ...] = ()  # copies of the target's tensors


def _open(path: Path, kind: str, form: str, target: TargetConfig | None) -> _Opened:
    if form == "own":
        config, stored = orbax.read_own_config(path)
        if isinstance(config, DraftConfig) and target is not None:
            deepspec.check_pair(config, target, str(path))
        return _Opened(config, stored=stored)
    if form == "gguf":
        gguf_config, assignments = gguf.plan_target_gguf(gguf.GGUFFile(path))
        return _Opened(gguf_config, tuple(assignments))
    if kind == "target":
        target_config = hf.read_target_config(path)
        return _Opened(target_config, tuple(hf.plan_target(target_config, open_directory(path), str(path))[0]))
    draft_config = deepspec.read_draft_config(path)
    if target is not None:
        deepspec.check_pair(draft_config, target, str(path))
    assignments, shared = deepspec.plan_draft(draft_config, open_directory(path), str(path), target)
    return _Opened(draft_config, tuple(assignments), shared=tuple(shared))


def _layer_names(spec: ParamSpec) -> list[str]:
    return [spec.name.format(i=i) for i in range(spec.shape[0])] if spec.stacked else [spec.name]


def _rows(opened: _Opened, to_own: bool, dtype: np.dtype[Any] | None) -> Iterable[Row]:
    """One row a tensor. Between two file forms names stand on both sides; own form has leaves, ``[i]`` for a layer."""
    by_path = {a.path: a for a in opened.assignments}
    for path, spec in spec_leaves(orbax.specs_of(opened.config)):
        shape = spec.shape[1:] if spec.stacked else spec.shape
        item = by_path.get(path)
        leaf_dtype = str(item.dtype(dtype) if item else opened.stored[path] if spec.integer else dtype or opened.stored[path])
        for i, name in enumerate(_layer_names(spec)):
            leaf = f"{path}[{i}]" if spec.stacked else path
            destination, out_shape = (leaf, spec.shape) if to_own else (name, shape)
            if item is None:
                yield Row(leaf, spec.shape, str(opened.stored[path]), destination, out_shape, leaf_dtype)
            elif item.tensors:
                tensor = item.tensors[i]
                yield Row(tensor.name, tensor.shape, tensor.dtype_name, destination, out_shape, leaf_dtype)
            else:
                yield Row("(absent: zeros)", shape, "", destination, out_shape, leaf_dtype)


def _load(
    path: Path, kind: str, form: str, dtype: Any, target: LoadedTarget | None
) -> tuple[TargetConfig | DraftConfig, Params]:
    if form == "own":
        return orbax.load_own(path, dtype)
    if form == "gguf":
        return gguf.load_target_gguf(path, dtype)
    if kind == "target":
        return hf.load_target_hf(path, dtype)
    return deepspec.load_draft(path, dtype, target.config if target else None, target.params if target else None)


def _write(
    config: TargetConfig | DraftConfig,
    params: Params,
    dst: Path,
    form: str,
    text_dir: Path | None,
    shared: LoadedTarget | None,
    overwrite: bool,
) -> None:
    if form == "own":
        orbax.save_own(dst, config, params, text_dir, overwrite=overwrite)
    elif isinstance(config, TargetConfig):
        hf.save_target_hf(dst, config, params, text_dir, overwrite=overwrite)
    else:
        own = None if shared is None else tuple(deepspec.target_tensors(shared.params).values())
        assert own is None or len(own) == 2
        deepspec.save_draft(dst, config, params, own, overwrite=overwrite)


def convert(
    src: Source,
    dst: str | os.PathLike[str],
    *,
    form: str | None = None,
    dtype: Any = None,
    target: Source | None = None,
    include_shared: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Report:
    """Convert a checkpoint; kind and form of ``src`` are detected.

    Args:
      src: a Hugging Face, DeepSpec or own-form directory, a .gguf file, or the name ``smollm2``.
      form: of ``dst``: "own", "hf" (targets) or "deepspec" (drafts); None: own form, or from own form the other one.
      dtype: of the result; None keeps the stored bits.
      target: the target of a draft. Needed where the draft's copies of embedding and LM head must be compared or written.
      include_shared: write those copies into a DeepSpec directory.
      dry_run: only read headers and report.
      overwrite: replace a destination that holds something.

    Raises:
      CheckpointError, ConfigError: an illegal source, form or destination. PairError: the draft is another target's.
    """
    src, dst = resolve_target(src), Path(dst)
    kind, src_form = detect(src)
    forms = _FORMS[kind]
    dst_form = form if form is not None else forms[1] if src_form == "own" else "own"
    if dst_form not in forms:
        raise CheckpointError(f"form={dst_form!r} is not legal for a {kind}; legal: {', '.join(forms)}")
    if target is not None and kind == "target":
        raise CheckpointError(f"target={os.fspath(target)!r} is for drafts, but {src} holds a target")
    if include_shared and (dst_form != "deepspec" or target is None):
        raise CheckpointError("include_shared=True needs a DeepSpec destination and target=, the model it shares with")
    check_destination(dst, overwrite)
    wanted = as_dtype(dtype)
    # The draft's header is checked before its target is read.
    opened = _open(src, kind, src_form, None)
    notes = []
    if opened.shared and target is None:
        raise CheckpointError(
            f"{src} carries {' and '.join(opened.shared)}, which must be compared with the target's own: name the target"
            " (--target)"
        )
    loaded = None if target is None else load_target(target)
    if loaded is not None:
        opened = _open(src, kind, src_form, loaded.config)
        if opened.shared:
            notes.append(f"{' and '.join(opened.shared)}: compared with the target's own")
    rows = tuple(_rows(opened, dst_form == "own", wanted))
    if include_shared:
        notes.append(f"{' and '.join(deepspec.SHARED)}: written from {os.fspath(target or '')}")
    if dry_run:
        return Report(src, dst, kind, src_form, dst_form, False, rows, tuple(notes))
    config, params = _load(src, kind, src_form, wanted, loaded)
    with tempfile.TemporaryDirectory() as scratch:
        text_dir = Path(scratch) if src_form == "gguf" else src
        if src_form == "gguf":
            try:
                write_text_files(gguf.GGUFFile(src), text_dir)
            except TextError as error:
                notes.append(f"no tokenizer: {error}")
        _write(config, params, dst, dst_form, text_dir, loaded if include_shared else None, overwrite)
        if kind == "target":
            copied = [name for name in TEXT_FILES if (dst / name).is_file()]
            notes.append(f"text files: {', '.join(copied) or 'none'}")
    return Report(src, dst, kind, src_form, dst_form, True, rows, tuple(notes))
