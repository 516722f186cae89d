"""``dspark bench``: plain and speculative decoding of a prompt file, interleaved and warm."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from dspark_jax.bench import PLAIN, Case, Run, Summary, measure, summarise, warm_up
from dspark_jax.cli import options, output
from dspark_jax.errors import RequestError
from dspark_jax.pair import Pair
from dspark_jax.schedule import Autoregressive, FixedLength, Policy, check_policy

DEFAULT_MAX_NEW_TOKENS = 96


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure speculative against plain decoding on a prompt file",
        description="Measure plain decoding and every --policy on the same prompts, interleaved, after a warm-up. Times are of"
        " decoding alone; the prefill has its own column.",
    )
    options.add_model(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help=".jsonl with 'prompt' and 'domain', or one a line")
    parser.add_argument("--limit", type=int, metavar="N", help="N prompts, the same number of every domain as far as possible")
    options.add_text(parser)
    options.add_sampling(parser)
    parser.add_argument("--max-new-tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"{options.POLICY_FORMS}; may be repeated (default: fixed; plain decoding is always measured)",
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="measurements of each (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts decoded together (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    for name in ("max_new_tokens", "repeats", "batch_size", "limit"):
        value = getattr(args, name)
        least = 2 if name == "max_new_tokens" else 1  # the first token is the prefill's
        if value is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')}={value} must be at least {least}")
    options.settle_draft(args)
    policies = _policies(args)
    rows = _spread(options.read_prompts(args.prompts, args.raw), args.limit)
    sampling = options.sampling_for(args, len(rows))
    options.check_policies(policies.items(), args.draft)
    options.use_compilation_cache(args)
    with output.progress(f"loading {args.target}" + (f" and {args.draft}" if args.draft else "")):
        pair = options.load(args)
    slots = {name: check_policy(policy, pair.model.draft) for name, policy in policies.items()}
    cases = _cases(pair, rows, sampling, args)
    greedy = all(s.temperature == 0 for s in sampling)
    runs = _measure(pair, cases, policies, args)
    domains = sorted({case.domain for case in cases if case.domain})
    tables = {
        domain: [summarise(runs, name, slots[name], greedy, cases, domain) for name in policies]
        for domain in [None, *(domains if len(domains) > 1 else [])]
    }
    facts = {"dtype": args.dtype, "command": shlex.join(["dspark", *args.arguments]), **options.machine()}
    _print_report(tables, runs, args, facts)
    if args.json:
        output.print_json(_report(tables, runs, args, facts))
    return 1 if any(r.failure for r in runs) else 0


def _policies(args: argparse.Namespace) -> dict[str, Policy]:
    """Plain decoding first, then what was asked for."""
    policies: dict[str, Policy] = {PLAIN: Autoregressive()}
    if args.policy:
        policies |= {text: options.parse_policy(text) for text in args.policy}
    elif args.draft:
        policies["fixed"] = FixedLength()
    return policies


def _spread(rows: list[options.PromptRow], limit: int | None) -> list[options.PromptRow]:
    """The first ``limit`` rows when domains take turns."""
    if limit is None or limit >= len(rows):
        return rows
    queues: dict[str, list[options.PromptRow]] = {}
    for row in rows:
        queues.setdefault(row.domain, []).append(row)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues.values()))
    return [row for row in turns if row is not None][:limit]


def _cases(pair: Pair, rows: Sequence[options.PromptRow], sampling: Sequence[Any], args: argparse.Namespace) -> list[Case]:
    """Batches; all prompts of one are of one domain."""
    cases = []
    for domain in dict.fromkeys(row.domain for row in rows):
        mine = [i for i, row in enumerate(rows) if row.domain == domain]
        for start in range(0, len(mine), args.batch_size):
            batch = mine[start : start + args.batch_size]
            prompts = [options.as_prompt(pair, rows[i].prompt, args) for i in batch]
            cases.append(Case(prompts, [sampling[i] for i in batch], domain))
    return cases


def _measure(pair: Pair, cases: list[Case], policies: dict[str, Policy], args: argparse.Namespace) -> list[Run]:
    console = output.console(stderr=True)
    if not console.is_terminal:
        print("compiling …", file=sys.stderr, flush=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        for message in warm_up(pair, cases, policies, args.max_new_tokens, args.batch_size):
            bar.update(task, description=message)
        total = len(cases) * len(policies) * args.repeats
        if not console.is_terminal:
            print(f"measuring {total} runs …", file=sys.stderr, flush=True)
        bar.update(task, description="measuring", total=total)
        runs = []
        for done in measure(pair, cases, policies, args.max_new_tokens, args.batch_size, args.repeats):
            runs.append(done)
            bar.advance(task)
    return runs


COLUMNS = (
    "policy",
    "tokens/s",
    "ratio",
    "of totals",
    "ms/round",
    "prefill ms",
    "accepted",
    "verified",
    "= plain",
    "cases",
    "failed",
)


def _line(s: Summary) -> list[str]:
    number = output.number
    return [
        s.policy,
        number(s.tokens_per_second, 1),
        number(s.ratio, 2, "x"),
        number(s.ratio_of_totals, 2, "x"),
        number(s.ms_per_round, 1),
        number(s.prefill_ms, 0),
        number(s.accepted_length),
        number(s.verified_length),
        "-" if s.same_as_plain is None or s.policy == PLAIN else f"{s.same_as_plain[0]}/{s.same_as_plain[1]}",
        str(s.cases),
        str(s.failed),
    ]


def _print_report(
    tables: dict[str | None, list[Summary]], runs: Sequence[Run], args: argparse.Namespace, facts: dict[str, Any]
) -> None:
    console = output.console()
    console.print(
        f"{args.target}, draft {args.draft or 'none'}, {args.dtype}, batch {args.batch_size}, temperature {args.temperature:g},"
        f" up to {args.max_new_tokens} new tokens, {args.repeats} repeats; {facts['cpu']}, {facts['cores']} cores,"
        f" {facts['platform']}; python {facts['python']}, jax {facts['jax']}, jaxlib {facts['jaxlib']}",
        markup=False,
    )
    for domain, rows in tables.items():
        console.print(output.table(domain or "all prompts", COLUMNS, [_line(s) for s in rows]))
    for s in tables[None]:
        if s.acceptance_by_position:
            console.print(f"{s.policy}: acceptance by position {output.percentages(s.acceptance_by_position)}", markup=False)
    for r in runs:
        if r.failure:
            console.print(f"FAILED: {r.policy}, case {r.case}, repeat {r.repeat}: {r.failure}", markup=False)
    console.print("tokens/s, ms and the ratio to plain decoding are medians over cases.", markup=False)


def _report(
    tables: dict[str | None, list[Summary]], runs: Sequence[Run], args: argparse.Namespace, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "policies": tables[None],
        "domains": {domain: rows for domain, rows in tables.items() if domain is not None},
        "failures": [{"policy": r.policy, "case": r.case, "repeat": r.repeat, "why": r.failure} for r in runs if r.failure],
        "target": args.target,
        "draft": args.draft,
        "batch_size": args.batch_size,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        **facts,
    }
