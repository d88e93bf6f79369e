"""The prompt reader of a `generate` run: `levanter.inference.prompts` with the settings of the config."""

from levanter.commands.generate.plan import GenerateWork
from levanter.data.chat import template_text
from levanter.data.tokenizer import TemplateTokenizer
from levanter.inference.prompts import PromptReader, PromptRules
from levanter.inference.scheduler import Schedule


def prompt_reader(work: GenerateWork, schedule: Schedule) -> PromptReader:
    """The reader that converts lines to requests.

    Args:
        work: the run's.
        schedule: limits of the engine.
    """
    config, vocab_size = work.config, work.pretrained.config.vocab_size
    assert vocab_size is not None
    template, tokenizer = config.chat_template, work.pretrained.tokenizer
    if not (isinstance(tokenizer, TemplateTokenizer) and template in tokenizer.chat_templates):
        template = template_text(template)
    rules = PromptRules(
        vocab_size=vocab_size,
        seed=config.trainer.seed,
        sampling=config.sampling,
        chat_template=template,
        enforce_bos=config.enforce_bos,
        prompt_logprobs=config.inference.prompt_logprobs,
        penalties=config.inference.penalties,
    )
    return PromptReader(tokenizer, schedule, rules)
