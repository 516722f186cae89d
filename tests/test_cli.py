"""The command line: its answers, its JSON, and what it says about wrong input."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax.checkpoint.source import read_draft_config, resolve_draft
from dspark_jax.cli import COMMANDS, main, options
from dspark_jax.cli.output import strict
from dspark_jax.errors import RequestError
from dspark_jax.generate import generate
from dspark_jax.schedule import Autoregressive, FixedLength, Threshold

IDS = "5,9,23,40,7"


@pytest.fixture(scope="module")
def tiny(fixtures_dir: Path) -> list[str]:
    root = fixtures_dir / "qwen3_tiny"
    return ["--target", str(root / "target"), "--draft", str(root / "dspark_vanilla" / "draft")]


def last_json(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text.rstrip("\n").rsplit("\n", 1)[-1], parse_constant=refuse)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The line on stderr of a call that must end with exit code 2 and print nothing else."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return lines[-1]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*([command] if command else []), "--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS if command is None else ["options"]:
        assert name in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"dspark-jax {dspark_jax.__version__}"


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from dspark_jax.cli import main; main(['--help']);"
        "sys.exit(', '.join(m for m in sys.modules if m.startswith('dspark_jax.cli.')) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dspark_jax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("dspark-jax ")


@pytest.mark.parametrize("policy", ["ar", "fixed", "fixed:3", "threshold:0.5", "survival:0.3"])
def test_generate_json_equals_the_library(policy: str, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "24", "--policy", policy, "--json"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    report = last_json(captured.out)
    (result,) = report["results"]
    pair = dspark_jax.load_pair(tiny[1], tiny[3])
    (expected,) = generate(pair, [[int(i) for i in IDS.split(",")]], scheduler=options.parse_policy(policy), max_new_tokens=24)
    assert result["token_ids"] == expected.token_ids
    assert result["accepted_per_round"] == expected.accepted_per_round
    assert result["verified_per_round"] == expected.verified_per_round
    assert result["finish_reason"] == expected.finish_reason
    assert result["rounds"] == len(result["accepted_per_round"]) == expected.stats.rounds
    assert report["tokens_per_second"] > 0 and report["load_seconds"] > 0 and report["first_token_seconds"] > 0
    assert report["platform"] == "cpu" and report["jax"] and report["dtype"] == "float32"
    assert "tokens/s" in captured.err and "rounds" in captured.err


def test_generate_streams_the_same_tokens(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "24", "--json"]
    assert main([*argv, "--stream"]) == 0
    streamed = capsys.readouterr().out
    assert main([*argv, "--no-stream"]) == 0
    at_once = capsys.readouterr().out
    ids = last_json(at_once)["results"][0]["token_ids"]
    assert last_json(streamed)["results"][0]["token_ids"] == ids
    assert [int(i) for i in streamed.splitlines()[0].split()] == ids
    assert [int(i) for i in at_once.splitlines()[0].split()] == ids


def test_generate_from_a_file_with_seeds(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": [5, 9, 23, n], "domain": "x"}) + "\n" for n in (1, 2, 3)))
    argv = ["generate", *tiny, "--prompts", str(path), "--max-new-tokens", "8", "--temperature", "1", "--seed", "7", "--json"]
    argv += ["--policy", "ar"]
    results = []
    for extra in ([], ["--batch-size", "2"]):
        assert main([*argv, *extra]) == 0
        out = capsys.readouterr().out
        assert "--- prompt 3" in out
        results.append([r["token_ids"] for r in last_json(out)["results"]])
    assert results[0] == results[1]


def test_generate_without_new_tokens_is_strict_json(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "0", "--json"]) == 0
    report = last_json(capsys.readouterr().out)
    assert report["results"][0]["token_ids"] == [] and report["results"][0]["accepted_length"] is None
    assert report["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids='1,x'"),
        (["--prompt-ids", "1,320"], "320"),
        (["--prompt", "text"], "tokenizer.json"),
        (["--prompts", "missing.jsonl"], "--prompts=missing.jsonl"),
        (["--prompt-ids", IDS, "--policy", "fast"], "--policy='fast'"),
        (["--prompt-ids", IDS, "--policy", "fixed:x"], "--policy='fixed:x'"),
        (["--prompt-ids", IDS, "--policy", "fixed:8"], "length=8"),
        (["--prompt-ids", IDS, "--policy", "threshold:2"], "--policy='threshold:2'"),
        (["--prompt-ids", IDS, "--max-new-tokens", "-1"], "max_new_tokens=-1"),
        (["--prompt-ids", IDS, "--batch-size", "0"], "batch_size=0"),
        (["--prompt-ids", IDS, "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt-ids", IDS, "--top-k", "5"], "top_k=5"),
        (["--prompt-ids", IDS, "--temperature", "1", "--top-p", "0"], "top_p=0.0"),
        (["--prompt-ids", IDS, "--seed", "-3"], "seed=-3"),
        (["--prompt-ids", IDS, "--dtype", "int8"], "--dtype"),
        (["--prompt-ids", IDS, "--system", "be brief"], "--system='be brief'"),
        (["--prompt-ids", IDS, "--prompt", "both"], "--prompt"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_of_generate(extra: list[str], named: str, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert named in refused(capsys, ["generate", *tiny, *extra])


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize(
    ("draft", "policy", "named"),
    [
        ("dspark_vanilla/draft", "fixed:99", "--policy='fixed:99': FixedLength: length=99 exceeds the draft's block_size=7"),
        ("dflash/draft", "threshold:0.5", "--policy='threshold:0.5': scheduler=Threshold needs a confidence head"),
        (None, "fixed", "--policy='fixed' needs --draft"),
        (None, "survival:0.5", "--policy='survival:0.5' needs --draft"),
        ("target", "fixed", "holds a target, not a draft"),
        ("nothing", "ar", "nothing does not exist"),
    ],
)
def test_policies_are_refused_before_models_are_loaded(
    command: str,
    draft: str | None,
    policy: str,
    named: str,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(options, "load", lambda *_: pytest.fail("a model was loaded"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}\n')
    argv = [command, *tiny[:2], "--prompts", str(path), "--policy", policy]
    argv += ["--draft", str(Path(tiny[1]).parent / draft)] if draft else []
    assert named in refused(capsys, argv)


@pytest.mark.parametrize(
    ("arguments", "text", "named"),
    [
        (["--prompt", ""], None, "--prompt='' is empty"),
        (["--prompt", " \n"], None, "--prompt=' \\n' is empty"),
        (["--prompt", "", "--raw"], None, "--prompt='' is empty"),
        (["--prompts", "FILE"], '{"prompt": [1]}\n{"prompt": ""}\n', "line 2: prompt='' is empty"),
    ],
)
def test_an_empty_prompt_is_refused_although_a_template_would_wrap_it(
    arguments: list[str],
    text: str | None,
    named: str,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(options, "load", lambda *_: pytest.fail("a model was loaded"))
    path = tmp_path / "prompts.jsonl"
    path.write_text(text or "")
    arguments = [str(path) if a == "FILE" else a for a in arguments]
    assert named in refused(capsys, ["generate", *tiny, *arguments])


def test_spaces_are_a_prompt_where_no_template_wraps_them(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "tokenizer.json" in refused(capsys, ["generate", *tiny, "--prompt", " ", "--raw"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no prompt"),
        ("{\n", "line 1 is not valid JSON"),
        ('{"prompt": [1]}\n[1, 2]\n', "line 2"),
        ('{"text": "x"}\n', "'prompt'"),
        ('{"prompt": 3}\n', "'prompt'"),
        ('{"prompt": []}\n', "prompts[0] is empty"),
    ],
)
def test_bad_prompt_files(text: str, named: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert named in refused(capsys, ["generate", *tiny, "--prompts", str(path)])


def test_missing_models_are_named(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such/model" in refused(capsys, ["generate", "--target", "/no/such/model", "--prompt-ids", IDS])
    assert "/no/draft" in refused(capsys, ["generate", *tiny[:2], "--draft", "/no/draft", "--prompt-ids", IDS])
    assert "holds a draft" in refused(capsys, ["generate", "--target", tiny[3], "--prompt-ids", IDS])
    assert "COMMAND" in refused(capsys, [])
    assert "fly" in refused(capsys, ["fly"])


def test_stdin(tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert "stdin is empty" in refused(capsys, ["generate", *tiny])
    monkeypatch.setattr(sys, "stdin", io.StringIO("a question\n"))
    assert "tokenizer.json" in refused(capsys, ["generate", *tiny])


def test_interruption(tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "load", interrupt)
    assert main(["generate", *tiny, "--prompt-ids", IDS]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "dspark: interrupted"


def test_out_of_memory(tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    monkeypatch.setattr(options, "load", fail)
    assert main(["generate", *tiny, "--prompt-ids", IDS]) == 1
    assert "out of memory: RESOURCE_EXHAUSTED" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_closed_pipe_is_quiet(tiny: list[str]) -> None:
    argv = [sys.executable, "-m", "dspark_jax", "generate", *tiny[:2], "--prompt-ids", IDS, "--policy", "ar", "--stream"]
    process = subprocess.Popen(
        [*argv, "--max-new-tokens", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"]},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert "Traceback" not in errors and "Exception" not in errors


def test_convert_is_reachable(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", tiny[1], str(tmp_path / "own"), "--dry-run"]) == 0
    assert "model.embed_tokens.weight" in capsys.readouterr().out
    assert not (tmp_path / "own").exists()


def test_convert_names_its_flags(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    line = refused(capsys, ["convert", tiny[3], str(tmp_path / "full")])
    assert "is not empty" in line and line.endswith("pass --overwrite") and "overwrite=True" not in line
    line = refused(capsys, ["convert", tiny[3], str(tmp_path / "new"), "--form", "deepspec", "--include-shared"])
    assert "--include-shared needs --target" in line and "include_shared" not in line


def test_the_shipped_draft_is_the_default_of_its_target_alone() -> None:
    """A directory of another target must never get SmolLM2's draft, and None must mean none."""
    shipped = resolve_draft("default", "smollm2")
    assert shipped is not None and read_draft_config(shipped).draft_vocab_size == 8192
    assert resolve_draft("smollm2", "some/dir") == shipped
    assert resolve_draft("default", "some/smollm2") is None
    assert resolve_draft(None, "smollm2") is None
    assert resolve_draft("dir", "smollm2") == Path("dir")
    size = sum(f.stat().st_size for f in shipped.iterdir())
    assert size <= 32 * 2**20  # what the repository may carry


def test_demo_without_a_draft_runs_the_target_alone(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *tiny[:2], "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "No draft" in out and "plain" in out and "speculative" not in out.replace("speculatively", "")


def test_demo_compares(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *tiny, "--max-new-tokens", "8", "--json"]) == 0
    out = capsys.readouterr().out
    report = last_json(out)
    assert "identical to the plain ones" in out
    assert ("does not pay" in out) == (
        max(s["ratio_of_totals"] for s in report["policies"].values() if s["policy"] != "ar") <= 1
    )
    assert {run["domain"] for run in report["runs"]} == {"math", "code", "chat"}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("ar", Autoregressive()),
        ("fixed", FixedLength()),
        ("fixed:3", FixedLength(3)),
        ("threshold:0.25", Threshold(0.25)),
        ("survival:0.5", Threshold(0.5, cumulative=True)),
    ],
)
def test_policies(text: str, policy: object) -> None:
    assert options.parse_policy(text) == policy


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_a_fixed_length_may_be_any_integer(kind: type) -> None:
    policy = FixedLength(kind(4))
    assert policy == FixedLength(4) and hash(policy) == hash(FixedLength(4))
    assert type(policy.slots(7)) is int and policy.token_sizes(100, policy.slots(7))[-1] == 500
    for wrong in (True, np.True_, 2.0, "2", kind(0)):
        with pytest.raises(RequestError, match="length="):
            FixedLength(wrong)


def test_strict_replaces_what_json_lacks() -> None:
    assert strict({"a": (float("nan"), 1.5, [float("inf")]), "b": None}) == {"a": [None, 1.5, [None]], "b": None}


def test_the_compilation_cache_of_jax_wins() -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    assert before  # the tests have their own
    args = argparse.Namespace(no_compilation_cache=False)
    assert options.use_compilation_cache(args) == Path(before)
    assert jax.config.values["jax_compilation_cache_dir"] == before
