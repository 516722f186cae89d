"""What the measuring scripts share: a model of SmolLM2-135M's shape, interleaved timing, and the line that names the machine.

Times do not depend on the values of the weights, so the scripts that only time a pass draw them at random with a fixed
seed; nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cache as kv
from dspark_jax import target
from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.params import Params, is_spec, target_specs

SMOLLM2 = TargetConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_positions=8192,
    tie_embeddings=True,
    windows=(0,) * 30,
)

SEED = 0
Subject = Callable[[], float]  # does its work and returns the seconds that it took


def random_target(cfg: TargetConfig = SMOLLM2) -> Params:
    """Float32 parameters of a target with normal entries, drawn on the host one tensor at a time."""
    rng = np.random.default_rng(SEED)

    def one(spec: Any) -> jax.Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, jnp.float32)
        return jnp.asarray(rng.standard_normal(spec.shape, np.float32) * np.float32(0.02))

    return jax.tree.map(one, target_specs(cfg), is_leaf=is_spec)


@functools.partial(jax.jit, donate_argnames=("cache",))
def step(params: Params, cache: kv.KVCache, grid: jax.Array, context: jax.Array) -> tuple[jax.Array, kv.KVCache]:
    """Next tokens ``[N]`` of ``grid [1, N]`` after ``context`` cached tokens, and the extended cache."""
    size = grid.shape[1]
    batch = kv.pack(grid, jnp.full((1,), size, jnp.int32), context, size)
    out = target.forward(params, SMOLLM2, batch, cache)
    logits = target.unembed(params, out.hidden)
    return jnp.argmax(logits, axis=-1), kv.write(cache, out.k, out.v, batch.rows, batch.positions, batch.valid)


def empty_cache(capacity: int) -> kv.KVCache:
    """A float32 cache of one row."""
    return kv.empty_cache(SMOLLM2.num_layers, 1, SMOLLM2.num_kv_heads, capacity, SMOLLM2.head_dim, jnp.float32)


def timed_step(params: Params, held: list[kv.KVCache], tokens: np.ndarray, context: int) -> Subject:
    """``step`` over ``tokens [N]`` after ``context`` tokens in ``held[0]``, which the step takes and puts back; subjects may
    share it."""
    grid, at = jnp.asarray(tokens[None], jnp.int32), jnp.full((1,), context, jnp.int32)

    def call() -> float:
        start = time.perf_counter()
        best, held[0] = step(params, held[0], grid, at)
        best.block_until_ready()
        return time.perf_counter() - start

    return call


def arguments(doc: str | None, turns: int) -> argparse.ArgumentParser:
    """The options of every script; ``doc`` is its docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=turns, help="turns of the interleaved run (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def measured(
    results: dict[str, Any], subjects: Mapping[str, Subject], turns: int, repeats: int = 4, pause_s: float = 0.02
) -> dict[str, float]:
    """Median ms of every subject in one interleaved run, also put into ``results`` with what disturbed it."""
    others = watch_other_work()
    ms = {name: milliseconds(s) for name, s in interleaved(subjects, turns, repeats, pause_s).items()}
    results["environment"]["cores_used_by_others"] = others()
    results["ms"] = ms
    return ms


def interleaved(subjects: Mapping[str, Subject], turns: int, repeats: int = 4, pause_s: float = 0.02) -> dict[str, list[float]]:
    """Seconds per call of every subject, measured in turns so that a slow minute of the machine hits all of them.

    A subject returns the seconds it took. In each turn it is called once without being counted, so that its caches and
    threads are warm as they are in a run of steps, and then ``repeats`` times, or once if that call lasted over 0.5 s. The
    pause lets the idle threads of another library stop spinning.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(turns):
        for name, call in subjects.items():
            time.sleep(pause_s)
            start = time.perf_counter()
            call()
            long = time.perf_counter() - start > 0.5
            seconds[name].extend(call() for _ in range(1 if long else repeats))
    return seconds


def milliseconds(seconds: Sequence[float]) -> float:
    """The median in ms."""
    return 1e3 * statistics.median(seconds)


def environment() -> dict[str, Any]:
    """Processor, cores, load average before the run, and versions."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            fields = [line.split(":", 1) for line in info if ":" in line]
        found = {key.strip(): value.strip() for key, value in reversed(fields)}
        cpu = f"{found.get('model name', cpu)} (family {found.get('cpu family')}, model {found.get('model')})"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
    }


def watch_other_work() -> Callable[[], float | None]:
    """Start watching; the returned call tells how many cores other processes kept busy since then (None: unknown)."""

    def busy() -> float:
        with open("/proc/stat", encoding="utf-8") as stat:
            user, nice, system, _, _, irq, softirq, *_ = (int(x) for x in stat.readline().split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

    if not os.path.exists("/proc/stat"):
        return lambda: None
    start, total, own = time.perf_counter(), busy(), time.process_time()

    def cores() -> float:
        others = (busy() - total) - (time.process_time() - own)
        return max(0.0, round(others / (time.perf_counter() - start), 2))

    return cores


def print_conditions(environment: Mapping[str, Any]) -> None:
    """The machine, and a warning where the times cannot be trusted."""
    print("\n" + ", ".join(f"{key} {value}" for key, value in environment.items()))
    others = environment.get("cores_used_by_others")
    if others is not None and others > 0.1:
        print(
            f"NOT A CLEAN RUN: other processes kept {others} cores busy. All times are too long, and OpenMP's"
            " (Hugging Face) by far the most, since its threads wait for each other."
        )


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table in Markdown; floats with two decimals."""
    cells = [[f"{c:.2f}" if isinstance(c, float) else "" if c is None else str(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(head), *cells]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "| " + " | ".join([first, *rest]) + " |"

    print(f"\n{title}\n")
    print(line(head))
    print("|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|")
    for row in cells:
        print(line(row))
    print()


def report(results: dict[str, Any], as_json: bool) -> None:
    """With ``--json`` the last line of the output is one JSON object."""
    if as_json:
        print(json.dumps(results), flush=True)
