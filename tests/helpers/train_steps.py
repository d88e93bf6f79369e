"""Train steps of a tiny Llama on meshes of virtual devices, with the state by path on the host."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import numpy as np
from helpers.llama_on_mesh import VOCAB, mappings_for, random_arrays, tiny_config
from jax.sharding import NamedSharding

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.data import next_tokens
from levanter.models import LlamaConfig
from levanter.models.precision import Precision
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.batch_plan import plan_batch
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.objective import Objective
from levanter.trainer.state import abstract_frozen, abstract_state, init_program, plan_state
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.trainable import Partition

CONFIG = tiny_config(num_kv_heads=8)
ROWS, POSITIONS = 16, 32
ADAM = AdamConfig(learning_rate=3e-3, warmup=2, weight_decay=0.1)
RNG = np.random.default_rng(7)
TOKENS = RNG.integers(0, VOCAB, (3, ROWS, POSITIONS)).astype(np.int32)
WEIGHTS = (RNG.random((3, ROWS, POSITIONS)) * (RNG.random((3, ROWS, 1)) > 0.2)).astype(np.float32)
SEGMENTS = np.sort(RNG.integers(0, 3, (3, ROWS, POSITIONS)), axis=-1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One run of a few steps on a mesh of virtual devices."""

    spec: MeshSpec
    mappings: Mappings
    per_device: int = -1
    precision: str = "f32"
    packed: bool = True
    optimizer: OptimizerConfig = ADAM
    config: LlamaConfig = CONFIG
    objective: Objective[Any, Any] = LmObjective(chunk=12)
    trainable: tuple[str, ...] | None = None
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def partition(self) -> Partition:
        """What is trained."""
        return Partition(patterns=self.trainable)

    def programs(self):
        config, precision = self.config, Precision.parse(self.precision)
        Vocab = hax.Axis("vocab", VOCAB)
        optimizer = self.optimizer.build(10)

        def build():
            return config.build(Vocab, key=jax.random.PRNGKey(0))

        averaging = dict(self.more).get("averaging")
        state = abstract_state(build, optimizer, precision, self.partition, averaging)
        frozen = abstract_frozen(build, precision, self.partition)
        plan = plan_state(state, self.mappings, self.spec, frozen=frozen)
        plan.whole.check()
        ways = self.spec.ways(self.mappings.compute.mesh_axes("batch"))
        batches = plan_batch(ROWS, per_device=self.per_device, ways=ways, positions=POSITIONS)

        objective = self.objective
        if isinstance(objective, LmObjective):
            objective = dataclasses.replace(objective, weights=self.packed, segments=self.packed)
        recipe = StepRecipe(
            objective=objective,
            optimizer=optimizer,
            schedule=self.optimizer.schedule(10),
            precision=precision,
            accumulation=batches.accumulation,
            parameters=plan.parameters,
            **dict(self.more),
        )
        program = step_program(
            recipe,
            state=state,
            frozen=frozen,
            plan=plan,
            batch=objective.abstract_batch(hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS)),
            mappings=self.mappings,
        )
        init = init_program(
            plan, lambda key: config.build(Vocab, key=key), optimizer, precision, self.partition, averaging
        )
        return plan, init, program

    def batch(self, n: int, mesh) -> Any:
        """The batch of a step, on the devices."""
        sharding = NamedSharding(mesh, self.mappings.compute.spec(("batch", "position")))
        axes = (hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS))

        def placed(values):
            return hax.NamedArray(jax.device_put(values[n], sharding), axes)

        if not self.packed:
            return LmBatch(tokens=placed(TOKENS), targets=placed(next_tokens(TOKENS)))
        return LmBatch(
            tokens=placed(TOKENS),
            targets=placed(next_tokens(TOKENS, SEGMENTS)),
            loss_weights=placed(WEIGHTS),
            segment_ids=placed(SEGMENTS),
        )

    def start(self, mesh, arrays: Mapping[str, np.ndarray] | None = None):
        """The state with parameters that are given; every statistic begins at zero."""
        plan, _, program = self.programs()
        values = random_arrays(self.config) if arrays is None else arrays
        template = program.input("state").value
        whole = {leaf.path: np.zeros(leaf.shape, leaf.dtype) for leaf in leaves(template)}
        whole |= {path: values[path.removeprefix("model.")] for path in whole if path.startswith("model.")}
        average = "average.parameters."
        whole |= {path: values[path.removeprefix(average)] for path in whole if path.startswith(average)}
        placed = {p: jax.device_put(v, plan.whole.sharding(p, mesh)) for p, v in whole.items()}
        return with_arrays(template, placed)

    def frozen(self, mesh, arrays: Mapping[str, np.ndarray] | None = None):
        """What is not trained of the parameters that are given; None for nothing."""
        plan, _, program = self.programs()
        values = random_arrays(self.config) if arrays is None else arrays
        template = program.input("frozen").value
        paths = [leaf.path for leaf in leaves(template)]
        return with_arrays(template, {p: jax.device_put(values[p], plan.parameters.sharding(p, mesh)) for p in paths})

    def run(self, devices, *, arrays=None, steps=3):
        """The metrics of each step, and the last state's arrays by path."""
        mesh = self.spec.build(devices[: self.spec.size])
        plan, _, program = self.programs()
        state, frozen = self.start(mesh, arrays), self.frozen(mesh, arrays)
        step, history = program.jit(mesh), []
        for n in range(steps):
            state, metrics = step(state, frozen, self.batch(n, mesh))
            numbers = {**vars(metrics), **metrics.terms}
            history.append({k: float(v) for k, v in numbers.items() if isinstance(v, jax.Array)})
        for leaf, array in zip(leaves(state), jax.tree.leaves(state), strict=True):
            assert array.sharding.is_equivalent_to(plan.whole.sharding(leaf.path, mesh), array.ndim), leaf.path
        return history, on_host(state)


def on_host(state) -> dict[str, np.ndarray]:
    """Every array of a state by path."""
    return {leaf.path: np.asarray(x) for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)}


def mesh_setup(data: int, model: int, **changes) -> Setup:
    """Data and model parallel, with `vocab → model`."""
    spec = MeshSpec.of(data=data, model=model)
    return Setup(spec, mappings_for(CONFIG, spec), **changes)
