"""``dspark generate``: answer prompts and say how it went."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from dspark_jax.bench import timed_generate
from dspark_jax.cli import options, output
from dspark_jax.errors import RequestError
from dspark_jax.generate import stream
from dspark_jax.pair import Pair
from dspark_jax.requests import Output, Prompt

HELP = "answer prompts"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate", help=HELP, description="Answer prompts. Without --prompt and --prompts the prompt is read from stdin."
    )
    options.add_model(parser)
    group = parser.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-ids", metavar="IDS", help="token ids, separated by commas; for targets without tokenizer")
    source.add_argument("--prompts", metavar="FILE", help=".jsonl (objects with 'prompt' or 'messages') or one prompt a line")
    options.add_text(group)
    options.add_sampling(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--policy", metavar="POLICY", help=f"{options.POLICY_FORMS} (default: fixed, or ar without a draft)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="prompts decoded together (default: all, at most 16)")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print text as rounds complete (default: for a single prompt on a terminal)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    options.settle_draft(args)
    policy = options.parse_policy(args.policy) if args.policy else None
    prompts = _prompts(args)
    sampling = options.sampling_for(args, len(prompts))
    if args.stream and len(prompts) > 1:
        raise RequestError(f"--stream needs a single prompt, got {len(prompts)}")
    streaming = args.stream if args.stream is not None else len(prompts) == 1 and sys.stdout.isatty() and not args.json
    options.check_policies([(args.policy, policy)] if policy else [], args.draft)
    options.use_compilation_cache(args)
    with output.progress(f"loading {args.target}" + (f" and {args.draft}" if args.draft else "")):
        pair = options.load(args)
    loaded = time.perf_counter()
    rows = [options.as_prompt(pair, row.prompt, args) for row in prompts]
    call: dict[str, Any] = dict(
        sampling=sampling, scheduler=policy, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
    )
    outputs, facts = _streamed(pair, rows, call) if streaming else _at_once(pair, rows, call)
    facts = {"load_seconds": loaded - started, **facts, "total_seconds": time.perf_counter() - started}
    if not streaming:
        for index, answer in enumerate(outputs):
            if len(outputs) > 1:
                print(f"--- prompt {index + 1}")
            print(_text(answer))
    _report(outputs, facts)
    if args.json:
        output.print_json(
            {"results": [output.result_json(o) for o in outputs], **facts, "dtype": args.dtype, **options.machine()}
        )
    return 1 if any(o.finish_reason == "error" for o in outputs) else 0


def _prompts(args: argparse.Namespace) -> list[options.PromptRow]:
    if args.prompts is not None:
        return options.read_prompts(args.prompts, args.raw)
    if args.prompt_ids is not None:
        try:
            return [options.PromptRow([int(i) for i in args.prompt_ids.split(",")])]
        except ValueError:
            raise RequestError(f"--prompt-ids={args.prompt_ids!r} must be integers separated by commas") from None
    if args.prompt is not None:
        return [options.PromptRow(options.check_text(args.prompt, f"--prompt={args.prompt!r}", args.raw))]
    if sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt, --prompts or --prompt-ids, or pipe text into stdin")
    text = sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise RequestError("no prompt: stdin is empty")
    return [options.PromptRow(text)]


def _text(answer: Output) -> str:
    return answer.text if answer.text is not None else " ".join(map(str, answer.token_ids))


def _at_once(pair: Pair, rows: Sequence[Prompt], call: dict[str, Any]) -> tuple[list[Output], dict[str, Any]]:
    with output.progress("decoding"):
        timed = timed_generate(pair, rows, **call)
    first = timed.timings[0]
    return timed.outputs, {
        "tokens_per_second": timed.tokens_per_second,
        "first_token_seconds": first.prefill_seconds,
        "prefill_seconds": sum(t.prefill_seconds for t in timed.timings),
        "compile_seconds": sum(t.compile_seconds for t in timed.timings),
        "decode_seconds": sum(t.decode_seconds for t in timed.timings),
    }


def _streamed(pair: Pair, rows: Sequence[Prompt], call: dict[str, Any]) -> tuple[list[Output], dict[str, Any]]:
    """The first update follows the prefill, the second one also waits for the loop's program: speed counts from there."""
    begun, clock, counts, final = time.perf_counter(), [], [], None
    for delta in stream(pair, rows, **call):
        clock.append(time.perf_counter())
        counts.append(len(delta.token_ids))
        shown = delta.text if pair.tokenizer is not None else "".join(f"{i} " for i in delta.token_ids)
        print(shown, end="", flush=True)
        final = delta.output or final
    print(flush=True)
    assert final is not None  # a stream ends with the answer
    steady = clock[-1] - clock[1] if len(clock) > 2 else 0.0
    return [final], {
        "tokens_per_second": sum(counts[2:]) / steady if steady else float("nan"),
        "first_token_seconds": clock[0] - begun,
        "prefill_seconds": clock[0] - begun,
        "decode_seconds": clock[-1] - clock[0],
    }


def _report(outputs: Sequence[Output], facts: dict[str, Any]) -> None:
    """A line for every answer on stderr, and one on speed."""
    for index, answer in enumerate(outputs):
        stats, name = answer.stats, f"{index + 1}: " if len(outputs) > 1 else ""
        line = f"[{name}{answer.finish_reason}, {stats.prompt_tokens} + {stats.new_tokens} tokens, {stats.rounds} rounds"
        if any(answer.verified_per_round):
            line += f", accepted length {output.number(stats.accepted_length)}"
            line += f", acceptance by position {output.percentages(stats.acceptance_by_position)}"
        print(line + "]", file=sys.stderr)
    speed, first, load = (facts[name] for name in ("tokens_per_second", "first_token_seconds", "load_seconds"))
    print(
        f"[{output.number(speed, 1)} tokens/s; first token after {output.number(first)} s, loading {output.number(load)} s]",
        file=sys.stderr,
    )
