"""vLLM's own offloading over a pool: as a tier below its host memory, and straight."""

from __future__ import annotations

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import LENGTH, PROMPT, corrupt, demand_clean, looking, need_vllm

need_vllm()
from vllm_client import same  # noqa: E402

OTHER = [2, LENGTH]
TIER = "kvpool.bindings.vllm.tier"
CONNECTOR = {"kv_connector": "PoolOffloadingConnector", "kv_connector_module_path": TIER}
VLLMS = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
KINDS = [
    ("llama", 896, {}),
    ("gemma3", 896, {}),
    ("qwen3next", 768, {}),
    ("deepseek", 896, {"num_gpu_blocks_override": 160}),
]


def below(uri, size=None):
    """A PoolTier below vLLM's host memory."""
    tier = {"type": "PoolTier", "module_path": TIER, "uri": uri, **({"size": size} if size else {})}
    return {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "vllm_cpu_spec",
        "cpu_bytes_to_use": 32 << 20,
        "secondary_tiers": [tier],
    }


def straight(uri, size=None):
    return {
        "spec_name": "PoolOffloadingSpec",
        "spec_module_path": TIER,
        "uri": uri,
        **({"size": size} if size else {}),
    }


@pytest.mark.parametrize("spec", [below, straight])
@pytest.mark.parametrize(("kind", "cached", "changes"), KINDS)
def test_what_is_offloaded_comes_back_elsewhere(first, second, models, truth, uri, kind, cached, changes, spec):
    model = models(kind)
    alone, expected = truth(kind, changes)
    first.call("engine", model=model, extra=spec(uri, "64MiB"), connector=CONNECTOR, **changes)
    assert same(first.generate(PROMPT)[0], alone)
    first.generate(OTHER)  # steps in which the first request's blocks go on to the pool
    with looking(uri) as pool:
        assert pool.stats()["published"] > 0
    second.call("engine", model=model, extra=spec(uri), connector=CONNECTOR, **changes)
    loaded = second.generate(PROMPT)[0]
    assert loaded["cached"] == cached
    assert same(loaded, expected)
    second.call("close")
    corrupt(uri)
    second.call("engine", model=model, extra=spec(uri), connector=CONNECTOR, **changes)
    assert second.generate(PROMPT)[0]["logprob"] != loaded["logprob"]
    second.call("close")
    first.call("close")
    demand_clean(uri)


def test_the_pool_goes_after_a_block_was_found(first, second, models, uri):
    """vLLM asserts that loads of its offloading succeed: what was found stays readable."""
    model = models("llama")
    first.call("engine", model=model, extra=straight(uri, "64MiB"), connector=CONNECTOR)
    stored = first.generate(PROMPT)[0]
    first.generate(OTHER)
    second.call("engine", model=model, extra=straight(uri), connector=CONNECTOR)
    second.run(
        f"""
import kvpool
manager = driver.scheduler.connector.connector_scheduler.manager
prepare = manager.prepare_load
def then_gone(keys, context):
    kvpool.remove({uri!r}, force=True)
    return prepare(keys, context)
manager.prepare_load = then_gone
"""
    )
    loaded = second.generate(PROMPT)[0]
    assert same(loaded, stored)
    assert loaded["cached"] == 896
    assert second.reset()
    again = second.generate(PROMPT)[0]
    assert (again["cached"], same(again, stored)) == (0, True)
    second.call("close")
    first.call("close")


@pytest.mark.parametrize("spec", [below, straight])
@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {}),
        (0, {"block_size": 64}),
        (0, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}}),
    ],
    ids=["weights", "block size", "positions"],
)
def test_another_engine_is_a_miss(first, models, uri, spec, seed, changes):
    """The pool has what another network has computed of the same tokens."""
    first.call("engine", model=models("llama"), extra=spec(uri, "64MiB"), connector=CONNECTOR)
    first.generate(PROMPT)
    first.generate(OTHER)
    with looking(uri) as pool:
        assert pool.stats()["published"] > 0
    model = models("llama", seed)
    first.engine(model, **changes)
    alone = first.generate(PROMPT)[0]
    first.call("engine", model=model, extra=spec(uri), connector=CONNECTOR, **changes)
    found = first.generate(PROMPT)[0]
    assert found["cached"] == 0
    assert same(found, alone)
    first.call("close")
    demand_clean(uri)


@pytest.mark.parametrize(
    ("spec", "changes", "connector", "reason"),
    [
        (straight, {"block_size": 256}, CONNECTOR, "leave block_size of the offloading alone"),
        (straight, {}, VLLMS, "does not say what the engine is"),
        (below, {}, VLLMS, "does not say what the engine is"),
    ],
)
def test_refused_at_start(first, models, uri, spec, changes, connector, reason):
    with pytest.raises(RuntimeError, match=reason):
        first.call("engine", model=models("llama"), extra={**spec(uri, "64MiB"), **changes}, connector=connector)
