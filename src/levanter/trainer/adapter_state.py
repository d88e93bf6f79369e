"""The state of a run that trains adapters of a frozen model; it is initialized from a key alone."""

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
from levanter.models.adapters.lora import PAIRS, Adapters
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.whole import copy_path, select_leaves
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision, cast_floating
from levanter.trainer.config_blocks import ModelAveragingConfig
from levanter.trainer.reinit_rows import Renewal, unchanged
from levanter.trainer.state import StatePlan, start
from levanter.trainer.train_state import MODEL, TrainState

INIT = "init_adapters"
COPIED = "copied"
"""Name of the Program's input with the copied parameters of the model."""
INIT_BASE = "init_frozen"
_KEY = jax.ShapeDtypeStruct((2,), np.dtype(np.uint32))


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The adapters that are trained.

    Attributes:
        targets: the projections that have one.
        config: their configuration.
        every: all projections of the model.
        whole: the paths of the model's parameters of which full copies are trained as well.
        renewed: applied to these copies before the first step.
    """

    targets: tuple[TargetGroup, ...]
    config: LoraConfig
    every: tuple[TargetGroup, ...]
    whole: tuple[str, ...] = ()
    renewed: Renewal[PyTree] = unchanged

    def base_dtype(self, precision: Precision) -> np.dtype:
        """The dtype of the frozen model's floating-point arrays."""
        # The base is never updated, so by default it needs no more precision than the computation.
        named = self.config.base_dtype
        return np.dtype(precision.compute if named in (None, "int8") else jnp.dtype(named))

    def placed(self, mappings: Mappings, mesh: MeshSpec) -> Mappings:
        """The mappings, with overrides for the adapters' factors; the model's own arrays keep theirs."""
        mappings = self._as_copied(mappings)
        if self.config.placement == "as_base":
            return mappings
        # Declared, so that the plan does not report this replication as a finding.
        meant = DeclaredReplication(has=RANK, lacks="", mesh_axes=mesh.names, reason="adapter.placement: whole")
        # An override that maps every axis of the targets to no mesh axis; sorted, so that all processes build equal
        # mappings.
        nowhere = AxisMapping(dict.fromkeys(sorted({name for group in self.targets for name in group.axis_names})))
        overrides = (*mappings.overrides, (PAIRS, nowhere))
        return replace(mappings, overrides=overrides, declared=(*mappings.declared, meant))

    def _as_copied(self, mappings: Mappings) -> Mappings:
        """The mappings, with overrides that give copies the shards of their parameters."""
        # A pattern with `**` matches a copy's path too; only patterns that miss it need a second override.
        copied = tuple(
            (copy_path(pattern), mapping)
            for pattern, mapping in mappings.overrides
            if any(path_matches(pattern, path) and not path_matches(pattern, copy_path(path)) for path in self.whole)
        )
        return replace(mappings, overrides=(*mappings.overrides, *copied)) if copied else mappings

    def copied(self, base: PyTree) -> PyTree:
        """The copied part of the model; None for none."""
        return select_leaves(base, self.whole)

    def abstract_state(
        self, optimizer: optax.GradientTransformation, averaging: ModelAveragingConfig | None, *, base: PyTree = None
    ) -> TrainState:
        """The state without memory.

        Args:
            optimizer: its statistics are part of the state.
            averaging: of the parameters; None for none.
            base: the model, abstract; required if parameters are copied.
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
        """The Program that initializes the first state from a key and the copied part of the model; see `copied`."""
        part = self.copied(base)
        # Without copies the Program has a single input, and its signature stays that of adapters alone.
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
        """The Program that makes the first state from loaded adapters.

        Args:
            state: abstract.
            plan: its placement.
            optimizer: its statistics are part of the state.
            averaging: of the parameters; None for none.
        """

        def begin(key: jax.Array, adapters: Adapters) -> TrainState:
            # The same half of the key as in `_first`: steps do not depend on where the adapters came from.
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
        # `init_base_program` initializes the model from `for_factors` itself, so factors and copies use keys derived
        # from it by other numbers.
        copies = None if part is None else self.renewed(part, jax.random.fold_in(for_factors, 2))
        adapters = Adapters.init(self.targets, self.config, key=jax.random.fold_in(for_factors, 1), whole=copies)
        return start(adapters, optimizer, for_steps, averaging)  # pyright: ignore[reportArgumentType]


def init_base_program(plan: StatePlan, build: Callable[[jax.Array], LmHeadModel], dtype: np.dtype) -> Program:
    """The Program that initializes the base model from a key, in its storage dtype, if none is loaded."""

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
