"""Cost tables and profiles: what is refused, what lies between measured points, and what is kept on disk."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import profile as profiles
from dspark_jax.cost import CostTable, load_costs, save_costs
from dspark_jax.errors import RequestError
from dspark_jax.profile import KINDS, bind, load_profile, profile
from dspark_jax.schedule import Adaptive, Algorithm1, FixedLength, Lagged
from tests.toys import draft_config, target_config, toy_pair


def seconds(table, context, tokens, greedy=True):
    curve = table.curve(jnp.asarray(context, jnp.int32), jnp.asarray(greedy))
    return np.asarray(curve.at(jnp.asarray(tokens, jnp.int32)))


def test_between_and_beyond_measured_points():
    table = CostTable.make([1, 2, 4], [[1, 2, 3], [2, 4, 6]], [100, 300], draft=[0.5, 0.7], overhead=0.25)
    np.testing.assert_allclose(seconds(table, 100, [1, 2, 3, 4, 6]), np.array([1, 2, 2.5, 3, 4]) + 0.75)
    np.testing.assert_allclose(seconds(table, 10, [1, 2]), np.array([1, 2]) + 0.75)  # constant below
    np.testing.assert_allclose(seconds(table, 200, [1, 4]), np.array([1.5, 4.5]) + 0.85, rtol=1e-6)
    np.testing.assert_allclose(seconds(table, 500, [1, 4]), np.array([3, 9]) + 1.15, rtol=1e-6)  # continued above
    curve = table.curve(jnp.asarray(300, jnp.int32), jnp.asarray(True))
    assert float(curve.plain_at(jnp.asarray(1, jnp.int32))) == pytest.approx(2.25)  # a pass over one token, and no drafter


def test_kinds_rows_and_one_point():
    both = CostTable.make([1, 2], [[[1.0, 1.5]], [[3.0, 3.5]]], draft=[[0.1], [0.2]])
    assert seconds(both, 5, 1)[()] == pytest.approx(1.1) and seconds(both, 5, 1, greedy=False)[()] == pytest.approx(3.2)
    one = CostTable.make([4], [2.0])
    np.testing.assert_allclose(seconds(one, 0, [1, 4, 9]), 2)
    batch = CostTable.make([2, 8, 16], [1, 2, 3], rows=8)
    assert batch.rows == 8
    measured = CostTable.make([2, 8, 16], [1, 2, 3], draft=0.5, plain=1.8, rows=8)
    for table, wanted in ((batch, [1, 2]), (measured, [0.8, 1.8])):  # two rows are left, or all
        curve = table.curve(jnp.asarray(0, jnp.int32), jnp.asarray(True))
        assert [float(curve.plain_at(jnp.asarray(n, jnp.int32))) for n in (2, 8)] == pytest.approx(wanted)


def test_a_larger_pass_that_is_cheaper_bounds_the_smaller():
    """Measured on a real machine: 79.5 ms for 2 tokens, 80.6 for 4, 75.6 for 8."""
    table = CostTable.make([1, 2, 4, 8], [43.2, 79.5, 80.6, 75.6])
    np.testing.assert_allclose(seconds(table, 0, [1, 2, 4, 8]), [43.2, 75.6, 75.6, 75.6], rtol=1e-6)


def test_a_flat_table_is_told_of():
    """B10: with it everything pays, and a scheduler looks as if it were at work."""
    with pytest.warns(UserWarning, match="do not rise with tokens"):
        CostTable.make([1, 2, 4], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tokens=[2, 1]), "tokens"),
        (dict(tokens=[]), "tokens"),
        (dict(tokens=[0, 1]), "tokens"),
        (dict(contexts=[5, 5], seconds=[[1, 2], [1, 2]]), "contexts"),
        (dict(seconds=[1, 0]), "seconds holds 0"),
        (dict(seconds=[1, float("nan")]), "seconds holds nan"),
        (dict(seconds=[1, float("inf")]), "seconds holds inf"),
        (dict(seconds=[1, -2]), "seconds holds -2"),
        (dict(seconds=[1, 2, 3]), "shape"),
        (dict(seconds="fast"), "must be numbers"),
        (dict(draft=-1), "draft holds -1"),
        (dict(overhead=float("nan")), "overhead"),
        (dict(rows=0), "rows=0"),
        (dict(plain=1.0), "plain needs rows"),
    ],
)
def test_bad_tables_are_refused_by_name(change, words):
    with pytest.raises(RequestError, match=words):
        CostTable.make(**dict(tokens=[1, 2], seconds=[1.0, 2.0]) | change)


def test_files(tmp_path):
    path, identity = tmp_path / "sub" / "table.json", {"model": "a", "rows": 2, "sizes": [1, 2]}
    save_costs(path, {"samples": {"x": 1.5}}, identity)
    assert load_costs(path, identity)["samples"] == {"x": 1.5}
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    for name, other in (("model", "b"), ("rows", 3), ("sizes", [1, 2, 4]), ("device", "TPU v5e")):
        with pytest.raises(RequestError, match=f"something else: {name}="):
            load_costs(path, identity | {name: other})
    for text in ("", "{", "[]", "{}", json.dumps({"form": 99, "fingerprint": identity})):
        path.write_text(text)
        with pytest.raises(RequestError, match="table"):
            load_costs(path, identity)
    with pytest.raises(RequestError, match="cannot be read"):
        load_costs(tmp_path / "nothing.json", identity)


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """An empty cache, and how often something was measured; times are made up."""
    calls = []

    def measure(pair, rows, capacity, wanted, quick):
        calls.append(list(wanted))
        sizes = profiles._policy(pair).token_sizes(rows, pair.model.draft.block_size)
        return {
            (kind, c): {"plain": 1.0 + c / 1e3, "drafted": {str(n): 1.3 + n / 10 + c / 1e3 for n in sizes}}
            for kind, c in wanted
        }

    monkeypatch.setattr(profiles, "directory", lambda: tmp_path)
    monkeypatch.setattr(profiles, "_known", {})
    monkeypatch.setattr(profiles, "_measure", measure)
    return calls


def test_a_profile_is_made_once_and_only_what_is_missing(counted, tmp_path, monkeypatch):
    pair = toy_pair()
    first = profile(pair, 2, 256, ["greedy"], quick=True)
    assert counted == [[("greedy", 128), ("greedy", 256)]]
    assert profile(pair, 2, 256, ["greedy"], quick=True).samples == first.samples and len(counted) == 1
    monkeypatch.setattr(profiles, "_known", {})  # another process
    again = profile(pair, 2, 256, ["greedy"], quick=True)
    assert again.samples == first.samples and len(counted) == 1
    assert again.path is not None and again.path.parent == tmp_path
    profile(pair, 2, 1024, KINDS, quick=True)
    assert counted[1:] == [[("greedy", 512), ("greedy", 1024), ("sampled", 128), ("sampled", 512), ("sampled", 1024)]]
    profile(pair, 3, 256, ["greedy"], quick=True)  # another batch size
    other = draft_config(target_config(), block_size=3)
    profile(toy_pair(draft=other), 2, 256, ["greedy"], quick=True)
    assert len(counted) == 4 and len(list(tmp_path.iterdir())) == 3
    assert profile(pair, 2, 256, ["greedy"], fresh=True) and len(counted) == 5


def test_a_damaged_or_foreign_file_is_measured_anew_or_refused(counted, monkeypatch, caplog):
    pair = toy_pair()
    path = profile(pair, 2, 256, ["greedy"]).path
    good = json.loads(path.read_text())
    for damage in (
        "{",
        json.dumps(good | {"samples": {"greedy": {"128": {"plain": -1.0}}}}),
        json.dumps(good | {"samples": []}),
    ):
        path.write_text(damage)
        monkeypatch.setattr(profiles, "_known", {})
        with pytest.raises(RequestError):
            load_profile(path, pair, 2)
        before = len(counted)
        profile(pair, 2, 256, ["greedy"])
        assert len(counted) == before + 1
    assert load_profile(path, pair, 2).samples == profile(pair, 2, 256, ["greedy"]).samples
    with pytest.raises(RequestError, match="rows=2, here 3"):
        load_profile(path, pair, 3)
    half = dataclasses.replace(pair, dtype=jnp.bfloat16)
    with pytest.raises(RequestError, match="dtype='float32', here 'bfloat16'"):
        load_profile(path, half, 2)
    with pytest.raises(RequestError, match="kinds"):
        profile(pair, 2, 256, ["fast"])


def test_the_table_of_a_profile(counted):
    made = profile(toy_pair(), 2, 256, ["greedy"])
    table = made.table
    assert table.rows == 2 and table.passes.shape == (2, 8, len(made.sizes))
    n = np.asarray(made.sizes)
    for context in (128, 192, 256, 512, 4096):
        np.testing.assert_allclose(seconds(table, context, n), 1.3 + n / 10 + context / 1e3, rtol=1e-5)
        curve = table.curve(jnp.asarray(context, jnp.int32), jnp.asarray(False))
        assert float(curve.plain) == pytest.approx(1 + context / 1e3, rel=1e-5)
    assert float(table.draft[0, 0]) == pytest.approx(0.5)  # a round of one token a row, drafted and not


def test_binding_fills_in_what_is_missing_only(counted):
    pair = toy_pair()
    assert bind(FixedLength(), pair, 2, 256, False) == FixedLength() and not counted
    own = CostTable.make([1, 2], [1, 2])
    assert bind(Algorithm1(own), pair, 2, 256, False).cost is own and not counted
    for policy in (Algorithm1(), Lagged(prior=0.3), Adaptive(margin=0.1)):
        bound = bind(policy, pair, 2, 256, True)
        assert bound.cost.rows == 2 and bound.replace(cost=None) == policy
    assert len(counted) == 1
    # Tables of one batch size have one shape, whatever was measured: a new one compiles nothing.
    wide = bind(Adaptive(), pair, 2, 2048, True)
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, bind(Adaptive(), pair, 2, 256, False))


def test_real_rounds_are_timed(tmp_path, monkeypatch):
    """B12: what ran is what was asked for, and everything costs something."""
    monkeypatch.setattr(profiles, "directory", lambda: tmp_path)
    monkeypatch.setattr(profiles, "_known", {})
    made = profile(toy_pair(), 2, 256, KINDS, quick=True)
    assert set(made.samples) == set(KINDS) and set(made.samples["greedy"]) == {"128", "256"}
    for found in (f for kind in made.samples.values() for f in kind.values()):
        assert found["plain"] > 0 and {int(n) for n in found["drafted"]} == set(made.sizes)
    report = json.loads(made.path.read_text())
    assert report["fingerprint"]["rows"] == 2 and report["fingerprint"]["cores"] >= 1 and report["conditions"]["quick"]


def test_a_target_that_cannot_be_timed_still_answers(tmp_path, monkeypatch, caplog):
    """Its requests end with an error of their own (L09); the call does not."""
    monkeypatch.setattr(profiles, "directory", lambda: tmp_path)
    monkeypatch.setattr(profiles, "_known", {})

    def fail(*_):
        raise profiles.NotTimed("the target of toy cannot be timed: its logits are not finite")

    monkeypatch.setattr(profiles, "_measure", fail)
    with pytest.raises(RequestError, match="cannot be timed"):
        profile(toy_pair(), 2, 256)
    bound = bind(Adaptive(), toy_pair(), 2, 256, False)
    assert bound.cost.rows == 2 and "cannot be timed" in caplog.text and not list(tmp_path.iterdir())
