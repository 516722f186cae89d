"""Conversations answered in batches: the model's answers are fed back, and what every round did is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dspark_jax.decode import decode
from dspark_jax.errors import RequestError, TextError
from dspark_jax.generate import ALL_ROUNDS
from dspark_jax.pair import Pair
from dspark_jax.requests import Plan
from dspark_jax.rows import BadRow, Message, Row, RowError
from dspark_jax.sampling import GREEDY_BELOW, SamplingParams
from dspark_jax.schedule import Policy
from dspark_jax.state import record_confidence


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer. verified, accepted, committed: int32 ``[R]`` of its R rounds; confidence: float32 logits ``[R, n]``, or
    None: not recorded, or the draft has no such head."""

    prompt_tokens: int
    token_ids: list[int]
    text: str | None
    finish: str
    verified: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    confidence: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A row and its answers. ``cut`` says why not every turn was answered, or is None."""

    row: Row
    turns: list[Turn]
    cut: str | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """How text becomes ids. raw: no chat template; system: a message that goes before the conversations that have none."""

    raw: bool = False
    system: str | None = None

    def check(self, pair: Pair, rows: Sequence[Row]) -> None:
        """Raises RequestError for what no single row is to blame for."""
        if not any(row.is_text for row in rows):
            return
        if pair.tokenizer is None:
            raise RequestError(f"the prompts are text, but {pair.target_name} has no tokenizer.json; give token ids")
        if self.system is not None and not self.chat(pair):
            why = "--raw is given" if self.raw else f"{pair.target_name} has no chat template"
            raise RequestError(f"--system={self.system!r} needs a chat template, but {why}")

    def chat(self, pair: Pair) -> bool:
        return pair.tokenizer is not None and "default" in pair.tokenizer.chat_templates and not self.raw

    def encode(self, pair: Pair, row: Row, answers: Sequence[str]) -> list[int]:
        """Ids of the prompt for the answer that follows ``answers``.

        Raises:
          RowError: the row cannot be encoded, or does not fit into the model's context.
        """
        target = pair.model.target
        if row.ids is not None:
            ids = list(row.ids)
            if not all(0 <= i < target.vocab_size for i in ids):
                raise RowError(f"a token id lies outside [0, {target.vocab_size})")
        else:
            assert pair.tokenizer is not None  # ``check`` has seen to it
            try:
                if self.chat(pair):
                    ids = pair.tokenizer.encode_chat(self.messages(row, answers))
                elif row.answers == 1 and len(row.turns[0]) == 1:
                    ids = pair.tokenizer.encode(row.turns[0][0]["content"])
                else:
                    raise RowError("several messages need a chat template")
            except TextError as error:
                raise RowError(str(error)) from error
        if len(ids) >= target.max_positions:
            raise RowError(f"{len(ids)} tokens leave no room for an answer in the model's context of {target.max_positions}")
        return ids

    def turns(self, row: Row) -> tuple[tuple[Message, ...], ...]:
        """The row's turns, with the system message where it has none."""
        if self.system is None or row.ids is not None or row.turns[0][0]["role"] != "user":
            return row.turns
        return (({"role": "system", "content": self.system}, *row.turns[0]), *row.turns[1:])

    def messages(self, row: Row, answers: Sequence[str]) -> list[Message]:
        """The conversation up to the answer that follows ``answers``, or up to the last of them where all are given."""
        result: list[Message] = []
        for number, turn in enumerate(self.turns(row)[: len(answers) + 1]):
            result += turn
            if number < len(answers):
                result.append({"role": "assistant", "content": answers[number]})
        return result


def seed_of(seed: int, index: int, turn: int) -> int:
    """The seed of one answer: from the run's seed, the row and the turn alone, so that it does not depend on what else is
    answered, or was before."""
    return int(np.random.SeedSequence([seed, index, turn]).generate_state(1, np.uint32)[0])


def sampling_of(temperature: float, seed: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    """How a row is sampled; the filters are for the temperatures at which something is drawn.

    Raises:
      RequestError: a value outside its range.
    """
    if temperature < GREEDY_BELOW:
        return SamplingParams(temperature, seed=seed)
    return SamplingParams(temperature, top_k, top_p, min_p, seed)


def usable(pair: Pair, rows: Sequence[Row], form: Form) -> tuple[list[Row], list[int], list[BadRow]]:
    """The rows whose first prompt can be encoded, its number of tokens for each, and the others.

    Raises:
      RequestError: the target cannot take text, or not in this form.
    """
    form.check(pair, rows)
    good, lengths, bad = [], [], []
    for row in rows:
        try:
            lengths.append(len(form.encode(pair, row, [])))
            good.append(row)
        except RowError as error:
            bad.append(BadRow(row.line, str(error)))
    return good, lengths, bad


def batches(rows: Sequence[Row], lengths: Sequence[int], size: int, window: int | None = None) -> Iterator[list[Row]]:
    """Rows that take similarly long together: sorted by turns, source and prompt length within windows of ``window`` batches
    (None: all). A batch runs until its last row has ended, and the rows of a source need about as many rounds."""
    span = len(rows) if window is None else window * size
    for start in range(0, len(rows), max(span, 1)):
        part = range(start, min(start + span, len(rows)))
        order = sorted(part, key=lambda i: (rows[i].answers, rows[i].source, lengths[i]))
        for first in range(0, len(order), size):
            yield [rows[i] for i in order[first : first + size]]


def converse(
    pair: Pair,
    rows: Sequence[Row],
    form: Form,
    sampling: Callable[[Row, int], SamplingParams],
    policy: Policy | None,
    max_new_tokens: int,
    batch_size: int,
    record: bool = False,
) -> list[Conversation]:
    """Answer one batch of at most ``batch_size`` usable rows, turn by turn.

    Args:
      sampling: (row, turn) -> how that answer is drawn.
      record: keep the confidence logits.
    """
    turns: list[list[Turn]] = [[] for _ in rows]
    cut: list[str | None] = [None] * len(rows)
    for number in range(max(row.answers for row in rows)):
        prompts, who = [], []
        for i, row in enumerate(rows):
            if number >= row.answers or cut[i] is not None:
                continue
            try:
                prompts.append(form.encode(pair, row, [t.text or "" for t in turns[i]]))
                who.append(i)
            except RowError as error:
                cut[i] = f"turn {number + 1}: {error}"
        if not who:
            break
        draws = [sampling(rows[i], number) for i in who]
        for i, turn in zip(who, _answer(pair, prompts, draws, policy, max_new_tokens, batch_size, record), strict=True):
            turns[i].append(turn)
            if turn.finish == "error":
                cut[i] = f"turn {number + 1}: the target's logits are not finite"
    return [Conversation(row, t, c) for row, t, c in zip(rows, turns, cut, strict=True)]


def _answer(
    pair: Pair,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    policy: Policy | None,
    max_new_tokens: int,
    batch_size: int,
    record: bool,
) -> list[Turn]:
    plan = Plan.make(pair, prompts, sampling, policy, max_new_tokens, None, batch_size, None)
    (group,) = plan.groups()
    state = group.start()
    assert state is not None  # callers ask for at least one token
    if record and plan.slots and pair.model.drafter.confidence_head:
        state = record_confidence(state, plan.slots)
    state = decode(pair.model, pair.params, state, plan.policy, ALL_ROUNDS)
    outputs = group.outputs(state)
    log = state.log
    rounds, verified, accepted, committed = (np.asarray(x) for x in (log.rounds, log.verified, log.accepted, log.committed))
    confidence = None if log.confidence is None else np.asarray(log.confidence)
    turns = []
    for i in range(len(prompts)):
        n, out = int(rounds[i]), outputs[i]
        turns.append(
            Turn(
                out.stats.prompt_tokens,
                out.token_ids,
                out.text,
                out.finish_reason,
                verified[i, :n].copy(),
                accepted[i, :n].copy(),
                committed[i, :n].copy(),
                None if confidence is None else confidence[i, :n].copy(),
            )
        )
    return turns
