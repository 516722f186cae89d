"""Prompt files: one JSON object a line, unusable lines counted by their number instead of ending the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.errors import RequestError

ROLES = ("system", "developer", "user", "assistant")
UNNAMED = "unnamed"

Message = dict[str, str]


class RowError(RequestError):
    """A row is not usable; the message says why."""


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A line that was left out. ``line`` counts from 1."""

    line: int
    why: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One conversation to be answered.

    Attributes:
      index: the row's line in its file, from 0; it stands for the row wherever a row has to be named.
      turns: for every answer of the model the messages that come before it: the user's, and those of the system before it.
      ids: token ids instead of ``turns``, where the prompt is given as such.
      fields: the row as it was read.
    """

    index: int
    source: str
    domain: str
    turns: tuple[tuple[Message, ...], ...]
    ids: tuple[int, ...] | None
    fields: Mapping[str, Any]

    @property
    def line(self) -> int:
        return self.index + 1

    @property
    def answers(self) -> int:
        """How many answers the conversation asks for."""
        return 1 if self.ids is not None else len(self.turns)

    @property
    def is_text(self) -> bool:
        return self.ids is None


def parse_row(fields: Any, index: int) -> Row:
    """The row of one JSON object: ``messages`` or ``turns`` or ``prompt`` (text, messages, or token ids), optionally
    ``source`` and ``domain``. The assistant's messages are left out: they are what is to be answered anew.

    Raises:
      RowError: it is not of that form.
    """
    if not isinstance(fields, Mapping):
        raise RowError(f"a row must be a JSON object, got {type(fields).__name__}")
    names = [fields.get(name) for name in ("source", "domain")]
    for name, value in zip(("source", "domain"), names, strict=True):
        if value is not None and not isinstance(value, str):
            raise RowError(f"{name}={value!r} must be text")
        if isinstance(value, str) and not _is_unicode(value):
            raise RowError(f"{name} is not valid Unicode")
    domain = names[1] or ""
    source = names[0] or domain or UNNAMED
    ids: tuple[int, ...] | None = None
    turns: tuple[tuple[Message, ...], ...] = ()
    given = [n for n in ("messages", "turns", "prompt") if fields.get(n) is not None]
    if not given:
        raise RowError("a row needs 'prompt', 'messages' or 'turns'")
    name, value = given[0], fields[given[0]]
    if name == "prompt" and isinstance(value, str):
        turns = _turns([{"role": "user", "content": value}], name)
    elif not isinstance(value, list) or not value:
        raise RowError(f"{name!r} must be {'text or ' if name == 'prompt' else ''}a list that is not empty")
    elif name == "prompt" and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        ids = tuple(int(x) for x in value)
    elif name == "turns":
        turns = _turns([{"role": "user", "content": x} for x in value], name)
    else:
        turns = _turns(value, name)
    return Row(index, source, domain, turns, ids, dict(fields))


def _is_unicode(text: str) -> bool:
    """Whether there is no half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _turns(messages: Sequence[Any], where: str) -> tuple[tuple[Message, ...], ...]:
    turns: list[tuple[Message, ...]] = []
    pending: list[Message] = []
    for i, message in enumerate(messages):
        at = f"{where}[{i}]" if where != "prompt" or len(messages) > 1 else where
        if not isinstance(message, Mapping):
            raise RowError(f"{at} must be a message with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RowError(f"{at}: role={role!r} is unknown; legal: {', '.join(ROLES)}")
        if role == "assistant":
            continue
        if not isinstance(content, str) or not content.strip():
            raise RowError(f"{at}: a message must be text that is not empty")
        if not _is_unicode(content):
            raise RowError(f"{at}: not valid Unicode")
        pending.append({"role": role, "content": content})
        if role == "user":
            turns.append(tuple(pending))
            pending = []
    if not turns:
        raise RowError(f"{where!r} holds no message of the user")
    return tuple(turns)


def read_rows(path: str | Path) -> tuple[list[Row], list[BadRow]]:
    """The rows of a JSONL file, and the lines that are none; blank lines are nothing.

    Raises:
      RequestError: the file cannot be read, or holds not one usable row.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"--prompts={path} cannot be read: {error.strerror or error}") from error
    rows, bad = [], []
    for index, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(json.loads(line), index))
        except RowError as error:
            bad.append(BadRow(index + 1, str(error)))
        except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
            bad.append(BadRow(index + 1, f"not valid JSON: {error}"))
    if not rows:
        first = f"; line {bad[0].line}: {bad[0].why}" if bad else ""
        raise RequestError(f"--prompts={path} holds no usable row{first}")
    return rows, bad


def take_per_source(rows: Sequence[Row], count: int | None) -> list[Row]:
    """The first ``count`` rows of every source, in the order of the file; None: all."""
    if count is None:
        return list(rows)
    seen: dict[str, int] = {}
    result = []
    for row in rows:
        seen[row.source] = seen.get(row.source, 0) + 1
        if seen[row.source] <= count:
            result.append(row)
    return result
