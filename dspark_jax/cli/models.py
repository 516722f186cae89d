"""Models of a command line, checked by their configurations before a weight is read, and drafts that share one target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dspark_jax.checkpoint import source
from dspark_jax.checkpoint.deepspec import check_pair
from dspark_jax.checkpoint.gguf import GGUFFile, read_config
from dspark_jax.checkpoint.hf import read_target_config
from dspark_jax.checkpoint.orbax import read_own_config
from dspark_jax.cli import options
from dspark_jax.config import TargetConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.pair import Pair, load_pair
from dspark_jax.schedule import Policy
from dspark_jax.state import ModelConfig


def target_config(target: str) -> TargetConfig:
    """The configuration of a target, without its weights.

    Raises:
      CheckpointError, ConfigError: it cannot be read.
    """
    path = source.resolve_target(target)
    kind, form = source.detect(path)
    if kind != "target":
        raise CheckpointError(f"{path} holds a draft, not a target")
    if form == "gguf":
        return read_config(GGUFFile(path))
    config = read_target_config(path) if form == "hf" else read_own_config(path)[0]
    assert isinstance(config, TargetConfig)
    return config


def check_models(target: str, drafts: Sequence[str], policies: Sequence[tuple[str, Policy]]) -> None:
    """Refuse a draft of another target, or one that a policy does not fit.

    Args:
      policies: each with its name on the command line.

    Raises:
      CheckpointError, ConfigError: a model is missing or illegal. PairError, RequestError: things do not fit together.
    """
    config = target_config(target)
    for draft in drafts:
        check_pair(source.read_draft_config(draft), config, draft)
    choices: list[str | None] = [*drafts] or [None]
    for one in choices:
        options.check_policies(policies, one)


def load_pairs(target: str, drafts: Sequence[str], dtype: str) -> list[Pair]:
    """One pair for every draft; the target is loaded once and shared."""
    first = load_pair(target, drafts[0], dtype)
    pairs = [first]
    for draft in drafts[1:]:
        loaded = source.load_draft(draft, first.dtype, first.model.target, first.params["target"])
        model = ModelConfig(first.model.target, loaded.config)
        params = {"target": first.params["target"], "draft": loaded.params}
        pairs.append(dataclasses.replace(first, model=model, params=params, draft_name=draft))
    return pairs
