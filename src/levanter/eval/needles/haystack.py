"""Generated material of haystacks: sentences, words, names and numbers; nothing is downloaded."""

import itertools
import string
import uuid
from collections.abc import Callable, Iterator

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
ADJECTIVES = _words(
    """
able acid bold brave brief bright broad calm cheap clean clear cold cool cruel curly damp dark deep dry eager early
even fair fast fierce fine flat fresh full gentle glad good grand grave great happy hard harsh heavy high hollow
huge humble idle keen kind large late lean light long loud low loyal lucky mad merry mild narrow neat new noble odd
old pale plain polite poor proud pure quick quiet rare raw rich ripe rough round royal sad safe sharp short shy
silent slim slow small smart smooth soft sour steep stiff strange strict strong sweet swift tall tame tart thick
thin tidy tight tiny tough vast vivid warm weak wet wide wild wise young
"""
)
NOUNS = _words(
    """
anchor apple arrow badge barrel basket beacon bell bench bird blanket boat book bottle branch bread bridge brush
bucket button cabin camel candle canoe carpet castle cellar chair chest circle clock cloud coat coin compass copper
corner cotton cradle crown curtain desert dragon drum eagle engine fabric feather fence field flame flute forest
fountain garden gate glove hammer harbor helmet hill horse island jacket jewel jungle kettle kitchen ladder lake
lamp lantern lemon letter lion market meadow mirror mountain needle nest ocean orange orchard palace parrot pencil
pepper piano pillow planet pocket pond pony quilt rabbit ribbon ring river road rocket roof rope saddle sail shadow
shell ship silver spoon stable stone storm stove summer table temple thread thunder ticket tiger tower train tunnel
valley velvet village violin wagon wall water wheel whistle willow window winter wolf
"""
)
VERBS = _words(
    """
carries crosses draws faces follows guards hides holds keeps leaves meets paints passes reaches sees shows takes
touches turns watches
"""
)
LOCATIONS = _words(
    """
above across along around before behind below beside near over past under
"""
)
_DRAWN = 64
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")


def noise() -> Iterator[str]:
    """The same five sentences, repeated."""
    return itertools.cycle(NOISE)


def prose(random: np.random.Generator) -> Iterator[str]:
    """Distinct sentences without meaning, in place of RULER's essays."""
    lists = (ADJECTIVES, NOUNS, VERBS, NOUNS, LOCATIONS, ADJECTIVES, NOUNS)
    while True:
        # Random numbers are drawn in batches: one call of the generator per word would dominate the run time.
        drawn = (random.integers(len(options), size=_DRAWN).tolist() for options in lists)
        for at in zip(*drawn, strict=True):
            x, a, verb, b, where, y, c = (options[n] for options, n in zip(lists, at, strict=True))
            yield f"The {x} {a} {verb} the {b} {where} the {y} {c}."


def keys(random: np.random.Generator, count: int) -> list[str]:
    """Distinct names such as `swift-lantern`, with further words if there are not enough of two words."""
    lists = [ADJECTIVES, NOUNS]
    # At most half of the combinations are used, so that `_distinct` does not draw long for the last ones.
    while count > np.prod([len(words) for words in lists]) // 2:
        lists.insert(0, ADJECTIVES)
    return _distinct(count, lambda: "-".join(_choose(random, words) for words in lists))


def numbers(random: np.random.Generator, count: int, digits: int = 7) -> list[str]:
    """Distinct numbers with a given number of digits."""
    return _distinct(count, lambda: str(random.integers(10 ** (digits - 1), 10**digits)))


def uuids(random: np.random.Generator, count: int) -> list[str]:
    """Distinct names such as `1b4e28ba-2fa1-41d2-883f-0016d3cca427`."""
    # `uuid.uuid4` would use the system's random numbers, and another run would have other prompts.
    return _distinct(count, lambda: str(uuid.UUID(bytes=random.bytes(16), version=4)))


def variables(random: np.random.Generator, count: int, letters: int = 5) -> list[str]:
    """Distinct names of variables, in capitals."""
    alphabet = string.ascii_uppercase
    return _distinct(count, lambda: "".join(_choose(random, alphabet) for _ in range(letters)))


def invented_words(random: np.random.Generator, count: int) -> list[str]:
    """Distinct words without meaning, of three syllables each."""
    return _distinct(count, lambda: "".join(_choose(random, _SYLLABLES) for _ in range(3)))


def _choose(random: np.random.Generator, of: tuple[str, ...] | str) -> str:
    return of[int(random.integers(len(of)))]


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    # A dictionary keeps the order of the draws, which a set does not.
    values: dict[str, None] = {}
    while len(values) < count:
        values[draw()] = None
    return list(values)
