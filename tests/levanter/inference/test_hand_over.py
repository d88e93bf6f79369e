"""Weights of training in the dtype and the shards of generation: the same numbers, each byte moved once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from helpers.hand_overs import plan_of, received_bytes
from helpers.llama_on_mesh import abstract_model, mappings_for, place, random_arrays, tiny_config

from haliax_ext.abstract import abstract, leaves
from haliax_ext.hlo import read_figures
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.pytree import leaves_with_paths
from levanter.inference.hand_over import generation_module, plan_hand_over
from levanter.layers.quantized import projections
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.lora import Adapters
from levanter.models.adapters.lora_targets import find_targets, target_groups

SPEC = MeshSpec.of(data=4, model=2)
TABLE = "embeddings.token_embeddings.weight"


def as_axes(x: NamedArray, axes) -> np.ndarray:
    """The values with their axes in an order, in float32, without an operation on the devices."""
    names = [axis.name for axis in x.axes]
    return np.asarray(x.array).astype(np.float32).transpose([names.index(axis.name) for axis in axes])


@pytest.mark.parametrize("spec", [MeshSpec.of(data=1, model=1), SPEC], ids=["one", "eight"])
@pytest.mark.parametrize(("dtype", "int8"), [("bfloat16", False), ("float32", True)])
def test_arrays_are_those_of_training(spec, dtype, int8):
    """Values by NumPy: rounded to the compute dtype, or to integers with a scale for each output channel."""
    config = tiny_config(num_heads=8, num_kv_heads=4, tie_word_embeddings=int8)
    plan, training = plan_of(config, spec, dtype=jnp.dtype(dtype), int8=int8)
    mesh = spec.build(jax.devices()[: spec.size])
    model = place(config, random_arrays(config, seed=3), training, mesh)
    copy = dict(leaves_with_paths(plan(model, mesh)))
    sources, linears = dict(leaves_with_paths(model)), projections(model)
    assert copy.keys() == plan.sharding.by_path.keys()
    for path, x in copy.items():
        assert x.array.sharding.spec == plan.sharding.spec(path), path
        weight, part = path.removesuffix(".array"), ""
        if path.endswith((".q", ".scale")):
            weight, part = path.rsplit(".", 1)
        # The copied head of tied embeddings is quantized from the table.
        source = sources[TABLE if weight.startswith("lm_head") and int8 else weight]
        if not part:
            want = np.asarray(jnp.asarray(as_axes(source, x.axes)).astype(dtype)).astype(np.float32)
            np.testing.assert_array_equal(as_axes(x, x.axes), want, err_msg=path)
            continue
        In = ("embed",) if weight.startswith("lm_head") else linears[weight.removesuffix(".weight")].In
        Out = [axis for axis in source.axes if axis.name not in In]
        inner = [axis for axis in source.axes if axis.name in In]
        values = as_axes(source, [*Out, *inner]).reshape(*(axis.size for axis in Out), -1)
        scale = np.abs(values).max(-1) * np.float32(1 / 127)
        if part == "scale":
            np.testing.assert_array_equal(as_axes(x, Out), scale, err_msg=path)
        else:
            q = as_axes(x, [*Out, *inner]).reshape(values.shape)
            # Half a step off where a quotient lies between two integers.
            assert np.abs(q * scale[..., None] - values).max() <= scale.max() * 0.5001, path
            assert np.abs(q).max() == 127


def test_arrays_that_agree_are_shared():
    """In the dtype and the shards of training nothing is copied; a copy of one array more is what differs."""
    config = tiny_config(num_heads=8, num_kv_heads=4)
    plan, training = plan_of(config, SPEC, dtype=np.float32, whole=False, platform="tpu")
    assert plan.program is None and plan.copied_bytes == plan.moved_bytes == 0
    mesh = SPEC.build(jax.devices())
    model = place(config, random_arrays(config), training, mesh)
    sources = dict(leaves_with_paths(model))
    assert all(x.array is sources[path].array for path, x in leaves_with_paths(plan(model, mesh)))


@pytest.mark.parametrize("int8", [False, True])
def test_each_byte_moves_once(int8):
    """By the compiled text: what arrives on a device is what it does not hold, in the narrow dtype.

    On CPUs; XLA widens collectives of bfloat16 there, which `tests/aot` compiles for TPUs.
    """
    config = tiny_config(num_heads=8, num_kv_heads=4)
    plan, _ = plan_of(config, SPEC, dtype=np.float32, int8=int8)
    assert plan.program is not None
    figures = read_figures(plan.program.lower(SPEC.build(jax.devices())).compile().as_text(), SPEC)
    arriving, reduced = received_bytes(figures)
    assert 0 < arriving <= plan.moved_bytes < plan.copied_bytes
    # The largest value of each channel is a maximum over shards; nothing else is reduced.
    scales = sum(x.bytes_per_device for x in plan.sharding.leaves if x.leaf.path.endswith(".scale"))
    assert reduced <= 2 * scales if int8 else reduced == 0


def test_an_adapter_is_handed_over_beside_its_base():
    """The base in the compute dtype or in integers, the factors in the compute dtype, by the operand's paths."""
    config = tiny_config(num_heads=8, num_kv_heads=4)
    base = abstract_model(config)
    lora = LoraConfig(r=4)
    targets = find_targets(target_groups(base, config.weight_rules()), lora)
    adapters = abstract(lambda: Adapters.init(targets, lora, key=jax.random.PRNGKey(0)))
    for int8 in (False, True):
        module = generation_module(
            functools.partial(abstract_model, config), adapters, base,
            dtype=np.dtype(jnp.bfloat16), int8=int8, platform="tpu", devices=8,
        )  # fmt: skip
        model = adapters.bound_to(base)
        spec_of = {True: mappings_for(config, SPEC, params={"embed": None}), False: mappings_for(config, SPEC)}
        plan = plan_hand_over(
            model,
            plan_sharding(leaves(model), spec_of[False], SPEC),
            module,
            plan_sharding(leaves(module), spec_of[True], SPEC),
            mappings=spec_of[True],
            compiler_options={},
        )
        dtypes = {leaf.path.rsplit(".", 1)[1]: leaf.dtype.name for leaf in leaves(module) if ".q_proj." in leaf.path}
        whole = {"q": "int8", "scale": "float32"} if int8 else {"base": "bfloat16"}
        assert dtypes == {"a": "bfloat16", "b": "bfloat16", **whole}
        # The Program is lowered for a mesh that no process has, as `plan` does.
        assert plan.program is not None and plan.program.lower(SPEC.build(jax.devices())).as_text()
