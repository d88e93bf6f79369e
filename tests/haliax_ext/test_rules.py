"""Weight rules: what they mean, what they refuse, and the way back."""

import numpy as np
import pytest
from helpers.memory_source import MemorySource
from helpers.tiny_llama import SIZES, assembled, leaf, tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext.abstract import Leaf
from haliax_ext.leaf_layout import to_slices
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_scheduler import byte_ranges
from haliax_ext.rules import FusedPart, WeightMismatchError, WeightRule, WeightRuleError, WeightRules
from haliax_ext.saving import gather_tensors, plan_saving
from haliax_ext.sources import TensorInfo

pytestmark = pytest.mark.quick


def infos(tensors):
    return {n: TensorInfo(name=n, shape=a.shape, dtype=a.dtype, nbytes=a.nbytes) for n, a in tensors.items()}


def test_every_leaf_finds_its_tensors_in_order():
    matches = tiny_rules().match(tiny_leaves(), infos(tiny_tensors()))
    by_path = {match.leaf.path: match for match in matches}
    q = by_path["transformer.layers.stacked.self_attn.q_proj.weight"]
    assert q.names == tuple(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3))
    assert q.layout.part_shape == (32, 16)


def test_everything_that_does_not_fit_is_listed_together_with_nearest_names():
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.gate_prj.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((8, 16), np.float32)
    tensors["model.norm.weight"] = np.zeros(16, np.int32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    with pytest.raises(WeightMismatchError) as caught:
        tiny_rules().match(tiny_leaves(), infos(tensors))
    error = caught.value
    assert error.missing == ("model.layers.1.mlp.gate_proj.weight",)
    assert error.unexpected == ("model.layers.1.mlp.gate_prj.weight",)
    assert error.misshaped == ("model.layers.2.self_attn.k_proj.weight", "model.norm.weight")
    assert str(error) == (
        "the checkpoint does not fit the model: 1 tensors missing, 1 unexpected, 2 of the wrong shape or dtype\n"
        "missing:\n"
        "  model.layers.1.mlp.gate_proj.weight (for transformer.layers.stacked.mlp.gate_proj.weight); nearest: "
        "model.layers.1.mlp.gate_prj.weight\n"
        "unexpected:\n"
        "  model.layers.1.mlp.gate_prj.weight [32, 16]; nearest: model.layers.1.mlp.gate_proj.weight\n"
        "wrong shape or dtype:\n"
        "  model.layers.2.self_attn.k_proj.weight [8, 16]: expected [16, 16] = [kv_head 4 × head_size 4, embed 16] "
        "for transformer.layers.stacked.self_attn.k_proj.weight [layers 3, kv_head 4, head_size 4, embed 16]\n"
        "  model.norm.weight is int32, but transformer.norm.weight is float32"
    )


def test_long_lists_are_counted():
    tensors = {f"strange.{i}": np.zeros(1, np.float32) for i in range(50)} | tiny_tensors()
    with pytest.raises(WeightMismatchError, match=r"… and 30 more"):
        tiny_rules().match(tiny_leaves(), infos(tensors))


def test_rules_that_misname_axes_are_the_tables_fault():
    rules = WeightRules(
        rules=(
            WeightRule(target="a", source="a.{layer}", axes=(("embed",), ("mlp", "mlp"))),
            WeightRule(target="b", source="b", axes=(("embed",),), part=FusedPart(axis=1, start=0, size=8, of=4)),
        )
    )
    leaves = [leaf("a", "layers", "embed", "mlp"), leaf("b", "embed"), leaf("aa", "embed")]
    with pytest.raises(WeightRuleError) as caught:
        rules.check(leaves)
    assert str(caught.value) == (
        "rule for a: the rule names 'layer', which is not an axis of a float32[layers 3, embed 16, mlp 32] (did you "
        "mean "
        "layers?)\n"
        "rule for a: axis 'layers' of a float32[layers 3, embed 16, mlp 32] appears in neither 'a.{layer}' nor `axes`\n"
        "rule for a: the rule uses axis 'mlp' more than once\n"
        "rule for b: part is on source axis 1, but the rule has 1\n"
        "rule for b: part [0, 8) is not inside an axis of 4\n"
        "no rule for aa float32[embed 16] (nearest: a)"
    )


def test_aliases_optional_rules_and_padding():
    rules = WeightRules(
        rules=(
            WeightRule(target="w", source="model.w", axes=(("vocab",), ("embed",)), padded=("vocab",)),
            WeightRule(target="bias", source="model.bias", axes=(("embed",),), optional=True),
        ),
        aliases=(("model.*", "*"),),
    )
    held = infos({"w": np.zeros((37, 16), np.float32)})
    (match,) = rules.match([leaf("w", "vocab", "embed"), leaf("bias", "embed")], held)
    assert match.names == ("w",)
    assert match.layout.extents == (37, 16)
    with pytest.raises(WeightMismatchError, match=r"at most vocab 40, embed 16"):
        rules.match([leaf("w", "vocab", "embed")], infos({"w": np.zeros((41, 16), np.float32)}))


def test_parts_of_a_fused_tensor_go_out_and_come_back():
    n = SIZES["kv_head"] * SIZES["head_size"]
    rules = WeightRules(
        rules=tuple(
            WeightRule(
                target=name,
                source="c_attn.{layers}",
                axes=(("embed",), ("kv_head", "head_size")),
                part=FusedPart(axis=1, start=i * n, size=n, of=3 * n),
            )
            for i, name in enumerate("qkv")
        )
    )
    leaves = [leaf(name, "layers", "kv_head", "head_size", "embed") for name in "qkv"]
    rng = np.random.default_rng(0)
    fused = {f"c_attn.{i}": rng.normal(size=(16, 3 * n)).astype(np.float32) for i in range(3)}
    for i, match in enumerate(rules.match(leaves, infos(fused))):
        columns = np.stack([fused[name][:, i * n : (i + 1) * n] for name in match.names])
        wanted = columns.reshape(3, 16, 4, 4).transpose(0, 2, 3, 1)
        block = np.zeros(match.leaf.shape, np.float32)
        for stack, name in zip(np.ndindex(3), match.names, strict=True):
            digits = [tuple((0, s) for s in sizes) for sizes in match.layout.group_sizes]
            box = match.layout.source_box(digits)
            copy = match.layout.copy(stack, digits, tuple((0, s) for s in match.leaf.shape))
            copy.scatter(np.ascontiguousarray(fused[name][to_slices(box)]), block)
        np.testing.assert_array_equal(block, wanted)
        leaves_values = {match.leaf.path: wanted}
        for name, (shape, pieces) in rules.sources(leaves).items():
            tensor = np.zeros(shape, np.float32)
            piece = next(p for p in pieces if p.target == match.leaf.path)
            piece.write(leaves_values[piece.target][to_slices(piece.box)], tensor)
            np.testing.assert_array_equal(tensor[:, i * n : (i + 1) * n], fused[name][:, i * n : (i + 1) * n])


def interleaved_rules() -> WeightRules:
    """Queries, keys and values of one head after the other, as in GPT-NeoX; `q` has two heads for each of the keys'."""
    g, h = SIZES["q_heads_per_group"], SIZES["head_size"]
    parts = {"q": (0, g), "k": (g, 1), "v": (g + 1, 1)}
    rules = []
    for name, (start, heads) in parts.items():
        inner = ("q_heads_per_group", "head_size") if name == "q" else ("head_size",)
        part = FusedPart(axis=0, start=start * h, size=heads * h, of=(g + 2) * h, repeats_over=("kv_head",))
        for kind, others in (("weight", (("embed",),)), ("bias", ())):
            axes = (("kv_head", *inner), *others)
            rules.append(WeightRule(target=f"{name}.{kind}", source=f"h.{{layers}}.qkv.{kind}", axes=axes, part=part))
    return WeightRules(rules=tuple(rules))


def interleaved_leaves() -> list[Leaf]:
    found = []
    for name in "qkv":
        heads = ("kv_head", "q_heads_per_group", "head_size") if name == "q" else ("kv_head", "head_size")
        found += [leaf(f"{name}.weight", "layers", *heads, "embed"), leaf(f"{name}.bias", "layers", *heads)]
    return found


def interleaved_tensors() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The fused tensors, and the leaves as NumPy takes them out of these."""
    kv, g, h, embed, layers = (SIZES[n] for n in ("kv_head", "q_heads_per_group", "head_size", "embed", "layers"))
    rng = np.random.default_rng(1)
    fused = {}
    for layer in range(layers):
        fused[f"h.{layer}.qkv.weight"] = rng.normal(size=(kv * (g + 2) * h, embed)).astype(np.float32)
        fused[f"h.{layer}.qkv.bias"] = rng.normal(size=kv * (g + 2) * h).astype(np.float32)
    taken = {}
    for kind in ("weight", "bias"):
        whole = np.stack([fused[f"h.{n}.qkv.{kind}"] for n in range(layers)])
        by_head = whole.reshape(layers, kv, g + 2, h, *whole.shape[2:])
        taken |= {f"q.{kind}": by_head[:, :, :g], f"k.{kind}": by_head[:, :, g], f"v.{kind}": by_head[:, :, g + 1]}
    return fused, taken


def test_pieces_that_come_again_go_out_and_come_back(devices):
    fused, taken = interleaved_tensors()
    mesh = MeshSpec.of(data=4, model=2)
    for mapping in ({}, {"kv_head": "data", "embed": "model"}, {"head_size": "data", "q_heads_per_group": "model"}):
        source = MemorySource(fused)
        sharding = plan_sharding(interleaved_leaves(), Mappings(params=AxisMapping(mapping)), mesh).check()
        plan = plan_loading(sharding, interleaved_rules(), source)
        found = load(plan, sharding, source, mesh.build(devices))
        for path, wanted in taken.items():
            np.testing.assert_array_equal(np.asarray(found[path]), wanted)
        assert source.bytes_read == source.nbytes
        written = gather_tensors(plan_saving(interleaved_leaves(), interleaved_rules()), found)
        out = {tensor.name: array for tensor, array in written}
        assert set(out) == set(fused)
        for name, tensor in fused.items():
            np.testing.assert_array_equal(out[name], tensor)


@pytest.mark.parametrize("mapping", [{"kv_head": "data"}, {"embed": "data"}, {"head_size": "data"}, {}])
def test_hosts_read_each_byte_of_fused_tensors_once(mapping):
    """Whatever is cut over the 4 hosts; where that is heads, each of them reads its own and nothing is exchanged."""
    fused, _ = interleaved_tensors()
    source = MemorySource(fused)
    mesh = MeshSpec.of(data=4, model=2)
    sharding = plan_sharding(interleaved_leaves(), Mappings(params=AxisMapping(mapping)), mesh).check()
    plan = plan_loading(sharding, interleaved_rules(), source, hosts=np.repeat(np.arange(4), 2).reshape(4, 2))
    assert plan.source_bytes == source.nbytes == sum(plan.bytes_by_host)
    owner = np.full(source.nbytes, -1)
    for host in range(4):
        for piece in byte_ranges(plan, source, host):
            assert (owner[piece.start : piece.stop] == -1).all()
            owner[piece.start : piece.stop] = host
    assert (owner >= 0).all()
    if mapping != {"kv_head": "data"}:
        return
    assert {each.strategy for each in plan.loads} == {"direct"}
    at = 0
    for tensor in fused.values():
        assert (owner[at : at + tensor.nbytes] == np.repeat(np.arange(4), tensor.nbytes // 4)).all()
        at += tensor.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats_over": ("head_size",)}, "repeats over ('head_size',); source axis ('kv_head', 'head_size')"),
        (
            {"repeats_over": ("kv_head", "head_size"), "size": 1},
            "('kv_head', 'head_size') must begin with them and have more",
        ),
        ({"size": 3}, "the part is 3 long, but head_size is 4"),
        ({"repeats_over": (), "size": 3}, "the part is 3 long, but kv_head × head_size is 16"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(changes, message):
    part = FusedPart(**{**dict(axis=0, start=4, size=4, of=12, repeats_over=("kv_head",)), **changes})
    rules = WeightRules(rules=(WeightRule(target="k", source="qkv", axes=(("kv_head", "head_size"),), part=part),))
    with pytest.raises(WeightRuleError) as caught:
        rules.check([leaf("k", "kv_head", "head_size")])
    assert message in str(caught.value)


def test_a_piece_begins_where_a_head_begins():
    axes = (("kv_head", "q_heads_per_group", "head_size"),)
    part = FusedPart(axis=0, start=2, size=8, of=16, repeats_over=("kv_head",))
    rules = WeightRules(rules=(WeightRule(target="q", source="qkv", axes=axes, part=part),))
    with pytest.raises(WeightRuleError, match="begins at 2 of 16, and both must be multiples of 4"):
        rules.check([leaf("q", "kv_head", "q_heads_per_group", "head_size")])


def test_a_whole_checkpoint_comes_back_from_its_leaves():
    tensors = tiny_tensors()
    leaves = assembled(tensors)
    found = {}
    for name, (shape, pieces) in tiny_rules().sources(tiny_leaves()).items():
        found[name] = np.full(shape, np.nan, np.float32)
        for piece in pieces:
            piece.write(leaves[piece.target][to_slices(piece.box)], found[name])
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_numbered_layers_of_a_stack():
    """A leaf may stand for every third layer of a checkpoint, from the second one on."""
    rules = WeightRules(
        rules=(WeightRule(target="w", source="h.{3*layers+1}.w", axes=(("embed",),)),
               WeightRule(target="v", source="h.{1*layers+9}.v", axes=(("embed",),))),
    )  # fmt: skip
    w, v = leaf("w", "layers", "embed"), leaf("v", "layers", "embed")
    rules.check([w, v])
    assert rules.by_target()["w"].stacked == ("layers",)
    assert rules.by_target()["w"].source_names(w) == ["h.1.w", "h.4.w", "h.7.w"]
    assert rules.by_target()["v"].source_names(v) == ["h.9.v", "h.10.v", "h.11.v"]
    assert rules.by_target()["w"].source_at("layers", 2) == "h.7.w"
    experts = WeightRule(target="e", source="h.{2*layers+1}.{expert}.w", axes=(("embed",),))
    assert experts.source_at("layers", 3) == "h.7.{expert}.w" and experts.source_at("expert", 4) == "h.{2*layers+1}.4.w"
    values = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)
    for n, (name, (shape, (piece,))) in enumerate(rules.sources([w, v]).items()):
        tensor = np.zeros(shape, np.float32)
        piece.write(values[to_slices(piece.box)], tensor)
        assert name in ("h.1.w", "h.4.w", "h.7.w", "h.9.v", "h.10.v", "h.11.v")
        np.testing.assert_array_equal(tensor, values[n % 3])
