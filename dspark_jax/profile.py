"""Measured costs of a pair on this machine: what a round takes by rows, tokens and context length (SPEC section 5, SPS).

What is timed is the decoding loop itself, with lengths that are given instead of decided, at exactly its compiled sizes: a
profile compiles nothing that decoding would not. Results are kept in the cache directory under a fingerprint of everything
that the times depend on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.cache import SMALLEST_CONTEXT, context_sizes
from dspark_jax.checkpoint.source import cache_dir
from dspark_jax.cost import CostTable, load_costs, save_costs
from dspark_jax.decode import decode
from dspark_jax.errors import RequestError
from dspark_jax.machine import machine
from dspark_jax.pair import Pair
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Adaptive, Observed, Policy, Priced, check_policy
from dspark_jax.schedule.adaptive import PLAIN
from dspark_jax.state import IDLE, RUNNING, DecodeState, new_state

KINDS = ("greedy", "sampled")
CONTEXTS = tuple(SMALLEST_CONTEXT << k for k in range(8))  # of every table, so that all have one shape
ROUNDS = 2  # of one timed call, where the context has room
REPEATS, QUICK_REPEATS = 9, 3
QUICK_SECONDS = 20.0  # after the first turn no further one begins later than this

Samples = dict[str, Any]  # kind -> context -> {"plain": seconds, "drafted": {tokens: seconds}}

_log = logging.getLogger(__name__)
_known: dict[str, Samples] = {}  # of this process, by fingerprint


@dataclasses.dataclass(frozen=True)
class Profile:
    """Median seconds of a round: ``samples[kind][context]`` holds ``plain`` and ``drafted[tokens]``."""

    rows: int
    sizes: tuple[int, ...]
    samples: Samples
    fingerprint: dict[str, Any]
    path: Path | None

    @property
    def table(self) -> CostTable:
        """For a policy. A kind that was not measured is taken to cost what the other one does."""
        seconds, draft, plain = [], [], []
        for kind in KINDS:
            found = self.samples.get(kind) or next(iter(self.samples.values()))
            contexts = sorted(found, key=int)
            rounds = [_all_sizes(found[c]["drafted"], self.sizes) for c in contexts]
            alone = np.asarray([found[c]["plain"] for c in contexts])
            extra = np.maximum([r[self.sizes.index(self.rows)] for r in rounds] - alone, 0.0)
            passes = np.maximum(np.asarray(rounds) - extra[:, None], 1e-9)
            at = np.asarray([float(c) for c in contexts])
            seconds.append(_over_contexts(at, passes))
            draft.append(_over_contexts(at, extra[:, None])[:, 0])
            plain.append(_over_contexts(at, alone[:, None])[:, 0])
        alone = np.asarray(plain)
        # On a toy a pass over many tokens may well take no longer than one over a few.
        return CostTable.make(self.sizes, seconds, CONTEXTS, np.asarray(draft), plain=alone, rows=self.rows, quiet=True)


def directory() -> Path:
    """Where profiles are kept."""
    return cache_dir() / "profiles"


def bind(policy: Policy, pair: Pair, rows: int, capacity: int, sampled: bool) -> Policy:
    """``policy`` with the costs of this machine, if it needs them and has none; a quick profile is made at first use."""
    if not isinstance(policy, Priced) or policy.cost is not None:
        return policy
    try:
        table = profile(pair, rows, capacity, KINDS[1:] if sampled else KINDS[:1], quick=True).table
    except NotTimed as error:
        # Requests of such a target end with an error of their own; until then every token costs the same.
        _log.warning("%s", error)
        sizes = policy.token_sizes(rows, check_policy(policy, pair.model.draft))
        table = CostTable.make(sizes, sizes, CONTEXTS, rows=rows)
    return policy.replace(cost=table)  # type: ignore[attr-defined]  # flax.struct adds replace


def profile(
    pair: Pair,
    rows: int,
    capacity: int,
    kinds: Sequence[str] = KINDS,
    quick: bool = False,
    fresh: bool = False,
) -> Profile:
    """The costs of a batch of ``rows`` at contexts up to ``capacity``; what the cache lacks is measured and kept.

    Args:
      kinds: "greedy", "sampled" or both: drawing from a large vocabulary takes time too.
      quick: few repeats, and of the context sizes the first, the middle and the last only.
      fresh: measure everything anew.

    Raises:
      RequestError: no draft, or an unknown kind. NotTimed: the target's logits are not finite.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise RequestError(f"kinds={list(kinds)!r} is not legal; legal: {', '.join(KINDS)}")
    policy = _policy(pair)
    slots = check_policy(policy, pair.model.draft)
    sizes = policy.token_sizes(rows, slots)
    identity = fingerprint(pair, rows, sizes)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = directory() / f"{digest}.json"
    samples: Samples = {} if fresh else _cached(path, identity, digest)
    contexts = context_sizes(capacity)
    if quick:
        contexts = tuple(sorted({contexts[0], contexts[len(contexts) // 2], contexts[-1]}))
    missing = [(kind, c) for kind in kinds for c in contexts if str(c) not in samples.get(kind, {})]
    if missing:
        _log.info("measuring rounds of %d rows at contexts up to %d", rows, capacity)
        for (kind, context), found in _measure(pair, rows, capacity, missing, quick).items():
            samples.setdefault(kind, {})[str(context)] = found
        _known[digest] = samples
        with contextlib.suppress(OSError):  # a cache that cannot be written is measured again by the next process
            save_costs(path, {"samples": samples, "conditions": _conditions(quick)}, identity)
    return Profile(rows, sizes, samples, identity, path if path.exists() else None)


def load_profile(path: str | os.PathLike[str], pair: Pair, rows: int) -> Profile:
    """A saved profile of this pair, machine and batch size.

    Raises:
      RequestError: missing, damaged, or measured on something else.
    """
    policy = _policy(pair)
    sizes = policy.token_sizes(rows, check_policy(policy, pair.model.draft))
    identity = fingerprint(pair, rows, sizes)
    samples = load_costs(path, identity).get("samples")
    if not _usable(samples):
        raise RequestError(f"cost table {path} is damaged: its samples are not seconds by kind, context and tokens")
    assert isinstance(samples, dict)
    return Profile(rows, sizes, samples, identity, Path(path))


def fingerprint(pair: Pair, rows: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that the times depend on."""
    kept = pair.params.get("draft", {}).get("vocabulary")
    return {
        "model": hashlib.sha256(repr(pair.model).encode()).hexdigest()[:16],
        "draft_vocabulary": None if kept is None else int(kept.shape[0]),
        "dtype": jnp.dtype(pair.dtype).name,
        "mesh": None,
        "rows": rows,
        "sizes": list(sizes),
        **_machine(),
    }


@functools.cache
def _machine() -> dict[str, Any]:
    return machine()


def _policy(pair: Pair) -> Adaptive | Observed:
    head = pair.model.draft is not None and pair.model.draft.confidence_head
    return Adaptive() if head else Observed()


def _cached(path: Path, identity: Mapping[str, Any], digest: str) -> Samples:
    if digest in _known:
        return _known[digest]
    try:
        samples = load_costs(path, identity).get("samples") if path.exists() else None
    except RequestError as error:
        _log.warning("%s; it is measured anew", error)
        return {}
    return _known.setdefault(digest, samples) if _usable(samples) and isinstance(samples, dict) else {}


def _usable(samples: Any) -> bool:
    def seconds(x: Any) -> bool:
        return isinstance(x, float) and np.isfinite(x) and x > 0

    try:
        return bool(samples) and all(
            kind in KINDS and contexts and int(c) > 0 and seconds(found["plain"]) and found["drafted"]
            and all(int(n) > 0 and seconds(x) for n, x in found["drafted"].items())
            for kind, contexts in samples.items()
            for c, found in contexts.items()
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _conditions(quick: bool) -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"quick": quick, "measured": now, "load": load}


def _all_sizes(found: Mapping[str, float], sizes: Sequence[int]) -> np.ndarray:
    """Seconds of every size; a context too short for a size has none of its own."""
    known = sorted(int(n) for n in found)
    return np.interp(sizes, known, [found[str(n)] for n in known])


def _over_contexts(at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values [c, n]``, measured at ``at [c]``, over ``CONTEXTS``: straight lines, continued behind the last, rising."""
    values = np.flip(np.minimum.accumulate(np.flip(values, 0), 0), 0)  # a longer context is never cheaper
    columns = np.stack([np.interp(CONTEXTS, at, column) for column in values.T], axis=1)
    if len(at) > 1:
        beyond = np.maximum(np.asarray(CONTEXTS) - at[-1], 0.0)[:, None]
        columns += beyond * ((values[-1] - values[-2]) / (at[-1] - at[-2]))[None, :]
    return columns


class NotTimed(RequestError):
    """No round ran as it was asked for."""


class _Loop:
    """The decoding loop of a batch, to be timed with given lengths."""

    def __init__(self, pair: Pair, rows: int, capacity: int) -> None:
        self.pair, self.rows, self.capacity = pair, rows, capacity
        policy = _policy(pair)
        self.slots = check_policy(policy, pair.model.draft)
        self.sizes = policy.token_sizes(rows, self.slots)
        unknown = np.broadcast_to(np.asarray(self.sizes, float), (2, len(CONTEXTS), len(self.sizes)))
        self.policy = policy.replace(cost=CostTable.make(self.sizes, unknown, CONTEXTS, rows=rows))
        ids = np.random.default_rng(0).integers(0, pair.model.target.vocab_size, (rows, capacity - 1))
        self.state = self._reset(
            new_state(
                pair.model,
                ids.tolist(),
                SamplingState.from_params([SamplingParams()] * rows),
                [capacity] * rows,
                (),
                capacity,
                pair.dtype,
            ),
            KINDS[0],
            2,
            rows,
        )

    def _reset(self, state: DecodeState, kind: str, length: int, active: int) -> DecodeState:
        def numbers(value: int) -> jax.Array:
            return jnp.asarray(np.full(self.rows, value, np.int32))

        log = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.log)
        temperature = float(kind == "sampled")
        params = [SamplingParams(temperature=temperature, seed=i, coupled=False) for i in range(self.rows)]
        return state.replace(
            length=numbers(length),
            prompt_length=numbers(length - 1),
            limit=numbers(self.capacity),
            status=jnp.asarray(np.where(np.arange(self.rows) < active, RUNNING, IDLE).astype(np.int32)),
            sampling=SamplingState.from_params(params),
            log=log,
            memory=self.policy.memory(self.rows, self.slots),
        )

    def seconds(self, kind: str, context: int, active: int, drafts: int) -> float | None:
        """Of one round; None where the context has no room for so many drafts, or an answer ended."""
        step = self.slots + 1
        smallest = context == context_sizes(self.capacity)[0]
        first = 2 if smallest else context // 2 + 2
        rounds = ROUNDS if context - first >= (ROUNDS + 1) * step else 1
        length = max(first, context - (rounds + 1) * step)
        state = jax.block_until_ready(self._reset(self.state, kind, length, active))
        policy = self.policy.replace(force=np.int32(drafts))
        start = time.perf_counter()
        state = decode(self.pair.model, self.pair.params, state, policy, np.int32(rounds))
        state.length.block_until_ready()
        elapsed = time.perf_counter() - start
        self.state = state
        done = int(np.asarray(state.log.rounds).sum()), int(np.asarray(state.log.verified).sum())
        return elapsed / rounds if done == (rounds * active, rounds * max(drafts, 0)) else None


def _measure(
    pair: Pair, rows: int, capacity: int, wanted: Sequence[tuple[str, int]], quick: bool
) -> dict[tuple[str, int], dict[str, Any]]:
    """Medians of interleaved turns; what was run is checked against what was asked for (PITFALLS B12)."""
    loop = _Loop(pair, rows, capacity)
    # A pass over fewer tokens than the batch has rows occurs when the other rows have ended.
    cases = [(n, min(n, rows), max(n - rows, 0)) for n in loop.sizes]
    loop.seconds(wanted[0][0], wanted[0][1], rows, PLAIN)  # compile
    times: dict[tuple[str, int, int], list[float]] = {}
    began = time.perf_counter()
    for turn in range(QUICK_REPEATS if quick else REPEATS):
        if quick and turn and time.perf_counter() - began > QUICK_SECONDS:
            break
        for kind, context in wanted if turn % 2 == 0 else reversed(wanted):
            for tokens, active, drafts in [(PLAIN, rows, PLAIN), *cases]:
                took = loop.seconds(kind, context, active, drafts)
                if took is not None:
                    times.setdefault((kind, context, tokens), []).append(took)
    result = {}
    for kind, context in wanted:
        found = {n: statistics.median(times[kind, context, n]) for n in loop.sizes if (kind, context, n) in times}
        plain = times.get((kind, context, PLAIN))
        if plain is None or not found:
            raise NotTimed(f"the target of {pair.target_name} cannot be timed: its logits are not finite")
        result[kind, context] = {"plain": statistics.median(plain), "drafted": {str(n): x for n, x in found.items()}}
    return result
