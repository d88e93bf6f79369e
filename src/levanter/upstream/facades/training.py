"""`Trainer`: trains with a script's own loss function, with the interface of earlier generations.

    with Trainer(config.trainer, optimizer, loss_fn) as trainer:
        state = trainer.initial_state(key, model_init=lambda: config.model.build(Vocab, key=model_key))
        trainer.train(state, trainer.data_loader(dataset).iter_from_step(state.step))

`loss_fn(model, *batch, key=key)` returns the mean over its rows, or that and a dictionary of numbers to log. It becomes
an `Objective`, so that microbatches, precision, sharding, skipped steps and averages work as in a run of `train_lm`.
What such a run has beyond that (a plan, preflight, exports, token stores) is not part of this class.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh, NamedSharding

from haliax_ext.abstract import abstract, leaves, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree, is_named
from levanter.checkpoint import Checkpointer, CheckpointRef, find_checkpoints, planned_targets, restore
from levanter.commands.cli.runner import run_id
from levanter.distributed.compile_barrier import jit_together
from levanter.io import join
from levanter.layers.outputs import Sums
from levanter.mesh import resolve
from levanter.models.adapters.lora import bound_plan
from levanter.models.axes import model_axes
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.optim.hessian import HessianEma
from levanter.optim.skip_steps import Recent
from levanter.tracker import start_trackers
from levanter.trainer.averaging import check_averaging
from levanter.trainer.batch_plan import plan_batch
from levanter.trainer.config import TrainerConfig
from levanter.trainer.loop import Loop
from levanter.trainer.nan_guard import Guard
from levanter.trainer.objective import LOSS, AtStep, Objective, Term
from levanter.trainer.report import StepReport
from levanter.trainer.state import StatePlan, plan_state, start
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.train_state import TrainState
from levanter.upstream.facades import trainer as members
from levanter.upstream.facades.datasets import AsyncDataset
from levanter.upstream.facades.loaders import DataLoader
from levanter.upstream.facades.lora import LoraModel
from levanter.upstream.facades.tracker import current_tracker, log
from levanter.upstream.facades.trainer_state import StepInfo as StepInfo
from levanter.upstream.facades.trainer_state import TrainerState as TrainerState
from levanter.upstream.facades.trainer_state import is_leaf, trained_part, without_empty

Loss = Callable[..., PyTree]
Hook = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class LossFunction(Objective[PyTree, PyTree]):
    """A script's loss function as an objective: the mean of its values over the given rows.

    Attributes:
        function: `(model, *batch, key=key)` → loss, or (loss, numbers to log).
        Batch: the axis of rows.
        logged: names of the numbers to log.
    """

    function: Loss
    Batch: str
    logged: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        return (Term(name=LOSS), *(Term(name=name, weight=None) for name in self.logged))

    def abstract_batch(self, Batch: Axis, Pos: Axis) -> PyTree:
        raise ValueError(f"a batch with {Batch} and {Pos} must come from the script's loader")

    def rows(self, batch: PyTree) -> Axis:
        arrays = [leaf for leaf in jax.tree.leaves(batch, is_leaf=is_named) if is_named(leaf)]
        return next(leaf.resolve_axis(self.Batch) for leaf in arrays if self.Batch in [a.name for a in leaf.axes])

    def normalizer(self, batch: PyTree) -> jax.Array:
        return jnp.float32(self.rows(batch).size)

    def sums(self, model: PyTree, batch: PyTree, at: AtStep) -> Sums:  # noqa: ARG002
        loss, more = self.of(model, batch)
        rows = self.rows(batch).size
        # The loss is a mean over rows; times the rows it is a sum, which adds up over microbatches.
        return Sums({name: value * rows for name, value in {LOSS: loss, **more}.items()})

    def of(self, model: PyTree, batch: PyTree) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the numbers to log, each a float32 mean over the rows."""
        # One key per row, like the batch's arrays; a microbatch uses the key of its first row.
        (args, keys), rows = batch, self.rows(batch)
        result = self.function(model, *args, key=keys.take(rows, 0).array)
        loss, more = result if isinstance(result, tuple) else (result, {})
        return _mean(loss), {name: _mean(value) for name, value in more.items()}


def _mean(value: PyTree) -> jax.Array:
    array = value.array if is_named(value) else jnp.asarray(value)
    # float32 before the mean: a sum of many 16-bit losses would lose digits.
    return jnp.mean(array.astype(jnp.float32))


class Trainer:
    """Trains with a script's own loss function.

    Args:
        config: the `trainer:` block.
        optimizer: an optax transformation, such as `config.optimizer.build(steps)`.
        loss_fn: the loss; see the module.
        add_default_hooks: whether to log losses and save checkpoints as configured.
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer: PyTree,
        loss_fn: Loss,
        *,
        add_default_hooks: bool = True,
    ):
        self.config, self.optimizer, self.loss_function = config, optimizer, loss_fn
        self.add_default_hooks = add_default_hooks
        self.hooks: list[tuple[Hook, int]] = []
        self.run_id = run_id(config)
        self._precision = Precision.parse(str(config.mp))
        check_averaging(config.model_averaging, self._precision)
        self._scope = ExitStack()
        self._plan: StatePlan | None = None
        self._state: TrainState | None = None
        self._rest: PyTree = None
        self._frozen: PyTree = None
        self._trainable: PyTree = True
        self._steps: dict[tuple[object, ...], Callable[..., PyTree]] = {}

    # --- what scripts read ---

    @property
    def num_train_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_train_steps

    @property
    def mp(self) -> PyTree:
        """The precision policy."""
        return self.config.mp

    @cached_property
    def device_mesh(self) -> Mesh:
        """The mesh on the devices of this run."""
        return members.device_mesh(self.config)

    @property
    def parameter_axis_mapping(self) -> dict[str, PyTree]:
        """Logical axis → mesh axes of parameters."""
        return members.parameter_axis_mapping(self.config)

    @property
    def compute_axis_mapping(self) -> dict[str, PyTree]:
        """Logical axis → mesh axes of activations."""
        return members.compute_axis_mapping(self.config)

    @property
    def TrainBatch(self) -> Axis:
        """The axis of a training batch."""
        return members.TrainBatch(self.config)

    @property
    def EvalBatch(self) -> Axis:
        """The axis of an evaluation batch."""
        return members.EvalBatch(self.config)

    @property
    def checkpoint_path(self) -> str:
        """The folder of the run's checkpoints."""
        checkpointer = self.config.checkpointer
        return join(checkpointer.base_path, *((self.run_id,) if checkpointer.append_run_id_to_base_path else ()))

    def loss_fn(self, model: PyTree, *batch: PyTree, key: PyTree = None) -> PyTree:
        """The loss of a model whose parameters are cast to the compute dtype."""
        # A script may call this outside of a step, where no mapping is in scope.
        with hax.axis_mapping(self.compute_axis_mapping):
            return self.loss_function(self._precision.cast_to_compute(model), *batch, key=key)

    # --- a scope ---

    def __enter__(self) -> "Trainer":
        tracker = start_trackers(self.config.trackers, run_id=self.run_id, process_index=jax.process_index())
        for context in (current_tracker(tracker), self.device_mesh, hax.axis_mapping(self.parameter_axis_mapping)):
            self._scope.enter_context(context)
        # Closed in reverse order: the tracker is finished first, while it is still the script's.
        self._scope.callback(tracker.finish)
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    # --- data ---

    def data_loader(self, dataset: AsyncDataset, batch: Axis | int | None = None) -> DataLoader:
        """The batches of a data set on the mesh: of the training batch size, or of another one."""
        size = self.config.train_batch_size if batch is None else batch
        if size == -1:
            size = self.TrainBatch.size
        name = self.config.mesh.batch_axis_name or "batch"
        return DataLoader(
            dataset,
            size,
            batch_axis_name=None if isinstance(size, Axis) else name,
            mesh=self.device_mesh,
            axis_resources=self.compute_axis_mapping,
            allow_nondivisible_batch_size=self.config.allow_nondivisible_batch_size,
        )

    # --- hooks ---

    def add_hook(self, fn: Hook | None = None, *, every: int = 1) -> PyTree:
        """Calls `fn(info)` every `every` steps and after the last one; without `fn`, a decorator."""
        if fn is None:
            return lambda hook: self.add_hook(hook, every=every)
        self.hooks.append((fn, every))
        return fn

    def run_hooks(self, info: StepInfo, force: bool = False) -> None:
        """Calls the hooks that are due; all of them if `force`."""
        for fn, every in self.hooks:
            # Upstream's rule: no hook after the first two steps, unless forced.
            if force or (info.step > 1 and info.step % every == 0):
                getattr(fn, "on_step", fn)(info)

    def add_eval_hook(self, eval_dataset: AsyncDataset, name: str | None = None) -> None:
        """Logs the mean loss of a data set at every `steps_per_eval`."""
        loader, most = self.data_loader(eval_dataset, self.EvalBatch), self.config.max_eval_batches
        loss = hax.named_jit(lambda model, *batch: _reduce_loss(self.loss_fn(model, *batch, key=None)))
        prefix = "eval" if name is None else f"eval/{name}"

        def evaluate(info: StepInfo) -> None:
            # Batches of a finite loader may be fewer than max_eval_batches.
            losses = [float(loss(info.eval_model, batch)) for _, batch in zip(range(most or len(loader)), loader)]  # noqa: B905
            log({f"{prefix}/loss": float(np.mean(losses))}, step=info.step)

        self.add_hook(evaluate, every=self.config.steps_per_eval)

    # --- training ---

    def initial_state(
        self,
        training_key: jax.Array,
        model: PyTree = None,
        model_init: Callable[[], PyTree] | None = None,
        *,
        is_trainable: PyTree = True,
    ) -> TrainerState:
        """The state before the first step: from the run's newest checkpoint, or with a model that is passed or built.

        Raises:
            ValueError: not exactly one of `model` and `model_init` is passed, or nothing is trained.
            CheckpointMismatchError: the run's checkpoint holds another model.
        """
        if (model is None) == (model_init is None):
            raise ValueError("initial_state: pass exactly one of model and model_init")
        self._trainable = is_trainable
        key = (
            jax.random.key_data(training_key)
            if jnp.issubdtype(training_key.dtype, jax.dtypes.prng_key)
            else training_key
        )

        def make_state() -> tuple[TrainState, PyTree]:
            whole = model_init() if model_init is not None else model
            parameters = self._precision.cast_to_param(trained_part(whole, is_trainable))
            averaging = self.config.model_averaging
            # Frozen parameters of a model that is passed are not copied.
            frozen = _without(whole, parameters) if model is None and is_trainable is not True else None
            return start(parameters, self.optimizer, jnp.asarray(key, jnp.uint32), averaging), frozen

        # Leaves that are not parameters (functions, counts) are in no checkpoint and do not change during a run.
        whole = model if model is not None else _without_parameters(model_init)
        self._rest = without_empty(
            eqx.filter(whole, lambda x: not eqx.is_inexact_array(x) and not isinstance(x, jax.ShapeDtypeStruct))
        )
        # Shapes only: the sharding is planned before any parameter is allocated.
        state, frozen = eqx.filter_eval_shape(make_state)
        self._state = state
        if model is not None and is_trainable is not True:
            frozen = _without(model, state.model)
        if not jax.tree.leaves(state.model):
            raise ValueError("is_trainable: it selects no parameter, so nothing would be trained")
        _refuse_asking(state.optimizer)
        self._frozen = None if not jax.tree.leaves(frozen) else frozen
        mappings = self._mappings(whole)
        self._plan = plan_state(state, mappings, MeshSpec.from_mesh(self._mesh), frozen=self._frozen)
        self._plan.whole.check()
        targets = planned_targets(self._plan.whole, self._mesh)
        ref, fresh = self._resumed(), None
        if ref is None or (model is None and self._frozen is not None):
            with jax.set_mesh(self._mesh), hax.axis_mapping(AxisMapping(self.parameter_axis_mapping)):
                # Under jit, so that each device initializes only its shards.
                fresh, frozen = eqx.filter_jit(make_state)()
            self._frozen = frozen if model is None and self._frozen is not None else self._frozen
        self._place_frozen()
        if ref is not None:
            return self._outside(with_arrays(state, restore(ref, targets)))
        placed = {path: target.sharding for path, target in targets.items()}
        # The arrays are placed by the plan; initialization under jit may have chosen other shardings.
        arrays = {leaf.path: x for leaf, x in zip(leaves(fresh), jax.tree.leaves(fresh), strict=True)}
        return self._outside(with_arrays(state, {path: jax.device_put(x, placed[path]) for path, x in arrays.items()}))

    def _place_frozen(self) -> None:
        """Places the frozen parameters by the plan, as an input of every step."""
        if self._frozen is None:
            return
        assert self._plan is not None
        plans = self._plan.parameters.by_path
        arrays = zip(leaves(self._frozen), jax.tree.leaves(self._frozen), strict=True)
        placed = {leaf.path: jax.device_put(x, NamedSharding(self._mesh, plans[leaf.path].spec)) for leaf, x in arrays}
        self._frozen = with_arrays(self._frozen, placed)

    def train(self, state: TrainerState, train_loader: Iterable[PyTree], run_hooks: bool = True) -> StepInfo:
        """Runs steps until `num_train_steps` is reached or the batches end.

        Raises:
            ValueError: no step was taken.
            NonFiniteError: a loss is not finite, and the configuration ends a run on that.
        """
        info = None
        for info in self._walk(state, train_loader, run_hooks=run_hooks):  # noqa: B007
            pass
        if info is None:
            if state.int_step < self.num_train_steps:
                raise ValueError("no step was taken: the data set has no batches")
            info = StepInfo(state, 0.0, 0.0)
        if run_hooks:
            self.run_hooks(info, force=True)
        return info

    def training_steps(self, state: TrainerState, train_loader: Iterable[PyTree]) -> Iterator[StepInfo]:
        """Iterates over the steps, running the hooks after each."""
        return self._walk(state, train_loader, run_hooks=True)

    def train_step(self, state: TrainerState, *batch: PyTree) -> StepInfo:
        """Takes one step."""
        return next(self._walk(state, [batch], run_hooks=True, several=True))

    def _walk(
        self, state: TrainerState, loader: Iterable[PyTree], *, run_hooks: bool, several: bool = False
    ) -> Iterator[StepInfo]:
        """Runs the loop for one batch at a time, so that a script may inspect the state between two steps."""
        guard = Guard(
            nan=self.config.crash_on_nan, inf=self.config.crash_on_inf, in_a_row=self.config.skip_nonfinite_steps
        )
        with ExitStack() as scope:
            saver = scope.enter_context(self._checkpointer()) if self.add_default_hooks else None
            for batch in loader:
                step = state.int_step
                if step >= self.num_train_steps:
                    break
                reports: list[StepReport] = []
                placed = self._placed(batch if several else (batch,), step)
                loop = Loop(
                    step_of=lambda _, placed=placed: self._step(placed), listeners=[reports.append], guard=guard
                )
                ended = loop.run(self._inside(state), [(step, placed)], first=step)
                state, (report,) = self._outside(ended.state), reports
                info = StepInfo(state, report.loss, report.seconds)
                log({"train/loss": report.loss, **{f"train/{k}": v for k, v in report.terms.items()}}, step=step)
                if run_hooks:
                    self.run_hooks(info)
                last = state.int_step == self.num_train_steps
                if saver is not None and (last or saver.due(state.int_step)):
                    saver.save(state.int_step, _arrays(self._inside(state)), {"run_id": self.run_id}, force=last)
                yield info

    # --- internals ---

    @property
    def _mesh(self) -> Mesh:
        """The plain JAX mesh; the script's mesh wraps it so that `with` can enter it."""
        return getattr(self.device_mesh, "_mesh", self.device_mesh)

    def _mappings(self, model: PyTree) -> Mappings:
        """The mappings of parameters and activations, with `heads` resolved for this model."""
        config = getattr(model, "config", None)
        if isinstance(model, LmHeadModel) and isinstance(config, LmConfig):
            spec = MeshSpec.from_mesh(self._mesh)
            axes = model_axes(config.axes, vocab=model.Vocab.size)
            granules = spec.ways(tuple(name for name in spec.dcn))
            return resolve(self.config.mesh, axes, devices=spec.size, granules=granules).mappings
        return Mappings(params=AxisMapping(self.parameter_axis_mapping), compute=AxisMapping(self.compute_axis_mapping))

    def _resumed(self) -> CheckpointRef | None:
        if self.config.load_checkpoint is False:
            return None
        checkpoints = find_checkpoints(self.checkpoint_path)
        if self.config.load_checkpoint and not checkpoints:
            raise ValueError(f"trainer.load_checkpoint is true, but there is no checkpoint in {self.checkpoint_path}")
        return checkpoints[-1] if checkpoints else None

    def _checkpointer(self) -> Checkpointer:
        checkpointer = self.config.checkpointer
        return Checkpointer(
            self.checkpoint_path,
            keep=[(interval.every, interval.until) for interval in checkpointer.keep],
            save_interval_seconds=None
            if checkpointer.save_interval is None
            else checkpointer.save_interval.total_seconds(),
            keep_last_temporary=checkpointer.keep_last_temporary_checkpoints,
        )

    def _inside(self, state: TrainerState) -> TrainState:
        return TrainState(
            step=state.step,
            model=trained_part(state.model, self._trainable),
            optimizer=state.opt_state,
            key=state.training_key,
            average=state.model_averaging,
        )

    def _outside(self, state: TrainState) -> TrainerState:
        return TrainerState(
            step=state.step,
            model=self._whole(state.model, self._frozen),
            optimizer=self.optimizer,
            opt_state=state.optimizer,
            training_key=state.key,
            is_trainable=self._trainable,
            mp=self.mp,
            model_averaging=state.average,
        )

    def _whole(self, trained: PyTree, frozen: PyTree) -> PyTree:
        """The model: trained and frozen parameters, and what is neither."""
        trees = [tree for tree in (trained, frozen, self._rest) if tree is not None]
        return jax.tree.map(lambda *xs: next((x for x in xs if x is not None), None), *trees, is_leaf=is_leaf)

    def _bound(self, trained: PyTree, frozen: PyTree) -> PyTree:
        """The model that a step computes with; that of adapters has them in its projections.

        The step casts a bound model by wrapping its layers, whose projections then have other paths: adapters that
        were bound afterwards would find none of theirs, and train nothing.
        """
        model = self._whole(trained, frozen)
        return model.bound if isinstance(model, LoraModel) else model

    def _bound_placement(self, plan: StatePlan) -> ShardingPlan | None:
        """The placement of the model that a step computes with, by its own paths; None for those of the state."""
        assert self._state is not None
        model = self._state.model
        if not isinstance(model, LoraModel) or jax.tree.leaves(self._rest):
            return None

        def renamed(leaf_plan: LeafPlan) -> LeafPlan:
            path = leaf_plan.leaf.path.removeprefix("base.").removeprefix("adapters.")
            return dataclasses.replace(leaf_plan, leaf=dataclasses.replace(leaf_plan.leaf, path=path))

        leaf_plans = tuple(map(renamed, plan.parameters.leaves))
        return bound_plan(model.adapters, dataclasses.replace(plan.parameters, leaves=leaf_plans))

    def _placed(self, batch: tuple[PyTree, ...], step: int) -> PyTree:
        """Places a batch in the step's shardings and adds a random key for each row."""
        mapping, name = AxisMapping(self.compute_axis_mapping), self.config.mesh.batch_axis_name or "batch"
        Batch = next(
            leaf.resolve_axis(name)
            for leaf in jax.tree.leaves(batch, is_leaf=is_named)
            if is_named(leaf) and name in [axis.name for axis in leaf.axes]
        )
        # Seed and step determine the keys, so that a resumed run draws the same.
        drawn = np.random.default_rng((self.config.seed, step)).integers(0, 2**32, (Batch.size, 2), np.uint32)
        keys = NamedArray(jnp.asarray(drawn), (Batch, Axis("key_word", 2)))

        def put(leaf: PyTree) -> PyTree:
            if not is_named(leaf):
                raise ValueError(f"a batch for Trainer must hold named arrays, got {type(leaf).__name__}")
            where = NamedSharding(self._mesh, mapping.spec(axis.name for axis in leaf.axes))
            return NamedArray(jax.device_put(leaf.array, where), leaf.axes)

        return jax.tree.map(put, (batch, keys), is_leaf=is_named)

    def _step(self, batch: PyTree) -> Callable[..., PyTree]:
        """The compiled step for batches of this structure."""
        shapes = abstract(lambda: batch)
        known = (jax.tree.structure(shapes), *[(x.shape, x.dtype) for x in jax.tree.leaves(shapes)])
        if known not in self._steps:
            assert self._plan is not None, "initial_state comes before a step"
            program = self._program(shapes, self._plan)
            run = jit_together(program, self._mesh)
            self._steps[known] = lambda state, batch: run(state, self._frozen, batch)
        return self._steps[known]

    def _program(self, batch: PyTree, plan: StatePlan) -> PyTree:
        name = self.config.mesh.batch_axis_name or "batch"
        objective = LossFunction(function=self.loss_function, Batch=name)
        mappings = plan.parameters.mappings
        ways = MeshSpec.from_mesh(self._mesh).ways(mappings.compute.mesh_axes(name))
        rows = objective.rows(batch).size
        divided = plan_batch(rows, per_device=self.config.per_device_parallelism, ways=ways, positions=1)

        def logged(parameters: PyTree, frozen: PyTree, batch: PyTree) -> dict[str, jax.Array]:
            return objective.of(self._precision.cast_to_compute(self._whole(parameters, frozen)), batch)[1]

        assert self._state is not None
        frozen = abstract(lambda: self._frozen)
        names = tuple(eqx.filter_eval_shape(logged, self._state.model, frozen, batch))
        recipe = StepRecipe(
            objective=dataclasses.replace(objective, logged=names),
            optimizer=self.optimizer,
            # The learning rate is inside the script's optimizer and cannot be read; reports show 0.
            schedule=lambda step: jnp.zeros_like(step, jnp.float32),
            precision=self._precision,
            accumulation=divided.accumulation,
            bind=self._bound,
            # A model's other arrays have no plan; gradients are then sharded like the parameters that they update.
            parameters=None if jax.tree.leaves(self._rest) else plan.parameters,
            model=self._bound_placement(plan),
            skip_nonfinite=self.config.skip_nonfinite_steps > 0,
            averaging=self.config.model_averaging,
        )
        return step_program(recipe, state=self._state, frozen=frozen, plan=plan, batch=batch, mappings=mappings)


def _without(model: PyTree, trained: PyTree) -> PyTree:
    """The parameters of a model that are not trained; None in place of everything else."""
    parameters = without_empty(trained_part(model, is_trainable=True))
    return jax.tree.map(lambda x, y: x if y is None else None, parameters, trained, is_leaf=is_leaf)


def _without_parameters(model_init: Callable[[], PyTree] | None) -> PyTree:
    """A model without its parameters, which are never materialized."""
    assert model_init is not None
    shapes = eqx.filter_eval_shape(model_init)
    parameters = eqx.filter(
        shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact)
    )
    others = eqx.filter_jit(
        lambda: eqx.filter(model_init(), lambda x: eqx.is_array(x) and not eqx.is_inexact_array(x))
    )()
    return eqx.combine(others, parameters, eqx.filter(shapes, lambda x: not isinstance(x, jax.ShapeDtypeStruct)))


def _refuse_asking(optimizer_state: PyTree) -> None:
    """Refuses optimizers that need values from the step which only their configuration provides.

    Raises:
        ValueError: the optimizer is one of them.
    """
    kinds = (Recent, HessianEma)
    nodes = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, kinds) for node in nodes):
        raise ValueError("Trainer: skip_bad_steps and sophia-h need the step of a run: use `train_lm`")


def _reduce_loss(outputs: PyTree) -> jax.Array:
    return _mean(outputs[0] if isinstance(outputs, tuple) else outputs)


def _arrays(state: TrainState) -> dict[str, jax.Array]:
    return {leaf.path: x for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}
