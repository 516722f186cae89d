"""Tokenizer, chat templates and incremental decoding against the `tokenizers` library and recorded renderings."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dspark_jax.errors import TextError
from dspark_jax.text import IncrementalDecoder, Tokenizer

TEXTS = [
    "plain ASCII,\n\ttabs  and   spaces ",
    "Zażółć gęślą jaźń; naïve café",
    "日本語のテキスト、中文字符,한국어",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and e\u0301a\u0308 combining",
    "mixed 🙂é日a\u0000b\ufffd \U0010ffff end",
    "",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE with few merges, so that most characters take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(["<|end|>", "<|日本|>"])
    backend.add_tokens([AddedToken("<té>", normalized=False), AddedToken("Ġ日", normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"})


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A vocabulary in SentencePiece's style: a stripped leading space and ``<0x..>`` tokens for unknown characters."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    for piece in ["<unk>", *"▁abcdefghijklmnopqrstuvwxyz,;", "ab", "▁a", "é", "日"]:
        vocab.setdefault(piece, len(vocab))
    backend = Backend(models.BPE(vocab, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def _pushed(tokenizer: Tokenizer, ids: list[int], rng: random.Random, **kwargs: bool) -> str:
    """Decode ``ids`` in random portions, checking that no portion ends in a half character."""
    decoder = IncrementalDecoder(tokenizer, **kwargs)
    parts, start = [], 0
    while start < len(ids):
        stop = start + rng.choice([0, 1, 1, 2, 3, 8])
        parts.append(decoder.push(ids[start:stop]))
        start = stop
    parts.append(decoder.finish())
    assert decoder.finish() == ""
    return "".join(parts)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("skip", [True, False])
def test_any_split_gives_the_whole_text(kind: str, skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    rng = random.Random(0)
    for trial in range(300):
        if trial % 2:  # random ids: invalid bytes, truncated characters, special and added tokens
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
        else:  # real text, cut anywhere
            ids = tokenizer.encode(" ".join(rng.choices(TEXTS, k=3)))
            ids = ids[: rng.randrange(len(ids) + 1)]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert _pushed(tokenizer, ids, rng, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


def test_a_character_over_two_pushes_appears_once_and_whole(byte_level: Tokenizer) -> None:
    first, second, third = _byte_ids(byte_level, "日")
    decoder = IncrementalDecoder(byte_level)
    assert decoder.push([first]) == ""
    assert decoder.push([second]) == ""
    assert decoder.push([]) == ""
    assert decoder.push([third]) == "日"
    assert decoder.finish() == ""


def test_finish_flushes_one_replacement(byte_level: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_level)
    assert decoder.push([*byte_level.encode("a"), *_byte_ids(byte_level, "日")[:2]]) == "a"
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""
    with pytest.raises(TextError, match="after finish"):
        decoder.push([0])


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte, whatever the merges."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [tokenizer._backend.token_to_id(char) for piece, _ in spelling for char in piece]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cost_is_linear(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = request.getfixturevalue(kind)
    decoded = 0
    plain = tokenizer.token

    def counting(token_id: int) -> str:
        nonlocal decoded
        decoded += 1
        return plain(token_id)

    monkeypatch.setattr(tokenizer, "token", counting)
    ids = tokenizer.encode("ab c 🙂" * 300)
    decoder = IncrementalDecoder(tokenizer)
    for token_id in ids:
        decoder.push([token_id])
    assert decoded <= 6 * len(ids)


def test_bad_ids_and_texts(byte_level: Tokenizer) -> None:
    size = byte_level.vocab_size
    for bad in (size, -1, 2**40, "7"):
        with pytest.raises(TextError, match=f"token id {bad!r} is not among the {size} tokens"):
            byte_level.decode([0, bad])
        with pytest.raises(TextError, match="token id"):
            IncrementalDecoder(byte_level).push([bad])
    assert byte_level.decode(np.arange(40, 45, dtype=np.int32)) == byte_level.decode(range(40, 45))
    with pytest.raises(TextError, match="must be a string"):
        byte_level.encode(7)
    with pytest.raises(TextError, match="not valid Unicode"):
        byte_level.encode("half \ud83d")


def _directory(path, byte_level, config=None, jinja=None):
    byte_level._backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("config", "jinja", "rendered"),
    [
        ({"chat_template": "{{ messages[0].content }}!"}, None, "hi!"),
        ({"chat_template": "config"}, "file", "file"),
        ({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]}, None, "y"),
        ({"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}, "{{ bos_token }}{{ eos_token }}", "<s><|end|>"),
        ({}, "{%- for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
        ({}, "{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ({}, "{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ({}, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ({}, "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ thinking }}", "4TrueFalse"),
    ],
)
def test_templates(tmp_path, byte_level, config, jinja, rendered) -> None:
    tokenizer = Tokenizer.from_directory(_directory(tmp_path, byte_level, config, jinja))
    assert tokenizer.apply_chat_template(USER, thinking=False) == rendered


@pytest.mark.parametrize(
    ("jinja", "messages", "match"),
    [
        (None, USER, "no default chat template"),
        ("{{ raise_exception('roles must alternate') }}", USER, "roles must alternate"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": None}], "does not accept"),
        ("{% if %}", USER, "does not accept"),
        ("{{ messages.append(1) }}", USER, "does not accept"),
        ("{{ ''.__class__.__mro__ }}", USER, "does not accept"),
        ("x", [{"role": "robot", "content": "hi"}], r"messages\[0\]: role='robot' is unknown; legal: system,"),
        ("x", ["hi"], r"messages\[0\]='hi' must be a mapping"),
        ("x", [], "non-empty list"),
        ("x", "hi", "non-empty list"),
    ],
)
def test_refused_conversations(tmp_path, byte_level, jinja, messages, match) -> None:
    tokenizer = Tokenizer.from_directory(_directory(tmp_path, byte_level, None, jinja))
    with pytest.raises(TextError, match=match):
        tokenizer.apply_chat_template(messages)


def test_encode_chat_adds_no_special_tokens(tmp_path, byte_level) -> None:
    template = "{{ messages[0].content }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    config = {"eos_token": "<|end|>", "chat_template": template}
    tokenizer = Tokenizer.from_directory(_directory(tmp_path, byte_level, config))
    (eos,) = tokenizer.eos_ids
    assert tokenizer.encode_chat("hi") == [*tokenizer.encode("hi"), eos, *tokenizer.encode(">")]
    assert tokenizer.encode_chat(USER, add_generation_prompt=False) == [*tokenizer.encode("hi"), eos]
    assert tokenizer.decode([eos]) == ""
    assert tokenizer.decode([eos], skip_special_tokens=False) == "<|end|>"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ({"eos_token": 7}, "eos_token=7 must be a string"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a string or a list"),
        ({"chat_template": 3}, "chat_template must be a string or a list"),
    ],
)
def test_bad_config(tmp_path, byte_level, config, match) -> None:
    with pytest.raises(TextError, match=match):
        Tokenizer.from_directory(_directory(tmp_path, byte_level, config))


def test_bad_directory(tmp_path, byte_level) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    tokenizer = Tokenizer.from_directory(_directory(tmp_path, byte_level, {"eos_token": "<none>"}))
    with pytest.raises(TextError, match="eos_token='<none>' is not in the vocabulary"):
        _ = tokenizer.eos_ids


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path, byte_level) -> None:
    backend = Backend.from_str(byte_level._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).encode("abc def") == byte_level.encode("abc def")


def test_smollm2_matches_the_reference(smollm2_dir, fixtures_dir) -> None:
    tokenizer = Tokenizer.from_directory(smollm2_dir)
    rng = random.Random(1)
    cases = json.loads((fixtures_dir / "smollm2" / "greedy.json").read_text())
    assert cases
    for case in cases:
        assert tokenizer.apply_chat_template([{"role": "user", "content": case["prompt"]}]) == case["rendered"]
        assert tokenizer.encode_chat(case["prompt"]) == case["input_ids"]
        assert tokenizer.decode(case["greedy_new_ids"]) == case["text"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert _pushed(tokenizer, ids, rng) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_ids_of_any_integer_type_but_no_bytes(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("ab, a b")
    for cast in (np.int64, np.uint16):
        assert tokenizer.decode(np.asarray(ids, cast)) == tokenizer.decode(ids)
        decoder = IncrementalDecoder(tokenizer)
        assert decoder.push([cast(i) for i in ids]) + decoder.finish() == tokenizer.decode(ids)
        assert tokenizer.token(cast(ids[0])) == tokenizer.token(ids[0])
    for wrong in (b"ab", bytearray(b"ab"), "ab"):
        with pytest.raises(TextError, match=f"must be token ids, got {type(wrong).__name__}"):
            tokenizer.decode(wrong)
        with pytest.raises(TextError, match=f"must be token ids, got {type(wrong).__name__}"):
            IncrementalDecoder(tokenizer).push(wrong)
    for wrong in (np.True_, 1.0, "a"):
        with pytest.raises(TextError, match="is not among"):
            tokenizer.decode([wrong])
