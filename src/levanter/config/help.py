"""`--help` and `--help_all`: the keys of a configuration class with their types, defaults and descriptions.

`--help` begins with the keys that most runs set and lists the outermost keys; `--help trainer.mesh` lists the keys
below one, and `--help_all` all of them.

The meaning of a key is the `help` of its field's metadata, or its entry in the `Attributes:` section of the class's
docstring. A choice shows the keys of its default; with `--model.type llama --help model` those of that type.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import NamedTuple, get_args

import yaml

from levanter.config.dump import plain
from levanter.config.schema import (
    TYPE_KEY,
    Annotation,
    ConfigField,
    choice_names,
    config_fields,
    is_choice,
    is_mapping,
    is_text_value,
    offered_names,
    registered_name,
    type_name,
    union_members,
)

WIDTH = 110
_ENTRY = re.compile(r"^(\w[\w, ]*?)(?: \([^)]*\))?:\s+(.*)$")


def explain(
    cls: type,
    prefix: str = "",
    chosen: Mapping[str, str] | None = None,
    *,
    program: str | None = None,
    common: Sequence[str] = (),
    example: str = "",
) -> str:
    """The help text of a configuration class.

    Args:
        cls: the configuration class.
        prefix: only keys below this dotted path (all for "").
        chosen: for choices, by dotted path: the type whose keys are shown.
        program: what a user types before the keys; default the module that the class is in.
        common: the keys that most runs set. With these, and without `prefix`, blocks are not opened.
        example: a configuration file to begin with.
    """
    program = program or _program(cls)
    lines = [f"usage: {program} --config_path FILE [--key value …]", ""]
    # A dataclass without a docstring of its own gets its signature as one, which explains nothing.
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    if summary and not summary.startswith(cls.__name__ + "("):
        lines += [*textwrap.wrap(summary, WIDTH), ""]
    keys = key_lines(cls, chosen)
    if common and not prefix:
        return "\n".join([*lines, *_first_page(keys, common, program=program, example=example)]) + "\n"
    shown = [key.text for key in keys if _below(key.path, prefix)]
    if not shown:
        return "\n".join([*lines, f"No key begins with `{prefix}`."]) + "\n"
    return "\n".join([*lines, *shown]) + "\n"


def first_steps(cls: type, *, program: str, common: Sequence[str], example: str) -> str:
    """What to give a command that was given nothing."""
    lines = [f"{program.rpartition('.')[2]} needs a configuration: a file, or keys"]
    if example:
        lines.append(f"  → {program} --config_path {example}")
    lines += ["keys that most runs set:", *_first_keys(key_lines(cls), common)]
    return "\n".join([*lines, f"`{program} --help` lists more."])


def _first_page(keys: Sequence["KeyLine"], common: Sequence[str], *, program: str, example: str) -> Iterator[str]:
    """The keys that most runs set in their order, then the outermost keys."""
    if example:
        yield from (f"example: {program} --config_path {example}", "")
    yield from ("keys that most runs set:", *_first_keys(keys, common))
    yield from ("", "outermost keys (`--help KEY` lists the keys below one, `--help_all` all of them):")
    yield from (key.text for key in keys if "." not in key.path and key.annotation is not None)


def _first_keys(keys: Sequence["KeyLine"], common: Sequence[str]) -> Iterator[str]:
    texts = {key.path: key.text for key in keys if key.annotation is not None}
    # Indented as the outermost keys are.
    return (textwrap.indent(textwrap.dedent(texts[path]), "  ") for path in common)


def _below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix + ".")


class KeyLine(NamedTuple):
    """A key of a configuration class.

    Attributes:
        path: its dotted path.
        annotation: its type; None for the line that introduces the keys of a choice.
        text: its lines in the help text.
    """

    path: str
    annotation: Annotation
    text: str


def key_lines(cls: type, chosen: Mapping[str, str] | None = None) -> list[KeyLine]:
    """Every key of a configuration class.

    Args:
        cls: the configuration class.
        chosen: see `explain`.
    """
    return list(_Walk(chosen or {}).of(cls, (), ()))


class _Walk:
    """Walks a configuration class."""

    def __init__(self, chosen: Mapping[str, str]):
        self.chosen = chosen

    def of(self, cls: type, path: tuple[str, ...], seen: tuple[type, ...]) -> Iterator[KeyLine]:
        meanings = attribute_docs(cls)
        for name, config_field in config_fields(cls).items():
            key_path = (*path, name)
            text = _line(key_path, config_field, meanings.get(name, ""))
            yield KeyLine(".".join(key_path), config_field.type, text)
            for member in union_members(config_field.type):
                default = None if config_field.required else config_field.default
                # A mapping of named blocks: list the keys of one block under the placeholder `<name>`.
                if is_mapping(member) and len(get_args(member)) == 2:
                    yield from self.below(get_args(member)[1], None, (*key_path, "<name>"), (*seen, cls))
                else:
                    yield from self.below(member, default, key_path, (*seen, cls))

    def below(
        self, annotation: Annotation, default: object, path: tuple[str, ...], seen: tuple[type, ...]
    ) -> Iterator[KeyLine]:
        """The keys inside one field, where it is a block or a choice."""
        if is_choice(annotation):
            choices = choice_names(annotation)
            dotted = ".".join(path)
            name = self.chosen.get(dotted)
            # Without `type:` on the command line, the keys of the default are shown.
            if name not in choices:
                name = registered_name(type(default)) if is_dataclass(default) else annotation.default_choice_name()
            chosen = None if name is None else annotation.get_choice_class(name)
            # A choice may contain itself (a wrapped model); list its keys once.
            if chosen is not None and chosen not in seen:
                yield KeyLine(dotted, None, f"{'  ' * len(path)}  (keys of {TYPE_KEY}: {name})")
                yield from self.of(chosen, path, seen)
        elif isinstance(annotation, type) and is_dataclass(annotation) and annotation not in seen:
            yield from self.of(annotation, path, seen)


def _program(cls: type) -> str:
    """The command that runs the module of a class, also where it is the running module or file."""
    if cls.__module__ != "__main__":
        return f"python -m {cls.__module__}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else f"python {sys.argv[0]}"


def _line(path: tuple[str, ...], config_field: ConfigField, meaning: str) -> str:
    indent = "  " * len(path)
    words = f"{indent}--{'.'.join(path)}  {_type(config_field.type)}"
    if config_field.required:
        words += "  (required)"
    elif (default := _default(config_field)) is not None:
        words += f"  = {default}"
    meaning = str(config_field.field.metadata.get("help", meaning))
    wrapped = textwrap.wrap(meaning, WIDTH, initial_indent=indent + "    ", subsequent_indent=indent + "    ")
    return "\n".join([words, *wrapped])


def _type(annotation: Annotation) -> str:
    names = [choice for m in union_members(annotation) if is_choice(m) for choice in offered_names(m)]
    return type_name(annotation) + (f": {' | '.join(names)}" if names else "")


def _default(config_field: ConfigField) -> str | None:
    value = config_field.default
    if is_dataclass(value) and not is_text_value(type(value)):
        name = registered_name(type(value))
        return None if name is None else f"{{{TYPE_KEY}: {name}, …}}"
    # PyYAML ends a document that is a bare scalar with the line `...`.
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10_000).strip()
    return text.removesuffix("...").strip()


def attribute_docs(cls: type) -> Mapping[str, str]:
    """The `Attributes:` of a class's docstring (and of its bases'): name → text."""
    docs: dict[str, str] = {}
    # Bases first, so that the text of a subclass replaces the text that it inherits.
    for base in reversed(cls.__mro__):
        doc = base.__dict__.get("__doc__") or ""
        _, _, section = inspect.cleandoc(doc).partition("Attributes:\n")
        names: list[str] = []
        for line in section.splitlines():
            if line and not line.startswith(" "):
                break
            # Entries are indented by four spaces; deeper lines continue the entry before.
            entry = _ENTRY.match(line[4:]) if line.startswith("    ") and not line.startswith("     ") else None
            if entry is not None:
                names = [name.strip() for name in entry[1].split(",")]
                docs.update(dict.fromkeys(names, entry[2]))
            elif line.strip():
                docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
    return docs
