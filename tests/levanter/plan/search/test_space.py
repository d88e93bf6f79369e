"""`plan --search`: candidates are the run's own configuration under other layouts, and what takes long is said."""

import json
from types import SimpleNamespace

import pytest
from helpers.hf_folder import TEXTS, write_folder

from levanter.commands.evaluate import eval_lm
from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.plan.preflight.state import Question
from levanter.plan.search import space
from levanter.plan.target_from_name import pod_target


def evaluation(tmp_path):
    """The configuration of an evaluation whose model is there."""
    write_folder(tmp_path / "model")
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "\n".join(TEXTS) * 9}) + "\n")
    document = {
        "hf_checkpoint": str(tmp_path / "model"),
        "max_eval_length": 32,
        "data": {"components": {"docs": {"source": {"validation_urls": [str(tmp_path / "docs.jsonl")]}}}},
        "trainer": {"mp": "f32", "mesh": {"axes": {"data": -1, "model": 2}}},
    }
    (tmp_path / "eval.yaml").write_text(json.dumps(document))
    return parse(eval_lm.EvalLmConfig, paths=[str(tmp_path / "eval.yaml")])


def test_candidates_are_described_and_their_compilation_is_said(tmp_path, monkeypatch):
    config = evaluation(tmp_path)
    pod = parse_accelerator("v4-8")
    target = pod_target(pod)
    described, said = [], []

    def compiled(asked, *, progress):
        progress("describing the run")
        progress("compiling score for v4-8")
        described.append((asked.payload["candidate"], asked.describe(target)))
        return SimpleNamespace(programs=(), headline="not compiled here")

    ahead = []
    monkeypatch.setattr(space, "preflight", compiled)
    monkeypatch.setattr(space, "compile_ahead", lambda function, runs, **how: ahead.append((runs, how)))
    question = Question(target="v4-8", describe=lambda t: None, provider="", payload={})
    result = space.search_layouts(
        question,
        config=config,
        describe=eval_lm.describe,
        plan=eval_lm.describe(config, target),
        pod=pod,
        say=said.append,
    )
    assert result.best is None and result.compiled and len(described) == len(result.compiled)
    for candidate, plan in described:
        assert plan.exit_code == 0
        assert [plan.mesh.shape[axis] for axis in ("data", "model")] == [candidate["data"], candidate["model"]]
    assert len({json.dumps(candidate) for candidate, _ in described}) == len(described)
    assert said.count("  compiling score for v4-8") == len(described)
    assert not any("describing" in line for line in said)
    # The first of them are handed over together, with what describes them in a worker.
    runs, how = ahead[0]
    first = described[: len(runs)]
    assert len(runs) > 1 and how["programs"] == ("score",) and how["target"] == pod
    assert [run.payload["candidate"] for run in runs] == [candidate for candidate, _ in first]
    assert [run.plan.mesh for run in runs] == [plan.mesh for _, plan in first]
    # Where nothing is kept for the user, it is kept for as long as the search takes.
    assert not how["kept"].folder.exists()


@pytest.mark.parametrize("name", ["v4-8", "h100x8"])
def test_without_compilation_arithmetic_ranks(name, tmp_path, monkeypatch):
    def compiled(*args, **options):
        raise AssertionError("a layout was compiled")

    monkeypatch.setattr(space, "preflight", compiled)
    monkeypatch.setattr(space, "compile_ahead", compiled)
    config, pod = evaluation(tmp_path), parse_accelerator(name)
    result = space.search_layouts(
        Question(target=name, describe=lambda t: None, provider="", payload={}, compile=False),
        config=config,
        describe=eval_lm.describe,
        plan=eval_lm.describe(config, pod_target(pod)),
        pod=pod,
        say=lambda text: None,
    )
    assert result.best is not None and result.ranked and not result.compiled
