"""``dspark train``: conversations in, draft out (SPEC section 6)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.checkpoint.source import LoadedTarget, load_draft, load_target
from dspark_jax.cli import options, output
from dspark_jax.config import HEAD_TYPES, DraftConfig
from dspark_jax.errors import RequestError
from dspark_jax.pair import DTYPES
from dspark_jax.params import Params, count_bytes
from dspark_jax.sharding import make_mesh
from dspark_jax.text import Tokenizer
from dspark_jax.train import start
from dspark_jax.train.checkpoints import Checkpoints
from dspark_jax.train.features import FeatureCache, cache_bytes, make_cache
from dspark_jax.train.loop import Settings, Task, Trainer
from dspark_jax.train.objective import Objective
from dspark_jax.train.rows import Example, Report, load_examples
from dspark_jax.train.step import Optimizer


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a draft for a target on conversations",
        description="Train a draft. May be killed at any time; the same command goes on from the latest checkpoint. The"
        " result is --out/draft, in DeepSpec form.",
    )
    add = parser.add_argument
    add("--target", required=True, metavar="NAME|PATH", help="as for generate")
    add("--data", required=True, nargs="+", metavar="FILE", help="JSONL: 'messages', or 'prompt' and 'response'")
    add("--out", required=True, metavar="DIR", help="checkpoints, log and the finished draft")
    options.add_cache(parser)

    group = parser.add_argument_group("draft (ignored with --init)")
    add = group.add_argument
    add("--init", metavar="DIR", help="start from this draft (DeepSpec or own form) instead of a new one")
    add("--layers", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--block-size", type=int, default=7, metavar="N", help="default: %(default)s")
    add("--taps", type=int, nargs="+", metavar="L", help="target layers, rising; -1 is the embedding (default: five, spread)")
    add("--mask-id", type=int, metavar="ID", help="token of the slots behind the anchor; one that text never holds")
    add("--markov-rank", type=int, default=256, metavar="R", help="0: no sequential head, which is DFlash (default: 256)")
    add("--markov-head", choices=HEAD_TYPES, default="vanilla", help="default: %(default)s")
    add("--no-confidence", action="store_true", help="no confidence head")
    add("--confidence-without-markov", action="store_true", help="the confidence head sees the hidden state alone")
    add("--draft-vocab", type=int, metavar="N", help="draft only the N most frequent ids of the data (default: all)")
    add("--fresh", action="store_true", help="random layers (default: copies of the target's last ones)")

    group = parser.add_argument_group("objective")
    add = group.add_argument
    add("--ce-weight", type=float, default=0.1, metavar="W", help="cross-entropy with the labels (default: 0.1)")
    add("--l1-weight", type=float, default=0.9, metavar="W", help="distance to the target's distribution (default: 0.9)")
    add("--confidence-weight", type=float, default=1.0, metavar="W", help="default: %(default)s")
    add("--decay", type=float, default=4.0, metavar="λ", help="slot k weighs exp(-(k-1)/λ) (default: 4)")
    add("--detach-confidence", action="store_true", help="keep the confidence loss out of the drafter's body")
    add("--slots", type=int, metavar="N", help="train only the first N slots of a block (default: all)")

    group = parser.add_argument_group("optimiser")
    add = group.add_argument
    add("--steps", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--lr", type=float, default=6e-4, metavar="X", help="peak learning rate (default: 6e-4)")
    add("--warmup", type=float, default=0.04, metavar="P", help="share of the steps (default: 0.04)")
    add("--final-lr", type=float, default=0.0, metavar="P", help="share of the peak at the end of the cosine (default: 0)")
    add("--clip", type=float, default=1.0, metavar="X", help="norm of the gradient (default: 1)")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="default: 0")
    add("--beta2", type=float, default=0.999, metavar="X", help="default: 0.999")

    group = parser.add_argument_group("batches")
    add = group.add_argument
    add("--anchors", type=int, default=40, metavar="N", help="blocks of one conversation (default: %(default)s)")
    add("--rows", type=int, default=8, metavar="N", help="most conversations in a microbatch (default: %(default)s)")
    add("--tokens", type=int, default=2048, metavar="N", help="most tokens in a microbatch (default: %(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="microbatches a step and data shard (default: 1)")
    add("--max-length", type=int, default=512, metavar="N", help="longer conversations are cut (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="the first N usable conversations (default: all)")
    add("--held-out", type=int, default=0, metavar="N", help="conversations kept away for the curve (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--dtype", choices=sorted(DTYPES), default="float32", help="of the computation; masters are float32 (default)")
    add("--mesh", metavar="DATAxMODEL", help="devices, e.g. 4x2 (default: one)")

    group = parser.add_argument_group("features of the target")
    add = group.add_argument
    add("--cache", metavar="DIR", help="compute features once and keep them here (default: anew in every step)")
    add("--cache-dtype", choices=sorted(DTYPES), default="float32", help="of what is kept (default: %(default)s)")

    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints (default: %(default)s)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints kept (default: %(default)s)")
    add("--log-every", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--eval-every", type=int, default=200, metavar="N", help="steps between measures of unseen text (default: 200)")
    add("--stop-after", type=float, metavar="MINUTES", help="stop at a checkpoint after this time (default: never)")
    add("--export-dtype", choices=sorted(DTYPES), default="bfloat16", help="of the finished draft (default: %(default)s)")
    add("--include-shared", action="store_true", help="store the target's embedding and LM head with the draft")
    add("--json", action="store_true", help="one JSON object as the last line of stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    _check(args)
    optimizer = Optimizer(args.lr, args.steps, args.warmup, args.final_lr, args.clip, args.weight_decay, b2=args.beta2)
    objective = Objective(args.ce_weight, args.l1_weight, args.confidence_weight, args.decay, args.detach_confidence)
    data, model = _mesh(args.mesh)
    mesh = make_mesh(data, model) if data * model > 1 else None
    options.use_compilation_cache(args)
    console = output.console(stderr=True)
    with output.progress(f"loading {args.target}"):
        target = load_target(args.target, DTYPES[args.dtype])
        if target.text_dir is None:
            raise RequestError(f"--target={args.target} has no tokenizer.json, which training text needs")
        tokenizer = Tokenizer.from_directory(target.text_dir)
        examples, report = load_examples(args.data, tokenizer, args.max_length, limit=args.limit)
    console.print(str(report), highlight=False)
    config, kept, first = _draft(args, target, examples)
    slots = args.slots if args.slots is not None else config.block_size
    settings = Settings(
        optimizer, objective, slots, args.anchors, args.tokens, args.rows, args.accumulate * data, args.held_out, args.seed,
        args.dtype,
    )  # fmt: skip
    train, held = start.split(len(examples), args.held_out, args.seed)
    task = Task(target.config, target.params, config, examples, train, held, kept, None, mesh)
    Trainer(task, settings)  # refuses what does not fit before anything is computed
    checkpoints = Checkpoints(args.out, _record(args, settings, config, report), args.keep, args.save_every)
    if args.cache:
        task = dataclasses.replace(task, cache=_cache(args, target, examples, config, console))
    trainer = Trainer(task, settings)
    state = trainer.initial(first)
    del first
    console.print(
        f"parameters {count_bytes(state.params) / 2**20:.1f} MiB, optimiser {count_bytes(state.moments) / 2**20:.1f} MiB;"
        f" {settings.optimizer.steps} steps of {settings.microbatches} x at most {settings.tokens} tokens",
        highlight=False,
    )
    started = time.monotonic()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console, disable=not console.is_terminal) as bar:
        job = bar.add_task("training", total=optimizer.steps, text="", completed=checkpoints.latest or 0)

        def progress(step: int, entry: dict[str, Any]) -> None:
            text = _line(entry)
            bar.update(job, completed=step, text=text)
            if not console.is_terminal:
                console.print(f"step {step}/{optimizer.steps}  {text}", highlight=False)

        stop = None if args.stop_after is None else args.stop_after * 60
        state = trainer.run(
            state, checkpoints, log_every=args.log_every, eval_every=args.eval_every, progress=progress, stop_after=stop
        )
    step = int(state.step)
    draft = Path(args.out) / "draft"
    trainer.export(state, draft, args.export_dtype, args.include_shared)
    finished = step == optimizer.steps
    console.print(f"{'finished' if finished else 'stopped'} at step {step}; draft in {draft}", highlight=False)
    if args.json:
        last = json.loads((Path(args.out) / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        seconds = time.monotonic() - started
        print(json.dumps({"step": step, "finished": finished, "seconds": seconds, "draft": str(draft), "last": last}))
    return 0


def _line(entry: dict[str, Any]) -> str:
    text = f"loss {entry['loss']:.3f}  accepted length {entry['accepted_length']:.2f}"
    if entry.get("unseen"):
        text += f" (unseen {entry['unseen']['accepted_length']:.2f})"
    return f"{text}  {entry['seconds']:.2f} s/step"


def _check(args: argparse.Namespace) -> None:
    least = {
        "layers": 1, "block_size": 1, "markov_rank": 0, "steps": 1, "anchors": 1, "rows": 1, "tokens": 2, "accumulate": 1,
        "max_length": 2, "held_out": 0, "save_every": 1, "keep": 1, "log_every": 1, "eval_every": 1, "slots": 1, "limit": 1,
        "ce_weight": 0, "l1_weight": 0, "confidence_weight": 0,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            raise RequestError(f"--{name.replace('_', '-')}={value} must be at least {low}")
    if not args.decay > 0:
        raise RequestError(f"--decay={args.decay} must be above 0")
    if args.ce_weight + args.l1_weight == 0:
        raise RequestError("--ce-weight=0 and --l1-weight=0: nothing would be trained")
    if args.init is None and args.mask_id is None:
        raise RequestError("--mask-id is missing: a token id that text never holds, for the slots behind the anchor")
    if args.max_length > args.tokens:
        raise RequestError(f"--max-length={args.max_length} must be at most --tokens={args.tokens}")
    out = Path(args.out)
    if out.is_file():
        raise RequestError(f"--out={out} is a file; a run needs a directory")


def _mesh(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    data, cross, model = text.partition("x")
    if not cross or not data.isdigit() or not model.isdigit():
        raise RequestError(f"--mesh={text!r} must be DATAxMODEL, two numbers such as 4x2")
    return int(data), int(model)


def _draft(
    args: argparse.Namespace, target: LoadedTarget, examples: list[Example]
) -> tuple[DraftConfig, np.ndarray | None, Params]:
    """Configuration, kept ids and initial parameters, from ``--init`` or made new."""
    if args.init is not None:
        loaded = load_draft(args.init, jnp.float32, target.config, target.params)
        params = {k: v for k, v in loaded.params.items() if k != "vocabulary"}
        kept = np.asarray(loaded.params["vocabulary"]) if "vocabulary" in loaded.params else None
        return loaded.config, kept, params
    config = start.new_draft_config(
        target.config,
        layers=args.layers,
        block_size=args.block_size,
        mask_token_id=args.mask_id,
        taps=args.taps,
        rank=args.markov_rank,
        head=args.markov_head,
        confidence=not args.no_confidence,
        confidence_with_markov=not args.confidence_without_markov,
        draft_vocab_size=args.draft_vocab,
        anchors=args.anchors,
    )
    kept = None
    if args.draft_vocab is not None:
        kept = start.choose_vocabulary(examples, args.draft_vocab, config.vocab_size, target.config.eos_token_ids)
    return config, kept, start.initial_params(config, target.params, target.config, args.seed, args.fresh)


def _record(args: argparse.Namespace, settings: Settings, config: DraftConfig, report: Report) -> dict[str, Any]:
    """What a resumed run must share."""
    return {
        "target": args.target,
        "data": [str(p) for p in args.data],
        "conversations": report.used,
        "tokens": report.tokens,
        "init": args.init,
        "fresh": args.fresh,
        "settings": dataclasses.asdict(settings),
        "draft": dataclasses.asdict(config),
    }


def _cache(
    args: argparse.Namespace, target: LoadedTarget, examples: list[Example], config: DraftConfig, console: Any
) -> FeatureCache:
    taps = config.target_layer_ids
    total = sum(len(e.tokens) for e in examples)
    dtype = DTYPES[args.cache_dtype]
    need = cache_bytes(total, target.config, len(taps), np.dtype(dtype))
    console.print(
        f"feature cache {args.cache}: {total} tokens x {len(taps) + 1} layers x {target.config.hidden_size} numbers"
        f" ({args.cache_dtype}) = {need / 2**30:.2f} GiB",
        highlight=False,
    )
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        job = bar.add_task("features", total=len(examples))
        return make_cache(
            args.cache, target.params, target.config, args.target, examples, taps, args.cache_dtype,
            progress=lambda done, _: bar.update(job, completed=done),
        )  # fmt: skip
