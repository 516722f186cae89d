"""The drafter's sequential stage: every slot's logits get a bias from the token before, a token is drawn, and so on."""

from __future__ import annotations

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.markov import pallas_gpu, pallas_tpu, reference
from pallas_kernels.markov.types import Block, Confidence, Head, Kind

__all__ = ["Block", "Confidence", "Head", "Kind", "log_q", "propose"]

MAX_VOCAB = 2**24  # ids travel through float32


def propose(
    hidden: jax.Array,
    base_logits: jax.Array,
    anchor: jax.Array,
    head: Head,
    confidence: Confidence | None = None,
    *,
    temperature: jax.Array | None = None,
    noise: jax.Array | None = None,
    kind: Kind = "vanilla",
    backend: dispatch.Backend | None = None,
    interpret: bool = False,
) -> Block:
    """Draft a block from left to right. Axes: B rows, n slots, D hidden width, r rank, V vocabulary that is drafted from.

    Slot k: logits = base + w2 f(w1[token before], hidden); the token is argmax(log q + noise) with q = softmax(logits /
    temperature), or argmax(logits) for a greedy row or without noise; ties go to the lowest id. Filters are not applied: a
    filtered draft is drawn elsewhere. Gates and memory are computed in float32 and rounded to the weights' dtype where a
    matrix product reads them.

    Args:
      hidden: ``[B, n, D]``; base_logits: float32 ``[B, n, V]``; anchor: int32 ``[B]``, target id of the token before slot 0.
      head, confidence: weights, see there; float32 or bfloat16.
      temperature: float32 ``[B]``, 0: greedy; noise: Gumbel noise float32 ``[B, n, V]``. Both or neither.
      backend: "reference", "pallas_tpu", "pallas_gpu" (Triton); a named one runs or raises. None: the platform's kernel, the
        reference on a CPU.
      interpret: run a named kernel in Pallas' interpreter (tests).

    Raises:
      ValueError: arguments that do not fit each other; a backend that cannot serve them.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r} is unknown; legal: {', '.join(get_args(Kind))}")
    if hidden.ndim != 3 or 0 in hidden.shape:
        raise ValueError(f"hidden has shape {hidden.shape}; legal: [B, n, D], none of them 0")
    batch, slots, width = hidden.shape
    if head.w2.ndim != 2:
        raise ValueError(f"w2 has shape {head.w2.shape}; legal: [V, r]")
    vocab, rank = head.w2.shape
    if not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"w2 has {vocab} rows; legal: 1 to {MAX_VOCAB}")
    _check("base_logits", base_logits, jnp.float32, (batch, slots, vocab))
    _check("anchor", anchor, jnp.int32, (batch,))
    inputs = {"vanilla": None, "gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}[kind]
    if (head.proj is None) != (inputs is None) or (head.bias is None) != (inputs is None):
        raise ValueError(f"kind={kind!r} {'takes no' if inputs is None else 'needs'} proj and bias")
    if inputs is not None and head.proj is not None and head.bias is not None:
        _check("proj", head.proj, head.w2.dtype, inputs)
        _check("bias", head.bias, head.bias.dtype, inputs[:1])
    if head.w1.ndim != 2 or head.w1.shape[1] != rank or (head.kept is None and head.w1.shape[0] != vocab):
        raise ValueError(f"w1 has shape {head.w1.shape}; legal: [{vocab if head.kept is None else 'W'}, {rank}], to fit w2")
    if head.kept is not None:
        _check("kept", head.kept, jnp.int32, (vocab,))
    if confidence is not None:
        if confidence.proj.shape not in ((1, width), (1, width + rank)):
            raise ValueError(f"confidence.proj has shape {confidence.proj.shape}; legal: (1, {width}) or (1, {width + rank})")
        _check("confidence.bias", confidence.bias, confidence.bias.dtype, (1,))
    if (temperature is None) != (noise is None):
        raise ValueError("temperature and noise come together, or neither for a greedy block")
    if temperature is not None and noise is not None:
        _check("temperature", temperature, jnp.float32, (batch,))
        _check("noise", noise, jnp.float32, (batch, slots, vocab))

    operands = (hidden, base_logits, anchor, head, confidence, temperature, noise)
    kernels = (functools.partial(module.propose, kind=kind, interpret=interpret) for module in (pallas_tpu, pallas_gpu))
    result = dispatch.run(backend, interpret, functools.partial(reference.propose, kind=kind), *kernels, *operands)
    assert isinstance(result, Block)
    return result


def log_q(block: Block, temperature: jax.Array, kept: jax.Array | None = None, vocab: int | None = None) -> jax.Array:
    """What the tokens of a sampled block were drawn from, float32 ``[B, n, V]``, or ``[B, n, vocab]`` with -inf outside
    ``kept``; one-hot for a greedy row, -inf throughout for an unusable one. The verify op does not need it spelled out."""
    assert block.logits is not None, "a greedy block has no distribution"
    logits, at = block.logits, block.tokens
    ids = jnp.arange(logits.shape[2], dtype=jnp.int32) if kept is None else kept
    greedy = (temperature == 0)[:, None, None]
    soft = (logits - block.top[..., None]) / jnp.where(greedy, 1.0, temperature[:, None, None]) - block.log_z[..., None]
    out = jnp.where(greedy, jnp.where(ids[None, None] == at[..., None], 0.0, -jnp.inf), soft)
    out = jnp.where(jnp.isfinite(jnp.max(logits, axis=2, keepdims=True)), out, -jnp.inf)
    if kept is None or vocab is None:
        return out
    return jnp.full((*out.shape[:2], vocab), -jnp.inf, jnp.float32).at[:, :, kept].set(out)


def _check(name: str, x: jax.Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if x.dtype != jnp.dtype(dtype):
        raise ValueError(f"{name} is {x.dtype}; legal: {jnp.dtype(dtype).name}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; legal: {shape}")
