"""The compression report: bytes for each token, by kind of text, beside another tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from levanter.data import LmDataConfig, TextLmDatasetFormat, Tokenizer
from levanter.data.documents import component_documents
from levanter.data.errors import DataError
from levanter.io.paths import MissingFileError

SET_CHARS = 2_000_000
"""Characters of each data set that are measured."""

SAMPLES: dict[str, str] = {
    "English": """\
The harbour master kept two ledgers. In the first he wrote down every ship that came in, with her tonnage, her cargo and
the name of her captain; in the second, which nobody had asked him to keep, he noted the weather and what the gulls were
doing. After forty years the second one was the more useful of the two. When the council wanted to know whether the new
breakwater had changed the tides, it wasn't the tonnage that told them, but the gulls.
""",
    "code": """\
def moving_average(values, width):
    \"\"\"Yields the mean of each window of `width` values.\"\"\"
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    window, total = deque(), 0.0
    for value in values:
        window.append(value)
        total += value
        if len(window) > width:
            total -= window.popleft()
        if len(window) == width:
            yield total / width
""",
    "mathematics": r"""\
Let $f : [0, 1] \to \mathbb{R}$ be continuous with $f(0) = 0$. For every $\varepsilon > 0$ some polynomial $p$ has
$\sup_{x \in [0,1]} |f(x) - p(x)| < \varepsilon$ and $p(0) = 0$.
\begin{proof}
By Weierstrass's theorem choose $q$ with $\|f - q\|_\infty < \varepsilon / 2$ and set $p(x) = q(x) - q(0)$. Then
\[ |f(x) - p(x)| \le |f(x) - q(x)| + |q(0) - f(0)| < \frac{\varepsilon}{2} + \frac{\varepsilon}{2} = \varepsilon. \]
\end{proof}
""",
    "numbers": """\
date,station,low,high,rain
2024-01-03,1187,-4.5,2.25,0.0
2024-01-04,1187,-11.0,-3.75,12.6
1986: 31415 + 27182 = 58597; 1000000 / 128 = 7812.5; 0x1F4A; 10:45:30; +44 20 7946 0018
""",
    "German": """\
Die Brücke über den Fluss wurde im Frühjahr gesperrt, weil zwei der mittleren Pfeiler unterspült waren. Seitdem fährt
eine kleine Fähre, die höchstens zwölf Fahrgäste mitnimmt; wer ein Fahrrad dabeihat, muss größtenteils warten. Am
Wochenende übernimmt die Schifffahrtsgesellschaft.
""",
    "Korean": """\
마을 도서관은 작년 가을에 다시 문을 열었다. 일층에는 어린이를 위한 책이 있고, 이층에는 조용히 공부할 수 있는 방이 있다.
비가 오는 날이면 사람들이 창가에 앉아 오래 책을 읽는다.
""",
    "Chinese": """\
河边的老磨坊已经停用了三十年。去年，村里的人把它修好，改成了一个小博物馆。孩子们最喜欢看水轮慢慢转动，老人们则喜欢坐在门口讲从前的故事。
""",
}
"""Short texts of several kinds, which are ours and never trained on."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The size of one text in bytes and in tokens.

    Attributes:
        kind: the kind of text.
        nbytes: UTF-8 bytes.
        tokens: tokens of the trained tokenizer.
        compared: tokens of the other one; None without another one.
    """

    kind: str
    nbytes: int
    tokens: int
    compared: int | None = None

    @property
    def ratio(self) -> float:
        """Bytes for each token."""
        return self.nbytes / max(self.tokens, 1)

    def document(self) -> Mapping[str, object]:
        """The row as a JSON object."""
        row: dict[str, object] = {"kind": self.kind, "bytes": self.nbytes, "tokens": self.tokens}
        row["bytes_per_token"] = round(self.ratio, 4)
        if self.compared is not None:
            row["compared_tokens"] = self.compared
            row["compared_bytes_per_token"] = round(self.nbytes / max(self.compared, 1), 4)
        return row


def measured_texts(data: LmDataConfig) -> Iterator[tuple[str, list[str]]]:
    """The texts to measure by kind: our samples, then the beginning of each component's training and held-out text."""
    for kind, text in SAMPLES.items():
        yield kind, [text]
    for name, component in data.components.items():
        for split, label in (("train", f"{name} (trained on)"), ("validation", f"{name} (held out)")):
            try:
                sources = component_documents(
                    f"data.components.{name}", component, split, formats=(TextLmDatasetFormat,)
                )
            except (MissingFileError, DataError):
                # The training text was read a moment ago; held-out text is optional.
                continue
            # The beginning suffices: a ratio over two million characters varies by less than what is shown.
            texts, remaining = [], SET_CHARS
            for document in chain.from_iterable(sources):
                texts.append(document.text[:remaining])
                remaining -= len(texts[-1])
                if remaining <= 0:
                    break
            # An empty set has no ratio.
            if any(texts):
                yield label, texts


def measure(
    tokenizer: Tokenizer, compared: Tokenizer | None, texts: Iterator[tuple[str, list[str]]]
) -> list[Compression]:
    """The compression of each kind of text.

    Args:
        tokenizer: the trained one.
        compared: another one, if any.
        texts: from `measured_texts`.

    Raises:
        DataError: a text that the tokenizer does not reproduce, which is a bug.
    """
    rows = []
    for kind, pieces in texts:
        ids = tokenizer.encode_batch(pieces)
        for text, encoded in zip(pieces, ids, strict=True):
            # A special token in a text is one id; its spelling comes back with it.
            if tokenizer.decode(encoded) != text:
                raise DataError(f"{kind}: decoding does not give the text back; please report this")
        # The same bytes for both; only the number of tokens differs.
        others = None if compared is None else sum(map(len, compared.encode_batch(pieces)))
        rows.append(
            Compression(
                kind=kind,
                nbytes=sum(len(text.encode()) for text in pieces),
                tokens=sum(map(len, ids)),
                compared=others,
            )
        )
    return rows


def table(rows: Sequence[Compression], compared: str | None) -> list[str]:
    """The report as lines of text."""
    width = max(len(row.kind) for row in rows)
    header = f"{'text':<{width}} {'bytes':>11} {'tokens':>10} {'bytes/token':>12}"
    if compared is not None:
        header += f" {'compared':>10} {'difference':>11}"
    lines = [header]
    for row in rows:
        line = f"{row.kind:<{width}} {row.nbytes:>11,} {row.tokens:>10,} {row.ratio:>12.2f}"
        if row.compared is not None:
            other = row.nbytes / max(row.compared, 1)
            # Fewer tokens are better, so a positive difference is in favour of the trained tokenizer.
            line += f" {other:>10.2f} {(row.compared - row.tokens) / max(row.compared, 1):>+11.1%}"
        lines.append(line)
    if compared is not None:
        lines.append(f"difference: how many tokens fewer than with {compared} (+) or more (-)")
    return lines
