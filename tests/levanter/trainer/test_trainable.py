"""A model of which a part is trained: what is computed of the rest, and what is not."""

import dataclasses
import re
from collections import Counter
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, abstract_model, random_arrays, tiny_config
from helpers.losses import target_logprobs
from helpers.train_steps import CONFIG, TOKENS, mesh_setup, on_host

from haliax_ext.abstract import leaves, with_arrays
from levanter.models.param_groups import NORM, parameter_group
from levanter.optim import AdafactorConfig, AdamConfig, MuonConfig
from levanter.trainer.frozen_identity import digest_program
from levanter.trainer.frozen_identity import on_host as digests_on_host
from levanter.trainer.trainable import Partition, bind
from levanter.trainer.watch import Watch

NORMS = ("norm",)
SOME = ("norm", "lm_head", "**.q_proj")


@cache
def on_one_device(devices, trainable):
    return mesh_setup(1, 1, trainable=trainable).run(devices)


def is_norm(path):
    return "norm" in path


def test_a_partition_is_of_groups_and_of_paths():
    model = abstract_model(CONFIG)
    trained, frozen = Partition.of(SOME, model).split(model)
    paths, others = ([leaf.path for leaf in leaves(part)] for part in (trained, frozen))
    expected = [
        leaf.path
        for leaf in leaves(model)
        if parameter_group(leaf) == NORM or leaf.path.startswith("lm_head") or ".q_proj." in leaf.path
    ]
    assert paths == expected and 0 < len(others) == len(leaves(model)) - len(paths)
    # Together they are the model, in its order.
    assert leaves(bind(trained, frozen)) == leaves(model)
    assert jax.tree.structure(bind(trained, frozen)) == jax.tree.structure(model)


@pytest.mark.parametrize("patterns", [None, ("**",), ("embedding", "attention", "mlp", "head", "norm")])
def test_where_everything_is_trained_nothing_is_frozen(patterns):
    model = abstract_model(CONFIG)
    trained, frozen = Partition.of(patterns, model).split(model)
    assert trained is model and frozen is None and bind(trained, None) is model


def test_patterns_that_match_nothing_are_all_told():
    model = abstract_model(tiny_config(tie_word_embeddings=True))
    with pytest.raises(ValueError) as caught:
        Partition.of(("norms", "head", "q_proj", "norm"), model)
    said = str(caught.value).splitlines()
    assert said[0].startswith("trainer.trainable[0] 'norms' matches no parameter; did you mean norm")
    assert said[1].endswith("'head' matches no parameter; the groups of this model are attention, embedding, mlp, norm")
    assert "'q_proj' matches no parameter; did you mean **.q_proj" in said[2] and len(said) == 3
    with pytest.raises(ValueError, match=r"trainer\.trainable is empty"):
        Partition.of((), model)


MESHES = {
    "4x2_accumulated": mesh_setup(4, 2, per_device=1, trainable=SOME),
    "8x1": mesh_setup(8, 1, trainable=SOME),
    "1x8_norms": mesh_setup(1, 8, trainable=NORMS),
    "8x1_accumulated_norms": mesh_setup(8, 1, per_device=1, trainable=NORMS),
}
IN_ANY_TEST_RUN = ("4x2_accumulated", "1x8_norms")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in IN_ANY_TEST_RUN else pytest.mark.slow) for c in MESHES]
)
def test_every_mapping_and_every_division_of_the_batch_takes_the_same_steps(case, devices):
    setup = MESHES[case]
    history, found = setup.run(devices)
    expected, values = on_one_device(tuple(devices), setup.trainable)
    for ours, theirs in zip(history, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, rtol=1e-4, err_msg=path)


def test_a_step_moves_what_is_trained_as_a_whole_step_does(devices):
    """The gradient of a part is that part of the gradient; without clipping, Adam's update is too."""
    free = dataclasses.replace(AdamConfig(learning_rate=3e-3, warmup=0), max_grad_norm=None, weight_decay=0.1)
    # From step 2 on, the other parameters have moved in the one and not in the other.
    _, part = mesh_setup(4, 2, trainable=SOME, optimizer=free).run(devices, steps=1)
    _, whole = mesh_setup(4, 2, optimizer=free).run(devices, steps=1)
    before = random_arrays(CONFIG)
    moved = [path for path in part if path.startswith("model.")]
    assert len(moved) == 5 < len(before)
    for path in part:
        np.testing.assert_allclose(part[path], whole[path], atol=1e-6, err_msg=path)
    for path in moved:
        assert np.abs(part[path] - before[path.removeprefix("model.")]).max() > 1e-3, path


@pytest.mark.parametrize("optimizer", [AdafactorConfig(learning_rate=1e-3), MuonConfig(learning_rate=1e-3)])
def test_other_optimizers_and_watching_know_the_trained_part_only(optimizer, devices):
    watch = Watch(targets=("grads", "params", "opt_state"), norms=True, histograms=False, split=True, every=1)
    setup = mesh_setup(2, 1, trainable=SOME, optimizer=optimizer, more=(("watch", watch),))
    plan, init, program = setup.programs()
    mesh = setup.spec.build(devices[:2])
    state = init.jit(mesh)(jax.random.PRNGKey(0))
    state, metrics = program.jit(mesh)(state, setup.frozen(mesh), setup.batch(0, mesh))
    assert all(np.isfinite(value).all() for value in on_host(state).values())
    names = watch.names(grads=state.model, params=state.model, opt_state=state.optimizer)
    assert metrics.watched.norms["grads"].shape == (len(names["grads"]),)
    assert {name.split(".")[-2] for name in names["params"]} == {
        "norm", "input_layernorm", "post_attention_layernorm", "lm_head", "q_proj"
    }  # fmt: skip
    frozen = {leaf.path for leaf in leaves(program.input("frozen").value)}
    assert frozen and not any(path.endswith(tuple(frozen)) for path in plan.whole.by_path)


def product_shapes(setup, devices) -> Counter:
    """What the products in a step's program give: sizes in ascending order, ones left out."""
    program = setup.programs()[2]
    text = program.lower(setup.spec.build(devices[: setup.spec.size])).as_text()
    found = re.findall(r"stablehlo\.dot_general .*-> tensor<([\dx]+)x[a-z]", text)
    assert found
    return Counter(tuple(sorted(int(n) for n in shape.split("x") if n != "1")) for shape in found)


@pytest.mark.parametrize("precision", ["f32", "p=f32,c=bf16"])
def test_no_product_is_the_gradient_of_a_frozen_matrix(precision, devices):
    shapes = {
        leaf.path: tuple(sorted(size for name, size in leaf.axes if name != "layers" and size > 1))
        for leaf in leaves(abstract_model(CONFIG))
        if not is_norm(leaf.path)
    }
    full = product_shapes(mesh_setup(1, 1, precision=precision), devices)
    norms = product_shapes(mesh_setup(1, 1, precision=precision, trainable=NORMS), devices)
    # The embedding's gradient is a scatter; each of the other eight matrices has a product.
    matrices = {path: shape for path, shape in shapes.items() if "embeddings" not in path}
    assert len(matrices) == 8 and all(full[shape] for shape in matrices.values())
    assert not any(norms[shape] for shape in shapes.values())
    assert sum(full.values()) - sum(norms.values()) == 8
    # Where the head alone is trained, nothing goes back through the layers.
    head = product_shapes(mesh_setup(1, 1, precision=precision, trainable=("lm_head",)), devices)
    assert sum(head[shape] for shape in set(matrices.values())) == 1
    forward = 7 + 2 + 1
    assert sum(head.values()) == forward + 1
    # Nothing makes the logits a second time.
    assert sorted(n for shape, n in full.items() if VOCAB in shape) == [1, 1]


def test_frozen_leaves_come_in_and_never_go_out(devices):
    setup = mesh_setup(1, 1, trainable=NORMS)
    plan, _, program = setup.programs()
    assert program.donate == ("state",)
    frozen = {leaf.path for leaf in leaves(program.input("frozen").value)}
    assert frozen == plan.frozen and len(frozen) == 9
    outputs = {leaf.leaf.path for leaf in program.out_placement.leaves}
    assert not any(path.endswith(tuple(frozen)) for path in outputs)
    mesh = setup.spec.build(devices[:1])
    memory = program.lower(mesh).compile().memory_analysis()
    state = leaves(program.input("state").value)
    # Beside the state there are the metrics, six numbers; and XLA for CPUs counts a pointer for each of all.
    expected = sum(leaf.nbytes for leaf in state) + 6 * 4 + 8 * (len(state) + 6)
    assert memory.output_size_in_bytes == expected
    given = setup.frozen(mesh)
    state, _ = program.jit(mesh)(setup.start(mesh), given, setup.batch(0, mesh))
    values = random_arrays(CONFIG)
    for leaf, array in zip(leaves(given), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(np.asarray(array), values[leaf.path])


def test_bytes_of_what_is_frozen_are_groups_of_their_own():
    plan, _, _ = mesh_setup(4, 2, trainable=NORMS).programs()
    whole, _, _ = mesh_setup(4, 2).programs()
    groups, full = plan.bytes_by_group, whole.bytes_by_group
    for kind in ("embedding", "attention", "mlp", "head"):
        assert groups[f"frozen {kind}"] == full[kind] and kind not in groups
    assert groups["norm"] == full["norm"] == groups["gradients"]
    assert groups["optimizer"] == 2 * groups["norm"] + 2 * 4
    assert plan.resident.bytes_per_device == sum(groups.values()) - groups["gradients"] + 4 + 8
    assert whole.resident.leaves == whole.whole.leaves


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_a_frozen_head_gives_the_activations_the_same_gradient(soft_cap):
    rng = np.random.default_rng(0)
    axes = (hax.Axis("batch", 2), hax.Axis("position", 10), hax.Axis("embed", 64))
    x = hax.named(jnp.asarray(rng.standard_normal((2, 10, 64)), jnp.float32), axes)
    targets = hax.named(jnp.asarray(TOKENS[0, :2, :10]), axes[:2])
    template = abstract_model(CONFIG)
    model = with_arrays(template, {p: jnp.asarray(v) for p, v in random_arrays(CONFIG).items()})

    def loss(x, head):
        found = target_logprobs(x, head, targets, chunk=4, vocab_size=VOCAB - 3, soft_cap=soft_cap)
        return hax.sum(found * hax.arange(axes[1]).astype(jnp.float32)).scalar()

    frozen = jax.jit(jax.grad(loss))(x, model.head)
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, model.head)
    assert jnp.abs(both[1].weight.array).max() > 0
    np.testing.assert_allclose(frozen.array, both[0].array, rtol=1e-5, atol=1e-6)


def test_digests_are_of_the_numbers_and_not_of_the_mesh(devices):
    arrays = random_arrays(CONFIG)

    def digests(data, model, arrays):
        setup = mesh_setup(data, model, trainable=("lm_head",))
        plan, _, program = setup.programs()
        mesh = setup.spec.build(devices[: setup.spec.size])
        made = digest_program(program.input("frozen").value, plan)
        return digests_on_host(made.jit(mesh)(setup.frozen(mesh, arrays)))

    found = digests(1, 1, arrays)
    assert found == digests(4, 2, arrays) and len(set(found.values())) == len(found) == 11
    # By hand, of the last norm: bits times 1 + 2·golden·index.
    path = "transformer.norm.weight"
    bits = [int(n) for n in arrays[path].view(np.uint32)]
    by_hand = sum(b * (1 + 2 * 0x9E3779B1 * n) for n, b in enumerate(bits)) % 2**32
    assert found[path] == f"{by_hand:08x}"
    swapped = arrays[path].copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    others = digests(1, 1, {**arrays, path: swapped})
    assert {p for p in found if found[p] != others[p]} == {path}
    padded = np.concatenate([bits, np.zeros(5, np.int64)])
    assert sum(int(b) * (1 + 2 * 0x9E3779B1 * n) for n, b in enumerate(padded)) % 2**32 == by_hand
