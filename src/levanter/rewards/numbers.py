"""`math`: whether the answer is the right number, compared as exact rationals.

The value of an answer is what the last `\\boxed{…}` contains; without one, what follows the last `####`; without that,
the last number. Understood are thousands commas, a full stop at the end, signs, decimals, fractions (`3/4`,
`\\frac{3}{4}`, `1 1/2`), percent, powers of ten, currency signs and units. 0.5, 1/2, 50% and `\\frac{1}{2}` are equal;
0.33 and 1/3 are not.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from levanter.rewards.choice import Judge, Reward, RewardConfig, RewardError, RewardInput

DIGITS = 400
"""Characters of a number; a longer one is no answer, and Python's integers of many digits are slow."""
EXPONENT = 400
"""Largest power of ten."""

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_DECIMAL = re.compile(rf"(?P<digits>{_UNSIGNED})(?:[eE](?P<power>[+-]?\d{{1,4}}))?\.?")
_TEN = re.compile(r"(?P<factor>.*?)\s*(?:\\times|\\cdot|×|\*)?\s*10\s*\^\s*\{?\s*(?P<power>[+-]?\d{1,4})\s*\}?", re.S)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{(?P<a>[^{}]*)\}|(?P<a1>\d))\s*(?:\{(?P<b>[^{}]*)\}|(?P<b1>\d))")
_IN_PROSE = re.compile(
    # A sign counts unless it joins two words or numbers (3-4, x-1). Digits within a word (x2) are no number.
    rf"(?:(?<![\w.)+−–-])[-+−–])?(?<![A-Za-z_])(?<!\d)(?<!\d[.,])[$€£]?"
    rf"(?:\d+\s+\d+/\d+|(?:{_UNSIGNED})(?:[eE][+-]?\d+)?(?:\s*/\s*\d[\d,]*)?)\s*(?:\\?%)?"
)
_REMOVED = re.compile(r"\\left|\\right|\\displaystyle|\\[!,;: ]|\\\$|[$€£~]|\\(?:text|mathrm|textbf|mathbf)\s*\{\s*\}")
_UNIT = re.compile(
    # A single letter that touches the number is a variable, not a unit: 18x.
    r"(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?|\^\s*\{?\s*\\circ\s*\}?|°"
    r"|(?:(?<=\s)[A-Za-z]|[A-Za-z]{2,})[A-Za-z]*[²³]?\.?)\s*$"
)
_STYLED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")


@RewardConfig.register_subclass("math")
@dataclass(frozen=True, kw_only=True)
class MathRewardConfig(RewardConfig):
    """1 if the answer is the right number, else 0.

    Attributes:
        column: the column of the data set with the right number; a longer text is read as an answer is.
    """

    column: str = "answer"

    def open(self) -> Reward:
        """See `RewardConfig.open`."""
        return Judge(self._value)

    def _value(self, sample: RewardInput) -> float:
        text = str(sample.column(self.column))
        right = final_number(text)
        if right is None:
            raise RewardError(
                f"column {self.column!r} of a prompt has no number: {text[:80]!r}; `type: exact` compares texts"
            )
        return float(final_number(sample.answer) == right)


def final_number(text: str) -> Fraction | None:
    """The number that a text ends up with; None if it has none.

    >>> [str(final_number(x)) for x in (r"so \\boxed{1,234.50}.", "#### 50%", "I get 3/4.", "I do not know")]
    ['2469/2', '1/2', '3/4', 'None']
    """
    # The last box, as a solution may box intermediate results.
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start >= 0:
        content = _in_braces(text, start)
        # A box that was begun and not finished is no answer, whatever numbers come before it.
        return None if content is None else parse_number(content)
    if "####" in text:
        lines = text.rsplit("####", 1)[1].strip().splitlines()
        return parse_number(lines[0]) if lines else None
    # A text that is one number may have what a number in a sentence has not: a space behind its sign.
    value = parse_number(text)
    if value is not None:
        return value
    # Fractions in TeX are rewritten first, so that one pattern reads all numbers of a sentence.
    plain = _FRACTION.sub(lambda m: f"{_gap(m)}{m['a'] or m['a1']}/{m['b'] or m['b1']}", text).replace("{,}", ",")
    numbers = [match[0] for match in _IN_PROSE.finditer(plain.replace("\\$", "$"))]
    return parse_number(numbers[-1]) if numbers else None


def _gap(fraction: re.Match[str]) -> str:
    """The space between a whole number and the fraction behind it; a sign touches its fraction."""
    return " " if fraction.string[max(fraction.start() - 1, 0) : fraction.start()].isdigit() else ""


def parse_number(text: str) -> Fraction | None:
    """A text that is one number, possibly with a unit, or behind an equals sign; None for anything else."""
    text = text.split("=")[-1]
    if len(text) > 10 * DIGITS:
        return None
    text = text.replace("{,}", ",").replace("−", "-").replace("–", "-")
    text = _REMOVED.sub("", text).strip().strip("*").strip()
    # `\text{12}` is a number in another typeface, `\text{ cm}` is a unit.
    styled = _STYLED.fullmatch(text)
    text = styled[1].strip() if styled else text
    if len(text) > DIGITS:
        return None
    value = _value(text)
    if value is None:
        # "18 dollars", "5 km/h": what follows the number is no part of it, as long as it has no digits.
        value = _value(_UNIT.sub("", re.sub(r"\s*/\s*[A-Za-z]+\.?$", "", text)).strip())
    if value is None and " " in text and not re.search(r"\d", text.split(" ", 1)[1]):
        first = text.split(" ", 1)[0]
        value = _value(first)
    return value


def _value(text: str) -> Fraction | None:
    """A signed number without a unit."""
    text = text.strip()
    # One sign only: "--3" is a typing error or a decrement, and no number.
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-").removeprefix("+").strip()
    if text.startswith(("-", "+")):
        return None
    percent = re.fullmatch(r"(.*?)\s*\\?%\.?", text, re.S)
    value = _unsigned(percent[1] if percent else text)
    if value is None:
        return None
    return sign * value / (100 if percent else 1)


def _unsigned(text: str) -> Fraction | None:
    text = text.strip()
    if (decimal := _DECIMAL.fullmatch(text)) is not None:
        power = int(decimal["power"] or 0)
        return _scaled(Fraction(decimal["digits"].replace(",", "")), power)
    # Mixed numbers: a whole number in front of a fraction is added to it.
    whole, numerator, denominator = _fraction_parts(text)
    if numerator is not None and denominator is not None:
        # Recursion ends here: numerator and denominator have no braces, and a slash has none on its sides.
        above, below = _value(numerator), _value(denominator)
        front = _unsigned(whole) if whole else Fraction(0)
        if above is None or below is None or front is None or below == 0:
            return None
        return front + above / below if not whole or (0 <= above < below) else None
    if (power_of_ten := _TEN.fullmatch(text)) is not None:
        factor = _unsigned(power_of_ten["factor"]) if power_of_ten["factor"] else Fraction(1)
        return None if factor is None else _scaled(factor, int(power_of_ten["power"]))
    return None


def _fraction_parts(text: str) -> tuple[str, str | None, str | None]:
    """(whole, numerator, denominator) of a fraction or mixed number; None for both if it is none."""
    if (tex := re.fullmatch(r"(?P<whole>\d*)\s*" + _FRACTION.pattern + r"\.?", text)) is not None:
        return tex["whole"], tex["a"] or tex["a1"], tex["b"] or tex["b1"]
    if (slash := re.fullmatch(r"(?:(?P<whole>\d+)\s+)?(?P<a>[\d.,]+)\s*/\s*(?P<b>[\d.,]*\d)\.?", text)) is not None:
        return slash["whole"] or "", slash["a"], slash["b"]
    return "", None, None


def _scaled(value: Fraction, power: int) -> Fraction | None:
    return value * Fraction(10) ** power if abs(power) <= EXPONENT else None


def _in_braces(text: str, start: int) -> str | None:
    """What is between the first brace after `start` and the brace that closes it; None if none does."""
    begin, depth = text.find("{", start), 0
    # Without a brace, `\\boxed 5` boxes the next token.
    if begin < 0 or text[start:begin].strip() not in (r"\boxed", r"\fbox"):
        token = re.match(r"\\(?:boxed|fbox)\s+(\S+)", text[start:])
        return token[1] if token else None
    for n in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[n], 0)
        if depth == 0:
            return text[begin + 1 : n]
    return None
