"""The train step against PyTorch, under every mapping, and with its batch in parts."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, leaf_from_source, llama_2d, mappings_for, named_arrays, tiny_config
from helpers.train_steps import ADAM, CONFIG, POSITIONS, ROWS, SEGMENTS, TOKENS, WEIGHTS, Setup, mesh_setup

from haliax_ext.meshspec import MeshSpec
from levanter.optim import AdafactorConfig


@cache
def on_one_device(devices, precision="f32", optimizer=ADAM, steps=3):
    return mesh_setup(1, 1, precision=precision, optimizer=optimizer).run(devices, steps=steps)


def assert_same_run(found, expected, *, loss=1e-5, atol=1e-5):
    for step, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=loss), (name, step)
    for path, value in expected[1].items():
        np.testing.assert_allclose(found[1][path], value, atol=atol, rtol=1e-4, err_msg=path)


def test_three_steps_equal_torch(devices):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import LlamaForCausalLM

    config = tiny_config()
    theirs = LlamaForCausalLM(
        HfLlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            attn_implementation="eager",  # pyright: ignore
        )
    ).float()
    rng = np.random.default_rng(3)
    for key, parameter in theirs.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        parameter.data = 1 + 0.1 * noise if key.endswith("norm.weight") else 0.15 * noise
    start = {key: p.detach().numpy().copy() for key, p in theirs.named_parameters()}

    def decays(key):
        return "norm" not in key and "embed_tokens" not in key

    named = list(theirs.named_parameters())
    groups = [
        {"params": [p for k, p in named if decays(k)], "weight_decay": 0.1},
        {"params": [p for k, p in named if not decays(k)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    expected = []
    for n, rate in enumerate([0.0, 1.5e-3, 3e-3]):
        tokens = torch.from_numpy(TOKENS[n]).long()
        logits = theirs(tokens).logits[:, :-1].reshape(-1, VOCAB)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        expected.append((loss.item(), norm.item(), rate))

    spec = MeshSpec.of(data=4, model=2)
    # As on CPUs; other tests take steps without.
    more = (("norms_first", True),)
    setup = Setup(spec, mappings_for(config, spec), config=config, packed=False, more=more)
    history, found = setup.run(devices, arrays=named_arrays(config, start))
    for ours, (loss, norm, rate) in zip(history, expected, strict=True):
        assert ours["loss"] == pytest.approx(loss, rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert ours["learning_rate"] == pytest.approx(rate, rel=1e-6)
        assert ours["weight"] == ROWS * (POSITIONS - 1)
    ends = {key: p.detach().numpy() for key, p in theirs.named_parameters()}
    plan, _, _ = setup.programs()
    for leaf in (p.leaf for p in plan.parameters.leaves):
        want = leaf_from_source(leaf, config.weight_rules(), ends)
        # Adam divides by the gradient's size: where that is near 0, rounding is all there is.
        np.testing.assert_allclose(found[f"model.{leaf.path}"], want, atol=2e-5, rtol=1e-4, err_msg=leaf.path)


def test_norms_in_the_form_for_tpus_are_those_of_the_arrays(devices):
    """`norms_fused`: norms of the parameters before a step and of what it adds, from arrays on the host."""
    setup = mesh_setup(4, 2, more=(("norms_fused", True),))
    (_, once), (history, twice) = (setup.run(devices, steps=steps) for steps in (1, 2))
    assert_same_run((history, twice), on_one_device(tuple(devices), steps=2))

    def norm(arrays):
        return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in arrays))

    paths = [path for path in once if path.startswith("model.")]
    assert history[1]["parameter_norm"] == pytest.approx(norm(once[path] for path in paths), rel=1e-5)
    assert history[1]["update_norm"] == pytest.approx(norm(twice[p] - once[p] for p in paths), rel=1e-5)
    assert history[1]["update_norm"] > 0


MESHES = {
    "8x1": mesh_setup(8, 1),
    "4x2": mesh_setup(4, 2),
    "2x4": mesh_setup(2, 4),
    "1x8": mesh_setup(1, 8),
    "2d": Setup(MeshSpec.of(data=4, model=2), llama_2d(CONFIG)),
    "4x2_accumulated": mesh_setup(4, 2, per_device=1),
    "8x1_accumulated": mesh_setup(8, 1, per_device=1),
    "position_over_model": Setup(
        spec := MeshSpec.of(data=2, model=4), mappings_for(CONFIG, spec, residual={"position": "model"})
    ),
}
IN_ANY_TEST_RUN = ("2d", "4x2_accumulated")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in IN_ANY_TEST_RUN else pytest.mark.slow) for c in MESHES]
)
def test_every_mapping_and_every_division_of_the_batch_takes_the_same_steps(case, devices):
    setup = MESHES[case]
    if setup.spec.shape["model"] > 1:
        assert setup.mappings.params["vocab"] in ("model", ("model",))
    assert_same_run(setup.run(devices), on_one_device(tuple(devices)))


@pytest.mark.slow
def test_adafactor_takes_the_same_steps_on_a_mesh(devices):
    optimizer = AdafactorConfig(learning_rate=3e-3, warmup=2, scale_parameter=True)
    found = mesh_setup(2, 4, optimizer=optimizer, per_device=2).run(devices)
    assert_same_run(found, on_one_device(tuple(devices), optimizer=optimizer))


def test_sixteen_bit_compute_keeps_parameters_and_gradients_in_float32(devices):
    history, arrays = mesh_setup(4, 2, precision="p=f32,c=bf16", per_device=2).run(devices)
    exact, _ = on_one_device(tuple(devices))
    assert exact[0]["weight"] == pytest.approx((WEIGHTS[0] * _followed(SEGMENTS[0])).sum(), rel=1e-6)
    for ours, theirs in zip(history, exact, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
        assert ours["loss"] != theirs["loss"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-2)
    kinds = {a.dtype for path, a in arrays.items() if not path.endswith(("step", "count", "key"))}
    assert kinds == {np.dtype(np.float32)}


def test_a_state_of_sixteen_bits_keeps_its_dtypes(devices):
    """A second step takes the state that the first one returns: in bf16 optax would widen its statistics."""
    setup = mesh_setup(1, 1, precision="bfloat16")
    _, init, program = setup.programs()
    mesh = setup.spec.build(devices[:1])
    before, after = ([x.dtype for x in jax.tree.leaves(one.lower(mesh).out_info)] for one in (init, program))
    assert np.dtype(jax.numpy.bfloat16) in before
    # Metrics follow the state.
    assert after[: len(before)] == before


def test_no_array_has_the_size_of_whole_logits_or_of_a_second_copy_of_a_stack(devices):
    setup = mesh_setup(4, 2, precision="p=f32,c=bf16", packed=False)
    _, _, program = setup.programs()
    text = program.lower(setup.spec.build(devices)).as_text()
    for shape in (f"{ROWS}x{POSITIONS}x{VOCAB}x", f"{CONFIG.num_layers}x96x64xbf16", f"{CONFIG.num_layers}x64x96xbf16"):
        assert shape not in text, shape
    assert f"{CONFIG.num_layers}x96x64xf32" in text


def test_a_fresh_state_and_a_batch_that_counts_nothing(devices):
    setup = mesh_setup(1, 1, optimizer=dataclasses.replace(ADAM, weight_decay=0.0))
    mesh = setup.spec.build(devices[:1])
    _, init, program = setup.programs()
    state = init.jit(mesh)(jax.random.PRNGKey(0))
    deviations = [np.asarray(x).std() for x in jax.tree.leaves(state.model.transformer.layers.stacked.mlp)]
    np.testing.assert_allclose(deviations, CONFIG.initializer_range, rtol=0.02)
    before = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    batch = setup.batch(0, mesh)
    assert batch.loss_weights is not None
    nothing = dataclasses.replace(batch, loss_weights=batch.loss_weights * 0.0)
    state, metrics = program.jit(mesh)(state, None, nothing)
    assert float(metrics.loss) == 0.0 and float(metrics.grad_norm) == 0.0
    for old, new in zip(before, jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def _followed(segments: np.ndarray) -> np.ndarray:
    inside = np.zeros(segments.shape, np.float32)
    inside[:, :-1] = segments[:, :-1] == segments[:, 1:]
    return inside
