"""Sources: the locations of a component's records.

A source is configuration. `documents.py` resolves it into the files of one split before any weight is read;
`readers.py` reads their documents.
"""

from dataclasses import dataclass, field
from typing import Literal

import draccus

from levanter.config.validators import PositiveInt, Ranged
from levanter.data.formats import LmDatasetFormatBase, TextLmDatasetFormat
from levanter.io.names import name_problem


@dataclass(frozen=True, kw_only=True)
class DatasetSourceBase(Ranged, draccus.ChoiceRegistry):
    """The base of all sources (`url` where no type is given)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of a source without `type`: files named by URL or path."""
        return "url"


@DatasetSourceBase.register_subclass("url")
@dataclass(frozen=True, kw_only=True)
class UrlDatasetSource(DatasetSourceBase):
    """Files: local paths or URLs, with `{1..128}` and `{a,b}` expanded and `*` matched.

    Attributes:
        train_urls: the files of the split `train`.
        validation_urls: the files of the split `validation`.
        tags, cache_dir, format: as on the component, whose own values take precedence.
    """

    train_urls: list[str] = field(default_factory=list)
    validation_urls: list[str] = field(default_factory=list)
    tags: list[str] | None = None
    cache_dir: str | None = None
    format: LmDatasetFormatBase = field(default_factory=TextLmDatasetFormat)

    def urls(self, split: str) -> list[str]:
        """The patterns of a split; none for a split that this source does not have."""
        return {"train": self.train_urls, "validation": self.validation_urls}.get(split, [])


@DatasetSourceBase.register_subclass("hf")
@dataclass(frozen=True, kw_only=True)
class HfDatasetSource(DatasetSourceBase):
    """A data set of the Hugging Face Hub."""

    id: str
    name: str | None = None
    revision: str | None = None
    stream: bool = True
    splits: list[str] | None = None
    tags: list[str] | None = None
    cache_dir: str | None = None
    format: LmDatasetFormatBase = field(default_factory=TextLmDatasetFormat)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The id becomes part of an `hf://` URL and, by default, of a folder name; `..` must not lead out of either.
        problem = name_problem(self.id, max_components=2)
        if problem is not None:
            raise ValueError(f"id: {problem}; expected a data set of the Hub: NAME or OWNER/NAME")


@DatasetSourceBase.register_subclass("python_docs")
@dataclass(frozen=True, kw_only=True)
class PythonDocsSource(DatasetSourceBase):
    """Text of every Python installation: the language reference topics behind `help("…")` (`pydoc_data.topics`).

    The topics, sorted by name and joined by two newlines, are one document. It is the only one and belongs to the
    split `validation`. The text differs between Python versions.

    Attributes:
        max_chars: how many characters to take from the beginning; all if absent.
        hold_out_every: n: makes each topic a document of its own and every n-th of them validation data; the others are
            training data.
    """

    max_chars: PositiveInt | None = None
    hold_out_every: PositiveInt | None = None
    split: Literal["validation"] = "validation"
    tags: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hold_out_every is not None and self.hold_out_every < 2:
            raise ValueError(f"hold_out_every must be at least 2 (every second topic), got {self.hold_out_every}")
