"""The bench runs and its rows are whole; what the core does grows no faster than what it is asked to do."""

from __future__ import annotations

import json
import math
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvpool.bindings import core
from kvpool.tools.bench import bench
from kvpool.tools.bench_picture import picture
from kvpool.tools.bench_suite import Effort, Report, Row, in_turn, merge
from kvpool.tools.bench_suite_driver import DriverMissing, build_driver, run_driver
from kvpool.tools.bench_suite_peers import MODULES, Others, Peer, find
from kvpool.tools.bench_targets import TARGETS, judge

FIELDS = {"name", "unit", "measured", "bound", "ratio", "target", "verdict", "p10", "p99"}
C_ROWS = {
    "alloc+free, hit (C)",
    "alloc+free, burst of 2048 (C)",
    "alloc+free, hit, two processes (C)",
    "alloc+free, burst of 2048, two processes (C)",
    "reserve+withdraw, 1 block (C)",
    "handoff to a spinning process (C)",
    "handoff to a sleeping process (C)",
    "publication that nobody waits for, the look (C)",
    "recovery, SIGKILL to detected, 1e6 blocks, 1 GiB (C)",
    "recovery, SIGKILL to reusable, 1e6 blocks, 1 GiB (C)",
} | {
    f"{verb} 1024 of {where} (C)"
    for verb in ("match", "lookup")
    for where in ("1e4, hot", "1e5, hot", "1e6, hot", "1e6, cold", "1e6, scattered, hot", "1e6, scattered, cold")
}
TWO_PROCESSORS = {"handoff to a spinning process (C)", *(name for name in C_ROWS if "two processes" in name)}
PYTHON_ROWS = (
    {
        "alloc+free, 1 block (Python)",
        "alloc+free, batch of 64 (Python)",
        "hash+match of 16384 tokens, 1e6 entries (Python)",
        "recovery of a Python worker, 1e6 blocks, to the end of its interpreter",
    }
    | {
        name
        for size in ("128 KiB", "512 KiB", "2 MiB")
        for name in (f"put, {size} (Python)", f"get_into, {size} (Python)")
    }
    | {
        f"get in place, {count}, {how} (Python)"
        for count in ("1 block", "batch of 64")
        for how in ("lowest calls", "Namespace")
    }
    | {f"metadata, {blocks} blocks of 128 KiB{share}" for blocks in ("1e4", "1e5", "1e6") for share in ("", ", share")}
)


@pytest.mark.slow
def test_core_runs_and_every_row_is_whole():
    done = CliRunner().invoke(bench, ["core", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["machine"]["processor"]
    rows = report["rows"]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    assert set(names) - C_ROWS == PYTHON_ROWS
    assert not set(names) & C_ROWS or C_ROWS - set(names) <= TWO_PROCESSORS
    for row in rows:
        assert set(row) == FIELDS
        assert row["measured"] > 0, row
        assert row["bound"] > 0, row
        assert math.isfinite(row["ratio"]), row
        assert (row["target"] is None) == (row["verdict"] == "measured")
        assert row["p10"] is None or row["p10"] <= row["measured"] <= row["p99"]


VERBS = {
    "publish": True, "pin and unpin": True, "copy out": True, "lookup": True, "replay": False, "follow": False,
    "hand-off": False,
}  # fmt: skip


def test_coherence_has_both_modes_side_by_side():
    done = CliRunner().invoke(bench, ["coherence", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    instructions = core("noncoherent")
    used = instructions.ffi.string(instructions.lib.kvp_line_instructions()).decode()
    assert report["machine"]["cache instructions"] == used
    assert report["machine"]["processor"]
    names = [row["name"] for row in report["rows"]]
    assert len(names) == len(set(names))
    for verb, in_both in VERBS.items():
        bounds = [name.rsplit(", to ", 1)[1] for name in names if name.startswith(verb)]
        assert ("coherent" in bounds) == in_both, bounds
        assert verb == "lookup" or set(bounds) - {"coherent"}, bounds
    for row in report["rows"]:
        assert set(row) == FIELDS
        assert row["measured"] > 0, row
        assert row["ratio"] == pytest.approx(row["measured"] / row["bound"])


def test_coherence_for_people():
    shown = CliRunner().invoke(bench, ["coherence", "--quick"], catch_exceptions=False).output
    assert "cache instructions" in shown
    assert "hand-off of a free segment" in shown


def test_scale_says_what_grows():
    done = CliRunner().invoke(bench, ["scale", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.output)["rows"]}
    assert rows["metadata, 1e6 blocks, 64 hosts"]["ratio"] < 1.5
    assert rows["lookup of 1024 keys, 1e+04 blocks"]["ratio"] == 1


def test_peers_that_are_absent_or_end_are_named():
    notes: list[str] = []
    assert set(find([sys.executable], notes)) | {note.split(":")[0] for note in notes} == set(MODULES)
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        Peer(sys.executable, "nobody", "put", "4096")
    others = Others({"redis": sys.executable, "iceoryx2": sys.executable}, "", notes)
    assert others.beside("redis", "put", 4096, lambda: 1.0, 1) is None  # no server
    assert others.beside("vLLM BlockPool", "lookup", 4096, lambda: 1.0, 1) is None  # not installed


def test_verdicts_come_from_the_targets():
    rows = [Row.of("alloc+free, hit (C)", "ns", 3.0, 2.0), Row.of("put, 2 MiB (Python)", "us", 1.0, 1.0)]
    rows += [
        Row.of("recovery, SIGKILL to detected, 1e6 blocks, 1 GiB (C)", "us", 150.0, 1.0),
        Row.of("else", "s", 1, 1),
    ]
    assert [row.verdict for row in judge(rows)] == ["missed", "met", "met (us)", "measured"]
    assert {target.of for target in TARGETS} == {"ratio", "measured"}


def test_a_picture_has_a_bar_for_each_row(tmp_path):
    rows = judge([Row.of("alloc+free, hit (C)", "ns", 3.0, 2.0), Row.of("<&>", "ns", 1.0, 10.0)])
    (tmp_path / "a.svg").write_text(picture("a & b", rows, "here"))
    drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"alloc+free, hit (C)", "<&>", "1.5", "0.1"} <= set(texts)


def test_a_row_says_how_far_from_its_bound_it_is():
    assert Row.of("a", "ns", 6.0, 3.0) == Row("a", "ns", 6.0, 3.0, 2.0, None, "measured")


def test_repeats_become_medians_row_by_row():
    runs = [Report([Row.of("a", "ns", measured, 2.0)], ["why"]) for measured in (1.0, 9.0, 4.0)]
    assert merge(runs) == Report([Row("a", "ns", 4.0, 2.0, 2.0)], ["why"])


def test_samples_are_taken_in_turn():
    taken = []
    sample = {name: lambda name=name: taken.append(name) or 1.0 for name in "ab"}
    assert in_turn(3, sample["a"], sample["b"]) == [1.0, 1.0]
    assert taken == list("ababab")
    assert Effort(quick=True).samples(80) == 10


# ---- growth, in basic blocks executed: no clock, no noise ----


@pytest.fixture(scope="module")
def growth(tmp_path_factory):
    """{operation: {(blocks of the pool, keys asked for): basic blocks executed}}"""
    try:
        driver = build_driver(tmp_path_factory.mktemp("bench"), ("-fsanitize-coverage=trace-pc",))
    except DriverMissing as missing:
        pytest.skip(str(missing))
    counts: dict[str, dict[tuple[int, int], int]] = {}
    for name, blocks, keys, count in run_driver(driver, "growth"):
        counts.setdefault(name, {})[int(blocks), int(keys)] = int(count)
    return counts


@pytest.mark.parametrize("name", ["match", "misses", "reserve", "publish", "siblings", "evict"])
def test_work_grows_with_the_keys_and_not_with_the_pool(growth, name):
    counts = growth[name]
    (small, large), (few, many) = sorted({blocks for blocks, _ in counts}), sorted({keys for _, keys in counts})
    for blocks in (small, large):
        assert 0 < counts[blocks, many] <= 1.5 * many / few * counts[blocks, few], counts
    # A heap of candidates is deeper by a few levels in a larger pool; nothing else may know how large it is.
    assert counts[large, many] <= 1.5 * counts[small, many], counts


def test_pinned_blocks_that_are_the_oldest_cost_a_walk_each_at_most(growth):
    counts = growth["pinned"]
    (small, large), (few, many) = sorted({blocks for blocks, _ in counts}), sorted({keys for _, keys in counts})
    for blocks in (small, large):
        assert 0 < counts[blocks, many] <= 1.5 * many / few * counts[blocks, few], counts


def test_recovery_is_one_walk_over_the_words(growth):
    counts = growth["recover"]
    (small, large), many = sorted({blocks for blocks, _ in counts}), max(keys for _, keys in counts)
    assert 0 < counts[large, many] <= 1.25 * large / small * counts[small, many], counts
