"""What `eval_harness` will do, before it does it: tasks, model, rows, the Programs that score them, how often they run.

Which tasks there are and how much they ask process 0 finds out, with lm_eval; the others hear it, and describe the same
run. Where a task wants texts, the model lies as `generate` lays it out, and its Programs are there too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from haliax_ext.program import Program
from levanter.commands.generate import plan as generating
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.harness.config import EvalHarnessConfig, listed
from levanter.commands.model.not_carried import not_carried
from levanter.commands.model.origin import ModelBlock
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.shell.outputs import output_checks
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import Written
from levanter.data.chat import ChatTemplate
from levanter.eval.harness.asked import HarnessError, QueryEncoder
from levanter.eval.harness.counting import Counted
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.program import score_programs
from levanter.eval.harness.samples import read_run
from levanter.eval.harness.tasks import AbsentTaskError, LoadedTasks, load_tasks
from levanter.models.registry import LmConfig
from levanter.processes.barrier import ONE_FOR_ALL_SECONDS, agreed, current_peers, is_process_0
from levanter.run import Check, RunPlan, Target, Workload
from levanter.trainer.config import TrainerConfig

NAME = "eval_harness"
TOKENS_ON_CPU, TOKENS = 512, 16384
"""Tokens of a batch on each of its shards, where nobody says: enough for the products to be fast, few enough for the
last batches, which are not full, to cost little."""
LONGEST = 4096
"""Tokens that the model sees at once, where nobody says: rows as long as today's contexts would not fit."""
ASSUMED_TOKENS = 128
"""Of a request whose text is not there."""


@dataclass(frozen=True, kw_only=True)
class FoundTasks:
    """What is known of the tasks on every process.

    Attributes:
        kinds: of requests.
        documents: of each task; empty where they are not known.
        error: what is wrong with them; None for nothing.
        absent: whether that is only because something is not available here.
        loaded: the tasks themselves, on process 0.
    """

    kinds: frozenset[str] = frozenset()
    documents: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None
    absent: bool = False
    loaded: LoadedTasks | None = field(default=None, compare=False, repr=False)

    @property
    def writes(self) -> bool:
        """Whether texts are to be written."""
        return "generate_until" in self.kinds

    @property
    def check(self) -> Check:
        """What was found."""
        if self.error is not None:
            error = (AbsentTaskError if self.absent else HarnessError)(self.error)
            return Check(name="tasks", status="unchecked" if self.absent else "error", message=self.error, error=error)
        listed = ", ".join(f"{name} ({count:,} documents)" for name, count in self.documents.items())
        return Check(name="tasks", status="ok", message=listed)


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessWork:
    """What `execute` needs besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        tasks: what is asked.
        encoder: makes tokens of texts; None where there is no tokenizer.
        template: writes conversations; None where there is none.
        programs: that score rows, by their shape.
        texts: how texts are written; None where no task wants that.
    """

    config: EvalHarnessConfig
    pretrained: PretrainedModel
    tasks: FoundTasks
    encoder: QueryEncoder | None
    template: ChatTemplate | None
    programs: Mapping[RowShape, Program]
    texts: GenerateWork | None

    def cost(self, shape: RowShape) -> float:
        """FLOPs of a batch."""
        return flops_of(self.pretrained, shape, "full")


def describe(config: EvalHarnessConfig, target: Target, *, written: Written | None = None) -> RunPlan[HarnessWork]:
    """Describes the run for `target`; reads metadata and the tasks' documents, no weights.

    Args:
        config: what is evaluated.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    written = Written.in_python(config) if written is None else written
    tasks = find_tasks(config)
    pretrained, texts = _pretrained(config, target, written), None
    length, checking = _length(config, pretrained.config)
    if tasks.writes:
        generation = generating.describe(_generation(config, length), target, written=written)
        pretrained, texts = generation.work.pretrained, generation.work
        checks = [check for check in generation.checks if check.name not in ("input_path", "output_path", "rows")]
        notes, beside, resident = generation.notes, dict(generation.beside), generation.resident_bytes
        more, more_work = generation.computing, tuple(generation.workloads)
    else:
        checks = [*pretrained.checks, *not_carried(config, written)]
        notes, beside, resident, more, more_work = pretrained.notes, {}, None, (), ()
    shapes = row_shapes(length, tokens=_tokens(config.trainer, target, length), ways=pretrained.resolved.batch_ways)
    programs = score_programs(
        pretrained.abstract,
        shapes,
        mappings=pretrained.resolved.mappings,
        placement=pretrained.sharding,
        batch_axis=pretrained.resolved.batch_axis,
        matmul_precision=pretrained.precision.matmul,
        compiler_options=pretrained.compiler_options,
    )
    tokenizer = pretrained.found_tokenizer
    template, found = _template(config, tokenizer)
    checks += [tasks.check, *checking, *found, *_sampling_checks(config), *_against_checks(config)]
    checks += output_checks(*_output(config))
    encoder = None
    if tokenizer is not None:
        adds = isinstance(tokenizer, FastTokenizer) and tokenizer.adds_bos
        encoder = QueryEncoder(tokenizer, adds, length)
        said = "BOS is put before a text" if adds else "nothing is put before a text"
        checks.append(Check(name="encoding", status="ok", message=f"{said}, as the tokenizer's files say"))
    work = HarnessWork(
        config=config,
        pretrained=pretrained,
        tasks=tasks,
        encoder=encoder,
        template=template,
        programs=programs,
        texts=texts,
    )
    counted, problem = _counted(work)
    checks += [] if problem is None else [problem]
    rows = "; ".join(f"{shape.rows} × {shape.length} ({shape.slots} scored)" for shape in shapes)
    checks.append(Check(name="rows", status="ok", message=f"batches of {rows}"))
    if resident is not None and texts is not None:
        # Rows that write texts are let go before others are scored.
        resident = {"parameters": pretrained.sharding.bytes_per_device, **resident}
    return RunPlan(
        entry_point=NAME,
        target=target,
        mesh=pretrained.resolved.spec,
        checks=tuple(checks),
        sharding=pretrained.sharding,
        activations=pretrained.activations,
        load=pretrained.load_plan,
        computing=(*programs.values(), *more),
        workloads=(*(_workload(work, shape, counted) for shape in programs), *more_work),
        notes=notes,
        work=work,
        resident_bytes=resident,
        beside=beside,
        searchable=pretrained.searchable(
            positions=length,
            keys=lambda rows, _: {"trainer.per_device_eval_parallelism": rows},
            overrides=config.trainer.mesh.overrides,
        )
        if texts is None
        else "layouts of generation are not searched yet",
    )


def find_tasks(config: EvalHarnessConfig) -> FoundTasks:
    """The tasks of a run: process 0 loads them, the others hear of it."""
    loaded = None
    told: dict[str, object] = {}
    if is_process_0():
        try:
            loaded = load_tasks(config.harness, listed(config.include_path))
            told = {
                "kinds": sorted(loaded.kinds),
                "documents": loaded.documents(config.harness.max_examples),
            }
        except HarnessError as error:
            told = {"error": str(error), "absent": isinstance(error, AbsentTaskError)}
    heard = json.loads(_from_process_0("the tasks", json.dumps(told)))
    return FoundTasks(**{**heard, "kinds": frozenset(heard.get("kinds", ()))}, loaded=loaded)


def _from_process_0(name: str, value: str) -> str:
    """Process 0's value, which may take its time: it reads documents."""
    peers = current_peers()
    return agreed(name, value) if peers is None else peers.meet(name, value=value, seconds=ONE_FOR_ALL_SECONDS)[0]


def _generation(config: EvalHarnessConfig, length: int) -> GenerateConfig:
    """The same model as `generate` would have it, in rows as long as the model sees."""
    inference = replace(config.inference, max_seq_len=config.inference.max_seq_len or length)
    return GenerateConfig(
        hf_checkpoint=config.files,
        checkpoint_path=config.saved,
        tokenizer=config.tokenizer,
        model=config.model,
        trainer=config.trainer,
        inference=inference,
        plan=config.plan,
        allow_pickle=config.allow_pickle,
        load_memory_gib=config.load_memory_gib,
        quantize=config.quantize,
        tied_head=config.tied_head,
        adapter_path=config.adapter_path,
    )


def _pretrained(config: EvalHarnessConfig, target: Target, written: Written) -> PretrainedModel:
    def described(length: int) -> PretrainedModel:
        return describe_pretrained(
            ModelChoice(
                reference=config.files,
                model=ModelBlock.of(config.model, written),
                tokenizer=config.tokenizer,
                trainer=config.trainer,
                allow_pickle=config.allow_pickle,
                memory_gib=config.load_memory_gib,
                saved=config.saved,
                quantize=config.quantize,
                tied_head=config.tied_head,
                adapter=config.adapter_path,
            ),
            target,
            batch=lambda ways: ways * max(1, _tokens(config.trainer, target, length) // length),
            positions=length,
        )

    asked = config.harness.max_length or LONGEST
    found = described(asked)
    meant_for = found.config.max_seq_len
    return described(meant_for) if config.harness.max_length is None and meant_for < asked else found


def _length(config: EvalHarnessConfig, model: LmConfig) -> tuple[int, list[Check]]:
    """Tokens that the model sees at once."""
    length = config.harness.max_length or min(model.max_seq_len, LONGEST)
    if config.harness.max_length is None and length < model.max_seq_len:
        said = (
            f"the model sees {length:,} tokens at once, of the {model.max_seq_len:,} that it was trained on "
            "(eval_harness.max_length): of longer requests the beginning is dropped, longer texts are cut into windows"
        )
        return length, [Check(name="length", status="note", message=said)]
    if length <= model.max_seq_len:
        return length, []
    message = f"eval_harness.max_length: {length} tokens exceed the model's max_seq_len, {model.max_seq_len}"
    if not model.learned_positions:
        return length, [Check(name="length", status="note", message=f"{message}; it was not trained on longer texts")]
    error = ValueError(f"{message}; it has no positions beyond\n  → eval_harness.max_length: {model.max_seq_len}")
    return length, [Check(name="length", status="error", message=str(error), error=error)]


def _tokens(trainer: TrainerConfig, target: Target, length: int) -> int:
    """Tokens of a batch on each of its shards."""
    for rows in (trainer.per_device_eval_parallelism, trainer.per_device_parallelism):
        if rows != -1:
            return rows * length
    return TOKENS_ON_CPU if target.platform == "cpu" else TOKENS


def _template(config: EvalHarnessConfig, tokenizer: object) -> tuple[ChatTemplate | None, list[Check]]:
    """What writes conversations, where they are asked for."""
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.chat_template is None:
        if not config.harness.apply_chat_template or tokenizer is None:
            return None, []
        error = HarnessError(
            "eval_harness.apply_chat_template: the tokenizer has no chat template\n"
            "  → leave it out, or name a tokenizer that has one (tokenizer: …)"
        )
        return None, [Check(name="chat template", status="error", message=str(error), error=error)]
    bos, eos = ("" if i is None else tokenizer.token(i) or "" for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(text=tokenizer.chat_template, bos_token=bos, eos_token=eos, where="eval_harness"), []


def _sampling_checks(config: EvalHarnessConfig) -> list[Check]:
    asked = config.harness.sample_logging
    if not asked.enabled:
        return []
    said = "eval_harness.sample_logging: samples are written into files, not sent to trackers"
    return [Check(name="samples", status="note", message=said)]


def _against_checks(config: EvalHarnessConfig) -> list[Check]:
    """Looks for the run that this one is compared with, before there is anything to compare."""
    if config.against is None or not is_process_0():
        return []
    try:
        _, samples = read_run(config.against)
    except HarnessError as error:
        return [Check(name="against", status="unchecked", message=str(error), error=error)]
    return [Check(name="against", status="ok", message=f"{config.against}: {', '.join(samples)}")]


def _output(config: EvalHarnessConfig) -> tuple[str, str]:
    if config.output_path:
        return "output_path", config.output_path
    return "trainer.log_dir", str(config.trainer.log_dir)


def _counted(work: HarnessWork) -> tuple[Counted | None, Check | None]:
    """How often Programs run: by the documents, where they are there."""
    told: dict[str, object] = {}
    if work.tasks.loaded is not None and work.encoder is not None:
        from levanter.eval.harness.sampling import count

        try:
            counted = count(
                work.tasks.loaded, work.config.harness, work.encoder, work.template, work.programs, work.cost
            )
            told = {"executions": dict(counted.executions), "requests": counted.requests, "exact": counted.exact}
        except ValueError as error:
            told = {"error": str(error)}
    heard = json.loads(_from_process_0("the requests", json.dumps(told)))
    if "error" in heard:
        error = HarnessError(heard["error"])
        return None, Check(name="requests", status="error", message=str(error), error=error)
    if heard:
        return Counted(**heard), None
    assumed = work.config.plan.assume_requests
    if assumed is None:
        return None, None
    return Counted.assumed(assumed, ASSUMED_TOKENS, tuple(work.programs)), None


def flops_of(pretrained: PretrainedModel, shape: RowShape, attention: Literal["causal", "full"]) -> float:
    """FLOPs of a batch: every position through the blocks, the slots through the head."""
    model = pretrained.config
    body = 2.0 * model.matmul_parameters(0)
    head = 2.0 * model.matmul_parameters(pretrained.Vocab.size) - body
    each = model.flops(vocab_size=pretrained.Vocab.size, context_length=shape.length, attention=attention)
    return shape.rows * (shape.length * (body + each.attention) + shape.slots * head)


def _workload(work: HarnessWork, shape: RowShape, counted: Counted | None) -> Workload:
    executions, reason = None, "the tasks' documents are not available here; set plan.assume_requests"
    if counted is not None:
        executions, reason = counted.executions.get(shape.name, 0), counted.reason
    return Workload(
        program=shape.name,
        tokens=shape.rows * shape.length,
        unit="tokens",
        items=shape.rows * shape.length,
        flops_full=flops_of(work.pretrained, shape, "full"),
        flops_causal=flops_of(work.pretrained, shape, "causal"),
        executions=executions,
        reason=reason,
    )
