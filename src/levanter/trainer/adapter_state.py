"""The state of a run that trains adapters: made from a key alone, beside a model that is frozen."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_ext.abstract import abstract
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings, path_matches
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from levanter.layers.low_rank import RANK
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.tree import PAIRS, Adapters
from levanter.models.adapters.whole import copy_path, select_leaves
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision, cast_floating
from levanter.trainer.config_blocks import ModelAveragingConfig
from levanter.trainer.reinit_rows import Renewal, unchanged
from levanter.trainer.state import StatePlan, start
from levanter.trainer.train_state import MODEL, TrainState

INIT = "init_adapters"
COPIED = "copied"
"""The name of the input that is what is copied of the model."""
INIT_BASE = "init_frozen"
_KEY = jax.ShapeDtypeStruct((2,), np.dtype(np.uint32))


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """Which adapters are trained.

    Attributes:
        targets: the projections that get one.
        config: how they begin.
        every: all projections of the model.
        whole: the paths of the model's parameters that are trained whole beside them.
        renewed: what is done to copies of these before the first step.
    """

    targets: tuple[TargetGroup, ...]
    config: LoraConfig
    every: tuple[TargetGroup, ...]
    whole: tuple[str, ...] = ()
    renewed: Renewal[PyTree] = unchanged

    def base_dtype(self, precision: Precision) -> np.dtype:
        """In what the frozen model is held, but for integers of it."""
        named = self.config.base_dtype
        return np.dtype(precision.compute if named in (None, "int8") else jnp.dtype(named))

    def placed(self, mappings: Mappings, mesh: MeshSpec) -> Mappings:
        """The mappings that place the factors as they are asked to be; those of a model's own arrays are the same."""
        mappings = self._as_copied(mappings)
        if self.config.placement == "as_base":
            return mappings
        # What is whole on every device on purpose is no fault.
        meant = DeclaredReplication(has=RANK, lacks="", mesh_axes=mesh.names, reason="adapter.placement: whole")
        nowhere = AxisMapping(dict.fromkeys(sorted({name for group in self.targets for name in group.axis_names})))
        overrides = (*mappings.overrides, (PAIRS, nowhere))
        return replace(mappings, overrides=overrides, declared=(*mappings.declared, meant))

    def _as_copied(self, mappings: Mappings) -> Mappings:
        """The mappings with which a copy lies where its parameter does, whatever path that is mapped by."""
        copied = tuple(
            (copy_path(pattern), mapping)
            for pattern, mapping in mappings.overrides
            if any(path_matches(pattern, path) and not path_matches(pattern, copy_path(path)) for path in self.whole)
        )
        return replace(mappings, overrides=(*mappings.overrides, *copied)) if copied else mappings

    def copied(self, base: PyTree) -> PyTree:
        """What is copied of the model; None for nothing."""
        return select_leaves(base, self.whole)

    def abstract_state(
        self, optimizer: optax.GradientTransformation, averaging: ModelAveragingConfig | None, *, base: PyTree = None
    ) -> TrainState:
        """The state without memory.

        Args:
            optimizer: whose statistics it has.
            averaging: of the parameters; None for none.
            base: the model, abstract; needed where something is copied.
        """
        part = self.copied(base)
        return abstract(lambda key, part: self._first(key, part, optimizer, averaging), _KEY, part)

    def init_program(
        self,
        plan: StatePlan,
        optimizer: optax.GradientTransformation,
        averaging: ModelAveragingConfig | None,
        *,
        base: PyTree = None,
    ) -> Program:
        """The Program that makes the first state from a key, and from what is copied of the model; see `copied`."""
        part = self.copied(base)
        copied_input = () if part is None else (Input(name=COPIED, value=part, placement=plan.parameters),)
        return Program(
            name=INIT,
            function=lambda key, part=None: self._first(key, part, optimizer, averaging),
            inputs=(Input(name="key", value=_KEY, placement=Mappings()), *copied_input),
            mappings=Mappings(compute=plan.parameters.mappings.params),
            out_placement=plan.whole,
        )

    def begin_program(
        self,
        state: TrainState,
        plan: StatePlan,
        optimizer: optax.GradientTransformation,
        averaging: ModelAveragingConfig | None,
    ) -> Program:
        """The Program that makes the first state of adapters that were read.

        Args:
            state: abstract.
            plan: where it lies.
            optimizer: whose statistics it has.
            averaging: of the parameters; None for none.
        """

        def begin(key: jax.Array, adapters: Adapters) -> TrainState:
            _, for_steps = jax.random.split(key)
            return start(adapters, optimizer, for_steps, averaging)  # pyright: ignore[reportArgumentType]

        return Program(
            name=INIT,
            function=begin,
            inputs=(
                Input(name="key", value=_KEY, placement=Mappings()),
                Input(name=MODEL, value=state.model, placement=plan.parameters),
            ),
            mappings=Mappings(compute=plan.parameters.mappings.params),
            out_placement=plan.whole,
            donate=(MODEL,),
        )

    def _first(
        self,
        key: jax.Array,
        part: PyTree,
        optimizer: optax.GradientTransformation,
        averaging: ModelAveragingConfig | None,
    ) -> TrainState:
        for_factors, for_steps = jax.random.split(key)
        # The first half is what a model is made from, and may have been.
        copies = None if part is None else self.renewed(part, jax.random.fold_in(for_factors, 2))
        adapters = Adapters.init(self.targets, self.config, key=jax.random.fold_in(for_factors, 1), whole=copies)
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
