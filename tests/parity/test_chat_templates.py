"""The same conversation on every route gives the ids of transformers' `apply_chat_template`.

Routes are fine-tuning (`chat`), preferences (`preference_chat`), generation, serving (chat completions and `/tokenize`)
and the harness; templates are those in the styles of published ones, and with trl the published ones themselves.
"""

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.chat_templates import DOCUMENTS, NAMED, TEMPLATES, TOOL, drawn_messages, published_templates
from helpers.hf_folder import byte_level_tokenizer
from transformers import AutoTokenizer

from levanter.compat.open import load_tokenizer
from levanter.data.conversations import ChatEncoder, chat_template
from levanter.data.errors import DataError
from levanter.data.formats import ChatLmDatasetFormat, PreferenceChatLmDatasetFormat
from levanter.data.preference import PairEncoder
from levanter.eval.harness.encoding import QueryEncoder
from levanter.inference.prompts import PromptReader, PromptRequest, PromptRules
from levanter.inference.requests import SamplingParams
from levanter.inference.scheduler import Schedule
from levanter.serving.chat import parse_chat
from levanter.serving.errors import ApiError
from levanter.serving.responses import TokenStrings
from levanter.serving.tokenizer_endpoints import tokenize_body

CONTEXT, VOCABULARY = 1 << 17, 320
PUBLISHED = published_templates()


class Routes:
    """Both tokenizers of one folder, and what reads conversations on each route."""

    def __init__(self, folder: Path, template: object):
        folder.mkdir()
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        self.theirs, self.ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
        schedule = Schedule(rows=2, pages=2, page_size=CONTEXT, context=CONTEXT, buckets=((1, 8),), fixed=True)
        reader = PromptReader(self.ours, schedule, PromptRules(vocab_size=VOCABULARY))
        self.service: Any = SimpleNamespace(reader=reader, names=("m",), context=CONTEXT, chat_max_tokens=None)
        self.strings = TokenStrings(self.ours)

    def expected(self, messages: list[dict], *, prompt: bool, **variables: Any) -> list[int] | None:
        """The ids of transformers; None where the template fails."""
        try:
            return self.theirs.apply_chat_template(
                copy.deepcopy(messages), add_generation_prompt=prompt, tokenize=True, return_dict=False, **variables
            )
        except Exception:  # noqa: BLE001 - whatever a template does with a conversation that it does not expect
            return None

    def trained(self, messages: list[dict], tools: object, documents: object) -> list[int]:
        format = ChatLmDatasetFormat(mask_user_turns=False)
        encoder = ChatEncoder(format=format, template=chat_template(format, self.ours), tokenizer=self.ours)
        (encoded,) = encoder.encode([(self._record(tools, documents, messages=messages), "test:1")])
        return encoded.ids.tolist()

    def preferred(self, messages: list[dict], tools: object, documents: object) -> list[int]:
        format = PreferenceChatLmDatasetFormat(mask_user_turns=False)
        encoder = PairEncoder(format=format, template=chat_template(format, self.ours), tokenizer=self.ours)
        sides = {"chosen": messages[-1:], "rejected": [{"role": "assistant", "content": "something else"}]}
        (pair,) = encoder.encode([(self._record(tools, documents, prompt=messages[:-1], **sides), "test:1")])
        return pair.chosen.ids.tolist()

    def _record(self, tools: object, documents: object, **columns: Any) -> dict[str, Any]:
        more = {} if documents is None else {"chat_template_kwargs": {"documents": documents}}
        return copy.deepcopy({**columns, **({} if tools is None else {"tools": tools}), **more})

    def served(self, messages: list[dict], tools: object, documents: object) -> list[int]:
        body = json.dumps(self._record(tools, documents, messages=messages, max_tokens=1)).encode()
        return list(parse_chat(body, self.service).submitted[0].request.tokens)

    def tokenized(self, messages: list[dict], tools: object, documents: object) -> list[int]:
        body = json.dumps(self._record(tools, documents, messages=messages)).encode()
        answer: Any = tokenize_body(body, self.service, self.strings)
        return answer.tokens if hasattr(answer, "tokens") else answer["tokens"]

    def generated(self, messages: list[dict]) -> list[int]:
        prompt = PromptRequest(
            line=1, id="1", prompt=None, messages=tuple(messages), params=SamplingParams(max_tokens=1)
        )
        return list(self.service.reader.request(prompt).tokens)

    def evaluated(self, messages: list[dict], *, prompt: bool) -> list[int]:
        from levanter.eval.harness.lm import HarnessLM

        encoder = QueryEncoder(tokenizer=self.ours, frame=self.ours.frame, max_length=CONTEXT)
        template, nothing = self.service.reader.template, lambda kind, total: print
        model = HarnessLM(encoder=encoder, scorer=None, template=template, generation={}, stops={}, watch=nothing)
        text = model.apply_chat_template(copy.deepcopy(messages), add_generation_prompt=prompt)
        return model.tok_encode(text)


def agree(name: str, call: Callable[[], list[int]], expected: list[int] | None, case: object) -> int:
    """Compares a route with transformers; a conversation that a template fails on may be read in another form."""
    try:
        ids: object = call()
    except (DataError, ApiError, ValueError) as error:
        ids = error
    assert expected is None or ids == expected, (name, case, ids)
    return expected is not None


def conversations(seeds: int) -> Iterator[tuple[list[dict], object, object]]:
    for seed, tools, documents in itertools.product(range(seeds), ([TOOL], None), (DOCUMENTS, None)):
        messages = drawn_messages(random.Random(seed))
        # Nulls are dropped by transformers and by each route; a request's empty call list is not one.
        yield (
            [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages],
            tools,
            documents,
        )


def judge(routes: Routes, name: str, *, seeds: int) -> int:
    """Compares all routes; returns how many conversations were compared."""
    count = 0
    for messages, tools, documents in conversations(seeds):
        case = (name, messages, tools, documents)
        whole = routes.expected(messages, prompt=False, tools=tools, documents=documents)
        for route in (routes.trained, routes.preferred):
            count += agree(route.__name__, lambda: route(messages, tools, documents), whole, case)  # noqa: B023
        open_turn = messages[:-1]
        begun = routes.expected(open_turn, prompt=True, tools=tools, documents=documents)
        for route in (routes.served, routes.tokenized):
            count += agree(route.__name__, lambda: route(open_turn, tools, documents), begun, case)  # noqa: B023
        if tools is None and documents is None:
            begun = routes.expected(open_turn, prompt=True)
            count += agree("generated", lambda: routes.generated(open_turn), begun, case)  # noqa: B023
            count += agree("evaluated", lambda: routes.evaluated(open_turn, prompt=True), begun, case)  # noqa: B023
    return count


@pytest.mark.parametrize("name", TEMPLATES)
def test_routes_give_the_ids_of_transformers(tmp_path, name):
    assert judge(Routes(tmp_path / "model", TEMPLATES[name]), name, seeds=4) > (0 if name != "refuses" else -1)


def test_templates_with_names_on_every_route(tmp_path):
    assert judge(Routes(tmp_path / "model", NAMED), "named", seeds=4)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED, reason="trl is not installed (the extra `judges`)")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_on_every_route(tmp_path, name):
    judge(Routes(tmp_path / "model", PUBLISHED[name]), name, seeds=6)
