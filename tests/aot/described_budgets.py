"""What `test_budget_on_pods` compiles: a real training run at a small size, and the same model scoring."""

from dataclasses import replace
from typing import Any

from haliax_ext.mapping import AxisMapping
from haliax_ext.program import Input, Program
from levanter.commands.train.lm import train_lm
from levanter.config import parse
from levanter.models.scoring import token_logprobs
from levanter.runplan import RunPlan, Target


def training(payload: dict[str, Any], target: Target) -> RunPlan:
    """The plan of a `train_lm` config, with one more Program that only scores the batch."""
    plan = train_lm.describe(parse(train_lm.TrainLmConfig, paths=[payload["path"]]), target)
    step = plan.program("train_step")
    state = step.inputs[0]

    def score(model: Any, tokens: Any, targets: Any) -> Any:
        return token_logprobs(model, tokens, targets)

    scoring = Program(
        name="score",
        function=score,
        inputs=(
            Input(name="model", value=state.value.model, placement=plan.work.state_plan.parameters),
            Input(name="tokens", value=step.input("batch").value.tokens, placement=step.mappings.compute),
            Input(name="targets", value=step.input("batch").value.targets, placement=step.mappings.compute),
        ),
        mappings=step.mappings,
        out_placement=AxisMapping(),
    )
    return replace(plan, computing=(step, scoring))
