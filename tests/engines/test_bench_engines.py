"""The table of `kvpool bench engines`: every way of every engine that is installed, and what each says is checked."""

from __future__ import annotations

import importlib.util
import json

import pytest
from click.testing import CliRunner
from vllm_fixtures import need_vllm

need_vllm()
from kvpool.tools.bench import bench  # noqa: E402
from kvpool.tools.bench_suite_engines import FLOOR  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_has_its_row():
    done = CliRunner().invoke(bench, ["engines", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    ways = {FLOOR, "recompute", "connector, copying", "connector, in place"}
    ways |= {"LMCache"} if importlib.util.find_spec("lmcache") else set()
    assert {row["name"].partition(": ")[2] for row in report["rows"]} == ways
    assert all(row["measured"] > 0 for row in report["rows"])
