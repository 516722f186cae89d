"""The decode state: one frozen pytree, allocated once at full capacity and only replaced (STYLE: one clock).

Axes: B rows (requests), S capacity in tokens, n slots drafted, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.cache import KVCache, empty_cache
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.sampling import SamplingState

# Result codes of a row; sentences are made on the host.
RUNNING, STOP, LENGTH, ERROR, IDLE = range(5)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The static half of a pair; hashable, so that it can be a static argument of a jitted function."""

    target: TargetConfig
    draft: DraftConfig | None = None

    @property
    def drafter(self) -> DraftConfig:
        """The draft's configuration, where ``check_policy`` has made sure that there is one."""
        assert self.draft is not None
        return self.draft


class RoundLog(flax.struct.PyTreeNode):
    """What happened in every round. rounds: int32 ``[B]``; verified, accepted, committed: int32 ``[B, S]``, one entry a
    round (drafts checked, drafts accepted, tokens committed); degenerate: int32 ``[B]``, rounds with an unusable draft row;
    confidence: float32 ``[B, S, n]``, the confidence head's logits of every round and slot, or None: not recorded (see
    ``record_confidence``)."""

    rounds: jax.Array
    verified: jax.Array
    accepted: jax.Array
    committed: jax.Array
    degenerate: jax.Array
    confidence: jax.Array | None = None


class DecodeState(flax.struct.PyTreeNode):
    """All requests of a batch.

    Attributes:
      tokens: int32 ``[B, S]``, committed on ``[0, length)``.
      length: int32 ``[B]``, the only clock of a row: token ``length - 1`` is the anchor, committed but unseen by the
        target; both caches are valid on ``[0, length - 1)``. While a prompt is read the clock stands on its next token.
      prompt_length, limit: int32 ``[B]``; a row ends when ``length`` reaches ``limit``.
      status: int32 ``[B]``, one of the codes above.
      is_stop: bool ``[V]``; sampling: per-row settings and keys.
      draft_cache: None when nothing is drafted.
      memory: what the policy has learnt from earlier rounds, a pytree of its own; None for a policy that does not.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    limit: jax.Array
    status: jax.Array
    is_stop: jax.Array
    sampling: SamplingState
    target_cache: KVCache
    draft_cache: KVCache | None
    log: RoundLog
    memory: Any = None

    @property
    def draft_context(self) -> KVCache:
        """The drafter's cache, where something is drafted."""
        assert self.draft_cache is not None
        return self.draft_cache

    @property
    def context(self) -> jax.Array:
        """Cached tokens of every row, int32 ``[B]``."""
        return self.length - 1

    @property
    def decoding(self) -> jax.Array:
        """Rows whose prompt is read and which have not ended, bool ``[B]``."""
        return (self.status == RUNNING) & (self.length > self.prompt_length)

    @property
    def reading(self) -> jax.Array:
        """Rows whose prompt is not yet read to its end, bool ``[B]``."""
        return (self.status == RUNNING) & (self.length <= self.prompt_length)


def new_state(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingState,
    limits: Sequence[int],
    stop_ids: Sequence[int],
    capacity: int,
    dtype: jnp.dtype,
    drafts: bool = True,
    memory: Any = None,
) -> DecodeState:
    """A fresh state for ``prompts`` (already checked, see ``generate``); an empty prompt marks an idle row.

    Args:
      limits: total tokens (prompt included) at which each row ends; at most ``capacity``.
      drafts: whether to allocate the drafter's context cache.
      memory: of the policy, before its first round.
    """
    rows = len(prompts)
    tokens = np.zeros((rows, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    is_stop = np.zeros(model.target.vocab_size, bool)
    is_stop[list(stop_ids)] = True
    t, d = model.target, model.draft if drafts else None

    def counters() -> jax.Array:
        return jnp.zeros((rows, capacity), jnp.int32)

    return DecodeState(
        tokens=jnp.asarray(tokens),
        length=jnp.ones(rows, jnp.int32),
        prompt_length=jnp.asarray(lengths),
        limit=jnp.asarray(np.asarray(limits, np.int32)),
        status=jnp.asarray(np.where(lengths > 0, RUNNING, IDLE).astype(np.int32)),
        is_stop=jnp.asarray(is_stop),
        sampling=sampling,
        target_cache=empty_cache(t.num_layers, rows, t.num_kv_heads, capacity, t.head_dim, dtype),
        draft_cache=None if d is None else empty_cache(d.num_layers, rows, d.num_kv_heads, capacity, d.head_dim, dtype),
        log=RoundLog(jnp.zeros(rows, jnp.int32), counters(), counters(), counters(), jnp.zeros(rows, jnp.int32)),
        memory=memory,
    )


def record_confidence(state: DecodeState, slots: int) -> DecodeState:
    """``state`` with a log that keeps the confidence logits of every round from here on; ``slots``: those of the policy.

    Without this the log has no such array and the decode loop no trace of it.
    """
    rows, capacity = state.tokens.shape
    return state.replace(log=state.log.replace(confidence=jnp.zeros((rows, capacity, slots), jnp.float32)))
