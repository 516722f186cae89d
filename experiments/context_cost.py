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
import json
import subprocess
import sys
from pathlib import Path
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
    timed_step,
)

from dspark_jax.decode import decode, prefill
from dspark_jax.params import abstract, count_bytes, target_specs
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive
from dspark_jax.state import DecodeState, ModelConfig, new_state

SHORT, LONG = 512, 8192
CASES = ((100, SHORT), (100, LONG), (400, LONG), (1000, LONG), (4000, LONG))
SIZES = (1, 8)
MEMORY_CAPACITY, MEMORY_ROUNDS = 2048, 32
MIB = 2**20


def subjects() -> dict[str, Subject]:
    """Steps by "context/capacity/tokens"; those of one capacity share its cache."""
    params = random_target()
    held = {capacity: [empty_cache(capacity)] for capacity in (SHORT, LONG)}
    return {f"{c}/{s}/{n}": timed_step(params, held[s], np.ones(n, np.int32), c) for c, s in CASES for n in SIZES}


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
    parser = arguments(__doc__, turns=30)
    parser.add_argument("--memory-of", type=int, metavar="ROWS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(json.dumps(memory(args.memory_of)))
        return

    results: dict[str, Any] = {"environment": environment()}
    ms = measured(results, subjects(), args.turns, repeats=1, pause_s=0.0)
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
