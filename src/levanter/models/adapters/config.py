"""The config block `adapter:`."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import draccus

from levanter.config.validators import Fraction, PathText, PositiveInt, Ranged, Scale

IN, OUT = "in", "out"
"""The sides of a projection, for targets that are selected by axes."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Ranged, draccus.ChoiceRegistry):
    """The adapters to train instead of the model's own weights (`adapter: {type: …}`; the default is `none`)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of an adapter block without `type`: none."""
        return "none"


def _axes_problems(key: str, sides: object) -> list[str]:
    """The problems of targets that are selected by axes."""
    if not isinstance(sides, dict):
        return []
    if not sides or sides.keys() - {IN, OUT}:
        return [f"{key}: {sides}: projections are named by `{IN}`, `{OUT}` or both, each an axis or a list of axes"]
    axes_by_side = {side: [axes] if isinstance(axes, str) else axes for side, axes in sides.items()}
    return [
        f"{key}.{side}: must be an axis or a list of axes, got {axes!r}"
        for side, axes in axes_by_side.items()
        if not isinstance(axes, list) or not axes or not all(isinstance(axis, str) for axis in axes)
    ]


@AdapterConfig.register_subclass("none")
@dataclass(frozen=True, kw_only=True)
class NoAdapterConfig(AdapterConfig):
    """No adapters: the model's own weights are trained."""


@AdapterConfig.register_subclass("lora")
@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): `y = W x + s · B (A x)`, of which A and B are trained.

    Attributes:
        target_modules: the projections that are adapted. A list names each by our path (`**.self_attn.q_proj`), by its
            last name (`q_proj`), or by the checkpoint's name (`c_attn`); a string is a regular expression that must
            match a whole path or name; `{in: embed}`, `{out: [mlp]}`, or both, select projections whose input or output
            axes include all of these; null for every projection except the output head and the routers of experts.
        exclude_modules: the projections that are not adapted, named in the same ways; null for the output head.
        modules_to_save: modules that are trained in full as float32 copies, by name: norms, the embedding table, the
            output head. With tied weights, the table's copy is also the head's.
        r: the rank of the factors.
        alpha: the scale: the product of the factors is multiplied by `alpha / r`.
        dropout: dropout rate on the input of A. Not applied to experts.
        use_rslora: whether the scale is `alpha / √r` instead (rsLoRA, arXiv:2312.03732).
        rank_pattern: ranks of individual targets, by name as in `target_modules`.
        alpha_pattern: values of `alpha` of individual targets, by name as in `target_modules`.
        zero_init_b: whether B is initialized to 0.
        a_init_mode: initialization of A: `zero`; `random`, a normal of standard deviation 1/√in truncated at two
            standard deviations; `peft`, uniform in ±1/√in. Exactly one of the two factors must be initialized to 0.
        placement: sharding of the factors: `as_base`, over every mesh axis that shards the adapted matrix; or `whole`,
            replicated on every device.
        initialize_from: adapters to initialize from, in the format of peft or `peft_save_path`: a folder, a hub id or a
            URL. Their targets and ranks must equal those of this configuration. Null to initialize by `a_init_mode` and
            `zero_init_b`.
        base_dtype: dtype of the frozen base model; null for the compute dtype. With `int8`, its projections are 8-bit
            integers with a scale per output channel, and all other weights have the compute dtype.
    """

    target_modules: list[str] | str | dict[str, Any] | None = None
    exclude_modules: list[str] | str | dict[str, Any] | None = None
    modules_to_save: list[str] | None = None
    r: PositiveInt = 8
    alpha: Scale = 8.0
    dropout: Fraction = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = field(default_factory=dict)
    alpha_pattern: dict[str, Scale] = field(default_factory=dict)
    zero_init_b: bool = False
    a_init_mode: Literal["zero", "random", "peft"] = "zero"
    placement: Literal["as_base", "whole"] = "as_base"
    initialize_from: PathText | None = None
    base_dtype: Literal["float32", "bfloat16", "float16", "int8"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            problem
            for key in ("target_modules", "exclude_modules")
            for problem in _axes_problems(f"{key}", getattr(self, key))
        ]
        # The type allows 1, which would drop every input.
        if self.dropout == 1:
            problems.append("dropout: 1 leaves nothing of what A is multiplied by; use less")
        # Exactly one factor must begin as 0: then the product is 0, and the other factor lets gradients through.
        if self.zero_init_b == (self.a_init_mode == "zero"):
            both = "both factors would begin as 0, and neither would ever get a gradient"
            neither = "neither factor would begin as 0, so the run would not begin with the model that it adapts"
            problems.append(
                f"zero_init_b: {str(self.zero_init_b).lower()} with a_init_mode: {self.a_init_mode}: "
                f"{both if self.zero_init_b else neither}; "
                "use zero_init_b: true with a_init_mode: random or peft, or zero_init_b: false with a_init_mode: zero"
            )
        if problems:
            raise ValueError("\n".join(problems))

    def scale(self, rank: int, alpha: float) -> float:
        """The factor of the product of A and B."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank
