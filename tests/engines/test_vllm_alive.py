"""Two engines alive at once on one pool: prefills of each are hits of the other, one is killed and comes back."""

from __future__ import annotations

import random
import time

import pytest
from vllm_fixtures import *  # noqa: F403
from vllm_fixtures import demand_clean, looking, need_vllm

need_vllm()
from vllm_client import DriverDied, same  # noqa: E402
from vllm_driver import prompt  # noqa: E402

REQUESTS, BATCH, FAMILIES = 200, 4, 12
ENGINE = {"num_gpu_blocks_override": 97, "max_model_len": 768, "enable_prefix_caching": True}


def prompts(seed):
    """Requests with shared prefixes: one of a few families of 384 tokens, then up to 300 of their own."""
    source = random.Random(seed)
    families = [prompt(100 + i, 384) for i in range(FAMILIES)]
    return [
        families[source.randrange(FAMILIES)] + prompt(1000 + source.randrange(40), source.randrange(10, 300))
        for _ in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def truth(first, models):
    """One at a time, without us."""
    first.engine(models("llama"), **ENGINE, max_num_seqs=1)
    told = [first.generate(each, tokens=4)[0] for each in prompts(3)]
    first.call("close")
    return told


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["copy", "in-place"])
def test_two_engines_one_is_killed(make_client, truth, models, uri, mode):
    """No wrong token, no leak. The pool is smaller than what the engines want, so that it evicts all the time."""
    model, asked = models("llama"), prompts(3)
    size = {"size": "8MiB"}
    engines = [make_client(), make_client()]
    for each in engines:
        each.engine(model, uri, extra={"mode": mode, **size}, **ENGINE, max_num_seqs=1)
    hits, batches = [0, 0], [range(i, i + BATCH) for i in range(0, REQUESTS, BATCH)]
    for turn in range(0, len(batches), 2):
        pair = list(zip(engines, batches[turn : turn + 2], strict=False))
        for engine, batch in pair:  # both at work at the same moment
            engine.send("generate", prompts=[asked[i] for i in batch], tokens=4)
        if turn == 24:
            time.sleep(0.05)
            engines[1].kill()  # with a request half done
            engines[1] = make_client()
        for number, (engine, batch) in enumerate(pair):
            try:
                outputs = engine.receive()["outputs"]
            except DriverDied:
                assert turn == 24
                continue
            assert all(same(output, truth[i]) for output, i in zip(outputs, batch, strict=True)), (turn, number)
            hits[number] += sum(output["cached"] > 0 for output in outputs)
        if turn == 24:
            engines[1].engine(model, uri, extra={"mode": mode}, **ENGINE, max_num_seqs=1)
    assert min(hits) > 20, hits
    with looking(uri) as pool:
        stats = pool.stats()
        assert stats["evicted"] > 0
    for each in engines:
        each.call("close")
    demand_clean(uri)
    with looking(uri) as pool:
        assert pool.check().blocks["reserved"] == 0
