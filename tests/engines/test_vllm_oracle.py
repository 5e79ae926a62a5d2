"""vLLM with models that depend on every byte of their cache: what comes from the pool is what would have been computed.

The oracle is tokens and cumulative log-probability, to the last digit, and a negative control: with other bytes in the
pool both must change.
"""

from __future__ import annotations

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import LENGTH, PROMPT, corrupt, demand_clean, looking, need_vllm

need_vllm()
from vllm_client import same  # noqa: E402

SIZE = {"size": "64MiB"}
KINDS = [
    ("llama", 896, {}),
    ("gemma3", 896, {}),
    ("qwen3next", 768, {}),
    # In float32, or its pages could not be mapped (in place).
    ("deepseek", 896, {"dtype": "float32", "num_gpu_blocks_override": 256}),
]
CASES = [
    pytest.param(*kind, mode, marks=[pytest.mark.ci] if kind[0] == "llama" else [], id=f"{kind[0]}-{mode}")
    for kind in KINDS
    for mode in ("copy", "in-place")
]


@pytest.mark.parametrize(("kind", "cached", "changes", "mode"), CASES)
def test_what_is_loaded_is_what_was_computed(first, second, models, truth, uri, kind, cached, changes, mode):
    alone, expected = truth(kind, changes)
    first.engine(models(kind), uri, extra={"mode": mode, **SIZE}, **changes)
    stored = first.generate(PROMPT)[0]
    assert same(stored, alone)
    assert stored["cached"] == 0
    second.engine(models(kind), uri, extra={"mode": mode}, **changes)
    loaded = second.generate(PROMPT)[0]  # both engines are alive
    assert loaded["cached"] == cached
    assert same(loaded, expected)
    assert loaded["tokens"] == alone["tokens"]
    with looking(uri) as pool:
        stats = pool.stats()
        assert stats["published"] > 0
        assert (stats["bytes_out"] > 0) == (mode == "copy")
        assert (stats["bytes_in"] > 0) == (mode == "copy")
    corrupt(uri)
    if mode == "copy":
        assert second.reset()  # in place there is nothing else to reset
    wrong = second.generate(PROMPT)[0]
    assert wrong["cached"] == cached
    assert wrong["tokens"] != alone["tokens"]
    assert wrong["logprob"] != expected["logprob"]
    first.call("close")
    second.call("close")
    demand_clean(uri)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_engine_that_copies_and_one_in_place_share(first, second, models, truth, uri, kind):
    alone, _ = truth(kind, {})
    first.engine(models(kind), uri, extra={"mode": "in-place", **SIZE})
    assert same(first.generate(PROMPT)[0], alone)
    second.engine(models(kind), uri)
    loaded = second.generate(PROMPT)[0]
    assert (loaded["cached"], same(loaded, alone)) == (896, True)
    other = [2, LENGTH]
    stored = second.generate(other)[0]
    adopted = first.generate(other)[0]
    assert (adopted["cached"], same(adopted, stored)) == (896, True)
    first.call("close")
    second.call("close")
    demand_clean(uri)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_loads_between_steps_and_before_them(first, second, models, truth, uri, load):
    alone, _ = truth("llama", {})
    first.engine(models("llama"), uri, extra={"load": load, **SIZE})
    first.generate(PROMPT)
    first.reset()
    loaded = first.generate(PROMPT, [2, LENGTH], PROMPT)
    assert same(loaded[0], alone)
    assert same(loaded[2], alone)
    assert loaded[0]["cached"] == 896
    first.call("close")
    demand_clean(uri)
