"""Checks of an installation and of a pair: each one sentence on what was found, and where needed one on what to do."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint import deepspec
from dspark_jax.checkpoint.orbax import is_own
from dspark_jax.checkpoint.safetensor_files import open_directory
from dspark_jax.checkpoint.source import LoadedDraft, LoadedTarget, detect, load_draft, load_target
from dspark_jax.checkpoint.tensors import by_canonical_name
from dspark_jax.config import DraftConfig
from dspark_jax.decode import prefill, propose
from dspark_jax.errors import CheckpointError, DsparkError, PairError
from dspark_jax.generate import generate
from dspark_jax.pair import DTYPES, Pair
from dspark_jax.params import count_bytes
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.schedule import Autoregressive, FixedLength
from dspark_jax.state import ERROR, ModelConfig, new_state
from dspark_jax.text import Tokenizer

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"
QUESTION = "What is the capital of France?"
PARITY_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. ``advice`` says what to do about a warning or a failure."""

    name: str
    status: str
    detail: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check function returns when it did not raise."""

    detail: str
    status: str = OK
    advice: str = ""


def check_installation(compile_cache: Path | None) -> Iterator[Check]:
    """Python, packages, devices, numerics and the cache of compiled programs (None: switched off)."""
    yield _check("python", _python)
    yield _check("packages", _packages)
    yield _check("devices", _devices)
    yield _check("numerics", _numerics)
    yield _check("compilation cache", lambda: _compile_cache(compile_cache))


def check_pair(target: str, draft: str | None, dtype: str) -> Iterator[Check]:
    """Everything about a target and its draft. What depends on a failed check is skipped."""
    return _PairDoctor(target, draft, dtype).checks()


def _check(name: str, function: Callable[[], Finding], advice: str = "") -> Check:
    """The sentence of an error becomes the failure."""
    try:
        found = function()
    except DsparkError as error:
        return Check(name, FAIL, str(error), advice)
    except Exception as error:  # what is broken may fail anywhere, and a doctor does not stumble
        return Check(name, FAIL, f"{type(error).__name__}: {error}".splitlines()[0], advice)
    return Check(name, found.status, found.detail, found.advice)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = importlib.metadata.metadata("dspark-jax")["Requires-Python"]
    if not _satisfies(version, wanted):
        return Finding(f"python {version}, but {wanted} is required", FAIL, "install into a supported Python")
    return Finding(f"python {version}")


def _packages() -> Finding:
    found, wrong = [], []
    for line in importlib.metadata.requires("dspark-jax") or []:
        match = re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)$", line)
        if match is None:  # belongs to an extra
            continue
        name, wanted = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if not _satisfies(version, wanted):
            wrong.append(f"{name} {version} is not {wanted.strip()}")
    found.append(f"jaxlib {importlib.metadata.version('jaxlib')}")
    if wrong:
        return Finding("; ".join(wrong), FAIL, "pip install --upgrade dspark-jax brings versions that fit")
    return Finding(", ".join(found))


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version lies in a range written with >= and <, the only signs that pyproject.toml uses."""

    def key(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

    for clause in filter(None, (c.strip() for c in wanted.split(","))):
        at_least = clause.startswith(">=")
        if (key(version) >= key(clause)) != at_least:
            return False
    return True


def _devices() -> Finding:
    devices = jax.devices()
    total = float(jnp.sum(jnp.arange(8, dtype=jnp.float32)))
    detail = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    if total != 28:
        return Finding(f"{detail}: the sum of 0..7 came out as {total}", FAIL, "check the driver and the jax installation")
    return Finding(detail)


def _numerics() -> Finding:
    if jax.config.values["jax_enable_x64"]:
        return Finding("jax_enable_x64 is on", WARN, "unset JAX_ENABLE_X64; it slows everything down and is not tested")
    precision = jax.config.values["jax_default_matmul_precision"]
    return Finding(f"64-bit types are off; matrix products at {precision or 'the default'} precision")


def _compile_cache(directory: Path | None) -> Finding:
    if directory is None:
        return Finding("off: every start compiles anew", WARN, "leave out --no-compilation-cache, or make its folder writable")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        advice = "set DSPARK_CACHE to a folder that can be written"
        return Finding(f"{directory} cannot be written: {error.strerror}", WARN, advice)
    size = sum(f.stat().st_size for f in directory.iterdir() if f.is_file())
    return Finding(f"{directory}, {_size(size)} in {sum(1 for _ in directory.iterdir())} files")


class _Step(NamedTuple):
    """A check of a pair. ``needs``: those that must have passed; ``advice``: what to do when it fails."""

    name: str
    function: Callable[[], Finding]
    needs: tuple[str, ...]
    advice: str = ""


class _PairDoctor:
    """The checks of a pair in order; each stores what later ones need."""

    model: LoadedTarget
    plain: list[int]  # the target's own greedy answer
    config: DraftConfig
    drafter: LoadedDraft
    pair: Pair

    def __init__(self, target: str, draft: str | None, dtype: str) -> None:
        self.target, self.draft, self.dtype = target, draft, dtype
        self.tokenizer: Tokenizer | None = None

    def checks(self) -> Iterator[Check]:
        """Run them. The first failure of a load skips what needs it."""
        steps = [
            _Step("target", self._target, (), "check the path and the files it names"),
            _Step("tokenizer", self._tokenizer, ("target",), "copy the model's tokenizer.json beside its weights"),
            _Step("chat template", self._chat_template, ("tokenizer",), "copy the model's chat_template.jinja, or use --raw"),
            _Step("target decodes", self._target_decodes, ("target",), "the weights are damaged; try another copy"),
        ]
        if self.draft is not None:
            trained = "the draft must be complete, and trained for this very target"
            lost = "the draft was saved before training, or tensors were lost: copy or convert it again"
            bug = "this must never happen in float32: please report it with both checkpoints"
            steps += [
                _Step("draft settings", self._draft_settings, ("target",), trained),
                _Step("mask id", self._mask_id, ("draft settings",)),
                _Step("draft tensors", self._draft_tensors, ("draft settings",), trained),
                _Step("shared embeddings", self._shared, ("draft tensors",), trained),
                _Step("heads", self._heads, ("draft tensors",), lost),
                _Step("proposal", self._proposal, ("target decodes", "draft tensors"), lost),
                _Step("greedy parity", self._parity, ("target decodes", "proposal"), bug),
            ]
        passed: set[str] = set()
        for name, function, needs, advice in steps:
            missing = next((need for need in needs if need not in passed), None)
            if missing is not None:
                yield Check(name, SKIPPED, f"needs {missing!r} to pass")
                continue
            result = _check(name, function, advice)
            if result.status in (OK, WARN):
                passed.add(name)
            yield result

    def _target(self) -> Finding:
        loaded = self.model = load_target(self.target, DTYPES[self.dtype])
        c = loaded.config
        return Finding(
            f"{c.architecture}, {c.num_layers} layers of width {c.hidden_size}, vocabulary {c.vocab_size}, context"
            f" {c.max_positions}, {_size(count_bytes(loaded.params))} in {self.dtype}"
        )

    def _tokenizer(self) -> Finding:
        directory, vocab = self.model.text_dir, self.model.config.vocab_size
        if directory is None:
            return Finding("no tokenizer.json: prompts must be token ids", WARN, "copy the model's tokenizer files beside it")
        tokenizer = Tokenizer.from_directory(directory)
        if tokenizer.vocab_size > vocab:
            raise PairError(f"{directory}/tokenizer.json has {tokenizer.vocab_size} tokens, the target only vocab_size={vocab}")
        self.tokenizer = tokenizer
        stops = self.model.config.eos_token_ids
        detail = f"{tokenizer.vocab_size} tokens for {vocab} rows of the embedding; stops at {list(stops)}"
        if not stops:
            return Finding(detail, WARN, "without eos_token_id in config.json answers run to their token limit")
        missing = set(tokenizer.eos_ids) - set(stops)
        if missing:
            advice = "if answers do not end, add it to eos_token_id in config.json"
            return Finding(f"{detail}, but the tokenizer's eos_token is {sorted(missing)[0]}", WARN, advice)
        return Finding(detail)

    def _chat_template(self) -> Finding:
        if self.tokenizer is None:
            return Finding("no tokenizer", SKIPPED)
        if "default" not in self.tokenizer.chat_templates:
            return Finding(
                "none: prompts are encoded as they stand", WARN, "right for a base model; an instruct model needs one"
            )
        return Finding(f"renders a question as {len(self.tokenizer.encode_chat(QUESTION))} tokens")

    def _prompt(self) -> list[int]:
        """A short prompt that is legal for any model."""
        if self.tokenizer is None:
            return [i % self.model.config.vocab_size for i in range(1, 9)]
        if "default" in self.tokenizer.chat_templates:
            return self.tokenizer.encode_chat(QUESTION)
        return self.tokenizer.encode(QUESTION)

    def _target_decodes(self) -> Finding:
        alone = Pair(ModelConfig(self.model.config), {"target": self.model.params}, DTYPES[self.dtype], None, self.target)
        (answer,) = generate(alone, [self._prompt()], scheduler=Autoregressive(), max_new_tokens=PARITY_TOKENS)
        if answer.finish_reason == "error":
            raise CheckpointError(f"{self.target}: the target's logits are not finite after {len(answer.token_ids)} tokens")
        self.plain = answer.token_ids
        shown = self.plain if self.tokenizer is None else repr(self.tokenizer.decode(self.plain))
        return Finding(f"{len(self.plain)} greedy tokens: {shown}")

    def _draft_settings(self) -> Finding:
        path = Path(self.draft or "")
        kind, _ = detect(path)
        if kind != "draft":
            raise CheckpointError(f"{path} holds a target, not a draft")
        config = self.config = deepspec.read_draft_config(path)
        deepspec.check_pair(config, self.model.config, str(path))
        head = f"{config.markov_head_type} head of rank {config.markov_rank}" if config.markov_rank else "no sequential head"
        confidence = "confidence head" if config.confidence_head else "no confidence head"
        return Finding(
            f"{config.num_layers} layers, block {config.block_size}, taps {list(config.target_layer_ids)} of"
            f" {self.model.config.num_layers} layers, {head}, {confidence}"
        )

    def _mask_id(self) -> Finding:
        mask = self.config.mask_token_id
        if mask in self.model.config.eos_token_ids:
            return Finding(f"{mask} is an end-of-sequence token", WARN, "check mask_token_id in the draft's config.json")
        if self.tokenizer is None:
            return Finding(f"{mask}")
        if mask >= self.tokenizer.vocab_size:
            return Finding(f"{mask}, one of the embedding's rows that no token uses")
        token = self.tokenizer.token(mask)
        if mask not in self.tokenizer.special_ids:
            advice = "check mask_token_id; a token that occurs in texts is an unusual choice"
            return Finding(f"{mask} is the ordinary token {token!r}", WARN, advice)
        return Finding(f"{mask}, {token!r}")

    def _draft_tensors(self) -> Finding:
        loaded = load_draft(self.draft or "", DTYPES[self.dtype], self.model.config, self.model.params)
        self.drafter = loaded
        params = {"target": self.model.params, "draft": loaded.params}
        model = ModelConfig(self.model.config, loaded.config)
        self.pair = Pair(model, params, DTYPES[self.dtype], self.tokenizer, self.target, self.draft)
        count = len(jax.tree.leaves(loaded.params))
        share = 100 * count_bytes(loaded.params) / count_bytes(self.model.params)
        return Finding(f"all {count} parameters present, {_size(count_bytes(loaded.params))}, {share:.0f} % of the target")

    def _shared(self) -> Finding:
        path = Path(self.draft or "")
        if is_own(path):
            return Finding("not part of this form: borrowed from the target")
        carried = [name for name in deepspec.SHARED if name in by_canonical_name(open_directory(path))]
        borrowed = [name for name in deepspec.SHARED if name not in carried]
        parts = [f"{' and '.join(carried)} compared with the target's: equal"] if carried else []
        parts += [f"{' and '.join(borrowed)} borrowed from the target"] if borrowed else []
        return Finding("; ".join(parts))

    def _heads(self) -> Finding:
        sums, dead = [], []
        for name in ("fc", "markov", "confidence"):
            tree = self.drafter.params.get(name)
            if tree is None:
                continue
            leaves = tree.items() if isinstance(tree, dict) else [("", tree)]
            matrices = {f"{name}.{key}".rstrip("."): np.asarray(x, np.float32) for key, x in leaves if key != "bias"}
            dead += [key for key, x in matrices.items() if not np.any(x)]
            sums.append(f"{name} {sum(float(np.abs(x).sum(dtype=np.float64)) for x in matrices.values()):.6g}")
        if dead:
            raise CheckpointError(f"{self.draft}: {', '.join(dead)} holds nothing but zeros")
        norms = [self.drafter.params[key] for key in ("norm", "context_norm")]
        if all(bool(jnp.all(x == 1)) for x in norms):
            advice = "fine right after initialisation; a trained draft has other values: check that training was saved"
            return Finding(f"norms are all ones; sums of magnitudes: {', '.join(sums)}", WARN, advice)
        return Finding(f"sums of magnitudes: {', '.join(sums)}")

    def _proposal(self) -> Finding:
        pair = self.pair
        prompt, block = self._prompt(), self.config.block_size
        limit = len(prompt) + block + 1
        sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=0)])
        state = new_state(pair.model, [prompt], sampling, [limit], (), limit, pair.dtype)
        state = prefill(pair.model, pair.params, state, chunk=32)
        if int(state.status[0]) == ERROR:
            raise CheckpointError(f"{self.target}: the target's logits are not finite after the prompt")
        propose_once = jax.jit(propose, static_argnames=("model", "slots"))
        proposal = propose_once(pair.model, pair.params, state, slots=block, greedy=jnp.asarray(False))
        tokens = np.asarray(proposal.tokens[0])
        # Outside of a reduced draft vocabulary log q is -inf; a row with NaN or without any mass has no finite sum.
        if not bool(jnp.all(jnp.isfinite(jax.nn.logsumexp(proposal.log_q, axis=-1)))):
            raise CheckpointError(f"{self.draft}: the draft's logits are not finite")
        if tokens.min() < 0 or tokens.max() >= pair.model.target.vocab_size:
            raise CheckpointError(f"{self.draft}: proposed token ids {tokens.tolist()} lie outside the vocabulary")
        detail = f"{block} finite rows"
        if proposal.confidence is not None:
            if not bool(jnp.all(jnp.isfinite(proposal.confidence))):
                raise CheckpointError(f"{self.draft}: the confidence logits are not finite")
            detail += ", confidences " + " ".join(f"{x:.2f}" for x in jax.nn.sigmoid(proposal.confidence[0]).tolist())
        return Finding(detail)

    def _parity(self) -> Finding:
        (answer,) = generate(self.pair, [self._prompt()], scheduler=FixedLength(), max_new_tokens=PARITY_TOKENS)
        if answer.token_ids != self.plain:
            at = next((i for i, (a, b) in enumerate(zip(answer.token_ids, self.plain, strict=False)) if a != b), None)
            detail = f"speculative and plain greedy decoding part at token {at} of {len(self.plain)}"
            if self.dtype == "float32":
                raise PairError(detail)
            return Finding(detail, WARN, "rounding of bfloat16 can do that; --dtype float32 must not")
        length = answer.stats.accepted_length
        detail = f"{len(self.plain)} tokens equal plain decoding's; accepted length {length:.2f}"
        if length <= 1.05:
            advice = "the draft does not help on this prompt: see docs on low acceptance, measure with `dspark bench`"
            return Finding(detail, WARN, advice)
        return Finding(detail)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
