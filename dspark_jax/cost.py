"""What a round costs: a measured table over tokens, context length and kind of sampling (SPEC section 5, SPS).

A table is a pytree of arrays: another one of the same shape compiles nothing. Axes: S pass sizes, C context lengths,
2 kinds of a batch: greedy throughout, or not.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import RequestError

FORM = 1  # of the file; raise when its meaning changes


class Curve(flax.struct.PyTreeNode):
    """Seconds of a round at one context length. tokens: float32 ``[S]``; seconds: float32 ``[S]``, drafter and overhead
    included; draft: float32 scalar, the drafter; plain: float32 scalar, a round of one token for each of ``rows`` (float32
    scalar) without the drafter, nan where it was not measured."""

    tokens: jax.Array
    seconds: jax.Array
    draft: jax.Array
    plain: jax.Array
    rows: jax.Array

    def at(self, tokens: jax.Array) -> jax.Array:
        """Seconds of a round over ``tokens`` (any shape), straight lines between the measured sizes."""
        return _interpolate(tokens.astype(jnp.float32), self.tokens, self.seconds)

    def plain_at(self, tokens: jax.Array) -> jax.Array:
        """Seconds of a round over ``tokens`` (scalar), one a row, without the drafter."""
        here, full = self.at(jnp.stack([tokens.astype(jnp.float32), self.rows]))
        measured = jnp.maximum(self.plain + here - full, 0.1 * self.plain)
        return jnp.where(jnp.isnan(self.plain), here - self.draft, measured)


class CostTable(flax.struct.PyTreeNode):
    """Measured seconds; made by ``CostTable.make`` or ``dspark profile``.

    Attributes:
      tokens: float32 ``[S]``, tokens of a pass; contexts: float32 ``[C]``.
      passes: float32 ``[2, C, S]``, one pass of the target with what belongs to it (accept rule, cache).
      draft: float32 ``[2, C]``, the drafter; plain: float32 ``[2, C]``, a round of one token for each of ``rows`` without
        it, nan where that was not measured.
      overhead: float32 scalar, what every round costs besides.
      rows: the batch size that it was measured at, static; None: any.
    """

    tokens: jax.Array
    contexts: jax.Array
    passes: jax.Array
    draft: jax.Array
    plain: jax.Array
    overhead: jax.Array
    rows: int | None = flax.struct.field(pytree_node=False, default=None)

    @staticmethod
    def make(
        tokens: Sequence[int],
        seconds: Any,
        contexts: Sequence[int] = (0,),
        draft: Any = 0.0,
        overhead: float = 0.0,
        plain: Any = None,
        rows: int | None = None,
        quiet: bool = False,
    ) -> CostTable:
        """A checked table.

        A pass may always run at a larger size, and over a longer context, so where a larger one was measured to be cheaper its
        time holds for the smaller ones too: the table rises along both axes.

        Args:
          tokens, contexts: strictly rising.
          seconds: of a pass, ``[S]``, ``[C, S]`` or ``[2, C, S]``; draft: a number, ``[C]`` or ``[2, C]``.
          quiet: do not warn of a table that does not rise with tokens.
          plain: of a round of ``rows`` tokens without drafter, like ``draft``; None: what a pass over them costs.

        Raises:
          RequestError: a wrong shape, or a number that is not finite and positive (``draft``, ``overhead``: at least 0).
        """
        sizes = _rising("tokens", tokens, 1)
        lengths = _rising("contexts", contexts, 0)
        passes = _filled("seconds", seconds, (2, len(lengths), len(sizes)), False)
        drafter = _filled("draft", draft, (2, len(lengths)), True)
        extra = _filled("overhead", overhead, (), True)
        passes = _envelope(_envelope(passes, 2), 1)
        if not quiet and len(sizes) > 1 and (passes[:, :, -1] == passes[:, :, 0]).all():
            warnings.warn(
                "CostTable: seconds do not rise with tokens, so that everything pays; were they measured?", stacklevel=2
            )
        nothing = np.full((2, len(lengths)), np.nan)
        alone = nothing if plain is None else _filled("plain", plain, nothing.shape, False)
        if plain is not None and rows is None:
            raise RequestError("CostTable: plain needs rows, the batch size that it was measured at")
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1):
            raise RequestError(f"CostTable: rows={rows!r} must be None or an integer of at least 1")
        return CostTable(
            tokens=jnp.asarray(sizes, jnp.float32),
            contexts=jnp.asarray(lengths, jnp.float32),
            passes=jnp.asarray(passes, jnp.float32),
            draft=jnp.asarray(drafter, jnp.float32),
            plain=jnp.asarray(alone, jnp.float32),
            overhead=jnp.asarray(extra, jnp.float32),
            rows=None if rows is None else int(rows),
        )

    def curve(self, context: jax.Array, greedy: jax.Array) -> Curve:
        """The costs at a context length (int32 scalar) for a batch that is ``greedy`` throughout or not (bool scalar)."""
        kind = jnp.where(greedy, 0, 1)
        at = context.astype(jnp.float32)
        passes, draft, plain = (
            _interpolate(at[None], self.contexts, jnp.moveaxis(x[kind].reshape(len(self.contexts), -1), 0, 1))[:, 0]
            for x in (self.passes, self.draft, self.plain)
        )
        rows = jnp.asarray(1 if self.rows is None else self.rows, jnp.float32)
        return Curve(self.tokens, passes + draft + self.overhead, draft[0], plain[0], rows)


def _interpolate(x: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Straight lines through ``values [..., n]`` at the rising ``at [n]``: constant below, continued above. ``x [m]`` ->
    ``[..., m]``."""
    count = at.shape[0]
    if count == 1:
        return jnp.broadcast_to(values, (*values.shape[:-1], x.shape[0]))
    left = jnp.clip(jnp.searchsorted(at, x, side="right") - 1, 0, count - 2)
    share = jnp.maximum((x - at[left]) / (at[left + 1] - at[left]), 0.0)
    share = share.reshape((1,) * (values.ndim - 1) + share.shape)
    low, high = values[..., left], values[..., left + 1]
    # Exact at both ends: a measured size costs what was measured.
    return jnp.where(share == 1.0, high, low + (high - low) * share)


def _rising(name: str, values: Sequence[int], least: int) -> np.ndarray:
    numbers = _numbers(name, values)
    if numbers.ndim != 1 or numbers.size == 0 or (np.diff(numbers) <= 0).any() or not (numbers >= least).all():
        raise RequestError(f"CostTable: {name}={values!r} must rise strictly from at least {least}")
    return numbers


def _filled(name: str, values: Any, shape: tuple[int, ...], zero: bool) -> np.ndarray:
    numbers = _numbers(name, values)
    legal = np.isfinite(numbers) & ((numbers >= 0) if zero else (numbers > 0))
    if not legal.all():
        raise RequestError(
            f"CostTable: {name} holds {numbers[~legal].flat[0]}; seconds must be finite and {'at least' if zero else 'above'} 0"
        )
    if numbers.ndim > len(shape) or (numbers.ndim and numbers.shape != shape[len(shape) - numbers.ndim :]):
        raise RequestError(f"CostTable: {name} has the shape {numbers.shape}, expected {shape} or its last axes")
    return np.array(np.broadcast_to(numbers, shape))


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"CostTable: {name}={values!r} must be numbers") from error


def _envelope(values: np.ndarray, axis: int) -> np.ndarray:
    """The least of each entry and those behind it."""
    return np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)


def save_costs(path: str | os.PathLike[str], samples: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Write what was measured, and on what. The file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"form": FORM, "fingerprint": fingerprint, **samples}, indent=1, sort_keys=True, allow_nan=False)
    temp.write_text(text + "\n", encoding="utf-8")
    temp.replace(path)


def load_costs(path: str | os.PathLike[str], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What ``save_costs`` wrote for the same ``fingerprint``.

    Raises:
      RequestError: missing, damaged, or measured on something else; the message names what differs.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cost table {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("form") != FORM or not isinstance(found.get("fingerprint"), dict):
        raise RequestError(f"cost table {path} is not a table of form {FORM}")
    theirs, ours = found["fingerprint"], json.loads(json.dumps(fingerprint))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise RequestError(
                f"cost table {path} was measured on something else: {name}={theirs.get(name)!r}, here {ours.get(name)!r};"
                " measure anew with `dspark profile`"
            )
    return found
