"""Do the kernels, and the whole decode step, compile for the chips they are meant for? No chip is needed to find out.

The TPU compiler comes with libtpu (extra `tpu`) and the CUDA compiler with jax[cuda13] (extra `cuda`); both run on a CPU. Every
cell of the table op x chip x shape is "ok" or the compiler's own words, with the scratch memory that the compiled program
needs and the kernels whose names stand in its text. Without --cuda the kernels are lowered for CUDA, to Triton's input.

    python experiments/compile_matrix.py --json
    python experiments/compile_matrix.py --ops verify --chips v5e --models SmolLM2 --batches 16
    python experiments/compile_matrix.py --cuda --ops verify markov attention
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if __name__ == "__main__":  # device_check takes its shapes from here and has a device of its own
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles; others may do so at the same time
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from pallas_kernels import attention, markov, verify

TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
GPU_CHIP = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: %(bandwidth)d
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: %(memory)d
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "%(name)s"
"""
GPUS = {
    "H100": {"name": "NVIDIA H100 80GB HBM3", "bandwidth": 3_350_000_000_000, "memory": 85_000_000_000},
    "H200": {"name": "NVIDIA H200", "bandwidth": 4_800_000_000_000, "memory": 150_000_000_000},
}
CACHED = 1024  # positions of the attention cell's cache
STEP_CACHED = 256  # and of the decode step's, small enough for 128 rows
LAYERS = 2  # of the attention cell's cache, which is indexed and not read whole


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel sees of a model."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int = 256


MODELS = {"Qwen3-4B": Shape(151_936, 2560, 32, 8, 128), "SmolLM2": Shape(49_152, 576, 9, 3, 64)}
OPS = ("verify", "markov", "attention", "decode")
KERNELS = {
    "verify": ("dspark_verify_rows", "dspark_verify_draw"),
    "markov": ("dspark_markov",),
    "attention": ("dspark_attend",),
    "decode": (),
}
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def verify_program(shape: Shape, block: int, batch: int, dtype: Any, backend: Any) -> Program:
    """Filters, soft acceptance and log-probabilities included."""

    def run(logits: Any, q: Any, norm: Any, tokens: Any, scheduled: Any, filters: Any, uniform: Any, noise: Any) -> Any:
        return verify.verify(
            logits,
            q,
            tokens,
            scheduled,
            verify.Filters(*filters),
            q_norm=verify.QNorm(*norm),
            uniform=uniform,
            noise=noise,
            soft=True,
            backend=backend,
        )

    row, slot = functools.partial(struct, (batch,)), functools.partial(struct, (batch, block))
    arguments = (
        struct((batch, block + 1, shape.vocab), dtype),
        struct((batch, block, shape.vocab), jnp.float32),
        (slot(jnp.float32), slot(jnp.float32)),
        slot(jnp.int32),
        row(jnp.int32),
        (row(jnp.float32), row(jnp.int32), row(jnp.float32), row(jnp.float32)),
        slot(jnp.float32),
        struct((batch, shape.vocab), jnp.float32),
    )
    return run, arguments


def markov_program(shape: Shape, block: int, batch: int, dtype: Any, backend: Any, kind: markov.Kind = "vanilla") -> Program:
    """A sampled block with a confidence head."""

    def run(hidden: Any, base: Any, anchor: Any, head: Any, confidence: Any, temperature: Any, noise: Any) -> Any:
        drawn = {"temperature": temperature, "noise": noise}
        arguments = (hidden, base, anchor, head, confidence)
        return markov.propose(*arguments, kind=kind, backend=backend, **drawn)

    rank, width = shape.rank, shape.hidden
    inputs = {"vanilla": None, "gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}[kind]
    table = struct((shape.vocab, rank), dtype)
    proj = None if inputs is None else struct(inputs, dtype)
    bias = None if inputs is None else struct(inputs[:1], dtype)
    vocabulary = struct((batch, block, shape.vocab), jnp.float32)
    arguments = (
        struct((batch, block, width), dtype),
        vocabulary,
        struct((batch,), jnp.int32),
        markov.Head(table, table, proj, bias),
        markov.Confidence(struct((1, width + rank), dtype), struct((1,), dtype)),
        struct((batch,), jnp.float32),
        vocabulary,
    )
    return run, arguments


def attention_program(shape: Shape, block: int, batch: int, dtype: Any, backend: Any) -> Program:
    """The verification's flat pass; the drafter's block differs in the mask's values only."""
    width = block + 1
    cache = struct((LAYERS, batch, shape.kv_heads, CACHED, shape.head_dim), dtype)
    own = struct((batch, width, shape.kv_heads, shape.head_dim), dtype)
    arguments = (
        struct((batch, width, shape.heads, shape.head_dim), dtype),
        own,
        own,
        struct((batch, width, width), jnp.bool_),
        cache,
        cache,
        struct((), jnp.int32),
        struct((batch,), jnp.int32),
        struct((), jnp.int32),
    )
    return functools.partial(attention.attend, backend=backend), arguments


def pair_config(model_name: str, block: int) -> Any:
    """Target and a five-layer drafter of the model's shape."""
    from dspark_jax import config, state  # here, since the kernels' cells need JAX alone

    shape = MODELS[model_name]
    qwen = model_name == "Qwen3-4B"
    layers, inner = (36, 9728) if qwen else (30, 1536)
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": inner,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-6,
        "rope": config.RopeConfig(theta=1e6 if qwen else 1e5),
        "max_positions": 8192,
    }
    target = config.TargetConfig(
        architecture="qwen3" if qwen else "llama", num_layers=layers, tie_embeddings=True, windows=(0,) * layers, **common
    )
    draft = config.DraftConfig(
        num_layers=5,
        windows=(0,) * 5,
        block_size=block,
        mask_token_id=0,
        target_layer_ids=(1, 9, 17, 25, layers - 3),
        num_target_layers=layers,
        markov_rank=shape.rank,
        markov_head_type="vanilla",
        confidence_head=True,
        confidence_with_markov=True,
        **common,
    )
    return state.ModelConfig(target, draft)


def decode_program(model_name: str, block: int, batch: int, dtype: Any) -> Program:
    """One whole round of ``dspark_jax``; what it calls is the platform's choice."""
    from dspark_jax import decode, params, sampling, schedule, state

    model = pair_config(model_name, block)

    def fresh() -> Any:
        rows = sampling.SamplingState.from_params([sampling.SamplingParams(temperature=1.0, seed=0)] * batch)
        return state.new_state(model, [[1]] * batch, rows, [STEP_CACHED] * batch, (), STEP_CACHED, dtype)

    specs = {"target": params.target_specs(model.target), "draft": params.draft_specs(model.drafter)}
    tree = {name: params.abstract(part, dtype) for name, part in specs.items()}
    policy = schedule.FixedLength()

    def run(tree: Any, state: Any) -> Any:
        return decode.decode_step(model, tree, state, policy)

    return run, (tree, jax.eval_shape(fresh))


def program(op: str, model: str, block: int, batch: int, dtype: Any, backend: str) -> Program:
    if op == "decode":
        return decode_program(model, block, batch, dtype)
    build = {"verify": verify_program, "markov": markov_program, "attention": attention_program}[op]
    return build(MODELS[model], block, batch, dtype, backend)


@functools.cache
def device(chip: str) -> Any:
    """One device of the chip's topology."""
    if chip in GPUS:
        text = GPU_CHIP % GPUS[chip]
        return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]


def free(place: Any) -> Any:
    """Any layout on ``place``."""
    return Format(Layout.AUTO, place)


def cell(op: str, chip: str, model: str, block: int, batch: int, dtype: str) -> dict[str, Any]:
    """Compile (or, on the chip "cuda", lower) one cell; never raises for what the compiler says."""
    backend = "pallas_tpu" if chip in TOPOLOGIES else "pallas_gpu"
    out: dict[str, Any] = {"op": op, "chip": chip, "model": model, "block": block, "batch": batch, "dtype": dtype}
    start = time.perf_counter()
    try:
        run, arguments = program(op, model, block, batch, jnp.dtype(dtype), backend)
        if chip == "cuda":
            lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
            text, out["temp_bytes"] = lowered.as_text(debug_info=True), None
        else:
            place = SingleDeviceSharding(device(chip))
            # Arrays come in the layout that the program wants, as they do from the products before it in a decode step; the
            # copies that another layout costs are not the op's. The decode step is compiled as it is called.
            layout = {} if op == "decode" or chip in GPUS else {"in_shardings": free(place), "out_shardings": free(place)}
            if not layout:
                arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
            donate = (1,) if op == "decode" else ()
            compiled = jax.jit(run, donate_argnums=donate, **layout).lower(*arguments).compile()
            memory = compiled.memory_analysis()
            text, out["temp_bytes"] = compiled.as_text(), memory.temp_size_in_bytes
            out["argument_bytes"] = memory.argument_size_in_bytes
        out["kernels"] = [name for name in sorted({n for names in KERNELS.values() for n in names}) if name in text]
        missing = [name for name in KERNELS[op] if name not in out["kernels"]]
        out["result"] = f"not in the program: {', '.join(missing)}" if missing else "ok"
        if op == "verify" and out["temp_bytes"] is not None:
            out["rows_bytes"] = batch * (block + 1) * MODELS[model].vocab * 4
            if out["temp_bytes"] >= out["rows_bytes"]:
                out["result"] = f"scratch of {out['temp_bytes']} bytes is not below one array of the logits"
    except Exception as error:  # whatever the compiler says is the result of the cell
        out["result"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    out["seconds"] = round(time.perf_counter() - start, 2)
    return out


def cells(
    ops: Sequence[str],
    chips: Sequence[str],
    models: Sequence[str],
    blocks: Sequence[int],
    batches: Sequence[int],
    dtypes: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Compile the product of the arguments, in its order."""
    for op, chip, model, block, batch, dtype in itertools.product(ops, chips, models, blocks, batches, dtypes):
        yield cell(op, chip, model, block, batch, dtype)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table op x chip: cells that compiled, largest scratch, and the words of the others."""
    lines = ["| op | chip | cells | ok | largest scratch, MiB | seconds |", "|---|---|---:|---:|---:|---:|"]
    for op, chip in dict.fromkeys((r["op"], r["chip"]) for r in rows):
        group = [r for r in rows if (r["op"], r["chip"]) == (op, chip)]
        good = [r for r in group if r["result"] == "ok"]
        scratch = max((r["temp_bytes"] or 0 for r in good), default=0) / 2**20
        seconds = sum(r["seconds"] for r in group)
        lines.append(f"| {op} | {chip} | {len(group)} | {len(good)} | {scratch:.1f} | {seconds:.0f} |")
    for r in rows:
        if r["result"] != "ok":
            where = f"{r['op']} {r['chip']} {r['model']} block {r['block']} batch {r['batch']} {r['dtype']}"
            lines.append(f"\n{where}: {r['result']}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument(
        "--chips", nargs="+", choices=[*TOPOLOGIES, *GPUS, "cuda"], help="default: all TPUs, and cuda (lowered)"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--blocks", nargs="+", type=int, default=[7, 16])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--cuda", action="store_true", help="compile for H100 and H200 instead (needs jax[cuda13])")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    chips = args.chips or (list(GPUS) if args.cuda else [*TOPOLOGIES, "cuda"])
    for package, needed in (("libtpu", TOPOLOGIES), ("jax_cuda13_plugin", GPUS)):
        if set(chips) & set(needed) and importlib.util.find_spec(package) is None:
            parser.error(f"{', '.join(sorted(set(chips) & set(needed)))} need the package {package}, which is not installed")
    rows = []
    for row in cells(args.ops, chips, args.models, args.blocks, args.batches, args.dtypes):
        rows.append(row)
        print({k: v for k, v in row.items() if k != "argument_bytes"}, file=sys.stderr, flush=True)
    print("\n".join(summary(rows)))
    if args.json:
        print(json.dumps({"jax": jax.__version__, "cells": rows}), flush=True)
    return 0 if all(r["result"] == "ok" for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
