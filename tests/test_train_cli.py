"""``dspark train`` from rows to a draft: what is supervised, what is skipped and counted, what is refused by name."""

import json
import os
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from toy_text import toy_tokenizer
from toys import target_config

from dspark_jax import load_pair
from dspark_jax.checkpoint.hf import save_target_hf
from dspark_jax.cli import main
from dspark_jax.errors import RequestError
from dspark_jax.params import init_params, target_specs
from dspark_jax.train.rows import BadRow, conversation, encode, load_examples

TEMPLATE = "{% for m in messages %}{{ {'user': 'w34', 'assistant': 'w35'}[m.role] }} {{ m.content }}{% if m.role == 'assistant' %} w1{% endif %} {% endfor %}{% if add_generation_prompt %}w35 {% endif %}"  # noqa: E501 (a template is one line)


def tokenizer():
    out = toy_tokenizer(TEMPLATE)
    out.special_tokens["eos_token"] = "w1"
    return out


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


class TestRows:
    def test_the_answer_and_the_end_of_its_turn_are_supervised(self) -> None:
        ids, mask = encode(tokenizer(), chat("w2 w3", "w4 w5 w6"))
        assert ids.tolist() == [34, 2, 3, 35, 4, 5, 6, 1]
        assert mask.tolist() == [False] * 4 + [True] * 4

    def test_an_answer_cut_by_a_limit_has_no_supervised_end(self) -> None:
        _, mask = encode(tokenizer(), chat("w2", "w4 w5"), complete=False)
        assert mask.tolist() == [False] * 3 + [True, True, False]

    def test_every_turn_counts_and_words_after_the_last_answer_do_not(self) -> None:
        ids, mask = encode(tokenizer(), chat("w2", "w4 w5", "w6", "w7 w8", "w9"))
        assert ids[mask].tolist() == [4, 5, 1, 7, 8, 1]
        assert 9 not in ids.tolist()

    @pytest.mark.parametrize(
        "row, reason",
        [
            ([], "not an object"),
            ({"text": "w1"}, "no conversation"),
            ({"messages": []}, "no conversation"),
            ({"messages": [{"role": "user"}]}, "bad message"),
            ({"messages": chat("w2")}, "no assistant turn"),
            ({"messages": [{"role": "wizard", "content": "w2"}, *chat("w2", "w3")]}, "refused by the template"),
            ({"prompt": "w2", "response": ""}, None),
        ],
    )
    def test_bad_rows_have_a_reason(self, row, reason) -> None:
        if reason is None:
            ids, mask = encode(tokenizer(), conversation(row)[0])
            assert ids[mask].tolist() == [1]  # the end of an empty answer: supervised, but no anchor
            return
        with pytest.raises(BadRow) as error:
            encode(tokenizer(), conversation(row)[0])
        assert error.value.reason == reason

    def test_a_file_is_read_to_its_end_and_its_bad_rows_are_counted(self, tmp_path) -> None:
        """PITFALLS T16."""
        path = tmp_path / "data.jsonl"
        good = json.dumps({"prompt": "w2", "response": "w3 w4 w5"})
        rows = [good, "{torn", json.dumps({"messages": chat("w2")}), "", json.dumps({"prompt": "w2", "response": ""}), good]
        long = json.dumps({"prompt": " ".join(["w2"] * 40), "response": "w3 w4"})
        cut = json.dumps({"prompt": "w2", "response": " ".join(["w3"] * 40)})
        path.write_bytes("\n".join([*rows, long, cut]).encode() + b"\n\xff\xfe\n")
        examples, report = load_examples([path], tokenizer(), 16)
        assert report.used == 3 and report.truncated == 1
        assert [e.line for e in examples] == [1, 6, 8]
        assert dict(report.skipped) == {"not JSON": 2, "no assistant turn": 1, "nothing supervised": 1, "over the limit": 1}
        assert "line 2" in report.first["not JSON"] and "3 conversations" in str(report)

    def test_a_file_without_a_usable_row_is_refused(self, tmp_path) -> None:
        path = tmp_path / "data.jsonl"
        path.write_text("{}\n")
        with pytest.raises(RequestError, match="not one row"):
            load_examples([path], tokenizer(), 16)
        with pytest.raises(RequestError, match="cannot be read"):
            load_examples([tmp_path / "nothing.jsonl"], tokenizer(), 16)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A toy target with a tokenizer, and conversations of it."""
    root = tmp_path_factory.mktemp("train")
    cfg = target_config(eos_token_ids=(1,))
    import jax

    params = jax.jit(lambda: init_params(target_specs(cfg), jax.random.key(0), jnp.float32, 0.25))()
    save_target_hf(root / "target", cfg, params)
    (root / "target" / "tokenizer.json").write_text(tokenizer()._backend.to_str())
    (root / "target" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", "chat_template": TEMPLATE}))
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": "w2 w3", "response": " ".join(f"w{i}" for i in rng.integers(2, 30, rng.integers(6, 14)))} for _ in range(9)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "oops\n")
    return root


def arguments(root, out, *more: str) -> list[str]:
    small = "--mask-id 33 --block-size 4 --layers 1 --markov-rank 4 --steps 4 --anchors 3 --rows 3 --tokens 64 --max-length 24"
    return ["train", "--target", str(root / "target"), "--data", str(root / "data.jsonl"), "--out", str(out),
            *small.split(), "--log-every", "2", "--eval-every", "2", *more]  # fmt: skip


def test_a_run_ends_with_a_draft_that_serves(setting, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    more = ["--held-out", "2", "--draft-vocab", "12", "--cache", str(tmp_path / "cache"), "--json", "--save-every", "2"]
    assert main(arguments(setting, out, *more)) == 0
    shown = capsys.readouterr()
    last = json.loads(shown.out.splitlines()[-1])
    assert last["finished"] and last["step"] == 4 and last["last"]["unseen"]["blocks"] > 0
    assert "1 skipped: not JSON" in shown.err and "feature cache" in shown.err and "GiB" in shown.err
    pair = load_pair(setting / "target", out / "draft")
    assert pair.model.draft.draft_vocab_size == 12 and pair.model.draft.block_size == 4
    from dspark_jax import FixedLength, generate

    (answer,) = generate(pair, ["w2 w3"], max_new_tokens=8, scheduler=FixedLength())
    assert len(answer.token_ids) > 0
    # The same command has nothing left to do; another one is refused, by name.
    assert main(arguments(setting, out, *more)) == 0
    capsys.readouterr()
    assert main(arguments(setting, out, *more, "--lr", "1")) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_killed_at_any_moment_a_run_goes_on_and_ends_with_the_same_draft(setting, tmp_path) -> None:
    """PITFALLS group 6. SIGKILL cannot be caught: what counts is that a step directory appears only when it is whole.

    Would catch a latest pointer written before its arrays, counters outside the checkpoint, batches that depend on the restart.
    """
    steps = ["--steps", "24", "--save-every", "3", "--cache", str(tmp_path / "cache")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "DSPARK_CACHE": str(tmp_path / "programs")}

    def start(out) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dspark_jax", *arguments(setting, out, *steps)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    run = tmp_path / "killed" / "steps"
    seen = []
    for goal in (3, 9, 15):
        process = start(tmp_path / "killed")
        # Killed while a later step is being written (its temporary directory exists), or as soon as ``goal`` is there.
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            names = [p.name for p in run.iterdir()] if run.is_dir() else []
            if any(not n.isdigit() for n in names) and max([int(n) for n in names if n.isdigit()], default=0) >= goal - 3:
                break
            if any(n.isdigit() and int(n) >= goal for n in names):
                break
            time.sleep(0.001)
        process.kill()
        process.wait()
        seen.append(sorted(p.name for p in run.iterdir()))
    assert start(tmp_path / "killed").wait() == 0
    assert any(n.isdigit() for n in seen[-1]) and "24" not in seen[-1], seen  # killed half way, with something to go on from
    ours, theirs = ((tmp_path / n / "draft" / "model.safetensors").read_bytes() for n in ("killed", "whole"))
    assert ours == theirs


def test_training_goes_on_from_a_finished_draft(setting, tmp_path, capsys) -> None:
    assert main(arguments(setting, tmp_path / "a", "--stop-after", "0")) == 0
    assert "stopped at step 1" in capsys.readouterr().err
    assert main(arguments(setting, tmp_path / "b", "--init", str(tmp_path / "a" / "draft"), "--slots", "2")) == 0


@pytest.mark.parametrize(
    "more, message",
    [
        (["--steps", "0"], "--steps=0"),
        (["--mask-id", "37"], "mask_token_id=37"),
        (["--taps", "2"], "cannot be tapped"),
        (["--taps", "1", "0"], "rise strictly"),
        (["--slots", "5"], "slots=5"),
        (["--held-out", "9"], "held_out=9"),
        (["--lr", "-1"], "learning_rate"),
        (["--mesh", "4"], "DATAxMODEL"),
        (["--mesh", "9x9"], "81 devices"),
        (["--draft-vocab", "99"], "draft_vocab_size=99"),
        (["--max-length", "65"], "--max-length=65"),
        (["--ce-weight", "0", "--l1-weight", "0"], "nothing would be trained"),
        (["--layers", "9"], "layers=9"),
        (["--init", "/nowhere"], "/nowhere"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_what_is_refused(setting, tmp_path, capsys, more, message) -> None:
    assert main(arguments(setting, tmp_path / "run", *more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "run" / "steps").exists()


def test_without_a_mask_id_nothing_is_loaded(setting, tmp_path, capsys) -> None:
    command = arguments(setting, tmp_path / "run")
    at = command.index("--mask-id")
    assert main(command[:at] + command[at + 2 :]) == 2
    assert "--mask-id" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(arguments(setting, tmp_path / "file")) == 2
