"""Which implementation of an op runs: named by the caller, or the best one of the platform, chosen at lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Backend = Literal["reference", "pallas_tpu", "pallas_gpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def run(
    backend: Backend | None,
    interpret: bool,
    reference: Callable[..., Any],
    pallas_tpu: Callable[..., Any],
    pallas_gpu: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Call one implementation on ``operands``.

    Args:
      backend: a named one runs or raises, nothing stands in for it; None: Pallas on TPU and CUDA, else XLA. The choice is
        made when the program is lowered, so a program lowered for another platform holds that platform's kernel.
      interpret: whether the caller asked for interpretation; legal with a named kernel only.

    Raises:
      ValueError: an unknown name, or interpretation of something that is not a kernel.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; legal: None, {', '.join(BACKENDS)}")
    if interpret and backend in (None, "reference"):
        raise ValueError(f"interpret=True needs a named kernel, not backend={backend!r}; legal: {', '.join(BACKENDS[1:])}")
    if backend is None:
        return jax.lax.platform_dependent(*operands, tpu=pallas_tpu, cuda=pallas_gpu, default=reference)
    chosen = {"reference": reference, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}[backend]
    return chosen(*operands)
