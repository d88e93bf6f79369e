"""Program: what is lowered is what runs, on any mesh; named_jit plans abstract named inputs."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from haliax_ext.abstract import abstract, leaves, with_arrays
from haliax_ext.compiler_options import CompilerOptionError
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.program import Flat, Input, Program, named_jit

Batch, Embed, Mlp = hax.make_axes(batch=8, embed=16, mlp=32)
MAPPINGS = Mappings(
    params=AxisMapping({"embed": "data", "mlp": "model"}), compute=AxisMapping({"batch": "data", "mlp": "model"})
)


class Mlp2(eqx.Module):
    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(key):
        return Mlp2(hax.nn.Linear.init(Embed, Mlp, key=key), hax.nn.Linear.init(Mlp, Embed, key=key))

    def __call__(self, x):
        return self.down(hax.nn.gelu(self.up(x)))


def loss(model, x):
    return model(x), hax.mean(hax.square(model(x)))


def program(mesh_spec, **kwargs):
    model = abstract(Mlp2.init, jax.random.PRNGKey(0))
    plan = plan_sharding(leaves(model), MAPPINGS, mesh_spec).check()
    x = hax.NamedArray(jax.ShapeDtypeStruct((8, 16), jnp.float32), (Batch, Embed))
    inputs = (
        Input(name="model", value=model, placement=plan),
        Input(name="x", value=x, placement=MAPPINGS.compute),
    )
    return Program(name="loss", function=loss, inputs=inputs, mappings=MAPPINGS, **kwargs), plan


def real_inputs(plan, mesh):
    model = Mlp2.init(jax.random.PRNGKey(0))
    flat = {path: x for path, x in zip([p.leaf.path for p in plan.leaves], jax.tree.leaves(model), strict=True)}
    placed = {path: jax.device_put(x, plan.sharding(path, mesh)) for path, x in flat.items()}
    x = hax.random.normal(jax.random.PRNGKey(1), (Batch, Embed))
    return model, with_arrays(model, placed), x


def test_runs_equal_to_numpy_and_lands_where_planned(devices):
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(devices)
    prog, plan = program(spec)
    plain, model, x = real_inputs(plan, mesh)
    y, mean = prog.jit(mesh)(model, hax.NamedArray(jax.device_put(x.array, jax.NamedSharding(mesh, P("data"))), x.axes))
    assert y.axes == (Batch, Embed)
    assert y.array.sharding.spec == P("data", None) or y.array.sharding.spec == P("data")
    up, down = np.asarray(plain.up.weight.array), np.asarray(plain.down.weight.array)
    h = np.asarray(x.array) @ up.T
    h = np.asarray(jax.nn.gelu(h, approximate=True))
    np.testing.assert_allclose(np.asarray(y.array), h @ down.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(float(mean.array), np.square(h @ down.T).mean(), rtol=1e-5)


def test_lower_and_jit_are_one_program(devices):
    """The StableHLO of `.lower(mesh)` equals that of what `.jit(mesh)` runs, on a real and on an abstract mesh."""
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(devices)
    prog, plan = program(spec)
    lowered = prog.lower(mesh).as_text()
    _, model, x = real_inputs(plan, mesh)
    ran = []
    jitted = prog._on(mesh).jitted

    class Spy:
        def __call__(self, *args):
            ran.append(jitted.lower(*args).as_text())
            return jitted(*args)

    object.__setattr__(prog._on(mesh), "jitted", Spy())
    prog.jit(mesh)(model, x)
    assert ran == [lowered]
    assert "sdy.sharding" in lowered or "mhlo.sharding" in lowered


def test_lowers_on_an_abstract_mesh(devices):
    spec = MeshSpec.of(data=4, model=2)
    prog, _ = program(spec)
    text = prog.lower(spec.abstract()).as_text()
    assert '"data"' in text
    assert '"model"' in text


def test_compiled_argument_bytes_equal_the_plan(devices):
    spec = MeshSpec.of(data=4, model=2)
    prog, plan = program(spec)
    memory = prog.lower(spec.build(devices)).compile().memory_analysis()
    assert memory.argument_size_in_bytes == plan.bytes_per_device + 8 * 16 * 4 // 4


def test_donation_reuses_the_buffer(devices):
    spec = MeshSpec.of(data=8)
    mesh = spec.build(devices)
    x = hax.NamedArray(jax.ShapeDtypeStruct((8, 16), jnp.float32), (Batch, Embed))
    compute = AxisMapping({"batch": "data"})
    prog = Program(
        name="double",
        function=lambda x: x * 2.0,
        inputs=(Input(name="x", value=x, placement=compute),),
        mappings=Mappings(compute=compute),
        donate=("x",),
    )
    given = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, P("data")))
    out = prog.jit(mesh)(hax.NamedArray(given, (Batch, Embed)))
    assert given.is_deleted()
    assert out.array.sharding.spec[0] == "data"


def test_what_was_gone_through_before_gives_the_same(devices):
    """A value as its arrays by path, for one input or for all of them, where it was placed or on the host."""
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(devices)
    prog, plan = program(spec)
    _, model, x = real_inputs(plan, mesh)
    call = prog.jit(mesh)
    y, mean = call(model, x)
    mixed, _ = call(Flat.of(model), x)
    assert isinstance(mixed, hax.NamedArray)
    np.testing.assert_array_equal(np.asarray(mixed.array), np.asarray(y.array))
    flat = call(Flat.of(model), Flat.of(x))
    assert isinstance(flat, Flat) and flat.arrays.keys() == {"0", "1"}
    np.testing.assert_array_equal(np.asarray(flat.arrays["0"]), np.asarray(y.array))
    np.testing.assert_array_equal(np.asarray(flat.arrays["1"]), np.asarray(mean.array))
    on_host = call(Flat.of(model), Flat({"": np.asarray(x.array)}))
    np.testing.assert_array_equal(np.asarray(on_host.arrays["0"]), np.asarray(y.array))
    whole = Flat.of({"a": model, "ab": x})
    assert whole.part("a").arrays.keys() == Flat.of(model).arrays.keys()
    with pytest.raises(AssertionError, match="input x: these are not the arrays"):
        call(Flat.of(model), Flat({"": np.asarray(x.array).T}))


def test_a_program_without_inputs_gives_named_arrays(devices):
    prog = Program(name="zeros", function=lambda: {"a": hax.zeros(Embed)}, inputs=())
    found = prog.jit(MeshSpec.of(data=8).build(devices))()
    assert found["a"].axes == (Embed,)


def test_wrong_arrays_are_our_own_bug(devices):
    spec = MeshSpec.of(data=8)
    prog, _ = program(MeshSpec.of(data=4, model=2))
    spec = MeshSpec.of(data=4, model=2)
    with pytest.raises(AssertionError, match="these are not the arrays that it was planned for"):
        prog.jit(spec.build(devices))(Mlp2.init(jax.random.PRNGKey(0)), hax.zeros((Embed, Batch)))


def test_f32_can_be_asked_to_mean_f32(devices):
    prog, _ = program(MeshSpec.of(data=4, model=2), matmul_precision="highest")
    assert "HIGHEST" in prog.lower(MeshSpec.of(data=4, model=2).abstract()).as_text()


class TestNamedJit:
    def test_follows_the_mapping_in_scope(self, devices):
        mesh = MeshSpec.of(data=4, model=2).build(devices)

        @named_jit
        def f(x, *, scale):
            return x * scale

        with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data", "embed": "model"}):
            out = f(hax.ones((Batch, Embed)), scale=jnp.float32(3))
        assert out.array.sharding.spec == P("data", "model")
        assert float(out.array[0, 0]) == 3.0

    def test_equals_haliax(self, devices):
        mesh = MeshSpec.of(data=4, model=2).build(devices)
        model = Mlp2.init(jax.random.PRNGKey(0))
        x = hax.random.normal(jax.random.PRNGKey(1), (Batch, Embed))
        with jax.set_mesh(mesh), hax.axis_mapping(dict(MAPPINGS.compute)):
            ours, theirs = named_jit(loss)(model, x)[0], hax.named_jit(loss)(model, x)[0]
        assert ours.axes == theirs.axes
        assert ours.array.sharding.is_equivalent_to(theirs.array.sharding, 2)
        np.testing.assert_array_equal(np.asarray(ours.array), np.asarray(theirs.array))

    def test_lowers_abstract_named_inputs(self, devices):
        x = hax.NamedArray(jax.ShapeDtypeStruct((8, 16), jnp.float32), (Batch, Embed))
        with jax.set_mesh(MeshSpec.of(data=8).build(devices)), hax.axis_mapping({"batch": "data"}):
            lowered = named_jit(lambda x: x + 1.0).lower(x)
        assert "tensor<8x16xf32>" in lowered.as_text()

    def test_without_a_mesh(self):
        with pytest.raises(ValueError, match="needs a mesh in scope"):
            named_jit(lambda x: x).lower(hax.ones(Batch))


def test_compiler_options_reach_the_run_and_the_plan(devices):
    """The compiler itself is the witness: it refuses an option that it does not know, wherever it gets one."""
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(devices)
    prog, plan = program(spec, compiler_options={"xla_no_such_option": "1"})
    _, model, x = real_inputs(plan, mesh)
    lowered = prog.lower(mesh)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
        lowered.compile()
    # Where a run compiles, that is bad input, in the compiler's own words.
    said = "program loss: .*No such compile option: 'xla_no_such_option'"
    with pytest.raises(CompilerOptionError, match=said):
        prog.jit(mesh)(model, x)
    with pytest.raises(CompilerOptionError, match=said):
        prog.prepare(mesh, model, x)
    known, _ = program(spec, compiler_options={"xla_cpu_enable_fast_math": "True"})
    known.lower(mesh).compile()
    known.jit(mesh)(model, x)
    # Lowering for another platform carries them along and asks nobody.
    assert (
        '"data"'
        in program(spec, compiler_options={"xla_jf_any": "1"})[0].lower(spec.abstract(), platform="tpu").as_text()
    )
