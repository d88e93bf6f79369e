"""Upstream's families that this project does not implement yet: reads their `model:` blocks, then refuses them by name.

An upstream config may name any of upstream's families. Its keys are checked like those of every other block (a misspelt
key gets a suggestion, old spellings are translated), so that `migrate` can rewrite it; only building the model is
impossible. Importing this module registers them; `models.registry` imports it to list the names.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from levanter.config.schema import Annotation
from levanter.config.validators import AnyFloat, AnyInt
from levanter.layers.rotary import DefaultRotaryConfig, Llama3RotaryConfig, RotaryConfig
from levanter.models.registry import LmConfig, family_names


@dataclass(frozen=True, kw_only=True)
class AbsentHyenaConfig:
    """The `hyena:` block of `gpt2_hyena`: long convolutions instead of attention."""

    max_seq_len: AnyInt = 1024
    hidden_dim: AnyInt = 768
    num_heads: AnyInt = 1
    order: AnyInt = 2
    filter_order: AnyInt = 16
    short_filter_order: AnyInt = 3
    outer_mixing: bool = False
    activation: str = "gelu_new"
    num_blocks: AnyInt = 1
    num_hidden_layers_filter_mlp: AnyInt = 2
    filter_emb_dim: AnyInt = 3
    filter_dropout: AnyFloat = 0.0
    fast_decay_pct: AnyFloat = 0.3
    slow_decay_pct: AnyFloat = 1.5
    target: AnyFloat = 1e-2
    modulate: bool = True
    shift: AnyFloat = 0.0
    resid_pdrop: AnyFloat = 0.0
    use_bias: bool = True


_RUNNING = {
    "gradient_checkpointing": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "upcast_attn": False,
    "use_flash_attention": None,
    "attn_backend": None,
    "flash_attention_block_size": None,
}
_DECODER = {
    **_RUNNING,
    "hidden_dim": 4096,
    "intermediate_dim": 11008,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "head_dim": None,
    "activation_function": "silu",
    "tie_word_embeddings": False,
    "hybrid_norm": False,
    "use_qk_norm": False,
    "input_embedding_norm": False,
    "scan_layers": True,
    "use_bias": False,
    "use_layer_norm_weight": True,
    "rope": DefaultRotaryConfig(),
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2_hyena": {
        "max_seq_len": 1024,
        "num_layers": 12,
        "mlp_scale": 4,
        "embed_pdrop": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "gradient_checkpointing": True,
        "gradient_checkpointing_block_size": 5,
        "hyena": AbsentHyenaConfig(),
    },
    "whisper": {
        **_RUNNING,
        "max_seq_len": 448,
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "d_model": 384,
        "max_source_positions": 1500,
        "max_length": 448,
        "activation_function": "gelu",
        "use_bias": True,
        "upcast_attn": True,
        "use_flash_attention": False,
    },
    "modernbert": {
        "max_seq_len": 8192,
        "hidden_dim": 768,
        "intermediate_dim": 1152,
        "num_layers": 22,
        "num_heads": 12,
        "head_dim": None,
        "layer_norm_epsilon": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "activation_function": "gelu",
        "classifier_activation": "gelu",
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "pad_token_id": 50283,
        "attn_backend": "vanilla",
        "upcast_attn": False,
        "reference_checkpoint": "answerdotai/ModernBERT-base",
        "tokenizer": None,
    },
    "snowball": {
        "max_seq_len": 65536,
        "vocab_size": 128256,
        "hidden_dim": 2560,
        "intermediate_dim": 1280,
        "shared_expert_intermediate_dim": 2560,
        "num_experts": 256,
        "num_experts_per_token": 4,
        "num_layers": 26,
        "num_heads": 20,
        "num_kv_heads": 5,
        "head_dim": 128,
        "sliding_window": 2048,
        "layer_norm_eps": 1e-5,
        "initializer_std": 0.0098821,
        "qk_mult": 1.5703274004183787,
        "rope": None,
        "attention_implementation": None,
        "moe_implementation": None,
        "reference_checkpoint": None,
        "tokenizer": None,
    },
    "apertus": {
        "reference_checkpoint": "swiss-ai/Apertus-8B-2509",
        **_DECODER,
        "max_seq_len": 65536,
        "activation_function": "xielu",
        "use_qk_norm": True,
        "rope": Llama3RotaryConfig(theta=12_000_000.0),
    },
}
"""Upstream's families: the keys of each with upstream's defaults."""


class AbsentFamilyError(ValueError):
    """The model belongs to a family that is not implemented yet."""


@dataclass(frozen=True, kw_only=True)
class AbsentModelConfig(LmConfig):
    """The `model:` block of a family that is not implemented yet. It can be read and written, not built."""


def _refuse(config: AbsentModelConfig, *_: object, **__: object) -> NoReturn:
    """Raises the error of every member that would need the family."""
    family = LmConfig.get_choice_name(type(config))
    known = LmConfig.get_known_choices()
    absent = {name for name, cls in known.items() if issubclass(cls, AbsentModelConfig)}
    available = [name for name in LmConfig.choice_names() if name not in absent]
    raise AbsentFamilyError(
        f"model.type: {family} is an upstream family that this project does not have yet; it has: "
        f"{', '.join(sorted(available))}"
    )


_REFUSED_MEMBERS = (*LmConfig.__abstractmethods__, "build", "weight_rules", "flops")  # pyright: ignore[reportAttributeAccessIssue]
"""The members of an unimplemented family's config that raise `AbsentFamilyError`."""


def register_absent() -> None:
    """Registers a config class for each of upstream's families that no family here or in a package has."""
    for name, keys in FAMILIES.items():
        if name not in family_names() and name not in LmConfig.get_known_choices():
            LmConfig.register_subclass(name, _config_class(name, keys))


def _config_class(name: str, keys: Mapping[str, Any]) -> type[LmConfig]:
    fields = [
        # Values may be mappings and mutable blocks, which are not hashable.
        (key, _annotation(key, value), dataclasses.field(default=value, hash=False))
        for key, value in keys.items()
    ]
    # Built at run time so that the YAML schema, `migrate` and draccus
    # see ordinary dataclasses with upstream's fields and defaults.
    config_class = dataclasses.make_dataclass(
        f"Absent{name.title().replace('_', '')}Config",
        fields,
        bases=(AbsentModelConfig,),
        frozen=True,
        kw_only=True,
        namespace={
            "__module__": __name__,
            **{
                # Properties must stay properties, or reading one would return a method instead of raising.
                member: property(_refuse) if isinstance(getattr(LmConfig, member), property) else _refuse
                for member in _REFUSED_MEMBERS
            },
        },
    )
    config_class.__doc__ = f"The `model:` block of upstream's {name}, which is not implemented yet."
    return config_class


def _annotation(key: str, default: object) -> Annotation:
    """The type of a key, from its default if that determines it."""
    if key == "gradient_checkpointing":
        return bool | str | dict[str, Any]
    # The rotary block of `snowball` has keys that ours do not have; any mapping is accepted there.
    if key == "rope" and default is not None:
        return RotaryConfig
    if isinstance(default, int | float) and not isinstance(default, bool):
        # Any number is accepted (no ranges): the values are never used
        # here, and a valid upstream document must not be refused for them.
        return AnyInt if isinstance(default, int) else AnyFloat
    return type(default) if isinstance(default, bool | str | AbsentHyenaConfig) else Any


register_absent()
