"""Conversations to token ids and loss masks (SPEC section 6): the chat template once, the mask from its character offsets.

A token is supervised when the assistant wrote it: the words of its messages and the token that ends its turn. The prompt
of a turn (the template's header included) is not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.errors import RequestError, TextError
from dspark_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """One conversation. tokens: int32 ``[n]``; mask: bool ``[n]``, the tokens that the assistant wrote; line: of the file."""

    tokens: np.ndarray
    mask: np.ndarray
    line: int


@dataclasses.dataclass
class Report:
    """What became of the rows of a file. ``skipped`` counts reasons; ``examples`` holds the first line of every reason."""

    used: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, detail: str) -> None:
        self.skipped[reason] += 1
        self.first.setdefault(reason, detail)

    def __str__(self) -> str:
        lines = [
            f"{self.used} conversations, {self.tokens} tokens, {self.supervised} of them supervised,"
            f" {self.truncated} cut at the length limit"
        ]
        lines += [f"{count} skipped: {reason} (first: {self.first[reason]})" for reason, count in self.skipped.most_common()]
        return "\n".join(lines)


class BadRow(ValueError):
    """A row that cannot be used. ``reason`` is its class, the message the particular case."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Lines of a JSONL file with their numbers, from 1; a line that is not JSON gives a ``BadRow`` in place of the value.

    Raises:
      RequestError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    yield number, json.loads(raw)
                except ValueError as error:  # JSON and UTF-8 errors alike
                    yield number, BadRow("not JSON", str(error))
    except OSError as error:
        raise RequestError(f"--data={path} cannot be read: {error}") from error


def conversation(row: Any) -> tuple[list[dict[str, Any]], bool]:
    """Messages of a row, and whether the last answer is complete (not cut by a token limit).

    Forms: ``{"messages": [{"role", "content"}, …]}`` or ``{"prompt", "response"}``; ``"finish": "length"`` marks an answer
    that was cut.

    Raises:
      BadRow: another form.
    """
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object", f"a row must be a JSON object, got {type(row).__name__}")
    messages = row.get("messages", row.get("conversations"))
    if messages is None:
        prompt, response = row.get("prompt"), row.get("response")
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise BadRow("no conversation", "a row needs 'messages', or the texts 'prompt' and 'response'")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    if not isinstance(messages, list) or not messages:
        raise BadRow("no conversation", f"messages must be a non-empty list, got {messages!r:.80}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise BadRow("bad message", f"a message needs the texts 'role' and 'content', got {message!r:.80}")
    return [dict(m) for m in messages], row.get("finish") != "length"


def encode(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], complete: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss mask of one conversation.

    Args:
      complete: whether the model ended its last turn itself; else the turn's end is not supervised.

    Raises:
      BadRow: an unknown role, a template that refuses or rewrites earlier turns, nothing to supervise.
    """
    if not any(m.get("role") == "assistant" for m in messages):
        raise BadRow("no assistant turn", "no message has the role 'assistant'")
    last = max(i for i, m in enumerate(messages) if m.get("role") == "assistant")
    messages = messages[: last + 1]
    ends = [tokenizer.special_tokens[k] for k in ("eos_token",) if k in tokenizer.special_tokens]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            head = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True) if i else ""
            turn = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
            if not turn.startswith(head) or not text.startswith(turn):
                raise BadRow("template rewrites turns", f"the template renders message {i} differently in its context")
            stop = len(turn.rstrip())
            body = turn[len(head) : stop]
            for end in ends:
                if body.endswith(end):
                    cut = i == last and not complete
                    stop -= len(end) if cut else 0
                    break
            spans.append((len(head), stop))
        ids, offsets = tokenizer.encode_offsets(text)
    except TextError as error:
        raise BadRow("refused by the template", str(error)) from error
    mask = np.zeros(len(ids), bool)
    starts = np.asarray([o[0] for o in offsets], np.int64)
    finish = np.asarray([o[1] for o in offsets], np.int64)
    for start, stop in spans:
        mask |= (starts >= start) & (finish <= stop) & (finish > starts)
    if not mask.any():
        raise BadRow("nothing supervised", "the assistant's turns are empty")
    return np.asarray(ids, np.int32), mask


def load_examples(
    paths: Sequence[str | Path], tokenizer: Tokenizer, max_length: int, *, limit: int | None = None
) -> tuple[list[Example], Report]:
    """All usable conversations of JSONL files, cut at ``max_length`` tokens, and what became of the rest.

    Raises:
      RequestError: a file cannot be read, or not one row can be used.
    """
    report = Report()
    examples: list[Example] = []
    for path in paths:
        for number, row in read_rows(path):
            if limit is not None and len(examples) >= limit:
                break
            try:
                messages, complete = conversation(row)
                ids, mask = encode(tokenizer, messages, complete)
                if len(ids) > max_length:
                    ids, mask = ids[:max_length], mask[:max_length]
                    if not anchor_candidates(mask).any():
                        raise BadRow("over the limit", f"the first {max_length} tokens hold nothing to supervise")
                    report.truncated += 1
                elif not anchor_candidates(mask).any():
                    raise BadRow("nothing supervised", "no two supervised tokens in a row, so no anchor")
            except BadRow as error:
                report.skip(error.reason, f"{path}, line {number}: {error}")
                continue
            examples.append(Example(ids, mask, number))
            report.used += 1
            report.tokens += len(ids)
            report.supervised += int(mask.sum())
    if not examples:
        raise RequestError(f"--data={', '.join(map(str, paths))}: not one row can be used\n{report}")
    return examples, report


def anchor_candidates(mask: np.ndarray) -> np.ndarray:
    """Positions a with ``mask[a]`` and ``mask[a+1]`` set, bool ``[n]``: the first token of a turn comes from the prefill,
    so an anchor is itself supervised."""
    candidates = np.zeros_like(mask)
    candidates[:-1] = mask[:-1] & mask[1:]
    return candidates
