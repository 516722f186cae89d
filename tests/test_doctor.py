"""``dspark doctor`` on a good pair and on copies of it that were broken on purpose: a sentence each, never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.cli import main
from dspark_jax.doctor import _satisfies, check_pair

Tensors = dict[str, np.ndarray]
LATER = ("draft tensors", "shared embeddings", "heads", "proposal", "greedy parity")


@pytest.fixture
def pair(fixtures_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the tiny pair."""
    for name in ("target", "dspark_vanilla/draft"):
        shutil.copytree(fixtures_dir / "qwen3_tiny" / name, tmp_path / Path(name).name)
    return tmp_path / "target", tmp_path / "draft"


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: np.array(x) for name, x in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def examine(pair: tuple[Path, Path]) -> dict[str, tuple[str, str]]:
    return {c.name: (c.status, c.detail) for c in check_pair(str(pair[0]), str(pair[1]), "float32")}


def fails(found: dict[str, tuple[str, str]], name: str, *words: str) -> None:
    """Exactly ``name`` failed, and its sentence holds ``words``."""
    assert [n for n, (status, _) in found.items() if status == "fail"] == [name]
    for word in words:
        assert word in found[name][1]


def test_a_good_pair(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["doctor", "--target", str(pair[0]), "--draft", str(pair[1]), "--json"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    found = {c["name"]: c for c in report["checks"]}
    assert report["ok"] is True
    assert found["tokenizer"]["status"] == "warn" and found["tokenizer"]["advice"]
    assert found["chat template"]["status"] == "skipped"
    assert {n for n, c in found.items() if c["status"] == "ok"} >= {
        "python",
        "packages",
        "devices",
        "target",
        "mask id",
        *LATER,
    }
    assert "equal" in found["shared embeddings"]["detail"]
    assert "fail " not in out and "16 checks: 0 failed" in out


def test_the_installation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "jax 0." in out and "target" not in out
    assert main(["doctor", "--draft", "x"]) == 2
    assert "--draft=x needs --target" in capsys.readouterr().err


def test_borrowed_embeddings(pair: tuple[Path, Path]) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    edit_tensors(pair[1], drop)
    status, detail = examine(pair)["shared embeddings"]
    assert status == "ok" and "borrowed" in detail


def test_a_reduced_draft_vocabulary(pair: tuple[Path, Path]) -> None:
    """Its log q is -inf outside the kept ids by design; that is not damage."""

    def reduce(tensors: Tensors) -> None:
        tensors["d2t"] = np.arange(160, dtype=np.int64)  # every second of 320 ids
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][::2]
        del tensors["lm_head.weight"]

    edit_tensors(pair[1], reduce)
    edit_config(pair[1], draft_vocab_size=160)
    found = examine(pair)
    assert {name: found[name][0] for name in LATER} == dict.fromkeys(LATER, "ok"), found


def test_missing_target(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = examine((pair[0] / "nowhere", pair[1]))
    fails(found, "target", "nowhere")
    assert {status for name, (status, _) in found.items() if name != "target"} == {"skipped"}
    assert main(["doctor", "--target", str(pair[0] / "nowhere"), "--draft", str(pair[1])]) == 1
    captured = capsys.readouterr()
    assert "fail    target" in captured.out and "->" in captured.out and "Traceback" not in captured.err


def test_missing_draft(pair: tuple[Path, Path]) -> None:
    found = examine((pair[0], pair[1] / "nowhere"))
    fails(found, "draft settings", "nowhere")
    assert all(found[name][0] == "skipped" for name in LATER)
    assert found["target decodes"][0] == "ok"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": 320}, ("mask_token_id=320",)),
        ({"target_layer_ids": [0, 1, 3]}, ("target_layer_ids",)),
        ({"num_target_layers": 5}, ("num_target_layers=5",)),
        ({"vocab_size": 400}, ("vocab_size=400", "320")),
        ({"markov_head_type": "magic"}, ("markov_head_type='magic'",)),
        ({"block_size": 0}, ("block_size=0",)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_settings(changes: dict, words: tuple[str, ...], pair: tuple[Path, Path]) -> None:
    edit_config(pair[1], **changes)
    found = examine(pair)
    fails(found, "draft settings", *words)
    assert all(found[name][0] == "skipped" for name in LATER)


def test_missing_tensor(pair: tuple[Path, Path]) -> None:
    edit_tensors(pair[1], lambda tensors: tensors.pop("fc.weight"))
    fails(examine(pair), "draft tensors", "fc.weight")


def test_truncated_file(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    fails(examine(pair), "draft tensors", "model.safetensors")


def test_draft_of_another_target(pair: tuple[Path, Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"][3] += 1

    edit_tensors(pair[1], change)
    fails(examine(pair), "draft tensors", "embed_tokens.weight", "another target")


def test_heads_left_at_zero(pair: tuple[Path, Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["markov_head.markov_w2.weight"][:] = 0

    edit_tensors(pair[1], change)
    found = examine(pair)
    fails(found, "heads", "markov.w2", "zeros")
    assert found["greedy parity"][0] in ("ok", "warn")


def test_norms_left_at_one(pair: tuple[Path, Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["norm.weight"][:] = 1
        tensors["hidden_norm.weight"][:] = 1

    edit_tensors(pair[1], change)
    assert examine(pair)["heads"][0] == "warn"


def test_huge_values_do_not_propose(pair: tuple[Path, Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["fc.weight"][:] = 3e38
        tensors["norm.weight"][:] = 3e38

    edit_tensors(pair[1], change)
    found = examine(pair)
    fails(found, "proposal", "not finite")
    assert found["greedy parity"][0] == "skipped"


def test_target_that_overflows(pair: tuple[Path, Path]) -> None:
    edit_tensors(pair[0], lambda tensors: tensors.update({"model.norm.weight": np.full(64, 3e38, np.float32)}))
    found = examine(pair)
    fails(found, "target decodes", "not finite")
    assert found["proposal"][0] == found["greedy parity"][0] == "skipped"
    assert found["draft tensors"][0] == "ok"


def test_a_broken_tokenizer(pair: tuple[Path, Path]) -> None:
    (pair[0] / "tokenizer.json").write_text("{}")
    found = examine(pair)
    fails(found, "tokenizer", "tokenizer.json")
    assert found["chat template"][0] == "skipped" and found["greedy parity"][0] == "ok"


def test_version_ranges() -> None:
    assert _satisfies("0.10.2", "<0.12,>=0.10") and not _satisfies("0.12.0", "<0.12,>=0.10")
    assert not _satisfies("0.9.9", ">=0.10") and _satisfies("3.1.6", "")
