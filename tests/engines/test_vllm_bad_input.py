"""What may go wrong between an engine and its pool: a miss, a refusal with the reason, or recomputed; never wrong
tokens.
"""

from __future__ import annotations

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import LENGTH, demand_clean, looking, need_vllm

need_vllm()
from vllm_client import same  # noqa: E402

import kvpool  # noqa: E402

PROMPT, OTHER = [1, LENGTH], [2, LENGTH]
SIZE = {"size": "64MiB"}
CONNECTOR = "driver.scheduler.connector"
WORKER = """
from vllm.distributed.kv_transfer import get_kv_transfer_group
worker = get_kv_transfer_group().worker
"""


@pytest.fixture(scope="module")
def truth(first, models):
    first.engine(models("llama"))
    return first.generate(PROMPT)[0], first.generate(OTHER)[0]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("weights", {}),
        ("block size", {"block_size": 64}),
        ("positions", {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}}),
    ],
)
def test_another_engine_is_a_miss(first, models, truth, uri, what, changes):
    """The pool has the blocks of another model, revision or layout for the same tokens."""
    first.engine(models("llama"), uri, extra=SIZE)
    first.generate(PROMPT)
    model = models("llama", 1 if what == "weights" else 0)
    first.engine(model, **changes)
    alone = first.generate(PROMPT)[0]
    first.engine(model, uri, **changes)
    outputs = first.generate(PROMPT)
    assert outputs[0]["cached"] == 0
    assert same(outputs[0], alone)
    first.reset()
    again = first.generate(PROMPT)[0]
    assert again["cached"] >= 832
    assert same(again, alone)
    first.call("close")
    demand_clean(uri)


def test_other_instructions_are_a_miss(first, models, truth, uri):
    """On a CPU the order of the bytes in a page is the instruction set's own."""
    first.engine(models("llama"), uri, extra=SIZE)
    first.generate(PROMPT)
    probe = "import torch; probe = torch.cpu._is_avx512_bf16_supported; "
    first.run(probe + "torch.cpu._is_avx512_bf16_supported = lambda: not probe(); torch.cpu.probed = probe")
    try:
        first.engine(models("llama"), uri)
        assert first.generate(PROMPT)[0]["cached"] == 0
    finally:
        first.run("import torch; torch.cpu._is_avx512_bf16_supported = torch.cpu.probed")
    first.engine(models("llama"), uri)
    again = first.generate(PROMPT)[0]
    assert (again["cached"], same(again, truth[0])) == (896, True)
    first.call("close")
    demand_clean(uri)


@pytest.mark.parametrize(
    ("extra", "changes", "reason"),
    [
        ({}, {"dtype": "float32"}, "a block of this engine, on each rank, needs blocks of 131072 bytes"),
        ({"mode": "in-place"}, {}, "in place needs exactly"),
        ({"mode": "in-place", "quota": 0.05}, {}, "it would wait for ever"),
        ({"mode": "in-palce"}, {}, "one of copy, in-place"),
        ({"sise": "1GiB"}, {}, "no option 'sise'"),
        ({"uri": "shm:vllm-test-none"}, {}, "NotFound"),
        ({"uri": ""}, {}, "the pool is missing"),
        ({"load": "never"}, {}, "one of auto, sync, async"),
    ],
)
def test_refused_at_start(first, models, uri, extra, changes, reason):
    with kvpool.create(uri, "16MiB", "64KiB"), pytest.raises(RuntimeError, match=reason):
        first.engine(models("llama"), uri, extra=extra, **changes)


@pytest.mark.parametrize("mode", ["copy", "in-place"])
@pytest.mark.parametrize(("version", "advice"), [(2, "make the pool anew"), (99, "use a newer kvpool")])
def test_a_pool_of_another_version_is_refused(first, models, tmp_path, mode, version, advice):
    path = tmp_path / "pool"
    with kvpool.create(f"file:{path}", "16MiB", "64KiB"):
        pass
    with path.open("r+b") as file:
        file.seek(8)
        file.write(version.to_bytes(8, "little"))
    with pytest.raises(RuntimeError, match=rf"VersionMismatch: .*format {version}, this build reads \d+: {advice}"):
        first.engine(models("llama"), f"file:{path}", extra={"mode": mode})


def test_the_pool_is_removed_and_made_anew(first, models, truth, uri):
    first.engine(models("llama"), uri, extra={**SIZE, "retry": 0.0})
    assert same(first.generate(PROMPT)[0], truth[0])
    kvpool.remove(uri, force=True)
    first.reset()
    outputs = first.generate(PROMPT, OTHER)
    assert [each["cached"] for each in outputs] == [0, 0]
    assert [same(*pair) for pair in zip(outputs, truth, strict=True)] == [True, True]
    with kvpool.create(uri, "64MiB", "64KiB") as pool:
        first.reset()
        first.generate(OTHER)  # finds the new pool
        first.reset()
        first.generate(OTHER)
        first.reset()
        again = first.generate(OTHER)[0]
        assert again["cached"] == 896
        assert same(again, truth[1])
        assert pool.stats()["published"] >= 7
    first.call("close")
    demand_clean(uri)


def test_a_full_pool_stores_nothing(first, models, truth, uri):
    first.engine(models("llama"), uri, extra={"size": "4MiB"})
    with looking(uri) as pool:
        blocks = pool.info["classes"][0]["blocks"]
        with pool.stock() as stock:
            while True:
                try:
                    stock.take(1)
                except kvpool.PoolFull:
                    break
            assert stock.reserved > blocks // 2
            outputs = first.generate(PROMPT, OTHER)
            assert pool.stats()["published"] <= blocks - stock.reserved
        assert [same(*pair) for pair in zip(outputs, truth, strict=True)] == [True, True]
    first.call("close")
    demand_clean(uri)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_blocks_vanish_between_lookup_and_load(first, models, truth, uri, kind):
    """The load fails, on both ways that vLLM has; the request is computed. Without pins, which prevent this."""
    first.engine(models(kind))
    alone = first.generate(PROMPT)[0]
    first.engine(models(kind), uri, extra=SIZE)
    first.generate(PROMPT)
    first.reset()
    first.run(
        f"""{WORKER}
{CONNECTOR}.scheduler._pin = lambda found, load: []
load = worker._load
def late(order, ring):
    worker.link.pool.evict(1 << 20)
    return load(order, ring)
worker._load = late
"""
    )
    outputs = first.generate(PROMPT, PROMPT)
    assert same(outputs[0], alone)
    assert same(outputs[1], alone)
    assert "their load failed" in first.log()
    assert first.run(f"result = len({CONNECTOR}.scheduler._awaited)") == 0
    first.call("close")
    demand_clean(uri)


def test_the_pool_goes_during_a_load(first, models, truth, uri):
    first.engine(models("llama"), uri, extra=SIZE)
    first.generate(PROMPT)
    first.reset()
    first.run(
        f"""{WORKER}
import kvpool
load = worker._load
def late(order, ring):
    kvpool.remove({uri!r}, force=True)
    return load(order, ring)
worker._load = late
"""
    )
    assert same(first.generate(PROMPT)[0], truth[0])
    first.call("close")


def test_the_pool_goes_under_an_engine_in_place(first, models, truth, uri):
    """It goes on in private memory, with the blocks that it holds."""
    first.engine(models("llama"), uri, extra={"mode": "in-place", **SIZE})
    assert same(first.generate(PROMPT)[0], truth[0])
    first.run(
        f"""
import kvpool
from vllm import SamplingParams
from vllm_driver import prompt
ask = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True, logprobs=1)
engine = driver.llm.llm_engine
engine.add_request("x", {{"prompt_token_ids": prompt(2, {LENGTH})}}, ask)
for _ in range(5):
    engine.step()
kvpool.remove({uri!r}, force=True)
"""
    )
    done = first.run(
        """
result = None
while driver.llm.llm_engine.has_unfinished_requests():
    for each in driver.llm.llm_engine.step():
        if each.finished:
            out = each.outputs[0]
            result = {"tokens": list(out.token_ids), "logprob": out.cumulative_logprob}
"""
    )
    assert same(done, truth[1])
    outputs = first.generate(PROMPT, OTHER, [3, LENGTH])
    assert same(outputs[0], truth[0])
    assert same(outputs[1], truth[1])
    assert "goes on in private memory" in first.log()
    first.call("close")


@pytest.mark.parametrize("how", [{}, {"load": "async"}, {"mode": "in-place"}], ids=["copy", "async", "in-place"])
def test_preempted_aborted_reset_shut_down(first, models, truth, uri, how):
    """Too few blocks for all at once, requests that are aborted, resets, and a shutdown that is repeated on both
    roles.
    """
    many = [[seed, 500] for seed in range(10, 18)]
    small = {"num_gpu_blocks_override": 17, "max_num_seqs": 8, "max_model_len": 1024}
    first.engine(models("llama"), **{**small, "max_num_seqs": 1, "num_gpu_blocks_override": 65})
    expected = first.generate(*many, tokens=60)
    first.engine(models("llama"), uri, extra={**how, **SIZE}, **small)
    outputs = first.generate(*many, tokens=60)
    assert [each["tokens"] for each in outputs] == [each["tokens"] for each in expected]
    first.run(
        """
from vllm import SamplingParams
from vllm_driver import prompt
ask = SamplingParams(temperature=0, max_tokens=50, detokenize=False, ignore_eos=True)
engine = driver.llm.llm_engine
for i in range(6):
    engine.add_request(f"r{i}", {"prompt_token_ids": prompt(10 + i, 500)}, ask)
engine.step(); engine.step()
engine.abort_request([f"r{i}" for i in range(6)])
while engine.has_unfinished_requests():
    engine.step()
"""
    )
    demand_clean(uri)
    assert first.reset(connector=True)  # as after new weights
    outputs = first.generate(many[0], tokens=60)
    assert outputs[0]["tokens"] == expected[0]["tokens"]
    assert outputs[0]["cached"] == 0  # nothing of before is found
    assert first.reset()
    outputs = first.generate(many[0], tokens=60)
    assert outputs[0]["tokens"] == expected[0]["tokens"]
    assert outputs[0]["cached"] == 384
    first.run(f"{WORKER}\nfor _ in range(2):\n    {CONNECTOR}.shutdown()\n    get_kv_transfer_group().shutdown()")
    first.call("close")
    demand_clean(uri)
    with looking(uri) as pool:
        assert pool.check().blocks["reserved"] == 0
