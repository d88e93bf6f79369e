"""Which steps are saved, and which checkpoints go: arithmetic on steps and times, without files.

`keep` is a list of intervals `(every, until)`: up to and including step `until`, every `every`-th step is kept for
ever; the last interval may have no end (`until` None). After the last interval's end nothing is kept by step.
"""

from collections.abc import Sequence

from levanter.checkpoint.refs import CheckpointRef

Interval = tuple[int, int | None]


def check_intervals(keep: Sequence[Interval]) -> tuple[Interval, ...]:
    """The intervals as they are, if they make sense.

    Raises:
        ValueError: lists everything that is wrong with them.
    """
    problems, previous = [], 0
    for i, (every, until) in enumerate(keep):
        if every < 1:
            problems.append(f"keep[{i}]: `every` must be at least 1, got {every}")
        if until is None and i + 1 < len(keep):
            problems.append(f"keep[{i}]: has no `until`, so the intervals after it never begin")
        if until is not None and until <= previous:
            problems.append(f"keep[{i}]: `until` must be greater than {previous}, got {until}")
        previous = until if until is not None else previous
    if problems:
        raise ValueError("\n".join(problems))
    return tuple((every, until) for every, until in keep)


def is_kept(step: int, keep: Sequence[Interval]) -> bool:
    """Whether the checkpoint of a step stays for ever. Step 0, before any training, does not."""
    for every, until in keep:
        if until is None or step <= until:
            return step > 0 and step % every == 0
    return False


def expired(found: Sequence[CheckpointRef], *, newest: CheckpointRef, keep_last: int) -> list[CheckpointRef]:
    """The temporary checkpoints that have served their time, oldest first.

    The `keep_last` temporary ones that were saved last stay, and so does `newest`, whatever its kind.
    """
    temporary = sorted((ref for ref in found if ref.kind == "temporary"), key=lambda ref: ref.saved_at)
    staying = temporary[len(temporary) - min(keep_last, len(temporary)) :]
    return [ref for ref in temporary if ref not in staying and ref.path != newest.path]
