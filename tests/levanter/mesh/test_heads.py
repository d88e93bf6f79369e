"""`heads`: how attention heads are distributed, factored and refused."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from haliax_ext.errors import IndivisibleError
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.heads import distribute, expand_heads, factor, legal_ways, split_axis, with_group

pytestmark = pytest.mark.quick

LLAMA_405B = {"kv_heads": 8, "q_per_group": 16}
SMOL = {"kv_heads": 3, "q_per_group": 3}


def expand(mesh_axes, mesh, *, sizes=None, **heads):
    done = expand_heads(mesh_axes, mesh=MeshSpec.of(**mesh), sizes=sizes, **heads)
    return done.kv_head, done.q_heads_per_group


class TestDistribution:
    def test_kv_head_takes_what_divides_it(self):
        assert expand(["model"], {"model": 8}, **LLAMA_405B) == (("model",), ())

    def test_the_rest_goes_to_the_query_groups(self):
        assert expand(["model", "group"], {"model": 8, "group": 16}, **LLAMA_405B) == (("model",), ("group",))
        assert expand(["a", "b", "c"], {"a": 2, "b": 4, "c": 16}, **LLAMA_405B) == (("a", "b"), ("c",))

    def test_multi_query_attention(self):
        """One K/V head: all cuts go to the queries, and K/V stay whole, which is declared."""
        done = expand_heads(["model"], kv_heads=1, q_per_group=32, mesh=MeshSpec.of(model=8))
        assert (done.kv_head, done.q_heads_per_group) == ((), ("model",))
        (declared,) = done.declared
        assert declared.applies(("layers", "kv_head", "head_size", "embed"))
        assert not declared.applies(("kv_head", "q_heads_per_group", "head_size"))
        assert not declared.applies(("vocab", "embed"))
        assert declared.mesh_axes == ("model",)

    def test_multi_head_attention_declares_nothing(self):
        assert expand_heads(["model"], kv_heads=32, q_per_group=1, mesh=MeshSpec.of(model=8)).declared == ()

    def test_a_mesh_axis_of_size_one(self):
        assert expand(["model"], {"model": 1}, **SMOL) == (("model",), ())


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3),
)
def test_distributions_divide_and_take_all_mesh_axes_in_order(kv_heads, q_per_group, ways):
    mesh = MeshSpec.of(**{f"m{n}": size for n, size in enumerate(ways)})
    done = distribute(mesh.names, kv_heads=kv_heads, q_per_group=q_per_group, mesh=mesh)
    legal = [
        cut
        for cut in range(len(ways) + 1)
        if kv_heads % math.prod(ways[:cut]) == 0 and q_per_group % math.prod(ways[cut:]) == 0
    ]
    # The longest prefix that divides kv_head is the one tried.
    longest = max(cut for cut in range(len(ways) + 1) if kv_heads % math.prod(ways[:cut]) == 0)
    assert (done is not None) == (longest in legal)
    if done is not None:
        assert (*done.kv_head, *done.q_heads_per_group) == mesh.names
        assert len(done.kv_head) == longest


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 64))
def test_factoring_equals_trial(kv_heads, q_per_group, ways):
    pairs = [(a, ways // a) for a in range(1, ways + 1) if ways % a == 0]
    legal = [(a, b) for a, b in pairs if kv_heads % a == 0 and q_per_group % b == 0]
    assert factor(ways, kv_heads=kv_heads, q_per_group=q_per_group) == (max(legal) if legal else None)
    assert (ways in legal_ways(kv_heads, q_per_group)) == bool(legal)


class TestErrors:
    def test_smollm2_on_two(self):
        with pytest.raises(IndivisibleError) as caught:
            expand(["model"], {"model": 2}, sizes={"mlp": 1536, "vocab": 49152}, **SMOL)
        assert str(caught.value) == (
            "heads → model: 9 attention heads = 3 kv_head × 3 q_heads_per_group cannot be sharded over model 2\n"
            "  → the heads of this model can be sharded 1, 3, 9 ways; choose such a size, or leave the heads unsharded "
            "and shard the "
            "rest:\n"
            "      mesh:\n"
            "        shared_mapping: {mlp: model, vocab: model, heads: null}"
        )

    def test_405b_on_128_names_the_factoring(self):
        with pytest.raises(IndivisibleError) as caught:
            expand(["model"], {"model": 128}, **LLAMA_405B)
        assert str(caught.value) == (
            "heads → model: 128 attention heads = 8 kv_head × 16 q_heads_per_group cannot be sharded over model 128\n"
            "  → factor the mesh axis, 8 for kv_head and 16 for q_heads_per_group:\n"
            "      mesh:\n"
            "        axes: {model: 8, group: 16}\n"
            "        shared_mapping: {heads: [model, group], mlp: [model, group], vocab: [model, group]}"
        )
        assert expand(["model", "group"], {"model": 8, "group": 16}, **LLAMA_405B) == (("model",), ("group",))

    def test_the_wrong_order_of_two(self):
        with pytest.raises(IndivisibleError) as caught:
            expand(["model", "group"], {"model": 16, "group": 8}, **LLAMA_405B)
        assert str(caught.value) == (
            "heads → [model, group]: 128 attention heads = 8 kv_head × 16 q_heads_per_group cannot be sharded over "
            "model 16 × group 8 = 128\n"
            "  → kv_head takes the leading mesh axes; they divide in this order: heads: [group, model]"
        )

    def test_a_suggestion_names_only_what_divides(self):
        with pytest.raises(IndivisibleError) as caught:
            expand(["model"], {"model": 2}, sizes={"mlp": 1536, "vocab": 50257}, **SMOL)
        assert caught.value.suggestion.endswith("shared_mapping: {mlp: model, vocab: null, heads: null}")


@given(st.integers(1, 8), st.integers(1, 8), st.permutations([2, 3, 4]))
def test_a_suggested_order_works(kv_heads, q_per_group, ways):
    mesh = MeshSpec.of(**{f"m{n}": size for n, size in enumerate(ways)})
    heads = {"kv_heads": kv_heads, "q_per_group": q_per_group}
    assume(distribute(mesh.names, mesh=mesh, **heads) is None)
    with pytest.raises(IndivisibleError) as caught:
        expand_heads(mesh.names, mesh=mesh, **heads)
    works = any(distribute(order, mesh=mesh, **heads) for order in itertools.permutations(mesh.names))
    assert ("they divide in this order" in caught.value.suggestion) == works


class TestSplitting:
    MESH = MeshSpec.of(data=1, replica=1, model=128)

    def test_group_follows_the_axis_it_came_from(self):
        new, pair = split_axis(self.MESH, "model", **LLAMA_405B)
        assert pair == (8, 16)
        assert list(new.axes) == [("data", 1), ("replica", 1), ("model", 8), ("group", 16)]

    def test_not_where_it_cannot_or_need_not(self):
        assert split_axis(MeshSpec.of(model=8), "model", **LLAMA_405B) is None
        assert split_axis(MeshSpec.of(model=5), "model", **LLAMA_405B) is None
        assert split_axis(MeshSpec.of(model=128, group=1), "model", **LLAMA_405B) is None

    def test_rules_after_the_split(self):
        rules = {"mlp": "model", "embed": "data", "heads": ["model"], "kv_head": "model", "q_heads_per_group": "model"}
        assert with_group({**rules, "vocab": None, "batch": ["replica", "data"]}, "model") == {
            "mlp": ["model", "group"],
            "embed": "data",
            "heads": ["model", "group"],
            "kv_head": "model",
            "q_heads_per_group": ["group"],
            "vocab": None,
            "batch": ["replica", "data"],
        }
