"""``dspark doctor``: check an installation and a pair."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dspark_jax.checkpoint.source import DEFAULT_DRAFT
from dspark_jax.cli import options, output
from dspark_jax.doctor import FAIL, SKIPPED, WARN, Check, check_installation, check_pair
from dspark_jax.errors import RequestError

COLOURS = {FAIL: "bold red", WARN: "yellow", SKIPPED: "dim"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check an installation and a pair, and explain what is wrong",
        description="Check the installation and, with --target (and --draft), a pair. The exit code is 1 if a check fails.",
    )
    options.add_model(parser, target_required=False)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.target is None and args.draft not in (options.NO_DRAFT, DEFAULT_DRAFT):
        raise RequestError(f"--draft={args.draft} needs --target: a draft is checked against the target it belongs to")
    options.settle_draft(args)
    checks = []
    console = output.console()

    def show(check: Check) -> None:
        checks.append(check)
        console.print(f"{check.status:8}", style=COLOURS.get(check.status, "green"), end="")
        console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
        if check.advice and check.status in (WARN, FAIL):
            console.print(f"{'':8}-> {check.advice}", markup=False, soft_wrap=True)

    for check in check_installation(options.use_compilation_cache(args)):
        show(check)
    if args.target is not None:
        for check in check_pair(args.target, args.draft, args.dtype):
            show(check)
    failed = sum(check.status == FAIL for check in checks)
    warned = sum(check.status == WARN for check in checks)
    print(f"{len(checks)} checks: {failed} failed, {warned} with a warning")
    if args.json:
        output.print_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks], **options.machine()})
    return 1 if failed else 0
