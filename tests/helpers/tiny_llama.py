"""A tiny Llama-shaped checkpoint: leaves, weight rules, random tensors, and the leaves assembled from them by NumPy."""

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRule, WeightRules

HEADS = ("kv_head", "q_heads_per_group", "head_size")
SIZES = dict(layers=3, embed=16, mlp=32, kv_head=4, q_heads_per_group=2, head_size=4, vocab=40)
_STACKED = "transformer.layers.stacked"


def leaf(path: str, *names: str, dtype=np.float32, sizes=SIZES) -> Leaf:
    return Leaf(path, tuple((name, sizes[name]) for name in names), np.dtype(dtype))


def tiny_leaves(dtype=np.float32, sizes=SIZES) -> list[Leaf]:
    def one(path, *names):
        return leaf(path, *names, dtype=dtype, sizes=sizes)

    return [
        one("embeddings.token_embeddings.weight", "vocab", "embed"),
        one(f"{_STACKED}.self_attn.q_proj.weight", "layers", *HEADS, "embed"),
        one(f"{_STACKED}.self_attn.k_proj.weight", "layers", "kv_head", "head_size", "embed"),
        one(f"{_STACKED}.self_attn.o_proj.weight", "layers", "embed", *HEADS),
        one(f"{_STACKED}.mlp.gate_proj.weight", "layers", "mlp", "embed"),
        one(f"{_STACKED}.mlp.down_proj.weight", "layers", "embed", "mlp"),
        one(f"{_STACKED}.input_layernorm.weight", "layers", "embed"),
        one("transformer.norm.weight", "embed"),
    ]


def tiny_rules() -> WeightRules:
    def stacked(path, source, *axes):
        return WeightRule(
            target=f"{_STACKED}.{path}.weight", source=f"model.layers.{{layers}}.{source}.weight", axes=axes
        )

    return WeightRules(
        rules=(
            WeightRule(
                target="embeddings.token_embeddings.weight",
                source="model.embed_tokens.weight",
                axes=(("vocab",), ("embed",)),
            ),
            stacked("self_attn.q_proj", "self_attn.q_proj", HEADS, ("embed",)),
            stacked("self_attn.k_proj", "self_attn.k_proj", ("kv_head", "head_size"), ("embed",)),
            stacked("self_attn.o_proj", "self_attn.o_proj", ("embed",), HEADS),
            stacked("mlp.gate_proj", "mlp.gate_proj", ("mlp",), ("embed",)),
            stacked("mlp.down_proj", "mlp.down_proj", ("embed",), ("mlp",)),
            stacked("input_layernorm", "input_layernorm", ("embed",)),
            WeightRule(target="transformer.norm.weight", source="model.norm.weight", axes=(("embed",),)),
        ),
        ignored=("*.rotary_emb.inv_freq",),
    )


def tiny_tensors(dtype=np.float32, sizes=SIZES, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    heads = sizes["kv_head"] * sizes["q_heads_per_group"] * sizes["head_size"]
    kv, embed, mlp = sizes["kv_head"] * sizes["head_size"], sizes["embed"], sizes["mlp"]
    shapes = {"model.embed_tokens.weight": (sizes["vocab"], embed)}
    for i in range(sizes["layers"]):
        prefix = f"model.layers.{i}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (heads, embed),
            f"{prefix}.self_attn.k_proj.weight": (kv, embed),
            f"{prefix}.self_attn.o_proj.weight": (embed, heads),
            f"{prefix}.mlp.gate_proj.weight": (mlp, embed),
            f"{prefix}.mlp.down_proj.weight": (embed, mlp),
            f"{prefix}.input_layernorm.weight": (embed,),
        }
    shapes["model.norm.weight"] = (embed,)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def assembled(tensors: dict[str, np.ndarray], sizes=SIZES) -> dict[str, np.ndarray]:
    """The leaves, by plain NumPy: stack, reshape."""

    def stack(name, *shape):
        found = [tensors[f"model.layers.{i}.{name}.weight"] for i in range(sizes["layers"])]
        return np.stack(found).reshape(sizes["layers"], *shape)

    heads = tuple(sizes[name] for name in HEADS)
    kv, embed = (sizes["kv_head"], sizes["head_size"]), sizes["embed"]
    return {
        "embeddings.token_embeddings.weight": tensors["model.embed_tokens.weight"],
        f"{_STACKED}.self_attn.q_proj.weight": stack("self_attn.q_proj", *heads, embed),
        f"{_STACKED}.self_attn.k_proj.weight": stack("self_attn.k_proj", *kv, embed),
        f"{_STACKED}.self_attn.o_proj.weight": stack("self_attn.o_proj", embed, *heads),
        f"{_STACKED}.mlp.gate_proj.weight": stack("mlp.gate_proj", sizes["mlp"], embed),
        f"{_STACKED}.mlp.down_proj.weight": stack("mlp.down_proj", embed, sizes["mlp"]),
        f"{_STACKED}.input_layernorm.weight": stack("input_layernorm", embed),
        "transformer.norm.weight": tensors["model.norm.weight"],
    }
