"""kvpool qualify: litmus tests between two hosts, what they record, and what may be opened without them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvpool
from kvpool.reports import LITMUSES
from kvpool.tools import qualify as qualify_module
from kvpool.tools.qualify_side import Task, run_side

COMMAND = [sys.executable, "-P", "-m", "kvpool.tools.main"]
SHAPE = {"blocks": 64, "block": "4KiB", "hosts": 2, "lease": 0.5, "workers": 8}


def run(uri, *options, code=0):
    """`kvpool qualify` with a few rounds."""
    done = subprocess.run(
        [*COMMAND, "qualify", uri, "--rounds", "100", "--json", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=["shm", "file", "sim"])
def place(request, uri, tmp_path):
    """URI and mode of a pool of two hosts, made and not open."""
    name = f"file:{tmp_path / 'pool'}" if request.param == "file" else uri.replace("shm:", f"{request.param}:")
    mode = "sim" if request.param == "sim" else "noncoherent"
    kvpool.create(name, mode=mode, unqualified=True, **SHAPE).close()
    yield name, mode
    kvpool.remove(name, force=True)


def test_two_processes_qualify_a_pool(place):
    uri, mode = place
    result = run(uri)
    assert (result["qualified"], result["failures"], result["hosts"], result["mode"]) == (True, 0, [0, 1], mode)
    (pair,) = result["pairs"]
    assert tuple(pair["tests"]) == LITMUSES
    for test in pair["tests"].values():
        assert (test["rounds"], test["failures"], test["silent"]) == (100, 0, 0)
    assert pair["tests"]["copy"]["noted"] > 0
    assert pair["tests"]["record"]["noted"] > 0
    assert (result["stale"] == 100) == (mode == "sim")  # simulated caches keep a line until told to drop it
    with kvpool.open(uri, host=1) as pool:
        found = pool.stats()["qualification"]
        assert (found["hosts"], found["tests"], found["rounds"]) == ([0, 1], list(LITMUSES), 100)
        assert found["instructions"] == result["instructions"]
        assert found["cpu"] == result["cpu"]
        assert uri.startswith(found["device"])
        report = pool.check()
        assert report.clean, report.problems
        assert report.blocks["live"] == report.blocks["reserved"] == 0  # cards and areas have been given back
        if mode == "sim":
            assert pool.line_counts()["conflicts"] == 0


def test_a_pool_in_use_is_qualified_and_keeps_its_blocks(uri, identity):
    with kvpool.create(uri, mode="noncoherent", **SHAPE) as pool:
        ns = pool.namespace(identity)
        keys = ns.keys(range(8 * identity.block_tokens))
        ns.put(keys, [bytes([n]) * 4096 for n in range(8)])
        with ns.match(keys) as hit:
            assert run(uri)["qualified"]
            assert [int(view[0]) for view in hit.views] == list(range(8))


@pytest.mark.parametrize(("defect", "noticed"), [
    ("write-back", {"store", "pin", "copy", "stale"}),  # streams write back by themselves, logs in kvp_log_append
    ("invalidate", {"store", "stream", "pin", "copy", "stale"}),  # who reads a log without it is only late
])  # fmt: skip
def test_what_is_left_out_is_noticed(uri, defect, noticed):
    name = uri.replace("shm:", "sim:")
    kvpool.create(f"{name}?events=0", **SHAPE).close()
    try:
        assert run(name)["qualified"]
        result = run(name, "--defect", defect, code=1)
        assert {test for test, counts in result["pairs"][0]["tests"].items() if counts["failures"]} == noticed
        with kvpool.open(name) as pool:
            assert pool.stats()["qualification"] is None  # the earlier one is withdrawn
    finally:
        kvpool.remove(name, force=True)


def test_a_device_that_nobody_qualified_is_refused(tmp_path, monkeypatch):
    uri = f"file:{tmp_path / 'pool'}"
    with pytest.raises(kvpool.Unqualified, match="unqualified=True"):
        kvpool.create(uri, mode="noncoherent", **SHAPE)
    assert not (tmp_path / "pool").exists()
    kvpool.create(uri, mode="noncoherent", unqualified=True, **SHAPE).close()
    with pytest.raises(kvpool.Unqualified, match="kvpool qualify"):
        kvpool.open(uri)
    kvpool.open(uri, unqualified=True).close()
    with monkeypatch.context() as environment:
        environment.setenv("KVPOOL_UNQUALIFIED", "1")
        kvpool.open(uri).close()
    assert run(uri)["qualified"]
    kvpool.open(uri).close()
    kvpool.open(uri, host=1).close()
    kvpool.remove(uri)
    kvpool.create(uri, mode="noncoherent", unqualified=True, **SHAPE).close()
    with pytest.raises(kvpool.Unqualified):  # another pool at the same place
        kvpool.open(uri)
    kvpool.remove(uri)


def test_a_damaged_digest_is_none(tmp_path):
    path = tmp_path / "pool"
    uri = f"file:{path}"
    kvpool.create(uri, mode="noncoherent", unqualified=True, **SHAPE).close()
    run(uri)
    with path.open("r+b") as file:
        file.seek(1088 + 24)
        file.write(b"\xff")
    with pytest.raises(kvpool.Unqualified):
        kvpool.open(uri)
    kvpool.remove(uri)


def test_memory_of_one_machine_needs_no_qualification(uri):
    kvpool.create(uri, mode="noncoherent", **SHAPE).close()
    kvpool.open(uri).close()


def test_sides_can_be_started_one_by_one(uri):
    kvpool.create(uri, mode="noncoherent", **(SHAPE | {"hosts": 3})).close()
    options = ["--hosts", "0,2", "--rounds", "50", "--json"]
    sides = [
        subprocess.Popen([*COMMAND, "qualify", uri, "--host", host, *options], stdout=subprocess.PIPE, text=True)
        for host in ("2", "0")
    ]
    results = [json.loads(side.communicate(timeout=240)[0]) for side in sides]
    assert [result["qualified"] for result in results] == [True, True]
    assert results[0]["hosts"] == results[1]["hosts"] == [0, 2]
    assert "pairs" in results[1]


def test_three_hosts_test_every_pair(uri):
    kvpool.create(uri, mode="noncoherent", **(SHAPE | {"hosts": 3})).close()
    result = run(uri, "--hosts", "2,0,1", "--rounds", "20")
    assert [pair["hosts"] for pair in result["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert result["qualified"]


def test_a_side_that_never_comes(uri):
    kvpool.create(uri, mode="noncoherent", **SHAPE).close()
    with pytest.raises(kvpool.SystemFailure, match="host 1 has not turned up"):
        run_side(Task(uri, (0, 1), 10, patience=0.3), 0, lambda done, total: None)
    with kvpool.open(uri) as pool:
        assert pool.check().blocks["reserved"] == 0


def test_bad_input(uri, make_pool):
    make_pool()
    done = run(uri, code=1)
    assert done["code"] == kvpool.InvalidArgument.code
    assert "one host" in done["error"]
    kvpool.remove(uri, force=True)
    kvpool.create(uri, mode="noncoherent", **SHAPE).close()
    with pytest.raises(kvpool.WrongHost):
        qualify_module.run(Task(uri, (0, 5), 10))
    for arguments in (["--hosts", "0"], ["--hosts", "a,b"], ["--host", "3"]):
        refused = subprocess.run([*COMMAND, "qualify", uri, *arguments], capture_output=True, text=True)
        assert refused.returncode == 2
