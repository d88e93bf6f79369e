"""Demo of text generation: a small model answers three questions, greedy and sampled, then quantized to int8.

    make demo-generate

It runs what `generate` runs at a terminal: the same plan, printed first, the same Programs, and streamed texts. At the
end the same model with int8 projections repeats the greedy answers, and the demo prints the speed of both and how far
their texts agree.
"""

import sys
from dataclasses import dataclass, replace

from levanter.commands.cli.compilation_cache import keep_compiled
from levanter.commands.cli.devices import configure_jax, local_target
from levanter.commands.generate.chat_session import ChatTurn, Dialogue
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.engine_setup import running
from levanter.commands.generate.generate import describe
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.generate.prompts import prompt_reader
from levanter.inference.engine import make_schedule
from levanter.mesh import DeviceSet, local_devices
from levanter.runplan import INTERNAL_ERROR, OK, RunPlan

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about the sea.",
)
TOKENS = 48
"""Largest number of tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class DemoAnswers:
    """The answers of one model.

    Attributes:
        greedy, sampled: to the questions, in their order.
        weight_bytes: of its weights on a device.
    """

    greedy: list[ChatTurn]
    sampled: list[ChatTurn]
    weight_bytes: int

    @property
    def rate(self) -> float:
        """Tokens per second after the first token of each answer, so that compilation is not counted."""
        turns = [turn for turn in (*self.greedy, *self.sampled) if turn.rate is not None and turn.first is not None]
        seconds = sum(turn.seconds - turn.first for turn in turns if turn.first is not None)
        return sum(turn.tokens - 1 for turn in turns) / max(seconds, 1e-9)


def main(config: GenerateConfig) -> int:
    """Runs the demo; returns 0 if every question has an answer."""
    configure_jax(config.trainer)
    devices = local_devices(config.trainer.mesh)
    keep_compiled(config.trainer, platform=devices.platform)
    # The demo has its own questions, so files of the config are ignored.
    config = replace(config, interactive=True, input_path=None, output_path=None)
    plan = describe(config, local_target(devices)).check()
    print(plan.report())
    loaded = _answers(plan, devices, sampled=True)
    quantized = describe(replace(config, quantize="int8"), local_target(devices)).check()
    print("\n=== the same as int8, greedy")
    int8 = _answers(quantized, devices, sampled=False)
    for name, answers in (("as loaded", loaded), ("int8", int8)):
        print(f"{name:>9}: {answers.weight_bytes / 2**20:,.0f} MiB of weights, {answers.rate:.1f} tokens a second")
    # Greedy answers differ only by the rounding of the weights.
    pairs = [(a.text, b.text) for a, b in zip(loaded.greedy, int8.greedy, strict=True)]
    same = ", ".join(f"{_common(a, b)} of {len(a)}" for a, b in pairs)
    print(f"characters that the greedy answers begin with alike: {same}")
    turns = [*loaded.greedy, *loaded.sampled, *int8.greedy]
    if all(turn.error is None and turn.text.strip() for turn in turns):
        return OK
    print("error: a question has no answer", file=sys.stderr)
    return INTERNAL_ERROR


def _answers(plan: RunPlan[GenerateWork], devices: DeviceSet, *, sampled: bool) -> DemoAnswers:
    """Generates the answers to the questions, and prints them as they are generated."""
    work = plan.work
    schedule = make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes)
    reader = prompt_reader(work, schedule)
    # Temperature 0 is greedy decoding; sampling gets a fixed seed, so that the demo repeats.
    kinds = {"greedy": replace(reader.defaults, temperature=0.0, max_tokens=TOKENS)}
    if sampled:
        kinds["sampled"] = replace(reader.defaults, temperature=0.7, top_p=0.95, seed=1, max_tokens=TOKENS)
    turns: dict[str, list[ChatTurn]] = {"greedy": [], "sampled": []}
    # The engine exists on process 0 only.
    with running(work, plan.mesh.build(devices.devices), schedule=schedule, reader=reader, show=True) as ready:
        assert ready.engine is not None, "a demo is one process"
        dialogue = Dialogue(ready.engine, reader, reader.defaults)
        for question in QUESTIONS:
            print(f"\n> {question}")
            for kind, params in kinds.items():
                print(f"{kind}: ", end="")
                prompt = dialogue.chat([{"role": "user", "content": question}], params)
                turn = dialogue.say(prompt, lambda text: print(text, end="", flush=True))
                turns[kind].append(turn)
                rate = "" if turn.rate is None else f", {turn.rate:.1f} a second"
                print(f"\n[{turn.tokens} tokens, the first after {turn.first or 0:.2f} s{rate}]")
    return DemoAnswers(**turns, weight_bytes=plan.sharding.bytes_per_device)


def _common(a: str, b: str) -> int:
    """The length of the common prefix of two texts, in characters."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
