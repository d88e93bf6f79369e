"""Clients that leave, send rubbish or ask for too much, beside those who want their answer, in one process."""

import asyncio
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.served import listening

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "serving_soak.py"


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("serving_soak", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("requests", [120, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_everybody_who_waits_is_answered(model, requests):
    with listening(model, max_queued_tokens=64) as server:
        seen, account = asyncio.run(loaded_benchmark().soak(server.url, requests=requests, clients=24, seed=requests))
        assert seen.wrong == []
        # All kinds came, and requests that name a seed were compared.
        assert set(seen.kinds) == {"leave", "broken", "too long", "answered"}
        assert seen.statuses[200] == seen.kinds["answered"] > len(seen.texts)
        assert account["load"]["pages_free"] == account["load"]["pages"]
        # Who sent a request and left at once may be heard only now.
        deadline = time.monotonic() + 200
        while server.service._tickets and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.healthy and not server.service._tickets
