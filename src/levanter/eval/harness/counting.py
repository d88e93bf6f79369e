"""How often Programs will run, for plans."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from levanter.eval.harness.packing import RowShape


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a run will ask.

    Attributes:
        executions: of each Program, by its name; one that is not there does not run.
        requests: of all tasks.
        exact: whether every document was looked at.
        is_assumed: whether the number of requests is an assumption.
        shapes: of the rows: as given, or as they suit the requests where all are known.
    """

    executions: Mapping[str, int]
    requests: int
    exact: bool
    is_assumed: bool = False
    shapes: tuple[RowShape, ...] = ()

    @property
    def reason(self) -> str:
        """Where the numbers come from."""
        if self.is_assumed:
            return f"{self.requests:,} requests (plan.assume_requests)"
        return f"{self.requests:,} requests of the tasks" + ("" if self.exact else ", by a sample of their documents")

    def message(self) -> dict[str, Any]:
        """It as JSON, for other processes."""
        return asdict(self)

    @staticmethod
    def of_message(message: Mapping[str, Any]) -> "Counted":
        """What `message` was made of."""
        return Counted(**{**message, "shapes": tuple(RowShape(**each) for each in message["shapes"])})

    @staticmethod
    def assumed(requests: int, tokens: int, shapes: Sequence[RowShape]) -> "Counted":
        """What so many requests of so many tokens each would be, in the shape that is made for them."""
        sparse = [shape for shape in shapes if not shape.is_dense] or list(shapes)
        fitting = [shape for shape in sparse if shape.length >= tokens] or sparse[-1:]
        shape = min(fitting, key=lambda each: each.length)
        rows = -(-requests // max(1, shape.length // tokens))
        return Counted(
            executions={shape.name: -(-rows // shape.rows)},
            requests=requests,
            exact=False,
            is_assumed=True,
            shapes=tuple(shapes),
        )
