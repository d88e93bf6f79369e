"""Tiny models of every family as `transformers` makes them, and the run's own way to score with ours."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import with_arrays
from levanter.commands.evaluate.eval_lm import EvalLmConfig, score_program
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained, load_pretrained
from levanter.config import load
from levanter.data import next_tokens
from levanter.hardware.compiler import Work
from levanter.models.registry import BUILTIN, family_named
from levanter.runplan import Target

CPU8 = Target(name="local", platform="cpu", kind="cpu", devices=8)
SIZES: Mapping[str, Any] = dict(
    vocab_size=262,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
)
PAD: Mapping[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONTEXT = 16
"""Original context of the RoPE scalings, and less than the sequences."""
WINDOW = 9
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=8.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=CONTEXT,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0 + 0.1 * n for n in range(4)],
    long_factor=[2.0 + 0.5 * n for n in range(4)],
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One tiny model.

    Attributes:
        hf: the name of its classes in transformers, without `Config` and `ForCausalLM`.
        changes: to `sizes`, in the words of config.json.
        sizes: what is common to most.
        offset: whether norm weights are differences from 1.
        by_length: whether the rotary embeddings depend on the length of the whole sequence.
        runs: how its layers are scanned: places in a period, and periods, of each run.
    """

    hf: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    offset: bool = False
    by_length: bool = False
    runs: tuple[tuple[int, int], ...] = ((1, 3),)

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads of keys and values there are, and how many query heads share one."""
        given = {**self.sizes, **self.changes}
        heads = given.get("num_attention_heads", given.get("n_head"))
        kv_heads = given.get("num_key_value_heads", heads)
        return kv_heads, heads // kv_heads


_GEMMA2 = dict(head_dim=16, sliding_window=WINDOW, num_hidden_layers=5, query_pre_attn_scalar=24)
_GPT2 = dict(
    vocab_size=265,
    n_positions=128,
    n_embd=64,
    n_inner=96,
    n_layer=3,
    n_head=8,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)
_NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_ROPES = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e4, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
VARIANTS: Mapping[str, Variant] = {
    "llama": Variant(hf="Llama"),
    "mistral": Variant(hf="Mistral", changes=dict(sliding_window=WINDOW)),
    "qwen2": Variant(hf="Qwen2"),
    "qwen3": Variant(hf="Qwen3", changes=dict(head_dim=16)),
    "gemma": Variant(hf="Gemma", changes=dict(head_dim=16), offset=True),
    "gemma2": Variant(hf="Gemma2", changes=_GEMMA2, offset=True, runs=((2, 2), (1, 1))),
    "gemma3": Variant(
        hf="Gemma3",
        changes=dict(_GEMMA2, num_hidden_layers=8, sliding_window_pattern=3, rope_parameters=_ROPES),
        offset=True,
        runs=((3, 2), (1, 2)),
    ),
    "olmo2": Variant(hf="Olmo2"),
    "olmo3": Variant(hf="Olmo3", changes=dict(sliding_window=WINDOW, num_hidden_layers=9), runs=((4, 2), (1, 1))),
    "phi3": Variant(hf="Phi3"),
    "smollm3": Variant(hf="SmolLM3", changes=dict(num_hidden_layers=8), runs=((4, 2),)),
    "gpt2": Variant(hf="GPT2", sizes=_GPT2),
    # Of the 8 features of a head, 4 are rotated.
    "gpt_neox": Variant(
        hf="GPTNeoX", sizes=_NEOX, changes=dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5))
    ),
    "mixtral": Variant(hf="Mixtral", changes=_EXPERTS),
    "nanochat": Variant(hf="NanoChat"),
    "qwen3_moe": Variant(
        hf="Qwen3Moe", changes=dict(_EXPERTS, head_dim=16, moe_intermediate_size=32, norm_topk_prob=True)
    ),
    # Variants.
    "nanochat_yarn": Variant(hf="NanoChat", changes=dict(rope_parameters=YARN)),
    "llama_llama3": Variant(hf="Llama", changes=dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "mistral_yarn": Variant(hf="Mistral", changes=dict(sliding_window=WINDOW, rope_parameters=YARN)),
    "mixtral_linear": Variant(hf="Mixtral", changes=dict(_EXPERTS, rope_parameters=LINEAR)),
    "qwen3_window_yarn": Variant(
        hf="Qwen3",
        changes=dict(
            rope_parameters=YARN,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
        runs=((1, 1), (1, 2)),
    ),
    "qwen3_dynamic": Variant(
        hf="Qwen3",
        changes=dict(
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=CONTEXT
        ),
        by_length=True,
    ),
    "qwen3_moe_yarn": Variant(
        hf="Qwen3Moe", changes=dict(_EXPERTS, moe_intermediate_size=32, norm_topk_prob=True, rope_parameters=YARN)
    ),
    "gemma_linear": Variant(hf="Gemma", changes=dict(head_dim=16, rope_parameters=LINEAR), offset=True),
    "gemma2_yarn": Variant(
        hf="Gemma2", changes=dict(_GEMMA2, rope_parameters=YARN), offset=True, runs=((2, 2), (1, 1))
    ),
    "olmo2_llama3": Variant(hf="Olmo2", changes=dict(rope_parameters=LLAMA3)),
    "smollm3_yarn": Variant(hf="SmolLM3", changes=dict(num_hidden_layers=8, rope_parameters=YARN), runs=((4, 2),)),
    "gpt_neox_in_turn": Variant(
        hf="GPTNeoX",
        sizes=_NEOX,
        changes=dict(
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_fast",
            rope_parameters=dict(LINEAR, partial_rotary_factor=1.0),
        ),
    ),
    "gpt_neox_yarn": Variant(
        hf="GPTNeoX", sizes=_NEOX, changes=dict(rope_parameters=dict(YARN, partial_rotary_factor=0.75), hidden_size=128)
    ),
    "gpt2_scaled": Variant(
        hf="GPT2", sizes=_GPT2, changes=dict(scale_attn_by_inverse_layer_idx=True), runs=((1, 1),) * 3
    ),
    "mixtral_window": Variant(hf="Mixtral", changes=dict(_EXPERTS, sliding_window=WINDOW, tie_word_embeddings=True)),
    "qwen3_moe_biases": Variant(
        hf="Qwen3Moe",
        changes=dict(
            _EXPERTS, attention_bias=True, num_experts_per_tok=1, use_sliding_window=True, sliding_window=WINDOW
        ),
    ),
    "mistral_whole": Variant(hf="Mistral", changes=dict(sliding_window=None, head_dim=24, tie_word_embeddings=True)),
    "qwen2_late_window": Variant(
        hf="Qwen2",
        changes=dict(
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=3,
            num_hidden_layers=5,
            tie_word_embeddings=True,
        ),
        runs=((1, 3), (1, 2)),
    ),
    "qwen2_yarn": Variant(hf="Qwen2", changes=dict(rope_parameters=YARN)),
    "qwen3_biases": Variant(hf="Qwen3", changes=dict(attention_bias=True, tie_word_embeddings=True)),
    "gemma_one_kv_head": Variant(hf="Gemma", changes=dict(head_dim=16, num_key_value_heads=1), offset=True),
    "gemma2_no_caps": Variant(
        hf="Gemma2",
        changes=dict(_GEMMA2, num_hidden_layers=2, attn_logit_softcapping=None, final_logit_softcapping=None),
        offset=True,
        runs=((1, 1), (1, 1)),
    ),
    "olmo2_grouped": Variant(hf="Olmo2", changes=dict(num_key_value_heads=2, attention_bias=True)),
    "olmo3_yarn": Variant(
        hf="Olmo3",
        changes=dict(
            sliding_window=WINDOW,
            num_hidden_layers=4,
            rope_parameters=dict(
                full_attention=dict(YARN, rope_theta=5e5),
                sliding_attention=dict(rope_type="default", rope_theta=5e5),
            ),
        ),
        runs=((1, 3), (1, 1)),
    ),
    "phi3_partial": Variant(
        hf="Phi3",
        changes=dict(
            num_key_value_heads=8,
            sliding_window=WINDOW,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
            num_attention_heads=8,
            hidden_size=128,
        ),
    ),
    "phi3_long": Variant(
        hf="Phi3",
        changes=dict(rope_parameters=LONG, original_max_position_embeddings=CONTEXT),
        by_length=True,
    ),
    "phi3_long_unused": Variant(
        hf="Phi3", changes=dict(rope_parameters=LONG, original_max_position_embeddings=96), by_length=True
    ),
    "smollm3_windows": Variant(
        hf="SmolLM3",
        changes=dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=WINDOW),
        runs=((2, 2),),
    ),
}
ESSENTIAL = tuple(
    next(kind.model_type for kind in reversed(family_named(name).config_json) if kind.model_type in VARIANTS)
    for name in BUILTIN
)
"""One variant of each family of the registry, by its `model_type`: a new family needs an entry in `VARIANTS`."""

_FOUR = ["model", "group"]


def _cut(kv_heads: str | list[str] | None, queries: str | list[str] | None) -> dict[str, Any]:
    """Eight devices of which four share a sequence, in two mesh axes, and how heads are cut over them."""
    return {
        "axes": {"data": 2, "model": 2, "group": 2},
        "shared_mapping": {
            "vocab": _FOUR,
            "mlp": _FOUR,
            "kv_head": kv_heads,
            "q_heads_per_group": queries,
            "heads": None,
        },
    }


MESHES: Mapping[str, Mapping[str, Any]] = {
    "one": {"axes": {"data": 8}},
    "2x4": {"axes": {"data": 2, "model": 4}, "shared_mapping": {"vocab": "model"}},
    # Fewer heads of keys and values than `model` cuts: query heads are cut instead.
    "2x4 by queries": {
        "axes": {"data": 2, "model": 4},
        "shared_mapping": {"vocab": "model", "kv_head": None, "q_heads_per_group": "model", "heads": None},
    },
    "group": _cut("model", "group"),
    # Every query head has keys and values of its own.
    "group by heads": _cut(_FOUR, None),
    # All query heads share them.
    "group by queries": _cut(None, _FOUR),
}
ALL_MESHES = ("one", "2x4", "group")
"""What every variant runs on; how its heads are cut there depends on how many there are."""


def layout(name: str, mesh: str) -> str:
    """The one of `MESHES` on which a variant runs for one of `ALL_MESHES`."""
    kv_heads, queries = VARIANTS[name].heads
    if mesh == "2x4" and kv_heads % 4:
        return "2x4 by queries"
    if mesh == "group" and queries % 2:
        return "group by heads"
    if mesh == "group" and kv_heads % 2:
        return "group by queries"
    return mesh


def transformers_config(name: str) -> Any:
    """What `transformers` makes of a variant's fields."""
    import transformers

    variant = VARIANTS[name]
    prefix = f"{variant.hf}Text" if variant.hf == "Gemma3" else variant.hf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of unusual RoPE values
        return getattr(transformers, f"{prefix}Config")(
            **{**variant.sizes, **PAD, **variant.changes}, attn_implementation="eager"
        )


def make_checkpoint(name: str, folder: Path) -> Any:
    """Saves a model with random weights as transformers does; the model, in float32."""
    import torch
    import transformers

    variant = VARIANTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(name)).eval().float()
    rng = np.random.default_rng(sorted(VARIANTS).index(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = 0.2 * torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
            around = 1 if re.search(r"(norm|ln_\w)\.weight$", key) and not variant.offset else 0
            parameter.copy_(around + noise)
    model.save_pretrained(folder)
    return model


def describe_folder(
    folder: Path, *, mesh: str = "one", mp: str = "f32", positions: int = 48, work: Work = "score", **how: Any
) -> PretrainedModel:
    """What `eval_lm` plans for a checkpoint that nothing but its folder describes; `how`: fields of `ModelChoice`."""
    words = ["--hf_checkpoint", str(folder), "--trainer.mp", mp, "--trainer.mesh", _flow(MESHES[mesh])]
    config = load(EvalLmConfig, words)
    choice = ModelChoice(reference=config.reference, model=config.model, tokenizer=None, trainer=config.trainer, **how)
    return describe_pretrained(choice, CPU8, batch=lambda ways: 8, positions=positions, work=work)


def _flow(document: Mapping[str, Any]) -> str:
    import json

    return json.dumps(document)


def score(described: PretrainedModel, tokens: np.ndarray, segments: np.ndarray) -> tuple[Any, np.ndarray]:
    """The model with its weights loaded, and log-probabilities of the next tokens, by the run's own Program."""
    assert not described.sharding.errors and not described.activations.errors, described.sharding.errors
    mesh = described.resolved.spec.build(jax.devices()[: described.resolved.spec.size])
    model = with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)
    program = score_program(described, rows=tokens.shape[0], positions=tokens.shape[1])
    axes = (hax.Axis("batch", tokens.shape[0]), hax.Axis("position", tokens.shape[1]))
    spec = described.resolved.mappings.compute.spec(("batch", "position"))
    batch = (tokens, next_tokens(tokens, segments), segments)
    placed = (hax.NamedArray(jax.device_put(x, jax.NamedSharding(mesh, spec)), axes) for x in batch)
    found = program.jit(mesh)(model, *placed)
    return model, np.asarray(found.array)


def torch_logprobs(model: Any, tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The same by torch, each segment by itself; 0 where a segment ends."""
    import torch

    found = np.zeros(tokens.shape)
    for row in range(tokens.shape[0]):
        for owner in np.unique(segments[row]):
            (at,) = np.nonzero(segments[row] == owner)
            piece = torch.from_numpy(tokens[row, at].astype(np.int64))[None]
            with torch.no_grad():
                logprobs = model(piece).logits.double().log_softmax(-1)[0]
            following = logprobs[:-1].gather(-1, piece[0, 1:, None])[:, 0]
            found[row, at[:-1]] = following.numpy()
    return found
