"""Are the kernels right and fast on a real GPU or TPU?

Parity: every kernel, compiled, against its XLA reference over the contract tests' own random and hostile inputs; tokens may
differ only where two scores, or the two sides of the accept rule, are closer than BOUND. Times: every kernel against its
reference and against the floor, the bytes that must move divided by the bandwidth that a copy reaches. Decoding: rounds of
Qwen3-4B's shape with random weights, autoregressive and speculative; a round costs the same whatever is accepted, so tokens
per second follow from a scripted acceptance rate.

    python experiments/device_check.py --json           # on the device, under 10 minutes
    python experiments/device_check.py --smoke --json   # on a CPU: tiny shapes, interpreted kernels, no times worth reading
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import environment, print_table
from compile_matrix import MODELS, Shape, pair_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import test_kernel_attention as attention_contract
import test_kernel_markov as markov_contract
import test_kernel_verify as verify_contract

from dspark_jax.decode import decode, prefill
from dspark_jax.params import draft_specs, init_params, target_specs
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive, FixedLength
from dspark_jax.state import ModelConfig, new_state
from pallas_kernels import attention, markov, verify
from pallas_kernels.verify.reference import target_log_probs

BOUND = 1e-4  # of a Gumbel score, or of log(u q) - log p: closer than this, rounding may decide
ACCEPTANCE = 0.8  # scripted: a draft survives with this probability, given that those before it did
BLOCK = 7
TINY = Shape(vocab=300, hidden=32, heads=2, kv_heads=1, head_dim=16, rank=128)
Run = tuple[str | None, bool]  # backend and interpret
REFERENCE: Run = ("reference", False)


def judge(data: Any, mode: str, run: Run) -> Any:
    """The verify op on a contract batch."""
    arguments: dict[str, Any] = {"mode": mode, "backend": run[0], "interpret": run[1]}
    if mode == "sample":
        noise = data["noise"]
        arguments |= {"uniform": data["uniform"], "soft": True, "noise": lambda a: verify_contract.at(noise, a)}
    elif mode == "coupled":
        arguments["noise"] = data["noise"]
    log_q = data["log_q"] if mode == "sample" else None
    return verify.verify(data["logits"], log_q, data["tokens"], data["scheduled"], data["filters"], **arguments)


def verify_gap(data: Any, mode: str, row: int, got: Any, want: Any) -> float:
    """How close the decision was on which two runs disagree; 0: a tie."""
    log_p = np.asarray(
        target_log_probs(data["logits"][row : row + 1], verify.Filters(*(f[row : row + 1] for f in data["filters"])))[0]
    )
    log_p = log_p[0].astype(np.float64)
    noise, tokens = np.asarray(data["noise"][row], np.float64), np.asarray(data["tokens"][row])
    a, b = int(got.accepted[row]), int(want.accepted[row])
    slot = min(a, b)
    if mode != "sample" or a == b:
        ids = (
            [int(got.next_token[row]), int(want.next_token[row])] if a == b else [int(tokens[slot]), int(want.next_token[row])]
        )
        weights = log_p[slot]
        if mode == "sample" and slot < int(data["scheduled"][row]):
            left = np.maximum(np.exp(weights) - np.exp(np.asarray(data["log_q"][row, slot], np.float64)), 0)
            weights = np.log(left) if left.any() else weights
        score = weights + (0 if mode == "greedy" else noise[slot])
        return float(abs(score[ids[0]] - score[ids[1]]))
    token = tokens[slot]
    left = np.log(float(data["uniform"][row, slot])) + float(data["log_q"][row, slot, token])
    return float(abs(left - log_p[slot, token]))


@np.errstate(all="ignore")
def verify_parity(run: Run, seeds: int) -> dict[str, Any]:
    """Rows compared, rows that differ, the widest gap among those, and the largest error of 1 - TV and log-probabilities."""
    rows, gaps, error = 0, [], 0.0
    for mode in ("sample", "greedy", "coupled"):
        kernel, reference = (jax.jit(functools.partial(judge, mode=mode, run=r)) for r in (run, REFERENCE))
        for seed in range(seeds):
            names, data = verify_contract.hostile(seed)
            data.pop("sampling")
            got, want = (jax.tree.map(np.asarray, f(data)) for f in (kernel, reference))
            rows += len(names)
            assert (got.ok == want.ok).all(), [n for n, x in zip(names, got.ok == want.ok, strict=True) if not x]
            for row in np.flatnonzero(want.ok):
                if got.accepted[row] != want.accepted[row] or got.next_token[row] != want.next_token[row]:
                    gaps.append(verify_gap(data, mode, row, got, want))
                else:
                    error = max(error, float(np.abs(got.log_prob[row] - want.log_prob[row]).max()))
            if mode == "sample":
                error = max(error, float(np.abs(got.soft - want.soft).max()))
    return {"rows": rows, "differ": len(gaps), "widest_gap": max(gaps, default=0.0), "error": error}


def markov_parity(run: Run, seeds: int) -> dict[str, Any]:
    """A token that differs changes what follows it, so a row is compared up to there."""
    rows, gaps, error = 0, [], 0.0
    for kind in markov_contract.KINDS:

        def call(data: Any, run: Run, kind: str = kind) -> Any:
            arguments = (data["hidden"], data["base"], data["anchor"], data["head"], data["confidence"])
            draws = {"temperature": data["temperature"], "noise": data["noise"]}
            return markov.propose(*arguments, kind=kind, backend=run[0], interpret=run[1], **draws)

        kernel, reference = (jax.jit(functools.partial(call, run=r)) for r in (run, REFERENCE))
        for seed in range(seeds):
            data = markov_contract.block(kind, seed, rank=128, width=128)
            got, want = (jax.tree.map(np.asarray, f(data)) for f in (kernel, reference))
            temperature = np.asarray(data["temperature"])
            rows += len(temperature)
            for row, t in enumerate(temperature):
                equal = np.cumprod(got.tokens[row] == want.tokens[row]).sum()
                same = slice(0, min(equal + 1, got.tokens.shape[1]))
                error = max(error, float(np.abs(got.logits[row, same] - want.logits[row, same]).max()))
                error = max(error, float(np.abs(got.confidence[row, same] - want.confidence[row, same]).max()))
                if equal < got.tokens.shape[1]:
                    score = want.logits[row, equal].astype(np.float64) / (t or 1)
                    score = score + (np.asarray(data["noise"][row, equal], np.float64) if t else 0)
                    gaps.append(float(abs(score[got.tokens[row, equal]] - score[want.tokens[row, equal]])) * min(t or 1, 1))
    return {"rows": rows, "differ": len(gaps), "widest_gap": max(gaps, default=0.0), "error": error}


def attention_parity(run: Run, seeds: int) -> dict[str, Any]:
    error, rows = 0.0, 0
    for seed in range(seeds):
        for kind in ("block", "causal"):
            data, mask = attention_contract.inputs(4, seed), attention_contract.masks(4, kind)

            def call(data: Any, window: Any, run: Run, mask: Any = mask) -> Any:
                return attention.attend(**data, block_mask=mask, window=window, backend=run[0], interpret=run[1])

            for window in (0, 70):
                got, want = (
                    np.asarray(jax.jit(functools.partial(call, run=r))(data, jnp.int32(window))) for r in (run, REFERENCE)
                )
                error, rows = max(error, float(np.abs(got - want).max())), rows + len(got)
    return {"rows": rows, "differ": 0, "widest_gap": 0.0, "error": error}


def seconds(call: Callable[[], Any], turns: int, calls: int) -> float:
    """Median seconds of a call, ``calls`` of them in flight."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def copy_bandwidth(size: int, turns: int) -> float:
    """Bytes per second, read and written together, of the largest copy."""
    x = jnp.zeros((size // 4,), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds(lambda: add(x), turns, 3)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.jit(lambda k: jax.random.normal(k, shape, dtype))(key)


def timed_ops(shape: Shape, batch: int, context: int, dtype: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """For every op a function of (run, arrays), the arrays, and the bytes that must move."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    width, vocab, rank = BLOCK + 1, shape.vocab, shape.rank
    logits, drafts = normal(next(keys), (batch, width, vocab)), normal(next(keys), (batch, BLOCK, vocab))
    noise = normal(next(keys), (batch, BLOCK, vocab))  # times do not depend on the law of the noise
    tokens = jnp.argmax(drafts, axis=-1).astype(jnp.int32)
    norm = verify.QNorm(jnp.max(drafts, axis=-1), jax.nn.logsumexp(drafts - jnp.max(drafts, axis=-1, keepdims=True), axis=-1))
    ones, zeros = jnp.ones((batch,), jnp.float32), jnp.zeros((batch,), jnp.int32)
    filters = verify.Filters(ones, zeros, ones, jnp.zeros((batch,), jnp.float32))
    full = jnp.full((batch,), BLOCK, jnp.int32)
    hidden = normal(next(keys), (batch, BLOCK, shape.hidden), dtype)
    head = markov.Head(normal(next(keys), (vocab, rank), dtype), normal(next(keys), (vocab, rank), dtype))
    sure = markov.Confidence(normal(next(keys), (1, shape.hidden + rank), dtype), jnp.zeros((1,), dtype))
    q = normal(next(keys), (batch, width, shape.heads, shape.head_dim), dtype)
    own = normal(next(keys), (batch, width, shape.kv_heads, shape.head_dim), dtype)
    cache = normal(next(keys), (1, batch, shape.kv_heads, context, shape.head_dim), dtype)
    mask = jnp.broadcast_to(jnp.tri(width, dtype=bool), (batch, width, width))
    contexts = jnp.full((batch,), context, jnp.int32)

    def verify_call(run: Run, logits: Any, q: Any, norm: Any, tokens: Any, full: Any, filters: Any, noise: Any) -> Any:
        arguments = {"uniform": jnp.full(tokens.shape, 0.5), "noise": noise, "q_norm": norm}
        return verify.verify(logits, q, tokens, full, filters, backend=run[0], interpret=run[1], **arguments)

    def markov_call(run: Run, hidden: Any, base: Any, anchor: Any, head: Any, sure: Any, temperature: Any, noise: Any) -> Any:
        drawn = {"temperature": temperature, "noise": noise, "backend": run[0], "interpret": run[1]}
        return markov.propose(hidden, base, anchor, head, sure, **drawn)

    def attention_call(run: Run, *arrays: Any) -> Any:
        return attention.attend(*arrays, backend=run[0], interpret=run[1])

    row = batch * vocab * 4
    return {
        "verify": (verify_call, (logits, drafts, norm, tokens, full, filters, noise[:, 0]), row * (width + BLOCK + 3)),
        "markov": (markov_call, (hidden, drafts, zeros, head, sure, ones, noise), BLOCK * (head.w2.nbytes + 3 * row)),
        "attention": (attention_call, (q, own, own, mask, cache, cache, zeros[0], contexts), 2 * cache.nbytes),
    }


def op_times(shape: Shape, batch: int, run: Run, bandwidth: float, turns: int, context: int) -> list[dict[str, Any]]:
    out = []
    for name, (call, arrays, moved) in timed_ops(shape, batch, context, jnp.bfloat16).items():
        kernel, reference = (jax.jit(functools.partial(call, r)) for r in (run, REFERENCE))
        times = [seconds(functools.partial(f, *arrays), turns, 10) for f in (kernel, reference)]
        floor = moved / bandwidth
        out.append({"op": name, "batch": batch, "us": times[0] * 1e6, "reference_us": times[1] * 1e6, "floor_us": floor * 1e6})
    return out


def decode_times(model: ModelConfig, batch: int, dtype: Any, rounds: int, capacity: int) -> dict[str, float]:
    """Milliseconds a round, and tokens per second at the scripted acceptance."""
    keys = jax.random.split(jax.random.key(1))
    out = {}
    for name, policy, kept in (
        ("ar", Autoregressive(), 1.0),
        ("speculative", FixedLength(), sum(ACCEPTANCE**i for i in range(BLOCK + 1))),
    ):
        params = {"target": init_params(target_specs(model.target), keys[0], dtype)}
        params["draft"] = init_params(draft_specs(model.drafter), keys[1], dtype)
        sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=i) for i in range(batch)])
        prompts = [[1 + i % 200 for i in range(64)]] * batch
        state = new_state(model, prompts, sampling, [capacity] * batch, (), capacity, dtype)
        state = prefill(model, params, state, chunk=64)
        state = jax.block_until_ready(decode(model, params, state, policy, np.int32(2)))
        start = time.perf_counter()
        jax.block_until_ready(decode(model, params, state, policy, np.int32(rounds)))
        taken = (time.perf_counter() - start) / rounds
        out |= {f"{name}_round_ms": taken * 1e3, f"{name}_tokens_per_s": batch * kept / taken}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and interpreted kernels, on a CPU")
    parser.add_argument("--batches", nargs="+", type=int, help="default 1 16 128")
    parser.add_argument("--no-decode", action="store_true", help="leave the decode rounds out")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    platform = jax.default_backend()
    if platform == "cpu" and not args.smoke:
        parser.error("no GPU or TPU here; --smoke runs the script on a CPU")
    names = ["pallas_tpu", "pallas_gpu"] if args.smoke else ["pallas_tpu" if platform == "tpu" else "pallas_gpu"]
    results: dict[str, Any] = {"environment": environment() | {"device": jax.devices()[0].device_kind}, "smoke": args.smoke}

    results["parity"] = {}
    for name in names:
        run, seeds = (name, args.smoke), 1 if args.smoke else 4
        results["parity"][name] = {
            "verify": verify_parity(run, seeds),
            "markov": markov_parity(run, seeds),
            "attention": attention_parity(run, seeds),
        }
    rows = [(name, op, *found.values()) for name, ops in results["parity"].items() for op, found in ops.items()]
    print_table("parity", ("kernel", "op", "rows", "differ", "widest gap", "error"), [[str(c) for c in row] for row in rows])
    wrong = [row[:2] for row in rows if row[4] > BOUND or row[5] > (2e-2 if platform == "tpu" else 1e-3)]

    turns = 1 if args.smoke else 5
    bandwidth = results["copy_bytes_per_s"] = copy_bandwidth(2**20 if args.smoke else 2**30, turns)
    shape, model = (TINY, None) if args.smoke else (MODELS["Qwen3-4B"], pair_config("Qwen3-4B", BLOCK))
    if model is None:
        whole = pair_config("SmolLM2", BLOCK)
        small = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
        }
        target = dataclasses.replace(whole.target, num_layers=4, windows=(0,) * 4, **small)
        draft = dataclasses.replace(
            whole.drafter, num_layers=1, windows=(0,), target_layer_ids=(1,), num_target_layers=4, **small
        )
        model = ModelConfig(target, draft)
    batches = args.batches or ([2] if args.smoke else [1, 16, 128])
    results["ops"], results["decode"] = [], []
    for batch in batches:
        results["ops"] += op_times(shape, batch, (names[-1], args.smoke), bandwidth, turns, 128 if args.smoke else 1024)
    head = ("op", "batch", "kernel us", "reference us", "floor us", "kernel / floor", "reference / kernel")
    table = [(*o.values(), o["us"] / o["floor_us"], o["reference_us"] / o["us"]) for o in results["ops"]]
    print_table(f"{names[-1]} on {results['environment']['device']}, copy {bandwidth / 1e9:.0f} GB/s", head, table)
    if not args.no_decode:
        for batch in batches:
            rounds, capacity = (2, 128) if args.smoke else (32, 512)
            dtype = jnp.float32 if args.smoke else jnp.bfloat16
            results["decode"].append({"batch": batch} | decode_times(model, batch, dtype, rounds, capacity))
        print_table(
            f"decode, acceptance {ACCEPTANCE}", tuple(results["decode"][0]), [tuple(d.values()) for d in results["decode"]]
        )
    if wrong:
        print("OUT OF BOUNDS: " + ", ".join(f"{name} {op}" for name, op in wrong))
    if args.json:
        print(json.dumps(results), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
