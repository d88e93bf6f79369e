"""The tasks: texts of any length with something hidden in them, and a question after it.

They are the synthetic ones of RULER (Hsieh et al., arXiv:2404.06654), by its names and with its wording. What differs:
where RULER hides needles in essays, which would have to be downloaded, sentences are made here, and so are the words
that are counted in `cwe`. A task is a function of a random generator, of how much hay there is, and of a depth: how
deep in the text what is asked for lies, 0 at its beginning and 1 at its end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from levanter.eval.needles import haystack


@dataclass(frozen=True, kw_only=True)
class Needle:
    """Something that is asked for.

    Attributes:
        begin, end: where it stands in the answer, in characters.
        depth: where it is hidden, from 0 to 1; None where it is everywhere.
    """

    begin: int
    end: int
    depth: float | None


@dataclass(frozen=True, kw_only=True)
class NeedleText:
    """A text with a question behind it.

    Attributes:
        prompt: the text, the question, and how the answer begins.
        answer: how it goes on.
        hidden: the parts of the answer that count.
    """

    prompt: str
    answer: str
    hidden: tuple[Needle, ...]


Make = Callable[[np.random.Generator, int, float], NeedleText]
SHORT = 4096
"""Tokens below which RULER asks `cwe` with fewer words."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of question.

    Attributes:
        name: RULER's.
        summary: what is hidden, and what is asked.
        make: a question, of a random generator, units of hay, and a depth.
        short: the same for texts of less than `SHORT` tokens, where that is another one.
        least: units of hay at least.
        has_depth: whether what is asked for lies at one depth.
    """

    name: str
    summary: str
    make: Make
    short: Make | None = None
    least: int = 1
    has_depth: bool = True

    def made_for(self, length: int) -> Make:
        """What makes questions of so many tokens."""
        return self.short if self.short is not None and length < SHORT else self.make


def _answer(values: Sequence[str], depths: Sequence[float | None], before: Sequence[str]) -> tuple[str, list[Needle]]:
    """Values behind what stands before each."""
    text, hidden = "", []
    for value, depth, prefix in zip(values, depths, before, strict=True):
        text += prefix
        hidden.append(Needle(begin=len(text), end=len(text) + len(value), depth=depth))
        text += value
    return text, hidden


def _listed(count: int) -> list[str]:
    """What stands before each of several values in a sentence."""
    return [" "] if count == 1 else [" ", *[", "] * (count - 2), ", and " if count > 2 else " and "]


def _spread(sentences: Iterator[str], units: int, inserted: Sequence[tuple[float, str]]) -> str:
    """Hay with sentences inserted at their depths."""
    parts = [next(sentences) for _ in range(units)]
    for depth, text in sorted(inserted, key=lambda each: -each[0]):
        parts.insert(round(depth * units), text)
    return " ".join(parts)


_VALUES = {"numbers": haystack.numbers, "uuids": haystack.uuids}
_ONE = {"numbers": "number", "uuids": "uuid"}


def _needle(
    random: np.random.Generator,
    units: int,
    depth: float,
    *,
    hay: str,
    kind: str = "numbers",
    uuid_keys: bool = False,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> NeedleText:
    """RULER's `niah`: `values` of each of `keys`, of which `queries` are asked for; the first of these at the depth."""
    own = max(keys, queries)
    names = (haystack.uuids if uuid_keys else haystack.keys)(random, own + (units if hay == "needles" else 0))
    count = own * values + (units if hay == "needles" else 0)
    drawn = _VALUES[kind](random, count)
    said = [
        f"One of the special magic {kind} for {names[n // values if n < own * values else n - own * (values - 1)]} is: "
        f"{value}."
        for n, value in enumerate(drawn)
    ]
    depths = [float(each) for each in random.uniform(size=own * values)]
    depths[0] = depth
    sentences = iter(said[own * values :]) if hay == "needles" else haystack.noise()
    if hay == "prose":
        sentences = haystack.prose(random)
    context = _spread(sentences, units, list(zip(depths, said, strict=False)))
    asked = list(range(queries * values))
    names = names[:queries]
    query = names[0] if queries == 1 else ", ".join(names[:-1]) + f", and {names[-1]}"
    if len(asked) == 1:
        one = _ONE[kind]
        head = f"A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you "
        head += f"about the {one} afterwards.\n"
        end = f"\nWhat is the special magic {one} for {query} mentioned in the provided text? The special magic {one} "
        end += f"for {query} mentioned in the provided text is"
    else:
        head = f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
        head += f"you about the {kind} afterwards.\n"
        end = f"\nWhat are all the special magic {kind} for {query} mentioned in the provided text? The special magic "
        end += f"{kind} for {query} mentioned in the provided text are"
    if queries == 1:
        # The values of one name, in the order in which a reader meets them.
        asked.sort(key=lambda n: round(depths[n] * units))
    answer, hidden = _answer([drawn[n] for n in asked], [depths[n] for n in asked], _listed(len(asked)))
    return NeedleText(prompt=head + context + end, answer=answer, hidden=tuple(hidden))


def _variables(random: np.random.Generator, units: int, depth: float, *, hops: int = 4) -> NeedleText:
    """RULER's `vt`: a chain of assignments, all of whose variables have one value; an example stands before it."""
    del depth
    example, shown = _chain(random, 5, hops)
    asked, answer = _chain(random, units, hops)
    text, hidden = _answer(answer, [None] * len(answer), [" "] * len(answer))
    return NeedleText(prompt=f"{example} {' '.join(shown)}\n\n{asked}", answer=text, hidden=tuple(hidden))


def _chain(random: np.random.Generator, units: int, hops: int) -> tuple[str, list[str]]:
    names = haystack.variables(random, hops + 1)
    (value,) = haystack.numbers(random, 1, digits=5)
    said = [f"VAR {names[0]} = {value}."]
    said += [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    depths = sorted(float(each) for each in random.uniform(size=len(said)))
    parts = [sentence for _, sentence in zip(range(units), haystack.noise(), strict=False)]
    for depth, sentence in reversed(list(zip(depths, said, strict=True))):
        parts.insert(round(depth * units), sentence)
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{' '.join(parts)}\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )
    return prompt, names


def _common_words(
    random: np.random.Generator,
    units: int,
    depth: float,
    *,
    example: tuple[int, int, int],
    often: int,
    seldom: int,
    common: int = 10,
) -> NeedleText:
    """RULER's `cwe`: ten words that are often in a list, among others that are seldom; an example stands before it.

    Args:
        random: of the generator.
        units: other words.
        depth: nothing; the words are everywhere.
        example: of its list: other words, how often the common ones are there, and how often these.
        often, seldom: the same of the list that is asked about.
        common: how many words are asked for.
    """
    del depth
    others, shown_often, shown_seldom = example
    first, shown = _word_list(random, others, common, often=shown_often, seldom=shown_seldom)
    asked, answer = _word_list(random, units, common, often=often, seldom=seldom)
    before = [f" {n + 1}. " for n in range(common)]
    text, hidden = _answer(answer, [None] * common, before)
    written, _ = _answer(shown, [None] * common, before)
    return NeedleText(prompt=f"{first}{written}\n\n{asked}", answer=text, hidden=tuple(hidden))


def _word_list(
    random: np.random.Generator, units: int, common: int, *, often: int, seldom: int
) -> tuple[str, list[str]]:
    words = haystack.made_words(random, common + units)
    every = [*(words[:common] * often), *(words[common:] * seldom)]
    random.shuffle(every)
    # RULER counts these ten in any order. In one pass they are judged in one, which a model must be able to know: that
    # in which they were first seen, in the example before it, too.
    answer = sorted(words[:common], key=every.index)
    listed = " ".join(f"{n + 1}. {word}" for n, word in enumerate(every))
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{listed}\nQuestion: What are the {common} most common words in the above list? Answer: "
        f"The top {common} words that appear most often in the list are:"
    )
    return prompt, answer


def _frequent_words(random: np.random.Generator, units: int, depth: float, *, power: float = 2.0) -> NeedleText:
    """RULER's `fwe`: words by a power law, of which the three most frequent are asked for; the first one is dots."""
    del depth
    words = ["....", *haystack.made_words(random, max(4, min(units // 8, 2000)))]
    shares = np.arange(1, len(words) + 1, dtype=np.float64) ** -power
    counts = np.maximum(1, np.floor(units * shares / shares.sum())).astype(int)
    for n in (3, 2, 1, 0):
        # Whatever the length, the most frequent ones are not equally frequent.
        counts[n] = max(counts[n], counts[n + 1] + 1)
    every = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    random.shuffle(every)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(every)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    text, hidden = _answer(words[1:4], [None] * 3, _listed(3))
    return NeedleText(prompt=prompt, answer=text, hidden=tuple(hidden))


def _niah(name: str, summary: str, **how: object) -> Task:
    return Task(name=name, summary=summary, make=partial(_needle, **how))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            _niah("niah_single_1", "a number by a name, in five sentences over and over", hay="noise"),
            _niah("niah_single_2", "a number by a name, in prose", hay="prose"),
            _niah("niah_single_3", "a uuid by a name, in prose", hay="prose", kind="uuids"),
            _niah("niah_multikey_1", "a number by its name, one of four in prose", hay="prose", keys=4),
            _niah("niah_multikey_2", "a number by its name, among nothing but others", hay="needles"),
            _niah(
                "niah_multikey_3",
                "a uuid by a uuid, among nothing but others",
                hay="needles",
                kind="uuids",
                uuid_keys=True,
            ),
            _niah("niah_multivalue", "four numbers of one name, in prose", hay="prose", values=4),
            _niah("niah_multiquery", "four numbers by their names, in prose", hay="prose", queries=4),
            Task(name="vt", summary="variables that have a value by assignments", make=_variables, has_depth=False),
            Task(
                name="cwe",
                summary="the ten most common words of a list",
                make=partial(_common_words, example=(30, 10, 3), often=30, seldom=3),
                short=partial(_common_words, example=(10, 3, 1), often=6, seldom=1),
                has_depth=False,
            ),
            Task(
                name="fwe",
                summary="the three most frequent words",
                make=_frequent_words,
                least=16,
                has_depth=False,
            ),
        )
    }
)
"""The tasks by name."""
