"""What an engine with a pool tells: events, statistics, Prometheus; tenants; more than one process and rank."""

from __future__ import annotations

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import LENGTH, demand_clean, looking, need_vllm

need_vllm()
from vllm_client import same  # noqa: E402
from vllm_models import save_adapter  # noqa: E402

PROMPT, OTHER = [1, LENGTH], [2, LENGTH]
SIZE = {"size": "64MiB"}
RECORD = """
connector = driver.scheduler.connector
events, stats, inner, told = [], [], connector.take_events, connector.get_kv_connector_stats
def take_events():
    got = list(inner())
    events.extend(got)
    return got
connector.take_events = take_events
driver.events = events
"""


def test_salts_and_tenants_do_not_share(first, models, uri):
    first.engine(models("llama"), uri, extra=SIZE)
    plain = first.generate(PROMPT)[0]
    salted = first.generate(PROMPT, salt="a")[0]
    first.reset()
    assert [first.generate(PROMPT, salt=salt)[0]["cached"] for salt in ("a", "b", None)] == [896, 0, 896]
    assert same(salted, plain)
    first.engine(models("llama"), uri, extra={"tenant": "another"})
    assert first.generate(PROMPT)[0]["cached"] == 0
    first.call("close")
    demand_clean(uri)


@pytest.mark.parametrize("mode", ["copy", "in-place"])
def test_adapters_do_not_share(first, second, models, uri, tmp_path, mode):
    """Nor does a LoRA adapter with its model. Of the same name, engines do."""
    adapters = [(f"adapter-{seed}", seed, save_adapter(tmp_path / str(seed), seed)) for seed in (1, 2)]
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    first.engine(models("llama"), **lora)
    alone = [first.generate(PROMPT, adapter=each)[0] for each in (None, *adapters)]
    assert len({each["logprob"] for each in alone}) == 3
    first.engine(models("llama"), uri, extra={"mode": mode, **SIZE}, **lora)
    stored = [first.generate(PROMPT, adapter=each)[0] for each in (None, *adapters)]
    assert [each["cached"] for each in stored] == [0, 0, 0]
    second.engine(models("llama"), uri, extra={"mode": mode}, **lora)
    loaded = [second.generate(PROMPT, adapter=each)[0] for each in (*adapters, None)]
    assert [each["cached"] for each in loaded] == [896, 896, 896]
    for found in stored, [loaded[2], *loaded[:2]]:
        assert all(same(*pair) for pair in zip(found, alone, strict=True))
    first.call("close")
    second.call("close")
    demand_clean(uri)


IMAGE = """
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request
from kvpool.bindings.vllm.lookup import Found
from vllm_driver import prompt
core = driver.llm.llm_engine.engine_core.engine_core
def asked(identifier):
    place = PlaceholderRange(offset=300, length=50)
    images = [MultiModalFeatureSpec(None, "image", identifier, place)] if identifier else None
    tokens, ask = prompt(1, 900), SamplingParams(max_tokens=4, temperature=0)
    return Request("x", tokens, ask, None, mm_features=images, block_hasher=core.request_block_hasher)
finder = core.scheduler.connector.scheduler._finder
def keys(identifier):
    return [finder.rings[0].key(0, each).hex() for each in finder.hashes(asked(identifier), 0, 900)]
result = {"found": [finder.hit_tokens(Found(), asked(each), 0) for each in (None, "a")], "keys": [keys("a"), keys("b")]}
"""


def test_images_do_not_share(first, models, uri):
    """Prompts whose tokens are the same, with another image at 300: what is before that is shared, no more."""
    first.engine(models("llama"), uri, extra=SIZE)
    first.generate(PROMPT)
    told = first.run(IMAGE)
    assert told["found"] == [896, 256]
    assert [a == b for a, b in zip(*told["keys"], strict=True)] == [True] * 2 + [False] * 5
    first.call("close")
    demand_clean(uri)


@pytest.mark.parametrize("kind", ["llama", "qwen3next"])
def test_events(first, models, uri, kind):
    """Stored when the pool has them, removed when it has not any more."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    first.run("from vllm.config import KVEventsConfig; driver.KVEventsConfig = KVEventsConfig")
    first.run(
        f"""
driver.engine({models(kind)!r}, {{"uri": {uri!r}, "size": "64MiB"}},
kv_events_config=driver.KVEventsConfig(**{events!r}))
{RECORD}
"""
    )
    first.generate(PROMPT)
    first.generate(OTHER, tokens=3)
    read = """
def text(value):
    return value.hex() if isinstance(value, bytes) else value
result = [
    [type(e).__name__, [text(h) for h in e.block_hashes], e.group_idx, e.medium, e.ownership,
     len(getattr(e, "token_ids", ())), getattr(e, "block_size", None)]
    for e in driver.events
]
"""
    told = first.run(read)
    stored = [each for each in told if each[0] == "BlockStored"]
    with looking(uri) as pool:
        assert sum(len(each[1]) for each in stored) == pool.stats()["published"]
        assert {(each[3], each[4]) for each in stored} == {("CPU", "kvpool")}
        assert all(each[5] == len(each[1]) * each[6] for each in stored)
        for number in range(len(pool.block_bytes)):
            pool.evict(1 << 20, number)
    first.generate([3, 300], tokens=3)
    import time

    time.sleep(0.2)
    first.generate([4, 300], tokens=3)
    removed = [each for each in first.run(read) if each[0] == "BlockRemoved"]
    assert sum(len(each[1]) for each in removed) >= sum(len(each[1]) for each in stored)
    first.call("close")


def test_statistics(first, models, uri):
    first.engine(models("llama"), uri, extra=SIZE, disable_log_stats=False)
    first.generate(PROMPT)
    first.reset()
    first.generate(PROMPT)
    first.generate(OTHER, tokens=3)
    text = first.run("import prometheus_client; result = prometheus_client.generate_latest().decode()")
    values = {}
    for line in text.splitlines():
        if line.startswith("vllm:kvpool_"):
            name, _, value = line.rpartition(" ")
            values[name.split("{")[0]] = float(value)
    assert values["vllm:kvpool_stored_blocks_total"] == 14
    assert values["vllm:kvpool_loaded_blocks_total"] == 7
    assert values["vllm:kvpool_loaded_bytes_total"] == 7 * 65536
    assert values["vllm:kvpool_lookup_hits_total"] == 7
    first.call("close")
    demand_clean(uri)


def test_in_place_statistics(first, models, uri):
    first.engine(models("llama"), uri, extra={"mode": "in-place", **SIZE}, disable_log_stats=False)
    first.generate(PROMPT)
    first.generate(PROMPT)
    first.generate(OTHER, tokens=3)
    text = first.run("import prometheus_client; result = prometheus_client.generate_latest().decode()")
    (line,) = [each for each in text.splitlines() if each.startswith("vllm:kvpool_adopted_blocks_total")]
    assert float(line.rpartition(" ")[2]) == 7
    first.call("close")
    demand_clean(uri)


def test_an_engine_in_processes_of_its_own(make_client, models, uri):
    """vLLM's default on a CPU: the scheduler and its worker in a process each. In place falls back to copying."""
    outputs = []
    for mode in ("copy", "in-place"):
        client = make_client(VLLM_ENABLE_V1_MULTIPROCESSING="1")
        name = f"{uri}-{mode}"
        client.engine(models("llama"), name, extra={"mode": mode, **SIZE})
        outputs += [client.generate(PROMPT)[0], client.generate(OTHER, PROMPT)[1]]
        assert outputs[-1]["cached"] == 896
        assert ("on a CPU with VLLM_ENABLE_V1_MULTIPROCESSING=0" in client.log()) == (mode == "in-place")
        client.close()
        demand_clean(name)
        import kvpool

        kvpool.remove(name, force=True)
    assert all(same(each, outputs[0]) for each in outputs)


def test_two_ranks(make_client, models, uri):
    """Tensor parallelism: each rank has blocks of its own; a hit is what all of them have. In place falls back to
    copying.
    """
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    storing = make_client(**environment)
    storing.engine(models("llama"), uri, extra=SIZE, **two)
    stored = storing.generate(PROMPT)[0]
    assert stored["cached"] == 0
    with looking(uri) as pool:
        assert pool.stats()["published"] == 14
        assert pool.block_bytes == (32768,)
    storing.close()
    loading = make_client(**environment)
    loading.engine(models("llama"), uri, extra={"mode": "in-place"}, **two)
    loaded = loading.generate(PROMPT)[0]
    assert (loaded["cached"], same(loaded, stored)) == (896, True)
    assert "not in place but by copying" in loading.log()
    with looking(uri) as pool:
        pool.writable(0)[:, ::2] = 0x3F
    loading.reset()
    assert loading.generate(PROMPT)[0]["logprob"] != stored["logprob"]
    loading.close()
    with pytest.raises(RuntimeError, match="needs blocks of 65536 bytes"):  # whole pages, not halves
        make_client().engine(models("llama"), uri)
    demand_clean(uri)
