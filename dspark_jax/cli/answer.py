"""``dspark answer``: the target answers a prompt file, for training."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.answer import answer
from dspark_jax.cli import bad_rows, options, output
from dspark_jax.cli.models import check_models
from dspark_jax.errors import RequestError
from dspark_jax.rows import read_rows, take_per_source
from dspark_jax.schedule import Autoregressive, FixedLength
from dspark_jax.turns import sampling_of


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "answer",
        help="the target answers a prompt file; resumable",
        description="Answer a prompt file with the target and append to --out. May be killed at any time; the same command"
        " goes on where it stopped and gives the same answers.",
    )
    options.add_model(parser, draft=options.NO_DRAFT)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", required=True, metavar="FILE", help="JSONL: 'prompt', 'messages' or 'turns'")
    group.add_argument(
        "--out", required=True, metavar="FILE.jsonl", help="appended to; FILE.jsonl.settings.json is kept beside"
    )
    group.add_argument("--limit", type=int, metavar="N", help="the first N rows (default: all)")
    group.add_argument("--per-source", type=int, metavar="N", help="the first N rows of every source (default: all)")
    options.add_text(group)
    group = parser.add_argument_group("decoding")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P", help="above temperature 0 (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=40, metavar="K", help="above temperature 0; 0: off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="above temperature 0; 0: off (default)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="every row has its own made from it (default: 0)")
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="an answer (default: %(default)s)")
    group.add_argument("--policy", metavar="POLICY", help=f"{options.POLICY_FORMS} (default: fixed, or ar without a draft)")
    group.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    for name in ("max_new_tokens", "batch_size", "per_source", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name.replace('_', '-')}={value} must be at least 1")
    sampling_of(args.temperature, args.seed, args.top_k, args.top_p, args.min_p)
    out = Path(args.out)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise RequestError(f"--out={out} {'is a directory' if out.is_dir() else 'is in a directory that does not exist'}")
    options.settle_draft(args)
    if args.policy:
        policy = options.parse_policy(args.policy)
    else:
        policy = FixedLength() if args.draft else Autoregressive()
    rows, bad = read_rows(args.prompts)
    if out.exists() and out.samefile(args.prompts):
        raise RequestError(f"--out={out} is the prompt file")
    rows = take_per_source(rows[: args.limit], args.per_source)
    check_models(args.target, [args.draft] if args.draft else [], [(args.policy or "fixed", policy)])
    options.use_compilation_cache(args)
    with output.progress(f"loading {args.target}" + (f" and {args.draft}" if args.draft else "")):
        pair = options.load(args)
    console = output.console(stderr=True)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    started, printed = time.perf_counter(), [0.0]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("answering", total=len(rows))

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            now = time.perf_counter()
            if not console.is_terminal and (done == total or now - printed[0] > 10):
                printed[0] = now
                print(f"{done} of {total} rows", file=sys.stderr, flush=True)

        result = answer(
            pair,
            rows,
            out,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            policy=policy,
            raw=args.raw,
            system=args.system,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    bad_rows.show(sorted({*bad, *result.bad}, key=lambda b: b.line))
    for title, some in (("failed", result.failed), ("cut short", result.cut)):
        for row in some:
            print(f"{title}: line {row.line}: {row.why}", file=sys.stderr)
    if result.repaired:
        print(f"dspark: warning: a torn last line of {result.repaired} bytes was taken away", file=sys.stderr)
    print(
        f"{out}: {result.written} rows added ({result.tokens} tokens, {output.number(result.tokens / seconds, 1)} tokens/s),"
        f" {result.kept} were there, {len(result.failed)} failed, {len(bad) + len(result.bad)} left out"
    )
    if args.json:
        report = {name: getattr(result, name) for name in ("rows", "kept", "written", "tokens", "failed", "cut", "repaired")}
        report |= {"bad_rows": [*bad, *result.bad], "seconds": seconds, "out": str(out)}
        output.print_json(report | {"command": shlex.join(["dspark", *args.arguments]), **options.machine()})
    return 1 if result.failed else 0
