"""Every family against `transformers` + torch: the run's own plan, loader and Program; the export back again.

Sequences are longer than the windows and than the original context of scaled rotary embeddings, rows hold documents of
unequal lengths with padding behind them, and the vocabulary does not divide by the mesh.
"""

import copy
from functools import cache

import jax
import numpy as np
import pytest
from helpers.family_models import (
    ALL_MESHES,
    ESSENTIAL,
    VARIANTS,
    describe_folder,
    layout,
    make_checkpoint,
    score,
    torch_logprobs,
    transformers_config,
)
from safetensors import safe_open
from safetensors.numpy import load_file

from haliax_ext.abstract import with_arrays
from levanter.commands.model.pretrained import load_pretrained
from levanter.compat.hf.config_bridge import read_config
from levanter.compat.hf.export import export
from levanter.layers.rotary import DefaultRotaryConfig
from levanter.models.registry import families_of_config_json

LENGTH, BATCH = 48, 8
ENDS = 2 * ([30, 43], [48], [11, 40], [5, 16, 48])
"""Where the documents of each row end; what is behind the last one is padding."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of checkpoints by variant, with the torch model, its tokens and log-probabilities; each is made once."""

    @cache
    def made(name: str):
        folder = tmp_path_factory.mktemp(name)
        model = make_checkpoint(name, folder)
        tokens = np.random.default_rng(7).integers(3, 250, (BATCH, LENGTH)).astype(np.int32)
        segments = np.zeros((BATCH, LENGTH), np.int32)
        if not VARIANTS[name].by_length:
            for row, ends in enumerate(ENDS):
                for number, end in enumerate(ends, 1):
                    segments[row, end:] = number if end != ends[-1] else -1
        return folder, model, tokens, segments, torch_logprobs(model, tokens, segments)

    return made


def check(folders, name: str, mesh: str):
    folder, _, tokens, segments, expected = folders(name)
    described = describe_folder(folder, mesh=layout(name, mesh), positions=LENGTH)
    assert not described.origin.checkpoint.findings, [str(finding) for finding in described.origin.checkpoint.findings]
    runs = tuple((len(run.places), run.periods) for run in described.config.runs)
    assert runs == VARIANTS[name].runs
    loaded, found = score(described, tokens, segments)
    assert np.std(expected[segments >= 0]) > 0.5, "the model's predictions must differ for this to say anything"
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    return described, loaded


def check_export(folders, name: str, described, loaded, where):
    import torch
    import transformers

    folder, model, tokens, *_ = folders(name)
    written = export(loaded, described.config, where / "out")
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        written, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    mine, original = load_file(written / "model.safetensors"), load_file(folder / "model.safetensors")
    assert mine.keys() == original.keys()
    for key, tensor in original.items():
        assert mine[key].tobytes() == tensor.tobytes(), key
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        assert torch.equal(theirs.eval()(ids).logits, model(ids).logits)


IN_ANY_TEST_RUN = ("gpt2", "mixtral", "qwen3", "gemma3", "olmo2", "phi3", "gpt_neox")
"""Whatever layers have of their own is in one of these; test_llama_parity.py has Llama in plenty."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_ANY_TEST_RUN else pytest.mark.slow)
        for name in ESSENTIAL
        if name != "llama"
    ],
)
def test_equals_transformers_in_and_out(name, folders, tmp_path):
    mesh = "2x4" if ESSENTIAL.index(name) % 2 else "group"
    check_export(folders, name, *check(folders, name, mesh), tmp_path)


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in ESSENTIAL if n != "gemma2")]
)
def test_bfloat16_is_as_near_to_float32_as_in_torch(name, folders):
    """In root mean square, at most 1.5 times as far as torch's own bfloat16."""
    import torch

    folder, model, tokens, segments, expected = folders(name)
    described = describe_folder(folder, mesh="2x4", mp="bfloat16", positions=LENGTH)
    _, found = score(described, tokens, segments)
    theirs = torch_logprobs(copy.deepcopy(model).to(torch.bfloat16), tokens, segments)

    def distance(x):
        return np.sqrt(np.mean(np.square(x - expected)))

    assert distance(theirs) > 1e-3, "bfloat16 must matter for this to say anything"
    assert distance(found) < 1.5 * distance(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ALL_MESHES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_transformers_on_every_mesh(name, mesh, folders, tmp_path):
    check_export(folders, name, *check(folders, name, mesh), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESSENTIAL)
def test_bfloat16_files_come_back_byte_for_byte(name, folders, tmp_path):
    import torch

    model = copy.deepcopy(folders(name)[1]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    described = describe_folder(tmp_path / "in", mesh=layout(name, "2x4"), mp="bfloat16", positions=LENGTH)
    mesh = described.resolved.spec.build(jax.devices()[:8])
    loaded = with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)
    written = export(loaded, described.config, tmp_path / "out")
    with (
        safe_open(written / "model.safetensors", "pt") as mine,
        safe_open(tmp_path / "in" / "model.safetensors", "pt") as original,
    ):
        assert set(mine.keys()) == set(original.keys())
        for key in sorted(original.keys()):
            found, expected = mine.get_tensor(key), original.get_tensor(key)
            assert found.dtype == expected.dtype == torch.bfloat16
            assert (found.view(torch.int16) == expected.view(torch.int16)).all(), key


def hard_inputs(name: str) -> set[str]:
    """Which of the inputs that this file is about are such for a variant."""
    config = read_config({k: v for k, v in transformers_config(name).to_dict().items() if v is not None}).config
    found = set()
    if any(window is not None and window < LENGTH for window in map(config.window, range(config.num_layers))):
        found.add("longer than the window")
    for rope in config.ropes.values():
        # One that turns the other way is around another one.
        rope = getattr(rope, "inner", rope)
        original = getattr(rope, "original_max_position_embeddings", config.max_seq_len / rope.factor)
        if not isinstance(rope, DefaultRotaryConfig) and original < LENGTH:
            found.add("longer than the original context")
    if not VARIANTS[name].by_length:
        found.add("packed, padded, of unequal lengths")
    if config.vocab_size % 4:
        found.add("a vocabulary that the mesh does not divide")
    return found


KNOWN_TO_TRANSFORMERS = [
    name for name in families_of_config_json("llama") if name != "gemma3" and not name.startswith("levanter_")
]
"""Gemma 3 is `gemma3_text` there; documents of our own are ours alone."""


@pytest.mark.parametrize("model_type", KNOWN_TO_TRANSFORMERS)
def test_every_family_meets_every_hard_input(model_type):
    """But those that its kind of model cannot have: `transformers` has no field for it."""
    fields = pytest.importorskip("transformers").CONFIG_MAPPING[model_type]().to_dict()
    expected = {"packed, padded, of unequal lengths", "a vocabulary that the mesh does not divide"}
    if "sliding_window" in fields:
        expected.add("longer than the window")
    if "rope_parameters" in fields:
        expected.add("longer than the original context")
    own = [name for name in VARIANTS if transformers_config(name).model_type == model_type]
    assert any(name in ESSENTIAL for name in own)
    assert set().union(*map(hard_inputs, own)) == expected
