"""A target and its draft, loaded, checked against each other and ready to decode (SPEC section 9)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp

from dspark_jax.checkpoint.source import DEFAULT_DRAFT, load_draft, load_target, resolve_draft
from dspark_jax.errors import PairError, RequestError
from dspark_jax.params import Params
from dspark_jax.state import ModelConfig
from dspark_jax.text import Tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A loaded pair. ``params`` is ``{"target": ..., "draft": ...}`` (``draft`` only when there is one).

    A draft with a reduced vocabulary also gets ``params["draft"]["head"] [W, D]``, its rows of the target's LM head.
    """

    model: ModelConfig
    params: Params
    dtype: Any
    tokenizer: Tokenizer | None = None
    target_name: str = ""
    draft_name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", _with_draft_head(self.params))


def _with_draft_head(params: Params) -> Params:
    """``params`` with the rows of the target's LM head that a reduced draft vocabulary uses, copied out once."""
    draft = params.get("draft", {})
    if "vocabulary" not in draft or "head" in draft:
        return params
    target = params["target"]
    head = target["head"] if "head" in target else target["embed"]
    return params | {"draft": draft | {"head": head[draft["vocabulary"]]}}


def load_pair(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = DEFAULT_DRAFT,
    dtype: str = "float32",
    mesh: Any = None,
) -> Pair:
    """Load a target (Hugging Face directory, ``.gguf`` file, own form, or the name ``smollm2``) and a draft.

    Args:
      draft: a directory in DeepSpec or own form, or the name ``smollm2``, the draft that comes with this package.
        "default": that one for the target named ``smollm2``, none for others. None: the target alone.
      dtype: "float32" or "bfloat16", of weights and caches.
      mesh: must be None; sharded decoding is not implemented.

    Raises:
      ConfigError, CheckpointError: what was read is not legal. PairError: draft and target do not belong together.
      RequestError: an illegal ``dtype`` or ``mesh``.
    """
    if dtype not in DTYPES:
        raise RequestError(f"dtype={dtype!r} is not legal; legal: {', '.join(DTYPES)}")
    if mesh is not None:
        raise RequestError("mesh must be None: sharded decoding is not implemented yet")
    draft = resolve_draft(draft, target)
    loaded = load_target(target, DTYPES[dtype])
    params: Params = {"target": loaded.params}
    tokenizer = None
    if loaded.text_dir is not None and (loaded.text_dir / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_directory(loaded.text_dir)
        if tokenizer.vocab_size > loaded.config.vocab_size:
            raise PairError(
                f"{loaded.text_dir}/tokenizer.json has {tokenizer.vocab_size} tokens, the target only"
                f" vocab_size={loaded.config.vocab_size}"
            )
    draft_config = None
    if draft is not None:
        loaded_draft = load_draft(draft, DTYPES[dtype], loaded.config, loaded.params)
        draft_config, params["draft"] = loaded_draft.config, loaded_draft.params
    model = ModelConfig(loaded.config, draft_config)
    return Pair(model, params, DTYPES[dtype], tokenizer, str(target), None if draft is None else str(draft))
