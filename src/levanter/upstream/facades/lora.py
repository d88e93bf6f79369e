"""Upstream's low-rank adapters in a script (`loraize`), and hooks that save a model while a script trains.

    model = hax.named_jit(lambda m: loraize(m, OldLoraConfig(r=8), key=key))(model)
    state = trainer.initial_state(key, model=model, is_trainable=lora_trainable_params_filter(model))
    trainer.add_hook(save_peft_checkpoint_callback(folder, OldLoraConfig(r=8), base), every=1000)

A model with adapters is a `LoraModel`: a model of ours and the factors of `levanter.models.adapters` beside it, so that
one A serves all matrices that a checkpoint stores as one. At first the model computes what its base does.
`adapter: {type: lora}` of `train_lm` has more: dropout, int8 bases, modules that are trained in full.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray

from haliax_ext.abstract import leaves, map_arrays
from haliax_ext.pytree import KeyPath, PyTree, path_string
from levanter.compat.hf.converter import HFCheckpointConverter
from levanter.compat.hf.export import tokenizer_documents
from levanter.compat.hf.peft import plan_peft, write_peft
from levanter.compat.hf.tokenizer import FastTokenizer, from_transformers
from levanter.io.paths import join
from levanter.layers.linear import Linear
from levanter.layers.low_rank import RANK
from levanter.models.adapters import Adapters, TargetGroup, find_targets, target_groups
from levanter.models.adapters import LoraConfig as AdapterSettings
from levanter.models.base import LmHeadModel, ModelOutputs
from levanter.models.registry import LmConfig

if TYPE_CHECKING:
    from levanter.upstream.facades.trainer_state import StepInfo

UNSUPPORTED = "`adapter: {type: lora}` of train_lm has it"


@dataclasses.dataclass(frozen=True)
class OldLoraConfig:
    """Upstream's settings of adapters.

    Attributes:
        target_modules: the projections that are adapted: names as in `levanter.models.adapters.LoraConfig`, or a
            regular expression; None for all but the head.
        r: the rank of the factors.
        alpha: their product is multiplied by `alpha / r`.
        dropout: refused unless 0.
    """

    target_modules: list[str] | str | None = None
    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0

    def settings(self) -> AdapterSettings:
        """The settings as `adapter:` has them.

        Raises:
            ValueError: dropout is requested, or a number is out of range.
        """
        if self.dropout:
            raise ValueError(f"OldLoraConfig: dropout {self.dropout:g} is not applied in a script; {UNSUPPORTED}")
        modules = list(self.target_modules) if isinstance(self.target_modules, tuple) else self.target_modules
        return AdapterSettings(target_modules=modules, r=self.r, alpha=self.alpha)


class LoraModel(LmHeadModel):
    """A model with adapters.

    Attributes:
        base: the model.
        adapters: the factors.
        targets: the projections that they adapt.
    """

    base: LmHeadModel
    adapters: Adapters
    targets: tuple[TargetGroup, ...] = eqx.field(static=True)

    @property
    def config(self) -> PyTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The base's configuration."""
        return self.base.config

    @property
    def bound(self) -> LmHeadModel:
        """The base with the factors in its projections; computes nothing."""
        return self.adapters.bound_to(self.base)

    def __call__(self, input_ids: NamedArray, **keys: PyTree) -> ModelOutputs:
        return self.bound(input_ids, **keys)

    @property
    def head(self) -> Linear:
        return self.bound.head


def loraize(model: LmHeadModel, config: OldLoraConfig, key: jax.Array) -> LoraModel:
    """A model with fresh adapters.

    Args:
        model: one of ours.
        config: the settings.
        key: of the random factors.

    Raises:
        ValueError: the model is another kind of module, or has adapters already; a target does not exist.
    """
    if isinstance(model, LoraModel) or not isinstance(model, LmHeadModel):
        has = "has adapters already" if isinstance(model, LoraModel) else "is no language model of ours"
        raise ValueError(f"loraize: {type(model).__name__} {has}; levanter.models.adapters.Adapters adapts a Linear")
    settings = config.settings()
    targets = find_targets(_groups(model), settings)
    adapters = Adapters.init(targets, settings, key=key)
    # `config` is a property here, and a field to type checkers.
    return LoraModel(base=model, adapters=adapters, targets=targets)  # pyright: ignore[reportCallIssue]


def _groups(model: LmHeadModel) -> tuple[TargetGroup, ...]:
    assert isinstance(model.config, LmConfig), f"{type(model.config).__name__} belongs to no family"
    return target_groups(model, model.config.weight_rules(model.Vocab))


def _with_adapters(model: PyTree) -> LoraModel:
    if not isinstance(model, LoraModel):
        raise ValueError(f"expected a model with adapters, which `loraize` makes; got {type(model).__name__}")
    return model


def lora_trainable_params_filter(model: PyTree) -> PyTree:
    """The tree for `is_trainable`: true at the factors, false everywhere else."""
    model = _with_adapters(model)
    everything = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: m.adapters, everything, jax.tree.map(lambda _: True, model.adapters))


def is_lora_param(node: object) -> bool:
    """Whether a node of a model's tree is its factors."""
    return isinstance(node, Adapters)


def filter_lora_params(model: PyTree) -> PyTree:
    """The model with None in place of everything but the factors."""
    return eqx.filter(model, lora_trainable_params_filter(model))


def partition_lora_params(model: PyTree) -> tuple[PyTree, PyTree]:
    """(the model without its factors, the factors alone), each with None in place of the other's arrays."""
    trained, base = eqx.partition(model, lora_trainable_params_filter(model))
    return base, trained


def combine_lora_params(base: PyTree, lora_params: PyTree) -> PyTree:
    """The inverse of `partition_lora_params`."""
    return eqx.combine(base, lora_params)


def merge_lora_modules(model: PyTree) -> LmHeadModel:
    """The base with the factors' products added to its matrices, in their dtype."""
    model = _with_adapters(model)
    pairs = {path: (pair, name) for pair in model.adapters.pairs.values() for name, path in pair.paths}

    def merged(adapters: Adapters, base: LmHeadModel) -> LmHeadModel:
        del adapters

        def visit(keys: KeyPath, x: PyTree) -> PyTree:
            if not isinstance(x, Linear) or path_string(keys) not in pairs:
                return x
            pair, name = pairs[path_string(keys)]
            product = hax.dot(pair.b[name].weight, pair.a.weight, axis=RANK) * pair.scale
            assert isinstance(x.weight, NamedArray), "a merged matrix is dense"
            weight = x.weight + product.astype(x.weight.dtype).rearrange(x.weight.axes)
            return dataclasses.replace(x, weight=weight)

        return jax.tree_util.tree_map_with_path(visit, base, is_leaf=lambda x: isinstance(x, Linear))

    return merged(model.adapters, model.base)


# --- saving ---


def lora_state_dict(model: PyTree, prefix: str | None = None) -> dict[str, Any]:
    """The factors by peft's names; `prefix` is accepted for compatibility."""
    del prefix
    # Imported late: it is the only use of the gather.
    from haliax_ext.saving import gather_tensors

    model = _with_adapters(model)
    plan, arrays = _peft(model, base=None)
    return {tensor.name: values for tensor, values in gather_tensors(plan.tensors, arrays)}


def _peft(model: LoraModel, *, base: str | None) -> tuple[Any, dict[str, Any]]:
    arrays: dict[str, Any] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, model.adapters)
    plan = plan_peft(
        model.targets,
        _groups(model.base),
        model.config.weight_rules(model.Vocab),
        leaves(model.adapters),
        use_rslora=False,
        base=base,
    )
    return plan, arrays


def save_peft_pretrained(
    lora_model: PyTree,
    config: OldLoraConfig,
    base_model_name_or_path: str | None,
    path: str,
    tokenizer: PyTree = None,
    *,
    prefix: str | None = None,
    upload_to: object = None,
) -> None:
    """Writes the factors as a folder that peft reads.

    Args:
        lora_model: a model with adapters.
        config: accepted for compatibility; the model knows its targets.
        base_model_name_or_path: the base, which peft loads.
        path: the folder, which must not exist.
        tokenizer: is written beside; one of transformers or ours.
        prefix: accepted for compatibility; names follow the family's checkpoint.
        upload_to: refused.
    """
    del config, prefix
    refuse_upload(upload_to, "save_peft_pretrained")
    base = None if base_model_name_or_path is None else str(base_model_name_or_path)
    plan, arrays = _peft(_with_adapters(lora_model), base=base)
    ours = tokenizer if tokenizer is None or isinstance(tokenizer, FastTokenizer) else from_transformers(tokenizer)
    write_peft(plan, arrays, path, extra_files={} if ours is None else tokenizer_documents(ours))


def save_merged_hf_model(
    lora_model: PyTree, converter: HFCheckpointConverter, path: str, upload_to_hf: object = None, **keys: PyTree
) -> None:
    """Writes the merged model as a folder that `transformers` reads."""
    refuse_upload(upload_to_hf, "save_merged_hf_model")
    converter.save_pretrained(hax.named_jit(merge_lora_modules)(lora_model), path, **keys)


def save_peft_checkpoint_callback(
    base_path: str,
    config: OldLoraConfig,
    base_model_name_or_path: str | None,
    tokenizer: PyTree = None,
    upload_to_hf: object = False,
    **_: PyTree,
) -> "Callable[[StepInfo], None]":
    """A hook that writes the factors to `base_path/step-N`, by `save_peft_pretrained`."""
    refuse_upload(upload_to_hf, "save_peft_checkpoint_callback")

    def save(info: "StepInfo", folder: str) -> None:
        save_peft_pretrained(info.eval_model, config, base_model_name_or_path, folder, tokenizer)

    return at_steps(lambda step: join(base_path, f"step-{step}"), save)


def save_merged_hf_checkpoint_callback(
    base_path: str, converter: HFCheckpointConverter, upload_to_hf: object = None, **keys: PyTree
) -> "Callable[[StepInfo], None]":
    """A hook that writes the merged model to `base_path/step-N`."""
    refuse_upload(upload_to_hf, "save_merged_hf_checkpoint_callback")

    def save(info: "StepInfo", folder: str) -> None:
        save_merged_hf_model(info.eval_model, converter, folder, **keys)

    return at_steps(lambda step: join(base_path, f"step-{step}"), save)


def to_hf_config(config: OldLoraConfig, base_model_name_or_path: str | None = None, **more: PyTree) -> dict[str, Any]:
    """The content of peft's `adapter_config.json`, without names that depend on the model."""
    modules: Sequence[str] | str | None = config.target_modules
    return {
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "peft_type": "LORA",
        "r": config.r,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        **more,
    }


# --- hooks that save ---


def refuse_upload(upload: object, where: str) -> None:
    """Refuses uploads, which nothing here does.

    Raises:
        ValueError: one is requested.
    """
    if upload:
        raise ValueError(f"{where}: exports are written, not uploaded ({upload!r}); run `hf upload` on the folder")


def at_steps(folder: Callable[[int], str], save: "Callable[[StepInfo, str], None]") -> "Callable[[StepInfo], None]":
    """A hook that saves a step once: the last one is both due and forced."""
    done: set[int] = set()

    def hook(info: "StepInfo") -> None:
        # Step 0 is the first step; upstream's hooks save none there.
        if info.step > 0 and info.step not in done:
            done.add(info.step)
            save(info, folder(info.step))

    return hook


def save_hf_checkpoint_callback(
    base_path: str, converter: HFCheckpointConverter, upload_to_hf: object = False, **keys: PyTree
) -> "Callable[[StepInfo], None]":
    """A hook that writes the model to `base_path/step-N`, by `converter.save_pretrained`.

    Args:
        base_path: the folder of the folders.
        converter: knows the family and the tokenizer.
        upload_to_hf: refused.
        keys: of `save_pretrained`.
    """
    refuse_upload(upload_to_hf, "save_hf_checkpoint_callback")

    def save(info: "StepInfo", folder: str) -> None:
        converter.save_pretrained(info.eval_model, folder, **keys)

    return at_steps(lambda step: join(base_path, f"step-{step}"), save)
