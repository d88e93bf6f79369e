"""The five stages: what each finds, what the others still do, and the exit code that comes of it.

Runs are small and real (`eval_lm`, `train_lm` on CPU devices or on named pods without compiling); ways in which a
compiler ends are those of `tests/aot/described_programs.py`.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.hf_folder import CONFIG, TEXTS, write_folder

from haliax_ext.hlo import OutOfMemory, read_out_of_memory
from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.evaluate import eval_lm
from levanter.commands.train.lm import train_lm
from levanter.config import load_written, parse
from levanter.plan import aot, compilers
from levanter.plan.aot import Compiled, Refused
from levanter.plan.preflight import compile
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.report import render, to_html
from levanter.plan.target_from_name import pod_target
from levanter.runplan import Target

PROGRAMS = Path(__file__).parents[3] / "aot" / "described_programs.py"
GIB = 1 << 30
CPU8 = Target(name="local", platform="cpu", kind="cpu", devices=8)
MODEL = {"type": "llama", "hidden_dim": 512, "intermediate_dim": 1024, "num_layers": 4, "num_heads": 8,
         "num_kv_heads": 4, "vocab_size": 1024, "max_seq_len": 64}  # fmt: skip
STAGES = ["config", "sharding", "loading", "compile", "cost"]


def training(tmp_path, **keys) -> str:
    document = {
        "model": dict(MODEL),
        "data": {"tokenizer": "passthrough", "vocab_size": 1024},
        "trainer": {"train_batch_size": 16, "num_train_steps": 7, "log_dir": str(tmp_path)},
    }
    for dotted, value in keys.items():
        at = document
        *path, last = dotted.split("__")
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def question(entry_point: str, path: str, target: str, *words: str, **options) -> Question:
    argv = ["--config_path", path, *words]
    described = ENTRY_POINTS[entry_point].load()
    loaded = load_written(described.config, argv)
    return Question(
        **{
            "target": target,
            "describe": lambda where: described.describe(loaded.config, where, written=loaded.written),
            "provider": "levanter.main.plan:describe",
            "payload": {"entry_point": entry_point, "argv": argv},
            "local": lambda: CPU8,
            "compile": False,
            **options,
        }
    )


@pytest.fixture
def evaluation(tmp_path):
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model")
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "\n".join(TEXTS) * 20}) + "\n")
    document = {
        "hf_checkpoint": str(tmp_path / "model"),
        "max_eval_length": 32,
        "data": {"components": {"docs": {"source": {"validation_urls": [str(tmp_path / "docs.jsonl")]}}}},
        "trainer": {
            "mp": "f32",
            "log_dir": str(tmp_path / "logs"),
            "per_device_eval_parallelism": 1,
            "mesh": {"axes": {"data": -1, "model": 2}},
        },
    }
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def test_a_run_is_asked_in_five_stages(evaluation):
    said = []
    verdict = preflight(question("eval_lm", evaluation, "v4-16"), progress=said.append)
    assert [stage.name for stage in verdict.stages] == STAGES
    assert [stage.status for stage in verdict.stages] == ["ok", "ok", "ok", "skipped", "skipped"]
    assert verdict.exit_code == 0 and verdict.fits is None
    assert verdict.accelerator is not None and verdict.accelerator.name == verdict.target == "v4-16"
    assert verdict.headline.startswith("not compiled: ") and "KiB of 30.75 GiB a chip" in verdict.headline
    assert all(any(line.startswith(f"{name}: ") for line in said) for name in STAGES)
    (program,) = verdict.programs
    assert (program.name, program.outcome, program.time) == ("score", None, None)


def test_how_often_a_batch_is_scored(evaluation, tmp_path):
    def workload(*words):
        (found,) = plan_of("eval_lm", evaluation, *words).workloads
        return found

    def plan_of(entry_point, path, *words):
        found = preflight(question(entry_point, path, "v4-16", *words)).plan
        assert found is not None
        return found

    # 8 chips as data 4 × model 2: four rows of 32 tokens a batch. Rows of the text that is here are counted.
    described = plan_of("eval_lm", evaluation)
    tokens = len(described.work.pretrained.tokenizer.encode_batch(["\n".join(TEXTS) * 20])[0]) + 2
    rows = -(-(tokens - 1) // 31)
    assert workload().executions == -(-rows // 4) and workload().tokens == 128
    # 2 layers, 32 → 4 heads of 8, 2 KV heads, MLP 48, vocabulary 320: multiply-adds of the matmuls, by hand.
    matmul = 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) + 320 * 32
    assert workload().flops_full == 128 * (2 * matmul + 4 * 2 * 32 * 32)
    assert workload().flops_causal == 128 * (2 * matmul + 4 * 2 * 32 * 33 / 2)
    # `plan.assume_tokens` wins over the text: 999 tokens after the first make 33 rows, and those nine batches of four.
    assert workload("--plan.assume_tokens", "1000").executions == 9
    assert workload("--plan.assume_tokens", "1000", "--trainer.max_eval_batches", "2").executions == 2
    (tmp_path / "docs.jsonl").unlink()
    assert workload().executions is None and "assume_tokens" in workload().reason
    assert workload("--plan.assume_tokens", "1000").reason == "1,000 tokens (plan.assume_tokens)"


def test_steps_of_a_training_run(tmp_path):
    path = training(tmp_path, trainer__train_batch_size=[{"start": 0, "value": 8}, {"start": 3, "value": 16}])
    verdict = preflight(question("train_lm", path, "v4-16"))
    assert verdict.plan is not None
    small, large = verdict.plan.workloads
    assert (small.program, small.executions, small.tokens) == ("train_step", 3, 8 * 64)
    assert (large.program, large.executions, large.tokens) == ("train_step_from_3", 4, 16 * 64)
    # Six FLOPs a weight and token, and attention over 64 keys: 12 · L · H · head_size · S.
    matmul = 4 * (512 * 512 * 2 + 2 * 512 * 256 + 3 * 512 * 1024) + 1024 * 512
    assert small.flops_full == pytest.approx(8 * 64 * (6 * matmul + 12 * 4 * 512 * 64))


def test_what_is_not_here_is_listed_or_refused(evaluation, tmp_path):
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "docs.jsonl").unlink()
    verdict = preflight(question("eval_lm", evaluation, "v4-16"))
    config = verdict.stages[0]
    assert (verdict.exit_code, config.status) == (0, "unchecked")
    assert [finding.split(":")[0] for finding in config.findings] == ["text", "weights", "tokenizer"]
    # Loading is planned all the same: bf16 in the file, read once by one of two hosts' worth of devices.
    assert verdict.load is not None and verdict.plan is not None
    assert verdict.load.source_bytes == 2 * verdict.plan.sharding.total_bytes // 4
    refused = preflight(question("eval_lm", evaluation, "v4-16", require_inputs=True))
    assert (refused.exit_code, refused.stages[0].status) == (2, "refused")
    assert [stage.name for stage in refused.stages] == STAGES
    assert refused.headline.startswith("refused (config): ")


def test_a_run_that_cannot_be_described(evaluation):
    verdict = preflight(question("eval_lm", evaluation, "v4-16", "--trainer.mesh.axes.model", "3"))
    assert (verdict.exit_code, verdict.plan, verdict.budget) == (2, None, None)
    assert [stage.status for stage in verdict.stages] == ["refused"]
    assert verdict.headline.startswith("cannot be planned: ")


def test_devices_that_cannot_be_counted(evaluation, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    verdict = preflight(question("eval_lm", evaluation, "local", local=aot.devices_here))
    assert (verdict.exit_code, verdict.stages[0].status) == (4, "crashed")
    assert "no_such_platform" in verdict.stages[0].findings[0]


def test_the_devices_here_are_counted_in_the_worker():
    found = aot.devices_here()
    assert (found.name, found.platform, found.devices, found.hosts, found.hbm_bytes) == ("local", "cpu", 8, 1, None)


def test_bad_data_does_not_keep_the_model_from_being_planned(evaluation, tmp_path):
    (tmp_path / "docs.jsonl").write_text("{broken\n")
    verdict = preflight(question("eval_lm", evaluation, "v4-16"))
    assert (verdict.exit_code, verdict.stages[0].status) == (2, "refused")
    assert "docs.jsonl" in verdict.stages[0].findings[0]
    assert verdict.stages[1].status == "ok" and verdict.budget is not None


def test_replication_is_refused_and_the_rest_is_computed(evaluation):
    # An accelerator so small that whole embeddings are a large part of it.
    verdict = preflight(question("eval_lm", evaluation, "v4-16", "--trainer.mesh.hbm_gib", "0.0001"))
    assert verdict.exit_code == 3
    sharding = verdict.stages[1]
    assert sharding.status == "refused" and any("is replicated over" in finding for finding in sharding.findings)
    assert verdict.stages[2].status == "skipped"
    assert verdict.budget is not None and verdict.budget.arguments["score"] > 0


def test_inputs_beyond_memory_are_not_compiled(tmp_path):
    path = training(tmp_path, model__num_layers=400, model__hidden_dim=8192, model__intermediate_dim=32768)
    verdict = preflight(question("train_lm", path, "v4-8", compile=True, provider="nowhere:nothing"))
    assert verdict.exit_code == 3
    assert (
        verdict.headline.startswith("does not fit: ") and "> 30.75 GiB (inputs of train_step alone)" in verdict.headline
    )
    compile_ = verdict.stages[3]
    assert compile_.status == "skipped" and "not needed" in compile_.message


def test_gpus_by_arithmetic_alone(evaluation):
    verdict = preflight(question("eval_lm", evaluation, "h100x8", compile=False))
    assert verdict.exit_code == 0 and verdict.stages[3].status == "skipped"
    # A time all the same, and wherever it is shown the word for what it is.
    (score,) = (program for program in verdict.programs if program.name == "score")
    assert score.time is not None and score.time.calibration.estimate and score.mfu is not None
    assert verdict.headline.endswith("(an estimate, not measured)") and verdict.headline.startswith("not compiled: ")
    assert verdict.stages[4].message.endswith("(an estimate, not measured)")
    text = " ".join(render([verdict]).split())
    assert text.count("an estimate, not measured") >= 4 and "compute and memory" in text
    assert "(estimate)" in render([verdict, verdict])
    page = to_html([verdict])
    assert "an estimate, not measured" in page
    # One word for what a plan counts.
    assert "GPU" in text and all(re.search(r"\bchips?\b", shown) is None for shown in (text, page))


@pytest.mark.parametrize(("target", "unit", "other"), [("h100x8", "GPU", "chip"), ("v4-8", "chip", "GPU")])
def test_a_refusal_names_what_it_counts(target, unit, other, tmp_path):
    path = training(tmp_path, model__num_layers=400, model__hidden_dim=8192, model__intermediate_dim=32768)
    verdict = preflight(question("train_lm", path, target, compile=False))
    text, page = " ".join(render([verdict]).split()), to_html([verdict])
    assert verdict.exit_code == 3 and f"on a {unit}" in text and f"{unit}s" in text
    assert all(re.search(rf"\b{other}s?\b", shown) is None for shown in (text, page))


def test_without_the_tpu_compiler(evaluation, monkeypatch):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    verdict = preflight(question("eval_lm", evaluation, "v4-16", compile=True))
    assert verdict.exit_code == 2
    assert "pip install 'levanter-fork[plan]'" in verdict.stages[3].findings[0]
    assert [stage.status for stage in verdict.stages[:3]] == ["ok"] * 3


@pytest.mark.parametrize(
    ("function", "code", "status", "message"),
    [
        ("aborts", 4, "crashed", "was killed by SIGABRT (program doomed)"),
        ("bad_input", 2, "refused", "heads 12 do not divide by model 8"),
    ],
)
def test_how_a_compile_ends(evaluation, function, code, status, message):
    asked = question("eval_lm", evaluation, "local", compile=True, scope="all", provider=f"{PROGRAMS}:{function}")

    def describe(target):
        # The worker describes what the tests' own provider does: a program of this name.
        plan = asked.describe(target)
        return replace(plan, computing=(replace(plan.computing[0], name="doomed"),), workloads=())

    verdict = preflight(replace(asked, describe=describe))
    assert (verdict.exit_code, verdict.stages[3].status) == (code, status)
    assert message in verdict.stages[3].message
    if code == 4:
        assert any("check failed" in line for line in verdict.stages[3].findings)


def test_compiled_for_the_devices_here(evaluation):
    verdict = preflight(question("eval_lm", evaluation, "local", compile=True))
    (program,) = verdict.programs
    assert verdict.exit_code == 0 and verdict.fits
    assert isinstance(program.outcome, Compiled) and verdict.budget is not None
    # Arithmetic and compiler agree to the byte.
    assert program.outcome.memory.argument == verdict.budget.arguments["score"]
    assert verdict.headline.startswith("fits: ") and "a device" in verdict.headline
    # A device with less than that, but more than the inputs: compiled, and found not to fit.
    limit = (program.outcome.memory.argument + (program.peak_bytes or 0)) // 2
    tight = question("eval_lm", evaluation, "local", compile=True, local=lambda: replace(CPU8, hbm_bytes=limit))
    refused = preflight(replace(tight, require_inputs=True))
    assert refused.exit_code == 3 and "score does not fit" in refused.stages[3].message
    # This compiler refuses nothing by itself; what takes the room is said all the same.
    reasons = refused.programs[0].why_not
    assert reasons[0].startswith("score needs ") and "of temporaries" in reasons[0]
    assert any(line.startswith("largest activation: ") for line in reasons)


REFUSAL = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 48.71G of 30.75G hbm. Exceeded hbm capacity by 17.96G.

Largest program allocations in hbm:

  1. Size: 32.00G
     Operator: op_name="jit(train_step)/transformer/while/body/mlp/dot_general"
     Shape: bf16[4,4,64,1024]{3,2,1,0:T(8,128)(2,1)}
     Allocation type: HLO temp
     ==========================

  2. Size: 1.00G
     Operator: op_name="state['model.lm_head.weight']"
     Shape: f32[1024,128]{1,0:T(8,128)}
     Allocation type: Argument
     ==========================
"""


def test_a_refusal_says_what_takes_the_room(tmp_path, monkeypatch):
    refusal = read_out_of_memory(REFUSAL)
    assert isinstance(refusal, OutOfMemory)

    def refuses(*args, programs, on_event, **options):
        on_event({"event": "compiling", "program": programs[0]})
        described = train_lm.describe(parse(train_lm.TrainLmConfig, paths=[path]), pod_target("v4-8"))
        return (Refused(name=programs[0], mesh=described.mesh, refusal=refusal, lower_seconds=1, compile_seconds=1),)

    path = training(tmp_path)
    monkeypatch.setattr(compile, "compile_programs", refuses)
    verdict = preflight(question("train_lm", path, "v4-8", compile=True))
    assert verdict.exit_code == 3 and verdict.fits is False
    assert verdict.headline == "does not fit: 48.71 GiB > 30.75 GiB (train_step)"
    assert verdict.stages[-1].message == "no program compiled, so there is nothing to time"
    # What is compiled by default is what the job's time is made of.
    init, step = verdict.programs
    assert init.outcome is None and step.peak_bytes == round(48.71 * GIB)
    text = "\n".join(step.why_not)
    assert "train_step needs 48.71 GiB on a chip" in text
    # Four rows of the batch on each of four chips, kept for each of four layers; and an input by its path.
    assert "32.00 GiB bf16[4,4,64,1024]" in text
    assert "the shape of mlp hidden [batch 16, position 64, mlp 1024], batch → " in text
    assert "one of each of 4 layers" in text
    assert "1.00 GiB state.model.lm_head.weight float32[vocab 1024, embed 512], embed → data" in text


def test_the_configs_of_both_know_the_plan_block():
    for config in (eval_lm.EvalLmConfig, train_lm.TrainLmConfig):
        with pytest.raises(ValueError, match="must be at least 1"):
            parse(config, overrides={"plan.assume_tokens": "-5"})
