"""Layers of one model that differ in weights: the numbers, how they are scanned, and what others learn of them."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.two_kinds import TwoKindsConfig, installed, numpy_logits, rules

from haliax_ext.abstract import abstract, leaves, with_arrays
from levanter.compat.hf.config_bridge import check_model_block, expected_tensors
from levanter.compat.hf.errors import ConfigMismatchError
from levanter.layers.protocols import merged_axes
from levanter.models.activations import kept_by_name, layer_activations
from levanter.models.decoder import DecoderLmHeadModel
from levanter.models.decoder.pattern import expand_pattern
from levanter.plan.search import candidates

Vocab, Batch, Pos = Axis("vocab", 61), Axis("batch", 2), Axis("position", 24)
IDS = np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32)
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 24)), axis=-1).astype(np.int32)


def config(**changes) -> TwoKindsConfig:
    base = dict(
        max_seq_len=24,
        hidden_dim=32,
        intermediate_dim=48,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=61,
        channels=40,
        initializer_range=0.3,
        attn_backend="reference",
    )
    return TwoKindsConfig(**(base | changes))


@functools.cache
def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng([ord(letter) for letter in name]).standard_normal(shape).astype(np.float32)
    return 1 + np.float32(0.1) * noise if name.endswith("norm.weight") else np.float32(0.2) * noise


def tensors_and_model(config):
    """A checkpoint's tensors, and the model that has them however its layers are stacked."""
    module = abstract(lambda: DecoderLmHeadModel.init(Vocab, config, key=jax.random.PRNGKey(0)))
    table = rules(config, Vocab)
    table.check(leaves(module))
    tensors, arrays = {}, {}
    for leaf in leaves(module):
        rule = table.by_target()[leaf.path]
        names = rule.source_names(leaf)
        own = {name: tensor(name, rule.source_shape(leaf)) for name in names}
        assert not own.keys() & tensors.keys()
        tensors |= own
        order = [*rule.stacked, *(name for group in rule.axes for name in group)]
        array = np.stack(list(own.values())).reshape([leaf.axis_size(name) for name in order])
        arrays[leaf.path] = jnp.asarray(array.transpose([order.index(name) for name in leaf.names]))
    return tensors, with_arrays(module, arrays)


CASES = {
    "two places": (dict(pattern="FC", num_layers=4), [(2, 2)]),
    "a rest": (dict(pattern="FC"), [(2, 2), (1, 1)]),
    "once, then again": (dict(pattern="C(CF)", num_layers=7), [(1, 2), (2, 2), (1, 1)]),
    "no period": (
        dict(layer_types=("full_attention", "convolution", "convolution", "full_attention", "full_attention")),
        [(1, 1), (1, 2), (1, 2)],
    ),
    "one kind": (dict(pattern="C"), [(1, 5)]),
    "one by one": (dict(pattern="FC", scan_layers=False), None),
    "without feed-forward parts": (dict(pattern="FC", bare=True), [(2, 2), (1, 1)]),
    "with narrower ones": (dict(pattern="FC", narrow=36), [(2, 2), (1, 1)]),
    "nested": (dict(pattern="FC", num_layers=4, gradient_checkpointing="nested"), [(2, 2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_a_plain_loop_over_the_layers(case):
    changes, runs = CASES[case]
    kind = config(**changes)
    if runs is not None:
        assert [(len(run.places), run.periods) for run in kind.runs] == runs
    tensors, model = tensors_and_model(kind)

    @jax.jit
    def logits(model, ids, segments):
        found = model(hax.named(ids, (Batch, Pos)), segment_ids=hax.named(segments, (Batch, Pos)))
        with jax.default_matmul_precision("highest"):
            return model.head(found.activations).array

    found = logits(model, jnp.asarray(IDS), jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(found, numpy_logits(kind, tensors, IDS, SEGMENTS), atol=2e-4)


def test_a_layer_of_its_own_kind_has_its_own_leaves_and_rules():
    kind = config(pattern="FC", num_layers=4)
    tensors, model = tensors_and_model(kind)
    paths = [leaf.path for leaf in leaves(model)]
    assert {path.split(".")[5] for path in paths if ".places.0." in path} == {
        *("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    }
    assert "transformer.layers.stacked.places.1.mixer.kernel" in paths
    assert {name for name in tensors if "kernel" in name} == {
        "model.layers.1.conv.kernel",
        "model.layers.3.conv.kernel",
    }
    assert tensors["model.layers.1.conv.kernel"].shape == (40, 3)


def test_what_is_counted_are_the_layers_that_there_are():
    kind = config(pattern="FCC", num_layers=5)  # F C C F C
    held = sum(
        leaf.nbytes // 4
        for leaf in leaves(abstract(lambda: DecoderLmHeadModel.init(Vocab, kind, key=jax.random.PRNGKey(0))))
    )
    norms, table = (2 * 5 + 1) * 32, 61 * 32
    assert kind.matmul_parameters(61) == held - norms - table
    assert kind.windows == ((None, 2 * 32),)
    assert {name: axis.size for name, axis in kind.axes.items() if name != "layers"} == {
        **{"embed": 32, "mlp": 48, "kv_head": 2, "q_heads_per_group": 2, "head_size": 8, "channel": 40, "tap": 3}
    }
    assert list(layer_activations(kind)) == ["queries", "keys and values", "mlp hidden", "channels"]
    remembered = [layer.mixer.decode_state(np.float32) for layer in kind.layers[:2]]
    assert [{name: (leaf.kind, leaf.names) for name, leaf in leaves.items()} for leaves in remembered] == [
        {"pages": ("paged", ("page", "kv_head", "kv", "slot", "head_size"))},
        {"latest": ("slot", ("batch", "tap", "channel"))},
    ]


def test_a_size_that_kinds_do_not_share_is_one_that_divides_both():
    assert merged_axes([Axis("mlp", 48), Axis("embed", 8), Axis("mlp", 36)]) == {
        "mlp": Axis("mlp", 12),
        "embed": Axis("embed", 8),
    }


def test_parts_of_one_name_and_several_sizes(tmp_path):
    kind = config(pattern="FC", narrow=36)
    assert kind.axes["mlp"].size == 12
    assert [axes for name, axes in layer_activations(kind).items() if name.startswith("mlp hidden")] == [
        (Axis("mlp", 48),),
        (Axis("mlp", 36),),
    ]
    with installed(tmp_path):
        of_up = {
            # A bare folder may leave out `model.`.
            each.shape: tuple(name for name in each.names if name.startswith("model."))
            for each in expected_tensors(kind)
            if "mlp.up_proj" in each.names[0]
        }
    assert of_up == {
        (48, 32): tuple(f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 2, 4)),
        (36, 32): tuple(f"model.layers.{n}.mlp.up_proj.weight" for n in (1, 3)),
    }


def test_no_kernel_is_chosen_for_a_model_without_attention():
    kind = config(pattern="C")
    assert kind.for_platform("tpu", compute_dtype="float32") == (kind, ())
    assert not kind.ropes and not kind.windows


def test_a_pattern_and_a_list_of_the_same_layers_are_one_architecture(tmp_path):
    listed = config(layer_types=("full_attention", "convolution") * 2 + ("full_attention",))
    with installed(tmp_path):
        check_model_block({"type": "two_kinds", "pattern": "FC"}, listed)
        check_model_block({"layer_types": list(listed.types)}, config())
        with pytest.raises(ConfigMismatchError, match=r"model\.pattern is 'FFC'"):
            check_model_block({"pattern": "FFC"}, listed)


def test_what_gradient_checkpointing_may_keep_is_what_the_layers_name():
    kind = config(pattern="FCC", gradient_checkpointing={"save_block_internals": ["convolved", "key"]})
    assert kept_by_name(kind, {"channel": 40}, ("convolved", "key")) == {"convolved": 3}
    assert kept_by_name(kind, {"kv_head": 2, "head_size": 8}, ("convolved", "key")) == {"key": 2}
    with pytest.raises(
        ValueError, match=r"no activation of a block is named \['convolve'\] \(did you mean convolved\?\)"
    ):
        config(gradient_checkpointing={"save_block_internals": ["convolve"]})
    with pytest.raises(ValueError, match=r"no activation of a block is named \['convolved'\]"):
        config(pattern="F", gradient_checkpointing={"save_block_internals": ["convolved"]})
    _, model = tensors_and_model(kind)
    traced = str(jax.make_jaxpr(lambda model: model(hax.named(IDS, (Batch, Pos))).activations.array)(model))
    assert {name for name in kind.saved_names if f"name={name}" in traced} == set(kind.saved_names)


def test_the_search_cuts_what_the_layers_say():
    kind = config(num_heads=8, num_kv_heads=2, hidden_dim=64, intermediate_dim=64, channels=32)
    sizes = {name: axis.size for name, axis in kind.axes.items()} | {"vocab": 64}
    found = candidates(sizes, tensor_axes=kind.tensor_axes, devices=16, global_batch=16)
    assert {(c.model, c.group) for c in found} == {(1, 1), (2, 1), (2, 2), (2, 4)}
    (cut,) = {c.cut for c in found}
    assert sorted(cut) == ["channel", "heads", "mlp"]
    written = next(c for c in found if c.tensor_ways == 4).mesh_options()["shared_mapping"]
    assert written == {name: ["model", "group"] for name in ("channel", "heads", "mlp", "vocab")}
    narrow = candidates({**sizes, "channel": 6}, tensor_axes=kind.tensor_axes, devices=16, global_batch=16)
    assert {c.tensor_ways for c in narrow} == {1, 2}
    # A model without attention has nothing to share between two mesh axes.
    alone = candidates(sizes, tensor_axes=config(pattern="C").tensor_axes, devices=16, global_batch=16)
    assert {(c.model, c.group) for c in alone} == {(n, 1) for n in (1, 2, 4, 8, 16)}


def test_patterns():
    kinds = {"F": "full", "S": "sliding"}
    assert expand_pattern("SSF", kinds=kinds, layers=7) == tuple(kinds[x] for x in "SSFSSFS")
    assert expand_pattern("(SSF)", kinds=kinds, layers=3) == tuple(kinds[x] for x in "SSF")
    assert expand_pattern("FF(SF)", kinds=kinds, layers=6) == tuple(kinds[x] for x in "FFSFSF")
    for pattern, message in {
        "SXF": r"has 'X'; letters are F full, S sliding",
        "SS(F": "parentheses",
        "(SF)S": "parentheses",
        "": "parentheses",
        "SSSSSSSS": r"has 8 letters for model\.num_layers 7",
    }.items():
        with pytest.raises(ValueError, match=message):
            expand_pattern(pattern, kinds=kinds, layers=7)
    with pytest.raises(ValueError, match=r"layer_types and model\.pattern both give"):
        config(pattern="FC", layer_types=("convolution",) * 5)
    with pytest.raises(ValueError, match=r"layer_types has 'convolutions'.*did you mean convolution\?"):
        config(layer_types=("convolutions",) * 5)
