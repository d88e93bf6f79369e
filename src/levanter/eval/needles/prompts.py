"""Needle prompts of a given length in tokens, and the positions that are scored.

Everything follows from the seed: every process builds the same prompts, and so does a resumed run. Lengths are counted
in the model's tokens, the answer included. A prompt contains as much haystack as fits.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.eval.needles.tasks import TASKS, NeedleText, Task

_MAX_TRIES = 12
"""Maximum number of texts that are generated for a prompt while its length is adjusted."""
SLOTS = 128
"""Maximum number of scored tokens of an answer."""
Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]
"""text → ids, and the span of characters of each token."""


class NeedleError(ValueError):
    """A prompt cannot be built; the message names the task and the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedlePrompt:
    """A tokenized prompt with its answer.

    Attributes:
        task: name of the task.
        length: requested number of tokens.
        number: index among the prompts of its task and length.
        tokens: int32, the model's inputs: everything but the last token.
        target_positions: int32, the positions that predict the scored tokens.
        targets: int32, the scored tokens.
        owners: int32, the index of the value to which each scored token belongs.
        values: the hidden values.
        depths: relative position of each in the text, from 0 to 1; None for values without a single position.
        text_end: the end of the text, for display.
    """

    task: str
    length: int
    number: int
    tokens: np.ndarray
    target_positions: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    values: tuple[str, ...]
    depths: tuple[float | None, ...]
    text_end: str


@dataclass(frozen=True, kw_only=True)
class NeedleSpec:
    """The prompts of an evaluation.

    Attributes:
        tasks: names of the tasks.
        lengths: lengths in tokens.
        samples: number of prompts of each task and length.
        depths: number of depths over which they are spread.
        seed: seed of the random generator.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    depths: int
    seed: int

    def depth(self, number: int) -> float:
        """The depth of a prompt: all depths in turn, or an even selection if there are fewer prompts."""
        if self.depths == 1:
            return 0.5
        if self.samples >= self.depths:
            at = number % self.depths
        else:
            # Fewer prompts than depths: the first at the beginning, the last at the end. A single one is in the middle.
            at = round(number * (self.depths - 1) / max(1, self.samples - 1)) if self.samples > 1 else self.depths // 2
        return at / (self.depths - 1)

    @property
    def count(self) -> int:
        """Number of prompts of one length."""
        return len(self.tasks) * self.samples


def build_prompts(
    spec: NeedleSpec, encode: Encode, *, bos: int | None, on_prompt: Callable[[int], None] = lambda _: None
) -> dict[int, list[NeedlePrompt]]:
    """All prompts, by length.

    Args:
        spec: tasks, lengths and numbers of prompts.
        encode: the tokenizer.
        bos: token before a text; None for none.
        on_prompt: called with the number of prompts so far.

    Raises:
        NeedleError: lists the tasks that do not fit in a length.
    """
    prompts: dict[int, list[NeedlePrompt]] = {}
    problems, count = [], 0
    for length in spec.lengths:
        by_task = []
        for name in spec.tasks:
            builder = _PromptBuilder(TASKS[name], length, spec, encode, bos)
            try:
                task_prompts = []
                for number in range(spec.samples):
                    task_prompts.append(builder.make(number))
                    count += 1
                    on_prompt(count)
                by_task.append(task_prompts)
            except NeedleError as error:
                # The other tasks and lengths are tried too, so that one run reports all problems.
                problems.append(str(error))
        # Tasks are interleaved, so that an interrupted run has results of every task.
        prompts[length] = [task_prompts[n] for n in range(spec.samples) for task_prompts in by_task]
    if problems:
        raise NeedleError("\n".join(problems))
    return prompts


class _PromptBuilder:
    """Builds the prompts of one task and length; remembers how much haystack the last one needed."""

    def __init__(self, task: Task, length: int, spec: NeedleSpec, encode: Encode, bos: int | None):
        self.task, self.length, self.spec, self.encode, self.bos = task, length, spec, encode, bos
        self.units: int | None = None
        self.tokens_per_unit = 1.0

    def make(self, number: int) -> NeedlePrompt:
        """The prompt of an index, as long as fits."""
        least = self.task.least
        # The first prompt measures the tokens per unit of haystack from two short texts.
        if self.units is None:
            # The task's own text (question, example) is in both, so their difference is the haystack alone.
            low, high = least, least + 16
            short, longer = self._tokenize(number, low)[0], self._tokenize(number, high)[0]
            # A lower bound, so that the quotients below stay finite.
            self.tokens_per_unit = max((longer - short) / (high - low), 0.25)
            self.units = max(least, low + int((self.length - short) / self.tokens_per_unit))
        # Search between the largest number of units that fits and the smallest that does not; the next guess divides
        # the remaining tokens by the tokens per unit.
        fits: tuple[int, NeedleText, np.ndarray, np.ndarray] | None = None
        units, too_many = self.units, None
        for _ in range(_MAX_TRIES):
            size, question, ids, offsets = self._tokenize(number, units)
            remaining = self.length - size
            if remaining < 0:
                if units <= least:
                    raise NeedleError(
                        f"{self.task.name}: its shortest text has {size:,} tokens, more than the length of "
                        f"{self.length:,}\n  → "
                        f"lengths: at least {size:,} for this task"
                    )
                too_many = units
            else:
                fits = units, question, ids, offsets
            # Close enough: one more unit would hardly fit, or is known not to fit.
            if remaining >= 0 and (remaining < 2 * self.tokens_per_unit or units + 1 == too_many):
                break
            lowest = least if fits is None else fits[0]
            if too_many is not None and fits is not None and fits[0] + 1 >= too_many:
                break
            # The next guess lies strictly between what fits and what does not, so the search ends.
            units = max(
                lowest,
                units
                + (
                    int(remaining / self.tokens_per_unit)
                    if remaining >= 0
                    else -max(1, round(-remaining / self.tokens_per_unit))
                ),
            )
            if fits is not None:
                units = max(units, fits[0] + 1)
            if too_many is not None:
                units = min(units, too_many - 1)
        if fits is None:
            # No guess fitted within the limit of tries: the shortest text does, or the first branch above had raised.
            size, question, ids, offsets = self._tokenize(number, least)
            assert size <= self.length, f"{self.task.name}: {size} tokens for {self.length}"
            fits = least, question, ids, offsets
        units, question, ids, offsets = fits
        # The next prompt of this task and length begins here: most need about the same haystack.
        self.units = units
        return self._build(number, question, ids, offsets)

    def _tokenize(self, number: int, units: int) -> tuple[int, NeedleText, np.ndarray, np.ndarray]:
        # The seed of a prompt does not depend on other tasks or lengths: adding one leaves all prompts as they are.
        # CRC-32, because `hash` of a string differs from process to process.
        seed = [self.spec.seed, zlib.crc32(self.task.name.encode()), self.length, number]
        make = self.task.make_for_length(self.length)
        question = make(np.random.default_rng(seed), units, self.spec.depth(number))
        # Encoded together, as a token may span the border of prompt and answer.
        ids, offsets = self.encode(question.prompt + question.answer)
        return len(ids) + (self.bos is not None), question, ids, offsets

    def _build(self, number: int, question: NeedleText, ids: np.ndarray, offsets: np.ndarray) -> NeedlePrompt:
        begin = 0 if self.bos is None else 1
        whole = ids if self.bos is None else np.concatenate([np.asarray([self.bos]), ids])
        indices, owners = [], []
        for owner, value in enumerate(question.hidden):
            first, last = (len(question.prompt) + needle for needle in (value.begin, value.end))
            overlapping = np.flatnonzero((offsets[:, 1] > first) & (offsets[:, 0] < last)) + begin
            # A token that two values share is scored once, as part of the first.
            new = [n for n in overlapping.tolist() if n not in indices]
            indices += new
            owners += [owner] * len(new)
            if not new:
                raise NeedleError(
                    f"{self.task.name}: {question.answer[value.begin : value.end]!r} has no separate token in this "
                    "tokenizer"
                )
        if len(indices) > SLOTS:
            raise NeedleError(
                f"{self.task.name}: an answer has {len(indices)} tokens, more than the {SLOTS} that can be scored"
            )
        target_tokens = np.asarray(indices, np.int32)
        # The first token of a sequence has no prediction.
        if target_tokens[0] == 0:
            raise NeedleError(f"{self.task.name}: no token precedes the answer")
        return NeedlePrompt(
            task=self.task.name,
            length=self.length,
            number=number,
            tokens=whole[:-1].astype(np.int32),
            # Position n predicts token n + 1.
            target_positions=target_tokens - 1,
            targets=whole[target_tokens].astype(np.int32),
            owners=np.asarray(owners, np.int32),
            values=tuple(question.answer[needle.begin : needle.end] for needle in question.hidden),
            depths=tuple(needle.depth for needle in question.hidden),
            text_end=question.prompt[-240:],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedleBatch:
    """The inputs of one execution of a Program.

    Attributes:
        prompts: its prompts; further rows are empty.
        tokens: int32 `[rows, length]`; causal attention hides the padding after a prompt.
        target_positions, targets: int32 `[rows, SLOTS]`.
    """

    prompts: tuple[NeedlePrompt, ...]
    tokens: np.ndarray
    target_positions: np.ndarray
    targets: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The Program's inputs other than the model."""
        return self.tokens, self.target_positions, self.targets


def batches(prompts: Sequence[NeedlePrompt], rows: int, length: int) -> Iterator[NeedleBatch]:
    """The prompts of one length in batches."""
    for first in range(0, len(prompts), rows):
        batch = tuple(prompts[first : first + rows])
        # Unused slots have position 0 and target 0; their results are computed and not read.
        tokens = np.zeros((rows, length), np.int32)
        target_positions, targets = (np.zeros((rows, SLOTS), np.int32) for _ in range(2))
        for n, prompt in enumerate(batch):
            tokens[n, : len(prompt.tokens)] = prompt.tokens
            target_positions[n, : len(prompt.target_positions)] = prompt.target_positions
            targets[n, : len(prompt.targets)] = prompt.targets
        yield NeedleBatch(prompts=batch, tokens=tokens, target_positions=target_positions, targets=targets)


def digest(prompts: dict[int, list[NeedlePrompt]]) -> str:
    """Hex SHA-256 of all prompts."""
    hashed = hashlib.sha256()
    for length, length_prompts in prompts.items():
        hashed.update(f"{length}:{len(length_prompts)}|".encode())
        for prompt in length_prompts:
            for array in (prompt.tokens, prompt.target_positions, prompt.targets, prompt.owners):
                hashed.update(array.astype("<i4").tobytes() + b"|")
    return hashed.hexdigest()
