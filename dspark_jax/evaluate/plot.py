"""Reliability diagrams: what the confidence head said against what came true."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.errors import RequestError
from dspark_jax.evaluate.metrics import BINS, Calibration
from dspark_jax.evaluate.report import Evaluation

PANELS = (("conditional", "c_k, given that the slots before it were accepted"), ("survival", "c_1 · … · c_k"))


def check_plot(path: str | Path) -> None:
    """Raises RequestError where no diagram can be drawn to ``path``."""
    path = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(f"--plot={path} needs matplotlib: pip install 'dspark-jax[plot]'")
    if path.suffix.lower() != ".png":
        raise RequestError(f"--plot={path} must end in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"--plot={path}: {path.parent} is not a directory" if not path.is_dir() else f"--plot={path} is one")


def plot(evaluations: Sequence[Evaluation], path: str | Path) -> bool:
    """Draw one row of panels for every draft and temperature that has confidences.

    Returns: whether there was anything to draw.
    """
    import matplotlib.figure

    rows = [(e.draft, r) for e in evaluations for r in e.results if r.overall.conditional is not None]
    if not rows:
        return False
    figure = matplotlib.figure.Figure(figsize=(11, 4.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for line, (draft, result) in enumerate(rows):
        for column, (name, meaning) in enumerate(PANELS):
            values = getattr(result.overall, name)
            assert values is not None
            _panel(axes[line][column], values)
            title = f"{Path(draft).name}, temperature {result.temperature:g}: {name}\n{meaning}"
            axes[line][column].set_title(title, fontsize=10)
    figure.savefig(path, dpi=120, format="png")
    return True


def _panel(axis: object, values: Calibration) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    table = values.reliability
    total = max(sum(table.count), 1)
    centres = [(i + 0.5) / BINS for i in range(BINS)]
    axis.bar(centres, [n / total for n in table.count], 1 / BINS, color="0.85", label="share of predictions")
    axis.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--", label="perfect")
    points = [(p, o, n) for p, o, n in zip(table.predicted, table.observed, table.count, strict=True) if n]
    axis.plot([p for p, _, _ in points], [o for _, o, _ in points], color="C0", linewidth=1)
    axis.scatter(
        [p for p, _, _ in points],
        [o for _, o, _ in points],
        s=[8 + 120 * n / total for _, _, n in points],
        color="C0",
        label="share accepted",
        zorder=3,
    )
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.set_aspect("equal")
    axis.set_xlabel("predicted")
    axis.set_ylabel("observed")
    text = f"ECE {values.ece:.3f}\nAUC {values.auc:.3f}\nBrier {values.brier:.3f}\nbias {values.bias:+.3f}\nn {values.count}"
    axis.text(0.03, 0.97, text, va="top", fontsize=9)
    axis.legend(loc="lower right", fontsize=8)
