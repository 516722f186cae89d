"""Training batches: sampled anchors, packed token lists and every index that the objective needs (SPEC section 6).

A microbatch is a flat list of N tokens of up to R conversations, laid end to end, and a flat list of M blocks, one an
anchor; matrix products run over what is there, so short conversations waste nothing. All of it is a function of (seed,
step): nothing else has to be saved to resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import numpy as np

from dspark_jax.cache import TokenBatch
from dspark_jax.errors import RequestError
from dspark_jax.train.rows import Example, anchor_candidates

TEACHER_CHUNK = 128  # P is a multiple of it


class Batch(flax.struct.PyTreeNode):
    """One microbatch. R conversations, N tokens, M blocks, n slots trained of every block, P teacher positions.

    Attributes:
      tokens, rows, positions: int32 ``[N]``; valid: bool ``[N]``; lengths: int32 ``[R]``, tokens of every conversation.
      anchors: int32 ``[M]``, where in the list each block's anchor stands; block_rows, block_ranks: int32 ``[M]``, its
        conversation, and its rank among that conversation's blocks; blocks: int32 ``[R]``, blocks of every conversation.
      labels, previous: int32 ``[M, n]``, the token that a slot predicts, and the one before it.
      mask: bool ``[M, n]``, slots that count; dummies have none.
      teacher_positions: int32 ``[P]``, places in the list; teacher: int32 ``[M, n]``, index into them.
      length, ranks: static: the most tokens, and the most blocks, of one conversation.
    """

    tokens: jax.Array
    rows: jax.Array
    positions: jax.Array
    valid: jax.Array
    lengths: jax.Array
    anchors: jax.Array
    block_rows: jax.Array
    block_ranks: jax.Array
    blocks: jax.Array
    labels: jax.Array
    previous: jax.Array
    mask: jax.Array
    teacher_positions: jax.Array
    teacher: jax.Array
    length: int = flax.struct.field(pytree_node=False)
    ranks: int = flax.struct.field(pytree_node=False)

    @property
    def token_batch(self) -> TokenBatch:
        """The tokens as the target's forward takes them: every conversation starts at position 0."""
        nothing = jax.numpy.zeros_like(self.lengths)
        return TokenBatch(
            self.tokens, self.rows, self.positions, self.positions, self.valid, self.lengths, nothing, self.length
        )


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a microbatch."""

    rows: int
    tokens: int
    blocks: int
    slots: int
    length: int
    ranks: int

    @property
    def teacher_positions(self) -> int:
        most = min(self.tokens, self.blocks * self.slots)
        return -(-most // TEACHER_CHUNK) * TEACHER_CHUNK


def sample_anchors(mask: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to ``count`` anchors of one conversation, sorted, without repetition."""
    candidates = np.flatnonzero(anchor_candidates(mask))
    if len(candidates) > count:
        candidates = rng.choice(candidates, count, replace=False)
    return np.sort(candidates).astype(np.int32)


def slot_mask(mask: np.ndarray, anchors: np.ndarray, slots: int) -> np.ndarray:
    """Slots that count, bool ``[a, n]``: slot k (1-based) of anchor a while a+k lies inside the conversation and every
    token from a+1 to a+k is supervised. A token is judged by its own mask, not by its predecessor's (PITFALLS T01)."""
    padded = np.concatenate([mask, np.zeros(slots, bool)])
    return np.logical_and.accumulate(padded[anchors[:, None] + np.arange(1, slots + 1)[None]], axis=1)


def build(examples: Sequence[Example], anchors: Sequence[np.ndarray], shape: Shape) -> Batch:
    """Lay conversations end to end and index their blocks.

    Args:
      anchors: per conversation, positions in it; a negative one is a dummy that contributes nothing.

    Raises:
      RequestError: they do not fit ``shape``.
    """
    total = sum(len(e.tokens) for e in examples)
    count = sum(len(a) for a in anchors)
    longest = max((len(e.tokens) for e in examples), default=0)
    ranks = max((len(a) for a in anchors), default=0)
    if (
        len(examples) > shape.rows
        or total > shape.tokens
        or count > shape.blocks
        or longest > shape.length
        or ranks > shape.ranks
    ):
        raise RequestError(
            f"a microbatch of {len(examples)} conversations, {total} tokens (longest {longest}) and {count} blocks (most"
            f" {ranks}) does not fit {shape}"
        )
    n = shape.slots
    tokens, rows, positions = (np.zeros(shape.tokens, np.int32) for _ in range(3))
    valid = np.zeros(shape.tokens, bool)
    lengths, blocks = np.zeros(shape.rows, np.int32), np.zeros(shape.rows, np.int32)
    where, block_rows, block_ranks = (np.zeros(shape.blocks, np.int32) for _ in range(3))
    labels, previous, teacher_at = (np.zeros((shape.blocks, n), np.int32) for _ in range(3))
    mask = np.zeros((shape.blocks, n), bool)
    start = block = 0
    for row, (example, chosen) in enumerate(zip(examples, anchors, strict=True)):
        size, stop = len(example.tokens), start + len(example.tokens)
        tokens[start:stop], rows[start:stop], positions[start:stop] = example.tokens, row, np.arange(size)
        valid[start:stop], lengths[row], blocks[row] = True, size, len(chosen)
        here = slice(block, block + len(chosen))
        real = chosen >= 0
        at = np.maximum(chosen, 0)
        where[here], block_rows[here], block_ranks[here] = start + at, row, np.arange(len(chosen))
        slot = at[:, None] + np.arange(1, n + 1)[None]
        mask[here] = slot_mask(example.mask, at, n) & real[:, None]
        inside = np.minimum(slot, size - 1)
        labels[here] = example.tokens[inside]
        previous[here] = example.tokens[np.minimum(slot - 1, size - 1)]
        teacher_at[here] = start + np.minimum(slot - 1, size - 1)
        start, block = stop, block + len(chosen)
    used, index = np.unique(teacher_at[mask], return_inverse=True)
    teacher_positions = np.zeros(shape.teacher_positions, np.int32)
    teacher_positions[: len(used)] = used
    teacher = np.zeros((shape.blocks, n), np.int32)
    teacher[mask] = index.reshape(-1)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "rows": rows,
        "positions": positions,
        "valid": valid,
        "lengths": lengths,
        "anchors": where,
        "block_rows": block_rows,
        "block_ranks": block_ranks,
        "blocks": blocks,
        "labels": labels,
        "previous": previous,
        "mask": mask,
        "teacher_positions": teacher_positions,
        "teacher": teacher,
    }
    return Batch(**arrays, length=shape.length, ranks=shape.ranks)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Which conversations and anchors a step sees, from (seed, step) alone.

    Every epoch is a new permutation; a microbatch takes conversations in that order until one more would not fit. An epoch
    that does not fill its last step is continued with the next one.

    Attributes:
      examples: all conversations; pool: int ``[p]``, indices of those that this sampler takes.
      microbatches: per step (accumulation times data shards).
    """

    examples: Sequence[Example]
    pool: np.ndarray
    shape: Shape
    anchors: int
    microbatches: int
    seed: int

    def __post_init__(self) -> None:
        longest = max(len(self.examples[i].tokens) for i in self.pool)
        if longest > min(self.shape.length, self.shape.tokens) or self.anchors > min(self.shape.ranks, self.shape.blocks):
            raise RequestError(
                f"a conversation of {longest} tokens with {self.anchors} anchors does not fit a microbatch of {self.shape}"
            )

    def _order(self, epoch: int) -> np.ndarray:
        return self.pool[np.random.default_rng((self.seed, 0, epoch)).permutation(len(self.pool))]

    def schedule(self, steps: int) -> list[list[list[tuple[int, int]]]]:
        """For each of the first ``steps`` steps its microbatches, as lists of (epoch, conversation)."""
        result: list[list[list[tuple[int, int]]]] = []
        epoch, order, at = 0, self._order(0), 0
        sizes = [(len(e.tokens), min(self.anchors, int(anchor_candidates(e.mask).sum()))) for e in self.examples]
        while len(result) < steps:
            step = []
            for _ in range(self.microbatches):
                rows: list[tuple[int, int]] = []
                tokens = blocks = 0
                while len(rows) < self.shape.rows:
                    index = int(order[at])
                    size, count = sizes[index]
                    if tokens + size > self.shape.tokens or blocks + count > self.shape.blocks:
                        break
                    rows.append((epoch, index))
                    tokens, blocks, at = tokens + size, blocks + count, at + 1
                    if at == len(order):
                        epoch, at = epoch + 1, 0
                        order = self._order(epoch)
                step.append(rows)
            result.append(step)
        return result

    def batch(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """A microbatch of (epoch, conversation) pairs; anchors follow from (seed, epoch, conversation)."""
        examples = [self.examples[i] for _, i in rows]
        anchors = [
            sample_anchors(self.examples[i].mask, self.anchors, np.random.default_rng((self.seed, 1, epoch, i)))
            for epoch, i in rows
        ]
        return build(examples, anchors, self.shape)
