"""What is said of a checkpoint whose tensors are not those that a model needs."""

from collections.abc import Mapping, Sequence

from haliax_ext.errors import nearest
from haliax_ext.sources import TensorInfo

SHOWN = 20
"""How many problems of one kind a message lists before it only counts them."""


class WeightMismatchError(ValueError):
    """A checkpoint's tensors are not the ones a model needs.

    Attributes:
        missing: names of tensors the model needs and the source lacks.
        unexpected: names of tensors the source has and no rule mentions.
        misshaped: names of tensors whose shape or kind of number differs.
    """

    def __init__(self, message: str, *, missing: Sequence[str], unexpected: Sequence[str], misshaped: Sequence[str]):
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshaped = tuple(misshaped)


def mismatch(
    missing: Sequence[tuple[str, str]],
    unexpected: Sequence[str],
    misshaped: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
) -> WeightMismatchError:
    """The error of a checkpoint that does not fit, all of it with nearest names.

    Args:
        missing: pairs (tensor, path of the leaf that needs it).
        unexpected: tensors that no rule mentions.
        misshaped: tensor → what is wrong with it.
        tensors: all that the source has.
    """
    lines = [
        f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(unexpected)} unexpected, "
        f"{len(misshaped)} of the wrong shape or dtype"
    ]
    # A missing tensor is most often one of the unexpected ones under another name.
    candidates = unexpected or list(tensors)
    if missing:
        lines.append("missing:")
        shown: list[str] = []
        for name, path in missing[:SHOWN]:
            close = nearest(name, candidates)
            shown.append(f"  {name} (for {path})" + (f"; nearest: {', '.join(close)}" if close else ""))
        lines += [*shown, *_more(len(missing))]
    if unexpected:
        lines.append("unexpected:")
        names = [name for name, _ in missing]
        shown = []
        for name in unexpected[:SHOWN]:
            close = nearest(name, names)
            shown.append(f"  {name} {list(tensors[name].shape)}" + (f"; nearest: {', '.join(close)}" if close else ""))
        lines += [*shown, *_more(len(unexpected))]
    if misshaped:
        lines.append("wrong shape or dtype:")
        lines += [f"  {problem}" for problem in list(misshaped.values())[:SHOWN]]
        lines += _more(len(misshaped))
    return WeightMismatchError(
        "\n".join(lines), missing=[name for name, _ in missing], unexpected=unexpected, misshaped=list(misshaped)
    )


def _more(count: int) -> list[str]:
    return [f"  … and {count - SHOWN} more"] if count > SHOWN else []
