"""What a token is drawn from, and the noise it is drawn with (SPEC section 4).

One definition turns logits into the distribution that is sampled, for target (p) and draft (q) alike. Filters are
thresholds on float32 values, found by bisection over their bit patterns instead of a sort; tokens that tie with the
threshold are kept. Axes: B rows (requests), n positions, V vocabulary; ``...`` stands for ``[B]`` or ``[B, n]``.
"""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import RequestError

GREEDY_BELOW = 1e-5
MAX_TEMPERATURE = 1e30  # every token is equally likely long before; float32 could not hold much more
MIN_WEIGHT = 1e-3


class Purpose(enum.IntEnum):
    """What a draw is for; the last thing folded into its key, so that no key ever serves two."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples.

    Attributes:
      temperature: 0 is greedy (so is anything below 1e-5); None means 1; at most 1e30.
      top_k: keep the k most likely tokens and what ties with the last of them; 0: all; 1 is greedy.
      top_p: then keep the most likely tokens whose mass reaches ``top_p``; 1: all.
      min_p: then keep tokens at least ``min_p`` times as likely as the most likely one; 0: all.
      seed: the request's own randomness, in [0, 2**32); None: a fresh one at every call.
      coupled: draft and target draw with the same noise, so that the tokens are those of plain decoding with this seed,
        whatever the draft, the scheduler and the batch; costs some acceptance. None: where a seed is given and the
        scheduler's lengths depend on more than the request (``generate`` decides).
      weight: what a token of this request is worth beside those of its batch when there is not room to check them all.

    Raises:
      RequestError: a value outside its range, or filters on a greedy request, which would mean nothing.
    """

    temperature: float | None = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    coupled: bool | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        t = 1.0 if self.temperature is None else self.temperature
        if not _is_number(t) or not 0 <= t <= MAX_TEMPERATURE:
            raise RequestError(f"temperature={self.temperature!r} must be a number in [0, {MAX_TEMPERATURE:g}]")
        object.__setattr__(self, "temperature", float(t))
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int | np.integer) or not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k={self.top_k!r} must be an integer of at least 0 (0: off)")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p!r} must lie in (0, 1]")
        if not _is_number(self.min_p) or not 0 <= self.min_p < 1:
            raise RequestError(f"min_p={self.min_p!r} must lie in [0, 1)")
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32):
            raise RequestError(f"seed={seed!r} must be None or an integer in [0, 2**32)")
        if self.coupled is not None and not isinstance(self.coupled, bool | np.bool_):
            raise RequestError(f"coupled={self.coupled!r} must be True, False or None")
        if not _is_number(self.weight) or not MIN_WEIGHT <= self.weight <= 1 / MIN_WEIGHT:
            raise RequestError(f"weight={self.weight!r} must be a number in [{MIN_WEIGHT:g}, {1 / MIN_WEIGHT:g}]")
        if t == 0 and (self.top_k > 1 or self.top_p < 1 or self.min_p > 0):
            raise RequestError(
                f"temperature=0 is greedy and contradicts top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p};"
                " give a temperature above 0 or leave the filters out"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature is not None and (self.temperature < GREEDY_BELOW or self.top_k == 1)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


class SamplingState(flax.struct.PyTreeNode):
    """One row per request: temperature float32 (0: greedy), top_k int32, top_p and min_p float32, all ``[B]``; key:
    uint32 ``[B, 2]``, the threefry key of the request's seed; coupled: bool ``[B]``; weight: float32 ``[B]``."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array
    coupled: jax.Array
    weight: jax.Array

    @staticmethod
    def from_params(params: Sequence[SamplingParams]) -> SamplingState:
        """Rows from settings; a request without a seed gets a fresh one."""
        seeds = [secrets.randbits(63) if p.seed is None else int(p.seed) for p in params]
        # The threefry key of a 64-bit seed is its two halves; ``jax.random.key`` would truncate it without x64.
        key = np.asarray([[s >> 32, s & 0xFFFFFFFF] for s in seeds], np.uint32).reshape(-1, 2)
        # Filters mean nothing to a greedy row; left on, they would make every row of the batch pay for them.
        rows = [SamplingParams() if p.greedy else p for p in params]
        return SamplingState(
            temperature=jnp.asarray(np.asarray([p.temperature for p in rows], np.float32)),
            top_k=jnp.asarray(np.asarray([p.top_k for p in rows], np.int32)),
            top_p=jnp.asarray(np.asarray([p.top_p for p in rows], np.float32)),
            min_p=jnp.asarray(np.asarray([p.min_p for p in rows], np.float32)),
            key=jnp.asarray(key),
            coupled=jnp.asarray(np.asarray([bool(p.coupled) for p in params], bool)),
            weight=jnp.asarray(np.asarray([p.weight for p in params], np.float32)),
        )


def is_finite_row(logits: jax.Array) -> jax.Array:
    """Whether a row of ``logits [..., V]`` can be sampled from: no NaN, no +inf, at least one finite entry (bool ``[...]``)."""
    top = jnp.max(logits, axis=-1)  # NaN and +inf both win a maximum
    return jnp.isfinite(top)


def best_token(logits: jax.Array) -> jax.Array:
    """The lowest id of the largest entries of ``logits [..., V]``, int32 ``[...]``; in range even for a row of NaN.

    A maximum and a search for it, which XLA:CPU runs faster than ``jnp.argmax``.
    """
    vocab = logits.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    at_top = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(at_top, ids, vocab - 1), axis=-1)


def log_probs(logits: jax.Array, sampling: SamplingState) -> tuple[jax.Array, jax.Array]:
    """The distribution that plain decoding would sample from.

    Temperature, then top-k, top-p and min-p, each on the renormalised rest; a greedy row is one-hot at the lowest of its
    largest entries. Always computed in float32 (PITFALLS L01). A batch pays only for what one of its rows asks for.

    Args:
      logits: ``[B, V]`` or ``[B, n, V]``.

    Returns: float32 log-probabilities of the same shape, -inf outside the kept tokens, and bool ``[...]`` whether the row
    was usable; an unusable row is -inf throughout.
    """
    logits = logits.astype(jnp.float32)
    finite = is_finite_row(logits)

    def per_row(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], *(1,) * (logits.ndim - 1))

    def one_hot() -> jax.Array:
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(best_token(logits)[..., None] == ids, 0.0, -jnp.inf)

    def soft() -> jax.Array:
        # Shifting before dividing keeps tiny temperatures finite; the largest entry is 0 from here on, kept by every filter.
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = shifted / per_row(jnp.where(greedy, 1.0, sampling.temperature))
        kept = _filter(scaled, sampling, per_row)
        return kept - jnp.log(jnp.sum(jnp.exp(kept), axis=-1, keepdims=True))

    def unused() -> jax.Array:
        return jnp.zeros_like(logits)

    greedy = sampling.temperature == 0
    hot = jax.lax.cond(jnp.any(greedy), one_hot, unused)
    out = jnp.where(per_row(greedy), hot, jax.lax.cond(jnp.all(greedy), unused, soft))
    return jnp.where(finite[..., None], out, -jnp.inf), finite


def _filter(scaled: jax.Array, sampling: SamplingState, per_row: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Set what top-k, top-p and min-p remove from ``scaled`` (log weights, largest 0) to -inf."""

    def keep(x: jax.Array, on: jax.Array, threshold: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def cut(x: jax.Array) -> jax.Array:
            return jnp.where(~per_row(on) | (x >= threshold(x)), x, -jnp.inf)

        return jax.lax.cond(jnp.any(on), cut, lambda x: x, x)

    def kth(x: jax.Array) -> jax.Array:
        wanted = per_row(sampling.top_k)
        return _largest(x, lambda kept: jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32) >= wanted)

    def nucleus(x: jax.Array) -> jax.Array:
        weight = jnp.exp(x)
        goal = per_row(sampling.top_p) * jnp.sum(weight, axis=-1, keepdims=True)
        return _largest(x, lambda kept: jnp.sum(jnp.where(kept, weight, 0.0), axis=-1, keepdims=True) >= goal)

    def floor(x: jax.Array) -> jax.Array:
        return jnp.log(per_row(jnp.maximum(sampling.min_p, jnp.finfo(jnp.float32).tiny)))

    scaled = keep(scaled, sampling.top_k > 0, kth)
    scaled = keep(scaled, sampling.top_p < 1, nucleus)
    return keep(scaled, sampling.min_p > 0, floor)


def _largest(x: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest float32 t for which the entries of ``x <= 0`` at or above t are ``enough``, ``[..., 1]``; -inf if none is.

    Non-positive floats rise as their bit patterns fall, so 31 halvings of the patterns find t exactly.
    """
    shape = (*x.shape[:-1], 1)
    low = jnp.full(shape, 0x80000000, jnp.uint32)  # -0.0: keeps the fewest
    high = jnp.full(shape, 0xFF800000, jnp.uint32)  # -inf: keeps all

    def halve(_: int, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span
        middle = low + (high - low) // 2
        ok = enough(x >= jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, low, jnp.minimum(middle + 1, high)), jnp.where(ok, middle, high)

    _, high = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _keys(key: jax.Array, positions: jax.Array, purpose: jax.Array | int) -> jax.Array:
    """Typed keys ``[B, n]`` of (request, absolute position, purpose)."""

    def one(data: jax.Array, position: jax.Array, purpose: jax.Array) -> jax.Array:
        base = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(base, position), purpose)

    purposes = jnp.broadcast_to(jnp.asarray(purpose, jnp.int32), positions.shape)
    return jax.vmap(lambda data, at, use: jax.vmap(lambda a, u: one(data, a, u))(at, use))(key, positions, purposes)


def uniforms(key: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Uniform float32 ``[B, n]`` in [0, 1) for ``key [B, 2]`` and absolute ``positions [B, n]``."""
    return jax.vmap(jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32)))(_keys(key, positions, purpose))


def gumbel(key: jax.Array, positions: jax.Array, purpose: jax.Array | int, vocab: int) -> jax.Array:
    """Gumbel noise float32 ``[B, n, V]``; purpose: one for all, or int32 ``[B, n]``.

    Drawn in mode "high": with the default 23 bits the noise ends near 16, and tokens less likely than about e^-17 could
    never be drawn (PITFALLS L20).
    """
    keys = _keys(key, positions, purpose)
    return jax.vmap(jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32, mode="high")))(keys)


def draft_noise(sampling: SamplingState, length: jax.Array, slot: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise ``[B, V]`` that drafts the token ``slot`` (from 0) places behind position ``length [B]``.

    A coupled row takes the noise that the target draws with at that position. Any other row takes noise that no other round
    uses: a token that was drafted and not committed has left its mark in the confidences of that round, which a scheduler
    may remember; the same noise again would tell it about the token that it decides about.
    """
    position = length + jnp.where(sampling.coupled, slot, 0)
    purpose = jnp.where(sampling.coupled, int(Purpose.RESIDUAL), int(Purpose.DRAFT) + len(Purpose) * slot)
    return gumbel(sampling.key, position[:, None], purpose[:, None], vocab)[:, 0]


def draw(log_p: jax.Array, noise: jax.Array) -> jax.Array:
    """A token per row of ``log_p [..., V]`` by the Gumbel-max rule, int32; never one of zero mass while there is any."""
    score = jnp.where(log_p > -jnp.inf, log_p + noise, -jnp.inf)
    return best_token(score)
