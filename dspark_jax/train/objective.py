"""The training forward of a drafter and its three losses (SPEC section 6).

Axes: R conversations, N tokens, M blocks, n slots trained, A the most blocks of a conversation, T the most tokens of one,
J layers, Q query heads, K key/value heads, G = Q/K, H head width, D hidden width, V target vocabulary, W draft vocabulary
(V, or the number of kept ids), P teacher positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.cache import TokenBatch, from_grid, to_grid
from dspark_jax.config import DraftConfig
from dspark_jax.heads import confidence_logits, markov_features
from dspark_jax.params import Params
from dspark_jax.target import keys_values, qkv
from dspark_jax.train.batches import TEACHER_CHUNK, Batch
from dspark_jax.train.features import Features, normaliser

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Objective:
    """Weights of the losses. ``decay`` is λ of the slot weights exp(-(k-1)/λ); ``detach_confidence`` keeps the confidence
    loss out of the drafter's body (PITFALLS C06)."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = False


class Frozen(flax.struct.PyTreeNode):
    """What is used and never trained. embed: ``[V, D]``; head: ``[V, D]``; kept: int32 ``[W]``, ids of a reduced draft
    vocabulary, or None."""

    embed: jax.Array
    head: jax.Array
    kept: jax.Array | None = None


class Sums(flax.struct.PyTreeNode):
    """Sums over slots; everything that is reported is a ratio of two of them, so they add up over microbatches and devices.

    ce, distance, confidence: weighted losses; ce_weight, weight: their denominators; accept, confident: float32 ``[n]``,
    1 - TV and the predicted probability by slot; agree: slots where drafter and teacher have the same best token; count:
    slots by position; length: expected committed tokens of the blocks; blocks: how many.
    """

    ce: jax.Array
    ce_weight: jax.Array
    distance: jax.Array
    confidence: jax.Array
    weight: jax.Array
    accept: jax.Array
    agree: jax.Array
    confident: jax.Array
    count: jax.Array
    length: jax.Array
    blocks: jax.Array


class Forward(flax.struct.PyTreeNode):
    """hidden: ``[M, n, D]``; logits: float32 ``[M, n, W]``; confidence: float32 ``[M, n]`` logits, or None."""

    hidden: jax.Array
    logits: jax.Array
    confidence: jax.Array | None


def slot_weights(batch: Batch, decay: float) -> jax.Array:
    """Float32 ``[M, n]``: exp(-(k-1)/λ) where a slot counts, else 0."""
    slot = jnp.arange(batch.mask.shape[1], dtype=jnp.float32)
    return jnp.where(batch.mask, jnp.exp(-slot / decay)[None], 0.0)


def block_hidden(params: Params, cfg: DraftConfig, frozen: Frozen, batch: Batch, taps: jax.Array) -> jax.Array:
    """Hidden states ``[M, n, D]`` of all blocks: slots at positions a … a+n-1, seeing features before a and their block."""
    blocks, slots = batch.labels.shape
    anchor = batch.positions[batch.anchors]
    features = layers.rms_norm(layers.linear(taps, params["fc"]), params["context_norm"], cfg.rms_norm_eps)
    context_angles = layers.rope_angles(cfg.rope, cfg.head_dim, batch.positions)

    first = frozen.embed[batch.tokens[batch.anchors]][:, None]
    masks = jnp.broadcast_to(frozen.embed[cfg.mask_token_id][None, None], (blocks, slots - 1, first.shape[-1]))
    x = jnp.concatenate([first, masks], axis=1).reshape(blocks * slots, -1).astype(taps.dtype)
    positions = (anchor[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]).reshape(-1)
    angles = layers.rope_angles(cfg.rope, cfg.head_dim, positions)

    tokens = batch.token_batch
    nothing = jnp.zeros_like(anchor)
    live = jnp.arange(blocks, dtype=jnp.int32) < jnp.sum(batch.blocks, dtype=jnp.int32)
    ragged = TokenBatch(nothing, batch.block_rows, batch.block_ranks, anchor, live, batch.blocks, batch.lengths, batch.ranks)
    grid_anchor = to_grid(ragged, anchor[:, None])[..., 0]  # [R, A]
    place = jnp.arange(batch.length, dtype=jnp.int32)
    before = place[None, None] < jnp.minimum(grid_anchor, batch.lengths[:, None])[..., None]  # [R, A, T]
    kv_heads, group = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads
    scale = cfg.head_dim**-0.5

    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        window = cfg.windows[i]
        q, k, v = qkv(layers.rms_norm(x, layer["attn_norm"], cfg.rms_norm_eps), layer, cfg, angles)
        ctx_k, ctx_v = (to_grid(tokens, a) for a in keys_values(features, layer, cfg, context_angles))  # [R, T, K, H]
        q = q.reshape(blocks, slots, kv_heads, group, cfg.head_dim) * jnp.asarray(scale, q.dtype)
        k, v = (a.reshape(blocks, slots, kv_heads, cfg.head_dim) for a in (k, v))
        grid_q = to_grid(ragged, q)  # [R, A, n, K, G, H]
        past = jnp.einsum("rankgh,rtkh->rkgant", grid_q, ctx_k, preferred_element_type=jnp.float32)
        seen = before[:, None, None, :, None]
        own = jnp.einsum("mnkgh,mskh->mkgns", q, k, preferred_element_type=jnp.float32)
        if window:
            at = grid_anchor[..., None] + jnp.arange(slots, dtype=jnp.int32)[None, None]
            seen = seen & (place[None, None, None] > (at - window)[..., None])[:, None, None]
            slot = jnp.arange(slots, dtype=jnp.int32)
            near = jnp.abs(slot[:, None] - slot[None, :]) < window
            own = jnp.where(near[None, None, None], own, MASKED)
        past = jnp.where(seen, past, MASKED)
        # The softmax joins scores of two layouts: its largest score and its sum travel between grid and list.
        own_top = own.max(-1)  # [M, K, G, n]
        past_top = from_grid(ragged, jnp.moveaxis(past.max(-1), 3, 1))  # [R, A, K, G, n] -> [M, K, G, n]
        top = jax.lax.stop_gradient(jnp.maximum(own_top, past_top))
        grid_top = jnp.moveaxis(to_grid(ragged, top), 1, 3)
        past_weight = jnp.exp(past - grid_top[..., None])
        own_weight = jnp.exp(own - top[..., None])
        past_sum = from_grid(ragged, jnp.moveaxis(past_weight.sum(-1), 3, 1))
        total = own_weight.sum(-1) + past_sum
        dtype = x.dtype
        past_out = jnp.einsum("rkgant,rtkh->rankgh", past_weight.astype(dtype), ctx_v, preferred_element_type=jnp.float32)
        own_out = jnp.einsum("mkgns,mskh->mnkgh", own_weight.astype(dtype), v, preferred_element_type=jnp.float32)
        out = (from_grid(ragged, past_out) + own_out) / jnp.moveaxis(total, 3, 1)[..., None]
        x = x + layers.linear(out.astype(dtype).reshape(blocks * slots, -1), layer["o"])
        x = x + layers.gated_mlp(layers.rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps), layer)
    return layers.rms_norm(x, params["norm"], cfg.rms_norm_eps).reshape(blocks, slots, -1)


def forward(
    params: Params, cfg: DraftConfig, frozen: Frozen, batch: Batch, taps: jax.Array, detach_confidence: bool = False
) -> Forward:
    """The drafter over all blocks, with the ground-truth previous token in the sequential head."""
    blocks, slots = batch.labels.shape
    hidden = block_hidden(params, cfg, frozen, batch, taps)
    flat = hidden.reshape(blocks * slots, -1)
    logits = _unembed(flat, frozen.head)
    markov, previous = params.get("markov"), None
    if markov is not None:
        previous = markov["w1"][batch.previous]  # [M, n, r]
        bias = _markov_inputs(markov, cfg, previous, hidden)
        logits = logits + _unembed(bias.reshape(blocks * slots, -1), markov["w2"])
    confidence = None
    if cfg.confidence_head:
        stop = jax.lax.stop_gradient if detach_confidence else lambda x: x
        known = None if previous is None else stop(previous).reshape(blocks * slots, -1)
        confidence = confidence_logits(params, cfg, stop(flat), known).reshape(blocks, slots)
    return Forward(hidden, logits.reshape(blocks, slots, -1), confidence)


def _markov_inputs(markov: Params, cfg: DraftConfig, previous: jax.Array, hidden: jax.Array) -> jax.Array:
    """What W2 is applied to, ``[M, n, r]``; the rnn head walks the block from left to right."""
    kind = cfg.markov_head_type
    if kind != "rnn":
        flat = markov_features(
            markov, kind, previous.reshape(-1, cfg.markov_rank), hidden.reshape(-1, hidden.shape[-1]), previous
        )[0]
        return flat.reshape(previous.shape)
    memory = jnp.zeros_like(previous[:, 0])
    out = []
    for slot in range(previous.shape[1]):
        features, memory = markov_features(markov, kind, previous[:, slot], hidden[:, slot], memory)
        out.append(features)
    return jnp.stack(out, axis=1)


def _unembed(x: jax.Array, head: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def teacher_log_probs(frozen: Frozen, target_head: jax.Array, batch: Batch, features: Features) -> jax.Array:
    """Float32 ``[P, W]``: the target's log-probabilities at the supervised positions alone, over the draft's vocabulary."""
    hidden = features.hidden[batch.teacher_positions]
    logits = _unembed(hidden, frozen.head)
    if frozen.kept is None:
        return jax.lax.stop_gradient(jax.nn.log_softmax(logits, axis=-1))
    if features.normaliser is not None:
        total = features.normaliser[batch.teacher_positions]
    else:
        total = normaliser({"head": target_head}, hidden, TEACHER_CHUNK)
    return jax.lax.stop_gradient(logits - total[:, None])


def loss_sums(
    params: Params,
    cfg: DraftConfig,
    objective: Objective,
    frozen: Frozen,
    target_head: jax.Array,
    batch: Batch,
    features: Features,
) -> Sums:
    """Every sum of one microbatch. q is zero outside a reduced draft vocabulary: what the target puts there counts as
    distance in full, and a label there has no cross-entropy."""
    out = forward(params, cfg, frozen, batch, features.taps, objective.detach_confidence)
    weights = slot_weights(batch, objective.decay)
    log_q = jax.nn.log_softmax(out.logits, axis=-1)
    known = jnp.ones_like(batch.mask)
    labels = batch.labels
    if frozen.kept is not None:
        labels = jnp.clip(jnp.searchsorted(frozen.kept, batch.labels), 0, frozen.kept.shape[0] - 1).astype(jnp.int32)
        known = frozen.kept[labels] == batch.labels
    ce_weights = jnp.where(known, weights, 0.0)
    ce = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]

    log_p = teacher_log_probs(frozen, target_head, batch, features)
    p = jnp.exp(log_p)
    outside = jnp.zeros(p.shape[0], jnp.float32) if frozen.kept is None else jnp.maximum(1 - p.sum(-1), 0.0)
    distance = jnp.abs(jnp.exp(log_q) - p[batch.teacher]).sum(-1) + outside[batch.teacher]
    accept = jax.lax.stop_gradient(1 - 0.5 * distance)

    confidence, confident = jnp.zeros(()), jnp.zeros(batch.mask.shape, jnp.float32)
    if out.confidence is not None:
        z = out.confidence
        bce = jax.nn.softplus(z) - accept * z
        confidence = jnp.sum(jnp.where(batch.mask, weights * bce, 0.0))
        confident = jax.lax.stop_gradient(jax.nn.sigmoid(z))
    best = jnp.argmax(jax.lax.stop_gradient(out.logits), axis=-1) == jnp.argmax(log_p, axis=-1)[batch.teacher]

    def by_slot(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(batch.mask, x.astype(jnp.float32), 0.0), axis=0)

    reach = jnp.cumprod(jnp.where(batch.mask, accept, 0.0), axis=1).sum(1)
    real = batch.mask[:, 0]
    return Sums(
        ce=jnp.sum(jnp.where(batch.mask & known, ce_weights * ce, 0.0)),
        ce_weight=jnp.sum(ce_weights),
        distance=jnp.sum(jnp.where(batch.mask, weights * distance, 0.0)),
        confidence=confidence,
        weight=jnp.sum(weights),
        accept=by_slot(accept),
        agree=by_slot(best),
        confident=by_slot(confident),
        count=by_slot(jnp.ones_like(accept)),
        length=jnp.sum(jnp.where(real, 1 + reach, 0.0)),
        blocks=jnp.sum(real.astype(jnp.float32)),
    )


def denominators(batch: Batch, objective: Objective, kept: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(of the cross-entropy, of the other two losses): known from the batch alone, so they can be global before any loss."""
    weights = slot_weights(batch, objective.decay)
    if kept is None:
        return jnp.sum(weights), jnp.sum(weights)
    at = jnp.clip(jnp.searchsorted(kept, batch.labels), 0, kept.shape[0] - 1)
    return jnp.sum(jnp.where(kept[at] == batch.labels, weights, 0.0)), jnp.sum(weights)


def total_loss(sums: Sums, objective: Objective, ce_weight: jax.Array, weight: jax.Array) -> jax.Array:
    """The loss of ``sums`` over the given denominators; without a slot that counts it is zero."""

    def ratio(x: jax.Array, y: jax.Array) -> jax.Array:
        return x / jnp.maximum(y, jnp.finfo(jnp.float32).tiny)

    return (
        objective.cross_entropy * ratio(sums.ce, ce_weight)
        + objective.distance * ratio(sums.distance, weight)
        + objective.confidence * ratio(sums.confidence, weight)
    )


def metrics(sums: Sums) -> Mapping[str, Any]:
    """Means of what ``sums`` add up, as host numbers; acceptances by slot are lists."""
    host = jax.device_get(sums)
    count = [max(float(c), 1e-9) for c in host.count]
    weight, ce_weight = max(float(host.weight), 1e-9), max(float(host.ce_weight), 1e-9)
    return {
        "cross_entropy": float(host.ce) / ce_weight,
        "distance": float(host.distance) / weight,
        "confidence": float(host.confidence) / weight,
        "accepted_length": float(host.length) / max(float(host.blocks), 1e-9),
        "acceptance": [float(a) / c for a, c in zip(host.accept, count, strict=True)],
        "agreement": [float(a) / c for a, c in zip(host.agree, count, strict=True)],
        "predicted": [float(a) / c for a, c in zip(host.confident, count, strict=True)],
        "blocks": int(host.blocks),
    }
