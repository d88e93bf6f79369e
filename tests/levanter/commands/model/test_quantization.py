"""`quantize: int8` from a checkpoint to scores: which numbers are loaded, from where, and what they cost."""

from functools import cache

import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.family_models import describe_folder, layout, make_checkpoint, score
from safetensors.numpy import load_file, save_file

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Program
from levanter.commands.evaluate.eval_lm import score_program
from levanter.commands.model.pretrained import load_pretrained
from levanter.commands.model.sharding import NonFiniteWeightsError

LENGTH, BATCH = 48, 8
TOKENS = np.random.default_rng(7).integers(3, 250, (BATCH, LENGTH)).astype(np.int32)
SEGMENTS = np.zeros((BATCH, LENGTH), np.int32)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def made(name: str):
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(name, folder)
        return folder

    return made


def described(folder, name="", mesh="one", **how):
    return describe_folder(folder, mesh=layout(name, mesh) if name else mesh, positions=LENGTH, **how)


def loaded(model):
    return load_pretrained(model, model.resolved.spec.build(jax.devices()[:8]), show=False).arrays


def rows_of(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of the rows of a matrix as a file has it."""
    exact = matrix.astype(np.float32)
    scale = np.abs(exact).max(1) * np.float32(1 / 127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(exact * inverse[:, None]).astype(np.int8), scale


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2", "mixtral"))])
def test_numpys_integers_on_every_mesh(name, folder_of):
    """Every projection, expert and the head, whatever is sharded; all other arrays are as without."""
    folder = folder_of(name)
    tensors = load_file(folder / "model.safetensors")
    plain = described(folder, name)
    exact = loaded(plain)
    first = None
    for mesh in ("one", "group"):
        model = described(folder, name, mesh, quantize="int8")
        assert model.load_plan is not None and not model.sharding.errors
        arrays = {path: np.asarray(x) for path, x in loaded(model).items()}
        first = first or arrays
        for path, values in arrays.items():
            kept = slice(0, 262) if "vocab" in dict(model.sharding.by_path[path].leaf.axes) else slice(None)
            assert values[kept].tobytes() == first[path][kept].tobytes(), (mesh, path)
            assert not values[262:].any() or kept == slice(None), "rows that pad the vocabulary are 0"
    integers = {path for path in first if path.endswith(".weight.q")}
    kept = first.keys() - integers - {path[: -len("q")] + "scale" for path in integers}
    assert kept <= exact.keys() and all(first[path].tobytes() == np.asarray(exact[path]).tobytes() for path in kept)
    assert not any(path.endswith(("proj.weight", "lm_head.weight")) for path in kept)
    assert any("router" in path for path in kept) == (name == "mixtral")
    one = "transformer.layers.stacked" + (".places.0" if name == "gemma2" else "")
    experts = name == "mixtral"
    down = "model.layers.0.block_sparse_moe.experts.3.w2.weight" if experts else "model.layers.0.mlp.down_proj.weight"
    head = "model.embed_tokens.weight" if name == "gemma2" else "lm_head.weight"
    for path, source, shape in (
        (f"{one}.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight", (64, -1)),
        (f"{one}.mlp.down_proj.weight", down, (64, 96)),
        ("lm_head.weight", head, (262, 64)),
    ):
        q, scale = first[f"{path}.q"], first[f"{path}.scale"]
        if path != "lm_head.weight":
            q, scale = q[0], scale[0]
            q, scale = (q[3], scale[3]) if experts and "mlp" in path else (q, scale)
        expected = rows_of(tensors[source])
        # Where several axes are contracted (heads), they come first.
        q = q.reshape(-1, shape[0]).T if "o_proj" in path else q.reshape(shape)[: shape[0]]
        np.testing.assert_array_equal(q, expected[0])
        np.testing.assert_array_equal(scale[: shape[0]], expected[1])


# Of models with random weights, whose two best logits are often close: all positions, as measured. Scales for groups of
# input features do not change it (docs/log/2026-11.md); a real model keeps more (tests/parity/test_int8_smollm2.py).
LEAST = {"qwen2": 0.92, "qwen3": 0.94, "gemma": 0.95, "gemma2": 0.97}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_the_likeliest_token_is_the_same_but_where_two_are_nearly_as_likely(name, folder_of):
    exact, found = (logits_of(described(folder_of(name), name, quantize=quantize)) for quantize in (None, "int8"))
    first, second = np.argmax(exact, -1), np.argmax(found, -1)
    assert len(np.unique(first)) > 20, "the model's predictions must differ for this to say anything"
    assert np.mean(first == second) >= LEAST[name]
    best = np.sort(exact, -1)[..., -2:]
    gaps, noise = best[..., 1] - best[..., 0], (found - exact).std()
    assert noise < 0.06 * exact.std()
    # Where the two best are further apart than a difference of two logits moves, and wherever they are much further.
    clear = gaps > 2**0.5 * noise
    assert clear.mean() > 0.8 and np.mean(first[clear] == second[clear]) >= 0.97
    np.testing.assert_array_equal(first[gaps > 4 * noise], second[gaps > 4 * noise])


def logits_of(model) -> np.ndarray:
    """`[batch, position, vocab]`, by a Program of its own."""
    mesh = model.resolved.spec.build(jax.devices()[:8])

    def logits(module, ids):
        return module.logits(module(ids).activations).rearrange(("batch", "position", "vocab"))["vocab", 0:262]

    axes = (hax.Axis("batch", BATCH), hax.Axis("position", LENGTH))
    program = Program(
        name="logits",
        function=logits,
        inputs=(
            Input(name="model", value=model.abstract, placement=model.sharding),
            Input(
                name="tokens",
                value=hax.NamedArray(jax.ShapeDtypeStruct(TOKENS.shape, np.int32), axes),
                placement=model.resolved.mappings.compute,
            ),
        ),
        mappings=model.resolved.mappings,
        out_placement=AxisMapping(),
    )
    spec = model.resolved.mappings.compute.spec(("batch", "position"))
    placed = hax.NamedArray(jax.device_put(TOKENS, jax.NamedSharding(mesh, spec)), axes)
    return np.asarray(program.jit(mesh)(with_arrays(model.abstract, loaded(model)), placed).array)


def test_the_plan_says_the_bytes_and_the_compiler_agrees(folder_of):
    model = described(folder_of("gemma2"), "gemma2", "2x4", quantize="int8", mp="bfloat16")
    (said,) = (check.message for check in model.checks if check.name == "int8")
    own = leaves(model.abstract)
    q = sum(leaf.nbytes for leaf in own if leaf.path.endswith(".q"))
    scales = sum(leaf.nbytes for leaf in own if leaf.path.endswith(".scale"))
    others = sum(leaf.nbytes for leaf in own) - q - scales
    table = 264 * 64 * 2
    assert f"bytes: {q:,} of integers, {scales:,} of scales, {others:,} of other leaves, of which {table:,} in" in said
    # Five layers of four heads, and the head beside the table that it is tied to.
    assert q == 5 * (2 * 64 * 8 * 16 + 2 * 64 * 4 * 16 + 3 * 64 * 96) + 264 * 64
    assert "load.derive.lm_head.weight" in {program.name for program in model.load_plan.programs}
    here = [sum_of(model, ".q"), sum_of(model, ".scale"), sum_of(model, "")]
    assert said.endswith(f"on each device {here[0]:,}, {here[1]:,}, {here[2] - here[0] - here[1]:,}")
    program = score_program(model, rows=BATCH, positions=LENGTH)
    memory = program.lower(model.resolved.spec.build(jax.devices()[:8])).compile().memory_analysis()
    batch = 3 * BATCH * LENGTH * 4 // 2
    assert memory.argument_size_in_bytes == pytest.approx(here[2] + batch, rel=0.03)


def sum_of(model, ending: str) -> int:
    return sum(plan.bytes_per_device for plan in model.sharding.leaves if plan.leaf.path.endswith(ending))


@pytest.mark.slow
def test_a_tied_head_may_share_the_table(folder_of):
    copied, shared = (
        described(folder_of("gemma2"), "gemma2", quantize="int8", tied_head=tied) for tied in ("copy", "share")
    )
    assert {leaf.path for leaf in leaves(copied.abstract)} - {leaf.path for leaf in leaves(shared.abstract)} == {
        "lm_head.weight.q",
        "lm_head.weight.scale",
    }
    table = np.asarray(loaded(shared)["embeddings.token_embeddings.weight"])
    np.testing.assert_array_equal(np.asarray(loaded(copied)["embeddings.token_embeddings.weight"]), table)
    _, with_copy = score(copied, TOKENS, SEGMENTS)
    _, with_table = score(shared, TOKENS, SEGMENTS)
    assert 0 < np.abs(with_copy - with_table).max() < 1


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (np.float16, np.float64))],
)
def test_other_dtypes_are_quantized_as_they_are_stored(dtype, folder_of, tmp_path):
    """And not as they would be in the compute dtype."""
    source = folder_of("qwen2")
    for file in source.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(
                file.read_text().replace('"dtype": "float32"', f'"dtype": "{np.dtype(dtype).name}"')
            )
    tensors = {name: x.astype(dtype) for name, x in load_file(source / "model.safetensors").items()}
    if dtype == ml_dtypes.bfloat16:
        import torch
        from safetensors.torch import save_file as save_torch

        save_torch(
            {n: torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16) for n, x in tensors.items()},
            tmp_path / "model.safetensors",
        )
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    arrays = loaded(described(tmp_path, "qwen2", "2x4", quantize="int8", mp="bfloat16"))
    q, scale = rows_of(tensors["lm_head.weight"])
    np.testing.assert_array_equal(np.asarray(arrays["lm_head.weight.q"])[:262], q)
    np.testing.assert_array_equal(np.asarray(arrays["lm_head.weight.scale"])[:262], scale)


def test_weights_that_are_not_finite_are_refused_as_ever(folder_of, tmp_path):
    source = folder_of("qwen2")
    for file in source.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 6] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        NonFiniteWeightsError, match=r"up_proj\.weight \(model\.layers\.1\.mlp\.up_proj\.weight\): 1 NaN"
    ):
        loaded(described(tmp_path, "qwen2", quantize="int8"))
