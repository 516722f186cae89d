"""The kernels are chosen at lowering, and the TPU compiler takes them: a fast part of experiments/compile_matrix.py."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention, markov, verify

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "compile_matrix.py"


def matrix(*arguments):
    """The JSON of a run, without what the tests set for their own devices."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, str(SCRIPT), "--json", "--models", "SmolLM2", "--blocks", "7", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])["cells"]


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_tpu_compiler(chip):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('the TPU compiler is not installed: pip install "jax[tpu]"')
    arguments = ("--ops", "verify", "markov", "attention", "--chips", chip, "--batches", "16", "--dtypes", "bfloat16")
    code, cells = matrix(*arguments)
    assert [c["result"] for c in cells] == ["ok"] * 3 and code == 0
    assert all(c["kernels"] for c in cells)
    scratch = next(c for c in cells if c["op"] == "verify")
    assert scratch["temp_bytes"] < scratch["rows_bytes"]


def test_a_missing_compiler_is_named():
    if importlib.util.find_spec("jax_cuda13_plugin") is not None:
        pytest.skip("the CUDA compiler is installed")
    done = subprocess.run([sys.executable, str(SCRIPT), "--cuda"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "jax_cuda13_plugin" in done.stderr


def small(op):
    """A program that leaves the choice of the backend open."""
    struct = jax.ShapeDtypeStruct
    ints, floats = (lambda *s: struct(s, jnp.int32)), (lambda *s: struct(s, jnp.float32))
    if op == "verify":
        filters = verify.Filters(floats(2), ints(2), floats(2), floats(2))
        call = functools.partial(verify.verify, log_q=None, mode="greedy")
        return call, {"logits": floats(2, 3, 300), "tokens": ints(2, 2), "scheduled": ints(2), "filters": filters}
    if op == "markov":
        head = markov.Head(floats(300, 128), floats(300, 128))
        arrays = {"hidden": floats(2, 3, 64), "base_logits": floats(2, 3, 300), "anchor": ints(2), "head": head}
        return markov.propose, arrays
    cache = floats(1, 2, 1, 128, 64)
    own = floats(2, 3, 1, 64)
    arrays = {"q": floats(2, 3, 2, 64), "k": own, "v": own, "block_mask": struct((2, 3, 3), jnp.bool_)}
    return attention.attend, arrays | {"cache_k": cache, "cache_v": cache, "layer": ints(), "context": ints(2)}


@pytest.mark.parametrize("op", ["verify", "markov", "attention"])
def test_the_platform_chooses_at_lowering(op):
    call, arrays = small(op)
    traced = jax.jit(call).trace(**arrays)
    kernel = {"verify": "dspark_verify_rows", "markov": "dspark_markov", "attention": "dspark_attend"}[op]
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text(debug_info=True) for p in ("tpu", "cuda", "cpu")}
    assert kernel in texts["tpu"] and "tpu_custom_call" in texts["tpu"]
    assert kernel in texts["cuda"] and "triton" in texts["cuda"]
    assert "custom_call_target" not in texts["cpu"] and "tpu_custom_call" not in texts["cpu"]


@pytest.mark.slow
def test_device_check_runs():
    """On a CPU, with tiny shapes: the script for a device must not meet its first run there."""
    script = SCRIPT.parent / "device_check.py"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert {found["differ"] for ops in results["parity"].values() for found in ops.values()} == {0}
    assert [o["op"] for o in results["ops"]] == ["verify", "markov", "attention"] and results["decode"]
