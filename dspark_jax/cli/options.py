"""Options that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from dspark_jax.checkpoint.source import DEFAULT_DRAFT, cache_dir, read_draft_config, resolve_draft
from dspark_jax.errors import RequestError
from dspark_jax.machine import machine as machine
from dspark_jax.pair import DTYPES, Pair, load_pair
from dspark_jax.requests import Prompt
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import (
    Adaptive,
    Algorithm1,
    Autoregressive,
    FixedLength,
    FullSearch,
    Lagged,
    Observed,
    Policy,
    Threshold,
    check_policy,
)

NO_DRAFT = "none"
POLICY_FORMS = "adaptive | observed | algorithm1 | lagged | full-search | ar | fixed | fixed:N | threshold:X | survival:X"


class PromptRow(NamedTuple):
    """One line of a prompt file. ``domain`` groups rows in reports."""

    prompt: Prompt
    domain: str = ""


def add_model(parser: argparse.ArgumentParser, target_required: bool = True, draft: str = DEFAULT_DRAFT) -> None:
    """``--target``, ``--draft`` (by default ``draft``; see ``settle_draft``) and ``--dtype``."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        required=target_required,
        metavar="NAME|PATH",
        help="a Hugging Face directory, a .gguf file, a directory in own form, or the name smollm2",
    )
    group.add_argument(
        "--draft",
        default=draft,
        metavar="NAME|DIR",
        help="a draft in DeepSpec or own form; smollm2: the one that comes with this program; default: that one for the target"
        " smollm2, none for others; none: plain decoding (default: %(default)s)",
    )
    group.add_argument(
        "--dtype", choices=sorted(DTYPES), default="float32", help="of weights and caches (default: %(default)s)"
    )
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compilation-cache", action="store_true", help="compile everything anew instead of keeping programs on disk"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off (default)")
    group.add_argument("--seed", type=int, metavar="N", help="prompt i uses seed N + i; default: new ones at every call")
    group.add_argument(
        "--coupled",
        action=argparse.BooleanOptionalAction,
        help="the tokens of plain decoding with the same seed, whatever drafts and policies do (default: with --seed, where the"
        " policy goes by the machine or the batch)",
    )


def add_text(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--raw", action="store_true", help="no chat template (default: the model's own, where it has one)")
    parser.add_argument("--system", metavar="TEXT", help="system message; needs a chat template")


def use_compilation_cache(args: argparse.Namespace) -> Path | None:
    """Keep compiled programs between calls, unless that is unwanted or JAX was already told where to.

    Returns: the directory in use.
    """
    if args.no_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    current = jax.config.values["jax_compilation_cache_dir"]
    if current:
        return Path(current)
    directory = cache_dir() / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"dspark: warning: compiled programs cannot be kept in {directory}: {error.strerror}", file=sys.stderr)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # A bound makes JAX lock the directory, so that two calls at once never read a half-written program.
    jax.config.update("jax_compilation_cache_max_size", 4 * 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


def settle_draft(args: argparse.Namespace) -> None:
    """Replace ``args.draft`` by the path it means, or by None."""
    path = resolve_draft(None if args.draft == NO_DRAFT else args.draft, args.target)
    args.draft = None if path is None else str(path)


def load(args: argparse.Namespace) -> Pair:
    return load_pair(args.target, args.draft, args.dtype)


def parse_policy(text: str) -> Policy:
    """The policy that ``text`` names.

    Raises:
      RequestError: not one of ``POLICY_FORMS``, or a value outside its range.
    """
    name, colon, value = text.partition(":")
    makers: dict[str, Callable[[], Policy]] = {
        "ar": Autoregressive,
        "fixed": lambda: FixedLength(int(value) if colon else None),
        "threshold": lambda: Threshold(float(value)),
        "survival": lambda: Threshold(float(value), cumulative=True),
        "adaptive": Adaptive,
        "observed": Observed,
        "algorithm1": Algorithm1,
        "lagged": Lagged,
        "full-search": FullSearch,
    }
    if name not in makers or (colon and name not in ("fixed", "threshold", "survival")):
        raise RequestError(f"--policy={text!r} is unknown; legal: {POLICY_FORMS}")
    try:
        return makers[name]()
    except RequestError as error:
        raise RequestError(f"--policy={text!r}: {error}") from error
    except ValueError as error:
        raise RequestError(f"--policy={text!r}: {value!r} is not a number; legal: {POLICY_FORMS}") from error


def check_policies(policies: Iterable[tuple[str, Policy]], draft: str | None) -> None:
    """Refuse what the draft cannot serve before any model is loaded: of the draft only the configuration is read.

    Args:
      policies: each with its name on the command line.

    Raises:
      RequestError: a policy that needs a draft, a confidence head or a longer block. CheckpointError, ConfigError: what
      ``draft`` names is no draft, or its configuration is not legal.
    """
    config = None if draft is None else read_draft_config(draft)
    for name, policy in policies:
        if policy.drafts and config is None:
            raise RequestError(f"--policy={name!r} needs --draft; without a draft only --policy ar is legal")
        try:
            check_policy(policy, config)
        except RequestError as error:
            raise RequestError(f"--policy={name!r}: {error}") from error


def sampling_for(args: argparse.Namespace, count: int) -> list[SamplingParams]:
    """One setting per prompt; the seeds differ."""

    def one(index: int) -> SamplingParams:
        seed = args.seed if args.seed is None or not 0 <= args.seed < 2**32 else (args.seed + index) % 2**32
        return SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, seed, args.coupled)

    return [one(i) for i in range(count)]


def check_text(text: str, where: str, raw: bool) -> str:
    """``text``, unless it is empty; a chat template would wrap it all the same. With ``raw`` spaces are a prompt.

    Raises:
      RequestError: there is nothing in it.
    """
    if not (text if raw else text.strip()):
        raise RequestError(f"{where} is empty; a prompt needs text")
    return text


def read_prompts(path: str, raw: bool = False) -> list[PromptRow]:
    """Prompts of a file: ``.jsonl`` with one object a line (``prompt``: text, token ids or messages; or ``messages``;
    optionally ``domain`` or ``source``), any other name: one prompt a line.

    Raises:
      RequestError: the file cannot be read, a line is not of that form, or there is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompts={path} cannot be read: {error}") from error
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"--prompts={path} holds no prompt")
    if Path(path).suffix != ".jsonl":
        return [PromptRow(line.rstrip("\r")) for _, line in lines]
    return [_row(line, f"--prompts={path}, line {i}", raw) for i, line in lines]


def _row(line: str, where: str, raw: bool) -> PromptRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from error
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, Mapping) else None
    if not isinstance(prompt, str | list):
        raise RequestError(f"{where} must be an object with 'prompt' (text, token ids or messages) or 'messages'")
    if isinstance(prompt, str):
        check_text(prompt, f"{where}: prompt={prompt!r}", raw)
    return PromptRow(prompt, str(row.get("domain") or row.get("source") or ""))


def as_prompt(pair: Pair, prompt: Prompt, args: argparse.Namespace) -> Prompt:
    """Text becomes a chat message where the model has a template and ``--raw`` is not given; the rest stays as it is."""
    chat = pair.tokenizer is not None and "default" in pair.tokenizer.chat_templates and not args.raw
    if args.system is not None and not chat:
        why = "--raw is given" if args.raw else f"{pair.target_name} has no chat template"
        raise RequestError(f"--system={args.system!r} needs a chat template, but {why}")
    if not isinstance(prompt, str) or not chat:
        return prompt
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": prompt}]
