"""Upstream's documents of a server, both generations, as processes that answer."""

import signal

import openai
import pytest
from helpers.server_process import served_document

JUNE_2026 = """\
trainer: {mp: "compute=f32,params=f32", mesh: {axes: {data: -1}}, tracker: {type: noop}}
service: {max_seq_len: 64, max_seqs: 2, max_rounds: 4, compute_dtype: f32, hbm_utilization: 0.8, page_size: 8,
          max_pages: 16, max_stop_seqs: 4, max_stop_tokens: 16, seed: 0, max_queued_tokens: 64, max_seqs_in_prefill: 1,
          max_prefill_size: 16, max_tokens_per_round: null}
temperature: 0.5
seed: 7
host: localhost
port: 0
"""
OF_2025 = """\
trainer: {mp: f32, tensor_parallel_axes: [mlp, heads], model_axis_size: 1, tracker: {type: noop}}
service: {max_pages_per_seq: 4, page_size: 16, max_seqs: 2, max_rounds: 4, enable_logprobs: true}
temperature: 0.5
seed: 7
host: localhost
port: 10243
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", [JUNE_2026, OF_2025], ids=["2026", "2025"])
def test_it_answers_by_the_documents_own_defaults(tmp_path, document):
    with served_document(tmp_path, document, "--port", "0") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            (first, again, other) = [
                client.completions.create(model="tiny", prompt="the cat", max_tokens=12, **more)
                for more in ({}, {"temperature": 0.5, "seed": 7}, {"seed": 8})
            ]
            assert first.choices[0].text == again.choices[0].text != other.choices[0].text
            # Rows of 64 positions, as the document says.
            with pytest.raises(openai.BadRequestError, match="context of 64"):
                client.completions.create(model="tiny", prompt="the cat", max_tokens=90)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == 0, "".join(server.lines)
