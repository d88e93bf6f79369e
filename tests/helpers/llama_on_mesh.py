"""Tiny Llamas on named axes, their weights by plain NumPy, and meshes to run them on."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import haliax as hax
import jax
import numpy as np
from jax.sharding import NamedSharding

from haliax_ext.abstract import Leaf, abstract, leaves, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from haliax_ext.rules import WeightRules
from levanter.mesh.heads import expand_heads
from levanter.models import LlamaConfig
from levanter.models.base import LmHeadModel

VOCAB = 256


def tiny_config(**changes) -> LlamaConfig:
    """8 query heads on 2 key/value heads, 2 layers; small enough to compile in a second or two."""
    base = dict(
        max_seq_len=48,
        hidden_dim=64,
        intermediate_dim=96,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        vocab_size=VOCAB,
        initializer_range=0.15,
    )
    return LlamaConfig(**(base | changes))


def abstract_model(config: LlamaConfig, vocab: int = VOCAB) -> LmHeadModel:
    """The model without memory."""
    return abstract(lambda: config.build(hax.Axis("vocab", vocab), key=jax.random.key(0)))


def leaf_from_source(leaf: Leaf, rules: WeightRules, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """A leaf by whole-tensor NumPy: stack, split the flattened axes, transpose. The slow meaning of a `WeightRule`."""
    rule = rules.by_target()[leaf.path]
    sizes = dict(leaf.axes)
    order = [*rule.stacked, *(name for group in rule.axes for name in group)]
    each = [tensors[rule.source_name(index)] for index in np.ndindex(*(sizes[name] for name in rule.stacked))]
    array = np.stack(each)
    array = array.reshape([sizes[name] for name in order])
    return array.transpose([order.index(name) for name in leaf.names])


def named_arrays(config: LlamaConfig, tensors: Mapping[str, np.ndarray], vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Every leaf of the model from Hugging Face tensors, by path."""
    rules = config.weight_rules()
    return {leaf.path: leaf_from_source(leaf, rules, tensors) for leaf in leaves(abstract_model(config, vocab))}


def random_arrays(config: LlamaConfig, *, seed: int = 0, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Random values for every leaf, by path; norm weights around 1."""
    rng = np.random.default_rng(seed)
    values = {}
    for leaf in leaves(abstract_model(config, vocab)):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        is_norm = leaf.path.endswith("norm.weight")
        values[leaf.path] = 1 + np.float32(0.1) * noise if is_norm else np.float32(config.initializer_range) * noise
    return values


def mappings_for(
    config: LlamaConfig, mesh: MeshSpec, *, heads: tuple[str, ...] = ("model",), **changes: Mapping
) -> Mappings:
    """Upstream's defaults with our meaning of `heads`, and `vocab → model`; FSDP over `data`.

    Args:
        config: for the head counts.
        mesh: mesh axis names and sizes.
        heads: mesh axes of attention heads, `mlp` and `vocab`.
        changes: `params`, `compute` and `residual` rules, and `overrides` by path pattern.

    Raises:
        IndivisibleError: the heads cannot be cut over `heads`.
    """
    expanded = expand_heads(heads, kv_heads=config.KVHead.size, q_per_group=config.QHeadsPerGroup.size, mesh=mesh)
    shared: dict = {"mlp": heads, "vocab": heads, **expanded.rules}
    return Mappings(
        params=AxisMapping({**shared, "embed": "data", **changes.get("params", {})}),
        compute=AxisMapping({**shared, "batch": "data", **changes.get("compute", {})}),
        residual=AxisMapping(changes.get("residual", {})),
        overrides=tuple((pattern, AxisMapping(m)) for pattern, m in changes.get("overrides", {}).items()),
        declared=expanded.declared,
    )


def llama_2d(config: LlamaConfig) -> Mappings:
    """The 2D layout of the PyTorch/XLA Llama 2 work: attention rotated, residual stream over `model`.

    `AxisMapping` drops what maps to nothing, so the rules that the overrides take away are not in `params` at all.
    """
    base = mappings_for(config, MeshSpec.of(data=4, model=2), residual={"embed": "model"})
    return Mappings(
        params=AxisMapping({"mlp": "model", "vocab": "model", "embed": "data"}),
        compute=base.compute,
        residual=base.residual,
        overrides=(("**.self_attn.*", AxisMapping({"embed": "model", "head_size": "data"})),),
    )


def place(config: LlamaConfig, arrays: Mapping[str, np.ndarray], mappings: Mappings, mesh: jax.sharding.Mesh):
    """The model with `arrays` on the devices of `mesh`."""
    template = abstract_model(config, arrays["embeddings.token_embeddings.weight"].shape[0])
    placed = {
        leaf.path: jax.device_put(
            arrays[leaf.path], NamedSharding(mesh, mappings.params_at(leaf.path).spec(leaf.names))
        )
        for leaf in leaves(template)
    }
    return with_arrays(template, placed)


@cache
def program_for(
    function: Callable, config: LlamaConfig, vocab: int, shape: tuple[int, int], mappings: Mappings
) -> Program:
    """`function(model, tokens)` as a Program; one for each combination, so that it compiles once."""
    axes = (hax.Axis("batch", shape[0]), hax.Axis("position", shape[1]))
    tokens = hax.NamedArray(jax.ShapeDtypeStruct(shape, np.dtype(np.int32)), axes)  # pyright: ignore
    return Program(
        name="under_test",
        function=function,
        inputs=(
            Input(name="model", value=abstract_model(config, vocab), placement=mappings),
            Input(name="tokens", value=tokens, placement=mappings.compute),
        ),
        mappings=mappings,
    )


def run_on(
    function: Callable,
    config: LlamaConfig,
    arrays: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    spec: MeshSpec,
    mappings: Mappings,
    devices: Sequence[jax.Device],
):
    """Runs `function(model, tokens)` on the mesh `spec`; the result with NumPy arrays."""
    mesh = spec.build(devices[: spec.size])
    model = place(config, arrays, mappings, mesh)
    axes = (hax.Axis("batch", tokens.shape[0]), hax.Axis("position", tokens.shape[1]))
    placed = jax.device_put(tokens, NamedSharding(mesh, mappings.compute.spec(("batch", "position"))))
    program = program_for(function, config, model.Vocab.size, tokens.shape, mappings)
    return jax.tree.map(np.asarray, program.jit(mesh)(model, hax.NamedArray(placed, axes)))
