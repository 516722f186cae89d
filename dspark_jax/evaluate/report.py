"""From rounds to results: by source, by domain, over everything, and one draft against another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.errors import RequestError
from dspark_jax.evaluate import metrics
from dspark_jax.evaluate.metrics import Calibration, Estimate
from dspark_jax.rows import BadRow
from dspark_jax.turns import Conversation


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Every round of a run: prompt int32 ``[R]`` (place in ``TemperatureResult.prompts``), verified, accepted, committed int32
    ``[R]``, confidence float32 logits ``[R, n]`` or None."""

    prompt: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    confidence: np.ndarray | None

    def of(self, prompts: Sequence[int]) -> Rounds:
        """The rounds of some prompts."""
        keep = np.isin(self.prompt, np.asarray(prompts, np.int64))
        cut = None if self.confidence is None else self.confidence[keep]
        return Rounds(self.prompt[keep], self.verified[keep], self.accepted[keep], self.committed[keep], cut)


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One prompt, all its turns together. committed: tokens of its rounds; new_tokens also counts the prefills' tokens."""

    index: int
    source: str
    domain: str
    turns: int
    rounds: int
    committed: int
    verified: int
    new_tokens: int
    finish: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """Some prompts together.

    Attributes:
      accepted_length: tokens committed by all rounds over the number of rounds (pooled); a round commits its accepted drafts
        and one token of the target. The last round counts too; a stop token or the limit may have cut it short.
      accepted_length_by_prompt: the mean over prompts of each prompt's own mean. Both with a 95 % interval by prompt.
      survival_by_position: share of rounds that accepted slots 1..k, among those that judged them.
      conditional_by_position: share that accepted slot k, among those that accepted 1..k-1 and judged it.
      survival_seen, conditional_seen: how many rounds these shares are of.
      conditional, survival: how true the head's c_k, and the running product of them, were; None without confidences.
    """

    prompts: int
    turns: int
    rounds: int
    committed: int
    verified_length: float
    accepted_length: Estimate
    accepted_length_by_prompt: Estimate
    survival_by_position: tuple[float, ...]
    survival_seen: tuple[int, ...]
    conditional_by_position: tuple[float, ...]
    conditional_seen: tuple[int, ...]
    conditional: Calibration | None
    survival: Calibration | None


@dataclasses.dataclass(frozen=True)
class TemperatureResult:
    """One temperature.

    Attributes:
      accepted_length: the headline: the mean over sources of each source's pooled accepted length, every source counting
        the same; its interval resamples prompts within each source.
      cut: conversations that ended before their last turn, as (line, why).
      seconds: of computing, compilation included.
    """

    temperature: float
    accepted_length: Estimate
    overall: GroupResult
    sources: dict[str, GroupResult]
    domains: dict[str, GroupResult]
    prompts: tuple[PromptResult, ...]
    cut: tuple[BadRow, ...]
    seconds: float
    rounds: Rounds


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One draft on some prompts. ``results``: one for every temperature. ``skipped``: rows that could not be used."""

    draft: str
    slots: int
    results: tuple[TemperatureResult, ...]
    skipped: tuple[BadRow, ...]

    def at(self, temperature: float) -> TemperatureResult:
        return next(r for r in self.results if r.temperature == temperature)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``second`` less ``first`` in accepted length, on the same prompts (paired by prompt): the headline, and pooled by source
    and domain."""

    temperature: float
    first: str
    second: str
    accepted_length: Estimate
    sources: dict[str, Estimate]
    domains: dict[str, Estimate]


def summarise(conversations: Sequence[Conversation], temperature: float, slots: int, seconds: float) -> TemperatureResult:
    """The result of answered conversations, in the order of their rows."""
    done = sorted(conversations, key=lambda c: c.row.index)
    prompts, number, turns = [], [], []
    for place, conversation in enumerate(done):
        answered = conversation.turns
        rounds, row = sum(len(t.committed) for t in answered), conversation.row
        prompts.append(
            PromptResult(
                index=row.index,
                source=row.source,
                domain=row.domain,
                turns=len(answered),
                rounds=rounds,
                committed=sum(int(t.committed.sum()) for t in answered),
                verified=sum(int(t.verified.sum()) for t in answered),
                new_tokens=sum(len(t.token_ids) for t in answered),
                finish=tuple(t.finish for t in answered),
            )
        )
        number += [place] * rounds
        turns += answered
    logits = [t.confidence for t in turns if t.confidence is not None]
    table = Rounds(
        np.asarray(number, np.int32),
        _joined([t.verified for t in turns]),
        _joined([t.accepted for t in turns]),
        _joined([t.committed for t in turns]),
        np.concatenate(logits) if logits else None,
    )

    def grouped(name: str) -> dict[str, GroupResult]:
        names = dict.fromkeys(getattr(p, name) for p in prompts)
        members = {n: [i for i, p in enumerate(prompts) if getattr(p, name) == n] for n in names if n}
        return {n: _group(prompts, table, m, slots) for n, m in members.items()}

    return TemperatureResult(
        temperature,
        metrics.ratio_estimate(*_by_source(prompts)),
        _group(prompts, table, range(len(prompts)), slots),
        grouped("source"),
        grouped("domain"),
        tuple(prompts),
        tuple(BadRow(c.row.line, c.cut) for c in done if c.cut is not None),
        seconds,
        table,
    )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *parts])


def _group(prompts: Sequence[PromptResult], table: Rounds, members: Sequence[int], slots: int) -> GroupResult:
    mine = [prompts[i] for i in members]
    rounds = table.of(members)
    seen = metrics.outcomes(rounds.verified, rounds.accepted, rounds.committed, slots)
    committed, counts = _ratio(mine)
    ran = counts > 0
    conditional = survival = None
    if rounds.confidence is not None:
        c = metrics.probabilities(rounds.confidence)
        conditional = metrics.calibration(c, seen.conditional, seen.conditional_seen)
        survival = metrics.calibration(np.cumprod(c, axis=1), seen.survival, seen.survival_seen)
    return GroupResult(
        len(mine),
        sum(p.turns for p in mine),
        int(counts.sum()),
        int(committed.sum()),
        float(rounds.verified.mean()) if rounds.verified.size else float("nan"),
        metrics.ratio_estimate([committed], [counts]),
        metrics.ratio_estimate([committed[ran] / counts[ran]], [np.ones(int(ran.sum()))]),
        *metrics.share(seen.survival, seen.survival_seen),
        *metrics.share(seen.conditional, seen.conditional_seen),
        conditional,
        survival,
    )


def _ratio(prompts: Sequence[PromptResult]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray([p.committed for p in prompts], np.float64), np.asarray([p.rounds for p in prompts], np.float64)


Ratios = tuple[list[np.ndarray], list[np.ndarray]]


def _by_source(prompts: Sequence[PromptResult]) -> Ratios:
    """Committed tokens and rounds of every prompt, by source. A source that ran not one round has no accepted length and is
    left out."""
    groups = [_ratio([p for p in prompts if p.source == s]) for s in dict.fromkeys(p.source for p in prompts)]
    groups = [g for g in groups if g[1].sum() > 0]
    return [g[0] for g in groups], [g[1] for g in groups]


def compare(first: Evaluation, second: Evaluation) -> list[Comparison]:
    """``second`` against ``first`` at every temperature that both ran.

    Raises:
      RequestError: they did not answer the same prompts.
    """
    shared = [r.temperature for r in second.results if r.temperature in {x.temperature for x in first.results}]
    return [_compare(first.draft, second.draft, first.at(t), second.at(t)) for t in shared]


def _compare(name: str, other: str, a: TemperatureResult, b: TemperatureResult) -> Comparison:
    if [(p.index, p.source) for p in a.prompts] != [(p.index, p.source) for p in b.prompts]:
        raise RequestError(f"{name} and {other} did not answer the same prompts; a paired comparison needs them")

    def difference(field: str, value: str) -> Estimate:
        sides = [_ratio([p for p in side.prompts if getattr(p, field) == value]) for side in (a, b)]
        (x, over), (y, under) = sides
        return metrics.paired_difference(([x], [over]), ([y], [under]))

    return Comparison(
        a.temperature,
        name,
        other,
        metrics.paired_difference(_by_source(a.prompts), _by_source(b.prompts)),
        {s: difference("source", s) for s in a.sources},
        {d: difference("domain", d) for d in a.domains},
    )


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything but the single rounds."""
    results = []
    for r in evaluation.results:
        fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name not in ("rounds", "prompts")}
        columns = [f.name for f in dataclasses.fields(PromptResult)]
        fields["prompts"] = [{name: getattr(p, name) for name in columns} for p in r.prompts]
        results.append(fields)
    return {"draft": evaluation.draft, "slots": evaluation.slots, "results": results}
