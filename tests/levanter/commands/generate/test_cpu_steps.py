"""What a decode step on CPUs does not do, in the compiler's text: lay weights out anew, read positions nobody has."""

import json
import math
import re
from dataclasses import replace

import jax

from haliax_ext.abstract import leaves
from haliax_ext.program import Program
from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import GenerateWork
from levanter.config import load_written
from levanter.inference.programs import ServedModel, decode_program
from levanter.plan.targets import target_of_pod
from levanter.run import RunPlan, Target

EMBED, HEADS, KV_HEADS, SIZE, LENGTH, ROWS = 64, 4, 2, 16, 1024, 4
SMALLEST = EMBED * KV_HEADS * SIZE
"""Numbers of the smallest projection; activations and logits have fewer."""
MODEL = {
    "type": "llama",
    "hidden_dim": EMBED,
    "intermediate_dim": 160,
    "num_layers": 3,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "vocab_size": 300,
    "max_seq_len": LENGTH,
}
CPU = Target(name="local", platform="cpu", kind="cpu", devices=1, host_bytes=1 << 34)


def plan(tmp_path, target: Target = CPU) -> RunPlan[GenerateWork]:
    path = tmp_path / "plan.yaml"
    document = {
        "model": MODEL,
        "tokenizer": "passthrough",
        "inference": {"max_rows": ROWS, "penalties": False},
        "trainer": {"mp": "f32"},
    }
    path.write_text(json.dumps(document))
    loaded = load_written(GenerateConfig, ["--config_path", str(path)])
    return generate.describe(loaded.config, target, written=loaded.written)


def compiled(found: RunPlan[GenerateWork], program: Program | None = None, **changes) -> str:
    """The text of the decode step, or of another; `changes` of the model that it is made for."""
    pretrained, programs = found.work.pretrained, found.work.programs
    program = program or programs.decode
    if changes:
        served = ServedModel(abstract=pretrained.abstract, sharding=pretrained.sharding, matmul_precision="highest")
        program = decode_program(replace(served, **changes), programs.cache, steps=1)
    assert found.mesh is not None
    text = program.lower(found.mesh.build(jax.devices()[:1])).compile().as_text()
    assert text is not None
    return text


def laid_out_anew(text: str) -> list[str]:
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* transpose\(", text)
    return [shape for shape in shapes if math.prod(map(int, shape.split(","))) >= SMALLEST]


def whole_rows(text: str) -> set[str]:
    """Shapes with all positions of a row that are not the cache's."""
    cache = (MODEL["num_layers"], ROWS, KV_HEADS, 2, LENGTH, SIZE)
    held = ",".join(map(str, cache))
    return {shape for shape in re.findall(r"f32\[([\d,]+)\]", text) if str(LENGTH) in shape.split(",")} - {held}


def copied_caches(text: str) -> list[str]:
    """Copies of the cache inside a loop: one for every token, or for every layer."""
    held = ",".join(map(str, (MODEL["num_layers"], ROWS, KV_HEADS, 2, LENGTH, SIZE)))
    bodies = [part for part in re.split(r"\n(?=\S)", text) if not part.startswith("ENTRY")]
    return [line for part in bodies for line in part.splitlines() if re.search(rf"= f32\[{held}\]\S* copy\(", line)]


def test_no_weight_is_laid_out_anew_and_no_position_is_read_that_nobody_has(tmp_path, devices):
    del devices
    found = plan(tmp_path)
    text = compiled(found)
    assert not laid_out_anew(text) and not whole_rows(text) and not copied_caches(text)
    # In the order of checkpoints, and at once, they are.
    own = found.work.pretrained
    as_stored = own.config.build(own.Vocab, key=jax.random.PRNGKey(0))
    text = compiled(found, abstract=jax.eval_shape(lambda: as_stored), sharding=own.sharding)
    assert laid_out_anew(text) and whole_rows(text)


def test_a_call_for_prompts_reads_no_position_that_nobody_has_either(tmp_path, devices):
    del devices
    found = plan(tmp_path)
    assert list(found.work.programs.prefill) == [(2, 8), (1, 16)]
    for program in found.work.programs.prefill.values():
        text = compiled(found, program)
        assert not whole_rows(text) and not copied_caches(text), program.name


def test_matrices_have_their_contracted_axes_first_on_cpus_alone(tmp_path):
    def axes(target: Target) -> dict[str, tuple[str, ...]]:
        found = leaves(plan(tmp_path, target).work.pretrained.abstract)
        return {leaf.path.rsplit(".", 2)[-2]: leaf.names for leaf in found if leaf.path.endswith("proj.weight")}

    heads = ("kv_head", "q_heads_per_group", "head_size")
    assert axes(CPU)["q_proj"] == ("layers", "embed", *heads) and axes(CPU)["o_proj"] == ("layers", *heads, "embed")
    assert axes(CPU)["down_proj"] == ("layers", "mlp", "embed")
    pod = axes(target_of_pod("v5e-1"))
    assert pod["q_proj"] == ("layers", *heads, "embed") and pod["o_proj"] == ("layers", "embed", *heads)
    assert pod["down_proj"] == ("layers", "embed", "mlp")


def test_a_pod_is_given_one_product_over_all_positions(tmp_path):
    def is_at_once(target: Target) -> bool:
        found = plan(tmp_path, target)
        own, programs = found.work.pretrained, found.work.programs
        served = ServedModel(
            abstract=own.abstract,
            sharding=own.sharding,
            matmul_precision=own.precision.matmul,
            matrix_unit=target.platform == "tpu",
        )
        assert served.cache_block is None and found.mesh is not None
        steps = (programs.decode, decode_program(served, programs.cache, steps=1))
        mine, plain = (each.lower(found.mesh.abstract(), platform=target.platform).as_text() for each in steps)
        return mine == plain

    assert is_at_once(target_of_pod("v5e-1")) and not is_at_once(CPU)
