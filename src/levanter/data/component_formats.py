"""Resolves a component's format, chat template, packing and token store folder.

Training and evaluation read the same formats and interpret their keys in the same way.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from levanter.data.config import (
    CacheOptions,
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    DirectDatasetComponent,
    LmDataConfig,
)
from levanter.data.documents import Formats, component_format
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PrebuiltLmDatasetFormat,
    PreferenceChatLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
    format_name,
)
from levanter.data.sources import PythonDocsSource
from levanter.io.paths import MissingFileError, join

FORMATS: Formats = (
    TextLmDatasetFormat,
    ChatLmDatasetFormat,
    SupervisedLmDatasetFormat,
    PrebuiltLmDatasetFormat,
)
"""The formats that training and evaluation of language models read."""

PAIRS: Formats = (PreferenceChatLmDatasetFormat,)
"""The formats that training on preferences reads."""


def with_template(component: DatasetComponentBase, template: str | None) -> DatasetComponentBase:
    """The component with the text of its chat format's template; `data.chat_template` if it has none of its own.

    If neither is set, the tokenizer's template is used later, when the tokenizer is loaded.

    Raises:
        MissingFileError: the file of a template does not exist.
        DataError: the file is not text.
    """
    if isinstance(component, ConcatDatasetComponent):
        children = {name: with_template(child, template) for name, child in component.children.items()}
        return replace(component, children=children)
    # Upstream allows the format on the component and on its source; whichever holds the chat format gets the text.
    source = getattr(component, "source", None)
    for holder in (component, source):
        format = getattr(holder, "format", None)
        if isinstance(format, ChatLmDatasetFormat | PreferenceChatLmDatasetFormat):
            text = _read_template(template if format.chat_template is None else format.chat_template)
            changed = replace(holder, format=replace(format, chat_template=text))  # type: ignore[type-var]
            component = changed if holder is component else replace(component, source=changed)  # type: ignore
    return component


def has_chats(config: LmDataConfig) -> bool:
    """Whether some component holds conversations, by the configuration alone."""
    pending = list(config.components.values())
    while pending:
        component = pending.pop()
        if isinstance(component, ConcatDatasetComponent):
            pending += component.children.values()
        formats = (getattr(component, "format", None), getattr(getattr(component, "source", None), "format", None))
        if any(isinstance(format, ChatLmDatasetFormat) for format in formats):
            return True
    return False


def _read_template(template: str | None) -> str | None:
    if template is None:
        return None
    # Jinja is imported with it, which only conversations need.
    from levanter.data.chat import template_text

    try:
        return template_text(template)
    except MissingFileError as error:
        raise MissingFileError(f"chat_template: neither a Jinja template nor an existing file: {error}") from error
    except DataError:
        raise
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def format_and_pack(
    where: str, component: DatasetComponentBase, formats: Formats = FORMATS
) -> tuple[LmDatasetFormatBase, bool | int | str | None]:
    """A component's format, one of `formats`, and how its documents are packed. All children must agree."""
    if isinstance(component, DatasetComponent):
        format = component_format(where, component, formats)
        raise_problems([f"{where}.format.{problem}" for problem in _format_problems(format)])
        pack = component.pack if component.pack is not None else getattr(format, "pack", None)
        # `bool` is a subclass of `int`, and `pack: true` is not a number of documents.
        if isinstance(pack, int) and not isinstance(pack, bool) and pack < 1:
            raise DataError(f"{where}.pack: documents per row must be at least 1, got {pack}")
        if pack == "best_fit_cropped" and not isinstance(format, TextLmDatasetFormat):
            raise DataError(
                f"{where}.pack: best_fit_cropped crops documents of plain text; records of format "
                f"`{format_name(format)}` stay whole: expected true, a number or pad"
            )
        return format, pack
    if isinstance(component, ConcatDatasetComponent):
        child_formats = [
            format_and_pack(f"{where}.children.{name}", child, formats) for name, child in component.children.items()
        ]
        if not child_formats:
            raise DataError(f"{where}.children: is empty")
        # One component has one token store, whose identity has one format.
        if any(child_format != child_formats[0] for child_format in child_formats):
            raise DataError(f"{where}.children: have different formats or packing; make them separate components")
        cached_children = [name for name, child in component.children.items() if child.cache_dir is not None]
        if cached_children:
            raise DataError(
                f"{where}.children.{cached_children[0]}.cache_dir: children share the token store of {where}"
            )
        return child_formats[0]
    if TextLmDatasetFormat not in formats:
        raise DataError(f"{where}: inline texts are not pairs; expected a source of preference_chat records")
    return TextLmDatasetFormat(), None


def _template_problems(template: str | None) -> Iterator[str]:
    if template is None:
        return
    from levanter.data.chat import ChatTemplate

    # A template that does not parse is reported here, before any text is tokenized. BOS and EOS matter only when it
    # runs.
    try:
        ChatTemplate(text=template).check()
    except DataError as error:
        yield str(error)


def _format_problems(format: LmDatasetFormatBase) -> Iterator[str]:
    """Problems of a format's keys."""
    if isinstance(format, ChatLmDatasetFormat):
        if format.single_turn:
            yield "single_turn: true is for prepared prompts (eval_sliding_lm); whole conversations are read here"
        yield from _template_problems(format.chat_template)
        if format.turns != "all" and not format.mask_user_turns:
            yield f"turns: {format.turns} has no effect with mask_user_turns: false, which counts every token"
    if isinstance(format, PreferenceChatLmDatasetFormat):
        if format.pack:
            yield "pack: true: several pairs to a row are not implemented yet; set it to false"
        yield from _template_problems(format.chat_template)
    if isinstance(format, PrebuiltLmDatasetFormat):
        if format.loss_weight_transform not in (None, "shift_left"):
            yield f"loss_weight_transform: `shift_left` or null, got {format.loss_weight_transform!r}"
        elif format.loss_weight_transform and format.loss_weights_key is None:
            yield "loss_weight_transform: needs loss_weights_key"


def store_folder(config: LmDataConfig, name: str, component: DatasetComponentBase, split: str) -> str | None:
    """The folder of a component's token store for a split; None if it has none.

    Texts of the configuration and of Python itself are small, and have a store only if it is configured: the first by a
    `cache_dir` of their own, the second also by an explicit `data.cache_dir`.
    """
    source = getattr(component, "source", None)
    cache_dir = getattr(component, "cache_dir", None) or getattr(source, "cache_dir", None)
    small = isinstance(component, DirectDatasetComponent) or (
        isinstance(source, PythonDocsSource) and not is_set(config, "cache_dir")
    )
    if cache_dir is None and (config.cache_dir is None or small):
        return None
    folder = cache_dir if cache_dir is not None else join(str(config.cache_dir), name)
    # `flat_cache` is upstream's layout of a cache that holds a single split.
    return folder if getattr(component, "flat_cache", False) else join(folder, split)


def is_set(config: LmDataConfig | DatasetComponentBase | CacheOptions, key: str) -> bool:
    """Whether a key differs from its default."""
    (key_field,) = (field for field in fields(config) if field.name == key)
    default = key_field.default_factory() if key_field.default_factory is not MISSING else key_field.default
    return getattr(config, key) != default
