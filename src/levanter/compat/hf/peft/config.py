"""Reads and writes `adapter_config.json`; refuses options that are not implemented."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from levanter.compat.hf.errors import CheckpointError, CorruptFileError, raise_if
from levanter.compat.hf.export_dir import ADAPTER_CONFIG

T = TypeVar("T")

CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
MERGE_FIRST = (
    "merge it into its base with peft (PeftModel.from_pretrained(base, …).merge_and_unload().save_pretrained(…)), and "
    "give the merged folder"
)
"""What to do with an adapter that is not read."""

_ALTERS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that also change the base's weights, so that the adapter fits no published checkpoint."""
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "megatron_config",
    "arrow_config",
)
"""Keys that are refused if they are set."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """A low-rank adapter, as `adapter_config.json` describes it.

    Attributes:
        r: the rank of modules without one of their own.
        alpha: the scale: the product of the factors is multiplied by `alpha / r`.
        use_rslora: by `alpha / √r` instead.
        rank_pattern: ranks by module; keys are regular expressions of the end of its name.
        alpha_pattern: likewise values of `alpha`.
        targets: the modules, or a regular expression.
        parameters: targets that are parameters and no modules, as experts are.
        base: the base model's name; None if the file does not have it.
        saved: modules that are trained in full; each name means all modules whose names end with it.
        tied: whether such a copy of a table is the output head's too (`ensure_weight_tying`).
        layers: numbers of the layers that have adapters; None for all.
        excluded: modules without one though `targets` names them, or a regular expression.
    """

    r: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] | str = ()
    parameters: tuple[str, ...] = ()
    base: str | None = None
    saved: tuple[str, ...] = ()
    tied: bool = False
    layers: tuple[int, ...] | None = None
    excluded: tuple[str, ...] | str = ()

    def is_target(self, module: str) -> bool:
        """Whether a module has an adapter according to the configuration."""
        if _is_named(self.excluded, module) or not _is_named(self.targets, module):
            return False
        # As peft finds it: the last number in the name, of a part behind at least two others.
        number = re.match(r".*\.[^.]*\.(\d+)\.", module)
        return self.layers is None or (number is not None and int(number[1]) in self.layers)

    def module_rank(self, module: str) -> int:
        """The rank of a module."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def module_alpha(self, module: str) -> float:
        """The `alpha` of a module."""
        return _by_pattern(self.alpha_pattern, module, self.alpha)

    def scale(self, rank: int, alpha: float) -> float:
        """The factor of the product of A and B."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _is_named(names: tuple[str, ...] | str, module: str) -> bool:
    """Whether a module is one of these: by its whole name or the end of it, or by a regular expression."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        # peft matches a pattern against the end of the name, at a dot; the first match in file order wins.
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(document: Mapping[str, Any], *, where: str) -> PeftConfig:
    """Reads an `adapter_config.json`.

    Args:
        document: its content.
        where: its name in messages.

    Raises:
        CheckpointError: it sets an option that is not implemented; lists all.
        CorruptFileError: a value is missing or of the wrong kind; lists all.
    """
    kind = document.get("peft_type")
    if kind != "LORA":
        problem = f"peft_type is {kind!r}; only adapters of type LORA are read"
        raise CheckpointError(where, problem, suggestion=MERGE_FIRST)
    refused = [
        f"{key}: {document[key]!r} is not implemented; only plain low-rank adapters are read"
        for key in _UNSUPPORTED
        if document.get(key)
    ]
    if (bias := document.get("bias", "none")) != "none":
        refused.append(f"bias: {bias!r} is not implemented; biases that were trained cannot be read")
    # These methods subtract the initial product from the base weights, so A and B fit only the altered base.
    initialization = document.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization.lower().startswith(_ALTERS_BASE):
        refused.append(
            f"init_lora_weights: {initialization!r} also changed the base weights, so the adapter matches no "
            "checkpoint; convert it with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    # Options first: values of an unsupported adapter need not follow the rules below.
    raise_if(CheckpointError, where, refused, suggestion=MERGE_FIRST)
    problems: list[str] = []
    fields = _FieldReader(document, problems)
    config = PeftConfig(
        # The defaults are peft's own for missing keys.
        r=fields.read("r", 8, _is_rank, "a positive integer"),
        alpha=fields.read("lora_alpha", 8, _is_alpha, "above 0 and at most 1e6"),
        use_rslora=fields.read("use_rslora", False, lambda x: isinstance(x, bool), "true or false"),
        rank_pattern=fields.read_patterns("rank_pattern", _is_rank, "positive integers"),
        alpha_pattern=fields.read_patterns("alpha_pattern", _is_alpha, "numbers above 0 and at most 1e6"),
        targets=_targets("target_modules", document.get("target_modules"), problems),
        base=document.get("base_model_name_or_path") or None,
        saved=_names("modules_to_save", document.get("modules_to_save"), problems),
        tied=bool(document.get("ensure_weight_tying")),
        layers=_layers(document.get("layers_to_transform"), problems),
        excluded=_targets("exclude_modules", document.get("exclude_modules"), problems),
    )
    raise_if(CorruptFileError, where, problems)
    return config


@dataclass(frozen=True)
class _FieldReader:
    """Reads values of a document and collects their problems."""

    document: Mapping[str, Any]
    problems: list[str]

    def read(self, key: str, default: T, is_valid: Callable[[object], bool], expected: str) -> T:
        value = self.document.get(key, default)
        if is_valid(value):
            return value
        self.problems.append(f"{key} must be {expected}, got {value!r}")
        return default

    def read_patterns(self, key: str, is_valid: Callable[[object], bool], expected: str) -> dict[str, Any]:
        patterns = self.document.get(key) or {}
        if not isinstance(patterns, Mapping) or not all(is_valid(value) for value in patterns.values()):
            self.problems.append(f"{key} must map names of modules to {expected}, got {patterns!r}")
            return {}
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                self.problems.append(f"{key}: {pattern!r} is not a regular expression: {error}")
                return {}
        return dict(patterns)


LARGEST_ALPHA = 1e6
"""The range of `adapter.alpha`, which a run that goes on training such an adapter has."""


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # NaN fails both comparisons. A negative one would subtract what was trained.
    return 0 < value <= LARGEST_ALPHA


def _targets(key: str, value: object, problems: list[str]) -> tuple[str, ...] | str:
    if not isinstance(value, str):
        return _names(key, value, problems, "a list of names or a text")
    try:
        re.compile(value)
    except re.error as error:
        problems.append(f"{key}: {value!r} is not a regular expression: {error}")
    return value


def _layers(value: object, problems: list[str]) -> tuple[int, ...] | None:
    numbers = [value] if isinstance(value, int) else value
    if numbers is None or (
        isinstance(numbers, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    ):
        # An empty list means all layers, as in peft.
        return tuple(numbers) if numbers else None
    problems.append(f"layers_to_transform must be numbers of layers, got {value!r:.80}")
    return None


def _names(key: str, value: object, problems: list[str], expected: str = "a list of names") -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    if value is not None:
        problems.append(f"{key} must be {expected}, got {value!r}")
    return ()


def peft_document(config: PeftConfig, *, transposed: bool) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter.

    Args:
        config: the adapter's configuration.
        transposed: whether the base stores its matrices `[in, out]`.
    """
    # Sorted, so that equal adapters give equal files.
    targets = config.targets if isinstance(config.targets, str) else sorted(config.targets)
    return {
        "alpha_pattern": dict(config.alpha_pattern),
        "base_model_name_or_path": config.base,
        "bias": "none",
        "ensure_weight_tying": config.tied,
        # peft transposes A and B products for Conv1D (GPT-2) bases when this is set.
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.alpha,
        # Dropout matters in training only, and the file is for inference.
        "lora_dropout": 0.0,
        "modules_to_save": list(config.saved) or None,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": dict(config.rank_pattern),
        "target_modules": targets,
        "target_parameters": list(config.parameters) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }
