"""Checkpoints of any tree, by both generations' calls; what is read back is compared with what was saved."""

import datetime
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec

from levanter.checkpoint import Checkpointer, CheckpointMismatchError, MissingCheckpointError, latest
from levanter.commands.model.saved_model import open_saved
from levanter.models import LlamaConfig
from levanter.trainer import CheckpointInterval
from levanter.upstream.facades.saved import (
    load_checkpoint,
    load_metadata,
    save_checkpoint,
    tree_deserialize_leaves_tensorstore,
    tree_serialize_leaves_tensorstore,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tree(seed: int) -> dict:
    random = np.random.default_rng(seed)
    return {
        "net": eqx.nn.Linear(3, 2, key=jax.random.PRNGKey(seed)),
        "named": hax.named(jnp.asarray(random.normal(size=(8, 2)), jnp.float32), ("embed", "mlp")),
        "count": seed,
        "host": random.normal(size=3).astype(np.float32),
        "key": jax.random.key(seed),
        "activation": jax.nn.relu,
        "nothing": None,
    }


def same(a: dict, b: dict) -> bool:
    return (
        eqx.tree_equal(a["net"], b["net"]) is not False
        and bool((a["named"].array == b["named"].array).all())
        and a["count"] == b["count"]
        and isinstance(b["count"], int)
        and (a["host"] == b["host"]).all()
        and isinstance(b["host"], np.ndarray)
        and bool(jax.random.key_data(a["key"]).tolist() == jax.random.key_data(b["key"]).tolist())
        and b["activation"] is jax.nn.relu
    )


def test_both_generations_calls(tmp_path):
    saved, other = tree(1), tree(2)
    save_checkpoint(saved, (np.float32(3), jnp.arange(4)), 10, str(tmp_path / "old"), exist_ok=True)
    model, (loss, counts), step = load_checkpoint(other, (np.float32(0), jnp.zeros(4, int)), tmp_path / "old")
    assert (
        same(saved, model) and not same(other, model) and loss == 3 and counts.tolist() == [0, 1, 2, 3] and step == 10
    )
    told = []
    save_checkpoint(saved, 7, tmp_path / "runs" / "step-7", commit_callback=lambda: told.append(1))
    save_checkpoint(tree=other, step=8, checkpoint_path=tmp_path / "runs" / "step-8", is_temporary=True)
    assert told == [1] and same(other, load_checkpoint(saved, tmp_path / "runs"))
    assert same(saved, load_checkpoint(other, tmp_path / "runs" / "step-7", discover_latest=False))
    about = load_metadata(tmp_path / "runs" / "step-8")
    assert about["step"] == 8 and about["is_temporary"]
    assert not load_metadata(tmp_path / "runs" / "step-7")["is_temporary"]
    tree_serialize_leaves_tensorstore(tmp_path / "leaves", saved)
    assert same(saved, tree_deserialize_leaves_tensorstore(tmp_path / "leaves", other))


def test_arrays_go_where_the_mapping_says(tmp_path, devices):
    mesh = jax.make_mesh((8,), ("data",), devices=devices)
    save_checkpoint(tree(1), 0, tmp_path / "c")
    found = load_checkpoint(tree(2), tmp_path / "c", axis_mapping={"embed": "data"}, mesh=mesh)
    assert found["named"].array.sharding == NamedSharding(mesh, PartitionSpec("data", None))
    assert same(tree(1), found)


def test_what_is_not_there_is_named(tmp_path):
    save_checkpoint({"a": 1.0}, 0, tmp_path / "c")
    with pytest.raises(CheckpointMismatchError, match="missing     b"):
        load_checkpoint({"a": 1.0, "b": jnp.ones(2)}, tmp_path / "c")
    assert load_checkpoint({"a": 0.0, "b": 5.0}, tmp_path / "c", allow_partial=True) == {"a": 1.0, "b": 5.0}
    with pytest.raises(MissingCheckpointError):
        load_checkpoint({"a": 1.0}, tmp_path / "c" / "none", discover_latest=False)
    with pytest.raises(ValueError, match="no arrays"):
        save_checkpoint({"f": jax.nn.relu}, 0, tmp_path / "d")
    with pytest.raises(ValueError, match="missing step, checkpoint_path"):
        save_checkpoint({"a": 1})


def test_a_saved_model_is_one_that_entry_points_open(tmp_path):
    config = LlamaConfig(max_seq_len=8, hidden_dim=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_dim=8)
    model = eqx.filter_jit(config.build)(Axis("vocab", 11), key=jax.random.PRNGKey(0))
    save_checkpoint(model, None, 0, str(tmp_path / "ckpt"))
    assert open_saved(str(tmp_path / "ckpt")).config.vocab_size == 11


def test_policies_of_steps_and_of_time(tmp_path):
    """Upstream's rule: kept by step; between them one by the clock, gone as soon as a newer one is there."""
    now = [datetime.datetime(2021, 1, 1)]
    keep = [CheckpointInterval(every=2, until=6), CheckpointInterval(every=5, until=None)]
    every = datetime.timedelta(seconds=10)
    with Checkpointer(str(tmp_path), every, keep, dt_now_injection=lambda: now[0]) as checkpointer:

        def step(n: int) -> list[int]:
            checkpointer.on_step(SimpleNamespace(step=n, state={"w": jnp.full(2, float(n))}))
            return sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))

        assert step(0) == [] and step(1) == [] and step(2) == [2]
        now[0] += every
        assert step(3) == [2, 3] and step(4) == [2, 4]
        now[0] += every
        assert step(5) == [2, 4, 5] and step(6) == [2, 4, 6] and step(10) == [2, 4, 6, 10]
        now[0] += every
        assert step(11) == [2, 4, 6, 10, 11]
        checkpointer.wait_until_finished()
        assert checkpointer.load_checkpoint({"w": jnp.zeros(2)})["w"].tolist() == [11.0, 11.0]
    found = latest(str(tmp_path))
    assert found is not None and found.kind == "temporary"
