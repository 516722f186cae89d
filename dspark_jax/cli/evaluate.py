"""``dspark eval``: how good drafts are on a prompt file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.checkpoint.source import DEFAULT_DRAFT, resolve_draft
from dspark_jax.cli import bad_rows, options, output
from dspark_jax.cli.models import check_models, load_pairs
from dspark_jax.errors import RequestError
from dspark_jax.evaluate import Comparison, Evaluation, TemperatureResult, compare, evaluate
from dspark_jax.evaluate.metrics import Calibration, Estimate
from dspark_jax.evaluate.plot import check_plot, plot
from dspark_jax.evaluate.report import as_json
from dspark_jax.pair import DTYPES, Pair
from dspark_jax.rows import BadRow, Row, read_rows, take_per_source
from dspark_jax.schedule import Policy
from dspark_jax.turns import sampling_of


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="accepted length, acceptance by position and calibration of drafts on a prompt file",
        description="Answer a prompt file with every --draft at every --temperature and report accepted length, acceptance by"
        " position, and how true the confidence head is. Several drafts are compared on the same prompts.",
    )
    group = parser.add_argument_group("models")
    group.add_argument("--target", required=True, metavar="NAME|PATH", help="a directory, a .gguf file, or the name smollm2")
    group.add_argument(
        "--draft",
        action="append",
        metavar="NAME|DIR",
        help="may be repeated: the others are compared with the first (default: smollm2, where that is the target)",
    )
    group.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default: %(default)s")
    options.add_cache(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts", required=True, metavar="FILE", help="JSONL: 'prompt', 'messages' or 'turns'; 'source' and 'domain' group"
    )
    group.add_argument("--per-source", type=int, metavar="N", help="the first N rows of every source (default: all)")
    options.add_text(group)
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="one or more (default: 0 1)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="of temperatures above 0; 0: off (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of temperatures above 0; 1: off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="of temperatures above 0; 0: off (default)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    group.add_argument("--policy", default="fixed", metavar="POLICY", help=f"{options.POLICY_FORMS} (default: whole blocks)")
    group.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="an answer (default: %(default)s)")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE.png", help="draw reliability diagrams (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    args.draft = _drafts(args)
    policy = _checked_policy(args)
    rows, bad = read_rows(args.prompts)
    rows = take_per_source(rows, args.per_source)
    if args.plot:
        check_plot(args.plot)
    check_models(args.target, args.draft, [(args.policy, policy)])
    options.use_compilation_cache(args)
    with output.progress(f"loading {args.target} and {', '.join(args.draft)}"):
        pairs = load_pairs(args.target, args.draft, args.dtype)
    evaluations = [_evaluate(pair, rows, policy, args) for pair in pairs]
    bad = sorted({*bad, *evaluations[0].skipped}, key=lambda b: b.line)
    comparisons = [c for other in evaluations[1:] for c in compare(evaluations[0], other)]
    facts = {"dtype": args.dtype, "command": shlex.join(["dspark", *args.arguments]), **options.machine()}
    _print_report(args, evaluations, comparisons, bad, facts)
    if args.plot and not plot(evaluations, args.plot):
        print("dspark: warning: no draft has a confidence head; nothing was drawn", file=sys.stderr)
    if args.json:
        output.print_json(_report(args, evaluations, comparisons, bad, facts))
    failed = any("error" in p.finish for e in evaluations for r in e.results for p in r.prompts)
    return 1 if failed else 0


def _drafts(args: argparse.Namespace) -> list[str]:
    """The paths of --draft; without it the one shipped for the target.

    Raises:
      RequestError: there is none.
    """
    found = [resolve_draft(name, args.target) for name in args.draft or [DEFAULT_DRAFT]]
    if None in found:
        raise RequestError(f"--draft is needed: the target {args.target} has none of its own")
    return [str(path) for path in found]


def _checked_policy(args: argparse.Namespace) -> Policy:
    """Everything about the options that can be refused without a model."""
    for name in ("max_new_tokens", "batch_size", "per_source"):
        value, least = getattr(args, name), 2 if name == "max_new_tokens" else 1  # the first token is the prefill's
        if value is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')}={value} must be at least {least}")
    if len(set(args.temperature)) != len(args.temperature):
        raise RequestError(f"--temperature={' '.join(f'{t:g}' for t in args.temperature)} names one twice")
    if len(set(args.draft)) != len(args.draft):
        raise RequestError("--draft names one directory twice")
    for t in args.temperature:
        sampling_of(t, args.seed, args.top_k, args.top_p, args.min_p)
    policy = options.parse_policy(args.policy)
    if not policy.drafts:
        raise RequestError(f"--policy={args.policy!r} drafts nothing; there is nothing to evaluate")
    return policy


def _evaluate(pair: Pair, rows: Sequence[Row], policy: Policy, args: argparse.Namespace) -> Evaluation:
    console = output.console(stderr=True)
    shown: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling", total=None)

        def progress(done: int, total: int, temperature: float) -> None:
            name = f"{pair.draft_name}, temperature {temperature:g}"
            if temperature not in shown:
                shown.append(temperature)
                bar.reset(task)
            bar.update(task, completed=done, total=total, description=name)
            if not console.is_terminal:
                print(f"{name}: {done} of {total} prompts", file=sys.stderr, flush=True)

        return evaluate(
            pair,
            rows,
            temperatures=args.temperature,
            policy=policy,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            seed=args.seed,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            raw=args.raw,
            system=args.system,
            progress=progress,
        )


def interval(e: Estimate, digits: int = 2) -> str:
    return f"[{output.number(e.low, digits)}, {output.number(e.high, digits)}]"


COLUMNS = ("", "prompts", "rounds", "accepted", "95 %", "by prompt", "conditional by slot", "survival by slot")
HEAD_COLUMNS = ("confidence", "seen", "came true", "ECE", "AUC", "Brier", "bias", "bias by slot")


def _lines(r: TemperatureResult) -> list[list[str]]:
    several = len(r.domains) > 1 or (r.domains and set(r.domains) != set(r.sources))
    groups = [*r.sources.items(), *((f"domain {n}", g) for n, g in r.domains.items() if several), ("all rounds", r.overall)]
    lines = [
        [
            name,
            str(g.prompts),
            str(g.rounds),
            output.number(g.accepted_length.value),
            interval(g.accepted_length),
            output.number(g.accepted_length_by_prompt.value),
            output.percentages(g.conditional_by_position),
            output.percentages(g.survival_by_position),
        ]
        for name, g in groups
    ]
    mean = ["mean of sources", "", "", output.number(r.accepted_length.value), interval(r.accepted_length), "", "", ""]
    return [*lines, mean]


def _head_line(name: str, c: Calibration) -> list[str]:
    share = [output.number(100 * x, 1, " %") for x in (c.base_rate, c.ece)]
    numbers = [output.number(x, 3) for x in (c.auc, c.brier, c.bias)]
    return [name, str(c.count), *share, *numbers, " ".join(output.number(x) for x in c.bias_by_position)]


def _print_report(
    args: argparse.Namespace,
    evaluations: Sequence[Evaluation],
    comparisons: Sequence[Comparison],
    bad: Sequence[BadRow],
    facts: dict[str, Any],
) -> None:
    console = output.console()
    console.print(
        f"{args.target}, {args.prompts}, policy {args.policy}, {args.dtype}, up to {args.max_new_tokens} new tokens an answer,"
        f" batch {args.batch_size}, seed {args.seed}; {facts['cpu']}, {facts['cores']} cores, {facts['platform']};"
        f" python {facts['python']}, jax {facts['jax']}",
        markup=False,
    )
    for e in evaluations:
        for r in e.results:
            title = f"{e.draft}, temperature {r.temperature:g} ({output.number(r.seconds, 0)} s)"
            console.print(output.table(title, COLUMNS, _lines(r)))
            heads = [(n, getattr(r.overall, n)) for n in ("conditional", "survival")]
            if heads[0][1] is not None:
                console.print(output.table("", HEAD_COLUMNS, [_head_line(n, c) for n, c in heads]))
            for line in r.cut:
                console.print(f"cut short: line {line.line}: {line.why}", markup=False)
    for c in comparisons:
        names = [*((s, d) for s, d in c.sources.items()), ("mean of sources", c.accepted_length)]
        title = f"{c.second} less {c.first}, temperature {c.temperature:g}, accepted length, paired by prompt"
        lines = [[name, f"{d.value:+.2f}", interval(d)] for name, d in names]
        console.print(output.table(title, ("", "difference", "95 %"), lines))
    bad_rows.show(bad)
    if chosen_slots(args.policy):
        console.print(
            f"Policy {args.policy} checks the slots it believes in: acceptance by slot and calibration are of these alone.",
            markup=False,
        )
    console.print(
        "accepted: tokens committed / rounds, the target's own token included; by prompt: mean of the prompts' own means;"
        " mean of sources: every source counts the same. Intervals: bootstrap by prompt.",
        markup=False,
    )


def chosen_slots(policy: str) -> bool:
    """Whether what is checked depends on the drafts, so that the slots that were seen are no fair sample."""
    return not policy.startswith("fixed")


def _report(
    args: argparse.Namespace,
    evaluations: Sequence[Evaluation],
    comparisons: Sequence[Comparison],
    bad: Sequence[BadRow],
    facts: dict[str, Any],
) -> dict[str, Any]:
    return {
        "drafts": [as_json(e) for e in evaluations],
        "comparisons": comparisons,
        "bad_rows": bad,
        "target": args.target,
        "prompts": args.prompts,
        "per_source": args.per_source,
        "policy": args.policy,
        "chosen_slots": chosen_slots(args.policy),
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "seed": args.seed,
        "sampling": {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p},
        **facts,
    }
