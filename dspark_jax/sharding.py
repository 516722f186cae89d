"""Logical axes of parameters and batches, and the mesh axes they are laid over.

A mesh has the axes "data" (requests, conversations) and "model" (heads, hidden units, vocabulary).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.errors import ConfigError
from dspark_jax.params import ParamSpec, is_spec

DATA, MODEL = "data", "model"
RULES: dict[str, str | None] = {
    "layers": None,
    "embed": None,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "vocab": MODEL,
}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A (data, model) mesh over the first ``data * model`` devices.

    Raises:
      ConfigError: there are fewer devices.
    """
    have = jax.device_count()
    if data < 1 or model < 1 or data * model > have:
        raise ConfigError(f"a mesh of data={data} x model={model} needs {data * model} devices; there are {have}")
    return jax.make_mesh(
        (data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto), devices=jax.devices()[: data * model]
    )


def partition(spec: ParamSpec, mesh: Mesh) -> PartitionSpec:
    """Where a parameter lies. An axis whose size the mesh axis does not divide is left whole."""
    parts = []
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        place = RULES[axis] if axis is not None else None
        parts.append(place if place is not None and size % mesh.shape[place] == 0 else None)
    return PartitionSpec(*parts)


def param_shardings(specs: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The sharding of every leaf of a parameter table."""
    return jax.tree.map(lambda s: NamedSharding(mesh, partition(s, mesh)), specs, is_leaf=is_spec)
