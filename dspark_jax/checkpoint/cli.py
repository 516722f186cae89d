"""The command ``dspark convert``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.files import check_destination
from dspark_jax.errors import CheckpointError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``convert`` to the subcommands; ``run`` is its ``run`` default."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="convert a checkpoint between forms",
        description="Convert a target (Hugging Face or GGUF <-> own form) or a draft (DeepSpec <-> own form).",
    )
    parser.add_argument("src", metavar="SRC", help="a directory, a .gguf file, or the name smollm2")
    parser.add_argument("dst", metavar="DST", help="the directory to write")
    parser.add_argument("--form", choices=["own", "hf", "deepspec"], help="form of DST (default: by what SRC is)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="type of the result (default: as stored)")
    parser.add_argument("--target", help="the target of a draft, to compare or to write shared tensors")
    parser.add_argument("--include-shared", action="store_true", help="write embedding and LM head into a DeepSpec draft")
    parser.add_argument("--dry-run", action="store_true", help="print what maps to what; write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it holds something")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert as ``args`` says and print the report.

    Raises:
      DsparkError: as ``convert``; what concerns an option names it as it is written here.
    """
    check_destination(Path(args.dst), args.overwrite, "--overwrite")
    if args.include_shared and (args.target is None or args.form not in (None, "deepspec")):
        raise CheckpointError("--include-shared needs --target, the model it shares with, and a DeepSpec destination")
    report = convert(
        args.src,
        args.dst,
        form=args.form,
        dtype=args.dtype,
        target=args.target,
        include_shared=args.include_shared,
        dry_run=args.dry_run,
        overwrite=args.overwrite,
    )
    print(report)
    return 0
