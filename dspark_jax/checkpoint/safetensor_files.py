"""The safetensors format, one file or several with an index: headers first, data on demand, and a streaming writer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.files import read_json, write_json
from dspark_jax.checkpoint.tensors import DTYPES, INTEGERS, LazyTensor, aligned_empty
from dspark_jax.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]} | {
    "I32": INTEGERS["int32"],
    "I64": INTEGERS["int64"],
}
_CODES = {dtype: code for code, dtype in _NAMES.items()}
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_MAX_HEADER = 100_000_000


def refuse_pickle(path: Path) -> None:
    """Raises CheckpointError if ``path`` names a pickle file: those can run code when read."""
    if path.suffix in _PICKLED:
        raise CheckpointError(f"{path} is a pickle file, which is never read; convert it to safetensors")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"{next(k for k in names if names.count(k) > 1)!r} appears twice")
    return out


def _reader(path: Path, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        out = aligned_empty(shape, dtype)
        flat = out.reshape(-1).view(np.uint8).data
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(flat):
                got = file.readinto(flat[done:])
                if not got:
                    raise CheckpointError(f"{path} ended early: {len(flat) - done} bytes are missing at {start + done}")
                done += got
        return out

    return read


def read_header(path: Path) -> list[LazyTensor]:
    """The tensors of one safetensors file. Checks that the file holds exactly the bytes that its header promises.

    Raises:
      CheckpointError: a missing, truncated or damaged file, or a tensor that appears twice in it.
    """
    refuse_pickle(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes, header of {length}")
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = [
            (
                name,
                str(e["dtype"]),
                tuple(int(n) for n in e["shape"]),
                int(e["data_offsets"][0]),
                int(e["data_offsets"][1]),
            )
            for name, e in header.items()
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from error
    base, end = 8 + length, 0
    tensors = []
    for name, code, shape, first, last in sorted(entries, key=lambda e: e[3:]):
        dtype = _NAMES.get(code)
        wanted = last - first if dtype is None else math.prod(shape) * dtype.itemsize
        if first != end or last - first != wanted or any(n < 0 for n in shape):
            raise CheckpointError(f"{path}: the safetensors header is damaged at {name}: bytes {first} to {last}")
        end = last
        read = _reader(path, base + first, shape, dtype or np.dtype(np.uint8))
        tensors.append(LazyTensor(name, shape, dtype, code, str(path), read))
    if base + end != size:
        state = "truncated" if size < base + end else "longer than its header says"
        raise CheckpointError(f"{path} is {state}: {size} bytes, expected {base + end}")
    return tensors


def _read_sharded(index: Path) -> list[LazyTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    tensors: dict[str, LazyTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: {shard!r} must be the name of a file in the same directory")
        path = index.parent / shard
        if not path.is_file():
            names = [n for n, s in weight_map.items() if s == shard]
            raise CheckpointError(f"{index} names {shard}, which does not exist ({len(names)} tensors, first {names[0]})")
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise CheckpointError(f"{path}: {tensor.name} is there twice, also in {tensors[tensor.name].where}")
            if weight_map.get(tensor.name) != shard:
                raise CheckpointError(f"{path}: {tensor.name} {list(tensor.shape)} is not listed in {index.name}")
            tensors[tensor.name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index.parent / shard} lacks {name}, which {index.name} places there")
    return list(tensors.values())


def open_directory(directory: Path) -> list[LazyTensor]:
    """The tensors of a checkpoint directory: ``model.safetensors``, or the shards that its index names.

    Raises:
      CheckpointError: no such file, pickle files only, an index that contradicts its shards, or as ``read_header``.
    """
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if (directory / INDEX).exists():
        return _read_sharded(directory / INDEX)
    for path in sorted(directory.glob("*")):
        refuse_pickle(path)
    raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}")


def _write_file(path: Path, tensors: Sequence[tuple[str, np.ndarray]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors:
        header[name] = {
            "dtype": _CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, array in tensors:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_directory(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Write ``model.safetensors``, or shards of at most ``max_shard_bytes`` (but one tensor at least) with an index."""
    shards: list[list[tuple[str, np.ndarray]]] = [[]]
    filled = 0
    for name, array in tensors:
        if shards[-1] and filled + array.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, array))
        filled += array.nbytes
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, shard)
        weight_map |= {name: file for name, _ in shard}
        total += sum(array.nbytes for _, array in shard)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
