"""Demo of text generation: a small model answers three questions, greedy and sampled, then quantized to int8.

    make demo-generate

It is what `generate` does at a terminal: the same plan, printed first, the same Programs, and texts that appear as they
grow. At the end the greedy answers are given once more by the same model with its projections as 8-bit integers, beside
how fast each of the two was and how far they agree.
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
"""Of an answer, at most."""


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
        """Tokens a second behind the first of each answer: none of them waits for a compiler."""
        said = [one for one in (*self.greedy, *self.sampled) if one.rate is not None and one.first is not None]
        seconds = sum(one.seconds - one.first for one in said if one.first is not None)
        return sum(one.tokens - 1 for one in said) / max(seconds, 1e-9)


def main(config: GenerateConfig) -> int:
    """Runs the demo; returns 0 if every question has an answer."""
    configure_jax(config.trainer)
    found = local_devices(config.trainer.mesh)
    keep_compiled(config.trainer, platform=found.platform)
    config = replace(config, interactive=True, input_path=None, output_path=None)
    whole = describe(config, local_target(found)).check()
    print(whole.report())
    own = _answers(whole, found, sampled=True)
    small = describe(replace(config, quantize="int8"), local_target(found)).check()
    print("\n=== the same as int8, greedy")
    int8 = _answers(small, found, sampled=False)
    for name, told in (("as loaded", own), ("int8", int8)):
        print(f"{name:>9}: {told.weight_bytes / 2**20:,.0f} MiB of weights, {told.rate:.1f} tokens a second")
    pairs = [(a.text, b.text) for a, b in zip(own.greedy, int8.greedy, strict=True)]
    same = ", ".join(f"{_common(a, b)} of {len(a)}" for a, b in pairs)
    print(f"characters that the greedy answers begin with alike: {same}")
    said = [*own.greedy, *own.sampled, *int8.greedy]
    if all(one.error is None and one.text.strip() for one in said):
        return OK
    print("error: a question has no answer", file=sys.stderr)
    return INTERNAL_ERROR


def _answers(plan: RunPlan[GenerateWork], found: DeviceSet, *, sampled: bool) -> DemoAnswers:
    """Asks the questions, and shows what is answered as it comes."""
    work = plan.work
    schedule = make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes)
    reader = prompt_reader(work, schedule)
    kinds = {"greedy": replace(reader.defaults, temperature=0.0, max_tokens=TOKENS)}
    if sampled:
        kinds["sampled"] = replace(reader.defaults, temperature=0.7, top_p=0.95, seed=1, max_tokens=TOKENS)
    told: dict[str, list[ChatTurn]] = {"greedy": [], "sampled": []}
    with running(work, plan.mesh.build(found.devices), schedule=schedule, reader=reader, show=True) as ready:
        assert ready.engine is not None, "a demo is one process"
        dialogue = Dialogue(ready.engine, reader, reader.defaults)
        for question in QUESTIONS:
            print(f"\n> {question}")
            for kind, params in kinds.items():
                print(f"{kind}: ", end="")
                asked = dialogue.chat([{"role": "user", "content": question}], params)
                said = dialogue.say(asked, lambda text: print(text, end="", flush=True))
                told[kind].append(said)
                rate = "" if said.rate is None else f", {said.rate:.1f} a second"
                print(f"\n[{said.tokens} tokens, the first after {said.first or 0:.2f} s{rate}]")
    return DemoAnswers(**told, weight_bytes=plan.sharding.bytes_per_device)


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
