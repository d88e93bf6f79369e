"""The guard: ends a run whose loss, gradient or update is not finite.

It ends the run before the state after a bad step is saved. If the step's Program skips such steps
(`trainer.skip_nonfinite_steps`), the guard logs and counts them, and ends the run after too many in a row.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from levanter.base.exit_codes import INTERNAL_ERROR
from levanter.trainer.report import StepReport

logger = logging.getLogger(__name__)


class NonFiniteError(ValueError):
    """A number of a step is not finite; the run ended before its state was saved."""

    exit_code = INTERNAL_ERROR


@dataclass(kw_only=True)
class Guard:
    """Ends a run whose numbers are not finite.

    Attributes:
        nan: whether NaN ends it.
        inf: whether infinity ends it.
        in_a_row: number of consecutive non-finite steps that may be skipped.
        last_checkpoint: describes the last checkpoint, for the message.
    """

    nan: bool = True
    inf: bool = True
    in_a_row: int = 0
    last_checkpoint: Callable[[], str] = lambda: "no checkpoint was saved"
    _row: int = field(default=0, init=False)

    def check(self, report: StepReport) -> None:
        """Checks the loss, the gradient norm and the update norm of a step.

        Raises:
            NonFiniteError: one of them is not finite and the step was not skipped, or too many steps were skipped.
        """
        # The update norm is checked too: an optimizer may overflow although loss and gradient are finite.
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
        # Only non-finite steps count: skipped outliers are finite and never end a run.
        self._row = self._row + 1 if bad else 0
        if self._row > self.in_a_row:
            raise NonFiniteError(self._message(report, bad))

    def _bad(self, report: StepReport) -> dict[str, float]:
        return {
            name: value
            for name, value in _numbers(report).items()
            # Each of the two can be switched off on its own, as in upstream.
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
