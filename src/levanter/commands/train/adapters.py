"""The adapters of a training run: what they adapt, what they start from, and their export in peft's format."""

from collections.abc import Callable

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import abstract, leaves, map_arrays, with_arrays
from haliax_ext.rules import WeightRules
from levanter.commands.model.quantization import QuantizationError, quantize_projections
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.task import Running
from levanter.commands.train.trained_run import ResolvedTraining, TrainedRun
from levanter.commands.train.work import TrainWork
from levanter.compat.hf.export import ExportExtras, plan_export, tokenizer_documents, write_export
from levanter.compat.hf.peft import PeftAdapter, PeftPlan, gather_adapter, open_peft, plan_peft, write_peft
from levanter.compat.hf.peft.merge import MergedTensors, copied_tensors, rounding_lines, stored_leaves
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, barrier
from levanter.io import join
from levanter.models.adapters.lora import Adapters
from levanter.models.adapters.lora_targets import KEY, AdapterError, TargetGroup, find_targets, target_groups
from levanter.models.adapters.whole import find_whole, select_leaves
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.train_state import TrainState


def resolve_adapters(config: TrainLmConfig, model: LmConfig, Vocab: hax.Axis, module: LmHeadModel) -> Adapted | None:
    """The adapters that a run trains; None if it trains parameters of the model.

    Args:
        config: the run.
        model: its architecture.
        Vocab: rows of its embedding.
        module: the model, abstract.

    Raises:
        AdapterError: names match nothing, or a rank does not fit; lists all.
    """
    if config.lora is None:
        return None
    rules = model.weight_rules(Vocab)
    # All groups that an adapter could attach to, not only the chosen ones: files of peft are matched against all of
    # them.
    every = target_groups(module, rules)
    targets = find_targets(every, config.lora)
    whole = find_whole(leaves(module), rules, config.lora, targets)
    return Adapted(targets=targets, config=config.lora, every=every, whole=whole)


def open_initial_adapters(run: TrainedRun) -> PeftAdapter | None:
    """The stored adapters that a run starts from, or None for fresh ones; reads headers only.

    Raises:
        CheckpointError: the folder is none, or of another model.
        AdapterError: it has other adapters than the run trains; lists all that differ.
    """
    adapted = run.adapted
    # Fresh adapters need no file; whole-model training has none.
    source = None if adapted is None else adapted.config.initialize_from
    if adapted is None or source is None:
        return None
    module = abstract(lambda: run.build(jax.random.PRNGKey(0)))
    key, config, rules = f"{KEY}.initialize_from", adapted.config, run.model.weight_rules(run.Vocab)
    opened = open_peft(source).per_expert(adapted.every)
    # Without being told to, peft also writes the full matrix of an output head that has LoRA factors. Such a matrix is
    # a copy of a frozen weight and no entry of `modules_to_save`.
    adapted_weights = {f"{member.path}.weight" for group in adapted.targets for member in group.members}
    copied_paths = opened.copied_paths(leaves(module), rules)
    whole = tuple(path for path in copied_paths if path not in adapted_weights)
    theirs = {group.path: group for group in opened.targets(adapted.every, rules, select_leaves(module, copied_paths))}
    ours = {group.path: group for group in adapted.targets}

    def describe_group(group: TargetGroup | None, scale: Callable[[int, float], float]) -> str:
        if group is None:
            return "none"
        members = ", ".join(member.name for member in group.members)
        return f"rank {group.rank}, scale {scale(group.rank, group.alpha):g} ({members})"

    problems = []
    # The union of both sides, so that a group that only one of them has is reported with "none" on the other.
    for path in sorted(theirs.keys() | ours.keys()):
        theirs_text, ours_text = (
            describe_group(theirs.get(path), opened.config.scale),
            describe_group(ours.get(path), config.scale),
        )
        if theirs_text != ours_text:
            problems.append(f"{path}: {theirs_text} in {opened.where}, {ours_text} in this run")
    # Whole copies are a set of paths; the symmetric difference lists those that only one side has.
    for path in sorted(set(whole) ^ set(adapted.whole)):
        theirs_text, ours_text = ("whole" if path in paths else "not whole" for paths in (whole, adapted.whole))
        problems.append(f"{path}: {theirs_text} in {opened.where}, {ours_text} in this run (modules_to_save)")
    if problems:
        listed = "\n  ".join(problems)
        raise AdapterError(f"{key}: it has other adapters than the run trains; {len(problems)} differ:\n  {listed}")
    return opened


def load_initial_adapters(work: TrainWork, mesh: Mesh) -> Adapters:
    """Reads the adapters that a run starts from, each array into its final sharding.

    Raises:
        CorruptFileError: they hold numbers that are not finite; lists all of these.
    """
    assert work.adapted is not None and work.begun is not None and work.model.vocab_size is not None
    state = work.state.model
    assert isinstance(state, Adapters)
    read = work.begun.read(
        work.adapted.targets,
        work.model.weight_rules(work.Vocab),
        state.whole,
        true_sizes={"vocab": work.model.vocab_size},
    )
    # Collects the arrays by path; `or x` returns each leaf unchanged, since `map_arrays` rebuilds the tree.
    arrays: dict[str, np.ndarray] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, read)

    def on_mesh(path: str, x: np.ndarray) -> jax.Array:
        # Every device receives only its own slice of the host array; no device holds the whole of it.
        sharding = work.state_plan.parameters.sharding(path, mesh)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    # `with_arrays` keeps the run's own scale. It equals that of the files: `open_initial_adapters` refuses others.
    return with_arrays(state, {path: on_mesh(path, x) for path, x in arrays.items()})


def frozen_base(
    training: ResolvedTraining, adapted: Adapted, Vocab: hax.Axis, module: LmHeadModel
) -> tuple[LmHeadModel, WeightRules | None]:
    """The abstract base model of the adapters and the rules of its weights; None if its own rules apply.

    Args:
        training: the run.
        adapted: its adapters.
        Vocab: rows of its embedding.
        module: the abstract model, in the dtype of weights that are not quantized.

    Raises:
        QuantizationError: the base cannot be quantized, or is stored in integers and cannot be merged.
    """
    origin = training.origin
    int8 = adapted.config.base_dtype == "int8"
    if origin is None:
        if int8:
            raise QuantizationError(
                f"{KEY}.base_dtype: weights are quantized to int8 while a checkpoint is read, and the run begins "
                "from no Hugging Face checkpoint (hf_checkpoint, initialize_from_hf)"
            )
        return module, None
    # A merge adds a float update to each weight; a weight stored as int8 cannot represent the sum.
    if origin.has_int8 and training.config.merged_hf_save_path is not None:
        raise QuantizationError(
            f"merged_hf_save_path: the weights of {origin.reference} are 8-bit integers, to which nothing can be "
            "added; use peft_save_path"
        )
    rules = origin.weight_rules(training.model, Vocab, leaves(module))
    quantized = quantize_projections(module, rules, quantize_all=int8, tied_head="share", is_stored=origin.is_int8)
    # A quantized weight has leaves of other paths (`.weight.q`, `.weight.scale`), so a whole copy of it finds no leaf.
    if quantized is not None and (integers := set(adapted.whole) - {leaf.path for leaf in leaves(quantized.module)}):
        raise QuantizationError(
            f"{KEY}.modules_to_save: {', '.join(sorted(integers))} would be 8-bit integers, of which no "
            f"trainable copy can be made; leave it out, or set another {KEY}.base_dtype"
        )
    return (module, None) if quantized is None else (quantized.module, quantized.rules)


def plan_peft_export(run: TrainedRun) -> PeftPlan | None:
    """The plan of the adapter export, also used to gather adapters for merging; None if nothing is exported.

    Raises:
        UnsupportedTargetError: a target has no place in such files; lists all.
    """
    adapted = run.adapted
    if adapted is None or run.config.exports is None:
        return None
    return plan_peft(
        # Groups that are not trained are passed too: the names in peft's config must match the chosen modules only.
        adapted.targets,
        adapted.every,
        run.model.weight_rules(run.Vocab),
        leaves(run.state_plan.adapters),
        use_rslora=adapted.config.use_rslora,
        base=run.config.pretrained,
        true_sizes={"vocab": run.vocab},
    )


def save_adapters(running: Running, state: TrainState, taken: int) -> str:
    """Exports the adapters of a state: in peft's format, merged into their base, or both, as configured.

    Args:
        running: the run.
        state: of which they are.
        taken: steps taken.

    Returns:
        The folder of the adapters, or of the merged model if only that is exported.
    """
    work: TrainWork = running.plan.work
    dirs = running.dirs
    assert work.peft is not None
    # Collects the arrays by path, as above.
    arrays: dict[str, jax.Array] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, state.eval_params)
    tokenizer = work.tokenizer if isinstance(work.tokenizer, FastTokenizer) else None
    folder = dirs.export(taken)
    barrier("exporting")
    if work.config.peft_save_path is not None:
        documents = {} if tokenizer is None else tokenizer_documents(tokenizer)
        write_peft(work.peft, arrays, folder, extra_files=documents, overwrite=True)
    if work.config.merged_hf_save_path is not None:
        merged = folder if dirs.merged is None else join(dirs.merged, f"step-{taken}")
        assert work.adapted is not None
        # Collective: all processes send their shards, process 0 alone receives the factors.
        adapter = gather_adapter(work.peft, arrays, where=f"step {taken}").per_expert(work.adapted.every)
        _save_merged(work, adapter, merged, tokenizer, show=running.session.show)
    # The other processes have sent their last array while process 0 is still writing, so this barrier waits longer.
    barrier("exported", seconds=ONE_FOR_ALL_SECONDS)
    return folder


def _save_merged(
    work: TrainWork, adapter: PeftAdapter, folder: str, tokenizer: FastTokenizer | None, *, show: bool
) -> None:
    """Merges adapters into the checkpoint files that the run began from, on the host; no device is used."""
    assert work.adapted is not None and work.origin is not None and work.origin.checkpoint is not None
    model, source = work.model, work.origin.checkpoint.source
    assert model.vocab_size is not None
    # Files hold the true vocabulary, without the rows that pad it to a multiple of its shards.
    Vocab = hax.Axis("vocab", model.vocab_size)
    rules = model.weight_rules(Vocab)
    module = abstract(lambda: model.build(Vocab, key=jax.random.PRNGKey(0)))
    stored = stored_leaves(leaves(module), rules, source, work.origin.stored)
    files = plan_export(stored, model, Vocab, dtype=work.config.hf_save_dtype)
    merged = MergedTensors(
        source=source,
        rules=rules,
        adapter=adapter,
        targets=work.adapted.targets,
        copies=copied_tensors(stored, rules, work.adapted.whole),
    )
    extras = ExportExtras(tokenizer=tokenizer, eos_ids=tuple(work.config.hf_generation_eos_token_ids or ()))
    write_export(files, merged, folder, extras=extras, overwrite=True)
    if show:
        print("\n".join(rounding_lines(tuple(merged.rounding.values()))), flush=True)
