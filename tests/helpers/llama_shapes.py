"""The published Llama shapes as abstract models: named leaves and axes, no memory."""

from functools import cache

import haliax as hax
import jax

from haliax_ext.abstract import Leaf, abstract, cast, leaves
from levanter.mesh import ModelAxes
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.llama.config import LlamaConfig

SHAPES = {
    "smollm2_135m": dict(
        hidden_dim=576,
        intermediate_dim=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        vocab=49152,
        tie_word_embeddings=True,
    ),
    "llama3.1_8b": dict(
        hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, vocab=128256
    ),
    "llama3.1_70b": dict(
        hidden_dim=8192, intermediate_dim=28672, num_layers=80, num_heads=64, num_kv_heads=8, vocab=128256
    ),
    "llama3.1_405b": dict(
        hidden_dim=16384, intermediate_dim=53248, num_layers=126, num_heads=128, num_kv_heads=8, vocab=128256
    ),
}


@cache
def shape_leaves(name: str, dtype: str = "float32") -> tuple[Leaf, ...]:
    """The leaves of a published Llama."""
    shape = dict(SHAPES[name])
    vocab = hax.Axis("vocab", shape.pop("vocab"))
    config = LlamaConfig(max_seq_len=8192, **shape)
    return leaves(cast(abstract(lambda: config.build(vocab, key=jax.random.PRNGKey(0))), dtype))


def model_axes(name: str) -> ModelAxes:
    """Its logical axes, those of its activations included."""
    return ModelAxes.of(shape_leaves(name), known=KNOWN_AXES, aliases=ALIASES, position=8192, key_position=8192)
