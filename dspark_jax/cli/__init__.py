"""The command ``dspark``: one module a subcommand, imported only when it is the one that was asked for."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from dspark_jax.errors import DsparkError

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


class _Command(NamedTuple):
    """A subcommand: ``module`` has ``add_parser(subparsers)``, whose parser carries the default ``run(args) -> int``."""

    module: str
    help: str


COMMANDS = {
    "generate": _Command("dspark_jax.cli.generate", "answer prompts"),
    "bench": _Command("dspark_jax.cli.bench", "measure speculative against plain decoding on a prompt file"),
    "eval": _Command("dspark_jax.cli.evaluate", "accepted length, acceptance by position and calibration of drafts"),
    "profile": _Command("dspark_jax.cli.profile", "measure what a round costs here, for the policies that go by it"),
    "answer": _Command("dspark_jax.cli.answer", "the target answers a prompt file, as text to train on; resumable"),
    "train": _Command("dspark_jax.cli.train", "train a draft for a target on conversations"),
    "convert": _Command("dspark_jax.checkpoint.cli", "convert a checkpoint between forms"),
    "doctor": _Command("dspark_jax.cli.doctor", "check an installation and a pair, and explain what is wrong"),
    "demo": _Command("dspark_jax.cli.demo", "SmolLM2-135M answers three prompts, plain and speculative side by side"),
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``dspark``. With ``command`` only that subcommand gets its options (and its module is imported)."""
    parser = argparse.ArgumentParser(prog="dspark", description="DSpark in JAX: faster answers, the same answers.")
    parser.add_argument("--version", action="version", version=f"dspark-jax {importlib.metadata.version('dspark-jax')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dspark`` and return its exit code: 0, 1 (a check or a run failed), 2 (bad input), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(next((a for a in arguments if a in COMMANDS), None)).parse_args(
            arguments, argparse.Namespace(arguments=arguments)
        )
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: --help, --version, or a wrong argument
        return int(stop.code or 0)
    except DsparkError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # XLA's word for it
            raise
        first = str(error).split("\n", 1)[0]
        return _fail(f"out of memory: {first} (a smaller --batch-size or --max-new-tokens needs less)", EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader (head, less) has gone; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE


def _fail(message: str, code: int) -> int:
    print(f"dspark: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"dspark: warning: {message}", file=sys.stderr)
