"""Layers of different decode states over several processes: the texts of one process, and of the forward pass."""

import json

import jax
import pytest
from helpers import recurrent_in_processes
from helpers.processes import run_together
from helpers.recurrent import greedy_requests, recurrent_over_eight

from haliax_ext.meshspec import MeshSpec

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("count", [2, 4])
def test_texts_are_those_of_the_forward_pass(count, tmp_path):
    """More sequences than rows, prompts in parts, some evicted, some behind the snapshot of another."""
    command = [recurrent_in_processes.__file__, str(tmp_path)]
    run_together(tmp_path / "run", count, command, devices=8 // count)
    report = json.loads((tmp_path / "texts.json").read_text())
    assert report["comebacks"] > 0 and report["hits"] > 0 and not report["failed"]
    engine = recurrent_over_eight(MeshSpec.of(data=4, model=2))
    texts = {request: text for request, choice, text in report["texts"] if choice == 0}
    decided = sum(engine.check(list(one.tokens), texts[one.id]) for one in greedy_requests(2, 20))
    assert decided > 0.95 * sum(map(len, texts.values()))
    assert len(jax.devices()) == 8
