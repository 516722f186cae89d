"""Prompts answered with a draft in batches, every round and every confidence kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark_jax.errors import RequestError
from dspark_jax.evaluate.report import Evaluation, summarise
from dspark_jax.pair import Pair
from dspark_jax.rows import Row, parse_row
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import FixedLength, Policy, check_policy
from dspark_jax.turns import Conversation, Form, batches, converse, sampling_of, seed_of, usable

Progress = Callable[[int, int, float], None]


def evaluate(
    pair: Pair,
    rows: Sequence[Row | Mapping[str, Any]],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    policy: Policy | None = None,
    max_new_tokens: int = 96,
    batch_size: int = 8,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    raw: bool = False,
    system: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer ``rows`` at every temperature and say how the draft did.

    Args:
      rows: of ``rows.read_rows``, or mappings with ``prompt``, ``messages`` or ``turns`` (and ``source``, ``domain``).
      policy: how many drafts are checked; None: whole blocks.
      seed: row and turn have their own seeds made from it, so a row's result does not depend on the other rows.
      top_k, top_p, min_p: of the temperatures above 0.
      raw: no chat template. system: a system message for conversations that have none.
      progress: called as ``(prompts done, prompts in all, temperature)``.

    Raises:
      RequestError: no draft, an illegal option or row, or no row that can be used.
    """
    if pair.model.draft is None:
        raise RequestError("evaluate needs a pair with a draft")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        least = 2 if name == "max_new_tokens" else 1  # the first token is the prefill's
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(f"{name}={value!r} must be an integer of at least {least}")
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise RequestError(f"temperatures={list(temperatures)!r} must be different numbers, at least one")
    for t in temperatures:
        sampling_of(t, seed, top_k, top_p, min_p)
    policy = FixedLength() if policy is None else policy
    slots = check_policy(policy, pair.model.draft)
    if not slots:
        raise RequestError(f"policy={policy!r} drafts nothing; there is nothing to evaluate")
    parsed = [row if isinstance(row, Row) else parse_row(row, i) for i, row in enumerate(rows)]
    form = Form(raw, system)
    good, lengths, skipped = usable(pair, parsed, form)
    if not good:
        raise RequestError("no row can be used" + (f"; line {skipped[0].line}: {skipped[0].why}" if skipped else ""))
    work = list(batches(good, lengths, batch_size))
    results = []
    for temperature in temperatures:
        started, done = time.perf_counter(), list[Conversation]()

        def draw(row: Row, turn: int, temperature: float = temperature) -> SamplingParams:
            return sampling_of(temperature, seed_of(seed, row.index, turn), top_k, top_p, min_p)

        for batch in work:
            if progress is not None:
                progress(len(done), len(good), temperature)
            done += converse(pair, batch, form, draw, policy, max_new_tokens, batch_size, record=True)
        if progress is not None:
            progress(len(done), len(good), temperature)
        results.append(summarise(done, temperature, slots, time.perf_counter() - started))
    return Evaluation(pair.draft_name or "draft", slots, tuple(results), tuple(skipped))
