"""Requests: checked on the host before anything is computed, decoded in groups, reported when they end (SPEC section 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.config_values import whole_number
from dspark_jax.decode import prefill, remembering
from dspark_jax.errors import RequestError
from dspark_jax.pair import Pair
from dspark_jax.profile import bind
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive, FixedLength, Policy, check_policy
from dspark_jax.state import ERROR, LENGTH, STOP, DecodeState, new_state

FINISH_REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}
MAX_BATCH = 16

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one request.

    Attributes:
      rounds: passes of the target after the prefill. drafts_verified, drafts_accepted: summed over rounds.
      accepted_length: committed tokens per round, the target's own included; nan without a round.
      acceptance_by_position: share of rounds whose slot k was accepted, among those that checked slot k.
      degenerate_rounds: sampled rounds in which a draft distribution was unusable, or left nothing to draw a replacement
        from, and the target decided alone; batches that are greedy throughout compare ids and do not count them.
    """

    prompt_tokens: int
    new_tokens: int
    rounds: int
    drafts_verified: int
    drafts_accepted: int
    accepted_length: float
    acceptance_by_position: tuple[float, ...]
    degenerate_rounds: int


@dataclasses.dataclass(frozen=True)
class Output:
    """One answer. ``token_ids`` holds new tokens only, a stop token included; ``text`` (None without a tokenizer) leaves a
    stop token out. ``accepted_per_round`` counts committed tokens of every round; the prefill's token is not in it."""

    token_ids: list[int]
    text: str | None
    finish_reason: str
    accepted_per_round: list[int]
    verified_per_round: list[int]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked call: everything that can be refused has been."""

    pair: Pair
    ids: list[list[int]]
    sampling: list[SamplingParams]
    policy: Policy
    slots: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    batch_size: int
    chunk: int

    @staticmethod
    def make(
        pair: Pair,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        scheduler: Policy | None,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None,
        batch_size: int | None,
        chunk: int | None,
    ) -> Plan:
        vocab = pair.model.target.vocab_size
        if isinstance(prompts, str | bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
        max_new_tokens = whole("max_new_tokens", max_new_tokens, 0)
        if isinstance(sampling, SamplingParams) or sampling is None:
            sampling = [sampling or SamplingParams()] * len(prompts)
        if not isinstance(sampling, Sequence):
            raise RequestError(f"sampling must be one SamplingParams or a list of them, got {type(sampling).__name__}")
        if len(sampling) != len(prompts) or not all(isinstance(s, SamplingParams) for s in sampling):
            raise RequestError(
                f"sampling must be one SamplingParams or one per prompt: {len(prompts)} prompts, {len(sampling)} given"
            )
        if isinstance(stop_token_ids, str | bytes | bytearray) or not isinstance(stop_token_ids, Sequence | np.ndarray | None):
            raise RequestError(f"stop_token_ids must be a list of token ids or None, got {type(stop_token_ids).__name__}")
        stops = pair.model.target.eos_token_ids if stop_token_ids is None else tuple(stop_token_ids)
        _check_ids("stop_token_ids", stops, vocab)
        if scheduler is None:
            scheduler = default_policy(pair)
        slots = check_policy(scheduler, pair.model.draft)
        ids = [_encode(pair, prompt, i) for i, prompt in enumerate(prompts)]
        size = batch_size if batch_size is not None else max(1, min(len(ids), MAX_BATCH))
        size = whole("batch_size", size, 1)
        longest = max((len(p) for p in ids), default=1)
        chunk = chunk_for(longest) if chunk is None else chunk
        chunk = whole("prefill_chunk", chunk, 1)
        draws = coupled_where_needed(sampling, scheduler)
        if ids and max_new_tokens:
            context = pair.model.target.max_positions
            capacity = capacity_for(min(longest + max_new_tokens, context), context)
            scheduler = bind(scheduler, pair, size, capacity, sampled=not all(s.greedy for s in draws))
        return Plan(pair, ids, draws, scheduler, slots, max_new_tokens, tuple(stops), size, chunk)

    def groups(self) -> Iterator[Group]:
        for start in range(0, len(self.ids), self.batch_size):
            yield Group(self, list(range(start, min(start + self.batch_size, len(self.ids)))))


@dataclasses.dataclass(frozen=True)
class Group:
    """The prompts of one batch; a last, smaller group is filled up with idle rows so that it runs the same program."""

    plan: Plan
    indices: list[int]

    def start(self) -> DecodeState | None:
        """The state after the prefill, or None when no token is asked for (then nothing is computed)."""
        plan = self.plan
        if plan.max_new_tokens == 0:
            return None
        context = plan.pair.model.target.max_positions
        idle: list[list[int]] = [[]] * (plan.batch_size - len(self.indices))
        prompts = [plan.ids[i] for i in self.indices] + idle
        limits = [min(len(p) + plan.max_new_tokens, context) for p in prompts]
        sampling = [plan.sampling[i] for i in self.indices] + [SamplingParams()] * len(idle)
        state = new_state(
            plan.pair.model,
            prompts,
            SamplingState.from_params(sampling),
            limits,
            plan.stop_ids,
            capacity_for(max(limits), context),
            plan.pair.dtype,
            drafts=plan.policy.drafts,
        )
        state = prefill(plan.pair.model, plan.pair.params, state, chunk=plan.chunk)
        return remembering(state, plan.policy, plan.slots)

    def outputs(self, state: DecodeState | None, rows: Sequence[int] | None = None) -> dict[int, Output]:
        """The answers of ``rows`` (default: all), by prompt index."""
        plan = self.plan
        if state is None:
            empty = [Stats(len(plan.ids[i]), 0, 0, 0, 0, float("nan"), (), 0) for i in self.indices]
            text = "" if plan.pair.tokenizer else None
            return {i: Output([], text, "length", [], [], s) for i, s in zip(self.indices, empty, strict=True)}
        log = state.log
        tokens, length, status = (np.asarray(x) for x in (state.tokens, state.length, state.status))
        rounds, verified, accepted, committed, degenerate = (
            np.asarray(x) for x in (log.rounds, log.verified, log.accepted, log.committed, log.degenerate)
        )
        result = {}
        for row in range(len(self.indices)) if rows is None else rows:
            index = self.indices[row]
            start, end, count = len(plan.ids[index]), int(length[row]), int(rounds[row])
            ids = tokens[row, start:end].tolist()
            checked, kept, added = (x[row, :count] for x in (verified, accepted, committed))
            text = None
            if plan.pair.tokenizer is not None:
                visible = ids[:-1] if status[row] == STOP else ids
                text = plan.pair.tokenizer.decode(plan.pair.tokenizer.known(visible))
            stats = Stats(
                prompt_tokens=start,
                new_tokens=len(ids),
                rounds=count,
                drafts_verified=int(checked.sum()),
                drafts_accepted=int(kept.sum()),
                accepted_length=float(added.mean()) if count else float("nan"),
                acceptance_by_position=acceptance_by_position(checked, kept, plan.slots),
                degenerate_rounds=int(degenerate[row]),
            )
            reason = FINISH_REASONS[int(status[row])]
            result[index] = Output(ids, text, reason, added.tolist(), checked.tolist(), stats)
        return result


def default_policy(pair: Pair) -> Policy:
    """Whole blocks; plain decoding without a draft."""
    return Autoregressive() if pair.model.draft is None else FixedLength()


def coupled_where_needed(sampling: Sequence[SamplingParams], policy: Policy) -> list[SamplingParams]:
    """``sampling`` with ``coupled`` decided: a request with a seed gives the same tokens every time, so it is coupled where the
    policy goes by the machine's speed or by the rest of the batch.

    Raises:
      RequestError: a policy for greedy and coupled requests only, and a request that is neither.
    """
    wide, free_only = (bool(getattr(policy, name, False)) for name in ("beyond_row", "free_only"))
    out = []
    for i, one in enumerate(sampling):
        coupled = one.coupled if one.coupled is not None else wide and one.seed is not None
        if free_only and not coupled and not one.greedy:
            raise RequestError(
                f"scheduler={type(policy).__name__} is for greedy and coupled requests; sampling of prompts[{i}] is neither:"
                " give coupled=True"
            )
        out.append(dataclasses.replace(one, coupled=coupled))
    return out


def acceptance_by_position(verified: np.ndarray, accepted: np.ndarray, slots: int) -> tuple[float, ...]:
    """For slot k = 1..slots: rounds that accepted k or more drafts over rounds that checked k or more; nan where none did."""
    checked = [int((verified >= k).sum()) for k in range(1, slots + 1)]
    kept = [int(((accepted >= k) & (verified >= k)).sum()) for k in range(1, slots + 1)]
    return tuple(a / c if c else float("nan") for a, c in zip(kept, checked, strict=True))


def whole(name: str, value: Any, least: int) -> int:
    """``value`` as a Python integer: a narrow NumPy one would wrap where it is added to."""
    index = whole_number(value)
    if index is None or index < least:
        raise RequestError(f"{name}={value!r} must be an integer of at least {least}")
    return index


def _check_ids(name: str, ids: Sequence[Any], vocab: int) -> None:
    for i in ids:
        index = whole_number(i)
        if index is None:
            raise RequestError(f"{name} holds {i!r}; token ids are integers")
        if not 0 <= index < vocab:
            raise RequestError(f"{name} holds token id {i}, outside [0, {vocab})")


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _encode(pair: Pair, prompt: Prompt, index: int) -> list[int]:
    """Token ids of one prompt, checked."""
    name = f"prompts[{index}]"
    if isinstance(prompt, str) or _is_chat(prompt):
        if pair.tokenizer is None:
            raise RequestError(f"{name} is text, but {pair.target_name} has no tokenizer.json; give token ids")
        encode: Any = pair.tokenizer.encode if isinstance(prompt, str) else pair.tokenizer.encode_chat
        ids = encode(prompt)
    elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray | memoryview):
        ids = list(prompt)
    else:
        raise RequestError(f"{name} must be text, token ids or chat messages, got {type(prompt).__name__}")
    if not ids:
        raise RequestError(f"{name} is empty; a prompt needs at least one token")
    _check_ids(name, ids, pair.model.target.vocab_size)
    context = pair.model.target.max_positions
    if len(ids) >= context:
        raise RequestError(f"{name} has {len(ids)} tokens; the model's context of {context} leaves no room for an answer")
    return [int(i) for i in ids]


def chunk_for(longest: int) -> int:
    """Few sizes, so that few programs are compiled; small ones waste less on short prompts."""
    return 32 if longest <= 32 else 64 if longest <= 256 else 256


def capacity_for(tokens: int, context: int) -> int:
    """Cache capacity: the next power of two from 256, at most the model's context."""
    size = 256
    while size < tokens:
        size *= 2
    return min(size, context)
