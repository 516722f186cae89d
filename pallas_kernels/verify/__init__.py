"""The accept rule on raw target logits, fused: what the target keeps of a drafted block and the token it adds.

Two streamed passes over the vocabulary; nothing of the size of the logits is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.verify import pallas_gpu, pallas_tpu, reference
from pallas_kernels.verify.types import Filters, Mode, QNorm, Verdict

__all__ = ["Filters", "Mode", "QNorm", "Verdict", "verify"]

MAX_VOCAB = 2**24  # ids travel through float32


def verify(
    logits: jax.Array,
    log_q: jax.Array | None,
    tokens: jax.Array,
    scheduled: jax.Array,
    filters: Filters,
    *,
    q_norm: QNorm | None = None,
    uniform: jax.Array | None = None,
    noise: jax.Array | Callable[[jax.Array], jax.Array] | None = None,
    mode: Mode = "sample",
    soft: bool = False,
    backend: dispatch.Backend | None = None,
    interpret: bool = False,
) -> Verdict:
    """Judge the drafts of every request against the target. Axes: B requests, n slots, T = n + 1 positions, V vocabulary.

    p is the distribution that plain decoding samples from: temperature, then top-k, top-p and min-p, each on the rest of the
    one before, ties with a threshold kept; temperature 0 is one-hot at the lowest id of the largest logit. A draft is
    considered while its slot is below ``scheduled``, and the first refusal ends the run.

    * ``"sample"``: x_k is kept iff u q(x_k) < p(x_k). The next token comes from max(p - q, 0), with q zero when nothing was
      refused or q is unusable, and from p when that has no mass. A draft of q(x_k) = 0 was not drawn from q and is refused.
    * ``"greedy"``: x_k is kept iff it is the target's best token; that of the deciding position follows. Filters, q,
      uniforms and noise are not looked at.
    * ``"coupled"``: y_k = argmax(log p_k + g_k); x_k is kept iff it is y_k, and y of the deciding position follows.

    Args:
      logits: float32 or bfloat16 ``[B, T, V]``; computed with in float32.
      log_q: float32 ``[B, n, V]``, log-probabilities of what ``tokens`` were drawn from, -inf where nothing could be drawn
        (so everywhere outside a reduced draft vocabulary). Needed in mode "sample" and legal nowhere else.
      q_norm: given, ``log_q`` holds the draft's logits instead and this tells how to read them; saves writing log_q out.
      tokens: int32 ``[B, n]``; scheduled: int32 ``[B]`` in [0, n].
      filters: per-request settings, ``[B]`` each.
      uniform: float32 ``[B, n]`` in [0, 1), mode "sample".
      noise: Gumbel noise float32. Mode "sample": ``[B, V]``, or a function that returns it for the ``accepted [B]`` it is
        called with; mode "coupled": ``[B, T, V]``, the drafter's own of the same positions.
      soft: also return 1 - TV(p, q) of every slot; mode "sample".
      backend: "reference", "pallas_tpu", "pallas_gpu" (Triton); a named one runs or raises. None: the platform's kernel, the
        reference on a CPU.
      interpret: run a named kernel in Pallas' interpreter (tests).

    Raises:
      ValueError: arguments that do not fit each other or the mode; a backend that cannot serve them.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown; legal: {', '.join(get_args(Mode))}")
    _check("logits", logits, (jnp.float32, jnp.bfloat16), 3)
    batch, width, vocab = logits.shape
    if width < 1 or not 0 < vocab <= MAX_VOCAB or batch < 1:
        raise ValueError(f"logits has shape {logits.shape}; legal: [B, T, V], none of them 0, V at most {MAX_VOCAB}")
    slots = width - 1
    _check("tokens", tokens, (jnp.int32,), (batch, slots))
    _check("scheduled", scheduled, (jnp.int32,), (batch,))
    for name, value, dtype in zip(Filters._fields, filters, (jnp.float32, jnp.int32, jnp.float32, jnp.float32), strict=True):
        _check(name, value, (dtype,), (batch,))
    if mode == "sample":
        if log_q is None or uniform is None or noise is None:
            raise ValueError('mode="sample" needs log_q, uniform and noise')
        _check("log_q", log_q, (jnp.float32,), (batch, slots, vocab))
        if q_norm is not None:
            _check("q_norm.top", q_norm.top, (jnp.float32,), (batch, slots))
            _check("q_norm.log_z", q_norm.log_z, (jnp.float32,), (batch, slots))
        _check("uniform", uniform, (jnp.float32,), (batch, slots))
        if not callable(noise):
            _check("noise", noise, (jnp.float32,), (batch, vocab))
    elif log_q is not None or q_norm is not None or uniform is not None or soft:
        raise ValueError(f'mode="{mode}" takes no log_q, q_norm, uniform or soft: it does not look at q')
    elif mode == "greedy" and noise is not None:
        raise ValueError('mode="greedy" takes no noise')
    elif mode == "coupled":
        if noise is None or callable(noise):
            raise ValueError('mode="coupled" needs noise [B, T, V]')
        _check("noise", noise, (jnp.float32,), (batch, width, vocab))

    static: dict[str, Any] = {"mode": mode, "soft": soft}
    operands = [logits, log_q, q_norm, tokens, scheduled, filters, uniform]
    if callable(noise):
        static["noise"] = noise
    else:
        operands.append(noise)
    kernels = (functools.partial(module.verify, interpret=interpret, **static) for module in (pallas_tpu, pallas_gpu))
    result = dispatch.run(backend, interpret, functools.partial(reference.verify, **static), *kernels, *operands)
    assert isinstance(result, Verdict)
    return result


def _check(name: str, x: jax.Array, dtypes: tuple[Any, ...], shape: tuple[int, ...] | int) -> None:
    legal = ", ".join(jnp.dtype(d).name for d in dtypes)
    if x.dtype not in [jnp.dtype(d) for d in dtypes]:
        raise ValueError(f"{name} is {x.dtype}; legal: {legal}")
    if isinstance(shape, int):
        if x.ndim != shape:
            raise ValueError(f"{name} has shape {x.shape}; legal: {shape} axes")
    elif x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; legal: {shape}, to fit the logits")
