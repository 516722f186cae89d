"""``dspark demo``: one math, one code and one chat question, answered plain and speculatively, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from dspark_jax.bench import PLAIN, Case, Run, measure, summarise, warm_up
from dspark_jax.checkpoint.source import DEFAULT_DRAFT, SMOLLM2
from dspark_jax.cli import options, output
from dspark_jax.errors import RequestError
from dspark_jax.pair import Pair, load_pair
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength, Policy, Threshold, check_policy

SURVIVAL = 0.3  # was the fastest of 0.15, 0.3 and 0.5 with another draft; not tuned to the shipped one
FIXED, ADAPTIVE = "fixed", f"survival:{SURVIVAL}"
QUESTIONS = {
    "math": "Tom has 3 boxes with 12 apples each. He gives away 8 apples. How many apples are left? Reason step by step.",
    "code": "Write a Python function that returns the sum of the squares of a list of numbers.",
    "chat": "Give me three tips for a good night's sleep.",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="SmolLM2-135M answers three prompts, plain and speculative side by side",
        description="SmolLM2-135M-Instruct answers a math, a code and a chat question, plain and speculative side by side.",
    )
    parser.add_argument(
        "--draft",
        default=DEFAULT_DRAFT,
        metavar="NAME|DIR",
        help="default: the one shipped for the target; none: plain",
    )
    parser.add_argument("--target", default=SMOLLM2, metavar="NAME|PATH", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    options.add_cache(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 2:
        raise RequestError(f"--max-new-tokens={args.max_new_tokens} must be at least 2")
    options.use_compilation_cache(args)
    console = output.console()
    options.settle_draft(args)
    if args.draft is None:
        console.print(f"No draft for {args.target}: it answers alone.\n")
    with output.progress(f"loading {args.target}" + (f" and {args.draft}" if args.draft else "")):
        pair = load_pair(args.target, args.draft)
    policies: dict[str, Policy] = {PLAIN: Autoregressive()}
    if pair.model.draft is not None:
        policies[FIXED] = FixedLength()
        if pair.model.draft.confidence_head:
            policies[ADAPTIVE] = Threshold(SURVIVAL, cumulative=True)
    cases = _cases(pair)
    with output.progress("compiling (once; the programs are kept for the next time)"):
        for _ in warm_up(pair, cases, policies, args.max_new_tokens, 1):
            pass
    shown = list(policies)[-1]
    runs: list[Run] = []
    with output.progress("answering"):
        for done in measure(pair, cases, policies, args.max_new_tokens, 1, 1):
            runs.append(done)
    for number, case in enumerate(cases):
        answers = {r.policy: r for r in runs if r.case == number}
        console.rule(f"{case.domain}: {QUESTIONS[case.domain]}", style="dim", align="left")
        _show(console, answers, [PLAIN, shown] if shown != PLAIN else [PLAIN])
    facts = _summary(console, pair, cases, policies, runs)
    if args.json:
        output.print_json(
            {**facts, "target": args.target, "draft": args.draft, "runs": _runs_json(cases, runs), **options.machine()}
        )
    return 1 if any(r.failure for r in runs) else 0


def _cases(pair: Pair) -> list[Case]:
    """The questions; a model without a chat template gets them as they stand, one without a tokenizer a few ids."""
    cases = []
    for number, (domain, question) in enumerate(QUESTIONS.items()):
        prompt: Any = [i % pair.model.target.vocab_size for i in range(1 + number, 9 + number)]
        if pair.tokenizer is not None:
            chat = "default" in pair.tokenizer.chat_templates
            prompt = [{"role": "user", "content": question}] if chat else question
        cases.append(Case([prompt], [SamplingParams()], domain))
    return cases


def _show(console: Any, answers: Mapping[str, Run], names: Sequence[str]) -> None:
    width = (console.width - 1) // len(names)
    panels = []
    for name in names:
        done, label = answers[name], "plain" if name == PLAIN else f"speculative ({name})"
        if done.failure or done.timing is None:
            panels.append(Panel(Text(f"failed: {done.failure}"), title=label, width=width))
            continue
        (answer,) = done.outputs
        foot = f"{output.number(done.timing.tokens_per_second, 1)} tokens/s"
        if name != PLAIN:
            foot += f", accepted length {output.number(answer.stats.accepted_length)}"
        text = answer.text if answer.text is not None else " ".join(map(str, answer.token_ids))
        panels.append(Panel(Text(text), title=label, subtitle=foot, width=width))
    console.print(Columns(panels, padding=(0, 1), expand=False))


def _summary(
    console: Any, pair: Pair, cases: Sequence[Case], policies: Mapping[str, Policy], runs: Sequence[Run]
) -> dict[str, Any]:
    """The table over all answers, and in words whether speculation paid."""
    rows, summaries = [], {}
    for name, policy in policies.items():
        slots = check_policy(policy, pair.model.draft)
        everything = summaries[name] = summarise(runs, name, slots, True, cases)
        speeds = []
        for case in cases:
            one = summarise(runs, name, slots, True, cases, case.domain)
            speeds.append(output.number(one.tokens_per_second, 1))
        rows.append(
            [
                "plain" if name == PLAIN else name,
                *speeds,
                output.number(everything.ratio_of_totals, 2, "x"),
                output.number(everything.accepted_length),
                output.number(everything.verified_length),
            ]
        )
    columns = ("tokens/s", *(case.domain for case in cases), "to plain", "accepted length", "drafts checked")
    console.print(output.table("", columns, rows))
    speculative = {name: s for name, s in summaries.items() if name != PLAIN}
    if speculative:
        same = all(s.same_as_plain is not None and s.same_as_plain == (len(cases), len(cases)) for s in speculative.values())
        console.print(
            "Speculative answers are identical to the plain ones, token for token."
            if same
            else "Speculative answers are NOT all identical to the plain ones: run `dspark doctor` on this pair."
        )
        best, summary = max(speculative.items(), key=lambda item: item[1].ratio_of_totals)
        ratio = summary.ratio_of_totals
        if ratio > 1:
            console.print(f"On this machine {best} decodes {ratio:.2f} times as fast as plain decoding.")
        else:
            console.print(
                f"On this machine speculation does not pay with this draft: the best policy, {best}, runs at {ratio:.2f} times"
                " the speed of plain decoding."
            )
    return {"policies": summaries}


def _runs_json(cases: Sequence[Case], runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {
            "domain": cases[r.case].domain,
            "policy": r.policy,
            "failure": r.failure,
            "tokens_per_second": r.timing.tokens_per_second if r.timing else None,
            "results": [output.result_json(o) for o in r.outputs],
        }
        for r in runs
    ]
