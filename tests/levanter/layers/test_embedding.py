"""Looking up tokens in a table that is cut along `vocab` never moves the table."""

import math
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.embedding import Embedding

pytestmark = pytest.mark.quick

Vocab, Embed, Batch, Pos = Axis("vocab", 1024), Axis("embed", 32), Axis("batch", 8), Axis("position", 16)
MESH = MeshSpec.of(data=2, model=4)
MAPPINGS = {
    "fsdp": Mappings(
        params=AxisMapping({"vocab": "model", "embed": "data"}),
        compute=AxisMapping({"vocab": "model", "batch": "data"}),
    ),
    "tensor_parallel": Mappings(
        params=AxisMapping({"vocab": ("model", "data")}), compute=AxisMapping({"batch": "data"})
    ),
    "embed_too": Mappings(
        params=AxisMapping({"vocab": "model"}), compute=AxisMapping({"batch": "data", "embed": "model"})
    ),
}


def lookup(mappings: Mappings) -> Program:
    weight = hax.NamedArray(jax.ShapeDtypeStruct((1024, 32), jnp.float32), (Vocab, Embed))
    ids = hax.NamedArray(jax.ShapeDtypeStruct((8, 16), jnp.int32), (Batch, Pos))
    return Program(
        name="lookup",
        function=lambda table, tokens: table(tokens),
        inputs=(
            Input(name="table", value=Embedding(weight=weight), placement=mappings),
            Input(name="tokens", value=ids, placement=mappings.compute),
        ),
        mappings=mappings,
    )


def gathered_elements(text: str) -> list[int]:
    """Elements of every result of an all-gather or all-to-all in a compiled program."""
    sizes = []
    for line in text.splitlines():
        found = re.search(r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", line)
        for shape in re.findall(r"\w+\[([\d,]*)\]", found[1]) if found else []:
            sizes.append(math.prod(int(n) for n in shape.split(",") if n))
    return sizes


@pytest.mark.parametrize("case", MAPPINGS)
def test_rows_are_right_and_the_table_stays(case, devices):
    program, mesh = lookup(MAPPINGS[case]), MESH.build(devices)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((1024, 32)).astype(np.float32)
    tokens = rng.integers(0, 1024, (8, 16)).astype(np.int32)
    found = program.jit(mesh)(Embedding(weight=hax.named(table, (Vocab, Embed))), hax.named(tokens, (Batch, Pos)))
    np.testing.assert_array_equal(np.asarray(found.array), table[tokens])
    text = program.lower(mesh).compile().as_text()
    result = 8 * 16 * 32
    assert all(size <= result for size in gathered_elements(text)), "more than the looked-up rows was moved"
    assert result * 4 < 1024 * 32, "the table must be larger than what is looked up for this to say anything"
