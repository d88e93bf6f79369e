"""The state of a run that trains adapters: made from a key alone, beside a model that is frozen."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_ext.abstract import abstract
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.low_rank import RANK
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.targets import TargetGroup
from levanter.models.adapters.tree import PAIRS, Adapters
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision, cast_floating
from levanter.trainer.parts import ModelAveragingConfig
from levanter.trainer.state import StatePlan, TrainState, start

INIT = "init_adapters"
INIT_BASE = "init_frozen"
_KEY = jax.ShapeDtypeStruct((2,), np.dtype(np.uint32))


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Which adapters are trained.

    Attributes:
        targets: the projections that get one.
        config: how they begin.
        every: all projections of the model.
    """

    targets: tuple[TargetGroup, ...]
    config: LoraConfig
    every: tuple[TargetGroup, ...]

    def base_dtype(self, precision: Precision) -> np.dtype:
        """In what the frozen model is held, but for integers of it."""
        named = self.config.base_dtype
        return np.dtype(precision.compute if named in (None, "int8") else jnp.dtype(named))

    def placed(self, mappings: Mappings, mesh: MeshSpec) -> Mappings:
        """The mappings that place the factors as they are asked to be; those of a model's own arrays are the same."""
        if self.config.placement == "as_base":
            return mappings
        # What is whole on every device on purpose is no fault.
        meant = DeclaredReplication(has=RANK, lacks="", mesh_axes=mesh.names, reason="adapter.placement: whole")
        nowhere = AxisMapping(dict.fromkeys(sorted({name for group in self.targets for name in group.axis_names})))
        overrides = (*mappings.overrides, (PAIRS, nowhere))
        return replace(mappings, overrides=overrides, declared=(*mappings.declared, meant))

    def abstract_state(
        self, optimizer: optax.GradientTransformation, averaging: ModelAveragingConfig | None
    ) -> TrainState:
        """The state without memory."""
        return abstract(lambda key: self._first(key, optimizer, averaging), _KEY)

    def init_program(
        self, plan: StatePlan, optimizer: optax.GradientTransformation, averaging: ModelAveragingConfig | None
    ) -> Program:
        """The Program that makes the first state from a key."""
        return Program(
            name=INIT,
            function=lambda key: self._first(key, optimizer, averaging),
            inputs=(Input(name="key", value=_KEY, placement=Mappings()),),
            mappings=Mappings(compute=plan.parameters.mappings.params),
            out_placement=plan.whole,
        )

    def _first(
        self, key: jax.Array, optimizer: optax.GradientTransformation, averaging: ModelAveragingConfig | None
    ) -> TrainState:
        for_factors, for_steps = jax.random.split(key)
        # The first half is what a model is made from, and may have been.
        adapters = Adapters.init(self.targets, self.config, key=jax.random.fold_in(for_factors, 1))
        return start(adapters, optimizer, for_steps, averaging)  # pyright: ignore[reportArgumentType]


def init_base_program(plan: StatePlan, build: Callable[[jax.Array], LmHeadModel], dtype: np.dtype) -> Program:
    """The Program that makes a model to adapt from a key, where none is loaded; in the dtype that it is held in."""

    def initialize(key: jax.Array) -> LmHeadModel:
        for_model, _ = jax.random.split(key)
        return cast_floating(build(for_model), dtype)

    return Program(
        name=INIT_BASE,
        function=initialize,
        inputs=(Input(name="key", value=_KEY, placement=Mappings()),),
        mappings=Mappings(compute=plan.parameters.mappings.params),
        out_placement=plan.parameters,
    )
