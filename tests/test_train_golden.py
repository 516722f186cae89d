"""The training forward against the reference implementation's numbers: losses, masks, logits and every gradient."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint.source import load_draft, load_target
from dspark_jax.checkpoint.tensors import named_tensors
from dspark_jax.params import draft_specs
from dspark_jax.train import objective
from dspark_jax.train.batches import Shape, build
from dspark_jax.train.features import Features
from dspark_jax.train.rows import Example

DRAFTS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash")


class Golden:
    """One stored training forward, laid out as a batch of ours."""

    def __init__(self, root: Path, name: str) -> None:
        self.data = d = load_file(root / name / "train_forward.safetensors")
        target = load_target(root / "target", jnp.float32)
        self.config, self.params = (lambda x: (x.config, x.params))(
            load_draft(root / name / "draft", jnp.float32, target.config, target.params)
        )
        self.frozen = objective.Frozen(target.params["embed"], target.params["head"])
        rows, length = d["input_ids"].shape
        anchors = d["anchor_positions"].shape[1]
        slots = self.config.block_size
        examples = [Example(d["input_ids"][r], d["loss_mask"][r] > 0, r) for r in range(rows)]
        chosen = [np.where(d["block_keep_mask"][r] > 0, d["anchor_positions"][r], -1) for r in range(rows)]
        # One row, block and token more than needed: padding must not count.
        shape = Shape(rows + 1, rows * length + 5, rows * anchors + 3, slots, length, anchors)
        self.batch = build(examples, chosen, shape)
        self.blocks = rows * anchors

        def flat(x: np.ndarray) -> jax.Array:
            return jnp.asarray(np.pad(x.reshape(rows * length, -1), ((0, 5), (0, 0)), constant_values=7.0))

        self.features = Features(flat(d["target_hidden_states"]), flat(d["target_last_hidden_states"]))

    def loss(self, params):
        o = objective.Objective()
        sums = objective.loss_sums(
            params, self.config, o, self.frozen, self.frozen.head, jax.tree.map(jnp.asarray, self.batch), self.features
        )
        return objective.total_loss(sums, o, sums.ce_weight, sums.weight), sums


@pytest.fixture(scope="module", params=DRAFTS)
def golden(request, fixtures_dir) -> Golden:
    return Golden(fixtures_dir / "qwen3_tiny", request.param)


def test_masks_and_labels_are_the_reference_s(golden: Golden) -> None:
    d, batch = golden.data, golden.batch
    mask = batch.mask[: golden.blocks].reshape(d["eval_mask"].shape)
    np.testing.assert_array_equal(mask, d["eval_mask"] > 0)
    labels = batch.labels[: golden.blocks].reshape(d["target_ids"].shape)
    np.testing.assert_array_equal(labels[mask], d["target_ids"][mask])


def test_logits_are_the_reference_s(golden: Golden) -> None:
    d, mask = golden.data, golden.data["eval_mask"] > 0
    batch = jax.tree.map(jnp.asarray, golden.batch)
    out = objective.forward(golden.params, golden.config, golden.frozen, batch, golden.features.taps)
    logits = np.asarray(out.logits)[: golden.blocks].reshape(d["draft_logits"].shape)
    np.testing.assert_allclose(logits[mask], d["draft_logits"][mask], atol=1e-4)
    if out.confidence is not None:
        confidence = np.asarray(out.confidence)[: golden.blocks].reshape(mask.shape)
        np.testing.assert_allclose(confidence[mask], d["confidence_logits"][mask], atol=1e-4)
    teacher = objective.teacher_log_probs(golden.frozen, golden.frozen.head, batch, golden.features)[batch.teacher]
    teacher = np.asarray(teacher)[: golden.blocks].reshape(d["aligned_target_logits"].shape)
    theirs = np.asarray(jax.nn.log_softmax(jnp.asarray(d["aligned_target_logits"]), axis=-1))
    np.testing.assert_allclose(teacher[mask], theirs[mask], atol=1e-4)


def test_losses_are_the_reference_s(golden: Golden) -> None:
    d = golden.data
    loss, sums = golden.loss(golden.params)
    np.testing.assert_allclose(loss, d["loss"][0], rtol=1e-5)
    ours = {"ce": (sums.ce, sums.ce_weight), "l1": (sums.distance, sums.weight), "confidence": (sums.confidence, sums.weight)}
    for name, (value, weight) in ours.items():
        if f"term.{name}_loss_num" in d and d[f"term.{name}_loss_den"][0] > 0:
            np.testing.assert_allclose(value, d[f"term.{name}_loss_num"][0], rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(weight, d[f"term.{name}_loss_den"][0], rtol=1e-5, err_msg=name)


def test_every_gradient_is_the_reference_s(golden: Golden) -> None:
    gradients = jax.grad(lambda p: golden.loss(p)[0])(golden.params)
    ours = dict(named_tensors(draft_specs(golden.config), gradients))
    theirs = {k.removeprefix("grad."): v for k, v in golden.data.items() if k.startswith("grad.")}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4 * np.abs(gradient).max(), err_msg=name)
