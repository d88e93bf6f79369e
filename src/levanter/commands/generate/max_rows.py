"""How many rows a run has room for: what `max_rows: auto` takes, by arithmetic and the same on every process.

Never found by trying: a device's memory is known, so are the parameters and a row, and what Programs make beside their
inputs is left free (`programs_room`). With a compiler asked, the plan says what they really take.
"""

from collections.abc import Callable

from haliax_ext.errors import gib
from levanter.commands.model.pretrained import PretrainedModel
from levanter.inference.capacity import ASSUMED_TEMP_BYTES, MAX_CPU_ROWS, MAX_ROWS, DecodeCost, decode_cost
from levanter.inference.config import InferenceConfig
from levanter.inference.kv_cache import CachePlan
from levanter.models.decoder.config import DecoderConfig
from levanter.runplan import Target

HOST_SHARE = 2
"""Of memory that a host's devices share with everything else there, rows take one part in so many."""


def planned_cache(
    make: Callable[[int], CachePlan],
    model: DecoderConfig,
    inference: InferenceConfig,
    pretrained: PretrainedModel,
    target: Target,
    *,
    shards: int,
) -> tuple[CachePlan, str]:
    """The cache of a run, and how its number of rows came about; nothing to say where the config has it.

    Args:
        make: rows → cache.
        model: the architecture.
        inference: the config.
        pretrained: the model on its mesh.
        target: the devices.
        shards: of the rows.

    Raises:
        ValueError: the number is to be found, and nothing limits it.
    """
    if inference.max_rows != "auto":
        return make(inference.max_rows), ""
    least = make(shards)
    own = pretrained.choice.trainer.mesh.hbm_bytes(target.hbm_bytes)
    limit = target.limit_bytes if own is None else own
    if limit is None:
        raise ValueError(
            f"inference.max_rows: auto: the memory of a device of {target.name} is not known, so neither is "
            f"how many rows it holds\n  → inference.max_rows: {max(8 // shards, 1) * shards}, or trainer.mesh.hbm_gib"
        )
    shared = own is None and target.hbm_bytes is None
    value = served_model(model, pretrained, least, inference, decode={}, prefill={})
    room = programs_room(pretrained)
    most = value.fitting(limit // (HOST_SHARE if shared else 1), of_cache(least, inference), temp_bytes=room)
    if inference.pages is not None:
        most = min(most, inference.pages // shards // least.pages_of_row * shards)
    taken = MAX_CPU_ROWS if target.platform == "cpu" else MAX_ROWS
    rows = max(shards, min(most, taken // shards * shards))
    why = f"{most:,} of {least.max_seq_len:,} positions fit {gib(limit)} a device"
    why += ", of which the machine keeps half" if shared else ""
    why += f", with {gib(room)} left for what Programs make"
    if most > rows:
        why += f"; {taken} are taken at most"
        why += ", since on CPUs more of them make hardly more tokens a second" if target.platform == "cpu" else ""
    return make(rows), f"inference.max_rows: auto is {rows}: {why}"


def of_cache(cache: CachePlan, inference: InferenceConfig) -> int:
    """Positions that a row takes of a cache: whole pages, or one where its pages are counted by themselves."""
    return cache.pages_of_row * cache.page_size if inference.pages is None else 1


def programs_room(pretrained: PretrainedModel) -> int:
    """Bytes of a device that Programs take beside their inputs: activations of a prefill chunk and temporaries."""
    return ASSUMED_TEMP_BYTES + sum(each.bytes_per_device for each in pretrained.activations.leaves)


def served_model(
    model: DecoderConfig,
    pretrained: PretrainedModel,
    cache: CachePlan,
    inference: InferenceConfig,
    *,
    decode: dict[int, str],
    prefill: dict[str, tuple[int, int]],
    chip_hour_price: float | None = None,
) -> DecodeCost:
    """What the run holds and moves.

    Args:
        model: the architecture.
        pretrained: the model on its mesh.
        cache: of its rows.
        inference: the config.
        decode, prefill: see `DecodeCost`.
        chip_hour_price: dollars.
    """
    return decode_cost(
        model,
        pretrained.sharding,
        cache,
        vocab_size=pretrained.Vocab.size,
        devices=pretrained.resolved.spec.size,
        steps=inference.steps,
        decode=decode,
        prefill=prefill,
        counts_tokens=inference.penalties,
        automatic=inference.max_rows == "auto",
        temp_bytes=programs_room(pretrained),
        chip_hour_price=chip_hour_price,
    )
