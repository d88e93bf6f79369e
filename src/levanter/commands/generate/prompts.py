"""`PromptReader`: lines as requests to the engine. Text and conversations become ids; what cannot be answered is said.

What a tokenizer's files say besides its vocabulary is used here: its chat template, every id that ends a text, and its
special tokens, which a stop string may name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from levanter.commands.generate.plan import GenerateWork
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate
from levanter.inference.constraint import Constraints
from levanter.inference.jsonl import AskedLine, request_of
from levanter.inference.params import SamplingParams, lone_surrogate
from levanter.inference.requests import Request
from levanter.inference.schedule import Schedule


def ends_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, as far as the tokenizer's files and those beside it say."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.end_ids
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


class PromptReader:
    """Makes requests of lines, for one model and one set of rows.

    Args:
        work: the run's.
        schedule: what there is room for.
    """

    def __init__(self, work: GenerateWork, schedule: Schedule):
        self._work, self._schedule = work, schedule
        self.tokenizer = work.pretrained.tokenizer
        files = self.tokenizer if isinstance(self.tokenizer, FastTokenizer) else None
        self.ends = ends_of(self.tokenizer)
        self._special = {} if files is None else files.special_tokens
        vocab_size = work.pretrained.config.vocab_size
        assert vocab_size is not None
        self._vocab_size = vocab_size
        self.constraints = None
        if files is not None:
            self.constraints = Constraints(files.definition, vocab_size=vocab_size, ends=self.ends)

    @property
    def defaults(self) -> SamplingParams:
        """How texts are sampled where a request does not say."""
        return self._work.config.sampling

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The template for conversations; None where there is none."""
        text = self._work.config.chat_template
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
        config = self._work.config
        request = request_of(
            asked,
            encode=self._with_beginning if config.enforce_bos else self._encode,
            chat=None if self.template is None else self._conversation,
            vocab_size=self._vocab_size,
            model_ends=self.ends,
            seed=config.trainer.seed,
            special_tokens=self._special,
        )
        room = self._schedule.context - len(request.tokens)
        if shorten and 0 < room < request.new_tokens(self._schedule.context):
            request = replace(request, params=replace(request.params, max_tokens=room))
        problems = self._problems(request)
        if problems:
            raise ValueError("\n".join(problems))
        if request.constraint is not None:
            assert self.constraints is not None
            self.constraints.start(request.constraint)
        if request.params.max_tokens != 0:
            self._schedule.check(request)
        elif len(request.tokens) > self._schedule.context:
            raise ValueError(
                f"a prompt of {len(request.tokens)} tokens is more than the context of {self._schedule.context} tokens"
            )
        return request

    def _problems(self, request: Request) -> list[str]:
        inference, params = self._work.config.inference, request.params
        problems = []
        if params.echo and params.logprobs is not None and not inference.prompt_logprobs:
            problems.append("echo with logprobs: needs Programs that score prompts (inference.prompt_logprobs: true)")
        if request.constraint is not None and self.constraints is None:
            problems.append(f"{request.constraint.kind}: this model has no tokenizer, so it has no texts")
        if params.counts_tokens and not inference.penalties:
            problems.append("presence_penalty, frequency_penalty, repetition_penalty: inference.penalties is false")
        return problems

    def _encode(self, text: str) -> list[int]:
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"character {at} is half of a surrogate pair, or was not UTF-8: no text has that")
        return self.tokenizer.encode_batch([text])[0].tolist()

    def _with_beginning(self, text: str) -> list[int]:
        begin = self.tokenizer.bos_id
        return [*(() if begin is None else (begin,)), *self._encode(text)]

    def _conversation(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        assert self.template is not None
        text, _ = self.template.render(messages, {"add_generation_prompt": True}, "messages")
        return self._encode(text)
