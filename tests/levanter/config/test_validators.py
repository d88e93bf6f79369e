"""Every number of every configuration has a range: the classes are walked, and each number is fed what makes no sense.

What is accepted is written down here by hand, field by field; whoever adds a number decides about 0 and −1.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, get_args

import pytest

from levanter.commands.catalog import ENTRY_POINTS
from levanter.config import ConfigError, parse_text
from levanter.config.schema import (
    annotated_members,
    choice_names,
    config_fields,
    is_choice,
    is_mapping,
    list_origin,
    strip,
)
from levanter.config.validators import Epsilon, LayerCount, PositiveInt, PositiveOrAll, Range, Ranged, declared_range

FREE = {
    "TrainerConfig.jax_config",
    "TrainerConfig.compiler_options",
    "ProfileOptionsConfig.advanced_configuration",
}
"""Options of JAX and XLA by their names, which JAX and XLA judge."""

MINUS_ONE = {
    # -1 stands for what is left, or for what follows from other numbers.
    "MeshConfig.axes",
    "MeshConfig.dcn_axes",
    "TrainerConfig.train_batch_size",
    "TrainerConfig.per_device_parallelism",
    "TrainerConfig.per_device_eval_parallelism",
    # An exponent that must be negative.
    "PowerLrSchedule.b",
    # A learned factor begins at any number.
    "NanochatConfig.backout",
    # An id that no token has.
    "LmDataConfig.ignore_token_id",
    # All of them; less of what was there.
    "SamplingParams.top_k",
    "SamplingParams.presence_penalty",
    "SamplingParams.frequency_penalty",
}
ZERO = {
    # None of it, or from the beginning.
    "FillInMiddleConfig.spm",
    "TrainerConfig.seed",
    "TrainerConfig.skip_nonfinite_steps",
    "TrainLmConfig.data_seed",
    "TrainLmConfig.epoch",
    "TrainLmConfig.z_loss_weight",
    "TrainLmConfig.hf_generation_eos_token_ids",
    "TrainDpoConfig.validation_split_fraction",
    "TrainDpoConfig.scheduled_eval_steps",
    "PreferenceLossConfig.label_smoothing",
    "PreferenceLossConfig.gamma",
    "LoraDpoConfig.validation_split_fraction",
    "LoraDpoConfig.data_seed",
    # Upstream's default, which is dropped.
    "SftConfig.hf_save_steps",
    "SftMixtureConfig.hf_save_steps",
    "VizLmConfig.data_seed",
    "HarnessConfig.bootstrap_iters",
    "HarnessTaskConfig.num_fewshot",
    "SampleLoggingConfig.max_samples_per_benchmark",
    # No interruption, and what costs nothing.
    "PlanOptions.interruptions_per_day",
    "PlanOptions.storage_price",
    "PlanOptions.egress_price",
    "EvalNeedlesConfig.seed",
    "ConvertLmConfig.generation_eos_token_ids",
    "EvalCarelessLmConfig.save_seconds",
    "EvalSlidingLmConfig.save_seconds",
    "LmDataConfig.ignore_token_id",
    "LmDataConfig.shuffle",
    "LmDataConfig.train_weights",
    "LoraConfig.dropout",
    "LmDataConfig.max_train_batches",
    "LmDataConfig.num_validation_sequences",
    "SupervisedLmDatasetFormat.separate_with",
    "BatchSizeStage.start",
    "CheckpointerConfig.keep_last_temporary_checkpoints",
    "CheckpointDebugConfig.top_allocations",
    "ProfilerConfig.process_index",
    "ProfilerConfig.start_step",
    "ProfileOptionsConfig.host_tracer_level",
    "ProfileOptionsConfig.python_tracer_level",
    "ProfileOptionsConfig.device_tracer_level",
    "WatchConfig.interval",
    "EmaModelAveragingConfig.beta",
    "EmaDecaySqrtConfig.beta",
    "EmaDecaySqrtConfig.switch_step",
    "DistributedConfig.process_id",
    "DistributedConfig.local_device_ids",
    "JsonLoggerConfig.level",
    "TensorboardConfig.purge_step",
    "TensorboardConfig.max_queue",
    "TrackioConfig.background_finish_timeout",
    "WandbConfig.background_finish_timeout",
    # Of a text: off, none of them, the likeliest token, the first id.
    "SamplingParams.temperature",
    "SamplingParams.top_k",
    "SamplingParams.min_p",
    "SamplingParams.seed",
    "SamplingParams.presence_penalty",
    "SamplingParams.frequency_penalty",
    "SamplingParams.min_tokens",
    "SamplingParams.max_tokens",
    "SamplingParams.stop_token_ids",
    "SamplingParams.logprobs",
    "SampleLmConfig.temperature",
    "SampleLmConfig.seed",
    # Any port that is free.
    "ServeConfig.port",
    "InferenceReplConfig.temperature",
    "InferenceReplConfig.seed",
    "InferenceServerConfig.temperature",
    "InferenceServerConfig.seed",
    "InferenceServerConfig.batch_timeout",
    "InferenceServerConfig.port",
    # Upstream's, without effect.
    "InferenceEngineConfig.hbm_utilization",
    "InferenceEngineConfig.max_stop_seqs",
    "InferenceEngineConfig.max_stop_tokens",
    "InferenceEngineConfig.seed",
    # A model's: no such part, derived from the others, or a layer's number.
    "DecoderConfig.initializer_range",
    "Gpt2Config.intermediate_dim",
    "Gpt2Config.num_kv_heads",
    "Gpt2Config.embed_pdrop",
    "Gpt2Config.resid_pdrop",
    "Gpt2Config.attn_pdrop",
    "GptNeoxConfig.num_kv_heads",
    "Olmo2Config.attention_dropout",
    "MixtralConfig.n_shared_experts",
    "MixtralConfig.lbl_coef",
    "MixtralConfig.rzl_coef",
    "Qwen3MoeConfig.router_aux_loss_coef",
    "Qwen3MoeConfig.mlp_only_layers",
    "_LateWindowConfig.max_window_layers",
    "SmolLM3Config.no_rope_layers",
    "NanochatConfig.backout",
    "YarnRotaryConfig.mscale",
    "YarnRotaryConfig.mscale_all_dim",
    # An optimizer's: off.
    "OptimizerConfig.learning_rate",
    "OptimizerConfig.weight_decay",
    "OptimizerConfig.min_lr_ratio",
    "OptimizerConfig.warmup",
    "OptimizerConfig.decay",
    "OptimizerConfig.rewarmup",
    "OptimizerConfig.cooldown",
    "AdamConfig.beta1",
    "AdamConfig.beta2",
    "LionConfig.beta1",
    "LionConfig.beta2",
    "RmsPropConfig.beta1",
    "RmsPropConfig.beta2",
    "SgdConfig.momentum",
    "SophiaHConfig.beta1",
    "SophiaHConfig.beta2",
    "SophiaHConfig.rng_seed",
    "AdafactorConfig.decay_rate",
    "AdafactorConfig.min_parameter_scale",
    "MuonConfig.lr",
    "MuonConfig.adam_lr",
    "MuonConfig.momentum",
    "MuonConfig.second_moment",
    "MomentumSchedule.start",
    "MomentumSchedule.warmup",
    "MomentumSchedule.final",
    "MuonConfig.beta1",
    "MuonConfig.beta2",
    "MuonConfig.adam_weight_decay",
    "GroupConfig.learning_rate",
    "GroupConfig.learning_rate_multiple",
    "GroupConfig.weight_decay",
    "GroupConfig.min_lr_ratio",
    "GroupConfig.warmup",
    "GroupConfig.decay",
    "GroupConfig.beta1",
    "GroupConfig.beta2",
    "GroupConfig.momentum",
    "PowerLrSchedule.b",
}


def reached() -> tuple[type, ...]:
    """Every dataclass that some entry point's configuration may hold, with all choices."""
    found: dict[type, None] = {}

    def visit(annotation: Any) -> None:
        for member in annotated_members(annotation):
            bare = strip(member)
            for part in get_args(bare) if list_origin(bare) is not None or is_mapping(bare) else ():
                if part is not Ellipsis:
                    visit(part)
            for cls in [bare.get_choice_class(name) for name in choice_names(bare)] if is_choice(bare) else [bare]:
                if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls not in found:
                    found[cls] = None
                    for one in config_fields(cls).values():
                        visit(one.type)

    for entry in ENTRY_POINTS.values():
        visit(entry.config_class())
    return tuple(found)


def shapes(annotation: Any) -> Iterator[tuple[str, Any]]:
    """How a number stands in a field: a template of YAML, and the annotation of the number."""
    for member in annotated_members(annotation):
        bare = strip(member)
        if bare in (int, float, timedelta):
            yield "{}", member
        elif is_mapping(bare) and len(get_args(bare)) == 2:
            yield from (("{{x: " + text + "}}", number) for text, number in shapes(get_args(bare)[1]))
        elif list_origin(bare) is not None and get_args(bare):
            args = [part for part in get_args(bare) if part is not Ellipsis]
            if len(args) == 1:
                yield from (("[" + text + "]", number) for text, number in shapes(args[0]))
            else:  # (first step, weights)
                yield from (("[" + text + ", {{x: 1}}]", number) for text, number in shapes(args[0]))


@dataclasses.dataclass(frozen=True)
class Number:
    cls: type
    field: str
    template: str
    annotation: Any

    def names(self) -> set[str]:
        """The field's name under the class and each of its bases: a decision is made once for a family."""
        return {f"{base.__name__}.{self.field}" for base in self.cls.__mro__}

    @property
    def may_be_text(self) -> bool:
        """Whether anything else is taken for text, which has no range."""
        return any(strip(m) is str for m in annotated_members(config_fields(self.cls)[self.field].type))

    def problems(self, text: str) -> list[str]:
        """What the parser says of the field with this value; nothing where it takes it."""
        document = f"# a first line\n{self.field}: {self.template.format(text)}\n"
        try:
            parse_text(self.cls, document, source="a.yaml")
        except ConfigError as error:
            return [
                str(p) for p in error.problems if p.key.split(".")[0] == self.field and "is missing" not in p.message
            ]
        return []


def numbers() -> list[Number]:
    return [
        Number(cls, name, template, annotation)
        for cls in reached()
        for name, one in config_fields(cls).items()
        if f"{cls.__name__}.{name}" not in FREE
        for template, annotation in shapes(one.type)
    ]


NUMBERS = numbers()
ABSENT = {number for number in NUMBERS if number.cls.__name__.startswith("Absent")}


def test_the_walk_finds_them_all():
    names = {f"{n.cls.__name__}.{n.field}" for n in NUMBERS}
    assert len(NUMBERS) > 700, len(NUMBERS)
    assert {
        "AdamConfig.epsilon",
        "LlamaConfig.hidden_dim",
        "MeshConfig.hbm_gib",
        "WandbConfig.background_max_queue_size",
    } <= names
    assert {"YarnRotaryConfig.beta_fast", "ChatLmDatasetFormat.pack", "EvalCarelessLmConfig.chunk_size"} <= names
    bare = [f"{n.cls.__name__}.{n.field}" for n in NUMBERS if declared_range(n.annotation) is None]
    assert not bare, f"numbers without a range: {bare}"
    assert not (names - {f"{n.cls.__name__}.{n.field}" for n in NUMBERS if issubclass(n.cls, Ranged) or n in ABSENT})


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "1e999", "1e30", "-1e30", "1" + "0" * 30, "true"])
def test_what_no_number_may_be(text: str):
    accepted = []
    for number in NUMBERS:
        one = config_fields(number.cls)[number.field]
        if text == "true" and any(strip(m) is bool for m in annotated_members(one.type)):
            continue
        if text in ("1e30", "-1e30", "1" + "0" * 30) and number in ABSENT:
            continue  # the optimizer or the family is refused by name
        if number.may_be_text:
            continue
        problems = number.problems(text)
        if not any(
            p.startswith("a.yaml:2: " + number.field) and re.search("must be|must not be|expected", p) for p in problems
        ):
            accepted.append((number.cls.__name__, number.field, problems))
    assert not accepted


@pytest.mark.parametrize(("text", "sensible"), [("0", ZERO), ("-1", MINUS_ONE)])
def test_zero_and_minus_one_are_decided_for_each(text: str, sensible: set[str]):
    wrong = []
    used = set()
    for number in NUMBERS:
        if number in ABSENT or strip(number.annotation) is timedelta:
            continue
        if (
            any(strip(m) is str for m in annotated_members(config_fields(number.cls)[number.field].type))
            and text == "-1"
        ):
            continue
        expected = number.names() & sensible
        used |= expected
        problems = number.problems(text)
        if bool(expected) == bool(problems):
            wrong.append((f"{number.cls.__name__}.{number.field}", problems))
        elif problems:
            assert all(re.search(r"must (be|not be)|expected", p) and p.startswith("a.yaml:2: ") for p in problems), (
                problems
            )
    assert not wrong
    assert used == sensible, f"in the list and not among the fields: {sensible - used}"


@pytest.mark.parametrize("text", ["0s", "-1s", "100000000d", "-5m"])
def test_durations(text: str):
    durations = [number for number in NUMBERS if strip(number.annotation) is timedelta]
    assert len(durations) >= 4
    for number in durations:
        # The limits apply from the second step on; a pod may be available again at once.
        if number.field in ("startup_grace_period", "restart_wait") and text == "0s":
            continue
        assert any(p.startswith("a.yaml:2: ") for p in number.problems(text)), number


def test_python_is_refused_in_the_same_words():
    unheard = []
    for number in NUMBERS:
        limits = declared_range(number.annotation)
        if number.template != "{}" or number in ABSENT or strip(number.annotation) is timedelta:
            continue
        required = {
            name: ("cosine" if one.type is str else 1)
            for name, one in config_fields(number.cls).items()
            if one.required and name != number.field
        }
        for value in (math.nan, math.inf, 1e30 if strip(number.annotation) is float else 10**30):
            if isinstance(value, float) and strip(number.annotation) is int:
                continue
            try:
                number.cls(**required, **{number.field: value})
            except ValueError as error:
                if f"{number.field}: must be" in str(error) and (str(limits) in str(error)):
                    continue
                unheard.append((number.cls.__name__, number.field, value, str(error)))
            else:
                unheard.append((number.cls.__name__, number.field, value, "accepted"))
    assert not unheard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Ranged):
    """What a user writes."""

    epsilon: Epsilon = 1e-8
    layers: LayerCount | None = None
    sizes: Mapping[str, PositiveOrAll] = dataclasses.field(default_factory=dict)
    share: int | Annotated[float, Range(0, 1, below=True)] = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrower(Own):
    """One that changes a default, and another range."""

    epsilon: float = 1e-5
    layers: PositiveInt | None = 3


@pytest.mark.parametrize(
    ("cls", "text", "message"),
    [
        (Own, "epsilon: 0", "a.yaml:1: epsilon: must be above 0 and at most 1, got 0.0"),
        (Own, "epsilon: .nan", "a.yaml:1: epsilon: must be a finite number above 0 and at most 1, got nan"),
        (Own, "layers: 20000", "a.yaml:1: layers: must be from 1 to 10000, got 20000"),
        (Own, "layers: 0", "a.yaml:1: layers: must be at least 1, got 0"),
        (Own, "layers: x", 'a.yaml:1: layers: expected an integer or null, got "x"'),
        (Own, "sizes: {a: 2, b: -2}", "a.yaml:1: sizes.b: must be at least 1, or -1, got -2"),
        (Own, "share: 1.0", "a.yaml:1: share: must be from 0 to below 1, got 1.0"),
        (Narrower, "epsilon: 0", "a.yaml:1: epsilon: must be above 0 and at most 1, got 0.0"),
        (Own, f"layers: {10**400}", "a.yaml:1: layers: must be from 1 to 10000, got a number of 1329 bits"),
        (Own, f"layers: {10**3000}", 'a.yaml:1: layers: expected an integer or null, got "'),
    ],
)
def test_messages(cls: type, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_text(cls, text, source="a.yaml")
    assert str(caught.value).startswith(message)


def test_a_subclass_may_widen_a_range_and_inherits_the_others():
    assert parse_text(Narrower, "layers: 20000").layers == 20000
    with pytest.raises(ValueError, match=r"^sizes\.b: must be at least 1, or -1, got -2$"):
        Narrower(sizes={"b": -2})
    assert Own(share=7).share == 7  # whole numbers have no range there
