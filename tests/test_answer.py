"""``dspark answer``: what is written, what a kill leaves behind, and what is refused."""

import dataclasses
import fcntl
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from toy_text import chat_pair

from dspark_jax import answer as module
from dspark_jax.answer import Answers, answer
from dspark_jax.cli import main, options
from dspark_jax.errors import RequestError
from dspark_jax.generate import generate
from dspark_jax.pair import Pair
from dspark_jax.rows import parse_row
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength
from dspark_jax.turns import seed_of

ROWS = [
    {"prompt": "w5 w6", "source": "a", "domain": "x"},
    {"turns": ["w8", "w7 w3"], "source": "b", "domain": "y"},
    {"prompt": "w9 w4 w20", "source": "a", "domain": "x"},
    {
        "messages": [
            {"role": "system", "content": "w2"},
            {"role": "user", "content": "w10"},
            {"role": "assistant", "content": "w11"},
        ]
    },
    {"prompt": "w12"},
]
ONE_SHAPE: dict = dict(max_new_tokens=12, batch_size=2)


@pytest.fixture(scope="module")
def pair() -> Pair:
    whole = chat_pair()
    model = dataclasses.replace(whole.model, draft=None)
    return dataclasses.replace(whole, model=model, params={"target": whole.params["target"]}, draft_name=None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_written(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    calls: list[tuple[int, int]] = []
    done = answer(pair, ROWS, out, seed=3, progress=lambda *x: calls.append(x), **ONE_SHAPE)
    rows = {row["index"]: row for row in lines(out)}
    assert sorted(rows) == [0, 1, 2, 3, 4] and calls[0] == (0, 5) and calls[-1] == (5, 5)
    assert dataclasses.replace(done, tokens=0) == Answers(5, 0, 5, 0, (), (), (), 0)
    assert done.tokens == sum(row["tokens"] for row in rows.values())
    sampling = SamplingParams(0.7, top_k=40, top_p=0.95, seed=seed_of(3, 0, 0))
    (expected,) = generate(pair, [[{"role": "user", "content": "w5 w6"}]], sampling, **ONE_SHAPE)
    assert rows[0] == {
        "index": 0,
        "domain": "x",
        "source": "a",
        "prompt": "w5 w6",
        "response": expected.text,
        "tokens": len(expected.token_ids),
        "finish": expected.finish_reason,
    }
    assert [m["role"] for m in rows[1]["messages"]] == ["user", "assistant", "user", "assistant"]
    sampling = dataclasses.replace(sampling, seed=seed_of(3, 1, 1))
    (second,) = generate(pair, [rows[1]["messages"][:3]], sampling, **ONE_SHAPE)
    assert rows[1]["messages"][3]["content"] == second.text and rows[1]["finish"] == second.finish_reason
    assert [m["role"] for m in rows[3]["messages"]] == ["system", "user", "assistant"]
    assert all(parse_row(row, row["index"]).turns == parse_row(ROWS[i], i).turns for i, row in rows.items())
    assert {row["finish"] for row in rows.values()} <= {"stop", "length"}


def test_every_torn_end_is_repaired_and_the_text_is_the_same(pair: Pair, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    answer(pair, ROWS, whole, **ONE_SHAPE)
    data = whole.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == 10)]
    for size in [0, 1, ends[1] - 1, ends[1], ends[1] + 7, ends[3], len(data) - 1, len(data)]:
        out = tmp_path / f"{size}.jsonl"
        out.write_bytes(data[:size])
        (tmp_path / f"{size}.jsonl.settings.json").write_bytes((tmp_path / "whole.jsonl.settings.json").read_bytes())
        done = answer(pair, ROWS, out, **ONE_SHAPE)
        assert out.read_bytes() == data, size
        kept = sum(end <= size for end in ends[1:])
        assert (done.kept, done.written, done.repaired) == (kept, 5 - kept, size - ends[kept])


def test_a_kill_between_batches_loses_nothing(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, original, calls = tmp_path / "out.jsonl", module.converse, []

    def killed(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "converse", killed)
    with pytest.raises(KeyboardInterrupt):
        answer(pair, ROWS, out, **ONE_SHAPE)
    first = lines(out)
    assert len(first) == 2
    done = answer(pair, ROWS, out, **ONE_SHAPE)
    assert (done.kept, done.written) == (2, 3) and lines(out)[:2] == first
    again = tmp_path / "again.jsonl"
    answer(pair, ROWS, again, **ONE_SHAPE)
    assert again.read_bytes() == out.read_bytes()


def test_more_rows_later(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = [parse_row(row, i) for i, row in enumerate(ROWS)]
    answer(pair, rows[2:4], out, **ONE_SHAPE)
    done = answer(pair, rows, out, **ONE_SHAPE)
    assert (done.kept, done.written) == (2, 3)
    fewer = answer(pair, rows[:1], out, **ONE_SHAPE)
    assert (fewer.rows, fewer.kept, fewer.written) == (1, 1, 0)


def test_what_does_not_belong_is_refused_and_left_alone(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answer(pair, ROWS[:2], out, **ONE_SHAPE)
    data = out.read_bytes()

    def refused(named: str, rows: list = ROWS, **changes) -> None:
        with pytest.raises(RequestError, match=named):
            answer(pair, rows, out, **{**ONE_SHAPE, **changes})
        assert out.read_bytes() == data

    refused("seed=0, not 1", seed=1)
    refused("temperature=0.7, not 0", temperature=0)
    refused("max_new_tokens=12, not 13", max_new_tokens=13)
    refused("answers another prompt than line 1", [{"prompt": "w6"}, *ROWS[1:]])
    refused("answers another prompt than line 2", [ROWS[0], {"turns": ["w8"]}])
    (tmp_path / "out.jsonl.settings.json").unlink()
    refused("settings.json cannot be read")
    data = b'{"prompt": "of somebody else"}\n' + data
    out.write_bytes(data)
    refused("line 1 is not an answer of this command")
    with out.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused("another process")
    with pytest.raises(RequestError, match="cannot be written"):
        answer(pair, ROWS, tmp_path / "no" / "place", **ONE_SHAPE)


def test_greedy_with_a_draft_is_greedy_without(pair: Pair, tmp_path: Path) -> None:
    plain, fast = tmp_path / "plain.jsonl", tmp_path / "fast.jsonl"
    answer(pair, ROWS, plain, temperature=0.0, **ONE_SHAPE)
    answer(chat_pair(), ROWS, fast, temperature=0.0, **ONE_SHAPE)
    assert plain.read_bytes() == fast.read_bytes()
    used = [json.loads((tmp_path / f"{n}.jsonl.settings.json").read_text()) for n in ("plain", "fast")]
    assert [u["policy"] for u in used] == [repr(Autoregressive()), repr(FixedLength())]
    assert [u["draft"] for u in used] == [None, "toy draft"]


def test_bad_rows_and_failures_are_counted(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = [ROWS[0], {"prompt": "w5 " * 600}, {"turns": ["w5 w6", "w7 " * 600]}]
    done = answer(pair, rows, out, **ONE_SHAPE)
    assert [b.line for b in done.bad] == [2] and "512" in done.bad[0].why
    assert [c.line for c in done.cut] == [3] and done.written == 2
    assert [m["role"] for m in lines(out)[1]["messages"]] == ["user", "assistant"]
    assert answer(pair, rows, out, **ONE_SHAPE).kept == 2
    broken = dataclasses.replace(pair, params={"target": {**pair.params["target"], "norm": jnp.full(24, np.nan)}})
    assert "norm" in pair.params["target"]
    failed = answer(broken, ROWS[:2], tmp_path / "nan.jsonl", **ONE_SHAPE)
    assert [b.line for b in failed.failed] == [1, 2] and failed.written == 0 and lines(tmp_path / "nan.jsonl") == []


def test_a_full_disk_is_told(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(RequestError, match="No space left"):
        answer(pair, ROWS[:1], tmp_path / "out.jsonl", **ONE_SHAPE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"seed": -1}, "seed=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"policy": FixedLength()}, "needs a draft"),
        ({"raw": True, "system": "w1"}, "--system"),
    ],
    ids=str,
)
def test_bad_calls(changes: dict, named: str, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=named):
        answer(pair, ROWS[:1], tmp_path / "out.jsonl", **changes)
    assert not (tmp_path / "out.jsonl").exists()


# The command.


def test_the_command(fixtures_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = fixtures_dir / "qwen3_tiny"
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": [5, 9], "source": "a"}\n{torn\n{"prompt": [5, 9, 7], "source": "a"}\n{"prompt": [8]}\n')
    argv = ["answer", "--target", str(root / "target"), "--prompts", str(prompts), "--out", str(out)]
    argv += ["--max-new-tokens", "8", "--batch-size", "2", "--json"]
    assert main([*argv, "--per-source", "1"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert (report["rows"], report["written"], report["kept"]) == (2, 2, 0)
    assert report["bad_rows"][0]["line"] == 2 and "1 row was left out" in captured.err
    assert [row["index"] for row in lines(out)] == [0, 3] or [row["index"] for row in lines(out)] == [3, 0]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "1 rows added" in captured.out and "2 were there" in captured.out
    assert all(len(row["response"]) == row["tokens"] == 8 for row in lines(out))
    assert main([*argv, "--seed", "4"]) == 2
    assert "seed=0, not 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--prompts", "missing.jsonl"], "--prompts=missing.jsonl"),
        (["--out", "no/such/place.jsonl"], "--out"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-k", "-1"], "top_k=-1"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0"),
        (["--limit", "0"], "--limit=0"),
        (["--policy", "fixed"], "needs --draft"),
        (["--draft", "/no/such/draft"], "/no/such/draft"),
        (["--target", "/no/such/target"], "/no/such/target"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refused_before_anything_is_loaded(
    extra: list[str],
    named: str,
    fixtures_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(options, "load", lambda *_: pytest.fail("loaded"))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": [5, 9]}')
    argv = ["answer", "--target", str(fixtures_dir / "qwen3_tiny" / "target"), "--prompts", str(prompts), "--out", str(out)]
    assert main([*argv, *extra]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()
    assert main([*argv[:-1], str(prompts)]) == 2
    assert "is the prompt file" in capsys.readouterr().err
