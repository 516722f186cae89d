"""Training on toys: which slots count, what a block may see, equal gradients however a batch is cut, exact resumption."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import draft_config, target_config

from dspark_jax import FixedLength, decode
from dspark_jax.errors import CheckpointError, ConfigError, RequestError
from dspark_jax.heads import propose
from dspark_jax.pair import Pair
from dspark_jax.params import draft_specs, init_params, target_specs
from dspark_jax.sampling import SamplingParams, SamplingState
from dspark_jax.sharding import make_mesh
from dspark_jax.state import ModelConfig, new_state
from dspark_jax.train import objective, start
from dspark_jax.train.batches import Shape, build, sample_anchors, slot_mask
from dspark_jax.train.checkpoints import Checkpoints
from dspark_jax.train.features import Features, features_of, make_cache
from dspark_jax.train.loop import Settings, Task, Trainer
from dspark_jax.train.objective import Frozen, Objective
from dspark_jax.train.rows import Example, anchor_candidates
from dspark_jax.train.step import Optimizer, Setup, gradients

TARGET = target_config()
DRAFT = draft_config(TARGET)
KEPT = np.asarray([1, 4, 5, 9, 12, 20, 21, 33], np.int32)


TARGET_PARAMS = jax.jit(lambda: init_params(target_specs(TARGET), jax.random.key(0), jnp.float32, 0.25))()


@functools.cache
def _params_of(config, seed: int):
    specs = draft_specs(config)
    specs.pop("vocabulary", None)
    return jax.jit(lambda: init_params(specs, jax.random.key(seed), jnp.float32, 0.25))()


def params_of(config, seed: int = 1):
    return jax.tree.map(lambda x: x, _params_of(config, seed))


def frozen(kept=None) -> Frozen:
    target = TARGET_PARAMS
    head = target["head"]
    return Frozen(target["embed"], head) if kept is None else Frozen(target["embed"], head[kept], jnp.asarray(kept))


def examples(count: int = 6, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(9, 26))
        mask = np.arange(n) >= rng.integers(2, 6)
        if i % 3 == 2:
            mask[n // 2] = False  # a gap
        out.append(Example(rng.integers(0, TARGET.vocab_size - 1, n).astype(np.int32), mask, i))
    return out


def laid_out(chosen, anchors, **changes):
    shape = dict(rows=len(chosen), tokens=sum(len(e.tokens) for e in chosen), blocks=sum(map(len, anchors)), slots=4, length=32)
    shape |= {"ranks": max(map(len, anchors))} | changes
    return jax.tree.map(jnp.asarray, build(chosen, anchors, Shape(**shape)))


@jax.jit
def features(batch) -> Features:
    return features_of(batch, TARGET_PARAMS, TARGET, DRAFT.target_layer_ids)


@functools.partial(jax.jit, static_argnames=("config", "weights"))
def value_and_grad(params, batch, feats, fro, config, weights):
    def loss(params):
        sums = objective.loss_sums(params, config, weights, fro, TARGET_PARAMS["head"], batch, feats)
        return objective.total_loss(sums, weights, *objective.denominators(batch, weights, fro.kept)), sums

    return jax.value_and_grad(loss, has_aux=True)(params)


def losses(batch, params=None, config=DRAFT, weights=None, kept=None):
    """Loss, sums and gradient."""
    params = params_of(config) if params is None else params
    (loss, sums), grads = value_and_grad(params, batch, features(batch), frozen(kept), config, weights or Objective())
    return loss, sums, grads


@functools.partial(jax.jit, static_argnames=("config",))
def forward(params, config, fro, batch, taps):
    return objective.forward(params, config, fro, batch, taps)


class TestAnchors:
    def test_a_slot_is_judged_by_the_token_it_predicts(self) -> None:
        """PITFALLS T01: supervised 8..39, block 4, anchor 37: two labels are left."""
        mask = np.zeros(48, bool)
        mask[8:40] = True
        assert slot_mask(mask, np.asarray([37, 8]), 4).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
        assert np.flatnonzero(anchor_candidates(mask)).tolist() == list(range(8, 39))

    def test_a_gap_ends_a_block(self) -> None:
        mask = np.ones(12, bool)
        mask[5] = False
        assert slot_mask(mask, np.asarray([3]), 4).tolist() == [[1, 0, 0, 0]]

    @pytest.mark.parametrize("mask", [[], [True], [False] * 5, [False, True, False]])
    def test_no_two_supervised_tokens_no_anchor(self, mask) -> None:
        assert len(sample_anchors(np.asarray(mask, bool), 4, np.random.default_rng(0))) == 0

    def test_sorted_distinct_and_at_most_as_many_as_asked(self) -> None:
        mask = np.ones(30, bool)
        got = sample_anchors(mask, 7, np.random.default_rng(0))
        assert len(set(got.tolist())) == 7 and (np.diff(got) > 0).all()
        assert len(sample_anchors(mask, 99, np.random.default_rng(0))) == 29

    def test_slot_weights_start_at_one(self) -> None:
        """PITFALLS A04."""
        batch = laid_out(examples(1), [np.asarray([6])])
        np.testing.assert_allclose(objective.slot_weights(batch, 4.0)[0], np.exp(-np.arange(4) / 4), rtol=1e-6)


class TestObjective:
    def test_dummies_contribute_nothing(self) -> None:
        """PITFALLS T03, T12: more dummies, same loss and gradient; everything stays finite."""
        chosen = examples(2)
        plain = laid_out(chosen, [np.asarray([6, 7]), np.asarray([8])])
        padded = laid_out(chosen, [np.asarray([6, 7, -1]), np.asarray([-1, 8])], blocks=9, ranks=5, rows=4, tokens=90)
        ours, theirs = losses(padded), losses(plain)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours[2], theirs[2])

    def test_without_an_anchor_loss_and_gradient_are_zero(self) -> None:
        """PITFALLS T02, T06."""
        batch = laid_out(examples(1), [np.asarray([-1, -1])])
        value, _, grads = losses(batch)
        assert float(value) == 0.0
        assert all(float(jnp.abs(g).max()) == 0.0 for g in jax.tree.leaves(grads))

    def test_a_block_sees_features_before_its_anchor_only(self) -> None:
        """PITFALLS T10."""
        batch = laid_out(examples(1), [np.asarray([7, 12])])
        taps = features(batch).taps

        def logits(taps):
            return forward(params_of(DRAFT), DRAFT, frozen(), batch, taps).logits

        base = logits(taps)
        changed = logits(taps.at[12:].add(3.0))
        np.testing.assert_array_equal(changed, base)
        changed = logits(taps.at[7:].add(3.0))
        np.testing.assert_array_equal(changed[0], base[0])
        assert float(jnp.abs(changed[1] - base[1]).max()) > 1e-3
        assert float(jnp.abs(logits(taps.at[6].add(3.0)) - base).max(axis=(1, 2)).min()) > 1e-4

    def test_packed_conversations_do_not_see_each_other(self) -> None:
        chosen, anchors = examples(3), [np.asarray([6, 7]), np.asarray([8]), np.asarray([5, 6, 7])]
        together = laid_out(chosen, anchors, tokens=100, rows=5)
        out = forward(params_of(DRAFT), DRAFT, frozen(), together, features(together).taps).logits
        at = 0
        for example, where in zip(chosen, anchors, strict=True):
            alone = laid_out([example], [where])
            one = forward(params_of(DRAFT), DRAFT, frozen(), alone, features(alone).taps).logits
            np.testing.assert_allclose(out[at : at + len(where)], one, atol=2e-5)
            at += len(where)

    @pytest.mark.parametrize("head, windows", [("vanilla", (0, 0)), ("gated", (3, 0)), ("rnn", (6, 2))])
    def test_training_and_serving_give_the_same_logits(self, head: str, windows: tuple[int, int]) -> None:
        """PITFALLS T19, A03: one stored conversation, one anchor, the whole block."""
        config = draft_config(TARGET, markov_head_type=head, windows=windows)
        params = params_of(config)
        (example,) = examples(1)
        anchor = 8
        batch = laid_out([example], [np.asarray([anchor])])
        trained = forward(params, config, frozen(), batch, features(batch).taps)
        model = ModelConfig(TARGET, config)
        state = new_state(
            model, [example.tokens[:anchor].tolist()], SamplingState.from_params([SamplingParams()]), [40], (), 64, jnp.float32
        )
        state = decode.prefill(model, {"target": TARGET_PARAMS, "draft": params}, state, chunk=32)
        tokens = jnp.asarray(example.tokens)

        @jax.jit
        def served(cache):
            hidden = decode.draft.block_hidden(
                params, config, TARGET_PARAMS["embed"], tokens[anchor][None], jnp.asarray([anchor], jnp.int32), cache
            )
            base = decode.target.unembed(TARGET_PARAMS, hidden)
            return propose(
                params, config, hidden, base, tokens[anchor][None], lambda slot, x: (tokens[anchor + 1 + slot][None], x)
            )

        proposal = served(state.draft_context)
        np.testing.assert_allclose(trained.logits[0], proposal.log_q[0], atol=1e-4)
        np.testing.assert_allclose(trained.confidence[0], proposal.confidence[0], atol=1e-4)

    def test_a_detached_confidence_loss_stays_out_of_the_body(self) -> None:
        """PITFALLS C06."""
        batch = laid_out(examples(1), [np.asarray([6, 9])])
        for detach in (True, False):
            weights = Objective(0.0, 0.0, 1.0, detach_confidence=detach)
            grads = losses(batch, weights=weights)[2]
            body = max(float(jnp.abs(g).max()) for k in ("fc", "layers", "norm", "markov") for g in jax.tree.leaves(grads[k]))
            assert (body == 0.0) == detach
            assert float(jnp.abs(grads["confidence"]["proj"]).max()) > 0

    def test_losses_are_computed_in_float32(self) -> None:
        """PITFALLS T09: bfloat16 logits, a drafter close to its teacher."""
        batch = laid_out(examples(1), [np.asarray([6, 9])])
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params_of(DRAFT), frozen(), features(batch)))
        run = functools.partial(objective.loss_sums, cfg=DRAFT, objective=Objective())
        sums = jax.eval_shape(
            lambda p, f, x: run(p, frozen=f, target_head=f.head, batch=batch, features=x), half[0], half[1], half[2]
        )
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(sums))

    def test_reduced_vocabulary_is_the_full_one_with_q_zero_outside(self) -> None:
        config = draft_config(TARGET, draft_vocab_size=len(KEPT))
        params = params_of(config)
        batch = laid_out(examples(2), [np.asarray([6, 9]), np.asarray([7])])
        feats = features(batch)
        out = forward(params, config, frozen(KEPT), batch, feats.taps)
        sums = losses(batch, params, config, kept=KEPT)[1]
        q = np.zeros((3, 4, TARGET.vocab_size))
        q[..., KEPT] = np.asarray(jax.nn.softmax(out.logits, axis=-1))
        logits = np.asarray(decode.target.unembed(TARGET_PARAMS, feats.hidden))
        p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
        p = p[np.asarray(batch.teacher_positions)[np.asarray(batch.teacher)]]
        weights = np.asarray(objective.slot_weights(batch, 4.0))
        np.testing.assert_allclose(sums.distance, (weights * np.abs(q - p).sum(-1)).sum(), rtol=1e-4)
        labels, known = np.asarray(batch.labels), np.isin(np.asarray(batch.labels), KEPT)
        assert 0 < known.sum() < known.size
        ce = -np.log(np.take_along_axis(q, labels[..., None], -1)[..., 0] + 1e-300)
        np.testing.assert_allclose(sums.ce, (weights * ce)[known].sum(), rtol=1e-4)
        np.testing.assert_allclose(sums.ce_weight, weights[known].sum(), rtol=1e-5)


class TestGradients:
    def parts(self):
        chosen = examples(8)
        anchors = [sample_anchors(e.mask, 1 + i % 3, np.random.default_rng(i)) for i, e in enumerate(chosen)]
        return chosen, anchors

    def grads(self, groups: int, shards: int):
        chosen, anchors = self.parts()
        pieces = groups * shards
        size = len(chosen) // pieces
        shape = Shape(size, 32 * size, 4 * size, 4, 32, 4)
        made = [build(chosen[i * size : (i + 1) * size], anchors[i * size : (i + 1) * size], shape) for i in range(pieces)]
        batches = jax.tree.map(lambda *x: np.stack(x).reshape(groups, shards, *x[0].shape), *made)
        setup = Setup(DRAFT, Objective(), Optimizer(), jnp.float32, TARGET)
        if shards > 1:
            mesh = make_mesh(shards, 2)
            where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
            batches = jax.device_put(batches, where)
        run = jax.jit(gradients, static_argnames=("setup",))
        return run(setup, params_of(DRAFT), frozen(), TARGET_PARAMS, batches, None)

    def test_accumulation_and_sharding_change_nothing(self) -> None:
        """PITFALLS T05: ragged masks; one batch, four microbatches, four devices."""
        whole = self.grads(1, 1)
        for groups, shards in ((4, 1), (1, 4), (2, 4)):
            other = self.grads(groups, shards)
            np.testing.assert_allclose(other[1], whole[1], rtol=1e-6)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other[0], whole[0])


def trainer(steps: int = 20, config=DRAFT, kept=None, mesh=None, cache=None, data=None, **changes) -> Trainer:
    data = examples() if data is None else data
    settings = Settings(Optimizer(1e-2, steps, warmup=0.3), Objective(), slots=4, anchors=3, tokens=64, rows=3, microbatches=2)
    task = Task(TARGET, TARGET_PARAMS, config, data, np.arange(len(data)), np.arange(0), kept, cache, mesh)
    return Trainer(task, dataclasses.replace(settings, **changes))


class TestRun:
    SETTINGS = {"a": 1}  # noqa: RUF012 (never changed)

    def run(self, path, steps_now: int | None = None, mesh=None):
        """Train 20 steps, or until a checkpoint at ``steps_now`` is written and the process is gone."""
        t = trainer(mesh=mesh)
        checkpoints = Checkpoints(path, self.SETTINGS, save_every=1)
        state = t.initial(params_of(DRAFT))
        if steps_now is None:
            return t.run(state, checkpoints, log_every=5)
        for step in range(steps_now):
            state, _ = t.step(state, *t.batches(step))
        checkpoints.save(state, steps_now, force=True)
        checkpoints.close()
        return state

    @pytest.mark.parametrize("cut", [4, 11])  # warm-up ends at step 6
    def test_a_resumed_run_is_the_same_run(self, tmp_path, cut: int) -> None:
        """PITFALLS T13: parameters, moments, counters, bit for bit."""
        whole = self.run(tmp_path / "whole")
        self.run(tmp_path / "cut", cut)
        resumed = self.run(tmp_path / "cut")
        assert int(resumed.step) == 20
        jax.tree.map(np.testing.assert_array_equal, resumed, whole)

    def test_a_run_resumes_on_another_number_of_devices(self, tmp_path) -> None:
        whole = self.run(tmp_path / "whole")
        self.run(tmp_path / "cut", 11)
        resumed = self.run(tmp_path / "cut", mesh=make_mesh(2, 2))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), resumed.params, whole.params)
        assert resumed.params["layers"]["gate"].sharding.num_devices == 4

    def test_other_settings_are_refused(self, tmp_path) -> None:
        Checkpoints(tmp_path, {"lr": 1.0}).close()
        with pytest.raises(CheckpointError, match=r"lr=1.0.*lr=2.0"):
            Checkpoints(tmp_path, {"lr": 2.0})

    def test_a_half_written_step_is_not_the_latest(self, tmp_path) -> None:
        self.run(tmp_path, 4)
        step = next((tmp_path / "steps").glob("4*"))
        (tmp_path / "steps" / "9.orbax-checkpoint-tmp").mkdir()
        assert Checkpoints(tmp_path, self.SETTINGS).latest == 4
        assert step.is_dir()

    def test_the_log_drops_what_lies_behind_the_checkpoint(self, tmp_path) -> None:
        self.run(tmp_path, 11)
        (tmp_path / "log.jsonl").write_text('{"step": 10}\n{"step": 15}\n{"ste')
        self.run(tmp_path)
        import json

        steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert steps == [10, 15, 20]

    def test_embedding_and_head_are_not_trained(self, tmp_path) -> None:
        """PITFALLS T08: no leaf of the state has their size, and the export carries the target's bits."""
        t = trainer(steps=3)
        state = t.initial(params_of(DRAFT))
        embed = np.asarray(TARGET_PARAMS["embed"]).copy()
        for step in range(3):
            state, _ = t.step(state, *t.batches(step))
        assert not any(x.shape == embed.shape for x in jax.tree.leaves(state))
        np.testing.assert_array_equal(TARGET_PARAMS["embed"], embed)
        from dspark_jax.checkpoint.deepspec import load_draft

        t.export(state, tmp_path / "draft", "float32", shared=True)
        config, back = load_draft(tmp_path / "draft", "float32", TARGET, TARGET_PARAMS)
        assert config == DRAFT
        jax.tree.map(np.testing.assert_array_equal, back, state.params)

    @pytest.mark.parametrize("kept", [None, KEPT])
    def test_cached_features_give_the_same_run(self, tmp_path, kept) -> None:
        """PITFALLS T17, T23."""
        config = DRAFT if kept is None else draft_config(TARGET, draft_vocab_size=len(kept))
        data = examples()
        cache = make_cache(tmp_path, TARGET_PARAMS, TARGET, "toy", data, DRAFT.target_layer_ids, tokens=50)
        online, cached = (trainer(config=config, kept=kept, cache=c) for c in (None, cache))
        states = [t.initial(params_of(config)) for t in (online, cached)]
        for step in range(2):
            losses = []
            for i, t in enumerate((online, cached)):
                states[i], report = t.step(states[i], *t.batches(step))
                losses.append(float(report.loss))
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_a_cache_of_other_data_is_refused_and_an_interrupted_one_goes_on(self, tmp_path) -> None:
        data = examples(60)
        seen = []

        def stop(done: int, total: int) -> None:
            seen.append(done)
            if len(seen) == 2:
                raise KeyboardInterrupt

        make = functools.partial(make_cache, tmp_path, TARGET_PARAMS, TARGET, "toy", tap_ids=(0,), tokens=40)
        with pytest.raises(KeyboardInterrupt):
            make(examples=data, progress=stop)
        again = []
        cache = make(examples=data, progress=lambda done, _: again.append(done))
        assert again[0] > seen[-1] and again[-1] == len(data)
        whole = make_cache(tmp_path / "b", TARGET_PARAMS, TARGET, "toy", data, (0,), tokens=40)
        for row in range(0, len(data), 7):
            np.testing.assert_array_equal(cache.read([row], 32, np.float32).taps, whole.read([row], 32, np.float32).taps)
        with pytest.raises(RequestError, match="other data"):
            make(examples=examples(seed=5))

    def test_batches_depend_on_seed_and_step_alone(self) -> None:
        a, b, c = trainer(), trainer(), trainer(seed=1)
        one, two = a.batches(13)[0], b.batches(13)[0]
        jax.tree.map(np.testing.assert_array_equal, one, two)
        assert not np.array_equal(c.batches(13)[0].tokens, one.tokens)

    def test_every_conversation_is_seen_once_an_epoch(self) -> None:
        t = trainer()
        flat = [row for step in t.sampler.schedule(12) for group in step for row in group]
        for epoch in range(3):
            assert sorted(i for e, i in flat if e == epoch) == list(range(6))

    @pytest.mark.parametrize("ratio", [0, 1, 3, 5])
    def test_the_split_is_a_partition(self, ratio: int) -> None:
        """PITFALLS T15."""
        train, held = start.split(6, ratio, 0)
        assert sorted([*train, *held]) == list(range(6)) and len(held) == ratio
        with pytest.raises(ConfigError, match="held_out=6"):
            start.split(6, 6, 0)

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        t = trainer()
        state = t.initial(params_of(DRAFT))
        batch, _ = t.batches(0)
        taps = np.full((*batch.tokens.shape, 3 * TARGET.hidden_size), np.nan, np.float32)
        hidden = np.zeros((*batch.tokens.shape, TARGET.hidden_size), np.float32)
        before = jax.tree.map(np.asarray, state.params)
        state, report = t.step(state, batch, Features(taps, hidden))
        assert not bool(report.finite) and int(state.step) == 1
        jax.tree.map(np.testing.assert_array_equal, state.params, before)

    def test_settings_that_do_not_fit_are_refused(self) -> None:
        for changes, message in (
            (dict(slots=5), "slots=5"),
            (dict(tokens=10), "does not fit"),
            (dict(microbatches=0), "microbatches=0"),
        ):
            with pytest.raises(RequestError, match=message):
                trainer(**changes)
        with pytest.raises(RequestError, match="kept ids"):
            trainer(kept=KEPT)


@pytest.mark.parametrize("rank", [6, 0])
def test_overfitted_on_one_sequence_the_whole_block_is_accepted(rank: int) -> None:
    """PITFALLS A02: with the anchors or the slots off by one it would still train, and serve at nothing."""
    config = draft_config(TARGET, markov_rank=rank, confidence_head=rank > 0, confidence_with_markov=rank > 0)
    pair = Pair(ModelConfig(TARGET), {"target": TARGET_PARAMS}, jnp.float32, None, "toy", None)
    from dspark_jax import generate

    prompt = [3, 1, 4]
    (answer,) = generate(pair, [prompt], max_new_tokens=29)
    tokens = np.asarray(prompt + answer.token_ids, np.int32)
    data = [Example(tokens, np.arange(32) >= 3, 0)]
    t = trainer(150, config, data=data, anchors=28, rows=1, microbatches=1)
    state = t.initial(params_of(config))
    batch = t.batches(0)
    for _ in range(150):
        state, report = t.step(state, *batch)
    assert float(report.sums.agree.sum() / report.sums.count.sum()) > 0.98
    params = {"target": TARGET_PARAMS, "draft": t.draft_params(state)}
    served = Pair(ModelConfig(TARGET, config), params, jnp.float32, None, "toy", "toy")
    (out,) = generate(served, [prompt], max_new_tokens=29, scheduler=FixedLength())
    assert out.token_ids == answer.token_ids
    assert out.stats.accepted_length >= 4.4  # 28 tokens in blocks of 4 + 1, the last one cut
