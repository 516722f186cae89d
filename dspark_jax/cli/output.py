"""What is printed: progress on stderr, results on stdout, strict JSON as the last line where it is asked for."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from dspark_jax.requests import Output

PLAIN_WIDTH = 140  # where stdout is not a terminal and has no width of its own


def console(stderr: bool = False) -> Console:
    """A console on today's stdout or stderr; without a terminal: no colours, a fixed width."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Show on stderr that ``message`` is being done: a spinner on a terminal, else one line."""
    out = console(stderr=True)
    if not out.is_terminal:
        out.print(f"{message} …", markup=False)
        yield
        return
    with out.status(message):
        yield


def strict(value: Any) -> Any:
    """``value`` with everything that JSON has no word for replaced: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strict({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value


def print_json(value: Any) -> None:
    """One line of strict JSON."""
    print(json.dumps(strict(value), allow_nan=False), flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table; the first column is left-aligned, the others are numbers."""
    result = Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        result.add_row(*row)
    return result


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}{suffix}"


def percentages(shares: Sequence[float]) -> str:
    return " ".join("-" if math.isnan(x) else f"{100 * x:.0f}%" for x in shares)


def result_json(output: Output) -> dict[str, Any]:
    """The fields of one answer."""
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.stats.prompt_tokens,
        "rounds": output.stats.rounds,
        "accepted_per_round": output.accepted_per_round,
        "verified_per_round": output.verified_per_round,
        "accepted_length": output.stats.accepted_length,
        "acceptance_by_position": output.stats.acceptance_by_position,
        "degenerate_rounds": output.stats.degenerate_rounds,
    }
