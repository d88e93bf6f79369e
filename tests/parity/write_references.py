"""Writes tiny checkpoints and the log-probabilities that transformers computes for them, for `check_references.py`.

    python tests/parity/write_references.py FOLDER

The environment of `make test` has torch and writes them; that of `make test-newest`, with the newest Python and JAX,
has none and reads them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from helpers.family_models import make_checkpoint, torch_logprobs

NAMES = ("llama", "gemma2", "mixtral")


def main(folder: Path) -> None:
    """Writes one folder a family: the checkpoint, and `expected.npz`."""
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        model = make_checkpoint(name, folder / name)
        tokens = np.random.default_rng(11).integers(3, 250, (8, 48)).astype(np.int32)
        # Two documents a row; the first end at different positions.
        segments = np.stack([(np.arange(48) >= 20 + 3 * row).astype(np.int32) for row in range(8)])
        expected = torch_logprobs(model, tokens, segments)
        np.savez(folder / name / "expected.npz", tokens=tokens, segments=segments, logprobs=expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
