"""How far is our AR step from the model's matrix products alone, and from Hugging Face transformers' cached step; and what
does a pass over 8 tokens cost?

SmolLM2-135M's shape in float32, batch 1, context 100, medians of one interleaved run:

- step: ``target.forward``, ``target.unembed``, argmax and the cache write, jitted, cache donated, over 1, 2, 4 and 8 tokens;
- loop: ``decode.decode`` with ``Autoregressive`` for 64 rounds, per round: the same work inside the whole device loop;
- products: the matrix products of the model and nothing else, layers scanned, matrices as stored;
- hf: transformers' ``LlamaForCausalLM`` with the same weights, ``DynamicCache``, ``inference_mode``.

PyTorch and transformers are needed for the last part only, which is left out with a message when they are missing:

    pip install torch==2.13.0 transformers
    python experiments/step_cost.py [--json]
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    SMOLLM2,
    Subject,
    arguments,
    empty_cache,
    environment,
    measured,
    print_conditions,
    print_table,
    random_target,
    report,
    step,
    timed_step,
)

from dspark_jax import cache as kv
from dspark_jax import target
from dspark_jax.decode import decode, prefill
from dspark_jax.layers import linear
from dspark_jax.params import Params
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive
from dspark_jax.state import ModelConfig, new_state

CONTEXT, CAPACITY, ROUNDS = 100, 512, 64


@jax.jit
def products(params: Params, x: jax.Array) -> jax.Array:
    """Every matrix product of a pass over ``x [N, D]``, joined by as little as keeps each of them needed."""

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        kv_part = linear(x, layer["k"]) + linear(x, layer["v"])
        q = linear(x, layer["q"])
        x = x + linear(q + jnp.pad(kv_part, ((0, 0), (0, q.shape[1] - kv_part.shape[1]))), layer["o"])
        x = x + linear(linear(x, layer["gate"]) * linear(x, layer["up"]), layer["down"])
        return 0.1 * x, None

    x, _ = jax.lax.scan(layer_step, x, params["layers"])
    return target.unembed(params, x)


def our_step(params: Params, tokens: np.ndarray, size: int) -> Subject:
    _, cache = step(params, empty_cache(CAPACITY), jnp.asarray(tokens[None, :CONTEXT]), jnp.zeros(1, jnp.int32))
    return timed_step(params, [cache], tokens[CONTEXT : CONTEXT + size], CONTEXT)


def our_loop(params: Params, tokens: np.ndarray) -> Subject:
    model = ModelConfig(SMOLLM2)
    sampling = SamplingState.from_params([SamplingParams()])
    prompt = tokens[: CONTEXT - ROUNDS // 2].tolist()  # the mean context of the rounds is then CONTEXT
    state = new_state(model, [prompt], sampling, [CAPACITY], (), CAPACITY, jnp.float32, drafts=False)
    ready = prefill(model, {"target": params}, state, chunk=64)
    policy, rounds = Autoregressive(), np.int32(ROUNDS)

    def call() -> float:
        state = jax.block_until_ready(jax.tree.map(jnp.copy, ready))
        start = time.perf_counter()
        done = decode(model, {"target": params}, state, policy, rounds)
        length = int(done.length[0])
        seconds = time.perf_counter() - start
        assert length == len(prompt) + 1 + ROUNDS, length
        return seconds / ROUNDS

    return call


def only_products(params: Params, size: int) -> Subject:
    x = params["embed"][:size]

    def call() -> float:
        start = time.perf_counter()
        products(params, x).block_until_ready()
        return time.perf_counter() - start

    return call


def hf_model(params: Params) -> Any:
    """transformers' model with our weights."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    cfg = SMOLLM2
    config = transformers.LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        max_position_embeddings=cfg.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope.theta},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{p: f"self_attn.{p}_proj" for p in "qkvo"},
        **{p: f"mlp.{p}_proj" for p in ("gate", "up", "down")},
    }
    weights = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for ours, theirs in names.items():
        for i, matrix in enumerate(np.asarray(params["layers"][ours])):
            weights[f"model.layers.{i}.{theirs}.weight"] = matrix
    loaded = model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in weights.items()}, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
    return model


def hf_step(model: Any, tokens: np.ndarray, size: int) -> Subject:
    import torch
    import transformers

    ids = torch.from_numpy(tokens[None].astype(np.int64))
    past = transformers.DynamicCache()
    # Newer releases call the argument `cache`.
    known = inspect.signature(type(model).forward).parameters
    cached = {"cache" if "cache" in known else "past_key_values": past, "use_cache": True}
    with torch.inference_mode():
        model(input_ids=ids[:, :CONTEXT], **cached)
    grid = ids[:, CONTEXT : CONTEXT + size]

    def call() -> float:
        with torch.inference_mode():
            start = time.perf_counter()
            model(input_ids=grid, **cached).logits.argmax(-1)
            seconds = time.perf_counter() - start
            past.crop(-size)
        return seconds

    return call


def largest_difference(params: Params, model: Any, tokens: np.ndarray) -> float:
    """Largest difference of a logit between transformers and us over one prompt: both do the same work."""
    import torch

    size = CONTEXT
    batch = kv.pack(jnp.asarray(tokens[None, :size]), jnp.full((1,), size), jnp.zeros(1, jnp.int32), size)
    ours = target.unembed(params, target.forward(params, SMOLLM2, batch, empty_cache(CAPACITY)).hidden)
    with torch.inference_mode():
        theirs = model(input_ids=torch.from_numpy(tokens[None, :size].astype(np.int64))).logits[0]
    return float(np.abs(np.asarray(ours) - theirs.numpy()).max())


def main() -> None:
    args = arguments(__doc__, turns=12).parse_args()
    results: dict[str, Any] = {"environment": environment(), "context": CONTEXT, "capacity": CAPACITY}

    params = random_target()
    tokens = np.random.default_rng(1).integers(0, SMOLLM2.vocab_size, CONTEXT + 8).astype(np.int32)
    subjects: dict[str, Subject] = {f"step {n}": our_step(params, tokens, n) for n in (1, 2, 4, 8)}
    subjects["loop 1"] = our_loop(params, tokens)
    subjects |= {f"products {n}": only_products(params, n) for n in (1, 8)}
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"Hugging Face's step is left out: {' and '.join(missing)} not installed (see the top of this file)")
    else:
        import torch
        import transformers

        results["environment"] |= {"torch": torch.__version__, "transformers": transformers.__version__}
        model = hf_model(params)
        results["hf_logit_difference"] = largest_difference(params, model, tokens)
        subjects |= {f"hf {n}": hf_step(model, tokens, n) for n in (1, 8)}

    ms = measured(results, subjects, args.turns)
    ratios = [
        ("our 8 tokens / our 1 token", ms["step 8"] / ms["step 1"], 1.9),
        ("our step / products, 1 token", ms["step 1"] / ms["products 1"], 1.4),
        ("our loop's round / products, 1 token", ms["loop 1"] / ms["products 1"], None),
        ("our step / products, 8 tokens", ms["step 8"] / ms["products 8"], None),
        ("products, 8 tokens / 1 token", ms["products 8"] / ms["products 1"], None),
    ]
    if "hf 1" in ms:
        ratios.insert(0, ("our step / Hugging Face's, 1 token", ms["step 1"] / ms["hf 1"], 0.65))
        ratios.insert(1, ("our loop's round / Hugging Face's step", ms["loop 1"] / ms["hf 1"], 0.65))
        ratios.append(("our step / Hugging Face's, 8 tokens", ms["step 8"] / ms["hf 8"], None))
    results["ratios"] = {name: value for name, value, _ in ratios}

    print_conditions(results["environment"])
    if not missing:
        print(f"largest difference of a logit between transformers and us: {results['hf_logit_difference']:.1e}")
    rows = [
        (label, *(ms.get(f"{key} {n}") for n in (1, 2, 4, 8)))
        for label, key in (
            ("our step", "step"),
            ("our loop, a round", "loop"),
            ("matrix products", "products"),
            ("Hugging Face's step", "hf"),
        )
    ]
    print_table("ms, median", ("tokens in the pass", "1", "2", "4", "8"), rows)
    print_table("ratios", ("", "measured", "at most"), ratios)
    report(results, args.json)


if __name__ == "__main__":
    main()
