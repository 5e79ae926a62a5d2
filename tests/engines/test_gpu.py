"""The prepared check, where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_check.py")
NO_GPU = 77


@pytest.mark.slow
def test_everything_that_needs_a_gpu():
    done = subprocess.run([sys.executable, "-P", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    if done.returncode == NO_GPU:
        pytest.skip(told["skipped"])
    assert told["ok"], done.stdout
