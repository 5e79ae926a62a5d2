"""Traces read and replayed: small ones counted by hand, real ones against counts that other programs found.

The right values of the real traces were computed twice, by a C++ program with a Fenwick tree and by an OrderedDict and
a heap. The traces are looked for in KVPOOL_TRACES and then in ../shared/traces; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import eventually

import kvpool
from kvpool.tools.replay import IDENTITY, Driver, Plan, capacity_blocks, key_rows, payload_rows, run
from kvpool.tools.traces import FORMATS, Stream, TraceError, percentiles, read, reuse_distances

COMMAND = [sys.executable, "-P", "-m", "kvpool.tools.main", "replay"]
REPORT = {
    "requests", "accesses", "hits", "hit_ratio", "evictions", "wrong_payloads", "metadata_bytes", "policy",
    "capacity_blocks", "reuse_distance", "unique", "seconds", "workers", "hosts", "mode", "check",
}  # fmt: skip


def lines(path, *requests):
    """A trace file of the mooncake form."""
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in requests))
    return path


def session(path, *requests):
    """A trace file of the kv-cache-tester form, from (t, ids) or (t, [nested requests])."""

    def record(t, part):
        if part and isinstance(part[0], tuple):
            return {"t": t, "type": "subagent", "requests": [record(*each) for each in part]}
        return {"t": t, "type": "n", "hash_ids": part}

    document = {"id": path.stem, "hash_id_scope": "local", "requests": [record(*each) for each in requests]}
    path.write_text(json.dumps(document))
    return path


def counted(requests, capacity, policy, **options):
    """(hits, evictions) of a replay that must be clean."""
    report = run(Stream.of(requests), Plan(capacity, policy, **options))
    assert report["check"] == {"clean": True, "problems": []}
    assert report["wrong_payloads"] == 0
    return report["hits"], report["evictions"]


def replayed(*arguments, code=0):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


# ---- policies, by hand ----

SHARED_PREFIX = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
OFTEN_USED = [[1], [1], [2], [3], [1]]
TIED = [[1], [2], [1], [2], [3], [1], [2]]
TAIL = [[1, 2, 3], [4], [1, 2]]


@pytest.mark.parametrize(("requests", "capacity", "policy", "expected"), [
    (SHARED_PREFIX, 3, "lru", (4, 2)),   # 4 evicts 3, 3 evicts 4
    (SHARED_PREFIX, 3, "fifo", (2, 4)),  # 4 evicts 1, 1 evicts 2, 2 evicts 3, 3 evicts 4
    (SHARED_PREFIX, 3, "lfu", (4, 2)),
    (SHARED_PREFIX, 3, "leaf", (4, 2)),
    (SHARED_PREFIX, 4, "lru", (5, 0)),
    (OFTEN_USED, 2, "lru", (1, 2)),      # 3 evicts 1, 1 evicts 2
    (OFTEN_USED, 2, "lfu", (2, 1)),      # 3 evicts 2, which was used once
    (OFTEN_USED, 2, "fifo", (1, 2)),
    (TIED, 2, "lfu", (3, 2)),            # both used twice: 3 evicts 1, the less recent; 1 evicts 3; 2 is still there
    (TIED, 2, "lru", (2, 3)),            # 3 evicts 1, 1 evicts 2, 2 evicts 3
    (TAIL, 3, "lru", (0, 3)),            # 4 evicts 1, 1 evicts 2, 2 evicts 3
    (TAIL, 3, "leaf", (2, 1)),           # 4 evicts 3, the tail
    ([[7, 7, 7]], 1, "lru", (2, 0)),     # twice in a request
    ([[1, 2], [], [1]], 1, "lru", (0, 2)),
])  # fmt: skip
def test_hits_counted_by_hand(requests, capacity, policy, expected):
    assert counted(requests, capacity, policy) == expected


def test_the_tail_of_a_long_chain_goes_first():
    chain = list(range(200))
    others = [[1000 + i] for i in range(50)]
    hits, _ = counted([chain, *others, chain[:150]], 200, "leaf")
    assert hits == 150


@pytest.mark.parametrize("capacity", [1, 2, 7, 40])
def test_lru_agrees_with_reuse_distances(capacity):
    rng = np.random.default_rng(capacity)
    requests = [rng.zipf(1.3, rng.integers(1, 12)).clip(max=80).tolist() for _ in range(200)]
    expected = int((reuse_distances(Stream.of(requests).block) < capacity).sum())
    assert counted(requests, capacity, "lru")[0] == expected


def test_several_workers_share_a_small_pool():
    rng = np.random.default_rng(5)
    requests = [[0, 1, 2, *rng.integers(3, 200, 20).tolist()] for _ in range(400)]
    report = run(Stream.of(requests), Plan(64, "leaf", workers=3))
    assert report["accesses"] == 400 * 23
    assert 0 < report["hits"] < report["accesses"]
    assert report["wrong_payloads"] == 0
    assert report["check"]["clean"]


def ideal(stream):
    """Hits with room for everything: every access but the first to each block."""
    return len(stream.block) - len(stream.ids)


@pytest.mark.parametrize("mode", ["sim", "noncoherent"])
def test_four_hosts_hit_as_one_does(mode):
    rng = np.random.default_rng(7)
    chains = [list(range(100 * n, 100 * n + 12)) for n in range(20)]
    requests = [[*chains[rng.zipf(1.4) % 20][: rng.integers(1, 13)], 5000 + i] for i in range(300)]
    stream = Stream.of(requests)
    report = run(stream, Plan(len(stream.ids), "leaf", hosts=4, mode=mode))
    assert (report["hits"], report["evictions"], report["wrong_payloads"]) == (ideal(stream), 0, 0)
    assert report["hits"] == run(stream, Plan(len(stream.ids), "leaf"))["hits"]
    assert (report["hosts"], report["mode"], report["check"]) == (4, mode, {"clean": True, "problems": []})
    assert report["capacity_blocks"] >= 4 * len(stream.ids)


def test_hosts_of_small_capacity_evict_and_stay_right():
    rng = np.random.default_rng(8)
    stream = Stream.of([rng.integers(0, 700, 8).tolist() for _ in range(300)])
    report = run(stream, Plan(128, "lru", hosts=3))
    assert 0 < report["hits"] < ideal(stream)
    assert report["evictions"] > 0
    assert (report["wrong_payloads"], report["check"]["clean"]) == (0, True)


def test_sessions_stay_at_their_host(tmp_path):
    files = [session(tmp_path / f"trace_{n}.json", (0, [1, 2]), (n + 1, [1, 2, 3])) for n in range(3)]
    stream = read(files)
    assert sorted(stream.session.tolist()) == [0, 0, 1, 1, 2, 2]
    plan = Plan(64, hosts=2)
    assert {plan.host_of(stream, i) for i in range(6) if stream.session[i] == 1} == {1}
    assert [plan.host_of(Stream.of([[1]] * 4), i) for i in range(4)] == [0, 1, 0, 1]
    done = json.loads(replayed(*files, "--hosts", 2, "--capacity", "unlimited", "--json").stdout)
    assert (done["hits"], done["hosts"], done["mode"]) == (ideal(stream), 2, "sim")
    shown = replayed(*files, "--hosts", 2, "--mode", "noncoherent", "--capacity", "unlimited").stdout
    assert "mode noncoherent" in shown
    assert "--workers" in replayed(*files, "--hosts", 2, "--workers", 2, code=2).stderr


def test_a_wrong_payload_is_counted():
    stream = Stream.of([[1, 2, 3]])
    with kvpool.create("memfd:", block="4KiB", blocks=8, policy="lru") as pool:
        pool.namespace(IDENTITY).put(key_rows(stream.ids)[1].tobytes(), [b"\x00" * 64])
        counts = Driver(pool, stream).run(0, 1, lambda new: None)
    assert (counts.accesses, counts.hits, counts.wrong_payloads) == (3, 1, 1)


def test_keys_and_payloads_belong_to_one_id():
    few = np.arange(5000, dtype=np.uint64)
    ids = np.unique(np.concatenate([few, few << np.uint64(32), ~few]))
    keys, payloads = key_rows(ids), payload_rows(ids)
    assert len(np.unique(keys, axis=0)) == len(ids)
    assert all(len(np.unique(half)) == len(ids) for half in keys.T)
    assert keys.any(axis=1).all()
    assert payloads.nbytes == 64 * len(ids)
    assert (payloads[:, :2] == keys).all()
    assert (payloads[:, 2] == ids).all()
    assert (key_rows(ids[7:8]) == keys[7:8]).all()


# ---- reuse distances ----


def brute_force(block):
    found = []
    for at, mine in enumerate(block):
        before = [i for i in range(at) if block[i] == mine]
        if before:
            found.append(len(set(block[before[-1] + 1 : at].tolist())))
    return found


def test_reuse_distances_by_hand():
    assert reuse_distances(Stream.of([[1, 2, 3, 1, 2, 2]]).block).tolist() == [2, 2, 0]
    assert reuse_distances(Stream.of([[1, 2, 3]]).block).tolist() == []


@pytest.mark.parametrize("seed", range(8))
def test_reuse_distances_by_brute_force(seed):
    block = np.random.default_rng(seed).integers(0, 3 + 7 * seed, 300).astype(np.uint32)
    assert reuse_distances(block).tolist() == brute_force(block)


def test_percentiles():
    expected = {"p10": 0, "p25": 2, "p50": 4, "p75": 7, "p90": 8, "p95": 9, "p99": 9, "max": 9}
    assert percentiles(np.arange(10)[::-1]) == expected
    assert set(percentiles(np.zeros(0, np.int64)).values()) == {None}


# ---- reading ----


def test_mooncake(tmp_path):
    path = lines(tmp_path / "a.jsonl", [5, 6], [], [5, 2**64 - 1])
    path.write_text(path.read_text() + "\n  \n")
    stream = read([path])
    assert stream.requests == 3
    assert stream.ids[stream.block].tolist() == [5, 6, 5, 2**64 - 1]
    assert stream.start.tolist() == [0, 2, 2, 4]


def test_several_mooncake_files_are_one_trace(tmp_path):
    stream = read([lines(tmp_path / "b.jsonl", [1, 2]), lines(tmp_path / "a.jsonl", [1, 3])])
    assert stream.ids[stream.block].tolist() == [1, 2, 1, 3]


def test_sessions_are_interleaved_by_time(tmp_path):
    paths = [session(tmp_path / "one.json", (0.0, [1]), (2.0, [1, 2]), (9.0, [3])),
             session(tmp_path / "two.json", (0.0, [1]), (2.0, [(0.0, [4]), (7.0, [5]), (3.0, [6])]))]  # fmt: skip
    stream = read(paths)
    other = 1 << 32
    assert stream.ids[stream.block].tolist() == [1, other | 1, 1, 2, other | 4, other | 6, 3, other | 5]
    assert stream.requests == 7
    assert len(stream.ids) == 7


BAD_LINES = {
    "not JSON": "{nonsense",
    "not an object": "[1, 2]",
    "no ids": '{"timestamp": 3}',
    "ids are no list": '{"hash_ids": 7}',
    "a negative id": '{"hash_ids": [1, -1]}',
    "an id of 65 bits": '{"hash_ids": [18446744073709551616]}',
    "a text id": '{"hash_ids": ["1"]}',
    "half an id": '{"hash_ids": [1.5]}',
    "a time in words": '{"timestamp": "noon", "hash_ids": [1]}',
    "not UTF-8": '{"hash_ids": [1], "x": "\udcff"}',
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_lines_are_named_or_skipped(tmp_path, kind):
    path = lines(tmp_path / "a.jsonl", [1, 2])
    bad = BAD_LINES[kind].encode(errors="surrogateescape")
    path.write_bytes(path.read_bytes() + bad + b"\n" + path.read_bytes())
    with pytest.raises(TraceError, match=r"a\.jsonl:2: "):
        read([path])
    stream = read([path], skip_bad=True)
    assert (stream.requests, stream.skipped) == (2, 1)


def test_bad_sessions_are_named_or_skipped(tmp_path):
    good = session(tmp_path / "a.json", (0.0, [1]))
    parts = session(tmp_path / "b.json", (0.0, [1, -1]), (1.0, [1 << 32]), (2.0, [2]))
    cut = tmp_path / "c.json"
    cut.write_text(good.read_text()[:-2])
    none = tmp_path / "d.json"
    none.write_text('{"hash_id_scope": "local", "requests": 3}')
    with pytest.raises(TraceError, match=r"b\.json:1 request 0: "):
        read([good, parts])
    with pytest.raises(TraceError, match=r"c\.json:1: "):
        read([good, cut])
    stream = read([good, parts, cut, none], skip_bad=True)
    assert (stream.requests, stream.skipped) == (2, 4)


def test_unknown_and_empty_files(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens\n0,3\n")
    with pytest.raises(TraceError, match="--format takes"):
        read([path])
    with pytest.raises(TraceError, match="--format takes"):
        read([lines(tmp_path / "a.jsonl", [1]), session(tmp_path / "b.json", (0, [1]))])
    with pytest.raises(TraceError, match="no block is accessed"):
        read([lines(tmp_path / "a.jsonl")])
    assert set(FORMATS) == {"mooncake", "kv-cache-tester"}


@pytest.mark.parametrize(("text", "blocks"), [
    ("10%", 20), ("12.5%", 25), ("0.1%", 1), ("33.3%", 66), ("unlimited", 201), ("64KiB", 16), ("65537", 16),
    ("500 blocks", 500), ("1blocks", 1),
])  # fmt: skip
def test_capacities(text, blocks):
    assert capacity_blocks(text, 201, 4096) == blocks


@pytest.mark.parametrize("text", ["", "0%", "-1%", "x%", "1/0%", "0 blocks", "many blocks", "100", "lots"])
def test_bad_capacities(text):
    with pytest.raises(kvpool.InvalidArgument):
        capacity_blocks(text, 201, 4096)


# ---- the command ----


def test_replay_for_programs_and_people(tmp_path):
    path = lines(tmp_path / "a.jsonl", *SHARED_PREFIX)
    done = replayed(path, "--policy", "lru", "--capacity", "3 blocks", "--json")
    report = json.loads(done.stdout)
    assert set(report) == REPORT
    assert done.stderr == ""
    expected = {"requests": 3, "accesses": 9, "unique": 4, "hits": 4, "evictions": 2, "wrong_payloads": 0, "workers": 1,
                "policy": "lru", "capacity_blocks": 3, "check": {"clean": True, "problems": []}}  # fmt: skip
    assert expected.items() <= report.items()
    assert report["hit_ratio"] == pytest.approx(4 / 9)
    assert report["reuse_distance"]["p50"] == 2
    shown = replayed(path, "--policy", "lru", "--capacity", "3 blocks").stdout
    for text in ("4 (0.444444)", "3 blocks", "clean", "reuse distance", "p99"):
        assert text in shown


def test_replay_on_a_named_pool_leaves_nothing(tmp_path, uri):
    path = lines(tmp_path / "a.jsonl", *TAIL)
    assert json.loads(replayed(path, "--uri", uri, "--workers", 2, "--json").stdout)["accesses"] == 6
    with pytest.raises(kvpool.NotFound):
        kvpool.open(uri)
    with kvpool.create(uri, blocks=8):
        assert json.loads(replayed(path, "--uri", uri, "--json", code=1).stdout)["code"] == kvpool.Exists.code


def test_replay_with_bad_input(tmp_path):
    path = lines(tmp_path / "a.jsonl", [1], [2])
    path.write_text(path.read_text() + "{\n")
    assert replayed(path, code=1).stderr.startswith(f"kvpool: {path}:3: ")
    done = replayed(path, "--skip-bad", "--json")
    assert done.stderr == "kvpool: 1 bad records skipped\n"
    assert json.loads(done.stdout)["requests"] == 2
    assert "not a capacity" in replayed(path, "--skip-bad", "--capacity", "x%", code=1).stderr
    assert "block" in replayed(path, "--skip-bad", "--block", "100", code=1).stderr
    replayed(path, "--policy", "best", code=2)
    replayed(path, "--format", "csv", code=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupting_a_replay_leaves_nothing(tmp_path, uri, workers):
    rng = np.random.default_rng(1)
    path = lines(tmp_path / "long.jsonl", *rng.integers(0, 20000, (1000, 1000)).tolist())
    process = subprocess.Popen([*COMMAND, path, "--uri", uri, "--workers", str(workers)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    name = Path(f"/dev/shm/kvpool.{os.getuid()}.{uri.removeprefix('shm:')}")
    assert eventually(name.exists, 20)
    time.sleep(0.5)  # the workers are on their way, or at work
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (130, "", "")
    assert len(children) >= workers - 1
    assert eventually(lambda: not any(child.is_running() for child in children))
    assert not name.exists()


def test_a_worker_that_dies_ends_the_replay(tmp_path, uri):
    rng = np.random.default_rng(2)
    path = lines(tmp_path / "long.jsonl", *rng.integers(0, 20000, (1000, 1000)).tolist())
    process = subprocess.Popen([*COMMAND, path, "--uri", uri, "--workers", "2"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip

    def is_worker(child):
        try:
            return "spawn_main" in " ".join(child.cmdline())
        except psutil.NoSuchProcess:  # a helper that ended between the list and the question, zombies included
            return False

    def workers():
        return list(filter(is_worker, psutil.Process(process.pid).children()))

    assert eventually(lambda: len(workers()) == 2, 20)
    workers()[0].kill()
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (1, "", "kvpool: a worker process of the replay died\n")
    with pytest.raises(kvpool.NotFound):
        kvpool.open(uri)


# ---- real traces ----

PERCENTS = (1, 5, 10, 25, 50)
ROWS = {
    ("conversation", "lru"): (15_080, 56_382, 80_323, 101_978, 104_759),
    ("conversation", "lfu"): (16_789, 36_602, 56_207, 97_050, 104_633),
    ("conversation", "fifo"): (14_565, 51_808, 73_806, 96_469, 103_399),  # from ratios: .050485 and so on
    ("conversation", "leaf"): (15_136, 56_479, 80_466, 101_978, 104_759),
    ("synthetic", "lru"): (4_184, 18_861, 31_668, 54_044, 71_763),
    ("synthetic", "lfu"): (1_467, 12_809, 21_465, 47_153, 73_487),
    ("synthetic", "fifo"): (4_400, 18_435, 30_065, 51_058, 67_067),
    ("synthetic", "leaf"): (4_644, 19_087, 31_973, 54_123, 71_763),
    ("sessions", "lru"): (104_920, 600_980, 843_813, 1_225_213, 1_582_796),
}  # fmt: skip
SHAPES = {  # requests, accesses, unique, hits with room for all; reuse distances
    "conversation": (12_031, 288_500, 182_790, 105_710, (48, 4_292, 8_355, 17_849, 31_588, 37_644, 85_267, 158_281)),
    "synthetic": (3_993, 121_877, 43_924, 77_953, (708, 2_269, 6_265, 12_728, 20_392, 25_548, 33_941, 41_186)),
    "sessions": (1_442, 1_968_855, 203_326, 1_765_529,
                 (3_027, 7_011, 22_779, 64_112, 101_674, 121_491, 150_044, 186_321)),
}  # fmt: skip
FILES = {name: f"mooncake/{name}_trace.jsonl" for name in ("conversation", "synthetic")}
FILES["sessions"] = "kv-cache-tester/trace_*.json"
QUICK = {("conversation", "lru"), ("conversation", "leaf"), ("synthetic", "lru"), ("synthetic", "lfu"),
         ("synthetic", "fifo")}  # fmt: skip


@pytest.fixture(scope="module")
def trace():
    """The stream of a real trace, by name; skips the test where the files are not."""
    places = [os.environ.get("KVPOOL_TRACES", ""), Path(__file__).parents[2] / "shared" / "traces"]
    folder = next((Path(place) for place in places if place and Path(place).is_dir()), None)
    loaded: dict[str, Stream] = {}

    def load(name):
        files = sorted(folder.glob(FILES[name])) if folder else []
        if not files:
            pytest.skip(f"no {FILES[name]}: set KVPOOL_TRACES to the folder that has it")
        if name not in loaded:
            loaded[name] = read(files)
        return loaded[name]

    return load


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_a_real_trace(trace, name):
    stream = trace(name)
    requests, accesses, unique, ideal, distances = SHAPES[name]
    assert (stream.requests, len(stream.block), len(stream.ids)) == (requests, accesses, unique)
    found = reuse_distances(stream.block)
    assert len(found) == ideal
    assert tuple(percentiles(found).values()) == distances
    for percent, hits in zip(PERCENTS, ROWS[name, "lru"], strict=True):
        assert int((found < unique * percent // 100).sum()) == hits


def row(trace, name, policy, percent):
    stream = trace(name)
    capacity = capacity_blocks(f"{percent}%", len(stream.ids), 4096)
    assert capacity == len(stream.ids) * percent // 100
    report = run(stream, Plan(capacity, policy))
    expected = ROWS[name, policy][PERCENTS.index(percent)]
    assert report["hits"] == expected
    assert report["evictions"] == len(stream.block) - expected - capacity
    assert report["wrong_payloads"] == 0
    assert report["check"] == {"clean": True, "problems": []}


@pytest.mark.parametrize(("name", "policy"), sorted(QUICK))
def test_real_hits_at_10_percent(trace, name, policy):
    row(trace, name, policy, 10)


def test_real_hits_unlimited(trace):
    stream = trace("conversation")
    report = run(stream, Plan(len(stream.ids), "lru"))
    assert (report["hits"], report["evictions"], report["wrong_payloads"]) == (105_710, 0, 0)
    assert report["check"]["clean"]


def test_real_hits_of_four_processes(trace):
    stream = trace("conversation")
    report = run(stream, Plan(18_279, "lru", workers=4))
    assert report["accesses"] == 288_500
    assert report["wrong_payloads"] == 0
    assert report["check"] == {"clean": True, "problems": []}
    # Within a round the order of accesses is theirs, so the count is near that of one worker but not exact.
    assert report["hits"] == pytest.approx(80_323, rel=0.03)


def first_requests(stream, count):
    """The beginning of a trace, as a trace."""
    start = stream.start
    return Stream.of(stream.ids[stream.block[start[i] : start[i + 1]]].tolist() for i in range(count))


def test_real_hits_of_four_hosts(trace):
    stream = first_requests(trace("conversation"), 600)
    report = run(stream, Plan(len(stream.ids), "lru", hosts=4))
    assert report["requests"] == 600
    assert (report["hits"], report["evictions"], report["wrong_payloads"]) == (ideal(stream), 0, 0)
    assert report["check"] == {"clean": True, "problems": []}


@pytest.mark.slow
def test_all_real_hits_of_four_hosts(trace):
    stream = trace("conversation")
    report = run(stream, Plan(len(stream.ids), "lru", hosts=4))
    assert (report["hits"], report["evictions"], report["wrong_payloads"]) == (105_710, 0, 0)
    assert report["check"] == {"clean": True, "problems": []}


@pytest.mark.slow
@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize(("name", "policy"), sorted(ROWS))
def test_every_row_of_the_real_traces(trace, name, policy, percent):
    if percent == 10 and (name, policy) in QUICK:
        pytest.skip("counted above")
    row(trace, name, policy, percent)
