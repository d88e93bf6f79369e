"""The planner: specs, bytes, and every rule with its whole message. JAX's own shardings are the oracle for shapes."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.named_sharding import DuplicateSpecError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.abstract import Leaf
from haliax_ext.errors import (
    AxisCollisionError,
    IndivisibleError,
    ManyShardingErrors,
    ReplicationError,
    UnknownAxisError,
)
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding

pytestmark = pytest.mark.quick

F32 = np.dtype(np.float32)
GIB = 1 << 30


def leaf(path, **axes):
    return Leaf(path, tuple(axes.items()), F32)


Q = leaf("attn.q_proj.weight", layers=4, kv_head=8, q_heads_per_group=4, head_size=64, embed=512)
K = leaf("attn.k_proj.weight", layers=4, kv_head=8, head_size=64, embed=512)
UP = leaf("mlp.up_proj.weight", layers=4, mlp=2048, embed=512)
NORM = leaf("norm.weight", layers=4, embed=512)
SCALE = leaf("scale")
RULES = {"embed": "data", "mlp": "model", "kv_head": "model"}


def plan(leaves, rules=None, mesh=None, *, hbm_bytes=None, on_conflict=None, **mappings):
    mappings = Mappings(params=AxisMapping(RULES if rules is None else rules), **mappings)
    mesh = mesh or MeshSpec.of(data=4, model=2)
    return plan_sharding(leaves, mappings, mesh, hbm_bytes=hbm_bytes, on_conflict=on_conflict)


class TestPlacement:
    def test_specs_bytes_and_reasons(self):
        made = plan([Q, K, UP, NORM, SCALE]).check()
        assert made.spec(Q.path) == P(None, "model", None, None, "data")
        assert made.spec(UP.path) == P(None, "model", "data")
        assert made.spec(NORM.path) == P(None, "data")
        assert made.spec(SCALE.path) == P()
        assert made.by_path[UP.path].shard_shape == (4, 1024, 128)
        assert made.by_path[UP.path].reason == "mlp → model (2048/2), embed → data (512/4)"
        assert made.by_path[SCALE.path].reason == "a scalar"
        assert plan([NORM], {}).by_path[NORM.path].reason == "none of its axes is mapped"
        assert made.by_path[NORM.path].replicated_over == ("model",)
        assert made.by_path[SCALE.path].replicated_over == ("data", "model")
        assert made.total_bytes == sum(x.nbytes for x in (Q, K, UP, NORM, SCALE))
        assert made.by_path[UP.path].bytes_per_device == UP.nbytes // 8
        assert made.bytes_per_device == (Q.nbytes + K.nbytes + UP.nbytes) // 8 + NORM.nbytes // 4 + 4
        assert made.replicated_bytes == NORM.nbytes // 8 + 3

    def test_it_says_itself_in_a_line(self):
        assert str(plan([UP, NORM])) == (
            "2 arrays, 16.01 MiB, on mesh data 4 × model 2: 2.00 MiB on each device, 1.00 KiB of it replicated; "
            "0 errors, 0 notes"
        )

    def test_several_mesh_axes_on_one_axis(self):
        mesh = MeshSpec.of(data=2, model=2, group=2)
        made = plan([UP], {"mlp": ["model", "group"], "embed": "data"}, mesh).check()
        assert made.spec(UP.path) == P(None, ("model", "group"), "data")
        assert made.by_path[UP.path].shard_shape == (4, 512, 256)

    def test_overrides_apply_to_their_paths_and_may_unmap(self):
        overrides = (
            ("attn.*", AxisMapping({"embed": "model", "head_size": "data", "kv_head": None})),
            ("norm", AxisMapping({"embed": None})),
        )
        made = plan([Q, UP, NORM], overrides=overrides).check()
        assert made.spec(Q.path) == P(None, None, None, "data", "model")
        assert made.spec(UP.path) == P(None, "model", "data")
        assert made.spec(NORM.path) == P()
        assert made.by_path[Q.path].reason == ("head_size → data (64/4), embed → model (512/2) by overrides['attn.*']")

    def test_an_override_that_matches_nothing_is_noted(self):
        (note,) = plan([UP], overrides=(("**.self_atn.*", AxisMapping({"embed": None})),)).notes
        assert note.message == "overrides['**.self_atn.*'] matches no array of this model"

    def test_sharding_on_a_mesh(self, devices):
        spec = MeshSpec.of(data=4, model=2)
        made, mesh = plan([UP], mesh=spec), spec.build(devices)
        placed = jax.device_put(np.zeros(UP.shape, np.float32), made.sharding(UP.path, mesh))
        assert {s.data.shape for s in placed.addressable_shards} == {made.by_path[UP.path].shard_shape}

    def test_unknown_mesh_axis(self):
        with pytest.raises(UnknownAxisError) as caught:
            plan([UP], {"mlp": "modle"})
        assert str(caught.value) == "mesh axis modle is not an axis of mesh data 4 × model 2; did you mean model?"


AXES = ("a", "b", "c")
MESH_AXES = ("x", "y", "z")


@st.composite
def cases(draw):
    mesh = MeshSpec.of(**{name: draw(st.integers(1, 4)) for name in MESH_AXES})
    shape = {name: draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])) for name in AXES}
    rules = {name: draw(st.lists(st.sampled_from(MESH_AXES), max_size=2, unique=True)) for name in AXES}
    return mesh, Leaf("w", tuple(shape.items()), F32), rules


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_the_planner_accepts_jax_accepts_and_the_other_way_round(case):
    """JAX's `NamedSharding` is the oracle: same shard shape where it is legal, an exception where it is not."""
    mesh, w, rules = case
    made = plan([w], rules, mesh)
    try:
        sharding = NamedSharding(mesh.abstract(), P(*(tuple(rules[n]) or None for n in w.names)))
        theirs = sharding.shard_shape(w.shape)
    except (ValueError, DuplicateSpecError):
        theirs = None
    assert (theirs is None) == bool(made.errors)
    if theirs is not None:
        assert made.by_path["w"].shard_shape == theirs
        assert made.sharding("w", mesh.abstract()).shard_shape(w.shape) == theirs
        assert made.bytes_per_device == math.prod(theirs) * 4


class TestConflict:
    RULES = {"mlp": "model", "embed": ["data", "model"]}  # noqa: RUF012

    def test_error(self):
        with pytest.raises(AxisCollisionError) as caught:
            plan([UP, NORM], self.RULES).check()
        assert str(caught.value) == (
            "mlp.up_proj.weight [layers 4, mlp 2048, embed 512]: axes 'mlp' and 'embed' are both mapped to mesh axis "
            "'model' (rules mlp → model and embed → [data, model]); a mesh axis can shard an array only once\n"
            "  → map one of them elsewhere, or unmap it for this array: "
            'overrides: {"mlp.up_proj.weight": {embed: null}}'
        )
        assert caught.value.path == UP.path

    def test_the_suggestion_works(self):
        plan([UP, NORM], self.RULES, overrides=((UP.path, AxisMapping({"embed": None})),)).check()

    @pytest.mark.parametrize("by_mappings", [True, False])
    def test_first_wins_in_mapping_order(self, by_mappings):
        given = {"on_conflict": None if by_mappings else "first_wins"}
        mappings = {"on_conflict": "first_wins"} if by_mappings else {}

        def made(rules):
            return plan_sharding(
                [UP], Mappings(params=AxisMapping(rules), **mappings), MeshSpec.of(data=4, model=2), **given
            ).check()

        assert made(self.RULES).spec(UP.path) == P(None, "model", "data")
        assert made({"embed": ["data", "model"], "mlp": "model"}).spec(UP.path) == P(None, None, ("data", "model"))
        (note,) = made(self.RULES).notes
        assert note.message == (
            "mlp.up_proj.weight [layers 4, mlp 2048, embed 512]: axes 'mlp' and 'embed' are both mapped to mesh axis "
            "'model' (rules mlp → model and embed → [data, model]); 'mlp' keeps it because its rule comes first "
            "(on_conflict: first_wins)"
        )


class TestDivisibility:
    def test_error(self):
        with pytest.raises(IndivisibleError) as caught:
            plan([K], mesh=MeshSpec.of(data=4, model=16)).check()
        assert str(caught.value) == (
            "attn.k_proj.weight [layers 4, kv_head 8, head_size 64, embed 512]: axis 'kv_head' has size 8, which mesh "
            "axis model 16 does not divide (8 % 16 = 8)\n"
            "  → nearest mesh sizes that divide 8: 8; or unmap the axis: {kv_head: null}"
        )

    def test_bytes_are_rounded_up_where_it_does_not_divide(self):
        made = plan([K], mesh=MeshSpec.of(data=4, model=16))
        assert made.by_path[K.path].shard_shape == (4, 1, 64, 128)

    def test_everything_that_is_wrong_comes_together(self):
        with pytest.raises(ManyShardingErrors) as caught:
            plan([Q, K, UP], {"kv_head": "model", "mlp": "model", "embed": "model"}, MeshSpec.of(model=16)).check()
        kinds = [type(error) for error in caught.value.errors]
        assert kinds.count(AxisCollisionError) == 3
        assert kinds.count(IndivisibleError) == 1
        assert str(caught.value).startswith("4 sharding errors:\n[1] attn.q_proj.weight")

    def test_one_mistake_in_many_arrays_is_one_error(self):
        made = plan([Q, K, UP, NORM], {"embed": "data"}, MeshSpec.of(data=3))
        assert [f.path for f in made.findings if f.severity == "error"] == [Q.path, K.path, UP.path, NORM.path]
        (error,) = made.errors
        assert isinstance(error, IndivisibleError)
        assert str(error) == (
            "attn.q_proj.weight [layers 4, kv_head 8, q_heads_per_group 4, head_size 64, embed 512]: axis 'embed' has "
            "size 512, which mesh axis data 3 does not divide (512 % 3 = 2); likewise in 3 more arrays: "
            "attn.k_proj.weight, mlp.up_proj.weight, norm.weight\n"
            "  → nearest mesh sizes that divide 512: 2, 4; or unmap the axis: {embed: null}"
        )


EMBED = leaf("embeddings.weight", vocab=1 << 20, embed=1024)  # 4 GiB
BIG_Q = leaf("attn.q_proj.weight", layers=4, kv_head=8, q_heads_per_group=16, head_size=128, embed=16384)  # 4 GiB
BIG_K = leaf("attn.k_proj.weight", layers=64, kv_head=8, head_size=128, embed=16384)  # 4 GiB
BIG_UP = leaf("mlp.up_proj.weight", layers=4, mlp=65536, embed=4096)
HBM = 32 * GIB


class TestReplication:
    def test_error_where_a_mesh_axis_that_shards_others_is_not_used(self):
        with pytest.raises(ReplicationError) as caught:
            plan([EMBED, BIG_UP], {"mlp": "model"}, MeshSpec.of(model=8), hbm_bytes=HBM).check()
        assert str(caught.value) == (
            "embeddings.weight [vocab 1048576, embed 1024] float32 is replicated over model 8: 4.00 GiB on each "
            "device, 3.50 GiB of it redundant; that is 12.5% of a device's 32.00 GiB, and mesh axis model shards other "
            "parameters "
            "of this model\n"
            '  → shard it, e.g. {vocab: model}, or accept it: allow_replicated: ["embeddings.weight"]'
        )

    def test_the_suggestion_is_tried_out(self):
        """`embed → model` would collide in up_proj; `vocab` would not, but does not divide here."""
        odd = leaf("embeddings.weight", vocab=(1 << 20) + 1, embed=1024)
        rules = {"mlp": "model"}
        (error,) = plan([odd, BIG_UP], rules, MeshSpec.of(model=8), hbm_bytes=HBM).errors
        assert error.suggestion == (
            'shard it, for this array alone: overrides: {"embeddings.weight": {embed: model}}, '
            'or accept it: allow_replicated: ["embeddings.weight"]'
        )
        override = (("embeddings.weight", AxisMapping({"embed": "model"})),)
        plan([odd, BIG_UP], rules, MeshSpec.of(model=8), hbm_bytes=HBM, overrides=override).check()

    def test_two_mesh_axes_on_two_axes(self):
        mesh = MeshSpec.of(model=8, group=16)
        rules = {"mlp": ["model", "group"], "head_size": None}
        overrides = (("attn.o_proj", AxisMapping({"kv_head": "model", "q_heads_per_group": "group"})),)
        o = leaf("attn.o_proj.weight", layers=4, embed=16384, kv_head=8, q_heads_per_group=16, head_size=128)
        (error,) = plan([BIG_Q, o, BIG_UP], rules, mesh, hbm_bytes=HBM, overrides=overrides).errors
        assert error.suggestion == (
            "shard it, e.g. {kv_head: model, q_heads_per_group: group}, "
            'or accept it: allow_replicated: ["attn.q_proj.weight"]'
        )
        assert "mesh axes model and group shard other parameters" in error.problem

    def test_nothing_divides(self):
        prime = leaf("table", vocab=1_073_741_789)
        (error,) = plan([prime, BIG_UP], {"mlp": "model"}, MeshSpec.of(model=8), hbm_bytes=HBM).errors
        assert error.suggestion == 'none of its axes is divisible by 8; or accept it: allow_replicated: ["table"]'

    @pytest.mark.parametrize("accepted", ["embeddings.weight", "embeddings", "**.weight", "model"])
    def test_the_user_may_accept_it(self, accepted):
        made = plan(
            [EMBED, BIG_UP], {"mlp": "model"}, MeshSpec.of(model=8), hbm_bytes=HBM, allow_replicated=(accepted,)
        )
        note = made.check().notes[0]
        assert note.message.endswith("3.50 GiB of it redundant (model: accepted by allow_replicated)")
        assert note.nbytes == 7 * GIB // 2

    def test_data_parallelism_is_reported_never_refused(self):
        made = plan([EMBED, BIG_UP], {"vocab": "model", "mlp": "model"}, MeshSpec.of(data=4, model=8), hbm_bytes=GIB)
        assert [n.message for n in made.check().notes] == [
            "embeddings.weight [vocab 1048576, embed 1024] float32 is replicated over data 4: 512.00 MiB on each "
            "device, 384.00 MiB of it redundant (data: it shards no parameter (data parallelism))",
            "mlp.up_proj.weight [layers 4, mlp 65536, embed 4096] float32 is replicated over data 4: 512.00 MiB on "
            "each device, 384.00 MiB of it redundant (data: it shards no parameter (data parallelism))",
        ]

    def test_declared_replication_is_reported(self):
        declared = DeclaredReplication(
            has="kv_head", lacks="q_heads_per_group", mesh_axes=("group",), reason="query heads are cut further"
        )
        rules = {"kv_head": "model", "q_heads_per_group": "group"}
        mesh = MeshSpec.of(model=2, group=16)
        made = plan([BIG_Q, BIG_K], rules, mesh, hbm_bytes=HBM, declared=(declared,))
        assert [n.message for n in made.check().notes] == [
            "attn.k_proj.weight [layers 64, kv_head 8, head_size 128, embed 16384] float32 is replicated over group "
            "16: "
            "2.00 GiB on each device, 1.88 GiB of it redundant (group: declared, query heads are cut further)"
        ]
        (error,) = plan([BIG_Q, BIG_K], rules, mesh, hbm_bytes=HBM).errors
        assert isinstance(error, ReplicationError)

    def test_the_thresholds(self):
        """Reported above 0.1 % of a device's memory; an error above 5 % of it, by what one chip holds."""
        w = leaf("w", vocab=1 << 20)  # 4 MiB
        others = leaf("u", mlp=8)

        def made(hbm):
            return plan([w, others], {"mlp": "model"}, MeshSpec.of(model=8), hbm_bytes=hbm)

        assert made(1000 * w.nbytes).findings == ()
        (note,) = made(999 * w.nbytes).findings
        assert note.severity == "note"
        assert note.message.endswith("(model: 0.10% of a device's memory, below 5%)")
        assert made(20 * w.nbytes).findings[0].severity == "note"
        assert made(20 * w.nbytes - 20).findings[0].severity == "error"

    def test_a_chip_of_unknown_size_judges_nothing(self):
        (note,) = plan([EMBED, BIG_UP], {"mlp": "model"}, MeshSpec.of(model=8)).check().notes
        assert note.message.endswith("(model: not checked, because the memory of a device is unknown)")

    def test_mesh_axes_of_size_one_repeat_nothing(self):
        assert plan([EMBED, BIG_UP], {"mlp": "model"}, MeshSpec.of(model=1, data=1), hbm_bytes=HBM).findings == ()


def test_storage_of_8b_parameters():
    """The arithmetic everybody does by hand: 8.03 B parameters in float32 over 4 and over 128 chips."""
    leaves = [
        leaf("embed", vocab=128256, embed=4096),
        leaf("head", vocab=128256, embed=4096),
        leaf("q", layers=32, kv_head=8, q_heads_per_group=4, head_size=128, embed=4096),
        leaf("o", layers=32, embed=4096, kv_head=8, q_heads_per_group=4, head_size=128),
        leaf("k", layers=32, kv_head=8, head_size=128, embed=4096),
        leaf("v", layers=32, kv_head=8, head_size=128, embed=4096),
        leaf("gate", layers=32, mlp=14336, embed=4096),
        leaf("up", layers=32, mlp=14336, embed=4096),
        leaf("down", layers=32, embed=4096, mlp=14336),
        leaf("norm1", layers=32, embed=4096),
        leaf("norm2", layers=32, embed=4096),
        leaf("norm", embed=4096),
    ]
    assert sum(math.prod(x.shape) for x in leaves) == 8_030_261_248
    over = {n: plan(leaves, {"embed": "data"}, MeshSpec.of(data=n)).check().bytes_per_device for n in (4, 128)}
    assert over == {4: 8_030_261_248, 128: 250_945_664}
    assert f"{over[4] / 1e9:.2f} GB" == "8.03 GB"
    assert f"{over[128] / 1e6:.0f} MB" == "251 MB"
