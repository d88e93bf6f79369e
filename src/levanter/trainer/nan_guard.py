"""The guard: what becomes of a run whose numbers are not finite.

It stops the run before the state behind a bad step is saved. Where the step's Program leaves such steps out by itself
(`trainer.skip_nonfinite_steps`), it counts them, says so, and stops when too many come in a row.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from levanter.base.exit_codes import INTERNAL_ERROR
from levanter.trainer.report import StepReport

logger = logging.getLogger(__name__)


class NonFiniteError(ValueError):
    """A step gave a number that is none; the run stopped before its state was saved."""

    exit_code = INTERNAL_ERROR


@dataclass(kw_only=True)
class Guard:
    """Ends a run whose numbers are not finite.

    Attributes:
        nan: whether NaN ends it.
        inf: whether infinity ends it.
        in_a_row: how many steps in a row may be left out because they are not finite.
        last_checkpoint: what to go back to, for the message.
    """

    nan: bool = True
    inf: bool = True
    in_a_row: int = 0
    last_checkpoint: Callable[[], str] = lambda: "no checkpoint was saved"
    _row: int = field(default=0, init=False)

    def check(self, report: StepReport) -> None:
        """Looks at the loss, the gradient and the update of a step.

        Raises:
            NonFiniteError: one of them is not finite, and the step was not left out, or one too many were.
        """
        bad = self._bad(report)
        if not report.skipped:
            self._row = 0
            if bad:
                raise NonFiniteError(self._message(report, bad))
            return
        why = ", ".join(f"{name} {value}" for name, value in bad.items()) or "an outlier among recent steps"
        logger.warning(
            "step %d is skipped: %s (loss %.6g, gradient norm %.6g)", report.step, why, report.loss, report.grad_norm
        )
        # An outlier is judged by the steps before it, and ends no run; what is not finite does.
        self._row = self._row + 1 if bad else 0
        if self._row > self.in_a_row:
            raise NonFiniteError(self._message(report, bad))

    def _bad(self, report: StepReport) -> dict[str, float]:
        return {
            name: value
            for name, value in _numbers(report).items()
            if (self.nan and math.isnan(value)) or (self.inf and math.isinf(value))
        }

    def _message(self, report: StepReport, bad: dict[str, float]) -> str:
        nonfinite = ", ".join(f"{name} {value}" for name, value in bad.items())
        others = ", ".join(f"{name} {value:.6g}" for name, value in _numbers(report).items() if name not in bad)
        after = "the state after it was not saved"
        hint = "trainer.crash_on_nan, trainer.crash_on_inf: false continues regardless"
        if self.in_a_row and self._row > self.in_a_row:
            after = f"{self.in_a_row} steps before it were skipped for the same reason, and no more are allowed"
            hint = (
                f"trainer.skip_nonfinite_steps: {self.in_a_row} is the number of consecutive steps that may be skipped"
            )
        elif not report.skipped and not self.in_a_row:
            hint += "; trainer.skip_nonfinite_steps: N skips such steps, up to N in a row"
        return (
            f"step {report.step}: {nonfinite}{f' ({others})' if others else ''}, "
            f"learning rate {report.learning_rate:.3g}; {after}; {self.last_checkpoint()}\n  → {hint}"
        )


def _numbers(report: StepReport) -> dict[str, float]:
    return {"loss": report.loss, "gradient norm": report.grad_norm, "update norm": report.update_norm}
