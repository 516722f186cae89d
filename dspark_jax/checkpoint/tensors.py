"""From named tensors in files to a parameter tree: every leaf assigned once, every tensor used once, or an error by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax.errors import CheckpointError
from dspark_jax.params import Params, ParamSpec, is_spec

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
INTEGERS: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
IGNORED = (r"(^|\.)rotary_emb\.inv_freq$",)  # buffers that old exports carry; recomputed from the configuration
_ALIASES = {
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
}
_SHOWN = 8  # problems listed in one message


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor whose header is known and whose data is read on demand. ``dtype`` is None where it is unsupported."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    dtype_name: str
    where: str  # the file
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One leaf of the tree and the tensors it is made of: one, or one a layer; none for an optional leaf left at zero."""

    path: str  # "layers/q"
    spec: ParamSpec
    tensors: tuple[LazyTensor, ...]

    def dtype(self, wanted: np.dtype[Any] | None) -> np.dtype[Any]:
        """The leaf's type: ``wanted``, or the stored one.

        Raises:
          CheckpointError: nothing is wanted and the layers are stored in different types.
        """
        if self.spec.integer:
            return INTEGERS["int32"]
        if wanted is not None:
            return wanted
        stored = {t.dtype for t in self.tensors if t.dtype is not None} or {np.dtype(np.float32)}
        if len(stored) > 1:
            names = ", ".join(sorted(str(d) for d in stored))
            raise CheckpointError(f"{self.tensors[0].where}: {self.spec.name} is stored as {names}; ask for one dtype")
        return next(iter(stored))


def as_dtype(dtype: Any) -> np.dtype[Any] | None:
    """The NumPy type of a name or type; None stays None ("as stored").

    Raises:
      CheckpointError: it is not one that weights may have.
    """
    if dtype is None:
        return None
    try:
        found = DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)
    except (KeyError, TypeError):
        found = None
    if found not in DTYPES.values():
        raise CheckpointError(f"dtype={dtype!r} is not legal; legal: {', '.join(DTYPES)}")
    return found


def canonical(name: str) -> str:
    """A tensor's name without ``model.`` and in the long form of the confidence head."""
    name = name.removeprefix("model.")
    return _ALIASES.get(name, name)


def spec_leaves(specs: Mapping[str, Any]) -> list[tuple[str, ParamSpec]]:
    """Leaves of a parameter table with their paths, in a fixed order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    return [("/".join(str(k.key) for k in keys), spec) for keys, spec in flat]


def tree_leaf(tree: Mapping[str, Any], path: str) -> Any:
    """The leaf of a nested dictionary at ``path`` ("layers/q")."""
    node: Any = tree
    for key in path.split("/"):
        node = node[key]
    return node


def build_tree(leaves: Iterable[tuple[str, Any]]) -> Params:
    """Nested dictionaries from paths and leaves."""
    tree: Params = {}
    for path, leaf in leaves:
        node = tree
        *parents, last = path.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def by_canonical_name(tensors: Iterable[LazyTensor], ignore: Iterable[str] = IGNORED) -> dict[str, LazyTensor]:
    """Tensors by canonical name, without the ignored ones.

    Raises:
      CheckpointError: two tensors mean the same parameter.
    """
    patterns = [re.compile(p) for p in ignore]
    found: dict[str, LazyTensor] = {}
    for tensor in tensors:
        if any(p.search(tensor.name) for p in patterns):
            continue
        key = canonical(tensor.name)
        if key in found:
            raise CheckpointError(
                f"{tensor.where}: {tensor.name} is there twice, also as {found[key].name} in {found[key].where}"
            )
        found[key] = tensor
    return found


def plan(
    specs: Mapping[str, Any],
    tensors: Iterable[LazyTensor],
    source: str,
    *,
    ignore: Iterable[str] = IGNORED,
    consumed: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> list[Assignment]:
    """Match a parameter table with the headers of a checkpoint; no data is read.

    Args:
      ignore: regular expressions of tensor names that carry nothing.
      consumed: canonical names that the caller deals with itself.
      optional: canonical names that may be absent; such a leaf becomes zeros.

    Raises:
      CheckpointError: missing, unknown or duplicate tensors, wrong shapes, unsupported types: each with its file, name,
        shape and the expected shape.
    """
    left = by_canonical_name(tensors, ignore)
    for name in consumed:
        left.pop(canonical(name), None)
    problems: list[str] = []
    assignments = []
    for path, spec in spec_leaves(specs):
        shape = spec.shape[1:] if spec.stacked else spec.shape
        names = [spec.name.format(i=i) for i in range(spec.shape[0])] if spec.stacked else [spec.name]
        parts = []
        for name in names:
            tensor = left.pop(canonical(name), None)
            if tensor is None:
                if canonical(name) not in optional:
                    problems.append(f"{source}: tensor {name} of shape {shape_text(shape)} is missing")
            elif tensor.dtype is None or (tensor.dtype in INTEGERS.values()) != spec.integer:
                problems.append(
                    f"{tensor.where}: {tensor.name} {shape_text(tensor.shape)} has type {tensor.dtype_name};"
                    f" supported: {'I32, I64' if spec.integer else 'F32, F16, BF16'}, expected shape {shape_text(shape)}"
                )
            elif tensor.shape != shape:
                problems.append(
                    f"{tensor.where}: {tensor.name} has shape {shape_text(tensor.shape)}, expected {shape_text(shape)}"
                )
            else:
                parts.append(tensor)
        assignments.append(Assignment(path, spec, tuple(parts)))
    problems += [
        f"{t.where}: unknown tensor {t.name} of shape {shape_text(t.shape)}, which the configuration has no place for"
        for t in left.values()
    ]
    if problems:
        more = f"\n(and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise CheckpointError("\n".join(problems[:_SHOWN]) + more)
    return assignments


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX takes over on CPU without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def check_finite(array: np.ndarray, where: str, name: str) -> None:
    """Refuse NaN and infinities.

    Raises:
      CheckpointError: naming file and tensor.
    """
    if array.size == 0:
        return
    if array.dtype == DTYPES["bfloat16"]:
        finite = (array.view(np.uint16) & np.uint16(0x7FFF)).max() < 0x7F80
    else:  # either extreme shows NaN and infinity, without an array of flags
        finite = bool(np.isfinite(array.min()) and np.isfinite(array.max()))
    if not finite:
        raise CheckpointError(f"{where}: {name} holds values that are not finite")


def read_checked(tensor: LazyTensor) -> np.ndarray:
    """The data of a tensor in its stored type.

    Raises:
      CheckpointError: the file ends early or values are not finite.
    """
    data = tensor.read()
    check_finite(data, tensor.where, tensor.name)
    return data


def _host_leaf(item: Assignment, dtype: np.dtype[Any]) -> np.ndarray:
    if not item.tensors:
        return np.zeros(item.spec.shape, dtype)
    if item.spec.integer:
        tensor = item.tensors[0]
        return ids_from_offsets(read_checked(tensor), f"{tensor.where}: {tensor.name}")
    if not item.spec.stacked:
        return read_checked(item.tensors[0]).astype(dtype, copy=False)
    out = aligned_empty(item.spec.shape, dtype)
    for layer, tensor in enumerate(item.tensors):
        out[layer] = read_checked(tensor).astype(dtype, copy=False)
    return out


def ids_from_offsets(offsets: np.ndarray, where: str) -> np.ndarray:
    """Rising ids, int32, from their offsets to their index.

    Raises:
      CheckpointError: ids that are negative or do not rise.
    """
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if len(ids) and (ids[0] < 0 or ids[-1] >= 2**31 or (np.diff(ids) <= 0).any()):
        raise CheckpointError(f"{where} must hold offsets i -> id - i of rising ids; it gives {ids[:4].tolist()} …")
    return ids.astype(np.int32)


def sharding_of(shardings: Any, path: str) -> jax.sharding.Sharding | None:
    """The sharding of one leaf: ``shardings`` is None, one sharding for all, or a tree like the parameters."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return shardings
    found = tree_leaf(shardings, path)
    assert found is None or isinstance(found, jax.sharding.Sharding), f"shardings[{path!r}] is {found!r}"
    return found


def materialise(
    assignments: Iterable[Assignment], dtype: np.dtype[Any] | None, shardings: Any = None
) -> Iterator[tuple[str, jax.Array]]:
    """Read leaf after leaf to the devices; the host holds at most one leaf besides.

    Raises:
      CheckpointError: a file ends early, or a tensor holds values that are not finite.
    """
    for item in assignments:
        host = _host_leaf(item, item.dtype(dtype))
        yield item.path, jax.device_put(host, sharding_of(shardings, item.path))


def assign(
    specs: Mapping[str, Any],
    tensors: Iterable[LazyTensor],
    dtype: Any,
    source: str,
    *,
    ignore: Iterable[str] = IGNORED,
    consumed: Iterable[str] = (),
    optional: Iterable[str] = (),
    shardings: Any = None,
) -> Params:
    """The parameter tree of ``specs`` from the tensors of a checkpoint: ``plan``, then ``materialise``.

    Raises:
      CheckpointError: as ``plan`` (before any data is read) and ``materialise``.
    """
    assignments = plan(specs, tensors, source, ignore=ignore, consumed=consumed, optional=optional)
    return build_tree(materialise(assignments, as_dtype(dtype), shardings))


def named_tensors(specs: Mapping[str, Any], params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint tensors of a parameter tree, layer by layer of one leaf after the other; host views where possible.

    Raises:
      CheckpointError: the tree does not have the leaves or shapes of ``specs``.
    """
    check_tree(specs, params)
    for path, spec in spec_leaves(specs):
        host = np.asarray(tree_leaf(params, path))
        if spec.integer:
            yield spec.name, host.astype(np.int64) - np.arange(len(host))
        elif spec.stacked:
            for i in range(spec.shape[0]):
                yield spec.name.format(i=i), host[i]
        else:
            yield spec.name, host


def check_tree(specs: Mapping[str, Any], params: Params) -> None:
    """Refuse a parameter tree that is not the one ``specs`` describes.

    Raises:
      CheckpointError: leaves are missing, unknown or of another shape.
    """
    have = {"/".join(str(k.key) for k in keys): x for keys, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    want = dict(spec_leaves(specs))
    if have.keys() != want.keys():
        missing, unknown = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise CheckpointError(f"parameters do not fit the configuration: missing {missing}, unknown {unknown}")
    for path, spec in want.items():
        if tuple(have[path].shape) != spec.shape:
            raise CheckpointError(
                f"parameter {path} has shape {shape_text(have[path].shape)}, expected {shape_text(spec.shape)}"
            )
