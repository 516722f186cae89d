"""Does a step's cost follow the context in use, not the capacity of the cache; and how much memory does decoding take?

Times: SmolLM2-135M's shape in float32, batch 1; an AR step and a pass over 8 tokens at context 100 with capacity 512 and
8192 (wanted: at most 1.2 times), and at context 100, 400, 1000 and 4000 with capacity 8192. Medians of one interleaved run.

Memory: a fresh process each for batch 1 and 4 compiles, decodes with ``decode`` and reports its peak resident memory above
what it held before the weights were made, next to weights + caches + 20 %; apart from that what compiling left resident,
and XLA's own count of temporary memory.

    python experiments/context_cost.py [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    SMOLLM2,
    environment,
    interleaved,
    milliseconds,
    print_conditions,
    print_table,
    random_target,
    report,
    watch_other_work,
)

from dspark_jax import cache as kv
from dspark_jax import target
from dspark_jax.decode import decode, prefill
from dspark_jax.params import Params, abstract, count_bytes, target_specs
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive
from dspark_jax.state import DecodeState, ModelConfig, new_state

SHORT, LONG = 512, 8192
CASES = ((100, SHORT), (100, LONG), (400, LONG), (1000, LONG), (4000, LONG))
SIZES = (1, 8)
MEMORY_CAPACITY, MEMORY_ROUNDS = 2048, 32
MIB = 2**20


@functools.partial(jax.jit, donate_argnames=("cache",))
def step(params: Params, cache: kv.KVCache, grid: jax.Array, context: jax.Array) -> tuple[jax.Array, kv.KVCache]:
    """Next tokens ``[N]`` of ``grid [1, N]`` after ``context`` cached tokens, and the extended cache."""
    size = grid.shape[1]
    batch = kv.pack(grid, jnp.full((1,), size, jnp.int32), context, size)
    out = target.forward(params, SMOLLM2, batch, cache)
    logits = target.unembed(params, out.hidden)
    return jnp.argmax(logits, axis=-1), kv.write(cache, out.k, out.v, batch.rows, batch.positions, batch.valid)


def times(turns: int) -> dict[str, float]:
    """Median ms by "context/capacity/tokens"."""
    params = random_target()
    layers, heads, width = SMOLLM2.num_layers, SMOLLM2.num_kv_heads, SMOLLM2.head_dim
    caches = {size: kv.empty_cache(layers, 1, heads, size, width, jnp.float32) for size in (SHORT, LONG)}

    def subject(context: int, capacity: int, size: int) -> Callable[[], float]:
        grid, at = jnp.ones((1, size), jnp.int32), jnp.full((1,), context, jnp.int32)

        def call() -> float:
            start = time.perf_counter()
            best, caches[capacity] = step(params, caches[capacity], grid, at)
            best.block_until_ready()
            return time.perf_counter() - start

        return call

    subjects = {f"{c}/{s}/{n}": subject(c, s, n) for c, s in CASES for n in SIZES}
    return {name: milliseconds(seconds) for name, seconds in interleaved(subjects, turns, repeats=1, pause_s=0.0).items()}


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest since the last reset) of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as control:
        control.write("5")


def memory(rows: int) -> dict[str, float]:
    """Peak memory of decoding in this process, in MiB; run in a process of its own.

    The programs are compiled first, for shapes alone: what the compiler keeps belongs to the runtime and is listed apart.
    """
    model, policy, rounds = ModelConfig(SMOLLM2), Autoregressive(), np.int32(MEMORY_ROUNDS)
    prompts = [np.random.default_rng(row).integers(0, SMOLLM2.vocab_size, 200).tolist() for row in range(rows)]
    sampling = SamplingState.from_params([SamplingParams()] * rows)
    limits = [MEMORY_CAPACITY] * rows

    def fresh_state() -> DecodeState:
        return new_state(model, prompts, sampling, limits, (), MEMORY_CAPACITY, jnp.float32, drafts=False)

    shapes = {"target": abstract(target_specs(SMOLLM2), jnp.float32)}
    state = fresh_state()
    bare = resident("VmRSS")
    read = prefill.lower(model, shapes, state, chunk=64).compile()
    run = decode.lower(model, shapes, state, policy, rounds).compile()
    compiler = resident("VmRSS") - bare
    caches = count_bytes({"k": state.target_cache.k, "v": state.target_cache.v})
    del state
    base = resident("VmRSS")

    params = {"target": random_target()}
    state = jax.block_until_ready(fresh_state())
    reset_peak()
    state = jax.block_until_ready(read(params, state))
    prefill_peak = resident("VmHWM") - base
    reset_peak()
    state = jax.block_until_ready(run(params, state, policy, rounds))
    decode_peak = resident("VmHWM") - base
    assert int(state.log.rounds.min()) == MEMORY_ROUNDS
    wanted = count_bytes(params) + caches
    return {
        "weights_and_caches": wanted / MIB,
        "allowed": 1.2 * wanted / MIB,
        "decode_peak": decode_peak / MIB,
        "prefill_peak": prefill_peak / MIB,
        "compiler": compiler / MIB,
        "xla_temporary": run.memory_analysis().temp_size_in_bytes / MIB,
    }


def memory_in_fresh_process(rows: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--memory-of", str(rows)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"measuring memory at batch {rows} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns of the interleaved run (default 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--memory-of", type=int, metavar="ROWS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(json.dumps(memory(args.memory_of)))
        return

    results: dict[str, Any] = {"environment": environment()}
    others = watch_other_work()
    ms = results["ms"] = times(args.turns)
    results["environment"]["cores_used_by_others"] = others()
    results["capacity_ratio"] = {str(n): ms[f"100/{LONG}/{n}"] / ms[f"100/{SHORT}/{n}"] for n in SIZES}
    print_conditions(results["environment"])
    rows = [
        (f"{c} / {s}", *(value for n in SIZES for value in (ms[f"{c}/{s}/{n}"], ms[f"{c}/{s}/{n}"] / ms[f"100/{SHORT}/{n}"])))
        for c, s in CASES
    ]
    print_table(
        "ms, median, and ratio to the first line (context 100: at most 1.20 at either capacity)",
        ("context / capacity", "1 token", "ratio", "8 tokens", "ratio"),
        rows,
    )
    if sys.platform.startswith("linux"):
        found = results["memory_mib"] = {str(n): memory_in_fresh_process(n) for n in (1, 4)}
        print_table(
            f"MiB above the runtime with its programs compiled, capacity {MEMORY_CAPACITY}",
            ("batch", *(key.replace("_", " ") for key in found["1"])),
            [(n, *m.values()) for n, m in found.items()],
        )
    else:
        print("Memory is left out: it is read from /proc, which only Linux has")
    report(results, args.json)


if __name__ == "__main__":
    main()
