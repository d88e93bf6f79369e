"""Samples of fixed prompts between steps: the texts of `generate` over the step's checkpoint; training is unchanged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers.compilations import compilations, hlo_name
from helpers.harness import tiny_llama
from helpers.hf_folder import TEXTS

from haliax_ext.hlo import MemoryFigures
from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm import train_lm
from levanter.commands.train.samples import SamplesBetweenSteps
from levanter.config import parse_text
from levanter.plan.aot import Compiled
from levanter.plan.compile_selection import exceeds_hbm
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunRefused, Session, Target
from levanter.tracker import MetricsTable

MESH = {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}
TEXT = "".join(word + " " for text in TEXTS for word in text.split(" ")) * 12
PROMPTS = ["the cat sat", "def f(x):", "日本語"]
SAMPLING = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@dataclasses.dataclass
class Tracked:
    """What a tracker would get."""

    rows: list[tuple[int | None, dict[str, Any]]] = dataclasses.field(default_factory=list)

    def log(self, metrics, *, step):
        self.rows.append((step, dict(metrics)))

    def log_summary(self, metrics):
        del metrics

    def losses(self) -> dict[int | None, float]:
        return {step: row["train/loss"] for step, row in self.rows if "train/loss" in row}

    def tables(self) -> dict[int | None, MetricsTable]:
        return {step: row["samples"] for step, row in self.rows if "samples" in row}


def target(devices: int) -> Target:
    return Target(name="local", platform="cpu", kind="cpu", devices=devices)


def mesh_of(devices: int) -> dict[str, Any]:
    return MESH if devices == 8 else {}


def config_of(folder: Path, base: Path, devices: int, **changes: Any) -> TrainLmConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "docs.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    trainer = {
        **{"mp": "f32", "tracker": [], "id": "run", "mesh": mesh_of(devices), "num_train_steps": 4},
        **{"train_batch_size": 8, "log_dir": str(folder / "logs"), "watch": {"interval": 0}},
        "checkpointer": {"base_path": str(folder / "checkpoints"), "keep": [{"every": 2}], "save_interval": None},
    }
    document = {
        "hf_checkpoint": str(base),
        "train_seq_len": 24,
        "data": {"components": {"docs": {"source": {"train_urls": [str(folder / "docs.jsonl")]}}}, "cache_dir": None},
        "optimizer": {"learning_rate": 0.02, "warmup": 0},
        "sample_prompts": PROMPTS,
        "sample_every": 2,
        "generation": {"sampling": SAMPLING},
        "trainer": trainer,
        **changes,
    }
    return parse_text(TrainLmConfig, json.dumps({key: x for key, x in document.items() if x is not None}))


def trained(config: TrainLmConfig, devices: int) -> Tracked:
    plan = train_lm.describe(config, target(devices)).check()
    tracked: Any = Tracked()
    with compilations() as compiled:
        train_lm.execute(plan, plan.mesh.build(jax.devices()[:devices]), Session(run_id="run", tracker=tracked))
    planned = {hlo_name(program.name) for program in plan.programs}
    assert not [one for one in compiled if one.name not in planned and one.largest > 4096], "outside of the plan"
    return tracked


def samples(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "logs" / "run" / "samples" / f"step-{step}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generated(folder: Path, checkpoint: Path, devices: int, **changes: Any) -> list[dict[str, Any]]:
    """What `generate` makes of the prompts, with the engine of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text(lines)
    document = {
        "checkpoint_path": str(checkpoint),
        "input_path": str(folder / "prompts.jsonl"),
        "output_path": str(folder / "answers.jsonl"),
        "inference": {"max_rows": 3 if devices == 1 else 4, "max_seq_len": 24},
        "sampling": SAMPLING,
        "trainer": {"mp": "f32", "tracker": [], "mesh": mesh_of(devices)},
        **changes,
    }
    plan = generate.describe(parse_text(GenerateConfig, json.dumps(document)), target(devices)).check()
    assert generate.execute(plan, plan.mesh.build(jax.devices()[:devices])).exit_code == 0
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def equal_to_generate(folder: Path, devices: int, steps: tuple[int, ...], **changes: Any) -> None:
    for step in steps:
        checkpoint = folder / "checkpoints" / "run" / f"step-{step}"
        answers = generated(folder / f"alone-{step}", checkpoint, devices, **changes)
        records = samples(folder, step)
        assert [one["tokens"] for one in records] == [answer["choices"][0]["tokens"] for answer in answers]
        assert [one["text"] for one in records] == [answer["choices"][0]["text"] for answer in answers]


def killed(self, taken, state):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_samples_of_a_resumed_run_are_those_of_its_checkpoints(base, tmp_path, monkeypatch):
    """Small, on one device: killed between a checkpoint and its samples, resumed, and compared with `generate`."""
    config = config_of(tmp_path, base, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SamplesBetweenSteps, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(config, 1)
    tracked = trained(config, 1)
    assert tracked.tables().keys() == {1, 3} and tracked.losses().keys() == {2, 3}
    equal_to_generate(tmp_path, 1, (2, 4))
    assert [one["text"] for one in samples(tmp_path, 2)] != [one["text"] for one in samples(tmp_path, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_samples_are_those_of_the_checkpoint(base, tmp_path, devices):
    """The texts of `generate` over each step's checkpoint, and the losses of a run without samples."""
    tracked = trained(config_of(tmp_path, base, devices), devices)
    assert tracked.tables().keys() == {1, 3} and len(tracked.losses()) == 4
    equal_to_generate(tmp_path, devices, (2, 4) if devices == 8 else (4,))
    for step in (2, 4):
        records = samples(tmp_path, step)
        assert [row[3] for row in tracked.tables()[step - 1].rows] == [one["text"] for one in records]
        assert [one["prompt"] for one in records] == PROMPTS and {one["step"] for one in records} == {step}
    assert [one["text"] for one in samples(tmp_path, 2)] != [one["text"] for one in samples(tmp_path, 4)]
    silent = config_of(tmp_path / "silent", base, devices, sample_prompts=None, sample_every=None)
    assert trained(silent, devices).losses() == tracked.losses()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "generation"),
    [
        ({"adapter": {"type": "lora", "r": 4, "alpha": 8}}, {}),
        ({"adapter": {"type": "lora", "r": 4, "base_dtype": "int8"}}, {"quantize": "int8"}),
        ({"generation": {"sampling": SAMPLING, "quantize": "int8"}}, {"quantize": "int8"}),
        ({"generation": {"sampling": {**SAMPLING, "temperature": 0.9, "n": 1}, "allocation": "paged", "page_size": 8}},
         {"sampling": {**SAMPLING, "temperature": 0.9}}),
    ],
)  # fmt: skip
def test_other_weights_and_rows(base, tmp_path, training, generation):
    """Adapters, a base in 8-bit integers, weights that are quantized when they are handed over, sampled texts."""
    trained(config_of(tmp_path, base, 8, **training), 8)
    equal_to_generate(tmp_path, 8, (2, 4), **generation)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8])
def test_a_killed_run_makes_up_for_its_samples(base, tmp_path, devices, monkeypatch):
    """The run ends between the checkpoint of a step and its samples; resumed, it writes what a whole run writes."""
    whole, parts = config_of(tmp_path / "whole", base, devices), config_of(tmp_path / "parts", base, devices)
    trained(whole, devices)
    with monkeypatch.context() as patch:
        patch.setattr(SamplesBetweenSteps, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(parts, devices)
    assert not (tmp_path / "parts" / "logs" / "run" / "samples").exists()
    assert trained(parts, devices).tables().keys() == {1, 3}
    for step in (2, 4):
        one, other = (
            (tmp_path / name / "logs" / "run" / "samples" / f"step-{step}.jsonl") for name in ("whole", "parts")
        )
        assert one.read_bytes() == other.read_bytes()


def described(folder: Path, base: Path, pod: Target, **changes: Any):
    return train_lm.describe(config_of(folder, base, 8, **changes), pod)


def test_plan_counts_the_copy_and_the_cache(base, tmp_path):
    """While text is generated the whole state stays, the handed-over weights and the cache come to it."""
    pod = pod_target("v4-16")
    plan, without = (
        described(tmp_path / name, base, pod, **changes)
        for name, changes in {"with": {}, "without": {"sample_prompts": None, "sample_every": None}}.items()
    )
    assert not plan.errors
    names = [program.name for program in plan.computing]
    added = [name for name in names if name not in {program.name for program in without.computing}]
    assert added[:2] == ["hand_over", "start_rows"] and added[-1].startswith("decode_") and len(added) >= 4
    texts: Any = plan.work.between_steps[0]
    copy, state = texts.generation.hand_over, plan.sharding.bytes_per_device
    # Parameters in float32 are read, and two bytes of each are written: none of the copy is shared.
    assert copy.shared_bytes == 0 and copy.copied_bytes == copy.sharding.bytes_per_device
    parameters = plan.work.state_plan.parameters.bytes_per_device
    assert plan.coresident_bytes["hand_over"] == state - parameters
    assert plan.coresident_bytes["start_rows"] == state + copy.copied_bytes
    # The copy is an input of these two, and the state is not: the plan adds the state alone to their inputs.
    assert {plan.coresident_bytes[name] for name in added[2:]} == {state}
    assert plan.coresident_bytes.get("train_step") == without.coresident_bytes.get("train_step")

    def peak(nbytes: int) -> Compiled:
        memory = MemoryFigures(argument=0, output=0, alias=0, temp=0, generated_code=0, peak=nbytes)
        return Compiled(
            name="hand_over", mesh=plan.mesh, memory=memory, figures=None, text_error=None,
            coordinates=((0, 0, 0, 0),), lower_seconds=0.0, compile_seconds=0.0,
        )  # fmt: skip

    assert plan.target.limit_bytes is not None
    limit = plan.target.limit_bytes - plan.coresident_bytes["hand_over"]
    assert not exceeds_hbm(plan, peak(limit)) and exceeds_hbm(plan, peak(limit + 1))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"sample_prompts": None}, ["sample_every: there are no sample_prompts"]),
        ({"sample_every": None}, ["sample_every: not set"]),
        ({"sample_prompts": [], "sample_every": None}, ["sample_prompts: an empty list", "sample_every: not set"]),
        ({"sample_every": 0}, ["sample_every"]),
        ({"generation": {"sampling": {"echo": True}, "prompt_logprobs": True}},
         ["generation.sampling.echo", "generation.prompt_logprobs"]),
        ({"generation": {"cache_dtype": "float64", "pages": 3}}, ["generation.cache_dtype", "generation.pages"]),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other(base, tmp_path, changes, messages):
    with pytest.raises(ValueError) as refused:
        config_of(tmp_path, base, 8, **changes)
    assert all(message in str(refused.value) for message in messages), refused.value


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"sample_prompts": ["the cat " * 40, "the", "the " * 90]}, ["sample_prompts[0]: ", "sample_prompts[2]: "]),
        ({"generation": {"max_rows": 3}}, ["sample_prompts: ", "max_rows 3 is not a multiple of the 4 shards"]),
        ({"generation": {"allocation": "paged", "pages": 2}}, ["sample_prompts: ", "pages 2"]),
        ({"generation": {"sampling": {"stop_token_ids": [5000]}}}, ["sample_prompts[0]: ", "5000"]),
    ],
)
def test_prompts_and_rows_that_do_not_fit(base, tmp_path, changes, messages):
    """All problems are listed, with their keys, before a weight is read."""
    with pytest.raises(RunRefused) as refused:
        train_lm.describe(config_of(tmp_path, base, 8, **changes), target(8)).check()
    assert all(message in str(refused.value) for message in messages), refused.value
    if "sample_prompts" in changes:
        assert "sample_prompts[1]" not in str(refused.value)
