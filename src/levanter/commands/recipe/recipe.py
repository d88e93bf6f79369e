"""From a depth to a chat model: the numbers, the stages, and what they cost on a pod, before anything is rented.

    python -m levanter.main.recipe --depth 24 --target v6e-8,v4-32 --price v6e=2.70

Prints every number of nanochat's base model of that depth with its reason, the hours, chip-hours and dollars of its
training on each target at several utilizations, and the commands of the chain: tokenizer, base model, fine-tuning,
evaluation, chat. `--output_path FOLDER` writes the document of the base model, laid out for the first target. With
`--plan true` the run is described on each target as `plan` does, without a compiler. No accelerator is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from levanter.base.exit_codes import BAD_INPUT, DOES_NOT_FIT, OK
from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.plan_options import price_words
from levanter.commands.planning import check_prices
from levanter.commands.recipe.documents import base_document, replicated, rows_on_device, state_bytes
from levanter.commands.recipe.miniseries import SPEEDRUN_RATIO, Derived, Miniseries, depth_problems
from levanter.config import parse_text, read_text
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import ManyInt, PathText, PositiveFloat, PositiveInt, Ranged
from levanter.hardware import Accelerator, parse_accelerator
from levanter.io import Output, atomic_write, join, probe
from levanter.plan.job_cost import chip_hour_prices

MFU_LEVELS = (0.255, 0.35, 0.45)
"""Shares of the peak (dense bf16) at which hours are given. 25.5 % was compiled for a Llama of d24's size on v6e-8."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Ranged):
    """The numbers, documents and costs of a nanochat of some depth.

    Attributes:
        depth: layers; everything else follows.
        target: pods, separated by commas.
        ratio: tokens for each parameter of the matrices in blocks and of the head; 8 (nanochat's speedrun) by default,
            12 is nanochat's default.
        tokens: tokens of the run, instead of the ratio.
        batch: tokens of a step, instead of the predicted batch.
        length: tokens of a row.
        vocab_size: ids of the tokenizer.
        price: dollars for a chip-hour: one number, or generations such as `v6e=2.7,v4=3.2`.
        output_path: a folder for the document.
        plan: whether the run is described on each target.
    """

    depth: PositiveInt = 20
    target: str = "v6e-8"
    ratio: PositiveFloat | None = None
    tokens: ManyInt | None = None
    batch: ManyInt | None = None
    length: PositiveInt = 2048
    vocab_size: PositiveInt = 32_768
    price: str | PositiveFloat | None = None
    output_path: PathText | None = None
    plan: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = depth_problems(self.depth, self.length)
        if self.ratio is not None and self.tokens is not None:
            problems.append("ratio and tokens: each gives the tokens of the run; keep one")
        if self.batch is not None and self.batch % self.length:
            nearest = max(self.length, round(self.batch / self.length) * self.length)
            problems.append(f"batch: {self.batch:,} tokens are no whole rows of {self.length:,}; nearest {nearest:,}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def series(self) -> Miniseries:
        """The numbers.

        Raises:
            ValueError: the tokens are fewer than a step has.
        """
        ratio = SPEEDRUN_RATIO if self.ratio is None else self.ratio
        series = Miniseries(
            depth=self.depth,
            ratio=ratio,
            tokens=self.tokens,
            length=self.length,
            vocab_size=self.vocab_size,
            batch=self.batch,
        )
        if series.steps < 1:
            key = "ratio" if self.tokens is None else "tokens"
            raise ValueError(f"{key}: {series.horizon:,} tokens are less than a step of {series.step_tokens:,}")
        return series


def main(config: RecipeConfig) -> int:
    """Prints the recipe and writes its document."""
    series = config.series
    pods = [parse_accelerator(name.strip()) for name in config.target.split(",")]
    options = _options(config.price)
    check_prices(options, [pod.name for pod in pods])
    problems = []
    for pod in pods:
        try:
            rows_on_device(series, pod)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    name = f"nanochat_d{config.depth}"
    document = base_document(series, pods[0], name=name)
    if config.output_path is not None:
        # Tested before anything is printed.
        probe([Output(key="output_path", path=config.output_path, kind="folder")])
    print(f"nanochat, depth {config.depth}\n")
    print("\n".join(value_lines(series.derived())))
    print()
    print("\n".join(cost_lines(series, pods, options)))
    print()
    print("\n".join(chain_lines(config, name)))
    if config.output_path is not None:
        path = join(config.output_path, f"{name}.yaml")
        with atomic_write(path) as file:
            file.write(document.encode())
        print(f"\nwritten: {path}")
    return _planned(series, pods, options, name) if config.plan else OK


def _options(price: str | float | None) -> PlanOptions:
    """The prices as `plan` knows them."""
    if price is None:
        return PlanOptions()
    # The same syntax, and so the same errors, as `plan --price`.
    (word,) = price_words(str(price))
    key, _, value = word.removeprefix("--plan.").partition("=")
    return parse_text(PlanOptions, f"{key}: {value}", source="--price")


def value_lines(values: Sequence[Derived]) -> list[str]:
    """The numbers as a table: name, value, reason."""
    name_width, width = max(len(value.name) for value in values), max(len(value.value) for value in values)
    return [f"{value.name:<{name_width}}  {value.value:>{width}}  {value.reason}" for value in values]


def cost_lines(series: Miniseries, pods: Sequence[Accelerator], options: PlanOptions) -> list[str]:
    """Hours, chip-hours and dollars of the base model on each pod, and how its state is laid out."""
    lines = ["base model, without its evaluation: hours, chip-hours and dollars by MFU (assumed; `plan` models it)"]
    for pod in pods:
        layout = "whole on every device" if replicated(series, pod) else "sharded (FSDP)"
        lines.append(
            f"{pod.name}: {pod.chips} chips of {pod.peak_flops() / 1e12:.0f} TFLOP/s; state "
            f"{state_bytes(series) / 2**30:.1f} GiB, {layout}; {rows_on_device(series, pod)} rows a device at once"
        )
        # No price is built in: list prices change by region and month.
        prices = chip_hour_prices(options, pod)
        for mfu in MFU_LEVELS:
            hours = series.total_flops / (pod.chips * pod.peak_flops() * mfu) / 3600
            dollars = [
                f"${hours * pod.chips * price:,.0f}" + (f" ({kind})" if kind else "") for kind, price in prices.items()
            ]
            lines.append(
                f"  {mfu:>5.1%}  {hours:>7.2f} h  {hours * pod.chips:>8,.1f} chip-hours  "
                + (", ".join(dollars) or "price unknown (--price)")
            )
    return lines


def chain_lines(config: RecipeConfig, name: str) -> list[str]:
    """The commands of the chain; each is planned by `levanter plan COMMAND` with the same words."""
    folder = config.output_path or "config/recipes"
    base = f"{folder}/{name}.yaml"
    run = f"checkpoints/{name}"
    return [
        "the chain",
        f"  1 tokenizer    levanter train_tokenizer --config_path {base} --output_path tokenizers/nanochat",
        f"  2 base model   levanter train_lm --config_path {base} --trainer.id {name}",
        f"  3 fine-tuning  levanter train_lm --config_path {base} --initialize_model_from_checkpoint_path {run}/{name} "
        "with `data:` of conversations (format chat); learning rates × 0.8, no warmup, the second half falls to 0",
        f"  4 evaluation   levanter eval_lm --config_path {base} --checkpoint_path {run}/{name} (bits per byte)",
        "  5 chat         levanter serve, or inference_repl, with the exported folder",
    ]


def _planned(series: Miniseries, pods: Sequence[Accelerator], options: PlanOptions, name: str) -> int:
    """Describes the base model's run on each pod and prints what `plan --no-compile` finds."""
    # Imported on demand: the numbers alone need no JAX.
    import jax

    from levanter.plan.preflight.pipeline import preflight
    from levanter.plan.preflight.state import Question

    jax.config.update("jax_platforms", "cpu")
    entry_point = ENTRY_POINTS["train_lm"].load()
    codes = set()
    print("\nplan of the base model (arithmetic; levanter plan train_lm compiles it)")
    for pod in pods:
        # A document for each pod: its layout and the rows of a device depend on it.
        loaded = read_text(entry_point.config, base_document(series, pod, name=name))
        question = Question(
            target=pod.name,
            describe=lambda target, loaded=loaded: entry_point.describe(loaded.config, target, written=loaded.written),
            provider="levanter.commands.planning:describe",
            payload={},
            compile=False,
            options=options,
        )
        verdict = preflight(question)
        codes.add(verdict.exit_code)
        print(f"  {pod.name}: {verdict.headline}")
    return next((code for code in (DOES_NOT_FIT, BAD_INPUT) if code in codes), OK)
