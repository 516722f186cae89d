"""A tokenizer for the toy pairs: one word a token, and a chat template that marks the speaker."""

import dataclasses

import tokenizers
from tokenizers import models, pre_tokenizers
from toys import target_config, toy_pair

from dspark_jax.pair import Pair
from dspark_jax.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w33', 'user': 'w34', 'assistant': 'w35'}[m.role] }} {{ m.content }} {% endfor %}w35"
)


def toy_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    words = {f"w{i}": i for i in range(36)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, source="toy", chat_templates={} if template is None else {"default": template})


def chat_pair(template: str | None = TEMPLATE, **changes) -> Pair:
    """A toy pair that reads text and stops at w1."""
    pair = toy_pair(target_config(eos_token_ids=(1,), **changes))
    return dataclasses.replace(pair, tokenizer=toy_tokenizer(template), draft_name="toy draft")
