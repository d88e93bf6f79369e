"""`trainer.compiler` and `trainer.compiler_options`: from the configuration to the options of each kind of Program."""

import dataclasses

import pytest
from helpers.llama_shapes import model_axes
from helpers.plan_cases import CASES

from levanter.commands.model.compiler import choose_compiler, sharding_layout
from levanter.config import ConfigError, parse_text
from levanter.hardware import GENERATIONS, compiler_options
from levanter.hardware.compiler import as_values, tuned_options
from levanter.mesh import MeshConfig, resolve
from levanter.plan.target_from_name import pod_target
from levanter.runplan import Target
from levanter.trainer.config import TrainerConfig

MODEL = model_axes("llama3.1_8b")
FSDP = resolve(MeshConfig(), MODEL, devices=8)
REPLICATED = resolve(MeshConfig(param_mapping={"embed": None}), MODEL, devices=8)
BESIDE = resolve(MeshConfig(axes={"data": 4, "model": 2}), MODEL, devices=8)
TENSOR = resolve(MeshConfig(axes={"data": 1, "model": 8}), MODEL, devices=8)


WORDS = {"train": "train steps", "score": "scoring", "generate": "generation"}


def target(platform="tpu", kind="TPU v6 lite") -> Target:
    return Target(name="somewhere", platform=platform, kind=kind, devices=8)


def lines(choice) -> list[str]:
    assert {(check.name, check.status) for check in choice.checks} <= {("compiler", "note")}
    return [check.message for check in choice.checks]


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_untuned_every_program_has_the_default_options_and_nothing_is_said(generation):
    untuned = TrainerConfig(compiler="default")
    found = choose_compiler(untuned, target(generation.platform, generation.device_kind), FSDP)
    default = compiler_options(generation.platform, generation.device_kind)
    assert found.default == default and set(found.working) == {"train", "score", "generate"}
    assert all(options == default for options in found.working.values())
    assert found.checks == ()


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
@pytest.mark.parametrize("resolved", [FSDP, REPLICATED, BESIDE], ids=["fsdp", "replicated", "beside"])
def test_tuned_are_those_of_generation_and_work_each_with_its_reason(generation, resolved):
    where = target(generation.platform, generation.device_kind)
    found = choose_compiler(TrainerConfig(), where, resolved, works=tuple(WORDS))
    default = compiler_options(generation.platform, generation.device_kind)
    assert found.default == default
    for work, options in found.working.items():
        expected = tuned_options(
            generation.platform, generation.device_kind, work=work, layout=sharding_layout(resolved)
        )
        assert options == as_values(expected) and default.items() <= options.items()
        said = [line for line in lines(found) if WORDS[work] in line]
        added = [option for option in expected if option.name not in default]
        told = [f"{option.name}={option.value} ({option.why})" for option in added]
        assert [line.partition(": ")[2] for line in said] == told


def test_a_plan_tells_of_the_programs_that_it_has():
    found = choose_compiler(TrainerConfig(), target(), FSDP)
    assert lines(found) and not any("train steps" in line for line in lines(found))


def test_a_layout_is_what_parameters_are_sharded_over():
    assert sharding_layout(FSDP) == "fsdp"
    assert sharding_layout(REPLICATED) == sharding_layout(TENSOR) == "other"
    assert sharding_layout(BESIDE) == "fsdp_and_tensor"
    # A mesh axis of one device shards nothing; over replicas parameters are replicated.
    for axes, devices in ((None, 1), ({"replica": 8, "data": 1}, 8)):
        config = MeshConfig() if axes is None else MeshConfig(axes=axes)
        assert sharding_layout(resolve(config, MODEL, devices=devices)) == "other"
    assert sharding_layout(resolve(MeshConfig(axes={"replica": 2, "data": 4}), MODEL, devices=8)) == "fsdp"


def test_what_the_user_writes_is_for_steps_and_scoring_and_wins():
    name = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
    written = {name: 7, "xla_tpu_some_switch": False, "xla_tpu_some_share": 0.5, "xla_other": "ENABLED"}
    untuned = TrainerConfig(compiler="default", compiler_options=written)
    found = choose_compiler(untuned, target(kind="TPU v4"), FSDP)
    mine = {name: "7", "xla_tpu_some_switch": "false", "xla_tpu_some_share": "0.5", "xla_other": "ENABLED"}
    assert all(options == mine for options in found.working.values())
    # What loads and saves is as it was.
    assert found.default == compiler_options("tpu", "TPU v4") and found.default[name] != "7"
    assert [line.partition(" (")[0] for line in lines(found)] == [
        f"trainer.compiler_options: {name}={value}" for name, value in mine.items()
    ]
    tuned = choose_compiler(TrainerConfig(compiler_options=written), target(), FSDP)
    assert all(mine.items() <= options.items() for options in tuned.working.values())
    assert not any(name in line for line in lines(tuned) if "tuned for" in line)


@pytest.mark.parametrize(
    ("platform", "kind", "passed"),
    [
        ("cpu", "cpu", {"xla_cpu_enable_fast_math": "False", "xla_other": "1"}),
        ("gpu", "NVIDIA H200", {"xla_gpu_autotune_level": "2", "xla_other": "1"}),
        ("tpu", "TPU v6 lite", {"xla_tpu_scoped_vmem_limit_kib": "65536", "xla_enable_async_all_gather": "true",
                                "xla_other": "1"}),
    ],
)  # fmt: skip
def test_options_of_another_platform_are_left_out_and_named(platform, kind, passed):
    written = {
        "xla_cpu_enable_fast_math": False,
        "xla_gpu_autotune_level": 2,
        "xla_tpu_scoped_vmem_limit_kib": 65536,
        # The TPU compiler's too, though its name does not say so.
        "xla_enable_async_all_gather": True,
        "xla_other": 1,
    }
    untuned = TrainerConfig(compiler="default", compiler_options=written)
    found = choose_compiler(untuned, target(platform, kind), FSDP)
    assert all(options == passed for options in found.working.values())
    assert lines(found)[-1] == (
        f"trainer.compiler_options: {', '.join(name for name in written if name not in passed)}: "
        f"no options of {platform} programs, skipped"
    )


def test_a_misspelt_option_of_tpus_has_a_hint():
    written = {"xla_tpu_scoped_vmem_limit": 65536}
    line = lines(choose_compiler(TrainerConfig(compiler_options=written), target(), FSDP))[-1]
    assert "did you mean `xla_tpu_scoped_vmem_limit_kib`" in line


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{'--xla_tpu_x=1': 2}", "compiler_options: '--xla_tpu_x=1' is not the name of an option; expected it bare"),
        ("{'xla_a b': 2}", "like xla_a_b"),
        ("{'': 2}", "like xla_…"),
        ("{xla_tpu_x: [1]}", "trainer.compiler_options.xla_tpu_x"),
        ("xla_tpu_x", "trainer.compiler_options"),
    ],
)
def test_what_is_no_option_is_refused(written, message):
    @dataclasses.dataclass(frozen=True)
    class Entry:
        trainer: TrainerConfig

    with pytest.raises(ConfigError) as caught:
        parse_text(Entry, f"trainer: {{compiler_options: {written}}}", source="run.yaml")
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean `tuned`"):
        parse_text(Entry, "trainer: {compiler: tunde}", source="run.yaml")


STEP = CASES["llama2_7b_v4-32"]


def described(*words: str):
    case = dataclasses.replace(STEP, overrides=(*STEP.overrides, *words))
    return case.describe(pod_target(case.target))


def test_a_train_step_has_the_options_and_the_first_state_does_not():
    plan = described("--trainer.compiler_options.xla_tpu_scoped_vmem_limit_kib=65536")
    default = compiler_options("tpu", "TPU v4")
    assert plan.program("train_step").compiler_options == {**default, "xla_tpu_scoped_vmem_limit_kib": "65536"}
    assert plan.program("init_state").compiler_options == default
    assert all(program.compiler_options == {} for program in plan.saving)
    assert any("xla_tpu_scoped_vmem_limit_kib=65536" in check.message for check in plan.checks)
