"""Answers of the target to a prompt file, written as they come: the text that a draft is trained on (SPEC section 6).

A run may be killed at any moment and started again: what is whole in the output is kept, the rest is answered as it would have
been. Settings stand beside the output and have to be the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.errors import RequestError
from dspark_jax.pair import Pair
from dspark_jax.rows import BadRow, Row, RowError, parse_row
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength, Policy, check_policy
from dspark_jax.turns import Conversation, Form, batches, converse, sampling_of, seed_of, usable

WINDOW = 16  # batches whose rows are sorted by length together; the output stays close to the order of the prompts


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a call did. rows: usable ones; kept: found in the output; written: added to it; tokens: of those, prompts not
    counted; failed: conversations whose logits were not finite (not written); cut: ended before their last turn (written as
    far as they go); repaired: bytes of a torn last line that were taken away."""

    rows: int
    kept: int
    written: int
    tokens: int
    bad: tuple[BadRow, ...]
    failed: tuple[BadRow, ...]
    cut: tuple[BadRow, ...]
    repaired: int


Progress = Callable[[int, int], None]


def answer(
    pair: Pair,
    rows: Sequence[Row | Mapping[str, Any]],
    out: str | os.PathLike[str],
    *,
    temperature: float = 0.7,
    top_p: float = 0.95,
    top_k: int = 40,
    min_p: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    policy: Policy | None = None,
    raw: bool = False,
    system: str | None = None,
    progress: Progress | None = None,
) -> Answers:
    """Answer every row with the target and append the answers to ``out``, one JSON object a line.

    Rows with ``messages`` or several ``turns`` have every turn answered in order, the answers fed back. A written row has
    ``index`` (its line in the prompt file, from 0), ``domain``, ``source``, ``prompt`` and ``response`` or, where there is
    more than one message, the conversation as ``messages``; ``tokens`` (new ones, all turns) and ``finish`` (of the last turn).

    Args:
      top_p, top_k, min_p: used above temperature 0.
      seed: every row and turn has a seed of its own made from it.
      policy: None: whole blocks if the pair has a draft, else plain decoding.
      raw: no chat template. system: a system message for conversations that have none.
      progress: called as ``(rows done, usable rows)``.

    Raises:
      RequestError: an illegal option; no usable row; ``out`` cannot be written, is being written by another process, or
        holds something else than answers to these rows with these settings.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{name}={value!r} must be an integer of at least 1")
    sampling_of(temperature, seed, top_k, top_p, min_p)
    policy = policy or (FixedLength() if pair.model.draft is not None else Autoregressive())
    check_policy(policy, pair.model.draft)
    form = Form(raw, system)
    parsed = [row if isinstance(row, Row) else parse_row(row, i) for i, row in enumerate(rows)]
    good, lengths, bad = usable(pair, parsed, form)
    if not good:
        raise RequestError("no row can be used" + (f"; line {bad[0].line}: {bad[0].why}" if bad else ""))
    settings = {
        "target": pair.target_name,
        "draft": pair.draft_name if policy.drafts else None,
        "policy": repr(policy),
        "dtype": str(pair.dtype.__name__),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "raw": raw,
        "system": system,
    }

    def draw(row: Row, turn: int) -> SamplingParams:
        return sampling_of(temperature, seed_of(seed, row.index, turn), top_k, top_p, min_p)

    with _opened(Path(out)) as file:
        done, repaired = file.resume(good, form, settings)
        kept, written, tokens = len(done), 0, 0
        failed, cut = list[BadRow](), list[BadRow]()
        for batch in batches(good, lengths, batch_size, WINDOW):
            if progress is not None:
                progress(kept + written + len(failed), len(good))
            missing = {row.index for row in batch} - done
            if not missing:
                continue
            # The whole batch again, so that a resumed run computes the same numbers in the same places.
            lines = []
            for conversation in converse(pair, batch, form, draw, policy, max_new_tokens, batch_size):
                if conversation.row.index not in missing:
                    continue
                where, why = conversation.row.line, conversation.cut
                if not conversation.turns or conversation.turns[-1].finish == "error":
                    failed.append(BadRow(where, why or "no answer"))
                    continue
                if why is not None:
                    cut.append(BadRow(where, why))
                record = as_record(conversation, form)
                lines.append(record)
                tokens += record["tokens"]
            file.append(lines)
            written += len(lines)
        if progress is not None:
            progress(kept + written + len(failed), len(good))
    return Answers(len(good), kept, written, tokens, tuple(bad), tuple(failed), tuple(cut), repaired)


def as_record(conversation: Conversation, form: Form) -> dict[str, Any]:
    """The line that is written for a conversation."""
    row, turns = conversation.row, conversation.turns
    record: dict[str, Any] = {"index": row.index, "domain": row.domain, "source": row.source}
    if row.ids is not None:
        only = turns[0]
        record |= {"prompt": list(row.ids), "response": only.token_ids if only.text is None else only.text}
    else:
        answers = [turn.text or "" for turn in turns]
        if len(form.turns(row)) == 1 and len(form.turns(row)[0]) == 1:
            record |= {"prompt": row.turns[0][0]["content"], "response": answers[0]}
        else:
            messages = form.messages(row, answers)
            last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
            record["messages"] = messages[: last + 1]
    return record | {"tokens": sum(len(turn.token_ids) for turn in turns), "finish": turns[-1].finish}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Output]:
    """``path`` open for appending, for this process alone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RequestError(f"--out={path} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RequestError(f"--out={path} is being written by another process") from error
        yield _Output(path, descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class _Output:
    path: Path
    descriptor: int

    @property
    def settings_path(self) -> Path:
        return self.path.with_name(self.path.name + ".settings.json")

    def resume(self, rows: Sequence[Row], form: Form, settings: dict[str, Any]) -> tuple[set[int], int]:
        """Rows that are already answered, and the bytes of a torn last line that were taken away.

        Raises:
          RequestError: what is there does not belong to ``rows`` and ``settings``; nothing is changed then.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise RequestError(f"--out={self.path} cannot be read: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        done = self._answered(whole, {row.index: row for row in rows}, form)
        if whole:
            self._check_settings(settings)
        if len(whole) < len(data):
            os.ftruncate(self.descriptor, len(whole))
            os.fsync(self.descriptor)
        if not whole:
            self._write_settings(settings)
        return done, len(data) - len(whole)

    def _answered(self, data: bytes, rows: Mapping[int, Row], form: Form) -> set[int]:
        done = set()
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            where = f"--out={self.path}, line {number}"
            try:
                record = json.loads(line)
                index = int(record["index"])
                found = parse_row(record, index)
            except (ValueError, KeyError, TypeError, RowError) as error:
                raise RequestError(f"{where} is not an answer of this command: {error}") from error
            row = rows.get(index)
            if row is None:
                continue  # of a larger choice of rows of the same file
            expected = form.turns(row)
            if found.ids != row.ids or found.turns != expected[: len(found.turns)]:
                raise RequestError(f"{where} answers another prompt than line {row.line} of the prompts")
            done.add(index)
        return done

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        try:
            before = json.loads(self.settings_path.read_bytes())
        except (OSError, ValueError) as error:
            raise RequestError(
                f"--out={self.path} holds answers, but {self.settings_path} cannot be read ({error}); take another --out"
            ) from error
        for name, value in settings.items():
            if before.get(name) != value:
                was = before.get(name)
                raise RequestError(f"--out={self.path} was begun with {name}={was!r}, not {value!r}; take another --out")

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        temp = self.settings_path.with_name(self.settings_path.name + ".tmp")
        with temp.open("w", encoding="utf-8") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temp.replace(self.settings_path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write ``records`` and wait until the disk has them.

        Raises:
          RequestError: the disk is full or gone; what was written of them is at most a torn last line.
        """
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
            os.fsync(self.descriptor)
        except OSError as error:
            raise RequestError(f"--out={self.path} cannot be written: {error.strerror}") from error
