"""`HandOver`: the weights of a training run in the dtype, layout and placement in which text is generated.

Training keeps parameters in float32 and in the shards of its own mapping. The Programs that generate take them in the
compute dtype (or as 8-bit integers), with contracted axes where a decode step reads them, and in shards of which no
token has to gather anything. One planned Program, `hand_over`, makes the second copy from the first.

Each byte moves once: a weight is converted in the shards that training left it in, and only the narrow result is moved.
An array that is the same in both, in dtype, axes and placement, is not copied at all: both models hold it. So the copy
must be dropped before the next training step, which donates the state.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import Mesh, PartitionSpec

from haliax_ext.abstract import cast, with_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Input, Jit, Program
from haliax_ext.pytree import KeyPath, PyTree, leaves_with_paths, path_string
from levanter.layers.cpu_matvec import MatrixFirst
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.low_rank import LowRank
from levanter.layers.quantized import (
    EXPERT,
    ROUTER,
    Int8Matrix,
    abstract_int8,
    contracted_first,
    int8_matrix,
    projections,
    with_untied_head,
)
from levanter.layers.unstacked import LAYERS
from levanter.models.adapters.lora import Adapters

PROGRAM = "hand_over"


class HandOverError(ValueError):
    """The weights of a model have no representation that the configuration names."""


def generation_module(
    build: Callable[[], PyTree],
    trained: PyTree,
    frozen: PyTree,
    *,
    dtype: np.dtype,
    int8: bool,
    tied_head: str = "copy",
    platform: str,
    devices: int,
) -> PyTree:
    """The model that generates, abstract: the layout in which `generate` reads the same weights from a checkpoint.

    Args:
        build: makes the model without adapters, abstract.
        trained: the trained parameters, abstract: those of the model, or adapters.
        frozen: the other parameters, abstract; None for none.
        dtype: the compute dtype.
        int8: whether all projections become 8-bit integers.
        tied_head: with `int8`, the matrix of a tied head: `copy` for integers of its own, `share` for the table.
        platform: of the devices.
        devices: how many there are.

    Raises:
        HandOverError: no projection can be 8-bit integers.
    """
    module = cast(build(), dtype)
    # A base that is held in integers stays in them, with the scales in float32.
    stored = {path for path, linear in projections(frozen).items() if isinstance(linear.weight, Int8Matrix)}
    module = _with_integers(module, stored.__contains__)
    # Before adapters are bound: binding wraps weights, and the head of its own is one of them.
    if int8 and tied_head == "copy":
        module = with_untied_head(module)
    # Factors are used in the compute dtype, as `generate` loads them.
    if isinstance(trained, Adapters):
        module = cast(trained, dtype).bound_to(module)
    if int8:
        module = _with_integers(module, lambda path: path.rsplit(".", 1)[-1] != ROUTER)
        if not any(isinstance(_base(linear.weight), Int8Matrix) for linear in projections(module).values()):
            raise HandOverError("quantize: int8: the model has no projection that can be 8-bit integers")
    if platform == "cpu":
        # Decoding on CPUs multiplies few rows by each matrix; see `commands.model.pretrained`.
        module = contracted_first(_matrices_first(module) if devices == 1 else module)
    return module


def _base(weight: object) -> object:
    """The matrix that adapters are added to, or the weight itself."""
    return weight.base if isinstance(weight, LowRank) else weight


def _with_integers(module: PyTree, chosen: Callable[[str], bool]) -> PyTree:
    """The module with abstract 8-bit integers in the chosen projections, below their adapters."""

    def visit(keys: KeyPath, x: object) -> object:
        if not isinstance(x, Linear) or not chosen(path_string(keys)):
            return x
        # A weight that is integers already, or any other operand, stays as it is.
        base = _base(x.weight)
        if not isinstance(base, NamedArray):
            return x
        integers = abstract_int8(base.axes, x.In)
        weight = dataclasses.replace(x.weight, base=integers) if isinstance(x.weight, LowRank) else integers
        return dataclasses.replace(x, weight=weight)

    return jax.tree_util.tree_map_with_path(visit, module, is_leaf=lambda x: isinstance(x, Linear))


def _matrices_first(module: PyTree) -> PyTree:
    """The module with matrices as first operands, as checkpoints of training are read for one CPU.

    Stacked layers stay one array, and experts are multiplied in groups.
    """

    def visit(x: object) -> object:
        if not isinstance(x, Linear | Embedding) or not isinstance(x.weight, NamedArray):
            return x
        # The loop over layers slices a stacked array; only matrices outside of it are multiplied as they lie.
        names = {axis.name for axis in x.weight.axes}
        return x if names & {LAYERS, EXPERT} else dataclasses.replace(x, weight=MatrixFirst(x.weight))

    return jax.tree.map(visit, module, is_leaf=lambda x: isinstance(x, Linear | Embedding))


@dataclass(frozen=True, kw_only=True)
class _Move:
    """What becomes of one array.

    Attributes:
        source: its path in the model that is trained.
        target: its path in the model that generates; of a quantized weight, the path of its `Int8Matrix`.
        In: contracted axes of a weight that is quantized; empty for an array that is cast.
    """

    source: str
    target: str
    In: tuple[str, ...] = ()


def _moves(source: PyTree, target: PyTree) -> Iterator[_Move]:
    """Where every array of `target` comes from."""
    # Projections first: a weight may change its representation, and one array become several.
    linears, head = projections(source), ""
    arrays = dict(leaves_with_paths(source))
    placed: set[str] = set()
    for path, linear in projections(target).items():
        if path in linears:
            move, weight = f"{path}.weight", linears[path].weight
        else:
            # A head of its own beside a tied table: its integers are those of the table.
            # Tied models compute the head from the table, so the same array object is found among the leaves.
            table: object = source.head.weight
            head = next((name for name, x in arrays.items() if x is table), "")
            if not head:
                raise HandOverError(
                    f"quantize: int8: the table that the output head {path} shares is no plain array (an adapter is "
                    "trained on it)\n  → quantize: null, or tie no embeddings"
                )
            move, weight = head, table
        for one in _weight_moves(weight, linear.weight, move, f"{path}.weight", linear.In):
            placed.add(one.target)
            yield one
    for path, _ in leaves_with_paths(target):
        # Leaves below an operand that was moved as a whole are accounted for.
        inside = any(path == at or path.startswith(f"{at}.") for at in placed)
        # Biases, norms and tables: an embedding's matrix may have moved below an operand.
        if not inside and path in arrays:
            yield _Move(source=path, target=path)
        elif not inside:
            assert path.endswith(".array"), f"{path}: nothing of the trained model becomes this"
            yield _Move(source=path.removesuffix(".array"), target=path)


def _weight_moves(source: object, target: object, at: str, to: str, In: tuple[str, ...]) -> Iterator[_Move]:
    """The moves of one projection's weight, operand by operand."""
    if isinstance(target, LowRank):
        assert isinstance(source, LowRank), f"{at} has no adapter"
        yield from _weight_moves(source.base, target.base, f"{at}.base", f"{to}.base", In)
        for factor in ("a", "b"):
            yield _Move(source=f"{at}.{factor}", target=f"{to}.{factor}")
    elif isinstance(target, Int8Matrix):
        if isinstance(source, Int8Matrix):
            # Stored integers stay the same integers; only their shards and axis order may change.
            for part in ("q", "scale"):
                yield _Move(source=f"{at}.{part}", target=f"{to}.{part}")
        else:
            yield _Move(source=at, target=to, In=In)
    else:
        yield _Move(source=at, target=f"{to}.array" if isinstance(target, MatrixFirst) else to)


@dataclass(frozen=True, kw_only=True, eq=False)
class HandOver:
    """The copy of a training run's weights for generation.

    Attributes:
        module: the model that generates, abstract.
        sharding: its placement.
        program: makes the arrays that differ; None if none does.
        shared: path in the model that generates → path in the trained one, for arrays that both hold.
        moved_bytes: bytes that arrive on a device from others, by arithmetic: of each array of the copy, the part of
            the device's shard that the device does not hold as trained.
    """

    module: PyTree
    sharding: ShardingPlan
    program: Program | None
    shared: Mapping[str, str]
    moved_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Bytes on a device of the arrays that both models hold."""
        return sum(self.sharding.by_path[path].bytes_per_device for path in self.shared)

    @property
    def copied_bytes(self) -> int:
        """Bytes on a device of the arrays that exist for generation only."""
        return self.sharding.bytes_per_device - self.shared_bytes

    def __call__(self, model: PyTree, mesh: Mesh, *, jit: Jit = Program.jit) -> PyTree:
        """The model that generates, with the weights of the trained one.

        Args:
            model: the trained model, bound, on the devices.
            mesh: the devices.
            jit: makes a Program callable.
        """
        arrays = dict(leaves_with_paths(model))
        # Shared arrays are taken as they are: no Program runs for them.
        ready: dict[str, jax.Array] = {path: arrays[source].array for path, source in self.shared.items()}
        if self.program is not None:
            taken = {path: arrays[path] for path in self.program.inputs[0].value}
            ready |= {path: x.array for path, x in jit(self.program, mesh)(taken).items()}
        return with_arrays(self.module, ready)


def plan_hand_over(
    model: PyTree,
    trained: ShardingPlan,
    module: PyTree,
    generating: ShardingPlan,
    *,
    mappings: Mappings,
    compiler_options: Mapping[str, str],
) -> HandOver:
    """Plans the copy.

    Args:
        model: the trained model, bound and abstract.
        trained: the placement of its leaves.
        module: the model that generates; see `generation_module`.
        generating: the placement of its leaves.
        mappings: of generation.
        compiler_options: see `Program`.
    """
    # All of this is arithmetic on names and shapes; nothing is traced before the Program is lowered.
    sources, targets = dict(leaves_with_paths(model)), dict(leaves_with_paths(module))
    shared: dict[str, str] = {}
    moves: list[_Move] = []
    for move in _moves(model, module):
        if _is_shared(move, sources, targets, trained, generating):
            shared[move.target] = move.source
        else:
            moves.append(move)

    def hand_over(arrays: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
        ready: dict[str, NamedArray] = {}
        for move in moves:
            source, plan = arrays[move.source], trained.by_path[move.source]
            with jax.named_scope(move.target.removesuffix(".weight")):
                for path, x in _converted(source, move, targets).items():
                    # The narrow array gets the shards of the wide one: XLA would gather first and convert afterwards.
                    placed = dict(zip(plan.leaf.names, plan.mesh_axes, strict=True))
                    spec = PartitionSpec(*(placed[axis.name] or None for axis in x.axes))
                    narrow = jax.lax.with_sharding_constraint(x.array, spec)
                    ready[path] = hax.named(narrow, x.axes)
        return ready

    # One array may be read for two targets (the table and the head of its own), but is one input.
    read = dict.fromkeys(move.source for move in moves)
    program = Program(
        name=PROGRAM,
        function=hand_over,
        inputs=(Input(name="model", value={path: sources[path] for path in read}, placement=trained),),
        mappings=mappings,
        out_placement=generating,
        compiler_options=compiler_options,
    )
    return HandOver(
        module=module,
        sharding=generating,
        program=program if moves else None,
        shared=shared,
        moved_bytes=sum(_arriving_bytes(move, trained, generating) for move in moves),
    )


def _is_shared(
    move: _Move,
    sources: Mapping[str, NamedArray],
    targets: Mapping[str, NamedArray],
    trained: ShardingPlan,
    generating: ShardingPlan,
) -> bool:
    """Whether an array is the same in both models."""
    if move.In:
        return False
    source, target = sources[move.source], targets[move.target]
    # Equal placements by axis name: a trailing None in a PartitionSpec makes no difference.
    placements = trained.by_path[move.source].mesh_axes, generating.by_path[move.target].mesh_axes
    return source.dtype == target.dtype and source.axes == target.axes and placements[0] == placements[1]


def _converted(x: NamedArray, move: _Move, targets: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
    """The arrays of the copy that are made of `x`, by path, in their dtypes and axis orders."""
    if not move.In:
        target = targets[move.target]
        return {move.target: x.astype(target.dtype).rearrange(target.axes)}
    # From the array as it is trained, like a weight that is quantized while it is read from a file.
    matrix = int8_matrix(x, move.In)
    arrays = {"q": matrix.q, "scale": matrix.scale}
    return {
        f"{move.target}.{part}": array.rearrange(targets[f"{move.target}.{part}"].axes)
        for part, array in arrays.items()
    }


def _arriving_bytes(move: _Move, trained: ShardingPlan, generating: ShardingPlan) -> int:
    """Bytes of a device's shards in the copy that it does not hold of the trained array."""
    before = trained.by_path[move.source]
    # By axis name, since the copy may have its axes in another order.
    axes_before = dict(zip(before.leaf.names, before.mesh_axes, strict=True))
    sizes, nbytes = trained.mesh.shape, 0
    paths = (f"{move.target}.q", f"{move.target}.scale") if move.In else (move.target,)
    for path in paths:
        after = generating.by_path[path]
        axes_after = dict(zip(after.leaf.names, after.mesh_axes, strict=True))
        # Of each mesh axis that shards the array before and not (or elsewhere) after, a device holds one part.
        shards = math.prod(
            sizes[mesh_axis]
            for name, mesh_axes in axes_before.items()
            for mesh_axis in mesh_axes
            if name in axes_after and mesh_axis not in axes_after[name]
        )
        nbytes += after.bytes_per_device - after.bytes_per_device // shards
    return nbytes
