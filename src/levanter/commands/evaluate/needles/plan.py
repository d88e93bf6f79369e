"""The plan of `eval_needles`: the model, a Program for each length of text, and the number of its executions.

The plan needs neither texts nor a tokenizer: the configuration determines the number of questions.
"""

from dataclasses import dataclass

from haliax_ext.program import Program
from levanter.commands.cli.outputs import output_checks
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.scoring_common import (
    configured_rows,
    context_length_checks,
    output_key,
    per_device,
    result_output,
)
from levanter.commands.model.sharding import plan_activation_sharding
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.commands.model.workloads import scoring_workload
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer
from levanter.eval.needles.program import needle_program, program_name
from levanter.io import Output
from levanter.models.registry import LmConfig
from levanter.runplan import Check, RunPlan, Target

NAME = "eval_needles"


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedleWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        rows: of a batch.
    """

    config: EvalNeedlesConfig
    pretrained: PretrainedModel
    rows: int

    @property
    def folder(self) -> str:
        """The folder of the files."""
        return self.output.path

    @property
    def output(self) -> Output:
        """The output folder and the key that names it."""
        return result_output(self.config, "needles", kind="folder")

    @property
    def bos(self) -> int | None:
        """The token before a text: BOS, if the tokenizer adds it."""
        return bos_id(self.pretrained.tokenizer)


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The BOS id if the tokenizer adds BOS to a text, otherwise None."""
    return tokenizer.bos_id if tokenizer.bos_id in tokenizer.frame.prefix else None


def describe(config: EvalNeedlesConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[NeedleWork]:
    """Describes the run for `target`; reads metadata, no weights.

    Args:
        config: the configuration.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    spec = config.spec
    # The longest length has the largest activations, so it decides whether the run fits.
    longest = max(spec.lengths)
    pretrained = describe_pretrained(
        ModelChoice.of(
            config,
            files=config.files,
            saved=config.saved,
            model=ModelBlock.of(config.model, written),
            tokenizer=config.tokenizer,
        ),
        target,
        batch=lambda ways: _rows(config, ways)[0],
        positions=longest,
    )
    ways = pretrained.resolved.batch_ways
    rows, why = _rows(config, ways)
    checks = [
        *pretrained.checks,
        *unsupported_option_checks(config, written),
        *_length_checks(spec.lengths, pretrained.config),
    ]
    # `lengths` is sorted, so all but the last are the shorter ones.
    checks += _axis_checks(pretrained, spec.lengths[:-1], rows)
    message = f"{spec.count} of each length: {', '.join(spec.tasks)}; batches of {rows} ({why})"
    checks.append(Check(name="questions", status="ok", message=message))
    if config.trainer.max_eval_batches is not None:
        message = "trainer.max_eval_batches: no effect; samples sets the number of questions"
        checks.append(Check(name="config", status="note", message=message))
    checks += output_checks(*output_key(config))
    # The last batch of each length may be partly empty.
    batches = -(-spec.count // rows)
    workloads = [
        scoring_workload(
            pretrained,
            rows=rows,
            positions=length,
            runs=batches,
            reason=f"{spec.count} questions of {length:,} tokens",
            program=program_name(length),
        )
        for length in spec.lengths
    ]
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=tuple(_program(pretrained, rows, length) for length in spec.lengths),
        workloads=workloads,
        work=NeedleWork(config=config, pretrained=pretrained, rows=rows),
        searchable=pretrained.searchable(
            positions=longest,
        ),
    )


def _program(pretrained: PretrainedModel, rows: int, length: int) -> Program:
    return needle_program(
        pretrained.abstract,
        rows=rows,
        length=length,
        mappings=pretrained.resolved.mappings,
        placement=pretrained.sharding,
        batch_axis=pretrained.resolved.batch_axis,
        matmul_precision=pretrained.precision.matmul,
        compiler_options=pretrained.compiler_options,
    )


def _rows(config: EvalNeedlesConfig, ways: int) -> tuple[int, str]:
    """Rows of a batch, and why."""
    if (per_shard := configured_rows(config.trainer)) is None:
        # One row per shard by default: rows are long, and a batch of several would need that many times the
        # activations.
        return ways, f"one per batch shard, of which there are {ways}"
    return per_shard[0] * ways, per_device(*per_shard, ways)


def _axis_checks(pretrained: PretrainedModel, lengths: tuple[int, ...], rows: int) -> list[Check]:
    """Errors of the shorter lengths on this mesh; the plan itself covers the longest one."""
    checks = []
    for length in lengths:
        plan = plan_activation_sharding(
            pretrained.config,
            pretrained.resolved,
            rows=rows,
            positions=length,
            Vocab=pretrained.Vocab,
            precision=pretrained.precision,
        )
        for error in plan.errors:
            # A bare ValueError gets the length as its key; typed errors name their axis and sizes already.
            message = type(error)(f"lengths: {length}: {error}") if type(error) is ValueError else error
            checks.append(Check(name="lengths", status="error", message=str(message), error=message))
    return checks


def _length_checks(lengths: tuple[int, ...], model: LmConfig) -> list[Check]:
    """Refuses or notes texts that are longer than the trained context."""
    longer = [length for length in lengths if length > model.max_seq_len]
    if not longer:
        return []
    message = ", ".join(f"{length:,}" for length in longer)
    return context_length_checks(model, f"lengths: {message} tokens", name="lengths", advice="lengths: at most")
