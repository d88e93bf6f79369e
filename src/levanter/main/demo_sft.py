"""Demo of fine-tuning: a small model learns facts about an invented island from conversations.

    make demo-sft

It runs `eval_lm`, `train_lm` with `config/lora/demo.yaml`, and `eval_lm` with the resulting adapter; before and after,
the model answers six questions as `generate` would. On a machine where training takes longer than `SECONDS`, it is
stopped: the adapter that was trained by then is saved and evaluated as usual.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from levanter.commands.cli.devices import local_target
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.lifecycle import exit_process
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate.config import EvalLmConfig
from levanter.commands.evaluate.eval_lm import ENTRY_POINT as EVALUATION
from levanter.commands.generate.chat_session import Dialogue
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.engine_setup import running
from levanter.commands.generate.generate import describe as describe_texts
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.train.lm.train_lm import TrainLmConfig, train
from levanter.commands.train.work import Trained
from levanter.eval.perplexity import EvalResult
from levanter.inference.config import InferenceConfig
from levanter.inference.engine import make_schedule
from levanter.mesh import local_devices
from levanter.runplan import INTERNAL_ERROR, OK

SECONDS = 120.0
"""For training, at most: the last step and what follows it come on top."""
TOKENS = 24
"""Of an answer, at most."""
QUESTIONS = (
    "What is the capital of Vellmar?",
    "What money is used on Vellmar?",
    "Who built the lighthouse of Orrindel?",
    "Which bird nests only on Vellmar?",
    "When is the Feast of Lamps?",
    "What is the capital of France?",
)


def main(config: TrainLmConfig) -> int:
    """Runs the demo; returns 0 if the held-out loss has fallen."""
    began = time.monotonic()
    logging.getLogger("levanter").setLevel(logging.INFO)
    assert config.hf_checkpoint is not None, "the demo begins from a checkpoint; use config/lora/demo.yaml"
    before, first = _judged(config, None), _answers(config, None)
    done = _trained(config)
    assert done.exported is not None, "the demo saves its adapter; use config/lora/demo.yaml"
    after, second = _judged(config, done.exported), _answers(config, done.exported)
    print("\n=== held-out conversations, the assistant's tokens")
    for when, scores in (("before", before), ("after", after)):
        # The demo's evaluation has one set.
        (score,) = (one.score for one in scores.sets)
        print(f"{when:>8}: loss {score.loss:.3f} nats per token, {score.accuracy or 0:.1%} of them the likeliest")
    print("=== six questions, greedy")
    for question, one, other in zip(QUESTIONS, first, second, strict=True):
        print(f"> {question}\n  before: {one!r}\n   after: {other!r}")
    print(f"adapter: {done.exported}; {done.taken} steps; {time.monotonic() - began:.0f} s in all")
    if after.overall.micro.loss < before.overall.micro.loss:
        return OK
    print("error: the held-out loss is not below what it was", file=sys.stderr)
    return INTERNAL_ERROR


def _trained(config: TrainLmConfig) -> Trained:
    """Trains for at most `SECONDS`; a run that was stopped is finished at the step that it had reached."""
    with _interrupted_after(SECONDS):
        done = train(config)
    if not done.preempted:
        return done
    print(f"training was stopped after {done.taken} steps and {done.seconds:.0f} s")
    # The run counts as complete after the steps that it took: this only evaluates and exports.
    ended = replace(config, epoch=0, trainer=replace(config.trainer, num_train_steps=done.taken))
    return train(ended)


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Sends this process a SIGTERM after so many seconds."""
    # Schedulers send SIGTERM before they preempt: the run saves and ends cleanly.
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGTERM])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _judged(config: TrainLmConfig, adapter: str | None) -> EvalResult:
    """The loss and the accuracy on what was held out."""
    # The same data and row length before and after, so that the two losses are comparable.
    eval_config = EvalLmConfig(
        hf_checkpoint=config.hf_checkpoint,
        adapter_path=adapter,
        trainer=config.trainer,
        data=config.data,
        max_eval_length=config.positions,
    )
    result = run_config(EVALUATION, eval_config).result
    assert result is not None
    return result.result


def _answers(config: TrainLmConfig, adapter: str | None) -> list[str]:
    """The model's answers, by greedy decoding."""
    generate_config = GenerateConfig(
        hf_checkpoint=config.hf_checkpoint,
        adapter_path=adapter,
        trainer=config.trainer,
        interactive=True,
        # Questions and answers are short: a small cache keeps the demo's programs small.
        inference=InferenceConfig(max_rows=1, max_seq_len=128),
    )
    devices = local_devices(config.trainer.mesh)
    plan = describe_texts(generate_config, local_target(devices)).check()
    # The engine runs the plan's Programs in the order of this schedule; it compiles no others.
    schedule = make_schedule(plan.work.programs, share_prefixes=generate_config.inference.share_prefixes)
    reader = prompt_reader(plan.work, schedule)
    greedy = replace(reader.defaults, temperature=0.0, max_tokens=TOKENS)
    # One engine answers all questions, each as a conversation of its own.
    with running(plan.work, plan.mesh.build(devices.devices), schedule=schedule, reader=reader, show=True) as ready:
        assert ready.engine is not None, "a demo is one process"
        dialogue = Dialogue(ready.engine, reader, reader.defaults)
        sessions = (dialogue.chat([{"role": "user", "content": question}], greedy) for question in QUESTIONS)
        return [dialogue.say(session, lambda _: None).text for session in sessions]


if __name__ == "__main__":
    exit_process(run_entry_point(TrainLmConfig, main))
