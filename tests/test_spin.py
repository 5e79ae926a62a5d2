"""The model of a lost host, checked exhaustively by spin; and that it can fail: each rule is left out in turn."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from native_build import ROOT, need, run

MODEL = ROOT / "tests" / "spin" / "lease.pml"
# One fence of a slow host, readers on both survivors; and a host that also loses power and reboots within its lease.
FENCED = ("-DLOSSES=0", "-DBOOTS=0")
REBOOTED = ("-DPUBLICATIONS=1", "-DFEW_PINS")
MUTATIONS = {
    "ADOPT_AT_EXPIRY": (FENCED, "owner_since"),
    "CONFIRM_BEFORE_RESET": (FENCED, "owner_since"),
    "NO_INVALIDATE": (FENCED, "pinned|payload_copy"),
    "IGNORE_PINS_AT_EXPIRY": (FENCED, "pinned"),
    "TWO_ADOPTERS": (FENCED, "owner_since"),
    "NO_EPOCH": (FENCED, "payload_copy"),
    "SAME_EPOCH": (REBOOTED, "payload_copy"),
    "NO_PIN_CHECK": (FENCED, "pinned"),
    "NO_STALE_CHECK": (FENCED, "fenced<number"),
    "RESTART_UNNAMED": (REBOOTED, "owner_since"),
    "RENAME_EARLY": (REBOOTED, "owner_since"),
    "COUNT_FENCED_PINS": (FENCED, "invalid end state"),
}


def explore(folder: Path, *flags: str, optimize: str = "-O0") -> str:
    """What the checker says about the model built with `flags`. It goes through all states or stops at an error."""
    need("spin")
    need("gcc")
    call = functools.partial(subprocess.run, cwd=folder, capture_output=True, text=True, check=False)
    made = call(["spin", "-a", *flags, MODEL], timeout=60)
    assert made.returncode == 0, made.stdout + made.stderr
    run(["gcc", optimize, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2500", folder / "pan.c", "-o", folder / "pan"])
    done = call(["./pan", "-n", "-m20000"], timeout=280)
    output = done.stdout + done.stderr
    assert "max search depth too small" not in output, output
    assert not re.search(r"memory limit|MEMLIM|out of memory", output), output
    return output


def errors(output: str) -> int:
    found = re.search(r"errors: (\d+)", output)
    assert found, output
    return int(found[1])


@pytest.mark.parametrize(
    "scenario", [FENCED, pytest.param(REBOOTED, marks=pytest.mark.slow)], ids=["fenced", "rebooted"]
)
def test_the_protocol_holds(scenario, tmp_path):
    output = explore(tmp_path, *scenario, optimize="-O2")
    print(output)
    assert errors(output) == 0, output
    states = re.search(r"([\d.e+]+) states, stored", output)
    assert states
    assert float(states[1]) > 100_000


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_rule_is_needed(mutation, tmp_path):
    scenario, violated = MUTATIONS[mutation]
    output = explore(tmp_path, *scenario, f"-D{mutation}")
    assert errors(output) == 1, output
    said = re.search(r"^pan:1: (.*)", output, re.MULTILINE)
    assert said, output
    assert re.search(violated, said[1]), f"{mutation} violates something else: {said[1]}"


@pytest.mark.parametrize("scenario", [FENCED, REBOOTED], ids=["fenced", "rebooted"])
def test_the_adopter_reuses(scenario, tmp_path):
    """The model is not right for want of anything that could go wrong: an adopter gets as far as publishing."""
    assert "assertion violated 0" in explore(tmp_path, *scenario, "-DSHOW_REUSE")


def test_each_mutation_is_documented_and_tested():
    text = MODEL.read_text()
    flags = set(re.findall(r"^#(?:ifn?def|if defined|elif defined)[ (](\w+)", text, re.MULTILINE))
    settings = {"PUBLICATIONS", "PINS", "FENCES", "LOSSES", "BOOTS", "FEW_PINS", "SHOW_REUSE"}
    assert flags - settings == set(MUTATIONS)
    assert all(f" *   {name} " in text for name in MUTATIONS)
