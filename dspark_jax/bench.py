"""Timed decoding: how long a prefill and the rounds after it take, and plain against speculative in one interleaved run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from dspark_jax.decode import decode
from dspark_jax.generate import ALL_ROUNDS
from dspark_jax.pair import Pair
from dspark_jax.requests import Group, Output, Plan, Prompt, acceptance_by_position, capacity_for
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Policy

NO_ROUNDS = np.int32(0)
FAILURES = (jax.errors.JaxRuntimeError, MemoryError)  # of the machine, not of the request


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds and counts of one batch. ``compile_seconds`` is spent on getting the loop's program, none when it is known;
    ``decode_seconds`` covers the ``rounds`` of the loop and the ``tokens`` they committed: the prefill's are not in it."""

    prefill_seconds: float
    compile_seconds: float
    decode_seconds: float
    rounds: int
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.tokens else float("nan")


@dataclasses.dataclass(frozen=True)
class TimedOutputs:
    """Answers in the order of their prompts, and one timing a batch."""

    outputs: list[Output]
    timings: list[Timing]

    @property
    def tokens_per_second(self) -> float:
        """Of all batches together; nan where no round was run."""
        seconds, tokens = (sum(getattr(t, name) for t in self.timings) for name in ("decode_seconds", "tokens"))
        return tokens / seconds if tokens else float("nan")


def timed_generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    scheduler: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_chunk: int | None = None,
) -> TimedOutputs:
    """``generate`` with a clock. Arguments and errors are its own."""
    plan = Plan.make(pair, prompts, sampling, scheduler, max_new_tokens, stop_token_ids, batch_size, prefill_chunk)
    outputs: dict[int, Output] = {}
    timings = []
    for group in plan.groups():
        answers, timing = _timed_group(plan, group)
        outputs |= answers
        timings.append(timing)
    return TimedOutputs([outputs[i] for i in range(len(prompts))], timings)


def _timed_group(plan: Plan, group: Group) -> tuple[dict[int, Output], Timing]:
    clock = [time.perf_counter()]
    state = group.start()
    if state is None:
        return group.outputs(None), Timing(0.0, 0.0, 0.0, 0, 0)
    for rounds in (None, NO_ROUNDS, ALL_ROUNDS):  # without rounds the loop's program is compiled, or found, and left
        if rounds is not None:
            state = decode(plan.pair.model, plan.pair.params, state, plan.policy, rounds)
        jax.block_until_ready(state)
        clock.append(time.perf_counter())
    answers = group.outputs(state)
    prefill, compiling, decoding = (b - a for a, b in itertools.pairwise(clock))
    rounds_run = max(o.stats.rounds for o in answers.values())
    tokens = sum(sum(o.accepted_per_round) for o in answers.values())
    return answers, Timing(prefill, compiling, decoding, rounds_run, tokens)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of prompts that is measured as one, and the sampling of each."""

    prompts: list[Prompt]
    sampling: list[SamplingParams]
    domain: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement of one case under one policy; ``failure`` says why there is no usable one (PITFALLS P12)."""

    policy: str
    case: int
    repeat: int
    timing: Timing | None
    outputs: list[Output]
    failure: str | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """One policy over some cases. Medians run over cases, each of which counts with the median of its repeats.

    Attributes:
      ratio: median over cases of the speed in tokens/s over that of plain decoding in the same case.
      ratio_of_totals: all tokens by all seconds, over the same of plain decoding; only cases that both completed.
      same_as_plain: cases whose greedy tokens equal plain decoding's, and cases compared; None when sampled.
    """

    policy: str
    domain: str
    cases: int
    failed: int
    tokens: int
    tokens_per_second: float
    ms_per_round: float
    prefill_ms: float
    accepted_length: float
    verified_length: float
    acceptance_by_position: tuple[float, ...]
    ratio: float
    ratio_of_totals: float
    same_as_plain: tuple[int, int] | None


PLAIN = "ar"


def warm_up(
    pair: Pair, cases: Sequence[Case], policies: Mapping[str, Policy], max_new_tokens: int, batch_size: int
) -> Iterator[str]:
    """Compile and run once whatever the cases need: every shape under every policy. Yields what comes next."""
    seen = set()
    context = pair.model.target.max_positions
    for name, policy in policies.items():
        for case in cases:
            plan = Plan.make(pair, case.prompts, case.sampling, policy, max_new_tokens, None, batch_size, None)
            capacity = capacity_for(min(max(map(len, plan.ids)) + max_new_tokens, context), context)
            if (name, plan.chunk, capacity) in seen:
                continue
            seen.add((name, plan.chunk, capacity))
            yield f"compiling {name}, capacity {capacity}"
            with contextlib.suppress(*FAILURES):  # the measurement fails in the same way, and says so
                state = next(plan.groups()).start()
                if state is not None:
                    jax.block_until_ready(decode(pair.model, pair.params, state, plan.policy, np.int32(2)))


def measure(
    pair: Pair,
    cases: Sequence[Case],
    policies: Mapping[str, Policy],
    max_new_tokens: int,
    batch_size: int,
    repeats: int,
) -> Iterator[Run]:
    """Run every case under every policy, interleaved: the order turns around from one repeat to the next.

    A run that fails is reported as failed and the next one goes on.
    """
    for number, case in enumerate(cases):
        for repeat in range(repeats):
            names = list(policies)
            for name in names if (number + repeat) % 2 == 0 else reversed(names):
                yield _measured(pair, case, name, policies[name], max_new_tokens, batch_size, number, repeat)


def _measured(
    pair: Pair, case: Case, name: str, policy: Policy, max_new_tokens: int, batch_size: int, number: int, repeat: int
) -> Run:
    try:
        timed = timed_generate(pair, case.prompts, case.sampling, policy, max_new_tokens, batch_size=batch_size)
    except FAILURES as error:
        return Run(name, number, repeat, None, [], f"{type(error).__name__}: {error}".splitlines()[0])
    if any(o.finish_reason == "error" for o in timed.outputs):
        return Run(name, number, repeat, None, timed.outputs, "the target's logits are not finite")
    return Run(name, number, repeat, timed.timings[0], timed.outputs)


def summarise(
    runs: Sequence[Run], policy: str, slots: int, greedy: bool, cases: Sequence[Case], domain: str | None = None
) -> Summary:
    """What ``runs`` say about ``policy``, over all cases or those of one ``domain``."""
    wanted = [i for i, case in enumerate(cases) if domain is None or case.domain == domain]
    mine, plain = (_by_case(runs, name, wanted) for name in (policy, PLAIN))
    done = {i: timed for i, timed in mine.items() if timed}
    both = [i for i in done if plain.get(i)]
    firsts = [timed[0].outputs for timed in done.values()]
    verified, accepted = _rounds([o for outputs in firsts for o in outputs])
    committed = [n for outputs in firsts for o in outputs for n in o.accepted_per_round]
    same = sum(_tokens(mine[i]) == _tokens(plain[i]) for i in both)
    return Summary(
        policy=policy,
        domain=domain or "all",
        cases=len(done),
        failed=sum(r.failure is not None for r in runs if r.policy == policy and r.case in set(wanted)),
        tokens=sum(sum(len(o.token_ids) for o in outputs) for outputs in firsts),
        tokens_per_second=_median([_speed(timed) for timed in done.values()]),
        ms_per_round=_median([1e3 * _over(timed, lambda t: t.decode_seconds / t.rounds) for timed in done.values()]),
        prefill_ms=_median([1e3 * _over(timed, lambda t: t.prefill_seconds) for timed in done.values()]),
        accepted_length=float(np.mean(committed)) if committed else float("nan"),
        verified_length=float(verified.mean()) if verified.size else float("nan"),
        acceptance_by_position=acceptance_by_position(verified, accepted, slots),
        ratio=_median([_speed(mine[i]) / _speed(plain[i]) for i in both]),
        ratio_of_totals=_total([mine[i] for i in both]) / _total([plain[i] for i in both]) if both else float("nan"),
        same_as_plain=(same, len(both)) if greedy else None,
    )


def _by_case(runs: Sequence[Run], policy: str, wanted: Sequence[int]) -> dict[int, list[Run]]:
    """The completed runs of each case that had any rounds; a case with a failed run has none."""
    failed = {r.case for r in runs if r.policy == policy and r.failure is not None}
    usable = [r for r in runs if r.policy == policy and r.case not in failed and r.timing is not None and r.timing.rounds]
    return {i: [r for r in usable if r.case == i] for i in wanted}


def _over(timed: Sequence[Run], value: Callable[[Timing], float]) -> float:
    """Median over a case's repeats."""
    return _median([value(r.timing) for r in timed if r.timing is not None])


def _speed(timed: Sequence[Run]) -> float:
    return _over(timed, lambda t: t.tokens_per_second)


def _total(cases: Sequence[Sequence[Run]]) -> float:
    timings = [r.timing for timed in cases for r in timed if r.timing is not None]
    return sum(t.tokens for t in timings) / sum(t.decode_seconds for t in timings)


def _tokens(timed: Sequence[Run]) -> list[list[int]]:
    return [o.token_ids for o in timed[0].outputs]


def _rounds(outputs: Sequence[Output]) -> tuple[np.ndarray, np.ndarray]:
    """Drafts checked and accepted in every round. Of a last round that a stop token cut, the total tells the rest."""
    verified: list[int] = []
    accepted: list[int] = []
    for output in outputs:
        kept = [max(n - 1, 0) for n in output.accepted_per_round]
        if kept:
            kept[-1] = output.stats.drafts_accepted - sum(kept[:-1])
        verified += output.verified_per_round
        accepted += kept
    return np.asarray(verified, np.int32), np.asarray(accepted, np.int32)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")
