"""kill -9 at every named point, and after every single instruction: nothing is lost, nothing leaks."""

from __future__ import annotations

import platform
import re

import native_build as build
import pytest

MANY_HOSTS = {
    "owners.c",
    "adopt.c",
    "replay.c",
    "host.c",
    "hosts.c",
}  # one host never comes here; several do in test_rack.py


def points_in_sources() -> set[str]:
    pattern = re.compile(r'KVP_CRASH_POINT\("([^"]+)"\)')
    sources = [source for source in (*build.SOURCES, *build.HEADERS) if source.name not in MANY_HOSTS]
    return {name for source in sources for name in pattern.findall(source.read_text())}


def test_every_crash_point():
    """One death at each pass of each point, in five scenarios; and no point that no scenario passes."""
    output = build.run([build.program(build.CRASH, "native/crash_points.c")])
    print(output)
    passed = set(re.findall(r"^passed (\S+)$", output, re.MULTILINE))
    assert passed == points_in_sources()
    deaths = [int(count) for count in re.findall(r"(\d+) deaths", output)]
    assert len(deaths) == 5
    assert min(deaths) >= 10
    assert sum(deaths) > 1000


@pytest.mark.skipif(platform.machine() != "x86_64", reason="single-steps x86-64 code")
def test_every_instruction():
    """The unmodified build, stepped through each operation: the image after each instruction is recovered."""
    output = build.run([build.program(build.PLAIN, "native/ptrace_kill.c")])
    print(output)
    if "ptrace refused" in output:
        pytest.skip("the machine does not permit ptrace")
    assert len(re.findall(r"instructions", output)) == 8
