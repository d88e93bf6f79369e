"""What a component is: its format, checked, with its template; its packing; where the store of its tokens lies.

Training and evaluation read the same formats and understand their keys in the same way.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace

from levanter.data.chat import ChatTemplate
from levanter.data.config import (
    CacheOptions,
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    DirectDatasetComponent,
    LmDataConfig,
)
from levanter.data.documents import Formats, format_of
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.data.sources import PythonDocsSource
from levanter.io.paths import join

FORMATS: Formats = (
    TextLmDatasetFormat,
    ChatLmDatasetFormat,
    SupervisedLmDatasetFormat,
    PrebuiltLmDatasetFormat,
)
"""What is read here."""


def with_template(component: DatasetComponentBase, template: str | None) -> DatasetComponentBase:
    """The component with `data.chat_template` where its chat format has none of its own."""
    if isinstance(component, ConcatDatasetComponent):
        children = {name: with_template(child, template) for name, child in component.children.items()}
        return replace(component, children=children)
    source = getattr(component, "source", None)
    for holder in (component, source):
        format = getattr(holder, "format", None)
        if isinstance(format, ChatLmDatasetFormat) and format.chat_template is None:
            changed = replace(holder, format=replace(format, chat_template=template))  # type: ignore[type-var]
            component = changed if holder is component else replace(component, source=changed)  # type: ignore
    return component


def format_and_pack(where: str, component: DatasetComponentBase) -> tuple[LmDatasetFormatBase, bool | int | str | None]:
    """A component's format, and how its documents are packed. All children of one have one format."""
    if isinstance(component, DatasetComponent):
        format = format_of(where, component, FORMATS)
        raise_problems([f"{where}.format.{problem}" for problem in _format_problems(format)])
        pack = component.pack if component.pack is not None else getattr(format, "pack", None)
        if isinstance(pack, int) and not isinstance(pack, bool) and pack < 1:
            raise DataError(f"{where}.pack: documents per row must be at least 1, got {pack}")
        return format, pack
    if isinstance(component, ConcatDatasetComponent):
        found = [format_and_pack(f"{where}.children.{name}", child) for name, child in component.children.items()]
        if not found:
            raise DataError(f"{where}.children: is empty")
        if any(each != found[0] for each in found):
            raise DataError(f"{where}.children: have different formats or packing; make them separate components")
        own = [name for name, child in component.children.items() if child.cache_dir is not None]
        if own:
            raise DataError(f"{where}.children.{own[0]}.cache_dir: children share the token store of {where}")
        return found[0]
    return TextLmDatasetFormat(), None


def _format_problems(format: LmDatasetFormatBase) -> Iterator[str]:
    """What cannot be done with a format's keys."""
    if isinstance(format, ChatLmDatasetFormat):
        if format.single_turn:
            yield "single_turn: true is for prepared prompts (eval_sliding_lm); whole conversations are read here"
        if format.chat_template is None:
            yield "chat_template: is missing (data.chat_template serves all components); a tokenizer's own is not read"
        elif format.mask_user_turns and not _template(format).marks_generation:
            yield (
                "chat_template: does not mark what the assistant wrote; enclose it in {% generation %} … "
                "{% endgeneration %}, or set mask_user_turns: false"
            )
        else:
            try:
                _template(format).check()
            except DataError as error:
                yield str(error)
    if isinstance(format, PrebuiltLmDatasetFormat):
        if format.loss_weight_transform not in (None, "shift_left"):
            yield f"loss_weight_transform: `shift_left` or null, got {format.loss_weight_transform!r}"
        elif format.loss_weight_transform and format.loss_weights_key is None:
            yield "loss_weight_transform: needs loss_weights_key"


def _template(format: ChatLmDatasetFormat) -> ChatTemplate:
    return ChatTemplate(text=str(format.chat_template), bos_token="", eos_token="")


def store_folder(config: LmDataConfig, name: str, component: DatasetComponentBase, split: str) -> str | None:
    """The folder of a component's token store for a split; None where it keeps none.

    Texts of the configuration and of Python itself are small, and keep one only where they are told to: the first by a
    `cache_dir` of their own, the second also by one that is written in `data:`.
    """
    source = getattr(component, "source", None)
    own = getattr(component, "cache_dir", None) or getattr(source, "cache_dir", None)
    small = isinstance(component, DirectDatasetComponent) or (
        isinstance(source, PythonDocsSource) and not is_set(config, "cache_dir")
    )
    if own is None and (config.cache_dir is None or small):
        return None
    folder = own if own is not None else join(str(config.cache_dir), name)
    return folder if getattr(component, "flat_cache", False) else join(folder, split)


def is_set(config: LmDataConfig | DatasetComponentBase | CacheOptions, key: str) -> bool:
    """Whether a key differs from its default."""
    found = next(field for field in fields(config) if field.name == key)
    default = found.default_factory() if found.default_factory is not MISSING else found.default
    return getattr(config, key) != default
