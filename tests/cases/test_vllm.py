"""Cases of the engine's contract in vLLM itself: what it asks, in the order that it asks it. Needs vLLM."""

from __future__ import annotations

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import LENGTH, demand_clean, looking, need_vllm

need_vllm()
from vllm_client import same  # noqa: E402

SIZE = {"size": "64MiB"}
PROMPT = [1, LENGTH]
# The connector, and a request of so many of the prompt's tokens, as vLLM makes it.
ASKED = """
from vllm import SamplingParams
from vllm.v1.request import Request
from vllm_driver import prompt
core = driver.llm.llm_engine.engine_core.engine_core
connector = core.scheduler.connector
def asked(name, length, seed=1):
    ask = SamplingParams(max_tokens=4, temperature=0)
    made = Request(name, prompt(seed, 2000)[:length], ask, None, block_hasher=core.request_block_hasher)
    connector.on_new_request(made)
    return made
"""


@pytest.fixture(scope="module")
def stored(first, models, tmp_path_factory):
    """An engine with the first 896 tokens of a prompt in the pool, and none of them in its own cache."""
    import kvpool

    uri = f"file:{tmp_path_factory.mktemp('vllm')}/pool"
    first.engine(models("llama"), uri, extra=SIZE, max_model_len=2048)
    first.generate(list(first.run(ASKED + "result = prompt(1, 2000)[:900]")))
    first.reset()
    yield uri
    first.call("close")
    kvpool.remove(uri, force=True)


LENGTHS = [1, 2, 127, 128, 129, 255, 256, 257, 895, 896, 897, 1000]


def test_E01_one_token_is_always_left_to_compute(first, stored):
    told = first.run(
        ASKED
        + f"""
result = []
for length in {LENGTHS}:
    request = asked(f"e01-{{length}}", length)
    result.append(connector.get_num_new_matched_tokens(request, 0)[0])
    connector.request_finished(request, [])
"""
    )
    assert told == [min((length - 1) // 128 * 128, 896) for length in LENGTHS]


def test_E01_what_is_planned_is_what_is_loaded(first, models, stored):
    whole = first.run(ASKED + "result = prompt(1, 2000)[:896]")
    loaded = first.generate(whole)[0]
    assert loaded["cached"] == 768
    assert first.reset()
    assert same(first.generate(whole)[0], loaded)
    assert first.reset()


def test_E02_only_what_the_engine_has_not_is_told(first, stored):
    told = first.run(
        ASKED
        + """
result = []
request = asked("e02", 900)
for local in (0, 128, 256, 768, 896, 896, 0, 128):
    result.append(connector.get_num_new_matched_tokens(request, local)[0])
connector.request_finished(request, [])
"""
    )
    assert told == [896, 768, 640, 128, 0, 0, 896, 768]


def test_E03_what_was_matched_and_allocated_is_there_when_it_is_loaded(first, stored):
    """Everything that can be evicted is, at each step of the engine; and a request that is dropped leaves no pins."""
    tokens = first.run(ASKED + "result = prompt(1, 2000)[:900]")
    expected = first.generate(tokens)[0]
    first.reset()
    first.run(
        ASKED
        + f"""
import kvpool
driver.inner, driver.other = connector.build_connector_meta, kvpool.open({stored!r})
def build(output):
    made = driver.inner(output)
    driver.other.evict(1 << 20)
    return made
connector.build_connector_meta = build
"""
    )
    loaded = first.generate(tokens)[0]
    first.run(ASKED + "connector.build_connector_meta = driver.inner; driver.other.close()")
    assert loaded["cached"] == 896
    assert same(loaded, expected)
    first.reset()
    first.generate(tokens)
    first.reset()
    first.run(
        ASKED
        + """
for i in range(200):
    request = asked(f"drop-{i}", 900)
    connector.get_num_new_matched_tokens(request, 0)
    connector.request_finished(request, [])
"""
    )
    demand_clean(stored)


def test_O03_a_request_that_was_rolled_back_is_asked_for_anew(first, stored):
    told = first.run(
        ASKED
        + """
result = []
for length in (900, 300, 129, 900, 128, 500):  # preempted, and scheduled again with another prefix
    request = asked("o03", length)
    matched = connector.get_num_new_matched_tokens(request, 0)[0]
    result.append((length, matched))
connector.request_finished(request, [])
"""
    )
    assert all(0 <= matched < length for length, matched in told)
    assert told[0] == [900, 896]
    assert told[3] == [900, 896]


def test_Y07_ranks_agree_on_what_all_of_them_have(make_client, models, uri):
    """Two ranks, of which one has lost a shard: the hit is what both have, and the engine goes on."""
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    client = make_client(VLLM_CPU_OMP_THREADS_BIND="0|1")
    client.engine(models("llama"), uri, extra=SIZE, **two)
    expected = client.generate(PROMPT)[0]
    with looking(uri) as pool:
        assert pool.check().blocks["live"] == 14
        assert pool.evict(1) == 1  # the tail of a chain, of one rank
    client.reset()
    found = client.generate(PROMPT)[0]
    assert found["cached"] == 768
    assert same(found, expected)
    client.close()
    demand_clean(uri)


def test_K01_vllm_hashes_that_differ_in_each_process_are_refused(first, models, uri):
    with pytest.raises(RuntimeError, match="PYTHONHASHSEED"):
        first.engine(models("llama"), uri, extra=SIZE, prefix_caching_hash_algo="xxhash")
