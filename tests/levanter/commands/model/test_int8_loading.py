"""What lies on a device while a model is loaded as integers: the integers, and one layer's shard of one leaf at a time.

The arrays that JAX holds are counted whenever a Program of loading begins and ends, and the compiler says what each of
them takes in between.
"""

import jax
import numpy as np
import pytest
from helpers.family_models import SIZES, describe_folder

from haliax_ext.loading import load
from haliax_ext.program import Program
from levanter.plan.load_budget import load_budget

LAYERS, EMBED, MLP, VOCAB = 6, 128, 384, 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in bfloat16, as `transformers` saves it."""
    import torch
    import transformers

    sizes = dict(SIZES, hidden_size=EMBED, intermediate_size=MLP, vocab_size=VOCAB, num_hidden_layers=LAYERS)
    where = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(where)
    return where


def held_by(device: jax.Device) -> int:
    """Bytes of the arrays on a device."""
    there = (x for x in jax.live_arrays() if device in x.sharding.device_set)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in there)


def test_no_device_ever_holds_more_than_the_integers_and_a_piece_of_one_leaf(folder, devices):
    model = describe_folder(folder, mesh="2x4", mp="bfloat16", quantize="int8", memory_gib=1 / 2**10)
    plan = model.load_plan
    assert plan is not None
    others = jax.live_arrays()  # Garbage of tests before this one must not be collected while it counts.
    began, device, peak = held_by(devices[0]), devices[0], 0
    temporary: dict[str, int] = {}

    def counting(program: Program, mesh):
        call = program.jit(mesh)
        if program.name not in temporary:
            own = program.lower(mesh).compile().memory_analysis()
            made = own.output_size_in_bytes - own.alias_size_in_bytes
            temporary[program.name] = own.temp_size_in_bytes + made

        def run(*values):
            nonlocal peak
            peak = max(peak, held_by(device) - began + temporary[program.name])
            found = jax.block_until_ready(call(*values))
            peak = max(peak, held_by(device) - began)
            return found

        return run

    mesh = model.resolved.spec.build(devices)
    arrays = load(
        plan, model.sharding, model.checkpoint.source, mesh, memory_bytes=model.choice.memory_bytes, jit=counting
    )
    assert sum(program.name.startswith("load.derive.") for program in plan.programs) >= 8
    assert set(temporary) == {program.name for program in plan.programs}
    here = model.sharding.bytes_per_device
    assert held_by(device) - began == here
    budget = load_budget(plan, memory_bytes=model.choice.memory_bytes)
    assert peak <= budget.device_peak + 4096
    # A layer of one matrix in bfloat16, cut eight ways as its integers are; as it arrives, as float32, as integers.
    largest = EMBED * MLP // 8
    assert budget.device_transient[1] <= (2 * 2 + 4 + 1) * largest + 4096
    plain = describe_folder(folder, mesh="2x4", mp="bfloat16")
    assert peak < 0.75 * plain.sharding.bytes_per_device
    # A host holds what it was allowed and the buffers of its readers, whatever the model's size.
    assert budget.host_peak <= (1 << 20) + (32 << 20)
    del arrays, others
