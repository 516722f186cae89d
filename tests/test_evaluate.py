"""Evaluation: the statistics against definitions written out, what the rounds say against ``generate``, and ``dspark eval``."""

import ast
import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_text import chat_pair
from toys import toy_pair

from dspark_jax.cli import main, models
from dspark_jax.errors import RequestError
from dspark_jax.evaluate import compare, evaluate, metrics
from dspark_jax.generate import generate
from dspark_jax.pair import Pair
from dspark_jax.requests import Plan
from dspark_jax.rows import parse_row, read_rows, take_per_source
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength, Threshold
from dspark_jax.state import record_confidence
from dspark_jax.turns import seed_of

ROWS = [
    {"prompt": [5, 9, 23], "source": "a", "domain": "x"},
    {"prompt": [5, 9, 2, 3, 4, 5, 6], "source": "a", "domain": "x"},
    {"prompt": [7, 9, 23], "source": "b", "domain": "y"},
    {"prompt": [8, 9], "source": "b", "domain": "x"},
    {"prompt": [8, 9, 3, 30], "source": "b", "domain": "y"},
]


ONE_SHAPE: dict = dict(max_new_tokens=20, batch_size=2)  # the tests share compiled programs


@pytest.fixture(scope="module")
def pair() -> Pair:
    return chat_pair()


def test_metrics_need_no_jax() -> None:
    tree = ast.parse(Path(metrics.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names == {"__future__", "dataclasses", "collections.abc", "numpy"}


def test_outcomes_of_every_kind_of_round() -> None:
    """Rejected at the third; all accepted; nothing checked; cut at two checked; a stop token as the second draft; the
    target's own row unusable after one."""
    seen = metrics.outcomes(
        verified=np.array([4, 4, 0, 2, 4, 4]),
        accepted=np.array([2, 4, 0, 2, 2, 1]),
        committed=np.array([3, 5, 1, 3, 2, 1]),
        slots=4,
    )
    y, n, _ = True, False, None
    conditional = [[y, y, n, _], [y, y, y, y], [_, _, _, _], [y, y, _, _], [y, y, _, _], [y, _, _, _]]
    survival = [[y, y, n, n], [y, y, y, y], [_, _, _, _], [y, y, _, _], [y, y, _, _], [y, _, _, _]]
    for told, outcome, known in (
        (conditional, seen.conditional, seen.conditional_seen),
        (survival, seen.survival, seen.survival_seen),
    ):
        for row, line in enumerate(told):
            for slot, value in enumerate(line):
                assert known[row, slot] == (value is not None), (row, slot)
                assert value is None or outcome[row, slot] == value, (row, slot)


def test_shares() -> None:
    values, counts = metrics.share(np.array([[True, True], [False, True]]), np.array([[True, False], [True, False]]))
    assert values[0] == 0.5 and math.isnan(values[1]) and counts == (2, 0)


def test_calibration_error_by_hand() -> None:
    p, o = np.array([0.02, 0.04, 0.97, 1.0]), np.array([0, 1, 1, 1])
    assert metrics.expected_calibration_error(p, o) == pytest.approx((2 * abs(0.03 - 0.5) + 2 * abs(0.985 - 1)) / 4)
    table = metrics.reliability(p, o)
    assert len(table.count) == 20 and table.count[0] == 2 and table.count[-1] == 2 and math.isnan(table.predicted[5])
    assert metrics.brier(p, o) == pytest.approx(np.mean((p - o) ** 2))
    assert metrics.bias(p, o) == pytest.approx(p.mean() - 0.75)


def test_auc_is_the_share_of_ordered_pairs() -> None:
    random = np.random.default_rng(0)
    p, o = random.integers(0, 12, 200) / 12, random.random(200) < 0.4  # many ties
    pairs = [(a > b) + 0.5 * (a == b) for a in p[o] for b in p[~o]]
    assert metrics.auc(p, o) == pytest.approx(np.mean(pairs))
    assert metrics.auc(np.ones(4), np.array([0, 1, 0, 1])) == 0.5
    assert math.isnan(metrics.auc(np.array([0.1, 0.2]), np.array([1, 1])))


def test_nothing_observed_is_nan_not_zero() -> None:
    empty = metrics.calibration(np.zeros((0, 3)), np.zeros((0, 3), bool), np.zeros((0, 3), bool))
    assert empty.count == 0 and all(math.isnan(x) for x in (empty.ece, empty.auc, empty.brier, empty.bias, empty.base_rate))
    assert all(math.isnan(x) for x in empty.bias_by_position)
    assert math.isnan(metrics.ratio_estimate([], []).value)


def simulated(rounds: int, stops: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Rounds of a perfectly calibrated head over 4 slots; an accepted token ends the request with chance ``stops``."""
    random = np.random.default_rng(seed)
    c = random.beta(2, 1, (rounds, 4))
    accepted, committed = np.zeros(rounds, int), np.zeros(rounds, int)
    for r in range(rounds):
        while accepted[r] < 4 and random.random() < c[r, accepted[r]]:
            accepted[r] += 1
            if random.random() < stops:
                committed[r] = -1
                break
        committed[r] = accepted[r] + (committed[r] == 0)
    return c, np.full(rounds, 4), accepted, committed


def test_a_calibrated_head_looks_calibrated_in_spite_of_stop_tokens() -> None:
    c, verified, accepted, committed = simulated(40_000, stops=0.3)
    seen = metrics.outcomes(verified, accepted, committed, 4)
    for kind, p in (("conditional", c), ("survival", np.cumprod(c, axis=1))):
        outcome, known = getattr(seen, kind), getattr(seen, f"{kind}_seen")
        if kind == "survival":  # beyond a stop nothing is known, and a stop needs accepted tokens: only slot 1 is unbiased
            p, outcome, known = p[:, :1], outcome[:, :1], known[:, :1]
        result = metrics.calibration(p, outcome, known)
        assert result.ece < 0.012 and np.abs(result.bias_by_position).max() < 0.015
        assert 0.6 < result.auc < 0.9
    naive = np.arange(1, 5)[None, :] <= accepted[:, None]  # the control: what follows a stop counted as rejected
    told = np.pad(naive[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    assert metrics.calibration(c, naive, told).bias > 0.1


def test_bootstrap_is_by_prompt() -> None:
    """Rounds of a prompt are alike: resampled one by one they would look ten times surer than they are."""
    random = np.random.default_rng(1)
    means = random.normal(2, 0.5, 50)
    committed, rounds = [means * 100], [np.full(50, 100.0)]
    e = metrics.ratio_estimate(committed, rounds)
    width = e.high - e.low
    assert e.value == pytest.approx(means.mean()) and e.low < e.value < e.high
    assert width == pytest.approx(2 * 1.96 * means.std() / math.sqrt(50), rel=0.15)
    assert e == metrics.ratio_estimate(committed, rounds)
    one = metrics.ratio_estimate([np.array([5.0])], [np.array([2.0])])
    assert one.value == 2.5 and math.isnan(one.low) and math.isnan(one.high)


def test_interval_covers() -> None:
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        rounds = random.integers(5, 40, 40).astype(float)
        e = metrics.ratio_estimate([rounds * random.normal(2, 0.3, 40)], [rounds], count=400)
        hits += e.low <= 2 <= e.high
    assert 0.88 <= hits / 200 <= 0.99


def test_pairing_makes_small_differences_visible() -> None:
    random = np.random.default_rng(3)
    rounds, hard = np.full(40, 30.0), random.normal(2, 0.5, 40)
    first, second = ([rounds * hard], [rounds]), ([rounds * (hard + random.normal(0.1, 0.05, 40))], [rounds])
    d = metrics.paired_difference(first, second)
    assert d.value == pytest.approx(0.1, abs=0.03) and d.low > 0
    assert metrics.ratio_estimate(*second).low < metrics.ratio_estimate(*first).high  # unpaired, they overlap
    assert metrics.paired_difference(first, first) == metrics.Estimate(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="same prompts"):
        metrics.paired_difference(first, ([rounds[:-1]], [rounds[:-1]]))


def test_sources_count_the_same() -> None:
    value = metrics.ratio_estimate([np.full(30, 30.0), np.full(2, 60.0)], [np.full(30, 10.0), np.full(2, 10.0)]).value
    assert value == pytest.approx((3 + 6) / 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_generate(temperature: float, pair: Pair) -> None:
    result = evaluate(pair, ROWS, temperatures=[temperature], seed=4, **ONE_SHAPE).results[0]
    for i, row in enumerate(ROWS):
        sampling = SamplingParams(temperature, seed=seed_of(4, i, 0))
        (out,) = generate(pair, [row["prompt"]], sampling, **ONE_SHAPE)
        mine = result.rounds.of([i])
        assert mine.committed.tolist() == out.accepted_per_round and mine.verified.tolist() == out.verified_per_round
        assert int(mine.accepted.sum()) == out.stats.drafts_accepted
        p = result.prompts[i]
        assert (p.rounds, p.committed, p.new_tokens) == (out.stats.rounds, sum(out.accepted_per_round), len(out.token_ids))
        assert p.finish == (out.finish_reason,) and p.index == i
    totals = {s: [p for p in result.prompts if p.source == s] for s in ("a", "b")}
    pooled = {s: sum(p.committed for p in ps) / sum(p.rounds for p in ps) for s, ps in totals.items()}
    assert result.accepted_length.value == pytest.approx((pooled["a"] + pooled["b"]) / 2)
    assert {s: g.accepted_length.value for s, g in result.sources.items()} == pytest.approx(pooled)
    by_prompt = np.mean([p.committed / p.rounds for p in totals["b"]])
    assert result.sources["b"].accepted_length_by_prompt.value == pytest.approx(by_prompt)
    assert result.domains["x"].prompts == 3 and result.overall.rounds == sum(p.rounds for p in result.prompts)


def test_recorded_confidences_are_those_the_policies_see(pair: Pair) -> None:
    """With a threshold the verify lengths follow from the recorded logits alone."""
    policy = Threshold(0.4, cumulative=True)
    result = evaluate(pair, ROWS, temperatures=[1.0], policy=policy, **ONE_SHAPE).results[0]
    rounds = result.rounds
    assert rounds.confidence is not None and rounds.confidence.shape == (len(rounds.verified), 4)
    c = np.cumprod(metrics.probabilities(rounds.confidence), axis=1)
    assert c.std() > 0.05
    left = np.concatenate([19 - np.cumsum(np.r_[0, rounds.of([i]).committed[:-1]]) for i in range(len(ROWS))])
    assert rounds.verified.tolist() == np.minimum((c >= 0.4).sum(axis=1), left - 1).tolist()
    assert len(set(rounds.verified.tolist())) > 2


def test_recording_is_off_by_default(pair: Pair) -> None:
    plan = Plan.make(pair, [[5, 9, 23]], None, FixedLength(3), 20, None, 2, None)
    state = next(plan.groups()).start()
    assert state is not None and state.log.confidence is None
    recorded = record_confidence(state, 3)
    assert recorded.log.confidence is not None and recorded.log.confidence.shape == (2, 256, 3)
    assert len(jax.tree.leaves(recorded)) == len(jax.tree.leaves(state)) + 1


def test_a_row_does_not_depend_on_the_others(pair: Pair) -> None:
    rows = [parse_row(row, i) for i, row in enumerate(ROWS)]
    whole = evaluate(pair, rows, temperatures=[1.0], **ONE_SHAPE).results[0]
    part = evaluate(pair, rows[3:], temperatures=[1.0], **ONE_SHAPE).results[0]
    assert part.prompts == whole.prompts[3:]


def test_turns_are_answered_in_order(pair: Pair) -> None:
    rows = [
        {"turns": ["w5 w6", "w7"], "source": "t"},
        {"messages": [{"role": "system", "content": "w9"}, {"role": "user", "content": "w8"}], "source": "m"},
        {
            "messages": [
                {"role": "user", "content": "w5 w6"},
                {"role": "assistant", "content": "w20 w20 w20"},
                {"role": "user", "content": "w7"},
            ],
            "source": "m",
        },
        {"turns": ["w5 w6", "w7 " * 520], "source": "long"},
    ]
    result = evaluate(pair, rows, temperatures=[0.0], **ONE_SHAPE).results[0]
    assert [p.turns for p in result.prompts] == [2, 1, 2, 1]
    (cut,) = result.cut
    assert cut.line == 4 and "turn 2" in cut.why and "512" in cut.why
    (first,) = generate(pair, [[{"role": "user", "content": "w5 w6"}]], **ONE_SHAPE)
    assert first.text
    messages = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": first.text}]
    (second,) = generate(pair, [[*messages, {"role": "user", "content": "w7"}]], **ONE_SHAPE)
    expected = [*first.accepted_per_round, *second.accepted_per_round]
    assert result.rounds.of([0]).committed.tolist() == expected
    assert result.rounds.of([2]).committed.tolist() == expected  # the row's own answer was left out


def test_drafts_are_compared_prompt_by_prompt(pair: Pair) -> None:
    calls = []
    evaluations = [
        evaluate(
            dataclasses.replace(pair, draft_name=name),
            ROWS,
            policy=policy,
            progress=lambda *x: calls.append(x),
            **ONE_SHAPE,
        )
        for name, policy in (("one", FixedLength()), ("two", FixedLength()), ("short", FixedLength(1)))
    ]
    assert calls[0] == (0, 5, 0.0) and calls[-1] == (5, 5, 1.0)
    for c in compare(evaluations[0], evaluations[1]):
        assert c.accepted_length == metrics.Estimate(0.0, 0.0, 0.0) and (c.first, c.second) == ("one", "two")
    greedy, sampled = compare(evaluations[0], evaluations[2])
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    values = [e.at(0.0).accepted_length.value for e in evaluations]
    assert greedy.accepted_length.value == pytest.approx(values[2] - values[0])
    values = [e.at(1.0).accepted_length.value for e in evaluations]
    assert sampled.accepted_length.value == pytest.approx(values[2] - values[0]) and values[2] < values[0]
    assert set(greedy.sources) == {"a", "b"} and set(greedy.domains) == {"x", "y"}
    other = evaluate(pair, ROWS[:3], **ONE_SHAPE)
    with pytest.raises(RequestError, match="same prompts"):
        compare(evaluations[0], other)


@pytest.mark.parametrize(
    ("rows", "options", "named"),
    [
        (ROWS, {"policy": Autoregressive()}, "drafts nothing"),
        (ROWS, {"policy": FixedLength(9)}, "length=9"),
        (ROWS, {"temperatures": []}, "temperatures"),
        (ROWS, {"temperatures": [1.0, 1.0]}, "temperatures"),
        (ROWS, {"temperatures": [-1.0]}, "temperature=-1.0"),
        (ROWS, {"top_p": 0.0}, "top_p=0.0"),
        (ROWS, {"max_new_tokens": 1}, "max_new_tokens=1"),
        (ROWS, {"batch_size": 0}, "batch_size=0"),
        ([{"prompt": "text"}], {}, "tokenizer"),
        ([{"prompt": [99]}], {}, "no row can be used"),
        ([{"prompt": []}], {}, "not empty"),
        ([], {}, "no row can be used"),
    ],
    ids=str,
)
def test_bad_calls(rows: list, options: dict, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        evaluate(toy_pair(), rows, **options)


def test_rows_of_a_file(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "one", "source": "s"}',
        b"",
        b"{torn",
        b'{"messages": [{"role": "user", "content": "two"}], "domain": "d"}',
        b'{"turns": ["three", "four"], "source": "s"}',
        b"[1]",
        b'{"text": "x"}',
        b'{"prompt": "\xff"}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "assistant", "content": "x"}]}',
        b'{"prompt": " "}',
        b'{"prompt": "x", "source": 3}',
        b'{"turns": ["x", 3]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "five", "source": "s"}',
    ]
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows, bad = read_rows(path)
    assert [(r.line, r.source, r.domain, r.answers) for r in rows] == [
        (1, "s", "", 1),
        (4, "d", "d", 1),
        (5, "s", "", 2),
        (15, "s", "", 1),
    ]
    assert [b.line for b in bad] == [3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert [r.line for r in take_per_source(rows, 2)] == [1, 4, 5]
    path.write_text("nothing")
    with pytest.raises(RequestError, match="no usable row; line 1"):
        read_rows(path)


# The command.


@pytest.fixture(scope="module")
def tiny(fixtures_dir: Path) -> Path:
    return fixtures_dir / "qwen3_tiny"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*(json.dumps(row) for row in ROWS), "{bad", '{"prompt": [1, 999], "source": "a"}']))
    return path


def test_the_command(tiny: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    argv = ["eval", "--target", str(tiny / "target"), "--prompts", str(prompts), "--temperature", "0", "1", "--json"]
    argv += ["--draft", str(tiny / "dspark_vanilla" / "draft"), "--draft", str(tiny / "dflash" / "draft")]
    argv += ["--max-new-tokens", "16", "--batch-size", "2", "--plot", str(picture)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1], parse_constant=lambda name: pytest.fail(name))
    assert [b["line"] for b in report["bad_rows"]] == [6, 7]
    assert "2 rows were left out" in captured.err and "line 6" in captured.err
    vanilla, dflash = report["drafts"]
    assert [r["temperature"] for r in vanilla["results"]] == [0, 1] and vanilla["slots"] == 7
    first = vanilla["results"][0]
    assert first["overall"]["prompts"] == 5 and set(first["sources"]) == {"a", "b"} and set(first["domains"]) == {"x", "y"}
    assert len(first["overall"]["conditional"]["reliability"]["count"]) == 20
    assert len(first["overall"]["conditional_by_position"]) == 7
    assert dflash["results"][0]["overall"]["conditional"] is None  # no confidence head
    difference = report["comparisons"][0]["accepted_length"]["value"]
    expected = dflash["results"][0]["accepted_length"]["value"] - first["accepted_length"]["value"]
    assert difference == pytest.approx(expected)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text in ("mean of sources", "paired by prompt", "conditional", "ECE", "bootstrap by prompt"):
        assert text in captured.out
    pair = models.load_pair(str(tiny / "target"), str(tiny / "dspark_vanilla" / "draft"))
    (out,) = generate(pair, [ROWS[1]["prompt"]], max_new_tokens=16, batch_size=2)
    assert first["prompts"][1]["rounds"] == out.stats.rounds


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--temperature", "0", "0"], "--temperature"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--seed", "-1"], "seed=-1"),
        (["--policy", "ar"], "drafts nothing"),
        (["--policy", "fixed:9"], "length=9"),
        (["--policy", "quick"], "--policy='quick'"),
        (["--per-source", "0"], "--per-source=0"),
        (["--batch-size", "0"], "--batch-size=0"),
        (["--max-new-tokens", "1"], "--max-new-tokens=1"),
        (["--plot", "no/such/place.png"], "--plot"),
        (["--plot", "place.pdf"], ".png"),
        (["--prompts", "missing.jsonl"], "--prompts=missing.jsonl"),
        (["--draft", "/no/such/draft"], "/no/such/draft"),
        (["--target", "/no/such/target"], "/no/such/target"),
        (["--system", "w1"], "tokenizer"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refused_before_anything_is_loaded(
    extra: list[str],
    named: str,
    tiny: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if extra[0] != "--system":  # the tokenizer comes with the model
        monkeypatch.setattr(models, "load_pair", lambda *_: pytest.fail("loaded"))
    else:
        prompts.write_text('{"prompt": "text"}')
    argv = ["eval", "--target", str(tiny / "target"), "--prompts", str(prompts)]
    assert main([*argv, "--draft", str(tiny / "dspark_vanilla" / "draft"), *extra]) == 2
    captured = capsys.readouterr()
    assert named in captured.err.splitlines()[-1] and captured.out == ""


def test_a_draft_of_another_target_is_refused_first(
    tiny: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load_pair", lambda *_: pytest.fail("loaded"))
    other = tmp_path / "draft"
    other.mkdir()
    config = json.loads((tiny / "dspark_vanilla" / "draft" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_target_layers": 99}))
    argv = ["eval", "--target", str(tiny / "target"), "--prompts", str(prompts)]
    assert main([*argv, "--draft", str(tiny / "dflash" / "draft"), "--draft", str(other)]) == 2
    assert "num_target_layers=99" in capsys.readouterr().err
    assert main([*argv, "--draft", str(tiny / "dflash" / "draft"), "--policy", "threshold:0.5"]) == 2
    assert "confidence head" in capsys.readouterr().err
