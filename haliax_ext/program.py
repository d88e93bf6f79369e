"""`Program`: a function, its abstract named inputs, the mappings, and the one jit they make.

What runs and what is planned must be the same thing, so both come from here: `program.lower(mesh)` compiles for any
mesh (of real devices, of a compile-only topology, or abstract), `program.jit(mesh)` runs it. Both trace `function`
under `haliax.axis_mapping(mappings.compute)`, our residual mapping and `jax.set_mesh(mesh)`, with explicit input and
output shardings. Inputs reach XLA as dictionaries from leaf path to array, so that the compiler's own messages carry
the path of each parameter.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast, overload

import haliax as hax
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_ext.abstract import Leaf, array_leaf
from haliax_ext.compiler_options import translate_option_errors
from haliax_ext.hlo.memory import MemoryFigures, MemoryStats, memory_figures
from haliax_ext.mapping import AxisMapping, Mappings, mapping_in_scope, mappings_in_scope
from haliax_ext.meshspec import AnyMesh, mesh_in_scope
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import (
    Array,
    PyTree,
    eval_shape,
    is_array,
    is_named,
    joined,
    leaves_with_paths,
    map_with_paths,
    split_arrays,
)

Placement = AxisMapping | Mappings | ShardingPlan | None
Jit = Callable[["Program", Mesh], Callable[..., Any]]
"""Makes a Program callable: `Program.jit`, or a wrapper that synchronizes the processes around its first call."""


@dataclass(frozen=True, eq=False)
class Flat:
    """A value reduced to its arrays by path, so that a caller in a loop flattens its arguments only once.

    A jitted Program takes one in the place of any input, and returns one where all of its inputs are (and it has some).

    Attributes:
        arrays: every array of the value, by path.
    """

    arrays: dict[str, Array]

    @staticmethod
    def of(value: PyTree) -> "Flat":
        """The arrays of a value; a value that is flat already is returned."""
        return value if isinstance(value, Flat) else Flat(_arrays(value))

    def part(self, name: str) -> "Flat":
        """The arrays whose path begins with a name, which is removed from their paths."""
        below = name + "."
        return Flat({path.removeprefix(below): x for path, x in self.arrays.items() if path.startswith(below)})

    @functools.cached_property
    def shapes(self) -> "_Shapes":
        """Shapes and dtypes by path, cached: reading them from hundreds of arrays takes longer than comparing them."""
        return _shapes(self.arrays)


@dataclass(frozen=True, kw_only=True)
class Input:
    """One argument of a Program.

    Attributes:
        name: what the argument is called in listings and compiler messages.
        value: the argument with `jax.ShapeDtypeStruct` (or real arrays) in place of data.
        placement: what decides each leaf's sharding; None leaves it to the arrays that are passed.
    """

    name: str
    value: PyTree
    placement: Placement


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A jitted function that can be planned.

    Attributes:
        name: how listings call it.
        function: pure; takes the inputs' values in order.
        inputs: abstract named inputs.
        mappings: in scope while tracing.
        out_placement: decides the outputs' shardings; the compute mapping if None. Arrays without names are
            replicated.
        donate: names of the inputs whose buffers may be reused.
        matmul_precision: JAX's default matmul precision while tracing (`highest` makes f32 mean f32 on TPU).
        compiler_options: XLA's, over its defaults, for running and for planning alike. They are those of the devices
            the program is for; another platform's compiler refuses them.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    mappings: Mappings = field(default_factory=Mappings)
    out_placement: Placement = None
    donate: tuple[str, ...] = ()
    matmul_precision: str | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self):
        names = [i.name for i in self.inputs]
        assert len(set(names)) == len(names), f"program {self.name} has two inputs with the same name: {names}"
        assert set(self.donate) <= set(names), f"program {self.name} donates unknown inputs: {self.donate}"

    def input(self, name: str) -> Input:
        """The input of a name."""
        return next(candidate for candidate in self.inputs if candidate.name == name)

    def lower(self, mesh: AnyMesh, *, platform: str = "cpu") -> jax.stages.Lowered:
        """Lowers the program for `mesh`; `.compile()` on the result gives the executable.

        Args:
            mesh: of real devices, of a compile-only topology, or abstract.
            platform: what to lower for on an abstract mesh; a mesh of devices knows its own.
        """
        # Keep this path the same as `jit`: what is planned must be what runs.
        compiled = self._on(mesh)
        # Tracing under the scope is what gives the function its mappings, mesh and matmul precision.
        with self._scope(mesh):
            # The inputs are traced as abstract arrays: no memory is allocated.
            traced = compiled.jitted.trace(*[_arrays(i.value) for i in self.inputs])
            # A mesh of devices states its platform; on an abstract mesh the caller must name it.
            return traced.lower() if isinstance(mesh, Mesh) else traced.lower(lowering_platforms=(platform,))

    def jit(self, mesh: Mesh) -> Callable[..., Any]:
        """The function to call with real values of the same structure as the inputs."""
        compiled = self._on(mesh)

        def call(*values: PyTree) -> PyTree:
            arrays = self._checked(values)
            # Most Programs have no compiler options, and then there is nothing to translate.
            translation = (
                translate_option_errors(self.name, self.compiler_options)
                if self.compiler_options
                else contextlib.nullcontext()
            )
            with self._scope(mesh), translation:
                outputs = compiled.jitted(*arrays)
            # `Flat` goes out only where `Flat` came in for every input, so that a loop can pass outputs on as inputs.
            flat = values and all(isinstance(value, Flat) for value in values)
            return Flat(outputs) if flat else compiled.rebuild(outputs)

        return functools.update_wrapper(call, self.function)

    def prepare(self, mesh: Mesh, *values: PyTree) -> None:
        """Compiles for real values, so that the first call of `jit(mesh)` with their like only runs.

        Nothing runs here, and nothing is donated. Processes that compile at their own pace can meet behind it.
        """
        compiled = self._on(mesh)
        arrays = self._checked(values)
        with self._scope(mesh), translate_option_errors(self.name, self.compiler_options):
            # JAX finds this executable again when the jit is called with arrays of these shardings.
            executable = compiled.jitted.lower(*arrays).compile()
        # Only after compilation succeeded: a failed `prepare` must be tried again.
        compiled.prepared = True
        stated = executable.memory_analysis()
        compiled.memory = None if stated is None else memory_figures(cast(MemoryStats, stated))

    def is_prepared(self, mesh: Mesh) -> bool:
        """Whether `prepare` was called for `mesh`."""
        return self._on(mesh).prepared

    def memory(self, mesh: Mesh) -> MemoryFigures | None:
        """Memory of the executable that `prepare` made; None before `prepare`, or where the compiler states none."""
        return self._on(mesh).memory

    def _checked(self, values: tuple[PyTree, ...]) -> list[dict[str, Array]]:
        """The arrays of the passed values, checked against the shapes and dtypes that were planned."""
        assert len(values) == len(self.inputs), f"{self.name} takes {len(self.inputs)} inputs, got {len(values)}"
        passed = [_arrays(value) for value in values]
        for declared, planned, value, arrays in zip(self.inputs, self._planned, values, passed, strict=True):
            # Without this check, jit would silently compile a second executable, one that no plan knows, for other
            # shapes.
            have = value.shapes if isinstance(value, Flat) else _shapes(arrays)
            _assert_same_arrays(self.name, declared.name, planned, have)
        return passed

    @functools.cached_property
    def _planned(self) -> "tuple[_Shapes, ...]":
        return tuple(_shapes(_arrays(declared.value)) for declared in self.inputs)

    @contextlib.contextmanager
    def _scope(self, mesh: AnyMesh) -> Generator[None]:
        # An abstract mesh cannot be "set" for execution; tracing under it is all that lowering needs.
        enter = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
        precision = (
            # JAX's precision setting is part of its jit cache key, so Programs with different precisions do not share a
            # trace.
            jax.default_matmul_precision(self.matmul_precision) if self.matmul_precision else contextlib.nullcontext()
        )
        with mappings_in_scope(self.mappings), enter, precision:
            yield

    @functools.cached_property
    def _compiled(self) -> "dict[AnyMesh, _Compiled]":
        # One jit for each mesh. Programs compare by identity (`eq=False`), so the table belongs to this object.
        return {}

    def _on(self, mesh: AnyMesh) -> "_Compiled":
        if mesh not in self._compiled:
            self._compiled[mesh] = self._make(mesh)
        return self._compiled[mesh]

    def _make(self, mesh: AnyMesh) -> "_Compiled":
        templates = [i.value for i in self.inputs]

        def flat_function(*arrays: Mapping[str, Array]) -> dict[str, Array]:
            # The function sees its own structure again; only the arrays passed through XLA as dictionaries.
            values = [_fill(template, leaves) for template, leaves in zip(templates, arrays, strict=True)]
            return _arrays(self.function(*values))

        # The function's name is the module's name in compiler messages, dumps and profiles.
        flat_function.__name__ = flat_function.__qualname__ = self.name
        with self._scope(mesh):
            # The function may read the mapping and the mesh in scope, so its result's shapes depend on them.
            out = eval_shape(self.function, *templates)
        # Shardings are explicit on both sides; only a placement of None leaves the choice to the passed arrays.
        in_shardings = tuple(_shardings(i.value, i.placement, mesh) for i in self.inputs)
        placement = self.mappings.compute if self.out_placement is None else self.out_placement
        jitted = jax.jit(
            flat_function,
            in_shardings=in_shardings,
            out_shardings=_shardings(out, placement, mesh),
            # Each input is one argument (a dictionary by path), so it is donated as a whole or not at all.
            donate_argnums=tuple(n for n, i in enumerate(self.inputs) if i.name in self.donate),
            # The jit passes them to everything that is lowered from it: `.lower(mesh).compile()` needs none itself.
            compiler_options=dict(self.compiler_options) or None,
        )
        return _Compiled(jitted=cast(_Jitted, jitted), template=out)


class _Jitted(Protocol):
    """The part of `jax.jit`'s result that a Program uses: dictionaries from path to array in and out."""

    def __call__(self, *arrays: Mapping[str, Array]) -> dict[str, Array]: ...
    def trace(self, *arrays: Mapping[str, Array]) -> jax.stages.Traced: ...
    def lower(self, *arrays: Mapping[str, Array]) -> jax.stages.Lowered: ...


@dataclass
class _Compiled:
    jitted: "_Jitted"
    template: PyTree
    prepared: bool = False
    memory: MemoryFigures | None = None

    def rebuild(self, flat: Mapping[str, Array]) -> PyTree:
        return _fill(self.template, flat)


def _arrays(tree: PyTree) -> dict[str, Array]:
    """Every array of `tree`, by path; a name's own `array` field is not part of the path."""
    if isinstance(tree, Flat):
        return tree.arrays
    raw = ((path, x.array if is_named(x) else x) for path, x in leaves_with_paths(tree))
    return {path: array for path, array in raw if is_array(array)}


def _fill(template: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    def visit(path: str, x: object) -> object:
        # Static parts of the structure come from the template; they are not arrays and never reach XLA.
        if path not in arrays:
            return x
        return hax.NamedArray(arrays[path], x.axes) if is_named(x) else arrays[path]

    return map_with_paths(visit, template)


def partition_spec(leaf: Leaf, placement: AxisMapping | Mappings | ShardingPlan) -> PartitionSpec:
    """The `PartitionSpec` that a placement gives to a leaf; arrays without names are replicated."""
    if isinstance(placement, ShardingPlan):
        return placement.spec(leaf.path)
    mapping = placement.params_at(leaf.path) if isinstance(placement, Mappings) else placement
    return mapping.spec(leaf.names)


def _shardings(tree: PyTree, placement: Placement, mesh: AnyMesh) -> dict[str, NamedSharding] | None:
    # JAX then takes the sharding from the arrays that are passed.
    if placement is None:
        return None
    return {
        path: NamedSharding(mesh, partition_spec(array_leaf(path, x), placement))
        for path, x in leaves_with_paths(tree)
        if is_array(x.array if is_named(x) else x)
    }


_Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], Any]]
"""Of arrays by path: shape and dtype."""


def _shapes(arrays: Mapping[str, Array]) -> _Shapes:
    return {path: (x.shape, x.dtype) for path, x in arrays.items()}


def _assert_same_arrays(program: str, name: str, planned: _Shapes, passed: _Shapes) -> None:
    if planned != passed:
        different = sorted(p for p in planned.keys() | passed.keys() if planned.get(p) != passed.get(p))
        lines = "\n".join(f"  {p}: planned {planned.get(p)}, got {passed.get(p)}" for p in different[:10])
        raise AssertionError(
            f"program {program}, input {name}: these are not the arrays that it was planned for\n{lines}"
        )


Resources: TypeAlias = Mapping[str, str | Iterable[str] | None]
"""Logical axis name → mesh axes, in any of the forms that users write."""
Donate: TypeAlias = tuple[bool, ...] | bool | None


@overload
def named_jit(
    fn: Callable[..., Any],
    axis_resources: Resources | None = None,
    *,
    in_axis_resources: Resources | None = None,
    out_axis_resources: Resources | None = None,
    donate_args: Donate = None,
) -> "NamedJit": ...


@overload
def named_jit(
    fn: None = None,
    axis_resources: Resources | None = None,
    *,
    in_axis_resources: Resources | None = None,
    out_axis_resources: Resources | None = None,
    donate_args: Donate = None,
) -> "Callable[[Callable[..., Any]], NamedJit]": ...


def named_jit(
    fn: Callable[..., Any] | None = None,
    axis_resources: Resources | None = None,
    *,
    in_axis_resources: Resources | None = None,
    out_axis_resources: Resources | None = None,
    donate_args: Donate = None,
) -> "NamedJit | Callable[[Callable[..., Any]], NamedJit]":
    """Jits a function of named arrays under the mapping in scope, like `haliax.named_jit`, but plannable.

    Each distinct combination of argument structure, mapping and mesh is one `Program`. `.program(*args)` gives it, and
    `.lower(*args)` lowers with abstract named inputs too (`jax.ShapeDtypeStruct` inside `NamedArray`), which
    Haliax's cannot. Keyword arguments are treated like positional ones. The mesh is the one in scope.

    Args:
        fn: the function; without it, a decorator is returned.
        axis_resources: mapping in scope while tracing; default the one of `haliax.axis_mapping`.
        in_axis_resources: places the arguments; default: as they are.
        out_axis_resources: places the results; default `axis_resources`.
        donate_args: which positional arguments may be reused.
    """
    if fn is None:
        return functools.partial(
            named_jit,
            axis_resources=axis_resources,
            in_axis_resources=in_axis_resources,
            out_axis_resources=out_axis_resources,
            donate_args=donate_args,
        )
    jitted = NamedJit(
        fn,
        compute=axis_resources,
        arguments=in_axis_resources,
        results=out_axis_resources,
        donate=donate_args,
    )
    functools.update_wrapper(jitted, fn)
    return jitted


class NamedJit:
    """The callable that `named_jit` returns."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        compute: Resources | None,
        arguments: Resources | None,
        results: Resources | None,
        donate: Donate,
    ):
        self._fn = fn
        self._compute = None if compute is None else AxisMapping(compute)
        self._in = None if arguments is None else AxisMapping(arguments)
        self._out = None if results is None else AxisMapping(results)
        self._donate = donate
        self._programs: dict[Hashable, Program] = {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        mesh = _needed_mesh()
        assert isinstance(mesh, Mesh), "named_jit needs a mesh of devices in scope to run: with jax.set_mesh(mesh): …"
        return self.program(*args, **kwargs).jit(mesh)(*args, *kwargs.values())

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lowers for the mesh in scope, with abstract or concrete arguments."""
        return self.program(*args, **kwargs).lower(_needed_mesh())

    def program(self, *args: PyTree, **kwargs: PyTree) -> Program:
        """The Program for arguments of this structure under the mapping in scope."""
        in_scope = self._compute if self._compute is not None else mapping_in_scope()
        compute = AxisMapping() if in_scope is None else in_scope
        arrays, static = split_arrays((*args, *kwargs.values()))
        shapes = jax.tree.map(_abstract, arrays)
        # Static leaves are part of the key: other values of them may trace to another program.
        key = (compute, tuple(kwargs), *_hashable(shapes), *_hashable(static))
        if key not in self._programs:
            names = [f"arg{n}" for n in range(len(args))] + list(kwargs)
            # Without `in_axis_resources` the placement is None: arguments keep the shardings that they have.
            placement = self._in if in_scope is not None or self._in is not None else None
            self._programs[key] = Program(
                name=getattr(self._fn, "__name__", "named_jit"),
                function=functools.partial(_with_keywords, self._fn, len(args), tuple(kwargs)),
                inputs=tuple(
                    Input(name=name, value=value, placement=placement)
                    for name, value in zip(names, joined(shapes, static), strict=True)
                ),
                mappings=Mappings(compute=compute),
                out_placement=self._out,
                donate=self._donated(names[: len(args)]),
            )
        return self._programs[key]

    def _donated(self, names: list[str]) -> tuple[str, ...]:
        if not self._donate:
            return ()
        # Trailing arguments without a flag are not donated, as in Haliax.
        flags = (True,) * len(names) if self._donate is True else self._donate
        return tuple(name for name, flag in zip(names, flags, strict=False) if flag)


def _with_keywords(fn: Callable[..., Any], positional: int, keywords: tuple[str, ...], *values: PyTree) -> PyTree:
    return fn(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))


def _abstract(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _hashable(tree: PyTree) -> tuple[Hashable, Hashable]:
    leaves, structure = cast("tuple[list[Any], Hashable]", jax.tree.flatten(tree))
    return structure, tuple((x.shape, x.dtype) if is_array(x) else x for x in leaves)


def _needed_mesh() -> AnyMesh:
    mesh = mesh_in_scope()
    if mesh is None:
        raise ValueError("named_jit needs a mesh in scope: with jax.set_mesh(mesh): …")
    return mesh
