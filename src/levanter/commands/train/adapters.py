"""The adapters of a training run: which there are, and how they are saved as peft reads them."""

import haliax as hax
import jax

from haliax_ext.abstract import abstract, leaves, map_arrays
from haliax_ext.rules import WeightRules
from levanter.commands.model.origin import Origin
from levanter.commands.model.quantization import QuantizationError, quantized
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.places import Places
from levanter.commands.train.work import TrainWork
from levanter.compat.hf.export import Beside, plan_export, tokenizer_documents, write_export
from levanter.compat.hf.peft import PeftAdapter, PeftPlan, gathered, plan_peft, write_peft
from levanter.compat.hf.peft.merge import MergedLeaves, rounding_lines, stored_leaves
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.io import join
from levanter.models.adapters.targets import KEY, find_targets, groups_of
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.processes.barrier import ONE_FOR_ALL_SECONDS, barrier
from levanter.trainer.adapted_state import Adapted
from levanter.trainer.state import StatePlan, TrainState


def found_adapters(config: TrainLmConfig, model: LmConfig, Vocab: hax.Axis, module: LmHeadModel) -> Adapted | None:
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
    every = groups_of(module, model.weight_rules(Vocab))
    return Adapted(targets=find_targets(every, config.lora), config=config.lora, every=every)


def frozen_base(
    config: TrainLmConfig, adapted: Adapted, origin: Origin | None, model: LmConfig, Vocab: hax.Axis, held: LmHeadModel
) -> tuple[LmHeadModel, WeightRules | None]:
    """The model that adapters are of, abstract, and where its arrays come from; None for where its names say.

    Args:
        config: the run.
        adapted: its adapters.
        origin: the checkpoint that it begins from; None for none.
        model: the architecture.
        Vocab: rows of its embedding.
        held: the model, in the dtype that it is held in where it is not held in integers.

    Raises:
        QuantizationError: it cannot be held in integers, or is stored in them and cannot be merged.
    """
    asked = adapted.config.base_dtype == "int8"
    if origin is None:
        if asked:
            raise QuantizationError(
                f"{KEY}.base_dtype: int8 is made of a checkpoint's weights while they are read, and the run begins "
                "from no Hugging Face checkpoint (hf_checkpoint, initialize_from_hf)"
            )
        return held, None
    if origin.has_int8 and config.merged_hf_save_path is not None:
        raise QuantizationError(
            f"merged_hf_save_path: the weights of {origin.reference} are 8-bit integers, to which nothing can be "
            "added; use peft_save_path"
        )
    rules = origin.weight_rules(model, Vocab, leaves(held))
    found = quantized(held, rules, asked=asked, tied_head="share", is_stored=origin.is_int8)
    return (held, None) if found is None else (found.module, found.rules)


def planned_peft(
    config: TrainLmConfig, adapted: Adapted | None, model: LmConfig, Vocab: hax.Axis, plan: StatePlan
) -> PeftPlan | None:
    """What a run saves of its adapters, or gathers to merge it; None for nothing.

    Raises:
        UnsupportedTargetError: a target has no place in such files; lists all.
    """
    if adapted is None or config.exports is None:
        return None
    return plan_peft(
        adapted.targets,
        adapted.every,
        model.weight_rules(Vocab),
        leaves(plan.adapters),
        use_rslora=adapted.config.use_rslora,
        base=config.pretrained,
    )


def save_adapters(work: TrainWork, state: TrainState, places: Places, taken: int, *, show: bool) -> str:
    """Writes the adapters of a state as peft reads them, and merged into their base, as the run is asked to.

    Args:
        work: the run's.
        state: of which they are.
        places: the run's folders.
        taken: steps taken.
        show: whether this process prints.

    Returns:
        The folder of the adapters, or of the merged model where only that is asked for.
    """
    assert work.peft is not None
    arrays: dict[str, jax.Array] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, state.judged)
    tokenizer = work.tokenizer if isinstance(work.tokenizer, FastTokenizer) else None
    folder = places.export(taken)
    barrier("exporting")
    if work.config.peft_save_path is not None:
        beside = {} if tokenizer is None else tokenizer_documents(tokenizer)
        write_peft(work.peft, arrays, folder, beside=beside, overwrite=True)
    if work.config.merged_hf_save_path is not None:
        merged = folder if places.merged is None else join(places.merged, f"step-{taken}")
        assert work.adapted is not None
        adapter = gathered(work.peft, arrays, where=f"step {taken}").of_model(work.adapted.every)
        _save_merged(work, adapter, merged, tokenizer, show=show)
    # Process 0 was still writing when the others had nothing left to send.
    barrier("exported", seconds=ONE_FOR_ALL_SECONDS)
    return folder


def _save_merged(
    work: TrainWork, adapter: PeftAdapter, folder: str, tokenizer: FastTokenizer | None, *, show: bool
) -> None:
    """Merges adapters into the files that the run began from; nothing of it is on a device."""
    assert work.adapted is not None and work.origin is not None and work.origin.checkpoint is not None
    model, source = work.model, work.origin.checkpoint.source
    assert model.vocab_size is not None
    # Files have no rows that a mesh rounds up to.
    Vocab = hax.Axis("vocab", model.vocab_size)
    rules = model.weight_rules(Vocab)
    module = abstract(lambda: model.build(Vocab, key=jax.random.PRNGKey(0)))
    own = stored_leaves(leaves(module), rules, source, work.origin.stored)
    files = plan_export(own, model, Vocab, dtype=work.config.hf_save_dtype)
    dtypes = {tensor.dtype for tensor in files.tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    merged = MergedLeaves(source, rules, own, adapter, work.adapted.targets, dtype)
    beside = Beside(tokenizer=tokenizer, eos_ids=tuple(work.config.hf_generation_eos_token_ids or ()))
    write_export(files, merged, folder, beside=beside, overwrite=True)
    if show:
        print("\n".join(rounding_lines(tuple(merged.rounding.values()))), flush=True)
