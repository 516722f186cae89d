"""From prompts to answers: at once, or as a stream of what every update adds (SPEC section 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dspark_jax.decode import decode
from dspark_jax.pair import Pair
from dspark_jax.requests import Output, Plan, Prompt, whole
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Policy
from dspark_jax.state import RUNNING, STOP
from dspark_jax.text import IncrementalDecoder

ALL_ROUNDS = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one update of a stream adds to request ``index``; ``output`` is set on the last one."""

    index: int
    token_ids: list[int]
    text: str
    output: Output | None = None


def generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    scheduler: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_chunk: int | None = None,
) -> list[Output]:
    """Answer every prompt.

    Args:
      prompts: each a list of token ids, a string (encoded as it stands), or a list of chat messages
        ``{"role", "content"}`` (rendered with the chat template).
      sampling: one for all, or one per prompt; default: greedy.
      scheduler: how many drafts to check; default: whole blocks, or plain decoding when the pair has no draft. The first
        call with a policy that goes by measured costs measures them, see docs/scheduling.md.
      max_new_tokens: at most this many new tokens; a request also ends where the model's context is full.
      stop_token_ids: exactly these end a request; None: the model's own end-of-sequence ids.
      batch_size: rows decoded together; default: all prompts, up to 16. The tokens of a request that is greedy or has a
        seed do not depend on it.
      prefill_chunk: prompt tokens a row and pass; default: chosen from the longest prompt.

    Raises:
      RequestError: an illegal prompt, sampling value, limit or scheduler, before anything is computed.
    """
    outputs: dict[int, Output] = {}
    plan = Plan.make(pair, prompts, sampling, scheduler, max_new_tokens, stop_token_ids, batch_size, prefill_chunk)
    for group in plan.groups():
        state = group.start()
        if state is not None:
            state = decode(pair.model, pair.params, state, plan.policy, ALL_ROUNDS)
        outputs.update(group.outputs(state))
    return [outputs[i] for i in range(len(prompts))]


def stream(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    scheduler: Policy | None = None,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_chunk: int | None = None,
    rounds_per_update: int = 1,
) -> Iterator[Delta]:
    """The streaming form of ``generate``: yields what every update of ``rounds_per_update`` rounds added.

    The text of a request's deltas, joined, is its ``Output.text``; a character is never cut in half. Arguments and errors
    are those of ``generate``; they are checked at the call, before the first delta is asked for.
    """
    rounds_per_update = whole("rounds_per_update", rounds_per_update, 1)
    plan = Plan.make(pair, prompts, sampling, scheduler, max_new_tokens, stop_token_ids, batch_size, prefill_chunk)
    return _deltas(plan, rounds_per_update)


def _deltas(plan: Plan, rounds_per_update: int) -> Iterator[Delta]:
    pair = plan.pair
    for group in plan.groups():
        state = group.start()
        if state is None:
            for index, output in group.outputs(None).items():
                yield Delta(index, [], "", output)
            continue
        decoders = {i: IncrementalDecoder(pair.tokenizer) for i in group.indices} if pair.tokenizer else {}
        sent = {i: len(plan.ids[i]) for i in group.indices}
        open_rows = dict(enumerate(group.indices))
        while open_rows:
            tokens, length, status = (np.asarray(x) for x in (state.tokens, state.length, state.status))
            ended = [row for row in open_rows if status[row] != RUNNING]
            outputs = group.outputs(state, ended) if ended else {}
            for row, index in list(open_rows.items()):
                new = tokens[row, sent[index] : length[row]].tolist()
                sent[index] += len(new)
                text = ""
                if index in decoders:
                    visible = new[:-1] if status[row] == STOP else new
                    text = decoders[index].push(pair.tokenizer.known(visible) if pair.tokenizer else visible)
                    text += decoders[index].finish() if row in ended else ""
                if new or row in ended:
                    yield Delta(index, new, text, outputs.get(index))
                if row in ended:
                    del open_rows[row]
            if open_rows:
                state = decode(pair.model, pair.params, state, plan.policy, np.int32(rounds_per_update))
