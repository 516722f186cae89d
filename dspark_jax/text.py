"""Text in and out of token ids: tokenizer, chat template, and decoding that never shows half a character.

Works on the files of a Hugging Face directory with the ``tokenizers`` and ``jinja2`` libraries alone.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import decoders

from dspark_jax.errors import TextError

Messages = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """A tokenizer with its special tokens and chat templates.

    ``source`` names the origin in errors. ``special_tokens`` maps names such as ``"eos_token"`` to their texts, all of
    which a template may use. ``chat_templates`` maps ``"default"``, and other names where a model has several, to
    Jinja sources.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str = "tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # settings of a training run that some tokenizer.json files carry along
        backend.no_padding()
        self._backend = backend
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
          TextError: ``tokenizer.json`` is missing, or a file is not what its name says.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        text = _read(path)
        if text is None:
            raise TextError(f"{path} does not exist; a tokenizer in this form is needed to encode and decode text")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config = _read_json_object(config_path)
        templates = _chat_templates(config.get("chat_template"), f"{config_path}: chat_template")
        jinja = _read(directory / "chat_template.jinja")
        if jinja is not None:
            templates["default"] = jinja
        return cls(
            backend,
            source=str(directory),
            special_tokens=_special_tokens(config, config_path),
            chat_templates=templates,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The embedding of a model may have more rows than this."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token of ``tokenizer_config.json`` as an id, or nothing if none is declared."""
        token = self.special_tokens.get("eos_token")
        if token is None:
            return ()
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise TextError(f"{self.source}: eos_token={token!r} is not in the vocabulary")
        return (token_id,)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``. Names of special tokens inside the text become those tokens.

        Raises:
          TextError: ``text`` is not a string, or contains half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise TextError(f"text={text!r} must be a string, got {type(text).__name__}")
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:  # the library says either of half a surrogate pair
            raise TextError(f"text={text!r} is not valid Unicode") from error

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of ``text``, and the characters ``[start, end)`` that each stands for; no special tokens are added.

        Raises:
          TextError: as ``encode``.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise TextError(f"text={text!r} is not valid Unicode") from error
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Raises:
          TextError: an id is not in the vocabulary, or ``ids`` is text or bytes.
        """
        ids = _ids(ids)
        for token_id in ids:
            self.token(token_id)
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def known(self, ids: Sequence[int]) -> list[int]:
        """Those of ``ids`` that have an entry: a model's vocabulary may be padded beyond its tokenizer's, and a padding id
        can be sampled; it has no text."""
        return [i for i in ids if self._backend.id_to_token(i) is not None]

    def token(self, token_id: int) -> str:
        """The vocabulary's entry for ``token_id``.

        Raises:
          TextError: there is none.
        """
        try:
            token = self._backend.id_to_token(operator.index(token_id))
        except (OverflowError, TypeError):
            token = None
        if token is None:
            raise TextError(f"token id {token_id!r} is not among the {self.vocab_size} tokens of {self.source}")
        return str(token)

    @property
    def byte_level(self) -> bool:
        """Whether a token's text is a spelling of its bytes (GPT-2's alphabet), so that tokens decode independently."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the model was trained to see it; ``kwargs`` reach the template (``tools``, …).

        Raises:
          TextError: there is no template, a message is malformed or has an unknown role, or the template refuses.
        """
        template = self.chat_templates.get("default")
        if template is None:
            known = f"; named templates: {', '.join(sorted(self.chat_templates))}" if self.chat_templates else ""
            raise TextError(
                f"{self.source} has no default chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json){known}; pass token ids or encode the text without a template"
            )
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        variables |= {"messages": _checked(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return _compile(template).render(variables)
        except Exception as error:  # a template is foreign code and fails in its own ways
            raise TextError(f"the chat template of {self.source} does not accept these messages: {error}") from error

    def encode_chat(self, conversation: Messages | str, **kwargs: Any) -> list[int]:
        """Token ids of the rendered conversation; a string counts as one message of the user.

        The template writes the special tokens itself, so none are added.

        Raises:
          TextError: as ``apply_chat_template`` and ``encode``.
        """
        if isinstance(conversation, str):
            conversation = [{"role": "user", "content": conversation}]
        return self.encode(self.apply_chat_template(conversation, **kwargs))


class IncrementalDecoder:
    """Text of one growing sequence of ids. All pushes and the finish together equal ``tokenizer.decode(all ids)``.

    A character spread over several tokens is held back until it is whole. Stop tokens that are not to be shown are not
    to be pushed. Each id is decoded a bounded number of times.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _ByteStream | _WindowStream = _ByteStream(tokenizer) if tokenizer.byte_level else _WindowStream(tokenizer)
        self._finished = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with ``ids``, maybe none.

        Raises:
          TextError: an id is not in the vocabulary, ``ids`` is text or bytes, or the sequence was finished.
        """
        if self._finished:
            raise TextError("ids were pushed after finish(); use a new IncrementalDecoder for a new sequence")
        return self._stream.push([i for i in _ids(ids) if i not in self._skipped])

    def finish(self) -> str:
        """What was held back: an incomplete character shows as U+FFFD. A second call returns nothing."""
        if self._finished:
            return ""
        self._finished = True
        return self._stream.finish()


def _ids(ids: Iterable[Any]) -> list[Any]:
    """``ids`` as a list, integers of any type as Python's; what is no integer stays, and is refused where it is looked up.

    Raises:
      TextError: text or bytes, whose items would pass for ids.
    """
    if isinstance(ids, str | bytes | bytearray | memoryview):
        raise TextError(f"ids={ids!r} must be token ids, got {type(ids).__name__}")

    def whole(token_id: Any) -> Any:
        try:
            return operator.index(token_id)
        except TypeError:
            return token_id

    return [whole(i) for i in ids]


class _ByteStream:
    """Byte-level vocabularies: tokens are bytes, characters come from an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join([_token_bytes(self._tokenizer.token(i)) for i in ids])  # every id is checked before any counts
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Other vocabularies: decode a window twice, with and without the new tokens, and show the difference.

    The window starts with the tokens shown last, because a decoder may treat the first token specially (strip its
    space). Byte tokens ``<0x..>`` are decoded as one run, so a run is held back until it ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._shown_text = ""
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        last = [self._tokenizer.token(i) for i in ids][-1]
        self._held += ids
        return "" if last.startswith("<0x") and last.endswith(">") else self._show(partial=False)

    def finish(self) -> str:
        return self._show(partial=True)

    def _show(self, partial: bool) -> str:
        text = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=False)
        new = text[len(self._shown_text) :]
        if not new or (new.endswith("\ufffd") and not partial):
            return ""
        self._shown, self._held = self._held, []
        self._shown_text = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        return new


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable ones as themselves, the others from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _token_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:  # an added token that is written in plain text
        return token.encode()


def _read(path: Path) -> str | None:
    """A file's text, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read as text: {error}") from error


def _read_json_object(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TextError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    tokens = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(text, str):
            raise TextError(f"{path}: {key}={value!r} must be a string or an object with a string 'content'")
        tokens[key] = text
    return tokens


def _chat_templates(value: Any, where: str) -> dict[str, str]:
    """Templates by name from either form: one string, or a list of ``{"name", "template"}``."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates = {}
    for entry in value if isinstance(value, list) else [value]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TextError(f"{where} must be a string or a list of objects with a string 'name' and 'template'")
        templates[name] = text
    return templates


def _checked(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not messages:
        raise TextError(f"messages={messages!r} must be a non-empty list of {{'role': …, 'content': …}}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TextError(f"messages[{index}]={message!r} must be a mapping with 'role' and 'content'")
        if message.get("role") not in ROLES:
            raise TextError(f"messages[{index}]: role={message.get('role')!r} is unknown; legal: {', '.join(ROLES)}")
    return [dict(message) for message in messages]


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compile a template in the sandbox, with the helpers that published templates rely on."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML characters, which models were not trained on
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)
