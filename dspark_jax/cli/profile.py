"""``dspark profile``: what a round costs on this machine, by rows, tokens and context length."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from dspark_jax.cli import options, output
from dspark_jax.errors import RequestError
from dspark_jax.profile import KINDS, Profile, profile
from dspark_jax.requests import capacity_for


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile",
        help="measure what a round costs here, for the policies that go by it",
        description="Time the decoding loop at exactly its compiled sizes and keep the result, which adaptive policies use from"
        " then on. Without this command a quicker measurement is made at first use. Let nothing else run meanwhile.",
    )
    options.add_model(parser)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N", help="one or more (default: 1)")
    parser.add_argument("--max-context", type=int, default=1024, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS), help="of sampling (default: both)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and contexts, as at first use")
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument("--output", metavar="FILE", help="also copy the table of a single batch size there")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    for name, values in (("batch-size", args.batch_size), ("max-context", [args.max_context])):
        for value in values:
            if value < 1:
                raise RequestError(f"--{name}={value} must be at least 1")
    if args.output and len(args.batch_size) != 1:
        raise RequestError(f"--output={args.output} needs a single --batch-size")
    options.settle_draft(args)
    if args.draft is None:
        raise RequestError("dspark profile needs --draft: plain decoding has nothing to decide")
    options.use_compilation_cache(args)
    with output.progress(f"loading {args.target} and {args.draft}"):
        pair = options.load(args)
    capacity = capacity_for(args.max_context, pair.model.target.max_positions)
    made = []
    for rows in args.batch_size:
        with output.progress(f"measuring {rows} rows"):
            made.append(profile(pair, rows, capacity, args.kind, args.quick, args.fresh))
    facts = {"dtype": args.dtype, "command": shlex.join(["dspark", *args.arguments]), **options.machine()}
    _print_report(args, made, facts)
    if args.output:
        if made[0].path is None:
            raise RequestError("the table could not be written to the cache, so there is nothing to copy")
        shutil.copyfile(made[0].path, args.output)
    if args.json:
        output.print_json({"profiles": made, **facts})
    return 0


def _print_report(args: argparse.Namespace, made: Sequence[Profile], facts: dict[str, Any]) -> None:
    console = output.console()
    console.print(
        f"{args.target}, draft {args.draft}, {args.dtype}; {facts['cpu']}, {facts['cores']} cores, {facts['platform']};"
        f" jax {facts['jax']}; median ms of a round",
        markup=False,
    )
    for one in made:
        columns = ("context", "plain", "drafter", *(f"{n} tokens" for n in one.sizes))
        for kind in args.kind:
            lines = []
            for context, found in sorted(one.samples[kind].items(), key=lambda item: int(item[0])):
                rounds = {int(n): 1e3 * s for n, s in found["drafted"].items()}
                plain = 1e3 * found["plain"]
                drafter = max(rounds[one.rows] - plain, 0.0) if one.rows in rounds else None
                lines.append(
                    [context, output.number(plain, 1), output.number(drafter, 1)]
                    + [output.number(rounds.get(n), 1) for n in one.sizes]
                )
            console.print(output.table(f"{one.rows} rows, {kind}", columns, lines))
        if one.path is not None:
            console.print(f"kept in {one.path}", markup=False, soft_wrap=True)
    console.print(
        "A round of n tokens includes the drafter, the accept rule and the loop. drafter: a drafted round of one token a row"
        " less a plain one.",
        markup=False,
    )
