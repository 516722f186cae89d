"""Measurements: what is counted, what a failure looks like, and the report of ``dspark bench``."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import toy_pair

from dspark_jax import attention, bench, draft, target
from dspark_jax.bench import PLAIN, Case, Run, Timing, measure, summarise, timed_generate, warm_up
from dspark_jax.cache import KVCache, context_sizes, pack
from dspark_jax.cli import main
from dspark_jax.errors import RequestError
from dspark_jax.generate import generate, stream
from dspark_jax.requests import Output, Stats
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength


def answer(tokens: list[int], committed: list[int], verified: list[int], accepted: int) -> Output:
    stats = Stats(3, len(tokens), len(committed), sum(verified), accepted, 0.0, (), 0)
    return Output(tokens, None, "length", committed, verified, stats)


def run_of(policy: str, case: int, seconds: float, output: Output | None, repeat: int = 0) -> Run:
    if output is None:
        return Run(policy, case, repeat, None, [], "out of memory")
    committed = output.accepted_per_round
    return Run(policy, case, repeat, Timing(0.5, 0.0, seconds, len(committed), sum(committed)), [output])


CASES = [Case([[1, 2, 3]], [SamplingParams()], domain) for domain in ("math", "math", "chat")]
PLAIN_ANSWER = answer([1, 2, 3, 4, 5], [1] * 4, [0] * 4, 0)
FAST_ANSWER = answer([1, 2, 3, 4, 5], [3, 1], [2, 2], 2)


def test_timed_generate_is_generate() -> None:
    pair = toy_pair()
    prompts = [[1, 2, 3], [4, 5], [6]]
    timed = timed_generate(pair, prompts, scheduler=FixedLength(), max_new_tokens=12, batch_size=2)
    assert timed.outputs == generate(pair, prompts, scheduler=FixedLength(), max_new_tokens=12, batch_size=2)
    assert len(timed.timings) == 2
    assert sum(t.tokens for t in timed.timings) == sum(len(o.token_ids) - 1 for o in timed.outputs)
    assert timed.timings[0].rounds == max(o.stats.rounds for o in timed.outputs[:2])
    assert all(t.decode_seconds > 0 and t.prefill_seconds > 0 for t in timed.timings)
    assert timed.tokens_per_second == pytest.approx(
        sum(t.tokens for t in timed.timings) / sum(t.decode_seconds for t in timed.timings)
    )


def test_nothing_asked_nothing_measured() -> None:
    timed = timed_generate(toy_pair(), [[1, 2]], max_new_tokens=0)
    assert timed.timings == [Timing(0.0, 0.0, 0.0, 0, 0)] and math.isnan(timed.tokens_per_second)


def test_summary_of_known_runs() -> None:
    runs = []
    for case, slow in enumerate((4.0, 8.0, 2.0)):
        runs += [run_of(PLAIN, case, slow, PLAIN_ANSWER), run_of("fixed", case, slow / (case + 1), FAST_ANSWER)]
    summary = summarise(runs, "fixed", 2, True, CASES)
    assert summary.cases == 3 and summary.failed == 0 and summary.tokens == 15
    assert summary.ratio == pytest.approx(2.0)  # 1, 2, 3
    assert summary.ratio_of_totals == pytest.approx(14 / (4 + 4 + 2 / 3))
    assert summary.accepted_length == 2 and summary.verified_length == 2
    assert summary.acceptance_by_position == (0.5, 0.5)
    assert summary.ms_per_round == pytest.approx(2000)
    assert summary.prefill_ms == pytest.approx(500)
    assert summary.same_as_plain == (3, 3)
    assert summarise(runs, "fixed", 2, False, CASES).same_as_plain is None
    chat = summarise(runs, "fixed", 2, True, CASES, "chat")
    assert chat.cases == 1 and chat.ratio == pytest.approx(3)


def test_a_failed_run_is_not_a_slow_one() -> None:
    """PITFALLS P12."""
    runs = [run_of(PLAIN, case, 4.0, PLAIN_ANSWER) for case in range(3)]
    runs += [run_of("fixed", 0, 2.0, FAST_ANSWER), run_of("fixed", 1, 99.0, None), run_of("fixed", 2, 2.0, FAST_ANSWER)]
    runs += [run_of("fixed", 2, 1000.0, None, repeat=1)]
    summary = summarise(runs, "fixed", 2, True, CASES)
    assert (summary.cases, summary.failed) == (1, 2)
    assert summary.ratio == summary.ratio_of_totals == pytest.approx(2)
    nothing = summarise(runs[:3], "fixed", 2, True, CASES)
    assert nothing.cases == 0 and math.isnan(nothing.ratio) and math.isnan(nothing.ratio_of_totals)


def test_a_difference_is_seen() -> None:
    other = answer([1, 2, 3, 4, 6], [3, 1], [2, 2], 2)
    runs = [run_of(PLAIN, 0, 1.0, PLAIN_ANSWER), run_of("fixed", 0, 1.0, other)]
    assert summarise(runs, "fixed", 2, True, CASES).same_as_plain == (0, 1)


def test_a_stop_token_among_the_drafts_counts_as_accepted() -> None:
    cut = answer([1, 2, 3, 0], [2, 1], [2, 2], 2)  # the last round's draft was the stop token: one committed, one accepted
    assert summarise([run_of("fixed", 0, 1.0, cut)], "fixed", 2, True, CASES).acceptance_by_position == (1.0, 0.0)


def test_failures_are_recorded_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, original = toy_pair(), timed_generate

    def fail(pair, prompts, sampling, scheduler, *args, **kwargs):
        if isinstance(scheduler, FixedLength):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")
        return original(pair, prompts, sampling, scheduler, *args, **kwargs)

    monkeypatch.setattr(bench, "timed_generate", fail)
    policies = {PLAIN: Autoregressive(), "fixed": FixedLength()}
    runs = list(measure(pair, CASES[:2], policies, 8, 1, 2))
    assert [r.policy for r in runs] == [PLAIN, "fixed", "fixed", PLAIN, "fixed", PLAIN, PLAIN, "fixed"]
    assert {r.failure for r in runs if r.policy == "fixed"} == {"JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    assert all(r.failure is None and r.timing for r in runs if r.policy == PLAIN)


def test_warm_up_compiles_everything() -> None:
    pair = toy_pair()
    cases = [Case([[1] * n], [SamplingParams()]) for n in (3, 5, 250)]
    policies = {PLAIN: Autoregressive(), "fixed": FixedLength(2)}
    assert len(list(warm_up(pair, cases, policies, 10, 1))) == 2 * 2  # capacities 256 and 512
    sizes = bench.decode._cache_size()
    assert all(r.failure is None for r in measure(pair, cases, policies, 10, 1, 1))
    assert bench.decode._cache_size() == sizes


def test_bench_reports(fixtures_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = fixtures_dir / "qwen3_tiny"
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [5, 9, n], "domain": domain} for n in (1, 2, 3) for domain in ("math", "chat")]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    argv = ["bench", "--target", str(root / "target"), "--draft", str(root / "dspark_vanilla" / "draft")]
    argv += ["--prompts", str(prompts), "--limit", "4", "--max-new-tokens", "12", "--repeats", "2", "--json"]
    argv += ["--policy", "fixed:3", "--policy", "survival:0.3"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [p["policy"] for p in report["policies"]] == ["ar", "fixed:3", "survival:0.3"]
    assert all(p["cases"] == 4 and p["failed"] == 0 and p["same_as_plain"] == [4, 4] for p in report["policies"])
    assert report["policies"][0]["ratio"] == 1 and report["policies"][1]["ratio"] > 0
    assert len(report["policies"][1]["acceptance_by_position"]) == 3
    assert {d: rows[0]["cases"] for d, rows in report["domains"].items()} == {"math": 2, "chat": 2}
    assert report["command"].startswith("dspark bench --target") and report["cores"] >= 1 and report["jaxlib"]
    assert "FAILED" not in out and "survival:0.3" in out


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--repeats", "0"], "--repeats=0"),
        (["--max-new-tokens", "1"], "--max-new-tokens=1"),
        (["--batch-size", "0"], "--batch-size=0"),
        (["--limit", "0"], "--limit=0"),
        (["--policy", "survival:7"], "--policy='survival:7'"),
        (["--policy", "fixed"], "--policy='fixed' needs --draft"),
    ],
)
def test_bad_input(
    extra: list[str], named: str, fixtures_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [1, 2]}')
    target = str(fixtures_dir / "qwen3_tiny" / "target")
    assert main(["bench", "--target", target, "--prompts", str(path), *extra]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_rows_that_take_no_part_widen_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context read covers the rows of the pass, however long a finished row is; the others' numbers stay."""
    pair, buckets, original = toy_pair(), [], attention.context_bucket
    monkeypatch.setattr(attention, "context_bucket", lambda *args: buckets.append(original(*args)) or buckets[-1])
    model, capacity, rng = pair.model, 512, np.random.default_rng(0)
    assert context_sizes(capacity) == (128, 256, 512)
    context = jnp.asarray([400, 9, 200], jnp.int32)

    def cache_of(config) -> KVCache:
        shape = (config.num_layers, 3, config.num_kv_heads, capacity, config.head_dim)
        return KVCache(*(jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2)))

    caches = cache_of(model.target), cache_of(model.drafter)

    def target_pass(counts: list[int]) -> jax.Array:
        grid = jnp.asarray([[1, 2], [3, 4], [5, 6]], jnp.int32)
        batch = pack(grid, jnp.asarray(counts, jnp.int32), context, 6)
        return target.forward(pair.params["target"], model.target, batch, caches[0]).hidden.reshape(3, 2, -1)

    def block(active: list[bool] | None) -> jax.Array:
        rows = None if active is None else jnp.asarray(active)
        embed, anchor = pair.params["target"]["embed"], jnp.asarray([1, 2, 3], jnp.int32)
        return draft.block_hidden(pair.params["draft"], model.drafter, embed, anchor, context, caches[1], rows)

    for run, everybody, some, one in (
        (target_pass, [2, 2, 2], [0, 2, 1], [0, 2, 0]),
        (block, None, [False, True, True], [False, True, False]),
    ):
        full, without_first, alone = run(everybody), run(some), run(one)
        assert [int(b) for b in buckets] == [2, 1, 0]
        buckets.clear()
        np.testing.assert_allclose(without_first[1], full[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(without_first[2, 0], full[2, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(alone[1], full[1], rtol=1e-5, atol=1e-5)
    block([False] * 3)
    assert int(buckets.pop()) == 0


def test_requests_take_any_integer_and_no_bytes() -> None:
    pair = toy_pair()
    wanted = generate(pair, [[1, 2, 3]], max_new_tokens=5)[0].token_ids
    deltas = stream(pair, [np.asarray([1, 2, 3], np.int8)], max_new_tokens=np.int16(5), rounds_per_update=np.int64(4))
    assert [i for d in deltas for i in d.token_ids] == wanted
    for call in (
        dict(prompts=[b"\x01\x02"]),
        dict(prompts=[bytearray(b"\x01")]),
        dict(prompts=b"\x01\x02"),
        dict(prompts=[[1]], stop_token_ids=b"\x01"),
        dict(prompts=[[1]], rounds_per_update=True),
        dict(prompts=[[1]], rounds_per_update=np.int64(0)),
        dict(prompts=[[np.True_]]),
    ):
        with pytest.raises(RequestError):
            stream(pair, **call)


def test_finished_rows_do_not_hold_a_batch_in_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = draft.block_hidden
    monkeypatch.setattr(draft, "block_hidden", lambda *args: seen.append(len(args)) or original(*args))
    generate(toy_pair(seed=5), [[1, 2], [3]], scheduler=FixedLength(3), max_new_tokens=7)
    assert seen and set(seen) == {7}  # the rows that decode are named
