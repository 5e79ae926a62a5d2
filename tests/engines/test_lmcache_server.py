"""LMCache's server under vLLM, with a pool as its second level: prefill in one engine, hit in another, through the
pool.

The server is started anew in between, so that its own memory is empty and what the second engine finds can only have
come from the pool. The model has real random weights, so that its tokens and probabilities depend on keys and values;
and a pool that is corrupted must change them.
"""

from __future__ import annotations

import importlib.util

import pytest
from conftest import eventually
from vllm_fixtures import PROMPT, make_client, models, need_vllm  # noqa: F401

need_vllm()
if importlib.util.find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed", allow_module_level=True)
from vllm_client import same  # noqa: E402

from kvpool.tools.lmcache_server import ENVIRONMENT, lmcache_server  # noqa: E402

CHUNKS, CHUNK_TOKENS = 7, 128
STATED = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": CHUNK_TOKENS}
GIGABYTES = 0.25


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_engine_finds_in_the_pool_what_another_has_stored(make_client, models, make_pool, uri, tmp_path):  # noqa: F811
    pool = make_pool(block="128KiB", blocks=64)
    log = tmp_path / "server.log"
    # Its connector imports what vLLM's start of a worker does not expect: so the worker is another process.
    client = make_client(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROCESSING_METHOD="spawn", **ENVIRONMENT)

    def generate(transfer):
        extra = transfer and transfer["kv_connector_extra_config"]
        connector = {"kv_connector_module_path": None, **(transfer or {})}
        client.call("engine", model=models("llama"), extra=extra, connector=connector)
        return client.generate(PROMPT)[0]

    def server():
        return lmcache_server(log, CHUNK_TOKENS, GIGABYTES, {"uri": uri, **STATED})

    alone = generate(None)
    assert alone["cached"] == 0
    with server() as transfer:
        assert generate(transfer) == alone
        assert eventually(lambda: pool.check().blocks["live"] >= CHUNKS, 30), log.read_text()[-4000:]
    with server() as transfer:  # its own memory is empty
        before = pool.stats()["hits"]
        again = generate(transfer)
        assert again["cached"] == CHUNKS * CHUNK_TOKENS, log.read_text()[-4000:]
        assert same(again, alone)
        assert pool.stats()["hits"] > before
    blocks = pool.writable(0)
    blocks[:, : blocks.shape[1] - 64] ^= 0x40  # all but the trailers
    with server() as transfer:
        wrong = generate(transfer)
        assert wrong["cached"] == CHUNKS * CHUNK_TOKENS
        assert wrong["logprob"] != alone["logprob"]
    client.close()
    assert pool.check().clean
    assert eventually(lambda: pool.check().pins == 0)
