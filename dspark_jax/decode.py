"""One round of speculative decoding, and the loop over rounds (SPEC section 2). Read this file first.

Everything here is a pure function of pytrees. ``prefill`` and ``decode`` are jitted, donate the state and never visit the
host; ``decode_step`` is one round. Axes: B rows, n slots drafted, T = n + 1 positions checked, N tokens of a pass,
V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from dspark_jax import draft, heads, target
from dspark_jax.attention import context_bucket
from dspark_jax.cache import KVCache, TokenBatch, context_sizes, pack, to_grid, write
from dspark_jax.errors import RequestError
from dspark_jax.params import Params
from dspark_jax.sampling import Purpose, best_token, draft_noise, draw, gumbel, is_finite_row, log_probs, uniforms
from dspark_jax.schedule import Policy, RoundView, check_policy
from dspark_jax.state import ERROR, LENGTH, RUNNING, STOP, DecodeState, ModelConfig
from dspark_jax.verify import AcceptResult, accept, accept_coupled, accept_greedy


def decode_step(model: ModelConfig, params: Params, state: DecodeState, policy: Policy) -> DecodeState:
    """One round for every decoding row: draft, schedule, verify, accept, commit. Rows that ended are left alone."""
    slots = check_policy(policy, model.draft)
    if hasattr(policy, "memory") and state.memory is None:
        raise RequestError(f"{type(policy).__name__} remembers, but the state has no memory: see decode.remembering")
    greedy = jnp.all((state.sampling.temperature == 0) | ~state.decoding)
    view = look(state, slots, greedy)

    def drafted() -> _Round:
        proposal = propose(model, params, state, slots, greedy) if slots else None
        scheduled = schedule(view, proposal, policy)
        logits, done = check(model, params, state, proposal, scheduled, sizes)
        result = judge(state, proposal, scheduled, logits, greedy)
        if proposal is None:
            return _Round(jnp.zeros((rows, 0), jnp.int32), None, scheduled, result, done)
        return _Round(proposal.tokens, proposal.confidence, scheduled, result, done)

    def plain() -> _Round:
        nothing = jnp.zeros_like(view.most)
        logits, done = check(model, params, state, None, nothing, tuple(n for n in sizes if n <= rows), sizes[-1])
        tokens = jnp.zeros((rows, slots), jnp.int32)
        unknown = jnp.full((rows, slots), jnp.nan, jnp.float32) if model.drafter.confidence_head else None
        return _Round(tokens, unknown, nothing, judge(state, None, nothing, logits, greedy), done)

    rows = state.length.shape[0]
    sizes = policy.token_sizes(rows, slots)
    asleep = policy.asleep(view) if hasattr(policy, "asleep") else None
    this = drafted() if asleep is None else jax.lax.cond(asleep, plain, drafted)
    proposal = heads.Proposal(this.tokens, jnp.zeros((rows, 0, 0), jnp.float32), this.confidence) if slots else None
    if hasattr(policy, "remember"):
        with jax.named_scope("remember"):
            seen = view.replace(confidence=None if this.confidence is None else jax.nn.sigmoid(this.confidence))
            woke = jnp.ones((), bool) if asleep is None else ~asleep
            state = state.replace(memory=policy.remember(seen, this.scheduled, this.result.accepted, woke))
    return commit(_store(state, this.done), proposal, this.scheduled, this.result)


def propose(model: ModelConfig, params: Params, state: DecodeState, slots: int, greedy: jax.Array) -> heads.Proposal:
    """Steps 1 to 3: one parallel pass over the block, then ``slots`` tokens from left to right, with confidences."""
    anchor = jnp.take_along_axis(state.tokens, state.context[:, None], axis=1)[:, 0]
    with jax.named_scope("draft_block"):
        hidden = draft.block_hidden(
            params["draft"],
            model.drafter,
            params["target"]["embed"],
            anchor,
            state.context,
            state.draft_context,
            state.decoding,
        )[:, :slots]
        kept = params["draft"].get("vocabulary")  # ids of a reduced draft vocabulary; q is zero outside
        vocab = model.target.vocab_size
        base = target.unembed(params["target"] if kept is None else params["draft"], hidden)

    def whole(logits: jax.Array) -> jax.Array:
        if kept is None:
            return logits
        full = jnp.full((logits.shape[0], vocab), -jnp.inf, logits.dtype)
        return full.at[:, kept].set(logits)

    def pick(slot: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        def sampled() -> tuple[jax.Array, jax.Array]:
            log_q, _ = log_probs(whole(logits), state.sampling)
            return draw(log_q, draft_noise(state.sampling, state.length, slot, vocab)), log_q

        def best() -> tuple[jax.Array, jax.Array]:
            token = best_token(logits)
            return token if kept is None else kept[token], jnp.zeros((logits.shape[0], vocab), jnp.float32)

        return jax.lax.cond(greedy, best, sampled)

    with jax.named_scope("draft_heads"):
        return heads.propose(params["draft"], model.drafter, hidden, base, anchor, pick)


def remembering(state: DecodeState, policy: Policy, slots: int) -> DecodeState:
    """``state`` with the memory that ``policy`` starts with, if it has one; ``slots``: of ``check_policy``."""
    memory = policy.memory(state.length.shape[0], slots) if hasattr(policy, "memory") else None
    return state.replace(memory=memory)


def look(state: DecodeState, slots: int, greedy: jax.Array) -> RoundView:
    """What a policy may know before the drafter runs. A row may check no more than it may still commit, less the token that
    the target adds."""
    most = jnp.where(state.decoding, jnp.clip(state.limit - state.length - 1, 0, slots), 0)
    capacity = state.target_cache.capacity
    read = jnp.asarray(context_sizes(capacity), jnp.int32)[context_bucket(state.context, state.decoding, capacity)]
    free = jnp.all((state.sampling.temperature == 0) | state.sampling.coupled | ~state.decoding)
    return RoundView(
        None, state.decoding, most, state.log.rounds, state.sampling.weight, read, greedy, free, memory=state.memory
    )


def schedule(view: RoundView, proposal: heads.Proposal | None, policy: Policy) -> jax.Array:
    """Step 4: drafts to check for every row, int32 ``[B]``; at most ``view.most``."""
    with jax.named_scope("schedule"):
        if proposal is not None and proposal.confidence is not None:
            view = view.replace(confidence=jax.nn.sigmoid(proposal.confidence))
        lengths = policy.lengths(view)
        chex.assert_shape(lengths, view.most.shape)
        chex.assert_type(lengths, jnp.int32)
        return jnp.clip(lengths, 0, view.most)


class _Pass(NamedTuple):
    """What a pass leaves behind, padded to the largest compiled size: keys and values to store, and where."""

    target_kv: tuple[jax.Array, jax.Array]
    draft_kv: tuple[jax.Array, jax.Array] | None
    rows: jax.Array
    positions: jax.Array
    valid: jax.Array


class _Round(NamedTuple):
    """A round before it is committed. tokens: int32 ``[B, n]``; confidence: logits ``[B, n]`` or None."""

    tokens: jax.Array
    confidence: jax.Array | None
    scheduled: jax.Array
    result: AcceptResult
    done: _Pass


def _forward(
    model: ModelConfig, params: Params, batch: TokenBatch, target_cache: KVCache, drafts: bool
) -> tuple[jax.Array, _Pass]:
    """The target over ``batch`` and the drafter's context from its taps; final hidden states ``[N, D]`` and the rest."""
    taps = model.drafter.target_layer_ids if drafts else ()
    out = target.forward(params["target"], model.target, batch, target_cache, taps)
    context = None
    if drafts:
        with jax.named_scope("draft_context"):
            context = draft.context_keys_values(params["draft"], model.drafter, out.taps, batch.positions)
    return out.hidden, _Pass((out.k, out.v), context, batch.rows, batch.positions, batch.valid)


def _store(state: DecodeState, done: _Pass) -> DecodeState:
    """Write a pass into both caches. Rejected entries lie past the clock and are overwritten by the next write."""
    where = (done.rows, done.positions, done.valid)
    state = state.replace(target_cache=write(state.target_cache, *done.target_kv, *where))
    if done.draft_kv is not None:
        state = state.replace(draft_cache=write(state.draft_context, *done.draft_kv, *where))
    return state


def check(
    model: ModelConfig,
    params: Params,
    state: DecodeState,
    proposal: heads.Proposal | None,
    scheduled: jax.Array,
    sizes: tuple[int, ...],
    largest: int | None = None,
) -> tuple[jax.Array, _Pass]:
    """Step 5: one target pass over the anchor and the scheduled drafts of every decoding row.

    The pass runs at the smallest of ``sizes`` that holds the scheduled tokens. Returns float32 logits ``[B, T, V]`` (slots
    that were not scheduled mean nothing) and what is to be stored, padded to ``largest`` (default: the last size).
    """
    anchor = jnp.take_along_axis(state.tokens, state.context[:, None], axis=1)
    grid = anchor if proposal is None else jnp.concatenate([anchor, proposal.tokens], axis=1)
    counts = jnp.where(state.decoding, 1 + scheduled, 0)
    largest = sizes[-1] if largest is None else largest

    def over(size: int) -> tuple[jax.Array, _Pass]:
        batch = pack(grid, counts, state.context, size)
        hidden, done = _forward(model, params, batch, state.target_cache, state.draft_cache is not None)
        logits = to_grid(batch, target.unembed(params["target"], hidden))
        logits = jnp.pad(logits, ((0, 0), (0, grid.shape[1] - batch.width), (0, 0)))
        more = largest - size

        def grow(x: jax.Array, axis: int) -> jax.Array:
            return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])

        target_kv, draft_kv = jax.tree.map(lambda x: grow(x, 1), (done.target_kv, done.draft_kv))
        return logits, _Pass(target_kv, draft_kv, grow(done.rows, 0), grow(done.positions, 0), grow(done.valid, 0))

    with jax.named_scope("verify"):
        if len(sizes) == 1:
            return over(sizes[0])
        bucket = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), jnp.sum(counts, dtype=jnp.int32), side="left")
        return jax.lax.switch(bucket, [functools.partial(over, size) for size in sizes])


def judge(
    state: DecodeState, proposal: heads.Proposal | None, scheduled: jax.Array, logits: jax.Array, greedy: jax.Array
) -> AcceptResult:
    """Step 6: the accept rule on ``logits [B, T, V]``. Without drafts the same rule draws the next token from p."""
    rows, width, vocab = logits.shape
    tokens = jnp.zeros((rows, 0), jnp.int32) if proposal is None else proposal.tokens
    key = state.sampling.key

    def best() -> AcceptResult:
        choice = best_token(logits)
        return accept_greedy(tokens, choice, is_finite_row(logits), scheduled)

    def sampled() -> AcceptResult:
        log_p, finite = log_probs(logits, state.sampling)
        log_q = jnp.zeros((rows, 0, vocab), jnp.float32) if proposal is None else proposal.log_q
        at = state.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]

        def residual_noise(accepted: jax.Array) -> jax.Array:
            return gumbel(key, (state.length + accepted)[:, None], Purpose.RESIDUAL, vocab)[:, 0]

        def ordinary() -> AcceptResult:
            uniform = uniforms(key, at[:, :-1], Purpose.ACCEPT)
            return accept(tokens, log_q, log_p, finite, scheduled, uniform, residual_noise)

        def mixed() -> AcceptResult:
            same = accept_coupled(tokens, log_p, finite, scheduled, gumbel(key, at, Purpose.RESIDUAL, vocab))
            return jax.tree.map(lambda a, b: jnp.where(state.sampling.coupled, a, b), same, ordinary())

        # Without drafts the ordinary rule is the target's own draw already.
        return ordinary() if proposal is None else jax.lax.cond(jnp.any(state.sampling.coupled), mixed, ordinary)

    with jax.named_scope("accept"):
        return jax.lax.cond(greedy, best, sampled)


def commit(state: DecodeState, proposal: heads.Proposal | None, scheduled: jax.Array, result: AcceptResult) -> DecodeState:
    """Append the accepted drafts and the target's token, cut at the first stop token or at the limit, and log the round."""
    rows = state.length.shape[0]
    run = result.next_token[:, None]
    if proposal is not None:
        slot = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
        drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        run = jnp.where(slot < result.accepted[:, None], drafts, run)
    live = state.decoding
    before = state.length
    # Where the deciding row of the target is unusable, the drafts before it stand and no token of its own follows.
    own = result.ok.astype(jnp.int32)
    state = _append(state, run, jnp.where(live, result.accepted + own, 0), live & ~result.ok)
    log, at = state.log, jnp.where(live, state.log.rounds, state.tokens.shape[1])
    row = jnp.arange(rows, dtype=jnp.int32)
    committed = state.length - before
    log = log.replace(
        rounds=log.rounds + live.astype(jnp.int32),
        verified=log.verified.at[row, at].set(scheduled, mode="drop"),
        # A run cut by a stop token or the limit counts only the drafts it kept.
        accepted=log.accepted.at[row, at].set(jnp.minimum(result.accepted, committed), mode="drop"),
        committed=log.committed.at[row, at].set(committed, mode="drop"),
        degenerate=log.degenerate + (live & result.degenerate).astype(jnp.int32),
    )
    if log.confidence is not None and proposal is not None and proposal.confidence is not None:
        log = log.replace(confidence=log.confidence.at[row, at].set(proposal.confidence, mode="drop"))
    return state.replace(log=log)


def _append(state: DecodeState, run: jax.Array, count: jax.Array, failed: jax.Array) -> DecodeState:
    """Commit the first ``count [B]`` tokens of ``run [B, R]``, cut at a stop token or the limit; a failed row then ends
    with an error, unless it stopped before."""
    slot = jnp.arange(run.shape[1], dtype=jnp.int32)[None, :]
    room = state.limit - state.length
    count = jnp.minimum(count, room)
    stops = state.is_stop[run] & (slot < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    capacity = state.tokens.shape[1]
    at = jnp.where(slot < count[:, None], state.length[:, None] + slot, capacity)
    row = jnp.arange(run.shape[0], dtype=jnp.int32)[:, None]
    length = state.length + count
    status = jnp.where((count > 0) & (length >= state.limit), LENGTH, state.status)
    status = jnp.where(stopped, STOP, jnp.where(failed, ERROR, status))
    return state.replace(
        tokens=state.tokens.at[row, at].set(run, mode="drop"),
        length=length,
        status=status.astype(jnp.int32),
    )


def prefill_step(model: ModelConfig, params: Params, state: DecodeState, chunk: int) -> DecodeState:
    """Read up to ``chunk`` prompt tokens of every row that is still reading; rows that reach the end of their prompt
    commit their first token, drawn from the target like any token that had no draft."""
    rows = state.length.shape[0]
    counts = jnp.where(state.reading, jnp.minimum(state.prompt_length - state.context, chunk), 0)
    slot = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    grid = state.tokens.at[jnp.arange(rows, dtype=jnp.int32)[:, None], state.context[:, None] + slot].get(
        mode="fill", fill_value=0
    )
    batch = pack(grid, counts, state.context, rows * chunk)
    with jax.named_scope("prefill"):
        hidden, done = _forward(model, params, batch, state.target_cache, state.draft_cache is not None)
    state = _store(state, done)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(to_grid(batch, hidden), last, axis=1)
    finished = state.reading & (state.context + counts == state.prompt_length)

    def first(state: DecodeState) -> DecodeState:
        # The clock steps onto the first new position; the draw and the commit are those of a round without drafts.
        nobody = jnp.zeros_like(counts)
        state = state.replace(length=jnp.where(finished, state.prompt_length, state.length))
        result = judge(state, None, nobody, target.unembed(params["target"], hidden), greedy)
        return _append(state, result.next_token[:, None], (finished & result.ok).astype(jnp.int32), finished & ~result.ok)

    greedy = jnp.all((state.sampling.temperature == 0) | ~finished)
    state = state.replace(length=state.length + jnp.where(finished, 0, counts))
    return jax.lax.cond(jnp.any(finished), first, lambda s: s, state)


@functools.partial(jax.jit, static_argnames=("model", "chunk"), donate_argnames=("state",))
def prefill(model: ModelConfig, params: Params, state: DecodeState, *, chunk: int) -> DecodeState:
    """Read every prompt to its end, ``chunk`` tokens a row and pass, and commit each row's first token.

    Returns: the state, ready for ``decode``. The given state is donated.
    """
    return jax.lax.while_loop(lambda s: jnp.any(s.reading), lambda s: prefill_step(model, params, s, chunk), state)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def decode(model: ModelConfig, params: Params, state: DecodeState, policy: Policy, max_rounds: jax.Array) -> DecodeState:
    """Decode until every row has ended, or for ``max_rounds`` rounds (int32; a new value does not recompile).

    Returns: the state after the last round. The given state is donated.
    """

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        rounds, state = carry
        return jnp.any(state.decoding) & (rounds < max_rounds)

    def one_round(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        rounds, state = carry
        return rounds + 1, decode_step(model, params, state, policy)

    return jax.lax.while_loop(unfinished, one_round, (jnp.zeros((), jnp.int32), state))[1]


__all__ = [
    "RUNNING",
    "check",
    "commit",
    "decode",
    "decode_step",
    "judge",
    "look",
    "prefill",
    "prefill_step",
    "propose",
    "remembering",
    "schedule",
]
