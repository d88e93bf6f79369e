"""Upstream's optimizers that this project does not have: their `optimizer:` blocks are parsed, then refused by name.

Their keys are checked like those of any other block, so that configs can be parsed and rewritten. Only building the
transformation is refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import optax

from haliax_ext.mapping import Mappings
from levanter.config.schema import Annotation
from levanter.config.validators import AnyFloat, AnyInt
from levanter.optim.config import OptimizerConfig

_ADAM = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
_MUON = {
    **_ADAM,
    "adam_lr": 6e-4,
    "momentum": 0.95,
    "nesterov": True,
    "backend_steps": 5,
    "muon_epsilon": 1e-8,
    "coefficient_type": "quintic",
}
_NAMO = {
    **_MUON,
    "learning_rate": 0.01,
    "mu2": 0.99,
    "adamnorm_eps": 1e-8,
    "scale_coeff": 0.2,
    "adam_weight_decay": None,
    "coefficient_type": "simple",
}
_BLOCKS = {"merge_small_dims": True, "partition_grads_into_blocks": True, "block_size": 256, "mu_dtype": None}

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adopt": {**_ADAM, "epsilon": 1e-6, "schedule_list": None},
    "cautious": {**_ADAM, "beta1": 0.95, "gamma": 0.025, "adamc_weight_decay": False},
    "mars": {**_ADAM, "beta1": 0.95, "beta2": 0.99, "gamma": 0.025},
    "mini": {**_ADAM, "weight_decay": 0.0, "lr": 0.02, "nesterov": False},
    "adamH": {**_ADAM, "nesterov": False, "adam_lr": 6e-4},
    "grug_muon": {**_MUON, "weight_decay": 0.0, "lr": 0.02, "adam_weight_decay": None, "use_kimi_scaling": False},
    "muonH": _MUON,
    "namo": _NAMO,
    "namoD": {**_NAMO, "col_state_clamp_c": 0.75},
    "scion": {
        "weight_decay": 0.0,
        "lr": 0.02,
        "scion_to_signum_lr": 0.25,
        "momentum": 0.95,
        "backend_steps": 10,
        "beta1": 0.9,
        "scion_epsilon": 1e-8,
        "coefficient_type": "quintic",
    },
    "kron": {
        **_BLOCKS,
        "beta1": 0.9,
        "normalize_grads": False,
        "preconditioner_update_probability": 0.05,
        "update_prob_flat_start": 500,
        "max_size_triangular": 25000,
        "min_ndim_triangular": 2,
        "memory_save_mode": None,
        "preconditioner_lr": 0.1,
        "preconditioner_init_scale": 1.0,
        "precond_dtype": None,
        "precond_update_precision": "tensorfloat32",
        "precond_grads_precision": None,
        "lax_map_scanned_layers": False,
        "lax_map_batch_size": 8,
        "target_merged_dim_size": 8192,
        "params_sharding": None,
        "preconditioner_sharding": None,
    },
    "soap": {
        **_ADAM,
        **_BLOCKS,
        "weight_decay": 0.0,
        "beta1": 0.95,
        "shampoo_beta": 0.95,
        "schedule_list": None,
        "precondition_frequency": 10,
        "max_precond_dim": 10000,
        "one_diag": False,
        "target_merged_dim_size": 2048,
        "precond_dtype": None,
    },
}
"""Upstream's optimizers: the keys of each with upstream's defaults (except those that all optimizers have)."""


class AbsentOptimizerError(ValueError):
    """The optimizer is not implemented."""


@dataclass(frozen=True, kw_only=True)
class AbsentOptimizerConfig(OptimizerConfig):
    """The `optimizer:` block of an optimizer that is not implemented. It can be read and written, but not built."""

    def _refuse(self) -> NoReturn:
        optimizer = OptimizerConfig.get_choice_name(type(self))
        choices = OptimizerConfig.get_known_choices()
        # Optimizers of third parties are listed as well.
        here = [name for name, cls in choices.items() if not issubclass(cls, AbsentOptimizerConfig)]
        raise AbsentOptimizerError(
            f"optimizer.type: {optimizer} is an upstream optimizer that this project does not have; it has: "
            f"{', '.join(sorted(here))}"
        )

    def scaling(self) -> optax.GradientTransformation:
        self._refuse()

    def build(
        self, num_train_steps: int, *, platform: str | None = None, mappings: Mappings | None = None
    ) -> optax.GradientTransformation:
        del num_train_steps, platform, mappings
        self._refuse()


def register_absent() -> None:
    """Registers a config class for each of upstream's optimizers that nobody has registered."""
    for name, keys in OPTIMIZERS.items():
        # A third party may have registered an implementation under upstream's name.
        if name not in OptimizerConfig.get_known_choices():
            OptimizerConfig.register_subclass(name, _config_class(name, keys))


def _annotation(default: object) -> Annotation:
    """The type of a key, from its default if that has a type to go by."""
    # `bool` is a subclass of `int`, hence its exclusion.
    if isinstance(default, int | float) and not isinstance(default, bool):
        return AnyInt if isinstance(default, int) else AnyFloat
    return type(default) if isinstance(default, bool | str) else Any


def _config_class(name: str, keys: Mapping[str, Any]) -> type[OptimizerConfig]:
    fields = [(key, _annotation(value), dataclasses.field(default=value)) for key, value in keys.items()]
    # Real dataclasses, not dicts: keys are checked, documented and written back like those of other optimizers.
    config_class = dataclasses.make_dataclass(
        f"Absent{name.title().replace('-', '').replace('_', '')}Config",
        fields,
        bases=(AbsentOptimizerConfig,),
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__},
    )
    config_class.__doc__ = f"The `optimizer:` block of upstream's {name}, which is not implemented."
    return config_class
