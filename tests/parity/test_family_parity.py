"""Every family against `transformers` + torch: the run's own plan, loader and Program; the export back again.

Sequences are longer than the windows and than the original context of scaled rotary embeddings, rows hold documents of
unequal lengths with padding behind them, and the vocabulary does not divide by the mesh.
"""

import copy
from functools import cache

import numpy as np
import pytest
from helpers.family_models import ESSENTIAL, VARIANTS, describe_folder, make_checkpoint, score, torch_logprobs
from safetensors.numpy import load_file

from levanter.compat.hf.export import export

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
    mesh = "heads" if mesh == "group" and not VARIANTS[name].grouped else mesh
    described = describe_folder(folder, mesh=mesh, positions=LENGTH)
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


@pytest.mark.parametrize("name", ESSENTIAL)
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


CUTS = {"2x4": 4, "group": 2, "one": 1}
"""What each mesh cuts key/value heads in."""
EVERYWHERE = [
    (name, mesh)
    for name, variant in VARIANTS.items()
    for mesh in CUTS
    if variant.changes.get("num_key_value_heads", 4) % CUTS[mesh] == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_every_variant_equals_transformers_on_every_mesh(name, mesh, folders, tmp_path):
    check_export(folders, name, *check(folders, name, mesh), tmp_path)
