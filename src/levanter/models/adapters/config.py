"""What a user asks for with `adapter:`."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import draccus

from levanter.config.validators import Fraction, PathText, PositiveFloat, PositiveInt, Ranged

IN, OUT = "in", "out"
"""The sides of a projection, where targets are named by axes."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Ranged, draccus.ChoiceRegistry):
    """What is trained in the place of the model's own weights (`adapter: {type: …}`; `none` where no type is given)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """What an adapter without `type` is: none."""
        return "none"


def _axes_problems(key: str, asked: object) -> list[str]:
    """What is wrong with targets by their axes."""
    if not isinstance(asked, dict):
        return []
    if not asked or asked.keys() - {IN, OUT}:
        return [f"{key}: {asked}: projections are named by `{IN}`, `{OUT}` or both, each an axis or a list of axes"]
    named = {side: [axes] if isinstance(axes, str) else axes for side, axes in asked.items()}
    return [
        f"{key}.{side}: must be an axis or a list of axes, got {axes!r}"
        for side, axes in named.items()
        if not isinstance(axes, list) or not axes or not all(isinstance(axis, str) for axis in axes)
    ]


@AdapterConfig.register_subclass("none")
@dataclass(frozen=True, kw_only=True)
class NoAdapterConfig(AdapterConfig):
    """None: the model's own weights are trained."""


@AdapterConfig.register_subclass("lora")
@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): `y = W x + s · B (A x)`, of which A and B are trained.

    Attributes:
        target_modules: which projections get one. A list names each by our path (`**.self_attn.q_proj`), by its last
            name (`q_proj`), or by the checkpoint's name (`c_attn`); a text is a regular expression that a whole path
            or name matches; `{in: embed}`, `{out: [mlp]}`, or both, means those whose inputs, or results, have all of
            these axes; null for every projection but the output head and routers of experts.
        exclude_modules: which get none, named likewise; null for the output head.
        modules_to_save: norms, the embedding table, the output head, by their names: float32 copies of these are
            trained as they are beside the adapters. With tied weights, the table's copy is the head's too.
        r: the rank.
        alpha: the product is multiplied by `alpha / r`.
        dropout: of what A is multiplied by, the share that a step leaves out. Experts read everything.
        use_rslora: whether the product is multiplied by `alpha / √r` instead (arXiv:2312.03732).
        rank_pattern: other ranks of some targets, by name as in `target_modules`.
        alpha_pattern: likewise other values of `alpha`.
        zero_init_b: whether B begins as 0.
        a_init_mode: how A begins: as `zero`; `random`, a normal of standard deviation 1/√in, cut off at two of them;
            `peft`, uniform between ±1/√in. One of the two factors must begin as 0, and not both.
        placement: where the factors lie: `as_base`, cut wherever a mapping cuts the matrix that they are of; or
            `whole`, on every device.
        initialize_from: adapters to begin with, as peft or `peft_save_path` wrote them: a folder, a hub id or a URL.
            They must have the targets and ranks that are asked for. Null to begin as `a_init_mode` and `zero_init_b`
            say.
        base_dtype: in what the frozen model is held; null for the compute dtype. With `int8`, its projections are 8-bit
            integers with a scale per output channel, and all else is in the compute dtype.
    """

    target_modules: list[str] | str | dict[str, Any] | None = None
    exclude_modules: list[str] | str | dict[str, Any] | None = None
    modules_to_save: list[str] | None = None
    r: PositiveInt = 8
    alpha: PositiveFloat = 8.0
    dropout: Fraction = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = field(default_factory=dict)
    alpha_pattern: dict[str, PositiveFloat] = field(default_factory=dict)
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
        if self.dropout == 1:
            problems.append("dropout: 1 leaves nothing of what A is multiplied by; use less")
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
        """What the product of two factors is multiplied by."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank
