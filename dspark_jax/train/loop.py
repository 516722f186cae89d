"""The training loop: batches from (seed, step), one jitted step, checkpoints, a log, and the exported draft."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.checkpoint.deepspec import save_draft, target_tensors
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import CheckpointError, DsparkError, RequestError
from dspark_jax.params import Params, draft_specs, target_specs
from dspark_jax.sharding import DATA, param_shardings
from dspark_jax.train.batches import Batch, Sampler, Shape
from dspark_jax.train.checkpoints import Checkpoints
from dspark_jax.train.features import FeatureCache, Features
from dspark_jax.train.objective import Frozen, Objective, Sums, metrics
from dspark_jax.train.rows import Example
from dspark_jax.train.step import Optimizer, Setup, TrainState, evaluate, new_state, train_step

LOG = "log.jsonl"


class TrainingError(DsparkError):
    """Training cannot go on: the loss is not finite."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes; a resumed run must have the same.

    Attributes:
      slots: of every block that are trained; anchors: at most, of one conversation.
      tokens, rows: of one microbatch; microbatches: per step, all shards together.
      held_out: conversations kept away, for the curve of unseen text.
    """

    optimizer: Optimizer
    objective: Objective
    slots: int
    anchors: int = 40
    tokens: int = 2048
    rows: int = 8
    microbatches: int = 1
    held_out: int = 0
    seed: int = 0
    dtype: str = "float32"

    def shape(self, longest: int) -> Shape:
        return Shape(self.rows, self.tokens, self.rows * self.anchors, self.slots, longest, self.anchors)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained against what. ``cache`` None: features are computed in the step. kept: ids of a reduced vocabulary."""

    target: TargetConfig
    target_params: Params
    draft: DraftConfig
    examples: Sequence[Example]
    train: np.ndarray
    held_out: np.ndarray
    kept: np.ndarray | None = None
    cache: FeatureCache | None = None
    mesh: Mesh | None = None

    @property
    def frozen(self) -> Frozen:
        head = self.target_params["head" if "head" in self.target_params else "embed"]
        if self.kept is None:
            return Frozen(self.target_params["embed"], head)
        kept = jnp.asarray(self.kept)
        return Frozen(self.target_params["embed"], head[kept], kept)


class Trainer:
    """One run. ``run`` goes from the latest checkpoint to the last step."""

    def __init__(self, task: Task, settings: Settings) -> None:
        """Raises:
        RequestError: settings that do not fit the draft, the data or the mesh.
        """
        draft = task.draft
        if not 1 <= settings.slots <= draft.block_size:
            raise RequestError(f"slots={settings.slots} must lie in [1, block_size={draft.block_size}]")
        self.shards = 1 if task.mesh is None else task.mesh.shape[DATA]
        if settings.microbatches < 1 or settings.microbatches % self.shards:
            raise RequestError(f"microbatches={settings.microbatches} must be a multiple of the {self.shards} data shards")
        if (task.kept is None) != (draft.draft_vocab_size is None):
            raise RequestError(f"draft_vocab_size={draft.draft_vocab_size} and the kept ids contradict each other")
        self.task, self.settings = task, settings
        longest = max(len(e.tokens) for e in task.examples)
        sampler = functools.partial(Sampler, task.examples, anchors=settings.anchors, seed=settings.seed)
        shape = settings.shape(longest)
        self.sampler = sampler(pool=task.train, shape=shape, microbatches=settings.microbatches)
        self._held = sampler(pool=task.held_out, shape=shape, microbatches=1) if len(task.held_out) else None
        dtype = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[settings.dtype]
        self.setup = Setup(draft, settings.objective, settings.optimizer, dtype, task.target if task.cache is None else None)
        self._frozen = self._replicate(task.frozen)
        # With given features the target's layers are not needed on the devices.
        head = task.target_params if task.cache is None else {"head": task.frozen.head[:0]}
        self._target = self._replicate(head) if task.cache is not None else self._place_target(head)
        self.supervised = sum(int(task.examples[i].mask.sum()) for i in task.train)

    def _replicate(self, tree: Any) -> Any:
        if self.task.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.task.mesh, PartitionSpec()))

    def _place_target(self, params: Params) -> Params:
        if self.task.mesh is None:
            return params
        return jax.device_put(params, param_shardings(target_specs(self.task.target), self.task.mesh))

    def initial(self, params: Params) -> TrainState:
        """The state before the first step, placed on the mesh; ``params`` are those of ``start.initial_params``."""
        if self.task.mesh is not None:
            specs = draft_specs(self.task.draft)
            specs.pop("vocabulary", None)
            params = jax.device_put(params, param_shardings(specs, self.task.mesh))
        make = jax.jit(functools.partial(new_state, optimizer=self.settings.optimizer))
        state: TrainState = make(params)
        if self.task.mesh is not None:
            # Scalars come out on one device; everything else follows the parameters.
            whole = NamedSharding(self.task.mesh, PartitionSpec())
            state = jax.tree.map(lambda x: jax.device_put(x, whole) if x.ndim == 0 else x, state)
        return state

    @functools.cached_property
    def _schedule(self) -> list[list[list[tuple[int, int]]]]:
        return self.sampler.schedule(self.settings.optimizer.steps)

    def batches(self, step: int) -> tuple[Batch, Features | None]:
        """The global batch of a step, leaves ``[G, S, ...]``, and its features where they are cached."""
        groups = self._schedule[step]
        made = [self._microbatch(self.sampler, rows) for rows in groups]
        shape = (len(groups) // self.shards, self.shards)
        stacked = jax.tree.map(lambda *xs: np.stack(xs).reshape(*shape, *xs[0].shape), *made)
        if self.task.mesh is not None:
            stacked = jax.device_put(stacked, NamedSharding(self.task.mesh, PartitionSpec(None, DATA)))
        return stacked

    def _microbatch(self, sampler: Sampler, rows: Sequence[tuple[int, int]]) -> tuple[Batch, Features | None]:
        batch = sampler.batch(rows)
        if self.task.cache is None:
            return batch, None
        return batch, self.task.cache.read([i for _, i in rows], sampler.shape.tokens, self.setup.dtype)

    def step(self, state: TrainState, batch: Batch, features: Features | None) -> tuple[TrainState, Any]:
        return train_step(self.setup, state, self._frozen, self._target, batch, features)

    def unseen(self, state: TrainState, batches: int = 4) -> Sums | None:
        """Sums over (at most) the first microbatches of the conversations held out; always the same ones."""
        if self._held is None:
            return None
        count = max(1, min(batches, len(self.task.held_out) // self.settings.rows))
        total = None
        for (rows,) in self._held.schedule(count):
            sums = evaluate(self.setup, state.params, self._frozen, self._target, *self._microbatch(self._held, rows))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        return total

    def run(
        self,
        state: TrainState,
        checkpoints: Checkpoints,
        *,
        log_every: int = 20,
        eval_every: int = 200,
        progress: Callable[[int, dict[str, Any]], None] = lambda step, entry: None,
        stop_after: float | None = None,
    ) -> TrainState:
        """Train to the last step, from the latest checkpoint where there is one.

        Args:
          state: the initial one; also the form in which a checkpoint is restored.
          progress: called with every entry of the log.
          stop_after: seconds after which to stop at a checkpoint (None: never).

        Raises:
          TrainingError: the gradient was not finite ten times in a row.
        """
        started = time.monotonic()
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
        step = int(state.step)
        log = _Log(checkpoints.directory / LOG, step)
        total, broken = None, jnp.zeros((), jnp.int32)
        since, done = time.monotonic(), 0
        last = self.settings.optimizer.steps
        while step < last:
            state, report = self.step(state, *self.batches(step))
            broken = jnp.where(report.finite, 0, broken + 1)
            total = report.sums if total is None else jax.tree.map(jnp.add, total, report.sums)
            step, done = step + 1, done + 1
            finished = step == last or (stop_after is not None and time.monotonic() - started > stop_after)
            if step % log_every == 0 or finished:
                if int(broken) >= min(10, log_every):
                    raise TrainingError(f"step {step}: the gradient is not finite (loss {float(report.loss)})")
                entry = {"step": step, "loss": float(report.loss), "norm": float(report.norm), **metrics(total)}
                entry["seconds"] = (time.monotonic() - since) / done
                if step % eval_every == 0 or finished:
                    unseen = self.unseen(state)
                    entry["unseen"] = None if unseen is None else metrics(unseen)
                log.write(entry)
                progress(step, entry)
                total, since, done = None, time.monotonic(), 0
            checkpoints.save(state, step, force=finished)
            if finished:
                break
        checkpoints.close()
        return state

    def draft_params(self, state: TrainState) -> Params:
        """The draft's parameter tree, as checkpoints hold it."""
        params: Params = dict(state.params)
        if self.task.kept is not None:
            params["vocabulary"] = jnp.asarray(self.task.kept)
        return params

    def export(self, state: TrainState, directory: Path, dtype: str | None = None, shared: bool = False) -> None:
        """Write the draft in DeepSpec form; with ``shared`` also the target's embedding and LM head."""
        own = tuple(target_tensors(self.task.target_params).values()) if shared else None
        assert own is None or len(own) == 2
        save_draft(directory, self.task.draft, self.draft_params(state), own, dtype, overwrite=True)


class _Log:
    """One JSON object a line; a resumed run drops what lies behind its checkpoint."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # torn by a kill
        try:
            temp = path.with_suffix(".tmp")
            temp.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            temp.replace(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error

    def write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
