"""Train steps of adapters on a frozen model: against torch, on every mesh; and what the compiled step does not do."""

import re
from dataclasses import dataclass, replace
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.adapted_models import write_adapter
from helpers.llama_on_mesh import VOCAB, mappings_for, named_arrays, tiny_config
from helpers.torch_llama import random_tensors, torch_llama
from jax.sharding import NamedSharding

from haliax_ext.abstract import abstract, cast, leaves, map_arrays, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.compat.hf.peft import open_peft
from levanter.data import next_tokens
from levanter.layers.low_rank import LowRank
from levanter.models.adapters import LoraConfig, find_targets, target_groups
from levanter.models.precision import Precision
from levanter.optim import AdamConfig
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.state import plan_state
from levanter.trainer.step import StepRecipe, step_program

CONFIG = tiny_config(num_kv_heads=8)
ROWS, POSITIONS, STEPS, R, ALPHA = 8, 16, 20, 4, 6.0
RATE, DECAY = 3e-3, 0.1
TOKENS = np.random.default_rng(11).integers(0, VOCAB, (STEPS, ROWS, POSITIONS)).astype(np.int32)
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
ADAM = AdamConfig(
    learning_rate=RATE, weight_decay=DECAY, warmup=0, lr_schedule="constant", max_grad_norm=None, beta2=0.95
)


@cache
def tensors():
    return random_tensors(CONFIG)


@cache
def factors():
    """Random factors by module, neither of them 0."""
    rng, found = np.random.default_rng(4), {}
    for layer in range(CONFIG.num_layers):
        for target in TARGETS:
            rows, columns = tensors()[f"model.layers.{layer}.{target}.weight"].shape
            name = f"model.layers.{layer}.{target}"
            found[f"{name}.lora_A"] = rng.standard_normal((R, columns)).astype(np.float32) * np.float32(0.2)
            found[f"{name}.lora_B"] = rng.standard_normal((rows, R)).astype(np.float32) * np.float32(0.1)
    return found


@cache
def torch_run():
    """(losses of all steps, factors afterwards) by torch: weights are W + s · B A, and A and B are its parameters."""
    torch = pytest.importorskip("torch")
    model = torch_llama(CONFIG, tensors()).requires_grad_(False)

    class Adapted(torch.nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

        def forward(self, weight):
            return weight + ALPHA / R * (self.b @ self.a)

    own = {}
    for name in {each.rsplit(".", 1)[0] for each in factors()}:
        a, b = (torch.from_numpy(factors()[f"{name}.lora_{which}"].copy()) for which in "AB")
        own[name] = Adapted(a, b)
        torch.nn.utils.parametrize.register_parametrization(model.get_submodule(name), "weight", own[name])
    trained = [parameter for each in own.values() for parameter in each.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in TOKENS:
        ids = torch.from_numpy(batch.astype(np.int64))
        found = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(found.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = {}
    for name, each in own.items():
        after |= {f"{name}.lora_A": each.a.detach().numpy(), f"{name}.lora_B": each.b.detach().numpy()}
    return losses, after


@dataclass(frozen=True)
class Setup:
    """A run of adapters on a mesh."""

    spec: MeshSpec
    mappings: Mappings
    accumulation: int = 1
    precision: str = "f32"
    placement: str = "as_base"
    dropout: float = 0.0
    recompute: bool = True

    def program(self):
        precision, optimizer = Precision.parse(self.precision), ADAM.build(STEPS)
        Vocab = hax.Axis("vocab", VOCAB)
        config = replace(CONFIG, gradient_checkpointing=self.recompute)
        module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
        every = target_groups(module, CONFIG.weight_rules(Vocab))
        how = {"placement": self.placement, "dropout": self.dropout}
        lora = LoraConfig(target_modules=list(TARGETS), r=R, alpha=ALPHA, **how)
        adapted = Adapted(targets=find_targets(every, lora), config=lora, every=every)
        state, frozen = adapted.abstract_state(optimizer, None), cast(module, precision.compute)
        placed = adapted.placed(self.mappings, self.spec)
        plan = plan_state(state, placed, self.spec, frozen=frozen)
        plan.whole.check()
        objective = LmObjective(chunk=6, weights=False, segments=False)
        program = step_program(
            StepRecipe(
                objective=objective,
                optimizer=optimizer,
                schedule=ADAM.schedule(STEPS),
                precision=precision,
                accumulation=self.accumulation,
                parameters=plan.parameters,
                model=plan.model,
                draws=self.dropout > 0,
            ),
            state=state,
            frozen=frozen,
            plan=plan,
            batch=objective.abstract_batch(hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS)),
            mappings=self.mappings,
        )
        return plan, program

    def run(self, devices, folder, steps=STEPS):
        """(losses, factors by path, base before, base after, the plan)"""
        mesh = self.spec.build(devices[: self.spec.size])
        plan, program = self.program()
        state, frozen = program.input("state").value, program.input("frozen").value
        own = factors_read(folder)
        whole = {leaf.path: np.zeros(leaf.shape, leaf.dtype) for leaf in leaves(state)}
        whole |= {f"model.{path}": x for path, x in own.items()}
        state = with_arrays(state, {p: jax.device_put(v, plan.whole.sharding(p, mesh)) for p, v in whole.items()})
        base = {path: x for path, x in named_arrays(CONFIG, tensors()).items()}
        dtypes = {leaf.path: leaf.dtype for leaf in leaves(frozen)}
        frozen = with_arrays(
            frozen,
            {p: jax.device_put(v.astype(dtypes[p]), plan.parameters.sharding(p, mesh)) for p, v in base.items()},
        )
        before = [np.asarray(x) for x in jax.tree.leaves(frozen)]
        step, losses = program.jit(mesh), []
        sharding = NamedSharding(mesh, self.mappings.compute.spec(("batch", "position")))
        axes = (hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS))
        for tokens in TOKENS[:steps]:
            batch = LmBatch(
                tokens=hax.NamedArray(jax.device_put(tokens, sharding), axes),
                targets=hax.NamedArray(jax.device_put(next_tokens(tokens), sharding), axes),
            )
            state, metrics = step(state, frozen, batch)
            losses.append(float(metrics.loss))
        after = {}
        map_arrays(lambda leaf, x: after.__setitem__(leaf.path, np.asarray(x)) or x, state.model)
        return losses, after, before, [np.asarray(x) for x in jax.tree.leaves(frozen)]


def factors_read(folder, given=None):
    """Factors by our paths, read from a folder in the format of peft."""
    Vocab = hax.Axis("vocab", VOCAB)
    rules = CONFIG.weight_rules(Vocab)
    groups = target_groups(abstract(lambda: CONFIG.build(Vocab, key=jax.random.PRNGKey(0))), rules)
    write_adapter(folder, factors() if given is None else given, r=R, lora_alpha=ALPHA)
    adapter = open_peft(str(folder))
    found = {}
    tree = adapter.read(adapter.targets(groups, rules), rules)
    map_arrays(lambda leaf, x: found.__setitem__(leaf.path, x) or x, tree)
    return found


def on(data, model, **changes):
    spec = MeshSpec.of(data=data, model=model)
    return Setup(spec, mappings_for(CONFIG, spec), **changes)


def three_axes():
    spec = MeshSpec.of(model=2, group=2, data=2)
    return Setup(spec, mappings_for(CONFIG, spec, heads=("model", "group")))


MESHES = {
    "2x4": on(2, 4),
    "1x8": on(1, 8),
    "4x2": on(4, 2),
    "8x1": on(8, 1),
    "model, group, data": three_axes(),
    "2x4, accumulated": on(2, 4, accumulation=2),
    "2x4, whole": on(2, 4, placement="whole"),
    "4x2, whole, accumulated": on(4, 2, placement="whole", accumulation=2),
}


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=() if name == "2x4" else pytest.mark.slow) for name in MESHES]
)
def test_steps_are_those_of_torch(mesh, devices, tmp_path):
    """20 steps of AdamW: losses, factors afterwards; the frozen weights stay as they are, bit for bit."""
    expected, factors_after = torch_run()
    losses, after, before, base = MESHES[mesh].run(devices, tmp_path / "before")
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    wanted = factors_read(tmp_path / "after", {name: np.ascontiguousarray(x) for name, x in factors_after.items()})
    start = factors_read(tmp_path / "again")
    assert after.keys() == wanted.keys()
    for path, x in wanted.items():
        moved = np.abs(x - start[path]).max()
        assert moved > 1e-2, f"{path} must have been trained for this to say anything"
        np.testing.assert_allclose(after[path], x, atol=1e-3, err_msg=path)
    for x, y in zip(before, base, strict=True):
        assert x.tobytes() == y.tobytes()


def test_no_gradient_of_a_frozen_weight_exists(devices):
    """No product has the shape of a frozen matrix, as its gradient would, and no frozen array comes out of the step."""
    setup = on(1, 1)
    _, program = setup.program()
    lowered = program.lower(setup.spec.build(devices[:1]))
    found = re.findall(r"stablehlo\.dot_general .*-> tensor<([\dx]+)x[a-z]", lowered.as_text())
    products = {tuple(sorted(int(n) for n in shape.split("x") if n != "1")) for shape in found}

    def shapes(name):
        """Of the matrices of an input, in a layer."""
        return {
            tuple(sorted(size for axis, size in leaf.axes if axis != "layers" and size > 1))
            for leaf in leaves(program.input(name).value)
            if leaf.path.endswith("weight") and "norm" not in leaf.path
        }

    # Of the factors there are gradients; so there is something to find.
    assert {shape for shape in shapes("state") if R in shape} <= products
    assert len(shapes("frozen")) >= 3 and not shapes("frozen") & products
    own = sum(int(np.prod(leaf.shape)) for leaf in leaves(program.input("state").value))
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(lowered.out_info)) <= own + 64
    assert set(program.donate) == {"state"}


def test_factors_may_be_whole_on_every_device():
    """Nothing cuts them, nor their statistics; the base lies where it did; and what is meant is no fault."""
    setup = on(2, 4, placement="whole")
    plan, program = setup.program()
    other, _ = on(2, 4).program()
    for each in plan.whole.leaves:
        if "low_rank" in each.leaf.names:
            assert not any(each.mesh_axes) and each.bytes_per_device == each.leaf.nbytes, each.leaf.path
    assert {each.spec for each in plan.loaded.leaves} == {each.spec for each in other.loaded.leaves}
    assert not plan.whole.errors
    # A chip so small that a factor is a large part of it: what is whole on purpose is still no fault.
    state, frozen = (program.input(name).value for name in ("state", "frozen"))
    small = plan_state(state, plan.parameters.mappings, setup.spec, frozen=frozen, hbm_bytes=10_000)
    small = replace(small.whole, findings=tuple(f for f in small.whole.findings if f.path.startswith("pairs.")))
    assert not small.errors
    assert any("declared, adapter.placement: whole" in note.message for note in small.notes)


def test_the_plan_has_a_group_of_adapters():
    setup = on(2, 4, precision="p=f32,c=bfloat16")
    plan, program = setup.program()
    groups = plan.bytes_by_group
    factor_bytes = sum(each.bytes_per_device for each in plan.parameters.leaves if each.leaf.path.startswith("pairs."))
    assert groups["adapters"] == groups["gradients"] == factor_bytes
    assert 2 * factor_bytes <= groups["optimizer"] <= 2 * factor_bytes + 64
    base = sum(size for name, size in groups.items() if name.startswith("frozen "))
    assert base == plan.loaded.bytes_per_device
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves(program.input("frozen").value))
    # The bound model's factors lie where the trained ones do.
    for each in plan.model.leaves:
        if "low_rank" in each.leaf.names:
            assert each.mesh_axes, each.leaf.path
    assert AxisMapping({"low_rank": "model"}).mesh_axes("low_rank") == ("model",)


def _dropped(mesh: str, tmp_path, devices, **changes):
    return replace(MESHES[mesh], dropout=0.25, **changes).run(devices, tmp_path, steps=3)


def test_what_dropout_leaves_out_is_the_same_on_another_mesh(devices, tmp_path):
    """And without recomputation."""
    losses, after, *_ = _dropped("2x4", tmp_path / "2x4", devices)
    again, others, *_ = _dropped("8x1", tmp_path / "8x1", devices, recompute=False)
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    for path, x in after.items():
        np.testing.assert_allclose(others[path], x, atol=1e-4, err_msg=path)
    assert len(set(losses)) == len(losses) == 3 and after


@pytest.mark.slow
def test_what_dropout_leaves_out_is_the_same_everywhere(devices, tmp_path):
    """On every mesh, with recomputation and without; other steps, and other microbatches, leave out something else."""
    plain, *_ = MESHES["2x4"].run(devices, tmp_path / "plain", steps=3)
    losses, after, *_ = _dropped("2x4", tmp_path / "2x4", devices)
    assert np.abs(np.subtract(losses, plain)).min() > 1e-4, "dropout must matter for this to say anything"
    for mesh in ("8x1", "4x2, whole, accumulated"):
        accumulated = "accumulated" in mesh
        found, others, *_ = _dropped(mesh, tmp_path / mesh, devices)
        if accumulated:
            assert np.abs(np.subtract(found, losses)).min() > 1e-5
            continue
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for path, x in after.items():
            np.testing.assert_allclose(others[path], x, atol=1e-4, err_msg=path)
    again, *_ = _dropped("2x4", tmp_path / "kept", devices, recompute=False)
    np.testing.assert_allclose(again, losses, rtol=1e-6)


def test_what_dropout_leaves_out():
    """A quarter of what A reads, and the rest a third larger; for each layer something else, and nothing of W."""
    In, Out, Rank, Token = hax.Axis("in", 40), hax.Axis("out", 3), hax.Axis("low_rank", 40), hax.Axis("token", 50)
    eye = hax.named(jnp.eye(40), (Rank, In))
    ones = hax.ones((Out, Rank))

    def made(key):
        bits = None if key is None else hax.named(jax.random.PRNGKey(key), (hax.Axis("bits", 2),))
        weight = LowRank(hax.zeros((Out, In)), eye, ones, 1.0, 0.25, bits)
        return weight.dot(hax.ones((Token, In)), ("in",)).array[:, 0]

    np.testing.assert_allclose(made(None), 40.0)
    found = made(1) * 0.75
    np.testing.assert_allclose(found, np.round(found), atol=1e-4)
    assert 28 < found.mean() < 32 and len(set(np.round(found).tolist())) > 5
    assert not np.array_equal(made(1), made(2)) and np.array_equal(made(1), made(1))
