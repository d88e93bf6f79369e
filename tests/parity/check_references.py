"""Three families against log-probabilities that transformers computed in another environment (`make test-newest`)."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.family_models import describe_folder, layout, score

FOLDERS = sorted(Path(os.environ["REFERENCES"]).iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("mesh", ["one", "2x4"])
def test_equals_transformers(folder: Path, mesh: str):
    expected = np.load(folder / "expected.npz")
    described = describe_folder(folder, mesh=layout(folder.name, mesh), positions=expected["tokens"].shape[1])
    _, scores = score(described, expected["tokens"], expected["segments"])
    assert np.std(expected["logprobs"]) > 0.5, "the model's predictions must differ for this to say anything"
    np.testing.assert_allclose(scores, expected["logprobs"], atol=2e-4, rtol=0)


def test_there_are_references():
    assert [folder.name for folder in FOLDERS] == ["gemma2", "llama", "mixtral"]
