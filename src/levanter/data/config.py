"""`LmDataConfig`: the `data:` block.

A *component* is one named data set: a source (which files) and a format (which keys of a record), with tags. Components
carry weights for training and are evaluated one by one. All keys of the block are listed here, those of training too,
so that one file serves every entry point; `eval_sets` names the keys that an evaluation does not use in its notes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import draccus

from levanter.config.validators import (
    AnyInt,
    Count,
    Fraction,
    ManyInt,
    NonNegativeFloat,
    PathText,
    PositiveFraction,
    PositiveInt,
    Ranged,
)
from levanter.data.formats import LmDatasetFormatBase, TextLmDatasetFormat
from levanter.data.sources import DatasetSourceBase
from levanter.io.names import name_problem

TrainWeights = dict[str, NonNegativeFloat] | list[tuple[Count, dict[str, NonNegativeFloat]]] | None
"""The weight of each component in training, or a list of (first step, weights); None for equal weights."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Ranged):
    """How a token cache is written."""

    batch_size: PositiveInt = 128
    num_shard_groups: PositiveInt | None = 128
    target_size_per_flush: ManyInt | str = "512MB"


@dataclass(frozen=True, kw_only=True)
class BlockShuffleConfig(Ranged):
    """A shuffle that reads blocks in order: blocks are permuted, then examples within a window of blocks."""

    io_block_size: PositiveInt = 256
    window_blocks: PositiveInt = 512
    perm_type: Literal["feistel", "linear"] = "feistel"


@dataclass(frozen=True, kw_only=True)
class DatasetComponentBase(Ranged, draccus.ChoiceRegistry):
    """The base of all components (`cached` where no type is given)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of a component without `type`: a cache."""
        return "cached"


FILL_ROLES = ("prefix", "suffix", "middle")
"""The sentinels of `fim` that every tokenizer must have."""


@dataclass(frozen=True, kw_only=True)
class FillInMiddleConfig(Ranged):
    """Documents whose middle is moved to their end.

    Attributes:
        rate: the share of documents that are changed.
        spm: the share of these whose suffix comes first.
        sentinels: the special tokens `prefix`, `suffix`, `middle`, and `end` behind the middle if there is one; by
            default those of well-known code models.
    """

    rate: PositiveFraction = 0.5
    spm: Fraction = 0.5
    sentinels: dict[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sentinels is None:
            return
        problems = [f"it has no {role!r}" for role in FILL_ROLES if role not in self.sentinels]
        problems += [f"unknown key {key!r}" for key in self.sentinels if key not in (*FILL_ROLES, "end")]
        if not problems and len(set(self.sentinels.values())) < len(self.sentinels):
            problems.append("two of them are the same token")
        if problems:
            raise ValueError(
                f"fim.sentinels: {'; '.join(problems)}; expected {{prefix: TOKEN, suffix: TOKEN, middle: TOKEN}}, and "
                "end: TOKEN if the middle ends with one"
            )


@DatasetComponentBase.register_subclass("cached")
@dataclass(frozen=True, kw_only=True)
class DatasetComponent(DatasetComponentBase):
    """Documents of one source.

    Attributes:
        source: where the documents are stored.
        format: the format of a record.
        cache_dir: the folder of the component's token cache; default `<data.cache_dir>/<name>`.
        pack: how training packs several short documents into one sequence: whole documents as they fit (`true`), at
            most so many (a number), one (`pad`), or `best_fit_cropped`, which fills every row and crops documents.
        fim: fill in the middle: which share of the training documents have their middle moved to the end.
        tags: tags under which the component's metrics are also aggregated.
        split: the split of the source that evaluation reads.
        flat_cache: whether the cache lies directly in `cache_dir` instead of a folder for each split.
    """

    source: DatasetSourceBase | None = None
    cache_dir: PathText | None = None
    format: LmDatasetFormatBase = field(default_factory=TextLmDatasetFormat)
    pack: bool | PositiveInt | Literal["pad", "best_fit_cropped"] | None = None
    fim: FillInMiddleConfig | None = None
    tags: list[str] | None = None
    split: str = "validation"
    flat_cache: bool = False


@DatasetComponentBase.register_subclass("concat")
@dataclass(frozen=True, kw_only=True)
class ConcatDatasetComponent(DatasetComponentBase):
    """Several components read one after the other as if they were one."""

    children: dict[str, DatasetComponent] = field(default_factory=dict)
    tags: list[str] | None = None


@DatasetComponentBase.register_subclass("direct")
@dataclass(frozen=True, kw_only=True)
class DirectDatasetComponent(DatasetComponentBase):
    """Documents given in place: split → texts."""

    datasets: dict[str, list[str]] = field(default_factory=dict)
    tags: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class LmDataConfig(Ranged):
    """The `data:` block of every entry point.

    Attributes:
        tokenizer: a hub id, a folder or a file; "passthrough" reads token ids and needs `vocab_size`.
        vocab_size: the number of token ids, if the tokenizer does not define it.
        cache_dir: the folder of the token caches.
        enforce_bos: whether a document begins with BOS, if the files of the tokenizer name one.
        enforce_eos: whether a document ends with EOS, if the tokenizer has one.
        chat_template: chat template for chat formats without their own.
        block_cross_document_attention: whether a token attends only to its own document.
        components: the data sets by name.
        train_weights: the weight of each component in training, or a list of (first step, weights).
    """

    tokenizer: str = "gpt2"
    vocab_size: PositiveInt | None = None
    cache_dir: PathText | None = "cache/"
    cache_options: CacheOptions = field(default_factory=CacheOptions)
    enforce_bos: bool = True
    enforce_eos: bool = True
    auto_build_caches: bool = True
    chat_template: str | None = None
    ignore_token_id: AnyInt | None = -100

    shuffle: bool | Count | BlockShuffleConfig = field(default_factory=BlockShuffleConfig)
    permutation_type: Literal["feistel", "linear"] | None = "feistel"
    block_cross_document_attention: bool = True

    components: dict[str, DatasetComponentBase] = field(default_factory=dict)
    train_weights: TrainWeights = None
    stop_strategy: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    target_budget: ManyInt | None = None
    experiment_budget: ManyInt | None = None
    mixture_block_size: PositiveInt = 2048
    max_train_batches: dict[str, Count] | None = None
    num_validation_sequences: dict[str, Count] | None = None
    shuffle_before_trainval_split: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Earlier generations' names have parts (`paloma/c4`), each of which is a folder of token stores.
        named = ((name, name_problem(name, max_components=0)) for name in self.components)
        problems = [f"data.components: {problem}" for _, problem in named if problem is not None]
        problems += _weight_problems(self.train_weights, self.components)
        if problems:
            raise ValueError("\n".join(problems))


def _weight_problems(weights: TrainWeights, components: Mapping[str, object]) -> list[str]:
    stages: Sequence[dict[str, float]]
    if weights is None:
        return []
    # Each unknown name once, even if several stages have it.
    stages = [weights] if isinstance(weights, dict) else [stage for _, stage in weights]
    problems = []
    for name in dict.fromkeys(name for stage in stages for name in stage):
        if name not in components:
            known = ", ".join(sorted(components)) or "none"
            problems.append(f"data.train_weights: {name!r} is not a component (components: {known})")
    return problems
