"""The tokenizer inside a GGUF file as the tokenizer.json and tokenizer_config.json of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from dspark_jax.checkpoint.files import write_json
from dspark_jax.checkpoint.gguf import GGUFFile
from dspark_jax.errors import TextError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(pre: str) -> Any:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return _split({"qwen2": "", "llama-bpe": "{1,3}"}[pre])


def build_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """The tokenizer that a file's metadata describe: byte-level BPE of SmolLM, Qwen2/3 or Llama 3.

    Raises:
      TextError: another kind of tokenizer, or one that is incomplete. The weights can be loaded all the same.
    """
    model, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in ("smollm", "qwen2", "llama-bpe"):
        raise TextError(
            f"{file.path}: the tokenizer (model {model!r}, pre {pre!r}) cannot be converted; supported: model 'gpt2' with"
            " pre 'smollm', 'qwen2' or 'llama-bpe'. Its weights can be loaded; prompts must be token ids"
        )
    tokens, merges = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise TextError(f"{file.path}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    types = file.get("tokenizer.ggml.token_type", [int(gguf.TokenType.NORMAL)] * len(tokens))
    pairs = [tuple(m.split(" ")) for m in merges]
    if len(types) != len(tokens) or any(len(p) != 2 for p in pairs) or len(set(tokens)) != len(tokens):
        raise TextError(f"{file.path}: tokens, token types and merges of the tokenizer contradict each other")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise TextError(f"{file.path}: merges do not fit the tokens: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    by_type = {kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in set(types)}
    tokenizer.add_special_tokens([_added(t, True) for t in by_type.get(int(gguf.TokenType.CONTROL), [])])
    tokenizer.add_tokens([_added(t, False) for t in by_type.get(int(gguf.TokenType.USER_DEFINED), [])])
    bos = file.get("tokenizer.ggml.bos_token_id")
    if file.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def write_text_files(file: GGUFFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (special tokens, chat template) into ``directory``.

    Raises:
      TextError: as ``build_tokenizer``.
    """
    tokenizer = build_tokenizer(file)
    tokens = file.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.architecture}.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise TextError(f"{file.path}: {key}_token_id={token_id} is not among the {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[token_id]
    template = file.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", config)
