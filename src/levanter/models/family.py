"""`Family`: everything that defines a model family, as one value.

This project's `levanter.models.<name>.family` and the entry points `levanter.families` of installed packages each
hold one;
`models.registry` finds them by name.
"""

import dataclasses
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import jax
from haliax import Axis

from haliax_ext.rules import WeightRules
from levanter.models.architecture import Architecture
from levanter.models.base import LmHeadModel
from levanter.models.config_json import ConfigJson
from levanter.models.flops import FlopsFn, flops_per_token

C = TypeVar("C", bound=Architecture)
D = TypeVar("D", bound=Architecture, contravariant=True)

# Keys that a user may set to any value beside a checkpoint; all others must agree with it.
RUNNING = frozenset(
    """
    max_seq_len tokenizer reference_checkpoint cross_entropy_block_size initializer_range attn_backend
    use_flash_attention flash_attention_block_size upcast_attn scan_layers gradient_checkpointing
    """.split()  # noqa: SIM905
)
"""Config fields that determine how a model is run or initialized, not what it computes."""


class BuildFn(Protocol[D]):
    """A function that builds a model from a config."""

    def __call__(self, Vocab: Axis, config: D, *, key: jax.Array) -> LmHeadModel:
        """A freshly initialized model; called inside `jit` or `eval_shape`."""
        ...


class WeightRulesFn(Protocol[D]):
    """A function that maps a model's leaves to Hugging Face tensors."""

    def __call__(self, config: D, Vocab: Axis | None = None, /) -> WeightRules:
        """The rules of a model with this config.

        Args:
            config: the architecture.
            Vocab: the model's vocabulary axis; if it is longer than `vocab_size`, a checkpoint may lack the added
                rows.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Family(Generic[C]):
    """A model family: config class, builder, weight rules, config.json formats and operation counts.

    Attributes:
        name: the name in `model: {type: …}`, and of its entry point.
        config_class: its config, an `LmConfig`, registered under the same name.
        build: builds a model from a config.
        weight_rules: the source of each leaf in a Hugging Face checkpoint.
        config_json: the kinds of config.json that describe a member; the first is what an export writes. Empty for a
            family that has no Hugging Face form.
        flops: counts operations; by default from the config's numbers of weights and attention features.
    """

    name: str
    config_class: type[C]
    build: BuildFn[C]
    weight_rules: WeightRulesFn[C]
    config_json: tuple[ConfigJson[C], ...] = ()
    flops: FlopsFn[C] = flops_per_token

    @property
    def architecture_fields(self) -> tuple[str, ...]:
        """Fields of the config that change what the model computes, or its weights."""
        names = [field.name for field in dataclasses.fields(self.config_class)]
        return tuple(name for name in names if name not in RUNNING)
