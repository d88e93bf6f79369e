"""The plan of `perplexity_gap`: its texts, and for each model an evaluation of them as described by `eval_lm`.

The models are loaded one after the other, so at most one is resident. The sharding and load plans are those of the
larger model; the other model's load plan is `second_load`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from levanter.commands.cli.outputs import output_checks
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.config import EvalLmConfig
from levanter.commands.evaluate.eval_lm import EvalWork
from levanter.commands.evaluate.gap.config import GapModelConfig, PerplexityGapConfig
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.config import ExplicitKeys
from levanter.data import AbsentTextError, DataError, EvalSequences, resolve_evaluation
from levanter.data.config import DirectDatasetComponent, LmDataConfig
from levanter.data.gap_texts import ComparedText, read_compared_texts
from levanter.io import MissingFileError, UnreadableFileError
from levanter.runplan import Check, RunPlan, Target

NAME = "perplexity_gap"
_SUFFIX = {"model_a": "_a", "model_b": "_b", "model": ""}
_ABOUT_TEXT = ("data", "text", "output")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelHalf:
    """One model's evaluation.

    Attributes:
        key: of the model in the configuration.
        program: the name of its Program.
        work: the evaluation's own inputs.
    """

    key: str
    program: str
    work: EvalWork

    @property
    def label(self) -> str:
        """The name of the model in reports."""
        return self.work.pretrained.checkpoint.description.split(" (")[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class GapWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        texts: the documents; empty if they are not available here.
        halves: the models, in order.
    """

    config: PerplexityGapConfig
    texts: tuple[ComparedText, ...]
    halves: tuple[ModelHalf, ...]


def describe(config: PerplexityGapConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[GapWork]:
    """Describes the comparison for `target`; reads metadata and the texts, no weights.

    Args:
        config: what is compared.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    texts, checks = _texts(config)
    plans: dict[str, RunPlan[EvalWork]] = {}
    for key, model in config.models.items():
        plans[key] = eval_lm.describe(_evaluation(config, model, texts), target, written=_written(key, model, written))
        checks += _checks(key, model, plans[key], bool(texts))
        sequences = plans[key].work.sequences
        if sequences is not None and (error := lost_text_error(key, sequences)) is not None:
            checks.append(Check(name=f"{key}: data", status="error", message=str(error), error=error))
    if config.trainer.max_eval_batches is not None:
        message = "trainer.max_eval_batches: no effect; max_docs_per_dataset and max_doc_bytes limit what is read"
        checks.append(Check(name="config", status="note", message=message))
    checks += [*unsupported_option_checks(config, written), *output_checks("output_path", config.folder)]
    # The larger model decides whether the run fits.
    by_size = sorted(plans, key=lambda key: -plans[key].sharding.bytes_per_device)
    first, others = plans[by_size[0]], [plans[key] for key in by_size[1:]]
    for other in others:
        errors = (*other.sharding.errors, *other.activations.errors)
        checks += [Check(name="sharding", status="error", message=str(error), error=error) for error in errors]
        # One Program list has one mesh; models whose heads split differently over `model` resolve to different ones.
        if other.mesh != first.mesh:
            error = ValueError(
                f"trainer.mesh.split_heads: the models have different meshes, {first.mesh} and {other.mesh}, since "
                "their heads are split differently\n  → trainer.mesh.split_heads: never"
            )
            checks.append(Check(name="mesh", status="error", message=str(error), error=error))
    halves, programs, workloads = [], [], []
    for key, plan in plans.items():
        (program,), (workload,) = plan.computing, plan.workloads
        # Both Programs are called "score" in `eval_lm`; names within a plan must differ.
        name = f"score{_SUFFIX[key]}"
        programs.append(replace(program, name=name))
        workloads.append(replace(workload, program=name))
        halves.append(ModelHalf(key=key, program=name, work=plan.work))
    second_load = others[0].load if others else None
    return RunPlan(
        entry_point=NAME,
        target=target,
        mesh=first.mesh,
        checks=tuple(checks),
        sharding=first.sharding,
        activations=first.activations,
        load=first.load,
        second_load=None if second_load is None else replace(second_load, name=f"load.{by_size[1]}"),
        computing=tuple(programs),
        workloads=tuple(workloads),
        # Both evaluations have the same notes about mesh and precision.
        notes=tuple(dict.fromkeys(note for plan in plans.values() for note in plan.notes)),
        work=GapWork(config=config, texts=texts, halves=tuple(halves)),
        searchable=first.searchable if not others else "a layout of two models is not searched",
    )


def lost_text_error(key: str, sequences: EvalSequences) -> DataError | None:
    """The error of a model whose ids do not keep the texts: its losses are not those of the texts' bytes."""
    if not sequences.text_losses:
        return None
    losses = "\n".join(f"{key}: bits per byte of {loss}" for loss in sequences.text_losses)
    return DataError(f"{losses}\n  → a model whose tokenizer keeps the texts, or sets without these documents")


def _texts(config: PerplexityGapConfig) -> tuple[tuple[ComparedText, ...], list[Check]]:
    try:
        data = resolve_evaluation(LmDataConfig(components=dict(config.datasets)))
        texts = read_compared_texts(
            data.sets, max_documents=config.max_docs_per_dataset, max_bytes=config.max_doc_bytes
        )
    except (AbsentTextError, DataError, MissingFileError, UnreadableFileError) as error:
        # Absent files may exist on another machine; broken ones are broken everywhere.
        absent = isinstance(error, (AbsentTextError, MissingFileError))
        problem = DataError(
            # `eval_lm` names its own keys in messages; the user wrote `datasets`.
            str(error).replace("data.components.", "datasets.").replace("data.components:", "datasets:")
        )
        return (), [Check(name="text", status="unchecked" if absent else "error", message=str(problem), error=problem)]
    counts = {one.name: sum(text.name == one.name for text in texts) for one in data.sets}
    message = ", ".join(f"{name} ({count:,} documents)" for name, count in counts.items())
    # UTF-8 bytes: the unit in which the models are compared.
    total = sum(len(text.text.encode()) for text in texts)
    notes = [Check(name="data", status="note", message=note) for note in data.notes]
    return texts, [Check(name="text", status="ok", message=f"{message}; {total:,} bytes"), *notes]


def _evaluation(config: PerplexityGapConfig, model: GapModelConfig, texts: Sequence[ComparedText]) -> EvalLmConfig:
    """An `eval_lm` configuration for the same texts: documents begin with BOS, and EOS is not scored."""
    components: dict[str, DirectDatasetComponent] = {}
    for name in dict.fromkeys(text.name for text in texts):
        documents = [text.text for text in texts if text.name == name]
        # The documents are passed in memory, so that both models see exactly the same text.
        components[name] = DirectDatasetComponent(datasets={"validation": documents})
    data = LmDataConfig(components=dict(components), enforce_eos=False, cache_dir=None)
    return EvalLmConfig(
        hf_checkpoint=model.files,
        checkpoint_path=model.saved,
        # A limit in batches would give models with other tokenizers other texts.
        trainer=replace(config.trainer, max_eval_batches=None),
        data=data if model.tokenizer is None else replace(data, tokenizer=model.tokenizer),
        model=model.model,
        max_eval_length=config.max_eval_length,
        output_path=config.folder,
        allow_pickle=model.allow_pickle,
        load_memory_gib=model.load_memory_gib,
        quantize=model.quantize,
        tied_head=model.tied_head,
        adapter_path=model.adapter_path,
        plan=config.plan,
    )


def _written(key: str, model: GapModelConfig, written: ExplicitKeys) -> ExplicitKeys:
    """The explicit keys of a model, as keys of `eval_lm`; without `max_eval_length`, which may be shortened."""
    prefix = f"{key}.model."
    block = {
        f"model.{written_key.removeprefix(prefix)}" for written_key in written.keys if written_key.startswith(prefix)
    }
    if model.model is not None:
        block.add("model")
    return ExplicitKeys(frozenset(block | ({"data.tokenizer"} if model.tokenizer is not None else set())))


def _checks(key: str, model: GapModelConfig, plan: RunPlan[EvalWork], has_texts: bool) -> list[Check]:
    """The checks of a model's evaluation under the model's key, without repeated checks of the texts."""
    checks = []
    for check in plan.checks:
        # Text and output are checked once for both models, except for errors that a tokenizer causes.
        if check.name in _ABOUT_TEXT and (check.status != "error" or not has_texts):
            continue
        checks.append(replace(check, name=f"{key}: {check.name}"))
    unused = []
    if model.trust_remote_code:
        unused.append(f"{key}.trust_remote_code: no effect; no code of a repository is run")
    if model.tokenizer_backend != "hf":
        unused.append(f"{key}.tokenizer_backend: no effect; tokenizers are read by the `tokenizers` library")
    return [*checks, *(Check(name="config", status="note", message=message) for message in unused)]
