"""Own form: bit-equal, on any number of devices, and damaged directories fail by name. Conversion between the forms."""

import argparse
import json
import shutil
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint import cli
from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.hf import load_target_hf
from dspark_jax.checkpoint.orbax import load_own, save_own
from dspark_jax.checkpoint.source import load_draft, load_target
from dspark_jax.errors import CheckpointError, ConfigError, PairError

DRAFTS = ("dflash", "dspark_vanilla", "dspark_gated", "dspark_rnn")


@pytest.fixture
def root(fixtures_dir):
    return fixtures_dir / "qwen3_tiny"


@pytest.fixture
def own(tmp_path, root):
    config, params = load_target_hf(root / "target")
    save_own(tmp_path / "own", config, params, root / "target")
    return tmp_path / "own"


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_trees(a, b):
    return jax.tree.all(jax.tree.map(same_bits, a, b))


def same_files(a, b):
    a, b = (load_file(p / "model.safetensors") for p in (a, b))
    return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)


def rows_over(count):
    """Every matrix of the target split over ``count`` devices by its second-last axis, vectors replicated."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))

    def one(leaf):
        spec = PartitionSpec(*[None] * (leaf.ndim - 2), "x") if leaf.ndim > 1 and leaf.shape[-2] % count == 0 else ()
        return NamedSharding(mesh, PartitionSpec(*spec))

    return one


@pytest.mark.parametrize("saved_on", [1, 8])
def test_restores_on_other_numbers_of_devices(tmp_path, root, saved_on):
    """Catches a restore that wants the topology or the sharding it was saved with (X20)."""
    exact = load_target_hf(root / "target")[1]
    config, params = load_target_hf(root / "target", shardings=jax.tree.map(rows_over(saved_on), exact))
    assert len(params["embed"].sharding.device_set) == saved_on
    save_own(tmp_path / "own", config, params)
    for count in (1, 4, 8):
        shardings = jax.tree.map(rows_over(count), exact)
        again, loaded = load_own(tmp_path / "own", shardings=shardings)
        assert again == config
        assert same_trees(loaded, exact)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), loaded, shardings))
    default = load_own(tmp_path / "own")[1]
    assert default["embed"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_restoring_rounds_like_loading(own, root):
    _, params = load_own(own, "bfloat16")
    assert same_trees(params, load_target_hf(root / "target", "bfloat16")[1])


def _largest(path):
    return max((f for f in (path / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def _flip_bit(path):
    file = _largest(path)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 1
    file.write_bytes(raw)


def _truncate(path):
    file = _largest(path)
    file.write_bytes(file.read_bytes()[:-1])


def _make_unreadable(path):
    """Files that Orbax itself cannot restore, with checksums that fit."""
    file = _largest(path)
    file.write_bytes(file.read_bytes()[:100])
    about = json.loads((path / "dspark.json").read_text())
    about["files"][file.relative_to(path / "params").as_posix()] = zlib.crc32(file.read_bytes())
    (path / "dspark.json").write_text(json.dumps(about))


def _other_config(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))


def _edit_marker(**keys):
    def edit(path):
        about = json.loads((path / "dspark.json").read_text())
        (path / "dspark.json").write_text(json.dumps(about | keys))

    return edit


DAMAGE = {
    "params gone": (lambda p: shutil.rmtree(p / "params"), "params does not exist"),
    "one bit flipped": (_flip_bit, "is damaged: its checksum"),
    "truncated": (_truncate, "is damaged: its checksum"),
    "unreadable": (_make_unreadable, "cannot be restored"),
    "file gone": (lambda p: (p / "params" / "manifest.ocdbt").unlink(), "manifest.ocdbt does not exist"),
    "marker damaged": (lambda p: (p / "dspark.json").write_text("{"), "not a readable JSON file"),
    "config gone": (lambda p: (p / "config.json").unlink(), "config.json does not exist"),
    "other config": (_other_config, "expected shape"),
    "other version": (_edit_marker(version=99), "version=99 is not supported"),
    "other kind": (_edit_marker(kind="cat"), "kind='cat' is not legal"),
    "other params": (_edit_marker(params={"embed": {}}), "are not those of the configuration"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_directories_fail_by_name(own, case):
    change, words = DAMAGE[case]
    change(own)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_own(own)
    assert str(own) in str(caught.value)


def test_stored_nan_is_found(tmp_path, root):
    config, params = load_target_hf(root / "target")
    params["norm"] = params["norm"].at[3].set(np.nan)
    save_own(tmp_path / "own", config, params)
    with pytest.raises(CheckpointError, match="norm holds values that are not finite"):
        load_own(tmp_path / "own")


def test_target_round_trip(tmp_path, root):
    report = convert(root / "target", tmp_path / "own")
    assert (report.kind, report.src_form, report.dst_form, report.written) == ("target", "hf", "own", True)
    assert (tmp_path / "own" / "generation_config.json").exists()
    convert(tmp_path / "own", tmp_path / "hf")
    assert same_files(root / "target", tmp_path / "hf")
    assert load_target(tmp_path / "hf").config == load_target(tmp_path / "own").config == load_target(root / "target").config


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_draft_round_trip(tmp_path, root, name, dtype):
    src = root / name / "draft"
    if dtype:
        convert(src, tmp_path / "low", form="deepspec", dtype=dtype, target=root / "target", include_shared=True)
        src = tmp_path / "low"
        assert {x.dtype for x in load_file(src / "model.safetensors").values()} == {np.dtype(ml_dtypes.bfloat16)}
    convert(src, tmp_path / "own", target=root / "target")
    convert(tmp_path / "own", tmp_path / "back", target=root / "target", include_shared=True, dtype=dtype)
    assert same_files(src, tmp_path / "back")
    convert(tmp_path / "own", tmp_path / "alone")
    assert "lm_head.weight" not in load_file(tmp_path / "alone" / "model.safetensors")
    loaded = load_target(root / "target")
    exact = load_draft(src, None, loaded.config, loaded.params)
    for place in ("own", "back", "alone"):
        again = load_draft(tmp_path / place, None, loaded.config, loaded.params)
        assert again.config == exact.config
        assert same_trees(again.params, exact.params)


def test_own_draft_of_another_target(tmp_path, root):
    convert(root / "dflash" / "draft", tmp_path / "own", target=root / "target")
    loaded = load_target(root / "target")
    import dataclasses

    with pytest.raises(PairError, match="num_target_layers=4, the target has 3 layers"):
        load_draft(tmp_path / "own", None, dataclasses.replace(loaded.config, num_layers=3), loaded.params)


def test_dry_run_names_every_tensor_and_writes_nothing(tmp_path, root):
    report = convert(root / "dspark_rnn" / "draft", tmp_path / "own", target=root / "target", dtype="bfloat16", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    text = str(report)
    assert not report.written
    assert "layers.1.self_attn.k_proj.weight" in text and "layers/k[1]" in text and "bfloat16" in text
    assert "embed_tokens.weight and lm_head.weight: compared" in text
    assert {r.source for r in report.rows} | {"embed_tokens.weight", "lm_head.weight"} == set(
        load_file(root / "dspark_rnn" / "draft" / "model.safetensors")
    )


def test_illegal_conversions(tmp_path, root):
    target, draft, out = root / "target", root / "dflash" / "draft", tmp_path / "out"
    for src, kwargs, match in (
        (target, dict(form="deepspec"), "form='deepspec' is not legal for a target"),
        (draft, dict(form="hf"), "form='hf' is not legal for a draft"),
        (draft, dict(), "name the target"),
        (target, dict(target=target), "is for drafts"),
        (draft, dict(include_shared=True, target=target), "include_shared=True needs a DeepSpec destination"),
        (draft, dict(target=draft), "holds a draft, not a target"),
        (target, dict(dtype="int4"), "dtype='int4' is not legal"),
        (tmp_path / "nothing", dict(), "does not exist"),
        (target / "config.json", dict(), "neither a directory nor"),
    ):
        with pytest.raises(CheckpointError, match=match):
            convert(src, out, **kwargs)
    with pytest.raises(CheckpointError, match="not empty"):
        convert(target, tmp_path.parent)
    assert not out.exists()


def test_targets_and_drafts_are_told_apart(tmp_path, root):
    loaded = load_target(root / "target", "float32")
    assert loaded.text_dir is None
    with pytest.raises(CheckpointError, match="holds a draft"):
        load_target(root / "dflash" / "draft")
    with pytest.raises(CheckpointError, match="holds a target"):
        load_draft(root / "target", None, loaded.config, loaded.params)
    shutil.copytree(root / "dspark_vanilla" / "draft", tmp_path / "model_block9")  # file names mean nothing (A17)
    config = load_draft(tmp_path / "model_block9", None, loaded.config, loaded.params).config
    assert config.block_size == 7


def test_unsupported_architecture_is_named(tmp_path, root):
    shutil.copytree(root / "target", tmp_path / "t")
    config = json.loads((tmp_path / "t" / "config.json").read_text())
    (tmp_path / "t" / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(ConfigError, match="model_type='mixtral'"):
        load_target(tmp_path / "t")


def test_command_line(tmp_path, root, capsys):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["convert", str(root / "target"), str(tmp_path / "own"), "--dtype", "bfloat16", "--dry-run"])
    assert args.run(args) == 0
    assert "would convert the target" in capsys.readouterr().out
    args.dry_run = False
    assert args.run(args) == 0
    assert "converted the target" in capsys.readouterr().out
    assert load_target(tmp_path / "own").params["norm"].dtype == ml_dtypes.bfloat16


def test_half_precision_extremes_survive(tmp_path, root):
    """Catches a conversion through another type: denormals and the largest numbers of float16 stay as they are."""
    shutil.copytree(root / "target", tmp_path / "half")
    tensors = {k: v.astype(np.float16) for k, v in load_file(tmp_path / "half" / "model.safetensors").items()}
    tensors["model.norm.weight"][:3] = np.array([65504, 6e-8, -0.0], np.float16)
    save_file(tensors, tmp_path / "half" / "model.safetensors")
    convert(tmp_path / "half", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "back")
    assert same_files(tmp_path / "half", tmp_path / "back")
