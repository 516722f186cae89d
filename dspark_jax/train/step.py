"""One training step: gradients of a global batch, accumulated over microbatches and data shards, and one AdamW update.

The loss is a ratio of sums over the global batch. Its denominators are known before any loss (they depend on masks alone),
so every microbatch contributes its exact share, and accumulation, sharding and one large batch give the same gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import ConfigError
from dspark_jax.params import Params
from dspark_jax.train.batches import Batch
from dspark_jax.train.features import Features, features_of
from dspark_jax.train.objective import Frozen, Objective, Sums, denominators, loss_sums, total_loss


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up over ``warmup`` of all steps, then cosine down to ``final`` of the peak (SPEC section 6)."""

    learning_rate: float = 6e-4
    steps: int = 1000
    warmup: float = 0.04
    final: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999

    def __post_init__(self) -> None:
        legal = {
            "learning_rate": self.learning_rate > 0,
            "steps": self.steps >= 1,
            "warmup": 0 <= self.warmup < 1,
            "final": 0 <= self.final <= 1,
            "clip": self.clip > 0,
            "weight_decay": self.weight_decay >= 0,
            "b1": 0 <= self.b1 < 1,
            "b2": 0 <= self.b2 < 1,
        }
        for name, ok in legal.items():
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r} is outside its legal range")

    def schedule(self) -> optax.Schedule:
        warm = max(1, round(self.warmup * self.steps))
        return optax.schedules.warmup_cosine_decay_schedule(
            self.learning_rate / warm, self.learning_rate, warm, max(self.steps, warm + 1), self.final * self.learning_rate
        )

    def transform(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule(), self.b1, self.b2, weight_decay=self.weight_decay),
        )


class TrainState(flax.struct.PyTreeNode):
    """params: float32 masters of what is trained; moments: of the optimiser; step: int32."""

    params: Params
    moments: Any
    step: jax.Array


class StepReport(flax.struct.PyTreeNode):
    """loss, norm (of the gradient before clipping): float32 scalars; finite: whether the update was applied; sums."""

    loss: jax.Array
    norm: jax.Array
    finite: jax.Array
    sums: Sums


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static half of a step. ``features`` says where they come from: None: given with the batch, else the target's
    configuration, to compute them in the step."""

    draft: DraftConfig
    objective: Objective
    optimizer: Optimizer
    dtype: Any = jnp.float32
    target: TargetConfig | None = None


def new_state(params: Params, optimizer: Optimizer) -> TrainState:
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return TrainState(masters, optimizer.transform().init(masters), jnp.zeros((), jnp.int32))


def _microbatch(
    setup: Setup,
    params: Params,
    frozen: Frozen,
    target_params: Params,
    totals: tuple[jax.Array, jax.Array],
    batch: Batch,
    features: Features | None,
) -> tuple[jax.Array, Sums]:
    if features is None:
        assert setup.target is not None
        features = features_of(batch, target_params, setup.target, setup.draft.target_layer_ids)
    cast = jax.tree.map(lambda p: p.astype(setup.dtype), params)
    head = target_params["head"] if "head" in target_params else target_params["embed"]
    sums = loss_sums(cast, setup.draft, setup.objective, frozen, head, batch, features)
    return total_loss(sums, setup.objective, *totals), sums


def gradients(
    setup: Setup,
    params: Params,
    frozen: Frozen,
    target_params: Params,
    batches: Batch,
    features: Features | None,
) -> tuple[Params, jax.Array, Sums]:
    """Gradient, loss and sums of a global batch.

    Args:
      batches, features: leaves ``[G, S, ...]``: G microbatches one after the other, S data shards side by side.
    """
    shards = batches.tokens.shape[1]
    count = functools.partial(denominators, objective=setup.objective, kept=frozen.kept)
    totals = jax.tree.map(jnp.sum, jax.vmap(jax.vmap(lambda b: count(b)))(batches))

    def one(params: Params, batch: Batch, features: Features | None) -> tuple[jax.Array, Sums]:
        if shards == 1:
            first = jax.tree.map(lambda x: x[0], (batch, features))
            return _microbatch(setup, params, frozen, target_params, totals, *first)
        run = functools.partial(_microbatch, setup, params, frozen, target_params, totals)
        loss, sums = jax.vmap(run)(batch, features)
        return jnp.sum(loss), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def share(batch: Batch, features: Features | None) -> tuple[Params, jax.Array, Sums]:
        (loss, sums), grads = jax.value_and_grad(one, has_aux=True)(params, batch, features)
        return grads, loss, sums

    first = jax.tree.map(lambda x: x[0], (batches, features))
    if batches.tokens.shape[0] == 1:
        return share(*first)
    shapes = jax.eval_shape(share, *first)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    add = lambda total, xs: (jax.tree.map(jnp.add, total, share(*xs)), None)  # noqa: E731 (used once, just below)
    return jax.lax.scan(add, start, (batches, features))[0]


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def train_step(
    setup: Setup,
    state: TrainState,
    frozen: Frozen,
    target_params: Params,
    batches: Batch,
    features: Features | None,
) -> tuple[TrainState, StepReport]:
    """One update. A gradient that is not finite changes nothing but the step counter, and is reported.

    Args:
      target_params: of the frozen target; only read. Its LM head suffices where ``features`` are given.
    """
    grads, loss, sums = gradients(setup, state.params, frozen, target_params, batches, features)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    finite = jnp.isfinite(norm)
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        updates, moments = setup.optimizer.transform().update(safe, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    new = TrainState(keep(params, state.params), keep(moments, state.moments), state.step + 1)
    return new, StepReport(loss, norm, finite, sums)


@functools.partial(jax.jit, static_argnames=("setup",))
def evaluate(
    setup: Setup, params: Params, frozen: Frozen, target_params: Params, batch: Batch, features: Features | None
) -> Sums:
    """The sums of one microbatch, without gradients."""
    nothing = (jnp.ones(()), jnp.ones(()))
    return _microbatch(setup, params, frozen, target_params, nothing, batch, features)[1]
