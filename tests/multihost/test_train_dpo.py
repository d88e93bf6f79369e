"""`train_dpo` as two processes: a reference that scores once, together, stores what one process stores."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.preference_runs import document, write_inputs
from helpers.processes import run_together

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def write_run(folder: Path, out: Path, said: Path) -> Path:
    """A run of three steps whose reference is another model than its policy, and scores before the first."""
    out.mkdir()
    reference = {"type": "precomputed", "model_path": str(folder / "other"), "cache_dir": str(said)}
    tracker = {"type": "json_file", "output_path": str(out / "logged")}
    made = document(folder, out, reference=reference, trainer={"tracker": tracker})
    path = out / "run.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def metrics(out: Path) -> dict[str, list[float]]:
    """Everything that is logged of pairs, step after step."""
    (file,) = (out / "logged").rglob("metrics.jsonl")
    found: dict[str, list[float]] = {}
    for line in file.read_text().splitlines():
        for name, value in json.loads(line).get("metrics", {}).items():
            if "loss" in name or "dpo" in name:
                found.setdefault(name, []).append(value)
    return found


def said_of(said: Path) -> np.ndarray:
    """The log-probabilities of the one set, without the digest behind them."""
    (part,) = said.rglob("part-*.f32")
    return np.frombuffer(part.read_bytes()[:-32], "<f4")


def test_a_precomputed_reference_of_two_processes(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_inputs(folder)
    outs = {count: tmp_path / str(count) for count in (1, 2)}
    for count, out in outs.items():
        run = write_run(folder, out, tmp_path / f"said-{count}")
        command = ["levanter.main.train_dpo", "--config_path", str(run)]
        run_together(out / "processes", count, command, devices=8 // count, cache=tmp_path / "cache")
    one, two = (metrics(out) for out in outs.values())
    assert one.keys() == two.keys() and {"train/loss", "train/dpo_margin_ref", "eval/loss"} <= one.keys()
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, atol=2e-5, err_msg=name)
    apart, together = said_of(tmp_path / "said-1"), said_of(tmp_path / "said-2")
    assert len(apart) == 2 * 40 and (apart < 0).all()
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    # Two processes take what one has stored: nothing is scored, and nothing is loaded for it.
    out = tmp_path / "again"
    command = ["levanter.main.train_dpo", "--config_path", str(write_run(folder, out, tmp_path / "said-1"))]
    ended = run_together(out / "processes", 2, command, devices=4, cache=tmp_path / "cache")
    assert "it is not loaded for them" in ended[0] and "scoring with the reference" not in ended[0]
    for name, values in one.items():
        np.testing.assert_allclose(metrics(out)[name], values, atol=2e-5, err_msg=name)
