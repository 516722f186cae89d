"""Reading checkpoints: every tensor lands where its name says, bit for bit, and every damaged input fails by name."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.deepspec import check_pair, load_draft, read_draft_config, save_draft
from dspark_jax.checkpoint.hf import load_target_hf, read_target_config, save_target_hf
from dspark_jax.checkpoint.safetensor_files import open_directory, write_directory
from dspark_jax.checkpoint.tensors import canonical, named_tensors
from dspark_jax.errors import CheckpointError, ConfigError, DsparkError, PairError
from dspark_jax.params import draft_specs, target_specs

EMBED, HEAD, Q0 = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"
DRAFTS = ("dflash", "dspark_vanilla", "dspark_gated", "dspark_rnn")


@pytest.fixture
def root(fixtures_dir):
    return fixtures_dir / "qwen3_tiny"


@pytest.fixture
def target(root):
    return load_target_hf(root / "target", "float32")


@pytest.fixture
def edit(tmp_path, root):
    """A copy of a checkpoint directory after ``change(tensors)`` and with other config keys."""

    def make(source, change=None, **config):
        out = tmp_path / "edited"
        shutil.copytree(root / source, out)
        if change is not None:
            tensors = dict(load_file(out / "model.safetensors"))
            change(tensors)
            save_file(tensors, out / "model.safetensors")
        if config:
            path = out / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return out

    return make


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_target_tensor_lands_in_its_place(root, target):
    config, params = target
    stored = load_file(root / "target" / "model.safetensors")
    named = dict(named_tensors(target_specs(config), params))
    assert named.keys() == stored.keys()
    assert all(same_bits(named[name], stored[name]) for name in stored)
    assert same_bits(params["layers"]["q"][3], stored["model.layers.3.self_attn.q_proj.weight"])


@pytest.mark.parametrize("name", DRAFTS)
def test_every_draft_tensor_lands_in_its_place(root, target, name):
    stored = load_file(root / name / "draft" / "model.safetensors")
    config, params = load_draft(root / name / "draft", "float32", *target)
    named = dict(named_tensors(draft_specs(config), params))
    assert named.keys() | {"embed_tokens.weight", HEAD} == stored.keys()
    assert all(same_bits(named[n], stored[n]) for n in named)


def test_shards_are_read_like_one_file(tmp_path, target):
    config, params = target
    save_target_hf(tmp_path / "out", config, params, max_shard_bytes=100_000)
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    again, loaded = load_target_hf(tmp_path / "out")
    assert again == config
    assert jax.tree.all(jax.tree.map(same_bits, loaded, params))


def test_bfloat16_is_read_without_rounding(tmp_path):
    bits = np.arange(0x10000, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80].reshape(2, -1)  # every finite value
    write_directory(tmp_path, [("x", bits.view(ml_dtypes.bfloat16))], 10**9)
    (tensor,) = open_directory(tmp_path)
    assert tensor.read().dtype == ml_dtypes.bfloat16
    assert same_bits(tensor.read().view(np.uint16), bits)


def test_files_can_be_read_by_the_safetensors_library(tmp_path, target):
    config, params = target
    save_target_hf(tmp_path / "out", config, params)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bits(stored[n], x) for n, x in named_tensors(target_specs(config), params))


def test_dtype_none_keeps_and_bfloat16_rounds_to_nearest_even(edit, root):
    def to_half(tensors):
        for name, x in tensors.items():
            tensors[name] = x.astype(np.float16)

    assert load_target_hf(root / "target")[1]["embed"].dtype == np.float32
    rounded = load_target_hf(root / "target", "bfloat16")[1]["embed"]
    exact = load_target_hf(root / "target")[1]["embed"]
    assert same_bits(rounded, np.asarray(exact).astype(ml_dtypes.bfloat16))
    assert load_target_hf(edit("target", to_half))[1]["layers"]["q"].dtype == np.float16


def test_names_with_and_without_prefix_and_both_confidence_forms(edit, target):
    def rename(tensors):
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)
        for part in ("weight", "bias"):
            tensors[f"confidence_head.{part}"] = tensors.pop(f"model.confidence_head.proj.{part}")

    config, params = load_draft(edit("dspark_rnn/draft", rename), "float32", *target)
    assert float(abs(params["confidence"]["proj"]).sum()) > 0
    assert canonical("model.norm.weight") == canonical("norm.weight")
    assert params["confidence"]["proj"].shape == (1, config.hidden_size + config.markov_rank)


def test_missing_confidence_bias_is_zero_but_a_missing_head_is_an_error(edit, target):
    path = edit("dspark_vanilla/draft", lambda t: t.pop("confidence_head.proj.bias"))
    _, params = load_draft(path, "float32", *target)
    assert float(params["confidence"]["bias"][0]) == 0.0
    save_file(
        {k: v for k, v in load_file(path / "model.safetensors").items() if "confidence" not in k}, path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.weight of shape \[1, 72\] is missing"):
        load_draft(path, "float32", *target)


def _set(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


BAD_TENSORS = {
    "missing": (lambda t: t.pop(Q0), [Q0, r"\[64, 64\]", "missing"]),
    "renamed": (lambda t: t.__setitem__("model.midlayer.q", t.pop(Q0)), [Q0, "unknown tensor model.midlayer.q"]),
    "layer too many": (_set("model.layers.4.mlp.up_proj.weight", np.zeros((128, 64), np.float32)), ["unknown"]),
    "fused": (_set("model.layers.0.self_attn.qkv_proj.weight", np.zeros((128, 64), np.float32)), ["unknown"]),
    "no lm_head": (lambda t: t.pop(HEAD), [HEAD, "missing"]),
    "twice": (lambda t: t.__setitem__("norm.weight", t["model.norm.weight"]), ["norm.weight", "twice"]),
    "shape": (_set(Q0, np.zeros((64, 32), np.float32)), [Q0, r"\[64, 32\]", r"expected \[64, 64\]", "model.safetensors"]),
    "transposed": (lambda t: t.__setitem__("model.layers.1.mlp.down_proj.weight",
                                           np.ascontiguousarray(t["model.layers.1.mlp.down_proj.weight"].T)),
                   [r"\[128, 64\]", r"expected \[64, 128\]"]),
    "integers": (_set(Q0, np.zeros((64, 64), np.int8)), [Q0, "I8", "supported"]),
    "float64": (_set(Q0, np.zeros((64, 64), np.float64)), [Q0, "F64", "supported"]),
    "nan": (lambda t: t[Q0].__setitem__((3, 3), np.nan), [Q0, "not finite"]),
    "infinite": (lambda t: t[EMBED].__setitem__((3, 3), -np.inf), ["embed_tokens", "not finite"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_fail_by_name(edit, case):
    change, words = BAD_TENSORS[case]
    path = edit("target", change)
    with pytest.raises(CheckpointError) as caught:
        load_target_hf(path, "float32")
    for word in words:
        assert caught.match(word)
    assert caught.match(str(path))


def test_nan_in_bfloat16_is_found(edit):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        tensors[Q0][1, 1] = np.nan

    with pytest.raises(CheckpointError, match="not finite"):
        load_target_hf(edit("target", change))


def test_headers_are_checked_before_data_is_read(edit, monkeypatch):
    path = edit("target", lambda t: t.pop("model.norm.weight"))
    monkeypatch.setattr("dspark_jax.checkpoint.tensors.aligned_empty", lambda *_: pytest.fail("memory was spent"))
    monkeypatch.setattr("dspark_jax.checkpoint.safetensor_files.aligned_empty", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_target_hf(path, "float32")


def test_rotary_buffers_are_ignored(edit):
    load_target_hf(edit("target", _set("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(8, np.float32))))


def test_tied_lm_head_may_only_be_a_copy(edit):
    path = edit("target", lambda t: t.__setitem__(HEAD, t[EMBED].copy()), tie_word_embeddings=True)
    _, params = load_target_hf(path)
    assert "head" not in params
    tensors = load_file(path / "model.safetensors")
    tensors[HEAD][0, 0] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_target_hf(path)


def test_missing_and_damaged_files(edit):
    path = edit("target")
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            load_target_hf(path)
    weights.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        load_target_hf(path)
    weights.write_bytes(whole[:8] + b"\xff" * 20 + whole[28:])
    with pytest.raises(CheckpointError, match="header is damaged"):
        load_target_hf(path)
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    twice = header.replace(b'"model.norm.weight"', b'"lm_head.weight"   ')
    weights.write_bytes(whole[:8] + twice + whole[8 + len(header) :])
    with pytest.raises(CheckpointError, match="appears twice"):
        load_target_hf(path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_target_hf(path)
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle file"):
        load_target_hf(path)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_target_hf(path)


def test_index_and_shards_must_agree(tmp_path, target):
    save_target_hf(tmp_path / "out", *target, max_shard_bytes=250_000)
    path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))

    def fails(match, **weight_map):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | weight_map}))
        with pytest.raises(CheckpointError, match=match):
            load_target_hf(tmp_path / "out")

    fails("lacks model.extra.weight", **{"model.extra.weight": shards[0]})
    fails("gone.safetensors, which does not exist", **{EMBED: "gone.safetensors"})
    fails("must be the name of a file", **{EMBED: "../model.safetensors"})
    other = next(s for s in shards if s != index["weight_map"][EMBED])
    fails("is not listed", **{EMBED: other})
    first = tmp_path / "out" / shards[0]
    tensors = load_file(first)
    save_file({**tensors, "model.norm.weight": np.zeros(64, np.float32)}, first)
    fails(r"model\.norm\.weight")
    first.unlink()
    fails("does not exist")


def test_generation_config_wins(edit):
    path = edit("target", eos_token_id=[0, 7])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_target_config(path).eos_token_ids == (9, 7, 0)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 320}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id=320"):
        read_target_config(path)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(vocab_size=321), ["vocab_size=321", "vocab_size=320"]),
        (dict(num_target_layers=5), ["num_target_layers=5", "4 layers"]),
        (dict(hidden_size=32), ["hidden_size=32", "hidden_size=64"]),
        (dict(target_layer_ids=[0, 1]), ["192 features", "2 target layers of width 64 give 128"]),
    ],
)
def test_a_draft_of_another_target_names_both_values(edit, target, change, words):
    path = edit("dspark_vanilla/draft", **change)
    with pytest.raises(PairError) as caught:
        load_draft(path, "float32", *target)
    assert all(word in str(caught.value) for word in words)


def test_mask_id_of_another_target(root, target):
    import dataclasses

    draft = read_draft_config(root / "dflash" / "draft")
    with pytest.raises(PairError, match=r"x: the draft has vocab_size=320, the target vocab_size=300"):
        check_pair(draft, dataclasses.replace(target[0], vocab_size=300), "x")
    with pytest.raises(PairError, match="mask_token_id=320"):
        check_pair(dataclasses.replace(draft, mask_token_id=320), target[0], "x")


@pytest.mark.parametrize("name", ["embed_tokens.weight", HEAD])
def test_copies_of_target_tensors_are_compared(edit, target, name):
    path = edit("dspark_vanilla/draft", lambda t: t[name].__setitem__((5, 5), t[name][5, 5] + 0.5))
    with pytest.raises(PairError, match=f"{name} differs from the target's own in 1 of 20480 values"):
        load_draft(path, "float32", *target)


def test_copies_are_compared_after_rounding(tmp_path, root, target):
    config, params = load_draft(root / "dspark_gated" / "draft", "float32", *target)
    embed, head = target[1]["embed"], target[1]["head"]
    save_draft(tmp_path / "bf16", config, params, (embed, head), "bfloat16")
    again, loaded = load_draft(tmp_path / "bf16", None, *target)
    assert again == config
    assert loaded["fc"].dtype == ml_dtypes.bfloat16
    low = load_target_hf(root / "target", "bfloat16")
    load_draft(root / "dspark_gated" / "draft", "bfloat16", *low)  # float32 copies, a target loaded in bfloat16
    with pytest.raises(CheckpointError, match="must be compared"):
        load_draft(tmp_path / "bf16", None, None, None)


def test_destinations_are_not_overwritten_by_accident(tmp_path, target):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        save_target_hf(out, *target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    save_target_hf(out, *target, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_failed_write_leaves_nothing(tmp_path, target):
    config, params = target
    with pytest.raises(DsparkError, match="missing \\['norm'\\]"):
        save_target_hf(tmp_path / "out", config, {k: v for k, v in params.items() if k != "norm"})
    assert list(tmp_path.iterdir()) == []


def test_illegal_dtypes(root):
    for dtype in ("int8", "float64", np.int32):
        with pytest.raises(CheckpointError, match="is not legal; legal: float32, bfloat16, float16"):
            load_target_hf(root / "target", dtype)
