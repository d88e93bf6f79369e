"""What the compiler makes of a decode step: which collectives, and what becomes of the cache."""

import math
import re

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.llama_on_mesh import mappings_for

from haliax_ext.abstract import abstract, leaves
from haliax_ext.hlo import read_figures
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.inference.kv_cache import plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.layers.linear import Dense
from levanter.models import LlamaConfig, MixtralConfig
from levanter.models.decoder import DecoderLmHeadModel

MESH = MeshSpec.of(data=2, model=4)
ROWS, EXPERTS, EMBED, MLP = 8, 8, 128, 512
SIZES = dict(
    max_seq_len=64,
    hidden_dim=EMBED,
    intermediate_dim=MLP,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=512,
    gradient_checkpointing=False,
)


def programs(config: LlamaConfig, mesh: MeshSpec, *, mapping: dict, steps: int = 1, **cache) -> GenerationPrograms:
    mappings = mappings_for(config, mesh, params=mapping, compute={k: v for k, v in mapping.items() if k != "embed"})
    assert config.vocab_size is not None
    Vocab = hax.Axis("vocab", config.vocab_size)
    module = abstract(lambda: config.build(Vocab, key=jax.random.key(0)))
    assert isinstance(module, DecoderLmHeadModel)
    planned = plan_cache(
        module,
        mappings,
        mesh,
        batch_axis="batch",
        **{"rows": ROWS, "max_seq_len": 64, "dtype": np.dtype(np.float32), **cache},
    )
    served = ServedModel(abstract=module, sharding=plan_sharding(leaves(module), mappings, mesh))
    return generation_programs(served, planned, prefill=[(1, 16)], steps=steps)


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 4},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"allocation": "paged", "page_size": 64}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_decode_step_writes_its_new_positions_and_nothing_else(how, devices):
    """On CPUs too: what has the shape of the cache is the cache, handed on, and scattered into in place. A compiler
    that rewrites a whole buffer for a small update (jax #40101) makes another one of its shape."""
    how = dict(how)
    one = MeshSpec.of(data=1, model=1)
    config = LlamaConfig(**(SIZES | {"num_layers": 6}))
    steps = how.pop("steps", 1)
    made = programs(config, one, mapping={"embed": None}, steps=steps, rows=4, max_seq_len=2048, **how)
    compiled = made.decode.lower(one.build(devices[:1])).compile()
    (pages,) = made.cache.abstract["pages"]
    whole = [axis.size for axis in pages.axes]
    # As it is held, and as it is indexed: all axes but the last two are one.
    either = "|".join(",".join(map(str, sizes)) for sizes in (whole, [math.prod(whole[:-2]), *whole[-2:]]))
    found = re.findall(rf"= f32\[(?:{either})\]\S* (\w[\w-]*)\(", compiled.as_text() or "")
    assert found.count("scatter") >= 1
    assert set(found) <= {"parameter", "get-tuple-element", "scatter", "fusion", "bitcast"}
    assert found.count("fusion") <= found.count("scatter")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= made.cache.bytes_per_device
    # Keys and values of one layer as they are read, and what a few rows need.
    assert memory.temp_size_in_bytes <= 2 * made.cache.bytes_per_device / config.num_layers


def gathered(devices, **mapping) -> int:
    """Bytes of the largest array that a decode step of a mixture of experts gathers or sends around."""
    config = MixtralConfig(**SIZES, n_routed_experts=EXPERTS)
    program = programs(config, MESH, mapping=mapping).decode
    text = program.lower(MESH.build(devices)).compile().as_text()
    found = read_figures(text or "", MESH).collectives
    assert found, "a mesh of eight devices communicates"
    return max((each.bytes for each in found if each.kind != "all-reduce"), default=0)


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        pytest.param({"mlp": None, "expert": "model"}, marks=pytest.mark.slow),
        {"expert": "data"},
    ],
    ids=["features over model", "experts over model", "experts over data, features over model"],
)
def test_a_decode_step_gathers_no_expert(mapping, devices):
    """Tokens go to the experts: what is sent around is activations and logits, less than a device's part of one."""
    part = EMBED * MLP * 4 // MESH.shape["model"]
    assert gathered(devices, embed=None, **mapping) < part


def test_tokens_are_not_sorted_by_expert(monkeypatch, devices):
    """A grouped product copies every expert on a TPU, see `layers.experts`."""

    def grouped(*_):
        raise AssertionError("a grouped product")

    monkeypatch.setattr(Dense, "ragged_dot", grouped)
    config = MixtralConfig(**SIZES, n_routed_experts=EXPERTS)
    made = programs(config, MESH, mapping={"embed": None})
    for program in (made.decode, *made.prefill.values()):
        program.lower(MESH.build(devices))


@pytest.mark.slow
def test_experts_that_are_sharded_over_the_rows_devices_would_be_gathered(devices):
    """What the test above would see."""
    assert gathered(devices, embed="data") >= EMBED * MLP * 4 // MESH.shape["model"]
