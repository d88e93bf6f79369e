"""No test of this folder reaches a real gcloud, Slurm or settings file, whatever is installed here."""

from pathlib import Path

import pytest

_FORBIDDEN = ("gcloud", "sbatch", "srun", "scontrol", "docker", "sudo")


@pytest.fixture(autouse=True)
def nothing_real(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH begins with programs that fail loudly; the home folder is empty; no variable of ours is forwarded."""
    folder = tmp_path_factory.mktemp("nothing_real")
    for name in _FORBIDDEN:
        (folder / name).write_text(f'#!/bin/sh\necho "a test called {name} without a stand-in: $*" >&2\nexit 99\n')
        (folder / name).chmod(0o755)
    home = folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(home / "gcloud"))
    monkeypatch.setenv("PATH", f"{folder}:{Path('/usr/bin')}:/bin")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return home
