"""The main job on a real model: the right tokens with the pool and without, in several processes, through a kill."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import eventually

import kvpool

pytest.importorskip("gguf", reason="the demo's extras are not installed: pip install kvpool[demo]")
pytest.importorskip("tokenizers", reason="the demo's extras are not installed: pip install kvpool[demo]")
from kvpool.tools import demo_worker
from kvpool.tools.model import Model, ModelMissing, Sequence, Tokenizer, find_gguf, usable_prefix

PROMPT = (
    "A memory pool keeps the key and value tensors of a prompt so that a second request with the same prefix does not "
    "compute them again. The capital of France is"
)
RIGHT = [
    260,
    3575,
    282,
    4649,
    30,
    198,
    198,
    504,
    14496,
    476,
    60,
    18,
    314,
    804,
    288,
    5521,
    338,
    260,
    14496,
    314,
    253,
    14496,
    282,
    253,
]


@pytest.fixture(scope="module")
def weights():
    try:
        return find_gguf(None)
    except ModelMissing as error:
        pytest.skip(f"the model is not here: {error}")


def test_the_right_tokens_with_and_without_reuse(weights, uri):
    """One process publishes the prompt's blocks, this one attends to them in place."""
    model, ids = Model.load(weights), Tokenizer.load(weights).encode(PROMPT)
    config = model.config
    plain, margins = model.greedy(Sequence(config), ids, len(RIGHT))
    assert plain == RIGHT
    assert min(margins) > 1e-3
    shape = config.block_shape()
    with kvpool.create(uri, blocks=8, block=config.block_bytes(np.float32)) as pool:
        ns = pool.namespace(demo_worker.identity(model))
        keys = ns.keys(ids)
        writer = os.fork()
        if writer == 0:
            with kvpool.open(uri) as other:
                seq = Sequence(config)
                model.forward(ids[: len(keys) * 16], seq)
                demo_worker.publish(other.namespace(demo_worker.identity(model)), keys, seq, shape)
            os._exit(0)
        assert os.waitpid(writer, 0)[1] == 0
        with ns.match(keys) as hit:
            used = usable_prefix(len(ids), len(hit))
            assert used == 1
            views = hit.views_as(np.float32, shape)[:used]
            seq = Sequence(config, views)
            tokens, _ = model.greedy(seq, ids[used * 16 :], len(RIGHT))
            assert np.shares_memory(seq.prefix[0], pool.tensor(0, np.float32, shape))
            assert seq.bytes_copied == 0
        assert tokens == RIGHT
        assert eventually(lambda: pool.check().clean)


def run_demo(picture, *options, timeout):
    """The demo's report; what holds of every answer is looked at here."""
    command = [sys.executable, "-P", "-m", "kvpool.tools.main", "demo", *options, "--json", "--picture", picture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    result = json.loads(done.stdout)
    assert len(result["requests"]) == 12
    for answer in result["requests"]:
        assert answer["equal"], answer
        assert answer["bytes_copied"] == 0
        assert answer["matched"] >= 300
    assert picture.read_bytes().startswith(b"\x89PNG")
    return result


@pytest.mark.slow
def test_the_demo(weights, tmp_path):
    result = run_demo(tmp_path / "ttft.png", timeout=170)
    for answer in result["requests"]:
        assert answer["margin_min"] > 1e-3
        assert {"tokens", "matched", "ttft_ms", "ttft_ms_without", "equal", "bytes_copied"} <= answer.keys()
    assert (result["killed"], result["leaked_blocks"], result["check"]) == (1, 0, "clean")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_over_four_hosts(weights, tmp_path):
    result = run_demo(tmp_path / "t.png", "--hosts", "4", timeout=800)
    assert {answer["host"] for answer in result["requests"]} >= {0, 2, 3}
    assert (result["killed"], result["killed_host"], result["adopter"]) == (1, 1, 0)
    states = {row["host"]: row["state"] for row in result["hosts"]}
    assert (states[0], states[1]) == ("present", "fenced")
    assert result["hosts"][1]["segments"] == 0
    assert [each["host"] for each in result["checks"]] == [0, 2, 3]
    assert all(each["clean"] and each["conflicts"] == 0 and each["lines_written"] for each in result["checks"])
    assert (result["leaked_blocks"], result["check"], result["conflicts"]) == (0, "clean", 0)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [["--hosts", "2"], ["--hosts", "4", "--uri", "shm:x"], ["--hosts", "17"]])
def test_racks_that_cannot_be(options):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvpool.tools.main", "demo", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Error:" in done.stderr
