"""`PromptReader`: lines as requests to the engine. Text and conversations become ids; what cannot be answered is said.

What a tokenizer's files say besides its vocabulary is used here: its chat template, every id that ends a text, and its
special tokens, which a stop string may name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate
from levanter.inference.constraint import Constraints
from levanter.inference.jsonl import AskedLine, request_of
from levanter.inference.params import SamplingParams, lone_surrogate
from levanter.inference.requests import Request
from levanter.inference.scheduler import Schedule


def ends_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, as far as the tokenizer's files and those beside it say."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.end_ids
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """How a run reads what it is asked.

    Attributes:
        vocab_size: ids of the model.
        seed: of the run; a request without one gets its own, from this and its id.
        sampling: how texts are sampled where a request does not say.
        chat_template: makes a text of a conversation, instead of the tokenizer's own; None for that.
        enforce_bos: whether a prompt that is a text begins with BOS, where the tokenizer has one.
        prompt_logprobs: whether there are Programs that score prompts.
        penalties: whether rows count their tokens.
    """

    vocab_size: int
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool = True
    prompt_logprobs: bool = False
    penalties: bool = True


class PromptReader:
    """Makes requests of lines, for one model and one set of rows.

    Args:
        tokenizer: the model's.
        schedule: what there is room for.
        rules: the run's.
    """

    def __init__(self, tokenizer: Tokenizer, schedule: Schedule, rules: PromptRules):
        self.tokenizer, self.schedule, self.rules = tokenizer, schedule, rules
        files = tokenizer if isinstance(tokenizer, FastTokenizer) else None
        self.ends = ends_of(tokenizer)
        self._special = {} if files is None else files.special_tokens
        self.constraints = None
        if files is not None:
            self.constraints = Constraints(files.definition, vocab_size=rules.vocab_size, ends=self.ends)

    @property
    def defaults(self) -> SamplingParams:
        """How texts are sampled where a request does not say."""
        return self.rules.sampling

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The template for conversations; None where there is none."""
        text = self.rules.chat_template
        files = self.tokenizer if isinstance(self.tokenizer, FastTokenizer) else None
        text = text if text is not None else None if files is None else files.chat_template
        if text is None:
            return None
        ids = (self.tokenizer.bos_id, self.tokenizer.eos_id)
        bos, eos = ("" if i is None or files is None else files.token(i) or "" for i in ids)
        return ChatTemplate(text=text, bos_token=bos, eos_token=eos)

    def request(self, asked: AskedLine, *, shorten: bool = False) -> Request:
        """A line as a request.

        Args:
            asked: the line.
            shorten: whether it gets as many tokens as there is room for, where it asks for more.

        Raises:
            ValueError: lists what is wrong with it for this model and these rows.
        """
        request = request_of(
            asked,
            encode=self.beginning_with_bos if self.rules.enforce_bos else self.encode,
            chat=None if self.template is None else lambda messages: self.conversation(messages, asked.template),
            vocab_size=self.rules.vocab_size,
            model_ends=self.ends,
            seed=self.rules.seed,
            special_tokens=self._special,
        )
        room = self.schedule.context - len(request.tokens)
        if shorten and 0 < room < request.new_tokens(self.schedule.context):
            request = replace(request, params=replace(request.params, max_tokens=room))
        problems = self._problems(request)
        if problems:
            raise ValueError("\n".join(problems))
        if request.constraint is not None:
            assert self.constraints is not None
            self.constraints.start(request.constraint)
        if request.params.max_tokens != 0:
            self.schedule.check(request)
        elif len(request.tokens) > self.schedule.context:
            raise ValueError(
                f"a prompt of {len(request.tokens)} tokens is more than the context of {self.schedule.context} tokens"
            )
        return request

    def _problems(self, request: Request) -> list[str]:
        params, problems = request.params, []
        if params.echo and params.logprobs is not None and not self.rules.prompt_logprobs:
            problems.append("echo with logprobs: needs Programs that score prompts (inference.prompt_logprobs: true)")
        if request.constraint is not None and self.constraints is None:
            problems.append(f"{request.constraint.kind}: this model has no tokenizer, so it has no texts")
        if params.counts_tokens and not self.rules.penalties:
            problems.append("presence_penalty, frequency_penalty, repetition_penalty: inference.penalties is false")
        return problems

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            ValueError: it is no text.
        """
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"character {at} is half of a surrogate pair, or was not UTF-8: no text has that")
        return self.tokenizer.encode_batch([text])[0].tolist()

    def beginning_with_bos(self, text: str) -> list[int]:
        """The ids of a text behind BOS, where the tokenizer has one."""
        begin = self.tokenizer.bos_id
        return [*(() if begin is None else (begin,)), *self.encode(text)]

    def conversation(
        self, messages: Sequence[Mapping[str, object]], more: Mapping[str, object] | None = None
    ) -> list[int]:
        """The ids of a conversation as the template writes it, up to where the answer begins.

        Args:
            messages: the conversation.
            more: what the template may know besides: `tools`.

        Raises:
            ValueError: the template refuses it, or there is none.
        """
        if self.template is None:
            raise ValueError("messages: this model has no chat template; write the text as `prompt`")
        text, _ = self.template.render(messages, {"add_generation_prompt": True, **(more or {})}, "messages")
        return self.encode(text)
