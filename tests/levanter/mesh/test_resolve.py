"""Resolution of what the user wrote: defaults, `heads`, spellings, overrides, notes, and every error."""

import pytest
from helpers.llama_shapes import model_axes, shape_leaves
from jax.sharding import PartitionSpec as P

from haliax_ext.errors import IndivisibleError, ManyShardingErrors, MeshError, ShardingError, UnknownAxisError
from haliax_ext.planner import plan_sharding
from levanter.mesh import MeshConfig, ModelAxes, resolve

pytestmark = pytest.mark.quick

SMALL = ModelAxes(
    sizes=dict(vocab=1024, embed=64, mlp=128, kv_head=4, q_heads_per_group=2, head_size=16, layers=2, position=32),
    known=(
        "vocab",
        "embed",
        "mlp",
        "kv_head",
        "q_heads_per_group",
        "head_size",
        "layers",
        "position",
        "expert",
        "token",
    ),
    aliases={"kv_heads": "kv_head", "layer": "layers"},
)


def small(*, devices=8, granules=1, **config):
    return resolve(MeshConfig(**config), SMALL, devices=devices, granules=granules)


class TestDefaults:
    def test_the_resolved_defaults(self):
        found = small()
        assert dict(found.mappings.params) == {"mlp": "model", "kv_head": "model", "embed": "data"}
        assert dict(found.mappings.compute) == {
            "batch": ("replica_dcn", "replica", "data"),
            "mlp": "model",
            "kv_head": "model",
        }
        assert dict(found.mappings.residual) == {}
        assert found.mappings.residual_stream == found.mappings.compute
        assert (found.batch_axis, found.batch_ways, found.notes) == ("batch", 8, ())

    def test_shared_is_merged_and_null_removes(self):
        found = small(shared_mapping={"mlp": None, "vocab": ["model"]}, axes={"model": 2})
        assert dict(found.mappings.params) == {"kv_head": "model", "vocab": "model", "embed": "data"}
        assert "mlp" not in found.mappings.compute

    def test_giving_param_mapping_replaces_the_default(self):
        assert "embed" not in small(param_mapping={}).mappings.params

    def test_compute_and_param_mappings_are_separate(self):
        found = small(compute_mapping={"batch": ["data"], "position": "model"}, param_mapping={"vocab": "model"})
        assert found.mappings.compute["batch"] == "data"
        assert found.mappings.compute["position"] == "model"
        assert "vocab" not in found.mappings.compute
        assert dict(found.mappings.params) == {"mlp": "model", "kv_head": "model", "vocab": "model"}

    def test_another_batch_axis(self):
        found = small(batch_axis_name="token")
        assert found.mappings.compute["token"] == ("replica_dcn", "replica", "data")
        assert found.batch_ways == 8

    def test_no_batch_axis(self):
        assert "batch" not in small(batch_axis_name=None).mappings.compute
        written = small(batch_axis_name=None, compute_mapping={"batch": "data"})
        assert written.mappings.compute["batch"] == "data"

    def test_flags_reach_the_mappings(self):
        mappings = small(on_conflict="first_wins", allow_replicated=["lm_head"]).mappings
        assert mappings.on_conflict == "first_wins"
        assert mappings.allow_replicated == ("lm_head",)

    def test_first_wins_reaches_the_plan(self):
        found = small(
            axes={"model": 2},
            shared_mapping={"vocab": "model"},
            param_mapping={"embed": "model"},
            on_conflict="first_wins",
        )
        leaves = shape_leaves("llama3.1_8b")
        specs = plan_sharding(leaves, found.mappings, found.spec).check()
        assert specs.spec("embeddings.token_embeddings.weight") == P("model")
        assert specs.spec("transformer.norm.weight") == P("model")

    @pytest.mark.parametrize(("given", "expected"), [(None, None), (16.0, 16 << 30), (0.5, 1 << 29)])
    def test_memory_to_judge_by(self, given, expected):
        assert MeshConfig(hbm_gib=given).hbm_bytes(None) == expected
        assert MeshConfig().hbm_bytes(123) == 123


class TestMultiSlice:
    def test_fsdp_across_slices(self):
        found = small(devices=16, granules=4, param_mapping={"embed": ["replica_dcn", "data"]})
        assert found.mappings.params["embed"] == ("replica_dcn", "data")
        assert found.spec.shape == {"data": 4, "replica": 1, "model": 1, "replica_dcn": 4}
        plan = plan_sharding(shape_leaves("llama3.1_8b"), found.mappings, found.spec).check()
        assert plan.spec("lm_head.weight") == P(None, ("replica_dcn", "data"))
        assert plan.bytes_per_device == 8_030_261_248 * 4 // 16

    @pytest.mark.parametrize(
        ("chips", "granules", "per_chip"),
        [(16, 1, 8_030_261_248 // 4), (16, 4, 8_030_261_248), (128, 1, 250_945_664), (128, 32, 8_030_261_248)],
        ids=["v5p-32", "four 4-chip slices", "v6e-128", "thirty-two 4-chip slices"],
    )
    def test_storage_of_8b_in_float32(self, chips, granules, per_chip):
        """One slice shards over all its chips; separate slices hold a whole copy each, by default."""
        found = resolve(MeshConfig(), model_axes("llama3.1_8b"), devices=chips, granules=granules)
        plan = plan_sharding(shape_leaves("llama3.1_8b"), found.mappings, found.spec).check()
        assert plan.bytes_per_device == per_chip

    def test_fsdp_inside_a_host(self):
        """The two-level reading: weights are cut over 4 chips of a host, the batch over all chips."""
        found = resolve(
            MeshConfig(
                axes={"data": 4, "host": -1}, compute_mapping={"batch": ["replica_dcn", "replica", "host", "data"]}
            ),
            model_axes("llama3.1_8b"),
            devices=128,
        )
        assert found.batch_ways == 128
        assert found.notes == ()
        plan = plan_sharding(shape_leaves("llama3.1_8b"), found.mappings, found.spec, hbm_bytes=32 << 30).check()
        assert plan.bytes_per_device == 8_030_261_248
        assert all(f.message.endswith("(host: it shards no parameter (data parallelism))") for f in plan.notes)
        assert len(plan.notes) == 9


class TestIdleAxes:
    """A mesh axis over which nothing is sharded: the devices along it would do the same work."""

    @pytest.mark.parametrize(
        ("config", "name", "rules"),
        [
            (
                {"axes": {"context": 8}},
                "context 8",
                "compute_mapping: {position: context}, param_mapping: {embed: [data, context]}, attention_mapping: "
                "auto (config/mesh/context.yaml)",
            ),
            (
                {"axes": {"data": 4, "host": -1}},
                "host 2",
                "compute_mapping: {batch: [replica_dcn, replica, data, host]}, param_mapping: {embed: [data, host]}",
            ),
            (
                {"axes": {"model": 2}, "shared_mapping": {"mlp": None, "heads": None}},
                "model 2",
                "shared_mapping: {mlp: model, heads: model, vocab: model}",
            ),
            # A rule for an axis that this model does not have shards nothing.
            (
                {"axes": {"expert": 4}, "shared_mapping": {"expert": "expert", "token": "expert"}},
                "expert 4",
                "compute_mapping: {batch: [replica_dcn, replica, data, expert]}, "
                "param_mapping: {embed: [data, expert]}",
            ),
            (
                {"granules": 2, "dcn_axes": {"pod": -1, "replica_dcn": 1}},
                "pod 2",
                "compute_mapping: {batch: [pod, replica_dcn, replica, data]}",
            ),
        ],
    )
    def test_refused_with_what_would_shard_it(self, config, name, rules):
        with pytest.raises(MeshError) as caught:
            small(**config)
        axis = name.split()[0]
        assert caught.value.problem.startswith(f"trainer.mesh: mesh axis {name} shards nothing: the ")
        assert caught.value.suggestion == f"shard over it with {rules}, or allow it: allow_idle_axes: [{axis}]"

    @pytest.mark.parametrize(
        ("axes", "more"),
        [
            ({"context": 8}, {"compute_mapping": {"position": "context"}, "attention_mapping": "auto"}),
            ({"data": 4, "host": -1}, {"compute_mapping": {"batch": ["replica_dcn", "replica", "data", "host"]}}),
            ({"model": 2}, {"shared_mapping": {"mlp": "model", "heads": "model", "vocab": "model"}}),
        ],
    )
    def test_what_is_suggested_shards_it(self, axes, more):
        assert not [note for note in small(axes=axes, **more).notes if "shards" in note]

    def test_every_idle_axis_is_listed(self):
        with pytest.raises(ManyShardingErrors) as caught:
            small(axes={"context": 2, "host": 2})
        assert [error.problem.split()[3] for error in caught.value.errors] == ["context", "host"]

    def test_an_axis_that_shards_parameters_only_is_noted(self):
        (note,) = small(axes={"host": 2}, param_mapping={"embed": ["data", "host"]}).notes
        assert note.startswith("mesh axis host 2 shards parameters, but no activation: the 2 devices along it compute ")
        assert "param_mapping: {embed: [data, host]}" in note
        (note,) = small(axes={"host": 2}, overrides={"**.embeddings": {"embed": "host"}}).notes
        assert note.startswith("mesh axis host 2 shards parameters")

    def test_allowed_by_name(self):
        (note,) = small(axes={"context": 8}, allow_idle_axes=["context"]).notes
        assert note.startswith("mesh axis context 8 shards nothing, as allow_idle_axes allows; to use it: compute_mapp")
        # A size of 1 is no fault, so one document serves several meshes.
        assert small(axes={"context": 1}, allow_idle_axes=["context"]).notes == ()

    def test_a_name_that_the_mesh_does_not_have(self):
        with pytest.raises(UnknownAxisError, match="allow_idle_axes: 'contxt' is not a mesh axis") as caught:
            small(axes={"context": 8}, allow_idle_axes=["contxt"])
        assert caught.value.suggestion == "did you mean context?"


class TestHeads:
    def test_a_list(self):
        found = small(axes={"model": 4, "group": 2}, shared_mapping={"heads": ["model", "group"]})
        assert found.mappings.params["kv_head"] == "model"
        assert found.mappings.params["q_heads_per_group"] == "group"
        assert found.mappings.compute["q_heads_per_group"] == "group"
        (declared,) = found.mappings.declared
        assert declared.mesh_axes == ("group",)

    def test_every_attention_weight_is_cut(self):
        """Upstream's `heads` reached o_proj alone: 168 GiB a chip at 405B instead of 11.8."""
        config = MeshConfig(axes={"model": 8}, shared_mapping={"vocab": "model"})
        found = resolve(config, model_axes("llama3.1_405b"), devices=128)
        plan = plan_sharding(shape_leaves("llama3.1_405b"), found.mappings, found.spec, hbm_bytes=31 << 30).check()
        attention = [p for p in plan.leaves if "self_attn" in p.leaf.path]
        assert len(attention) == 4
        assert all("model" in str(p.spec) and "data" in str(p.spec) for p in attention)
        assert f"{plan.bytes_per_device / 2**30:.1f} GiB" == "11.8 GiB"

    def test_rules_for_the_parts_win(self):
        found = small(axes={"model": 2}, shared_mapping={"kv_heads": None, "q_heads_per_group": "model"})
        assert "kv_head" not in found.mappings.params
        assert found.mappings.params["q_heads_per_group"] == "model"
        assert "trainer.mesh.shared_mapping: 'kv_heads' is the axis 'kv_head' here" in found.notes
        assert [d.mesh_axes for d in found.mappings.declared] == [("model",)]

    def test_parts_written_in_full_need_no_division_by_heads(self):
        found = resolve(
            MeshConfig(axes={"model": 2}, shared_mapping={"kv_head": None, "q_heads_per_group": None}),
            model_axes("smollm2_135m"),
            devices=8,
        )
        assert dict(found.mappings.params) == {"mlp": "model", "embed": "data"}

    def test_heads_keeps_its_place_in_the_order(self):
        found = small(axes={"model": 2}, shared_mapping={"heads": "model", "vocab": "model"})
        assert list(found.mappings.params) == ["mlp", "kv_head", "vocab", "embed"]

    def test_null_in_an_override_unmaps_both_axes(self):
        found = small(
            axes={"model": 4, "group": 2},
            shared_mapping={"heads": ["model", "group"]},
            overrides={"**.self_attn.*": {"embed": "model", "heads": None}},
        )
        assert dict(found.mappings.params_at("x.self_attn.q_proj.weight")) == {"mlp": "model", "embed": "model"}

    def test_query_groups_alone_are_noted_where_factoring_would_cut_k_and_v(self):
        found = resolve(MeshConfig(axes={"model": 16}), model_axes("llama3.1_405b"), devices=128)
        assert found.mappings.params["q_heads_per_group"] == "model"
        assert found.notes == (
            "heads → model: K and V are replicated over model 16, which does not divide 8 kv_head; axes "
            "{model: 8, group: 2} with heads: [model, group] would shard them 8 ways",
        )

    def test_a_model_with_a_plain_heads_axis(self):
        gpt2 = ModelAxes(sizes=dict(embed=768, heads=12, head_size=64, mlp=3072))
        found = resolve(MeshConfig(axes={"model": 4}), gpt2, devices=8)
        assert found.mappings.params["heads"] == "model"

    def test_a_model_without_attention(self):
        found = resolve(MeshConfig(axes={"model": 4}), ModelAxes(sizes=dict(embed=768, mlp=3072)), devices=8)
        assert dict(found.mappings.params) == {"mlp": "model", "embed": "data"}

    def test_smollm2_on_two_and_its_suggestion(self):
        with pytest.raises(IndivisibleError) as caught:
            resolve(MeshConfig(axes={"data": 4, "model": 2}), model_axes("smollm2_135m"), devices=8)
        assert str(caught.value) == (
            "heads → model: 9 attention heads = 3 kv_head × 3 q_heads_per_group cannot be sharded over model 2\n"
            "  → the heads of this model can be sharded 1, 3, 9 ways; choose such a size, or leave the heads unsharded "
            "and shard the "
            "rest:\n"
            "      mesh:\n"
            "        shared_mapping: {mlp: model, vocab: model, heads: null}"
        )
        mended = MeshConfig(
            axes={"data": 4, "model": 2}, shared_mapping={"mlp": "model", "vocab": "model", "heads": None}
        )
        found = resolve(mended, model_axes("smollm2_135m"), devices=8)
        plan = plan_sharding(shape_leaves("smollm2_135m"), found.mappings, found.spec, hbm_bytes=16 << 30).check()
        assert plan.spec("embeddings.token_embeddings.weight") == P("model", "data")


class TestSplitHeads:
    def split(self, **config):
        base = dict(axes={"model": 128}, split_heads="auto")
        return resolve(MeshConfig(**(base | config)), model_axes("llama3.1_405b"), devices=128)

    def test_405b_as_an_old_document_says_it(self):
        found = self.split()
        assert found.spec.shape == {"data": 1, "replica": 1, "model": 8, "group": 16, "replica_dcn": 1}
        assert dict(found.mappings.params) == {
            "mlp": ("model", "group"),
            "kv_head": "model",
            "q_heads_per_group": "group",
            "vocab": ("model", "group"),
            "embed": "data",
        }
        assert found.notes == (
            "vocab → model was added (split_heads: auto): otherwise embedding and head are replicated over it",
            "mesh axis model 128 was factored into model 8 × group 16 (split_heads: auto): this model has 8 kv_head × "
            "16 q_heads_per_group; K and V are replicated over group",
        )
        plan = plan_sharding(shape_leaves("llama3.1_405b"), found.mappings, found.spec, hbm_bytes=31 << 30).check()
        assert f"{plan.bytes_per_device / 2**30:.2f} GiB" == "13.67 GiB"

    def test_what_divides_is_left_alone(self):
        found = self.split(axes={"model": 8})
        assert "group" not in found.spec.names
        assert found.mappings.params["vocab"] == "model"

    def test_overrides_and_residual_follow(self):
        found = self.split(residual_mapping={"embed": "model"}, overrides={"lm_head": {"vocab": "model"}})
        assert found.mappings.residual["embed"] == ("model", "group")
        assert found.mappings.params_at("lm_head.weight")["vocab"] == ("model", "group")

    def test_a_vocabulary_that_is_mapped_is_left_alone(self):
        found = self.split(shared_mapping={"vocab": None})
        assert "vocab" not in found.mappings.params

    def test_a_vocabulary_that_does_not_divide_is_noted(self):
        odd = ModelAxes(sizes={**SMALL.sizes, "vocab": 1021}, known=SMALL.known)
        found = resolve(MeshConfig(axes={"model": 2}, split_heads="auto"), odd, devices=8)
        assert found.notes == ("vocab 1021 is replicated over model: 1021 % 2 = 1",)

    def test_no_factoring_exists(self):
        with pytest.raises(IndivisibleError, match="can be sharded 1, 2, 4, 8, 16, 32, 64, 128 ways"):
            resolve(MeshConfig(axes={"model": 3}, split_heads="auto"), model_axes("llama3.1_405b"), devices=3)


class TestNames:
    def test_unknown_names_of_all_mappings_come_together(self):
        with pytest.raises(ManyShardingErrors) as caught:
            small(
                axes={"model": 2},
                param_mapping={"embd": "data", "mlp": "modle"},
                residual_mapping={"heads": "dta"},
                overrides={"**.mlp": {"kv_heads": "foo"}},
            )
        names = "batch, embed, head_size, kv_head, layers, mlp, position, q_heads_per_group, vocab"
        has = "but the mesh has only ['data', 'replica', 'model', 'replica_dcn']"
        assert str(caught.value) == (
            "3 sharding errors:\n"
            "[1] trainer.mesh: parameter mapping: 'embd' is neither an axis of this model nor a known axis name (did "
            "you "
            "mean embed?)\n"
            f"trainer.mesh: parameter mapping: mlp → modle, {has} (did you mean model?)\n"
            f"  → axes of this model: {names}\n"
            f"[2] trainer.mesh: residual_mapping: heads → dta, {has} (did you mean data?)\n"
            f"[3] trainer.mesh: overrides['**.mlp']: kv_head → foo, {has}"
        )

    def test_a_misspelt_null_is_an_error_too(self):
        with pytest.raises(UnknownAxisError, match="'mpl' is neither an axis of this model nor a known axis name"):
            small(shared_mapping={"mpl": None})

    def test_the_same_mistake_in_shared_is_reported_once(self):
        with pytest.raises(UnknownAxisError):
            small(shared_mapping={"mlp": "modle"})
        with pytest.raises(UnknownAxisError):
            small(shared_mapping={"heads": "modle"})

    def test_known_but_unused_names_are_notes(self):
        why = "is a known axis, but this model does not have it; the rule has no effect"
        assert small(shared_mapping={"expert": "model", "token": "data"}).notes == (
            f"trainer.mesh: parameter mapping: 'expert' {why}",
            f"trainer.mesh: parameter mapping: 'token' {why}",
        )

    def test_two_spellings_of_one_axis(self):
        assert small(axes={"model": 2}, shared_mapping={"kv_heads": "model", "kv_head": ["model"]}).spec.size == 8
        with pytest.raises(ShardingError) as caught:
            small(shared_mapping={"kv_heads": "data", "kv_head": "model"})
        assert str(caught.value) == (
            "trainer.mesh.shared_mapping: 'kv_heads' and 'kv_head' are the same axis but are mapped differently "
            "(data and model)\n  → keep one of them, spelled 'kv_head'"
        )
