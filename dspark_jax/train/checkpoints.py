"""Checkpoints of a training run: everything in one Orbax step directory, written in the background, kept by policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspark_jax.errors import CheckpointError
from dspark_jax.train.step import TrainState

SETTINGS = "settings.json"


class Checkpoints:
    """Step directories below ``directory/steps`` and the settings they belong to.

    A step appears under its name only when it is whole, so a process may be killed at any moment: the latest step is then
    the one before. Arrays are restored to the shardings of the run that asks.
    """

    def __init__(self, directory: str | Path, settings: dict[str, Any], keep: int = 2, save_every: int = 100) -> None:
        """Raises:
        CheckpointError: the directory cannot be written, or holds a run with other settings.
        """
        directory = Path(directory).absolute()
        path = directory / SETTINGS
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                _same_settings(json.loads(path.read_text(encoding="utf-8")), settings, path)
            else:
                temp = path.with_suffix(".tmp")
                temp.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
                temp.replace(path)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error}") from error
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not readable: {error}") from error
        self.directory = directory
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, save_interval_steps=save_every, create=True)
        self._manager = ocp.CheckpointManager(directory / "steps", options=options)

    @property
    def latest(self) -> int | None:
        """The last whole step, or None."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, state: TrainState, step: int, *, force: bool = False) -> None:
        """Save in the background if it is time to, or if ``force`` is set."""
        if step != self.latest:
            self._manager.save(step, args=ocp.args.StandardSave(state), force=force)

    def restore(self, like: TrainState) -> TrainState:
        """The latest state in the shapes, types and shardings of ``like``.

        Raises:
          CheckpointError: there is none, or it does not have that form.
        """
        if self.latest is None:
            raise CheckpointError(f"{self.directory} holds no finished checkpoint")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            state: TrainState = self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # whatever Orbax and its storage raise
            first = next(iter(str(error).splitlines()), "")[:300]
            raise CheckpointError(f"{self.directory}/steps/{self.latest} cannot be restored: {first}") from error
        return state

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _same_settings(have: dict[str, Any], want: dict[str, Any], path: Path) -> None:
    want = json.loads(json.dumps(want))
    for key in sorted(have.keys() | want.keys()):
        if have.get(key) != want.get(key):
            raise CheckpointError(
                f"{path}: the run has {key}={have.get(key)!r}, asked for {key}={want.get(key)!r}; resume with the same"
                " settings or name another --out"
            )
