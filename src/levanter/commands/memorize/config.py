"""The config of memorization runs (`eval_careless_lm`), and each of its books resolved.

The keys are the upstream script's, with its defaults: a window at every tenth character, no BOS, the full vocabulary.
`preset:` replaces these defaults by a convention's; explicit keys override both, for all books or for one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from levanter.base.bounded_json import lone_surrogate
from levanter.commands.model.config import LoadedModelKeys, model_key_problems
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import NonNegativeFloat, PathText, PositiveFraction, PositiveInt, Ranged
from levanter.io import join
from levanter.memorization.books import slug
from levanter.memorization.conventions import WindowConvention, convention
from levanter.memorization.coverage import DEFAULT_THRESHOLD, Cover
from levanter.memorization.results import Scheme
from levanter.trainer.config import TrainerConfig

DEFAULT_OUTPUT = "logs/memorization"
_WINDOWING = {
    "chunk_size": "window_tokens",
    "prompt_tokens": "prefix_tokens",
    "token_mode": "token_mode",
    "cursor_inc_tokens": "stride_tokens",
    "cursor_inc_chars": "stride_chars",
    "slice_length": "slice_chars",
    "bos": "bos",
    "drop_duplicates": "drop_duplicates",
}
"""Config key → field of `Windowing`."""


@dataclass(frozen=True, kw_only=True)
class BookConfig(Ranged):
    """One of several books; a key that is null is inherited from the run.

    Attributes:
        txt_path: the text.
        book_title: title of the book; null for its key.
        plot_path, histogram_path, pz_data_path: file names of the outputs.
        chunk_size, prompt_tokens, token_mode, cursor_inc_tokens, cursor_inc_chars, slice_length, bos, drop_duplicates:
            how the text is split into windows (see the keys of the same names above).
        eval_batch_size: windows per batch.
        max_examples: scores only the first so many windows.
    """

    txt_path: str
    book_title: str | None = None
    plot_path: str | None = None
    histogram_path: str | None = None
    pz_data_path: str | None = None
    chunk_size: PositiveInt | None = None
    prompt_tokens: PositiveInt | None = None
    token_mode: bool | None = None
    cursor_inc_tokens: PositiveInt | None = None
    cursor_inc_chars: PositiveInt | None = None
    slice_length: PositiveInt | None = None
    bos: bool | None = None
    drop_duplicates: bool | None = None
    eval_batch_size: PositiveInt | None = None
    max_examples: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class EvalCarelessLmConfig(LoadedModelKeys):
    """Measure how much of a book a model has memorized (p_z of sliding windows).

    A setting of the windows that is null takes the preset's value; without a preset, upstream's.

    Attributes:
        initialize_from_hf: alias of `hf_checkpoint`.
        use_hf_model_config: no effect, as upstream: the architecture is the checkpoint's. If set, a contradicting
            `model:` block gives a note instead of an error.
        trainer: devices, mesh, precision, trackers.
        tokenizer_name: a tokenizer other than the checkpoint's own.
        txt_path: the text of a single book.
        book_title: title of the book.
        books: several books, each under its own key; the model is loaded once for all of them.
        preset: `paper` or `levanter`: the convention for windows and the reported p_z; null for upstream's defaults.
        chunk_size: tokens per window (100).
        prompt_tokens: how many of them form the prompt (50).
        token_mode: slides over the book's tokens instead of its characters.
        cursor_inc_tokens: tokens between two windows (token mode).
        cursor_inc_chars: characters between two windows (10).
        slice_length: characters that are tokenized for one window.
        bos: begins every window with BOS, which counts as one of its tokens.
        drop_duplicates: skips windows whose tokens occurred in an earlier window.
        scheme: the decoding scheme that is reported first: `full`, `k40`, `greedy`, or one like `k20_t0.8`.
        schemes: further decoding schemes; full, k40 and greedy are always included.
        max_examples: scores only the first so many windows.
        eval_batch_size: windows per batch, over all devices; null for 32, or the next multiple of the batch shards.
        allow_nondivisible_batch_size: rounds an explicit batch size up to a multiple of the batch shards.
        output_base_path: the folder of the results; with `books:`, each book has its own subfolder.
        plot_path, histogram_path, pz_data_path: file names of the outputs.
        coverage_threshold: smallest p_z at which a suffix counts as reproduced (0.1 %).
        cover: the characters that count as covered by such a window: its `suffix`, the full `window`, or as in
            `paper_v1`.
        keep_text: stores the text with the results, so that reports can show passages.
        if_exists: `resume` continues an unfinished run (a finished one is unchanged); `replace` overwrites existing
            results.
        save_seconds: seconds between two saves of partial results: the most work that is lost if the process is killed.
        plan: assumptions for planning.
    """

    initialize_from_hf: PathText | None = None
    use_hf_model_config: bool | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tokenizer_name: str | None = None
    txt_path: str | None = None
    book_title: str = "Book"
    books: dict[str, BookConfig] = field(default_factory=dict)
    preset: str | None = None
    chunk_size: PositiveInt | None = None
    prompt_tokens: PositiveInt | None = None
    token_mode: bool | None = None
    cursor_inc_tokens: PositiveInt | None = None
    cursor_inc_chars: PositiveInt | None = None
    slice_length: PositiveInt | None = None
    bos: bool | None = None
    drop_duplicates: bool | None = None
    scheme: str | None = None
    schemes: tuple[str, ...] = ()
    max_examples: PositiveInt | None = None
    eval_batch_size: PositiveInt | None = None
    allow_nondivisible_batch_size: bool = False
    output_base_path: PathText = DEFAULT_OUTPUT
    plot_path: str | None = None
    histogram_path: str | None = None
    pz_data_path: str | None = None
    coverage_threshold: PositiveFraction = DEFAULT_THRESHOLD
    cover: Cover = "suffix"
    keep_text: bool = True
    if_exists: Literal["resume", "replace"] = "resume"
    save_seconds: NonNegativeFloat = 30.0
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self):
        super().__post_init__()
        problems = model_problems(self)
        if self.books and self.txt_path is not None:
            problems.append(
                "txt_path and books: the former is for a single book, the latter for several; keep one of them"
            )
        if not self.books and self.txt_path is None:
            problems.append("no book: give txt_path, or several under books")
        # An unknown preset is one problem among others, not an exception at this point.
        titles = {
            "book_title": self.book_title,
            **{f"books.{k}.book_title": b.book_title for k, b in self.books.items()},
        }
        problems += [
            f"{key}: {title!r} is no text: it was not UTF-8"
            for key, title in titles.items()
            if title is not None and lone_surrogate(title) is not None
        ]
        problems += _collected(lambda: convention(self.preset))
        problems += scheme_problems([name for name in (self.scheme, *self.schemes) if name is not None])
        for title in [title for title in self.books if not title.strip()]:
            problems.append(f"books: {title!r} cannot be the name of a book")
        # Books can only be resolved with a valid preset and valid schemes.
        if not problems:
            resolved = [resolve_book(self, key, book) for key, book in self.books.items()]
            for book in resolved or [single_book(self)]:
                where = f"books.{book.key}: " if self.books else ""
                problems += [where + problem for problem in book.problems()]
            problems += _twice([book.folder for book in resolved])
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def reference(self) -> str | None:
        """The model's reference under either key; None if there is none."""
        return self.hf_checkpoint or self.initialize_from_hf


@dataclass(frozen=True, kw_only=True)
class Book:
    """A book of the run, fully resolved.

    Attributes:
        key: its key under `books:`; its title if it is the only one.
        title: its title.
        path: its text.
        folder: of its results.
        convention: how the text is split into windows, and the decoding scheme that is reported first.
        batch_size: windows of a batch over all devices; None if the config leaves it open.
        max_windows: score only the first so many.
        names: output files with names other than the default: `plot_path` etc.
    """

    key: str
    title: str
    path: str
    folder: str
    convention: WindowConvention
    batch_size: int | None
    max_windows: int | None
    names: Mapping[str, str]

    def problems(self) -> list[str]:
        """Its problems, by config key."""
        problems = self.convention.windowing.problems()
        if self.batch_size is not None and self.batch_size < 1:
            problems.append(f"eval_batch_size: must be at least 1, got {self.batch_size}")
        if self.max_windows is not None and self.max_windows < 1:
            problems.append(f"max_examples: must be at least 1, or null for all; got {self.max_windows}")
        return problems


def resolve_books(config: EvalCarelessLmConfig) -> tuple[Book, ...]:
    """The books of a run, in the order of the config."""
    return tuple(resolve_book(config, key, book) for key, book in config.books.items()) or (single_book(config),)


def single_book(config: EvalCarelessLmConfig) -> Book:
    """The one book of a config without `books:`."""
    # With the default folder each book gets a subfolder; an explicit folder is the book's own.
    in_default = config.output_base_path == DEFAULT_OUTPUT
    folder = join(config.output_base_path, slug(config.book_title)) if in_default else config.output_base_path
    assert config.txt_path is not None
    values = BookConfig(txt_path=config.txt_path)
    return _book(config, config.book_title, config.book_title, config.txt_path, folder, values)


def resolve_book(config: EvalCarelessLmConfig, key: str, book: BookConfig) -> Book:
    """One of several books."""
    return _book(config, key, book.book_title or key, book.txt_path, join(config.output_base_path, slug(key)), book)


def _book(config: EvalCarelessLmConfig, key: str, title: str, path: str, folder: str, values: BookConfig) -> Book:
    # A value of the book comes before one of the run; a value that neither sets is left to the preset.
    explicit = {
        target: value
        for name, target in _WINDOWING.items()
        if (value := getattr(values, name) if getattr(values, name) is not None else getattr(config, name)) is not None
    }
    names = {
        # An empty file name counts as not set.
        name: value
        for name in ("plot_path", "histogram_path", "pz_data_path")
        if (value := getattr(values, name) or getattr(config, name)) is not None
    }
    return Book(
        key=key,
        title=title,
        path=path,
        folder=folder,
        convention=convention(
            config.preset, scheme=None if config.scheme is None else Scheme.parse(config.scheme), **explicit
        ),
        batch_size=config.eval_batch_size if values.eval_batch_size is None else values.eval_batch_size,
        max_windows=config.max_examples if values.max_examples is None else values.max_examples,
        names=names,
    )


def model_problems(config: Any) -> list[str]:
    """Problems of a config's model keys."""
    return model_key_problems(config, alias=config.initialize_from_hf)


def scheme_problems(names: Sequence[str]) -> list[str]:
    """Problems of the names of decoding schemes."""
    problems = []
    for name in names:
        # The default binds this iteration's name.
        scheme_errors = _collected(lambda name=name: Scheme.parse(name))
        if not scheme_errors and Scheme.parse(name).suffix_tokens is not None:
            scheme_errors.append(
                f"scheme {name}: the suffix length is chunk_size − prompt_tokens; shorter ones follow from the "
                "results and need no key"
            )
        problems += scheme_errors
    return problems


def _collected(attempt: Callable[[], object]) -> list[str]:
    try:
        attempt()
    except ValueError as error:
        return [str(error)]
    return []


def _twice(folders: list[str]) -> list[str]:
    # Folder names are slugs of the keys, so different keys may give the same folder.
    repeated = sorted({folder for folder in folders if folders.count(folder) > 1})
    return [
        f"books: several would write to {folder}; give them keys that differ in letters or digits"
        for folder in repeated
    ]
