"""The needle tasks: texts of any length with hidden values, and a question at the end.

They are the synthetic tasks of RULER (Hsieh et al., arXiv:2404.06654), with its names and wording. There are two
differences: instead of essays, which would have to be downloaded, sentences are generated, and so are the words that
are counted in `cwe`. A task is a function of a random generator, the amount of haystack, and a depth: the relative
position of the value in the text, 0 at its beginning and 1 at its end.
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
    """A hidden value.

    Attributes:
        begin, end: its characters in the answer.
        depth: its relative position in the text, from 0 to 1; None for values without a single position.
    """

    begin: int
    end: int
    depth: float | None


@dataclass(frozen=True, kw_only=True)
class NeedleText:
    """A text with a question at its end, and the answer.

    Attributes:
        prompt: the text, the question, and the beginning of the answer.
        answer: the rest of the answer.
        hidden: the scored parts of the answer.
    """

    prompt: str
    answer: str
    hidden: tuple[Needle, ...]


Make = Callable[[np.random.Generator, int, float], NeedleText]
SHORT = 4096
"""Length in tokens below which RULER's `cwe` has fewer words."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompt.

    Attributes:
        name: RULER's name.
        summary: what is hidden, and what the question is.
        make: (random generator, units of haystack, depth) → a text.
        short: the same for texts of less than `SHORT` tokens, if it differs.
        least: minimum units of haystack.
        has_depth: whether the value has a single position.
    """

    name: str
    summary: str
    make: Make
    short: Make | None = None
    least: int = 1
    has_depth: bool = True

    def make_for_length(self, length: int) -> Make:
        """The function that makes texts of a given number of tokens."""
        return self.short if self.short is not None and length < SHORT else self.make


def _answer(values: Sequence[str], depths: Sequence[float | None], before: Sequence[str]) -> tuple[str, list[Needle]]:
    """The answer that consists of prefixes and values, and the values' spans."""
    text, hidden = "", []
    for value, depth, prefix in zip(values, depths, before, strict=True):
        text += prefix
        hidden.append(Needle(begin=len(text), end=len(text) + len(value), depth=depth))
        text += value
    return text, hidden


def _separators(count: int) -> list[str]:
    """The text before each value of an enumeration."""
    return [" "] if count == 1 else [" ", *[", "] * (count - 2), ", and " if count > 2 else " and "]


def _insert(sentences: Iterator[str], units: int, inserted: Sequence[tuple[float, str]]) -> str:
    """Haystack with sentences inserted at their depths."""
    texts = [next(sentences) for _ in range(units)]
    # From the end to the beginning: an insertion does not move the places that follow.
    for depth, text in sorted(inserted, key=lambda item: -item[0]):
        texts.insert(round(depth * units), text)
    return " ".join(texts)


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
    """RULER's `niah`: `values` values for each of `keys` names; the question asks for `queries` of the names.

    The first value is at `depth`.
    """
    num_names = max(keys, queries)
    # A haystack of needles consists of further names with one value each.
    names = (haystack.uuids if uuid_keys else haystack.keys)(random, num_names + (units if hay == "needles" else 0))
    count = num_names * values + (units if hay == "needles" else 0)
    drawn_values = _VALUES[kind](random, count)
    needles = [
        f"One of the special magic {kind} for "
        f"{names[n // values if n < num_names * values else n - num_names * (values - 1)]} is: "
        f"{value}."
        for n, value in enumerate(drawn_values)
    ]
    depths = [float(x) for x in random.uniform(size=num_names * values)]
    # Only the first value is at the requested depth: the others must not be predictable from it.
    depths[0] = depth
    sentences = iter(needles[num_names * values :]) if hay == "needles" else haystack.noise()
    if hay == "prose":
        sentences = haystack.prose(random)
    # `zip` ends with the depths: the needles of the haystack have none.
    context = _insert(sentences, units, list(zip(depths, needles, strict=False)))
    query_order = list(range(queries * values))
    names = names[:queries]
    query = names[0] if queries == 1 else ", ".join(names[:-1]) + f", and {names[-1]}"
    if len(query_order) == 1:
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
        # The values of one name are expected in the order of their appearance.
        query_order.sort(key=lambda n: round(depths[n] * units))
    answer, hidden = _answer(
        [drawn_values[n] for n in query_order], [depths[n] for n in query_order], _separators(len(query_order))
    )
    return NeedleText(prompt=head + context + end, answer=answer, hidden=tuple(hidden))


def _variables(random: np.random.Generator, units: int, depth: float, *, hops: int = 4) -> NeedleText:
    """RULER's `vt`: a chain of assignments whose variables all have one value, preceded by an example."""
    del depth
    example, example_names = _chain(random, 5, hops)
    question, answer = _chain(random, units, hops)
    text, hidden = _answer(answer, [None] * len(answer), [" "] * len(answer))
    return NeedleText(prompt=f"{example} {' '.join(example_names)}\n\n{question}", answer=text, hidden=tuple(hidden))


def _chain(random: np.random.Generator, units: int, hops: int) -> tuple[str, list[str]]:
    names = haystack.variables(random, hops + 1)
    (value,) = haystack.numbers(random, 1, digits=5)
    assignments = [f"VAR {names[0]} = {value}."]
    assignments += [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    depths = sorted(float(x) for x in random.uniform(size=len(assignments)))
    sentences = [sentence for _, sentence in zip(range(units), haystack.noise(), strict=False)]
    # Sorted depths keep the chain in order; inserted from the end, so that earlier places do not move.
    for depth, sentence in reversed(list(zip(depths, assignments, strict=True))):
        sentences.insert(round(depth * units), sentence)
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{' '.join(sentences)}\nQuestion: Find all variables that are assigned the value {value} in the text above. "
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
    """RULER's `cwe`: the ten most frequent words of a list, preceded by an example.

    Args:
        random: generator.
        units: number of other words.
        depth: ignored; the words are everywhere.
        example: of the example's list: other words, frequency of the common words, frequency of the others.
        often, seldom: frequencies in the list of the question.
        common: number of common words.
    """
    del depth
    others, shown_often, shown_seldom = example
    first, shown = _word_list(random, others, common, often=shown_often, seldom=shown_seldom)
    question, answer = _word_list(random, units, common, often=often, seldom=seldom)
    before = [f" {n + 1}. " for n in range(common)]
    text, hidden = _answer(answer, [None] * common, before)
    written, _ = _answer(shown, [None] * common, before)
    return NeedleText(prompt=f"{first}{written}\n\n{question}", answer=text, hidden=tuple(hidden))


def _word_list(
    random: np.random.Generator, units: int, common: int, *, often: int, seldom: int
) -> tuple[str, list[str]]:
    words = haystack.invented_words(random, common + units)
    every = [*(words[:common] * often), *(words[common:] * seldom)]
    random.shuffle(every)
    # RULER accepts the ten words in any order. Scoring in one pass needs a single order that a model can infer: that of
    # their first appearance, which the example shows.
    answer = sorted(words[:common], key=every.index)
    listed = " ".join(f"{n + 1}. {word}" for n, word in enumerate(every))
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{listed}\nQuestion: What are the {common} most common words in the above list? Answer: "
        f"The top {common} words that appear most often in the list are:"
    )
    return prompt, answer


def _frequent_words(random: np.random.Generator, units: int, depth: float, *, power: float = 2.0) -> NeedleText:
    """RULER's `fwe`: words with frequencies by a power law. The three most frequent ones are the answer."""
    del depth
    # Dots are the most frequent "word", which the question excludes.
    words = ["....", *haystack.invented_words(random, max(4, min(units // 8, 2000)))]
    shares = np.arange(1, len(words) + 1, dtype=np.float64) ** -power
    counts = np.maximum(1, np.floor(units * shares / shares.sum())).astype(int)
    for n in (3, 2, 1, 0):
        # At every length, the most frequent words have distinct frequencies.
        counts[n] = max(counts[n], counts[n + 1] + 1)
    every = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    random.shuffle(every)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(every)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    text, hidden = _answer(words[1:4], [None] * 3, _separators(3))
    return NeedleText(prompt=prompt, answer=text, hidden=tuple(hidden))


def _niah_task(name: str, summary: str, **how: object) -> Task:
    return Task(name=name, summary=summary, make=partial(_needle, **how))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            _niah_task("niah_single_1", "a number by a name, in five sentences over and over", hay="noise"),
            _niah_task("niah_single_2", "a number by a name, in prose", hay="prose"),
            _niah_task("niah_single_3", "a uuid by a name, in prose", hay="prose", kind="uuids"),
            _niah_task("niah_multikey_1", "a number by its name, one of four in prose", hay="prose", keys=4),
            _niah_task("niah_multikey_2", "a number by its name, among nothing but others", hay="needles"),
            _niah_task(
                "niah_multikey_3",
                "a uuid by a uuid, among nothing but others",
                hay="needles",
                kind="uuids",
                uuid_keys=True,
            ),
            _niah_task("niah_multivalue", "four numbers of one name, in prose", hay="prose", values=4),
            _niah_task("niah_multiquery", "four numbers by their names, in prose", hay="prose", queries=4),
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
