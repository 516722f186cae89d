"""Target features for training: computed in the step by the frozen target, or read from a cache on disk (SPEC section 6)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dspark_jax import target
from dspark_jax.cache import TokenBatch
from dspark_jax.config import TargetConfig
from dspark_jax.errors import RequestError
from dspark_jax.params import Params
from dspark_jax.train.batches import Batch
from dspark_jax.train.rows import Example

MARKER = "features.json"
VERSION = 1
STEP_OF_LENGTHS = 64


class Features(flax.struct.PyTreeNode):
    """What the target says about a microbatch.

    taps: ``[N, m D]``, outputs of the tapped layers side by side; hidden: ``[N, D]`` after the final norm; normaliser:
    float32 ``[N]``, the log of the sum of exp of all logits (needed where the draft has a reduced vocabulary), or None.
    """

    taps: jax.Array
    hidden: jax.Array
    normaliser: jax.Array | None = None


def extract(params: Params, cfg: TargetConfig, tokens: TokenBatch, tap_ids: tuple[int, ...]) -> Features:
    """Features of conversations that each start at position 0; no gradient passes."""
    out = target.forward(params, cfg, tokens, None, tap_ids)
    return jax.lax.stop_gradient(Features(out.taps, out.hidden))


def normaliser(params: Params, hidden: jax.Array, chunk: int) -> jax.Array:
    """Float32 ``[P]``: the log-sum-exp of the target's logits for ``hidden [P, D]``, ``chunk`` rows of ``[V]`` at a time."""

    def one(h: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(target.unembed(params, h), axis=-1)

    return jax.lax.map(one, hidden.reshape(-1, chunk, hidden.shape[-1])).reshape(-1)


def cache_bytes(tokens: int, cfg: TargetConfig, taps: int, dtype: Any) -> int:
    """Bytes of a feature cache: tokens x (tapped layers + 1) x hidden size x bytes of a number, and 4 for the normaliser."""
    return tokens * ((taps + 1) * cfg.hidden_size * np.dtype(dtype).itemsize + 4)


def fingerprint(examples: Sequence[Example], cfg: TargetConfig, tap_ids: tuple[int, ...], dtype: str, target_name: str) -> str:
    digest = hashlib.sha256(repr((VERSION, cfg, tap_ids, dtype, target_name)).encode())
    for example in examples:
        digest.update(example.tokens.tobytes())
        digest.update(example.mask.tobytes())
    return digest.hexdigest()[:32]


class FeatureCache:
    """Features of all conversations in one directory: memory-mapped arrays ``[total tokens, ...]``, and where each starts."""

    def __init__(self, directory: Path, examples: Sequence[Example], cfg: TargetConfig, taps: int, dtype: str) -> None:
        self.directory = directory
        self.starts = np.concatenate([[0], np.cumsum([len(e.tokens) for e in examples])])
        kind = {"float32": np.float32, "bfloat16": np.uint16}[dtype]
        self.dtype = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}[dtype]
        total = int(self.starts[-1])
        self._shapes = {
            "taps": (kind, (total, taps * cfg.hidden_size)),
            "hidden": (kind, (total, cfg.hidden_size)),
            "normaliser": (np.float32, (total,)),
        }
        self._arrays: dict[str, np.ndarray] = {}

    def open(self, mode: Literal["r+", "w+"]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, (kind, shape) in self._shapes.items():
            path = self.directory / f"{name}.npy"
            if mode == "w+":
                array = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
            else:
                array = np.load(path, mmap_mode=mode, allow_pickle=False)
                if array.shape != shape or array.dtype != kind:
                    raise RequestError(f"{path} holds {array.dtype} {array.shape}, expected {np.dtype(kind)} {shape}")
            self._arrays[name] = array

    def _view(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        return array.view(self.dtype) if name != "normaliser" else array

    def put(self, rows: Sequence[int], features: Features) -> None:
        """Store features of conversations ``rows``, which lie end to end."""
        at = 0
        for row in rows:
            start, stop = self.starts[row], self.starts[row + 1]
            for name in self._shapes:
                value = np.asarray(getattr(features, name))[at : at + stop - start]
                if not np.isfinite(value.astype(np.float32).sum()):
                    raise RequestError(f"the target's {name} are not finite for conversation {row} of the data")
                self._view(name)[start:stop] = value.astype(self._view(name).dtype)
            at += stop - start

    def flush(self) -> None:
        for array in self._arrays.values():
            assert isinstance(array, np.memmap)
            array.flush()

    def read(self, rows: Sequence[int], tokens: int, dtype: Any) -> Features:
        """Features of conversations ``rows`` laid end to end and padded to ``tokens``, in ``dtype``."""

        def gather(name: str, kind: Any) -> Any:
            source = self._view(name)
            out = np.zeros((tokens, *source.shape[1:]), kind)
            at = 0
            for row in rows:
                start, stop = self.starts[row], self.starts[row + 1]
                out[at : at + stop - start] = source[start:stop]
                at += stop - start
            return out

        return Features(gather("taps", dtype), gather("hidden", dtype), gather("normaliser", np.float32))


def make_cache(
    directory: str | Path,
    params: Params,
    cfg: TargetConfig,
    target_name: str,
    examples: Sequence[Example],
    tap_ids: tuple[int, ...],
    dtype: str = "float32",
    tokens: int = 2048,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureCache:
    """Open the cache in ``directory``, computing what is missing; an interrupted call goes on where it stopped.

    Args:
      tokens: of one pass of the target. progress: called with (conversations done, of all).

    Raises:
      RequestError: the directory belongs to other data, another target or taps, has no room, or cannot be written.
    """
    directory = Path(directory)
    cache = FeatureCache(directory, examples, cfg, len(tap_ids), dtype)
    mark = {"version": VERSION, "fingerprint": fingerprint(examples, cfg, tap_ids, dtype, target_name)}
    path = directory / MARKER
    done = 0
    if path.is_file():
        try:
            have = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{path} is not readable: {error}") from error
        if {k: have.get(k) for k in mark} != mark:
            raise RequestError(f"--cache={directory} was made for other data, another target, taps or dtype; name an empty one")
        done = int(have["done"])
        cache.open("r+")
    else:
        need = cache_bytes(int(cache.starts[-1]), cfg, len(tap_ids), cache.dtype)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(directory).free
            if need > free:
                raise RequestError(f"--cache={directory}: {need / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free")
            cache.open("w+")
        except OSError as error:
            raise RequestError(f"--cache={directory} cannot be written: {error}") from error
    # Attention costs rows x length^2: conversations of similar length go together, and few lengths are compiled.
    order = np.argsort([len(e.tokens) for e in examples], kind="stable")
    chunk = 256
    tokens = -(-max(tokens, max(len(e.tokens) for e in examples)) // chunk) * chunk

    @jax.jit
    def run(params: Params, batch: TokenBatch) -> Features:
        found = extract(params, cfg, batch, tap_ids)
        return found.replace(normaliser=normaliser(params, found.hidden, chunk))

    def save(done: int) -> None:
        cache.flush()
        temp = path.with_suffix(".tmp")
        temp.write_text(json.dumps(mark | {"done": done}), encoding="utf-8")
        temp.replace(path)

    while done < len(examples):
        length = -(-len(examples[order[done]].tokens) // STEP_OF_LENGTHS) * STEP_OF_LENGTHS
        rows = max(1, tokens // max(length - STEP_OF_LENGTHS, STEP_OF_LENGTHS))
        stop, total = done, 0
        while stop < min(len(examples), done + rows):
            size = len(examples[order[stop]].tokens)
            if size > length or total + size > tokens:
                break
            stop, total = stop + 1, total + size
        group = [int(i) for i in order[done:stop]]
        found = run(params, token_batch([examples[i] for i in group], rows, tokens, length))
        cache.put(group, jax.device_get(found))
        done = stop
        save(done)
        progress(done, len(examples))
    return cache


def token_batch(examples: Sequence[Example], rows: int, tokens: int, length: int) -> TokenBatch:
    """Conversations laid end to end, without blocks."""
    sizes = np.asarray([len(e.tokens) for e in examples] + [0] * (rows - len(examples)), np.int32)
    at = np.arange(tokens) < sizes.sum()

    def padded(parts: list[np.ndarray]) -> jax.Array:
        flat = np.concatenate(parts).astype(np.int32)
        return jnp.asarray(np.pad(flat, (0, tokens - len(flat))))

    positions = padded([np.arange(n) for n in sizes])
    row = padded([np.full(n, i) for i, n in enumerate(sizes)])
    ids = padded([e.tokens for e in examples])
    zero = jnp.zeros(rows, jnp.int32)
    return TokenBatch(ids, row, positions, positions, jnp.asarray(at), jnp.asarray(sizes), zero, length)


def features_of(batch: Batch, params: Params, cfg: TargetConfig, tap_ids: tuple[int, ...]) -> Features:
    """The online features of a training batch."""
    return extract(params, cfg, batch.token_batch, tap_ids)
