"""Old trainer keys: one case a key, whole documents as golden text, and the old generation's own formula as oracle."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from haliax_ext.errors import ShardingError
from levanter.config.errors import Problem
from levanter.config.upstream import TABLE, Translation, old_keys, translate, translate_plain
from levanter.config.yaml_nodes import MapNode, compose, to_plain
from levanter.mesh import ModelAxes, ResolvedMesh, resolve
from levanter.mesh.config import MeshConfig

pytestmark = pytest.mark.quick

SPANNING = {
    "dcn_axes": {"replica_dcn": 1, "data_dcn": -1},
    "compute_mapping": {"batch": ["replica_dcn", "data_dcn", "replica", "data"]},
}
FSDP = {"param_mapping": {"embed": ["data_dcn", "data"]}}
DEFAULTS = {**SPANNING, **FSDP}


def translated(text: str) -> Translation:
    problems: list[Problem] = []
    node = compose(text, "old.yaml", problems, lambda *_: None)
    assert isinstance(node, MapNode) and not problems
    return translate(node)


def trainer(**keys: Any) -> dict[str, Any]:
    document, translation = translate_plain({"trainer": keys})
    assert not translation.problems, [str(p) for p in translation.problems]
    return document["trainer"]


def problems_of(text: str) -> list[str]:
    return [str(problem) for problem in translated(text).problems]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model_axis_size": 1}, {"mesh": {**DEFAULTS, "axes": {"model": 1}}}),
        (
            {"model_axis_size": 4},
            {"mesh": {**DEFAULTS, "axes": {"model": 4}, "shared_mapping": {"mlp": None, "heads": None}}},
        ),
        ({"replica_ici_axis_size": 2}, {"mesh": {**DEFAULTS, "axes": {"replica": 2}}}),
        (
            {"replica_dcn_axis_size": -1},
            {"mesh": {"dcn_axes": {"replica_dcn": -1}, "param_mapping": {"embed": "data"}}},
        ),
        (
            {"replica_dcn_axis_size": 2},
            {"mesh": {**DEFAULTS, "dcn_axes": {"replica_dcn": 2, "data_dcn": -1}}},
        ),
        ({"batch_axis": "batch"}, {"mesh": {**DEFAULTS, "batch_axis_name": "batch"}}),
        (
            {"batch_axis": "rows"},
            {
                "mesh": {
                    **FSDP,
                    "dcn_axes": SPANNING["dcn_axes"],
                    "compute_mapping": {"rows": ["replica_dcn", "data_dcn", "replica", "data"]},
                    "batch_axis_name": "rows",
                }
            },
        ),
        ({"batch_axis": None}, {"mesh": {**FSDP, "dcn_axes": SPANNING["dcn_axes"], "batch_axis_name": None}}),
        ({"fsdp_axis": "embed"}, {"mesh": DEFAULTS}),
        ({"fsdp_axis": None}, {"mesh": {**SPANNING, "param_mapping": {}}}),
        (
            {"fsdp_axis": ["embed", "mlp"], "replica_dcn_axis_size": -1},
            {"mesh": {"dcn_axes": {"replica_dcn": -1}, "param_mapping": {"embed": "data", "mlp": "data"}}},
        ),
        (
            {"tensor_parallel_axes": ["mlp", "heads"]},
            {"mesh": {**DEFAULTS, "shared_mapping": {"mlp": "model", "heads": "model"}, "split_heads": "auto"}},
        ),
        ({"tensor_parallel_axes": "mlp"}, {"mesh": {**DEFAULTS, "shared_mapping": {"mlp": "model", "heads": None}}}),
        ({"tensor_parallel_axes": []}, {"mesh": {**DEFAULTS, "shared_mapping": {"mlp": None, "heads": None}}}),
        (
            {"tensor_parallel_axes": ["mlp", "heads", "kv_head", "vocab"]},
            {
                "mesh": {
                    **DEFAULTS,
                    "shared_mapping": dict.fromkeys(["mlp", "heads", "kv_head", "vocab"], "model"),
                    "split_heads": "auto",
                }
            },
        ),
        (
            {"axis_resources": {"token": "data", "expert": "model", "x": ["replica", "data"]}},
            {
                "mesh": {
                    **DEFAULTS,
                    "shared_mapping": {
                        "token": ["data_dcn", "data"],
                        "expert": "model",
                        "x": ["replica_dcn", "replica", "data_dcn", "data"],
                    },
                }
            },
        ),
        (
            {"axis_resources": {"mlp": "data"}, "tensor_parallel_axes": ["mlp"]},
            {"mesh": {**DEFAULTS, "shared_mapping": {"mlp": "model", "heads": None}}},
        ),
        (
            {"parameter_axis_resources": {"mlp": "data", "embed": "model"}},
            {"mesh": {**SPANNING, "param_mapping": {"mlp": ["data_dcn", "data"], "embed": ["data_dcn", "data"]}}},
        ),
        (
            {"parameter_axis_resources": {"vocab": "model"}, "fsdp_axis": None},
            {"mesh": {**SPANNING, "param_mapping": {"vocab": "model"}}},
        ),
        ({"profiler": True}, {"mesh": DEFAULTS, "profiler": {"enabled": True, "num_steps": 100}}),
        ({"profiler": False}, {"mesh": DEFAULTS, "profiler": {"enabled": False}}),
        ({"profiler_start_step": 7}, {"mesh": DEFAULTS, "profiler": {"start_step": 7}}),
        (
            {"profiler": True, "profiler_num_steps": 3},
            {"mesh": DEFAULTS, "profiler": {"enabled": True, "num_steps": 3}},
        ),
        ({"profiler_perfetto_link": True}, {"mesh": DEFAULTS, "profiler": {"perfetto_link": True}}),
        ({"ray": {"auto_start_cluster": False}}, {"mesh": DEFAULTS}),
        ({"wandb": {"project": "p"}}, {"tracker": {"type": "wandb", "project": "p"}}),
        ({"wandb": None}, {}),
    ],
)
def test_one_key(keys: dict[str, Any], expected: dict[str, Any]):
    assert trainer(**keys) == expected


def test_every_row_of_the_table_has_an_effect():
    values = {"profiler": True, "ray": {}, "wandb": {"x": 1}, "axis_resources": {"x": "data"}, "fsdp_axis": "mlp"}
    values |= {"tensor_parallel_axes": ["mlp"], "parameter_axis_resources": {"x": "data"}, "batch_axis": "rows"}
    rows = [row for row in TABLE if row.block == "trainer"]
    assert len(rows) == 14
    for row in rows:
        document, translation = translate_plain({"trainer": {row.name: values.get(row.name, 2)}})
        assert row.name not in document["trainer"] or row.name == "profiler"
        assert [c.key for c in translation.changes].count(row.path) == 1
        assert all(c.why for c in translation.changes)


def test_new_documents_are_left_alone():
    new = {
        "trainer": {
            "seed": 1,
            "mesh": {"axes": {"model": 2}},
            "profiler": {"enabled": True},
            "tracker": {"type": "wandb"},
        },
        "model": {"type": "llama", "max_seq_len": 5},
        "data": {"components": {"a": {"source": {"train_urls": ["x"]}}}, "tokenizer": "t"},
    }
    document, translation = translate_plain(new)
    assert document == new
    assert translation.changes == ()


def test_documents_without_a_trainer_or_with_a_broken_one():
    for document in ({}, {"trainer": None}, {"trainer": [1]}, {"trainer": {"mesh": 5}, "model": 3, "data": "x"}):
        assert translate_plain(document)[0] == document


GOLDEN_OLD = """\
trainer:
  tracker: {project: books, tags: [eval]}
  mp: p=f32,c=f32
  tensor_parallel_axes: ["mlp", "heads"]
  batch_axis: "batch"
  model_axis_size: 128
  ray: {start_workers: false}
model:
  type: llama
  seq_len: 101
"""
GOLDEN_NEW = """\
trainer:
  tracker:
    project: books
    tags:
    - eval
  mp: p=f32,c=f32
  mesh:
    dcn_axes:
      replica_dcn: 1
      data_dcn: -1
    compute_mapping:
      batch:
      - replica_dcn
      - data_dcn
      - replica
      - data
    axes:
      model: 128
    batch_axis_name: batch
    shared_mapping:
      mlp: model
      heads: model
    split_heads: auto
    param_mapping:
      embed:
      - data_dcn
      - data
model:
  type: llama
  max_seq_len: 101
"""
GOLDEN_CHANGES = """\
trainer.replica_dcn_axis_size: (absent, 1) → trainer.mesh.dcn_axes: {replica_dcn: 1, data_dcn: -1}, \
trainer.mesh.compute_mapping.batch: [replica_dcn, data_dcn, replica, data] \
(the default of the generation this file was written for)
old.yaml:6: trainer.model_axis_size: 128 → trainer.mesh.axes.model: 128 (a mesh size)
old.yaml:5: trainer.batch_axis: batch → trainer.mesh.batch_axis_name: batch (the logical name of the batch axis)
old.yaml:4: trainer.tensor_parallel_axes: [mlp, heads] → trainer.mesh.shared_mapping: {mlp: model, heads: model}, \
trainer.mesh.split_heads: auto \
(a mapping for parameters and compute; `heads` now shards q, k, v and o alike, where it used to reach o only)
trainer.fsdp_axis: (absent, embed) → trainer.mesh.param_mapping: {embed: [data_dcn, data]} \
(the default of the generation this file was written for)
old.yaml:7: trainer.ray is ignored: jobs do not run on Ray; the launcher starts one process per host
old.yaml:10: model.seq_len: 101 → model.max_seq_len: 101 \
(it is the longest sequence that the model accepts; each run chooses its own length)
"""


def test_a_whole_old_document():
    translation = translated(GOLDEN_OLD)
    assert yaml.safe_dump(to_plain(translation.document), sort_keys=False) == GOLDEN_NEW
    assert "".join(f"{change}\n" for change in translation.changes) == GOLDEN_CHANGES
    assert [change.line for change in translation.changes] == [None, 6, 5, 4, None, 7, 10]


def test_a_translated_document_is_new():
    once = translated(GOLDEN_OLD)
    again = translate(once.document)
    assert again.changes == ()
    assert again.document == once.document


def test_mixed_documents_have_the_new_defaults():
    mixed = {"mesh": {"axes": {"context": 2}}, "model_axis_size": 4, "tensor_parallel_axes": ["mlp"]}
    assert trainer(**mixed) == {
        "mesh": {"axes": {"context": 2, "model": 4}, "shared_mapping": {"mlp": "model", "heads": None}}
    }
    assert trainer(mesh={"axes": {"data": -1}}, profiler=True) == {
        "mesh": {"axes": {"data": -1}},
        "profiler": {"enabled": True, "num_steps": 100},
    }
    assert trainer(mesh={"axes": {"model": 2}}, parameter_axis_resources={"vocab": "model"})["mesh"] == {
        "axes": {"model": 2},
        "param_mapping": {"vocab": "model", "embed": "data"},
    }
    assert trainer(mesh={"shared_mapping": {"heads": "model"}}, tensor_parallel_axes=["mlp"])["mesh"] == {
        "shared_mapping": {"heads": "model", "mlp": "model"}
    }


def test_a_new_mesh_with_an_old_sequence_length():
    document, translation = translate_plain({"trainer": {"mesh": {"axes": {"context": 2}}}, "model": {"seq_len": 8}})
    assert document == {"trainer": {"mesh": {"axes": {"context": 2}}}, "model": {"max_seq_len": 8}}
    assert len(translation.changes) == 1


def test_the_same_said_twice_is_said_once():
    assert trainer(mesh={"axes": {"model": 2}}, model_axis_size=2) == {"mesh": {"axes": {"model": 2}}}


def test_contradictions_name_both_keys_and_lines():
    text = """\
trainer:
  mesh:
    axes:
      model: 8
    param_mapping: {embed: data}
  model_axis_size: 4
  fsdp_axis: null
  batch_axis: rows
model:
  max_seq_len: 1
  seq_len: 2
"""
    assert problems_of(text) == [
        "old.yaml:6: trainer.model_axis_size: contradicts `trainer.mesh.axes.model` (old.yaml:4): the old key means "
        "trainer.mesh.axes.model: 4, the document also has 8; keep one of them",
        "old.yaml:7: trainer.fsdp_axis: contradicts `trainer.mesh.param_mapping` (old.yaml:5): the old key means "
        "trainer.mesh.param_mapping: {}, the document also has {embed: data}; keep one of them",
        "old.yaml:11: model.seq_len: contradicts `model.max_seq_len` (old.yaml:10): the old key means "
        "model.max_seq_len: 2, the document also has 1; keep one of them",
    ]


@pytest.mark.parametrize("tracker", [{"type": "noop"}, [{"type": "json_file"}, {"type": "noop"}], {"type": "wandb"}])
def test_wandb_wins_over_a_tracker_beside_it(tracker):
    """As in upstream, which warns too."""
    old = {"tracker": tracker, "wandb": {"project": "p", "mode": "offline"}}
    document, translation = translate_plain({"trainer": old})
    assert document["trainer"]["tracker"] == {"type": "wandb", "project": "p", "mode": "offline"}
    assert "wandb" not in document["trainer"] and not translation.problems
    (change,) = translation.changes
    assert change.key == "trainer.wandb" and "it wins over `trainer.tracker`" in change.why


def test_two_spellings_of_one_tracker_are_one():
    old = {"tracker": {"type": "wandb", "project": "p"}, "wandb": {"project": "p"}}
    _, translation = translate_plain({"trainer": old})
    assert [change.why for change in translation.changes] == ["wandb is one of several trackers"]


def test_a_profiler_block_beside_an_old_profiler_key():
    assert trainer(profiler={"enabled": True}, profiler_num_steps=3)["profiler"] == {"enabled": True, "num_steps": 3}
    assert problems_of("trainer:\n  profiler: {num_steps: 5}\n  profiler_num_steps: 3\n") == [
        "old.yaml:3: trainer.profiler_num_steps: contradicts `trainer.profiler.num_steps` (old.yaml:2): the old key "
        "means trainer.profiler.num_steps: 3, the document also has 5; keep one of them"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model_axis_size: four", "trainer.model_axis_size: expected an integer, got four"),
        ("replica_dcn_axis_size: true", "trainer.replica_dcn_axis_size: expected an integer, got true"),
        ("batch_axis: [a]", "trainer.batch_axis: expected a name or null, got [a]"),
        ("fsdp_axis: {a: b}", "trainer.fsdp_axis: expected an axis name or a list, got {a: b}"),
        (
            "tensor_parallel_axes: mlp, heads",
            "trainer.tensor_parallel_axes: is a single string, 'mlp, heads'; write a list: [mlp, heads]",
        ),
        ("tensor_parallel_axes: [1]", "trainer.tensor_parallel_axes: expected an axis name or a list, got [1]"),
        ("axis_resources: [a]", "trainer.axis_resources: expected a mapping, got [a]"),
        (
            "axis_resources: {mlp: modle}",
            "trainer.axis_resources: mlp → modle: not a mesh axis of that generation (data, model, replica)"
            "; did you mean `model`?",
        ),
        ("wandb: true", "trainer.wandb: expected a mapping, got true"),
    ],
)
def test_values_that_cannot_be_understood(line: str, message: str):
    assert problems_of(f"trainer:\n  {line}\n") == [f"old.yaml:2: {message}"]


def test_old_keys_are_known_by_block():
    assert "fsdp_axis" in old_keys(("trainer",))
    assert old_keys(("model",)) == ("seq_len",)
    assert old_keys(("data", "components", "web", "format")) == ("input_field", "output_field", "slice_strategy")
    assert "base_eval" in old_keys(()) and "fsdp_axis" not in old_keys(())


# --- the oracle: what the old generation did, written down from its definition ---

AXES = {"vocab": 64, "embed": 64, "mlp": 128, "position": 64, "batch": 64, "token": 64}
names = st.sampled_from([name for name in AXES if name != "batch"])
physical = st.sampled_from(["data", "model", "replica"])
old_trainers = st.fixed_dictionaries(
    {},
    optional={
        "model_axis_size": st.sampled_from([1, 2, 4]),
        "replica_ici_axis_size": st.sampled_from([1, 2]),
        "replica_dcn_axis_size": st.sampled_from([-1, 1, 2]),
        "fsdp_axis": st.none() | names | st.lists(names, max_size=2, unique=True),
        "tensor_parallel_axes": st.none() | st.lists(names, max_size=2, unique=True),
        "axis_resources": st.dictionaries(names, physical, max_size=2),
        "parameter_axis_resources": st.dictionaries(names, physical, max_size=2),
        "batch_axis": st.just("batch"),
    },
).filter(bool)


def old_ways(keys: dict[str, Any], *, slices: int, per_slice: int) -> tuple[dict[str, int], dict[str, int]]:
    """Into how many pieces the old generation cut each axis, for compute and for parameters."""
    model, replica_ici = keys.get("model_axis_size", 1), keys.get("replica_ici_axis_size", 1)
    replica_dcn = keys.get("replica_dcn_axis_size", 1)
    replica_dcn = slices if replica_dcn == -1 else replica_dcn
    replica = replica_dcn * replica_ici
    sizes = {"replica": replica, "model": model, "data": slices * per_slice // (replica * model)}
    parallel = dict.fromkeys(keys.get("tensor_parallel_axes") or [], ("model",))
    resources = {axis: (mesh,) for axis, mesh in keys.get("axis_resources", {}).items()}
    compute = resources | parallel | {"batch": ("replica", "data")}
    fsdp = keys.get("fsdp_axis", "embed")
    fsdp = [fsdp] if isinstance(fsdp, str) else fsdp or []
    own = {axis: (mesh,) for axis, mesh in keys.get("parameter_axis_resources", {}).items()}
    params = compute | own | dict.fromkeys(fsdp, ("data",))

    def ways(mapping: dict[str, tuple[str, ...]], axis: str) -> int:
        product = 1
        for mesh in mapping.get(axis, ()):
            product *= sizes[mesh]
        return product

    return {a: ways(compute, a) for a in AXES}, {a: ways(params, a) for a in AXES if a != "batch"}


def exchanged_over_dcn(keys: dict[str, Any], *, slices: int) -> bool:
    """Whether the old generation cut positions between slices, whose keys it gathered in every layer without a word."""
    replicas = keys.get("replica_dcn_axis_size", 1)
    replicas = slices if replicas == -1 else replicas
    mesh = None if "position" in (keys.get("tensor_parallel_axes") or []) else keys.get("axis_resources", {})
    return mesh is not None and {"data": slices // replicas, "replica": replicas}.get(mesh.get("position"), 1) > 1


def new_mesh(keys: dict[str, Any], *, slices: int, per_slice: int) -> ResolvedMesh:
    config = MeshConfig(**trainer(**keys)["mesh"])
    # Without `tensor_parallel_axes` the old model axis shards nothing, which is refused unless a key allows it.
    config = replace(config, allow_idle_axes=[*config.axes, *config.dcn_axes])
    return resolve(config, ModelAxes(sizes=AXES, known=tuple(AXES)), devices=slices * per_slice, granules=slices)


@given(keys=old_trainers, slices=st.sampled_from([1, 2, 4]))
def test_meshes_and_mappings_equal_the_old_generation_s(keys: dict[str, Any], slices: int):
    per_slice = 16
    assume(slices % max(keys.get("replica_dcn_axis_size", 1), 1) == 0)
    compute, params = old_ways(keys, slices=slices, per_slice=per_slice)
    if exchanged_over_dcn(keys, slices=slices):
        with pytest.raises(ShardingError, match=r"crosses slices(.|\n)*trainer\.mesh\.allow_dcn"):
            new_mesh(keys, slices=slices, per_slice=per_slice)
        return
    new = new_mesh(keys, slices=slices, per_slice=per_slice)
    assert {a: new.spec.ways(new.mappings.compute.mesh_axes(a)) for a in AXES} == compute
    assert {a: new.spec.ways(new.mappings.params.mesh_axes(a)) for a in AXES if a != "batch"} == params
    assert new.spec.num_granules == slices
