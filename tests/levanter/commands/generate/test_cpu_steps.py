"""What a decode step on CPUs does not do, in the compiler's text: lay weights out anew or copy them, read positions
nobody has."""

import json
import math
import re
from dataclasses import replace

import jax
import pytest

from haliax_ext.abstract import leaves
from haliax_ext.planner import plan_sharding
from haliax_ext.program import Program
from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import GenerateWork
from levanter.config import load_written
from levanter.inference.programs import ServedModel, decode_program
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan, Target

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
CACHE = (MODEL["num_layers"], ROWS, KV_HEADS, 2, LENGTH, SIZE)
CPU = Target(name="local", platform="cpu", kind="cpu", devices=1, host_bytes=1 << 34)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """That model, as `transformers` saves it."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=EMBED,
        intermediate_size=MODEL["intermediate_dim"],
        num_hidden_layers=MODEL["num_layers"],
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=MODEL["vocab_size"],
        max_position_embeddings=LENGTH,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def plan(tmp_path, checkpoint):
    """What is planned for a target."""

    def planned(target: Target = CPU, *, mp: str = "f32", inference=None, **source) -> RunPlan[GenerateWork]:
        path = tmp_path / "plan.yaml"
        document = {
            **(source or {"hf_checkpoint": str(checkpoint)}),
            "tokenizer": "passthrough",
            "inference": {"max_rows": ROWS, "penalties": False, **(inference or {})},
            "trainer": {"mp": mp},
        }
        path.write_text(json.dumps(document))
        loaded = load_written(GenerateConfig, ["--config_path", str(path)])
        return generate.describe(loaded.config, target, written=loaded.written)

    return planned


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


def copied_matrices(text: str) -> list[str]:
    """Instructions that make an array with the axes of a matrix, of one layer or of all."""
    groups, mlp, layers = HEADS // KV_HEADS, MODEL["intermediate_dim"], MODEL["num_layers"]
    shapes = [(EMBED, mlp), (EMBED, KV_HEADS, SIZE), (EMBED, KV_HEADS, groups, SIZE), (EMBED, MODEL["vocab_size"])]
    shapes += [(EMBED, HEADS * SIZE), (EMBED, KV_HEADS * SIZE)]
    of_matrices = {tuple(sorted(more)) for shape in shapes for more in (shape, (*shape, layers))}
    found = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text)
    made = [(shape, op) for shape, op in found if op not in ("parameter", "get-tuple-element", "bitcast")]
    return [f"{op} {shape}" for shape, op in made if tuple(sorted(axes_of(shape))) in of_matrices]


def without(text: str, parts: list[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def axes_of(shape: str) -> list[int]:
    return [size for size in map(int, shape.split(",")) if size > 1]


def whole_rows(text: str) -> set[str]:
    """Shapes with all positions of a row that are not the cache's."""
    held = ",".join(map(str, CACHE))
    return {shape for shape in re.findall(r"f32\[([\d,]+)\]", text) if str(LENGTH) in shape.split(",")} - {held}


def copied_caches(text: str) -> list[str]:
    """Copies of the cache inside a loop: one for every token, or for every layer."""
    held = ",".join(map(str, CACHE))
    bodies = [part for part in re.split(r"\n(?=\S)", text) if not part.startswith("ENTRY")]
    return [line for part in bodies for line in part.splitlines() if re.search(rf"= f32\[{held}\]\S* copy\(", line)]


def test_no_weight_is_laid_out_anew_or_copied_and_no_position_is_read_that_nobody_has(plan, devices):
    del devices
    found = plan()
    text = compiled(found)
    assert not laid_out_anew(text) and not whole_rows(text) and not copied_caches(text) and not copied_matrices(text)
    # Of stacked layers in the order of checkpoints, and at once, they are.
    own = found.work.pretrained
    as_stored = jax.eval_shape(lambda: own.config.build(own.Vocab, key=jax.random.PRNGKey(0)))
    sharding = plan_sharding(leaves(as_stored), own.resolved.mappings, own.resolved.spec)
    text = compiled(found, abstract=as_stored, sharding=sharding)
    assert laid_out_anew(text) and whole_rows(text) and copied_matrices(text)


@pytest.mark.parametrize("mp", ["bfloat16", "p=f32,c=bfloat16"])
def test_nothing_of_16_bits_is_converted_in_a_step(plan, devices, mp):
    """XLA for CPUs converts what is scattered into (a cache and back, for each layer) and matrices of bfloat16 sums."""
    del devices
    found = plan(mp=mp)
    text = compiled(found)
    # What looks up rows of a table converts those alone, within itself.
    lookups = [part for part in re.split(r"\n(?=\S)", text) if " gather(" in part and part.startswith("%fused")]
    assert lookups and "bf16[" in text and not copied_matrices(without(text, lookups))
    assert not re.search(rf"bf16\[{','.join(map(str, CACHE))}\]", text) and not copied_caches(text)


def test_a_cache_has_the_compute_dtype_or_the_asked_one_and_on_cpus_float32_for_bfloat16(plan):
    v5e = pod_target("v5e-1")
    wanted = {
        (CPU, "f32", None): "float32",
        (CPU, "bfloat16", None): "float32",
        (CPU, "bfloat16", "bfloat16"): "bfloat16",
        (CPU, "bfloat16", "float16"): "float16",
        (v5e, "bfloat16", None): "bfloat16",
    }
    for (target, mp, dtype), expected in wanted.items():
        found = plan(target, mp=mp, inference={"cache_dtype": dtype})
        assert found.work.programs.cache.dtype == expected
        noted = [check for check in found.checks if check.name == "cache" and "bfloat16: XLA for CPUs" in check.message]
        assert bool(noted) == (target == CPU and expected == "bfloat16")


def test_a_call_for_prompts_reads_no_position_that_nobody_has_either(plan, devices):
    del devices
    found = plan()
    assert list(found.work.programs.prefill) == [(2, 8), (1, 16)]
    for program in found.work.programs.prefill.values():
        text = compiled(found, program)
        assert not whole_rows(text) and not copied_caches(text) and not copied_matrices(text), program.name


def test_a_cpu_has_a_matrix_for_each_layer_and_several_have_contracted_axes_first(plan):
    def axes(target: Target) -> dict[str, tuple[str, ...]]:
        found = leaves(plan(target).work.pretrained.abstract)
        return {leaf.path.partition(".self_attn.")[2]: leaf.names for leaf in found if ".self_attn." in leaf.path} | {
            leaf.path.partition(".mlp.")[2]: leaf.names for leaf in found if ".mlp." in leaf.path
        }

    heads = ("kv_head", "q_heads_per_group", "head_size")
    one = axes(CPU)
    for n in range(MODEL["num_layers"]):
        assert one[f"q_proj.weight.matrices.{n}.array"] == (*heads, "embed")
        assert one[f"o_proj.weight.matrices.{n}.array"] == ("embed", *heads)
        assert one[f"down_proj.weight.matrices.{n}.array"] == ("embed", "mlp")
    assert len(one) == 7 * MODEL["num_layers"]
    several = {path.removesuffix(".weight"): names for path, names in axes(replace(CPU, devices=2)).items()}
    assert several["q_proj"] == ("layers", "embed", *heads) and several["o_proj"] == ("layers", *heads, "embed")
    assert several["down_proj"] == ("layers", "mlp", "embed")
    pod = {path.removesuffix(".weight"): names for path, names in axes(pod_target("v5e-1")).items()}
    assert pod["q_proj"] == ("layers", *heads, "embed") and pod["o_proj"] == ("layers", "embed", *heads)
    assert pod["down_proj"] == ("layers", "embed", "mlp")


def test_a_pod_is_given_one_product_over_all_positions(plan):
    def is_at_once(target: Target) -> bool:
        found = plan(target)
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

    assert is_at_once(pod_target("v5e-1")) and not is_at_once(CPU)
