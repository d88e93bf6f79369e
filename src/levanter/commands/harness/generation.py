"""Texts for tasks that want some: the engine as `levanter.eval.harness` asks it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from haliax_ext.pytree import PyTree
from levanter.commands.generate.plan import GenerateWork
from levanter.distributed.barrier import current_peers
from levanter.distributed.broadcast import WAIT_SECONDS
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.generation import Continuation
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.multihost import LeaderRunner, run_follower
from levanter.inference.prompts import end_of_text_ids
from levanter.inference.requests import ChoiceId, Failed, Request, SamplingParams, Token, merge_stop_ids
from levanter.io import Progress

_CALLS = "the next call of a text"


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """A `Generator`: rows of a loaded model, made when texts are asked for and let go behind the last one.

    Attributes:
        work: the plan of the rows.
        mesh: the devices.
        model: the weights.
        show: whether progress is shown.
    """

    work: GenerateWork
    mesh: Mesh
    model: PyTree
    show: bool

    def __call__(self, asked: Sequence[Continuation]) -> list[str]:
        """The text behind each prompt, without what ended it."""
        requests, growing, limits = [], {}, {}
        schedule = make_schedule(self.work.programs, share_prefixes=self.work.config.inference.share_prefixes)
        tokenizer = self.work.pretrained.tokenizer
        for n, each in enumerate(asked):
            requests.append(self._request(n, each))
            growing[str(n)] = ChoiceText.of(requests[-1], tokenizer.stream(), limit=each.max_tokens)
            limits[str(n)] = each.max_tokens
        texts: dict[str, list[str]] = {request.id: [] for request in requests}
        rows = self._rows()
        peers = current_peers()
        leading = None if peers is None else LeaderRunner(rows, lambda text: peers.follow(_CALLS, lambda: text))
        engine = Engine(rows if leading is None else leading, schedule)
        with Progress("writing texts", total=len(requests), unit="texts", show=self.show) as progress:
            for event in engine.run(requests):
                name = event.of.request
                if isinstance(event, Failed):
                    raise HarnessError(f"text {int(name) + 1} of {len(requests)}: {event.error}")
                if name not in growing or not isinstance(event, Token):
                    continue
                piece = growing[name].push(event.id)
                texts[name].append(piece.text)
                if piece.reason is not None:
                    engine.give_up(ChoiceId(name, 0))
                    del growing[name]
                    progress.advance(1)
        assert not growing, f"{len(growing)} texts have no end"
        if leading is not None:
            leading.end()
        return ["".join(texts[request.id]) for request in requests]

    def follow(self) -> None:
        """Calls what process 0 calls, until it lets go."""
        peers = current_peers()
        assert peers is not None
        run_follower(self._rows(), lambda: peers.follow(_CALLS, lambda: "", seconds=WAIT_SECONDS))

    def _rows(self) -> DeviceRunner:
        return DeviceRunner(self.work.programs, self.mesh, self.model, jit=jit_together)

    def _request(self, n: int, asked: Continuation) -> Request:
        seed = asked.seed if asked.seed is not None else self.work.config.trainer.seed + n
        sampling: dict[str, Any] = {"temperature": 0.0, **asked.sampling}
        params = SamplingParams(**sampling, max_tokens=asked.max_tokens, stop=asked.until, seed=seed)
        return Request(
            id=str(n),
            tokens=tuple(asked.tokens.tolist()),
            params=params,
            seed=seed,
            stop_ids=merge_stop_ids(params, end_of_text_ids(self.work.pretrained.tokenizer)),
        )
