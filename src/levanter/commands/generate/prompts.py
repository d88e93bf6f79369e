"""How a run of `generate` reads its prompts: `levanter.inference.prompts` with what its config says."""

from levanter.bounds import MIB, read_bounded
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.generate.templates import is_template
from levanter.inference.prompts import PromptReader, PromptRules
from levanter.inference.schedule import Schedule
from levanter.io import open_read


def template_text(given: str | None) -> str | None:
    """A chat template, written down or in a file.

    Raises:
        ValueError: the file is not UTF-8, or is larger than any template.
    """
    if given is None or is_template(given):
        return given
    with open_read(given) as file:
        try:
            return read_bounded(file, MIB, where=f"chat_template: {given}").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template: {given}: not UTF-8 at byte {error.start}") from None


def prompt_reader(work: GenerateWork, schedule: Schedule) -> PromptReader:
    """What makes requests of lines.

    Args:
        work: the run's.
        schedule: what there is room for.
    """
    config, vocab_size = work.config, work.pretrained.config.vocab_size
    assert vocab_size is not None
    rules = PromptRules(
        vocab_size=vocab_size,
        seed=config.trainer.seed,
        sampling=config.sampling,
        chat_template=template_text(config.chat_template),
        enforce_bos=config.enforce_bos,
        prompt_logprobs=config.inference.prompt_logprobs,
        penalties=config.inference.penalties,
    )
    return PromptReader(work.pretrained.tokenizer, schedule, rules)
