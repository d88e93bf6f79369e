"""`plan --search` for runs that generate text: what it says to paste is a run with the rows that it promised."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.generate import describe
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.main import plan
from levanter.plan import compile_pool
from levanter.plan.search.decode import search_decode
from levanter.plan.search.space import with_candidate
from levanter.plan.target_from_name import pod_target

CONFIG = Path(__file__).parents[3] / "config/generate/llama3.1_70b_int8.yaml"


@pytest.mark.parametrize("goal", ["max_rows", "latency_ms", "tokens_per_second"])
@pytest.mark.parametrize("target", ["v5e-8", "v6e-16"])
def test_the_answer_is_a_run_as_promised(target, goal):
    pod = parse_accelerator(target)
    mesh = ["--trainer.mesh.axes", "{data: -1, model: 8}"]
    loaded = load_written(GenerateConfig, ["--config_path", str(CONFIG), *mesh])
    own = describe(loaded.config, pod_target(pod), written=loaded.written)
    best = search_decode(own.work.serving, pod, goal, limit=pod.hbm_bytes, compile_layout=None).best
    assert best is not None
    # As a compile worker is told.
    told = json.loads(json.dumps({"candidate": dataclasses.asdict(best.candidate), "candidate_keys": best.keys}))
    found = describe(with_candidate(loaded.config, told), pod_target(pod), written=loaded.written)
    assert not found.errors
    served = found.work.serving
    assert (served.rows, served.dtype, served.shards) == (best.rows, best.served.dtype, best.served.shards)
    assert served.weights.total == pytest.approx(best.served.weights.total, rel=0.005)
    assert served.bytes_per_row(8192) == best.served.bytes_per_row(8192)
    assert served.weights.total + served.cache_bytes <= pod.hbm_bytes


@pytest.mark.parametrize(("target", "name"), [("v5e-8", "v5litepod-8"), ("h100x8", "h100x8")])
def test_a_search_without_a_compiler(target, name, capsys, tmp_path, monkeypatch):
    """Arithmetic alone: no compile worker starts, on TPUs and GPUs."""

    def started(*args, **options):
        raise AssertionError("a compile worker was started")

    monkeypatch.setattr(compile_pool.subprocess, "Popen", started)
    out = tmp_path / "plan.json"
    words = ["generate", "--config_path", str(CONFIG), "--target", target, "--no-compile", "--search"]
    assert plan.main([*words, "--goal", "max_rows", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"search on {name} for max_rows: " in said and "why not its neighbours:" in said
    other = "GPU" if name.startswith("v") else "chip"
    assert re.search(rf"\b{other}s?\b", said) is None
    (found,) = json.loads(out.read_text())["searches"]
    assert found["goal"] == "max_rows" and found["best"]["inference.cache_dtype"] == "int8"
