"""Ranges: the values that a numeric field of a configuration may have.

The annotation of the field names the range:

    epsilon: Epsilon = 1e-8          # above 0, at most 1
    num_layers: LayerCount = 32
    max_examples: PositiveInt | None = None

The decoder checks the values of a document, and `Ranged`, the base of the classes with such fields, checks those of a
caller in Python; both use the same messages. No range contains NaN or infinity, so that no other code has to handle
them. A subclass that repeats a field to change its default keeps the range of the field, unless it names another one.

A type checker and draccus ignore the range: for them `PositiveInt` is `int`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, ClassVar, TypeAlias, get_args, get_origin

from levanter.config.schema import Annotation, annotated_members, config_fields, is_mapping, list_origin, strip

Look: TypeAlias = Callable[[object], Iterable[tuple[str, str]]]
"""Yields the position and the message of each number in a value that is out of range."""
LARGEST_INT32 = 2**31 - 1
"""Steps are counted in int32, and so are positions, tokens and sizes of axes."""
LARGEST_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """An interval of numbers, with single additional values.

    >>> fraction = Range(0, 1, above=True)
    >>> 0.5 in fraction, 0 in fraction, str(fraction)
    (True, False, 'above 0 and at most 1')
    >>> -1 in Range(1, 100, also=(-1,))
    True

    Attributes:
        low: the least value.
        high: the greatest value.
        above: `low` itself is not in the range.
        below: `high` itself is not in the range.
        also: values outside of the interval that have a special meaning (-1 for "the rest").
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    also: tuple[int, ...] = ()

    def __contains__(self, value: float) -> bool:
        if value in self.also:
            return True
        return (self.low < value if self.above else self.low <= value) and (
            value < self.high if self.below else value <= self.high
        )

    def __str__(self) -> str:
        low, high = _number(self.low), _number(self.high)
        also = "".join(f", or {value}" for value in self.also)
        if self.above:
            return f"above {low} and {'below' if self.below else 'at most'} {high}{also}"
        return f"from {low} to {'below ' if self.below else ''}{high}{also}"

    def problem(self, value: float) -> str | None:
        """The error message for a number, or None if the range contains it.

        >>> Range(1, 100).problem(0)
        'must be at least 1, got 0'
        """
        # NaN compares false with everything, so the comparisons below would give a misleading message.
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number {self}, got {_number(value)}"
        if value in self:
            return None
        if value > self.high or self.high <= 1:
            return f"must be {self}, got {_number(value)}"
        also = "".join(f", or {special}" for special in self.also)
        if self.low == 0 and not self.above:
            return f"must not be negative{also}, got {_number(value)}"
        least = "positive" if self.low == 0 else f"{'above' if self.above else 'at least'} {_number(self.low)}"
        return f"must be {least}{also}, got {_number(value)}"


@dataclass(frozen=True)
class NotEmpty:
    """A text that is not blank: an empty path would mean the current folder of the process."""

    def __str__(self) -> str:
        return "not empty"

    def problem(self, value: str) -> str | None:
        """The error message for a text, or None if it is not blank."""
        return None if value.strip() else "must name a file, a folder or a URL, got nothing"


def _number(value: float) -> str:
    """A number as messages show it; integers of hundreds of digits by their size."""
    if isinstance(value, int) and abs(value) >= 10**22:
        return f"{float(value):.3g}" if abs(value) < 10**300 else f"a number of {value.bit_length()} bits"
    return str(value)


AnyInt: TypeAlias = Annotated[int, Range(-LARGEST_INT64, LARGEST_INT64)]
"""For keys that are accepted and not used."""
AnyFloat: TypeAlias = Annotated[float, Range(-1e300, 1e300)]
"""For keys that are accepted and not used."""
Seed: TypeAlias = Annotated[int, Range(0, 2**32 - 1)]
"""JAX keys are derived from 32 bits: larger seeds would equal smaller ones."""
Count: TypeAlias = Annotated[int, Range(0, LARGEST_INT32)]
PositiveInt: TypeAlias = Annotated[int, Range(1, LARGEST_INT32)]
PositiveOrAll: TypeAlias = Annotated[int, Range(1, LARGEST_INT32, also=(-1,))]
"""A number, or -1 for the rest or for a value derived from other keys."""
LayerCount: TypeAlias = Annotated[int, Range(1, 10_000)]
"""Each layer is described individually before equal neighbours are grouped."""
ManyInt: TypeAlias = Annotated[int, Range(1, LARGEST_INT64)]
"""Bytes, or tokens of a whole corpus."""
FiniteFloat: TypeAlias = Annotated[float, Range(-1e12, 1e12)]
PositiveFloat: TypeAlias = Annotated[float, Range(0, 1e12, above=True)]
NonNegativeFloat: TypeAlias = Annotated[float, Range(0, 1e12)]
Scale: TypeAlias = Annotated[float, Range(0, 1e6, above=True)]
"""A factor of activations, frequencies or updates; beyond a million it is a typing error."""
Stretch: TypeAlias = Annotated[float, Range(1, 1e6)]
"""A ratio of a longer context to a shorter one."""
RotaryBase: TypeAlias = Annotated[float, Range(1, 1e12, above=True)]
"""The base of a geometric series of wavelengths, which grow only if it is above 1."""
LearningRate: TypeAlias = Annotated[float, Range(0, 1e3)]
Epsilon: TypeAlias = Annotated[float, Range(0, 1, above=True)]
"""A term that keeps a denominator or a root away from zero, so 0 is excluded."""
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
PositiveFraction: TypeAlias = Annotated[float, Range(0, 1, above=True)]
Decay: TypeAlias = Annotated[float, Range(0, 1, below=True)]
"""The weight of the previous value in a moving average."""
PathText: TypeAlias = Annotated[str, NotEmpty()]
Duration: TypeAlias = Annotated[timedelta, Range(0, 100 * 365 * 86400)]
PositiveDuration: TypeAlias = Annotated[timedelta, Range(0, 100 * 365 * 86400, above=True)]


def declared_range(annotation: Annotation) -> Range | NotEmpty | None:
    # Annotations may be nested: a type alias with a range inside another `Annotated`.
    """The range in an annotation; None where it has none."""
    while get_origin(annotation) is Annotated:
        for extra in annotation.__metadata__:
            if isinstance(extra, (Range, NotEmpty)):
                return extra
        annotation = get_args(annotation)[0]
    return None


def out_of_range(value: object, annotation: Annotation) -> str | None:
    """The error message for a value outside the range of its annotation; None for values in it or of other types.

    >>> out_of_range(0, PositiveInt)
    'must be at least 1, got 0'
    >>> out_of_range(3, PositiveInt) is None
    True
    """
    return _beyond(value, declared_range(annotation))


def _beyond(value: object, limits: Range | NotEmpty | None) -> str | None:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(limits, NotEmpty):
        return limits.problem(value) if isinstance(value, str) else None
    # bool is a subclass of int, but True is not the number 1 in a configuration.
    if limits is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return limits.problem(value)


def range_problems(config: object) -> Iterator[tuple[str, str]]:
    """The fields of one configuration value that are out of range: name and message.

    Nested blocks are skipped: they are configurations too, whose constructors have checked them.
    """
    # All fields are checked, so that one error lists every number that is out of range.
    for name, look in _looks(type(config)):
        for at, problem in look(getattr(config, name)):
            yield name + at, problem


def has_range(annotation: Annotation) -> bool:
    """Whether a range is anywhere in an annotation."""
    if declared_range(annotation) is not None:
        return True
    return any(has_range(part) for part in get_args(annotation) if part is not Ellipsis)


@functools.cache
def _looks(cls: type) -> tuple[tuple[str, Look], ...]:
    """The checks of the fields of a class that have a range.

    The annotations are evaluated once for each class: a server creates such values for every request, and the
    evaluation took a third of that time.
    """
    return tuple(
        (name, _look(config_field.type))
        for name, config_field in config_fields(cls).items()
        if has_range(config_field.type)
    )


def _look(annotation: Annotation) -> Look:
    """The check of a value by its annotation."""
    members = annotated_members(annotation)
    if len(members) > 1:
        return _look_at_union(tuple((strip(member), _look(member)) for member in members))
    # Checks are composed once for each annotation; calling them is all that happens for each value.
    limits, bare = declared_range(annotation), strip(annotation)
    inside = _look_inside(bare) if get_args(bare) else None

    def look(value: object) -> Iterable[tuple[str, str]]:
        if isinstance(value, bool) and limits is not None:
            return (("", f"must be a number {limits}, got {value}"),)
        if (problem := _beyond(value, limits)) is not None:
            return (("", problem),)
        return () if inside is None else inside(value)

    return look


def _look_at_union(members: tuple[tuple[Annotation, Look], ...]) -> Look:
    # The classes of the members are computed once for each annotation, not for each value of a request.
    kinds = tuple((_instance_types(kind), kind, look) for kind, look in members)

    def look(value: object) -> Iterable[tuple[str, str]]:
        number = isinstance(value, bool)
        # `True` is an int for `isinstance` and must not pass as a number.
        fitting = [
            check for types, kind, check in kinds if isinstance(value, types) and not (number and kind in (int, float))
        ]
        if not fitting and _is_number(value):
            # A whole number where the type is float.
            fitting = [check for _, kind, check in kinds if kind is float]
        return fitting[0](value) if fitting else ()

    return look


def _look_inside(bare: Annotation) -> Look | None:
    """The check of the items of a mapping or a list; None for other types."""
    args = get_args(bare)
    if is_mapping(bare):
        if len(args) != 2:
            return None
        check_item = _look(args[1])

        def look_at_values(value: object) -> Iterable[tuple[str, str]]:
            items = value.items() if isinstance(value, Mapping) else ()
            return [(f".{key}{at}", problem) for key, item in items for at, problem in check_item(item)]

        return look_at_values
    if list_origin(bare) is None:
        return None
    looks = [_look(arg) for arg in args if arg is not Ellipsis]
    fixed = list_origin(bare) is tuple and Ellipsis not in args

    def look_at_items(value: object) -> Iterable[tuple[str, str]]:
        items = enumerate(value) if isinstance(value, (list, tuple, Set)) else ()
        return [
            (f"[{i}]{at}", problem)
            for i, item in items
            for at, problem in looks[i if fixed and i < len(looks) else 0](item)
        ]

    return look_at_items


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _instance_types(kind: Annotation) -> tuple[type, ...]:
    """The classes whose instances are values of an annotation; empty where no class represents it."""
    if is_mapping(kind):
        return (Mapping,)
    if list_origin(kind) is not None:
        return (list, tuple, Set)
    return (kind,) if isinstance(kind, type) else ()


@dataclass(frozen=True, kw_only=True)
class Ranged:
    """The base of configurations whose numbers have ranges; the constructor refuses numbers outside of them.

    A subclass with its own `__post_init__` calls this one first.
    """

    # A class variable, not a field: it is no key of the configuration.
    range_prefix: ClassVar[str] = ""
    """The prefix of field names in messages, such as the block's key."""

    def __post_init__(self) -> None:
        problems = [f"{self.range_prefix}{name}: {problem}" for name, problem in range_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
