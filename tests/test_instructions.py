"""The C hot paths take as many instructions as are written down: what costs shows here, on a busy machine too."""

from __future__ import annotations

import json
import shutil

import instructions
import pytest


def test_hot_paths_stay_in_their_bands():
    if not shutil.which("valgrind") or not shutil.which("gcc"):
        pytest.skip("valgrind and gcc count instructions; they are not both here")
    recorded = json.loads(instructions.RECORD.read_text())
    if recorded["compiler"] != instructions.compiler():
        pytest.skip(f"recorded with gcc {recorded['compiler']}: python tests/instructions.py --record")
    counted = instructions.measure()
    assert set(counted) == set(recorded["counts"])
    outside = {
        path: (count, recorded["counts"][path])
        for path, count in counted.items()
        if abs(count / recorded["counts"][path] - 1) > instructions.BAND
    }
    assert not outside, f"counted and recorded; if it is meant: python tests/instructions.py --record: {outside}"
