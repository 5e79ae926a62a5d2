"""A rack of four hosts with four workers each, killed and lost as seeds have it: nothing lost, wrong or leaked."""

from __future__ import annotations

import dataclasses
import os
import re

import native_build as build
import pytest

# What the hosts do with each other; one host alone is killed at the other points by test_crash.py.
MANY_HOSTS = ("allocator/owners.c", "allocator/adopt.c", "native/replay.c", "native/host.c", "coherence/hosts.c")
SECONDS = os.environ.get("KVPOOL_RACK_SECONDS", "5")
SEEDS = os.environ.get("KVPOOL_RACK_SEEDS", "1 2 3").split()


def crash(mode: int, *flags: str) -> build.Flavour:
    """The core of one mode, with its crash points."""
    name = f"rack{mode}{'-asan' if flags else ''}"
    return dataclasses.replace(build.CRASH, name=name, flags=(*build.CRASH.flags, f"-DKVP_MODE={mode}", *flags))


SIM, NONCOHERENT = crash(2), crash(1)
ASAN = crash(2, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def soak(flavour: build.Flavour, seconds: str, seed: str) -> tuple[dict[str, int], set[str]]:
    """Run it; what it counted, by name, and the crash points that it passed."""
    output = build.run([build.program(flavour, "native/rack.c"), seconds, seed], timeout=600)
    print(output)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (operations|payloads|deaths)", output)}
    counts |= {word: int(n) for word, n in re.findall(r"(killed|lost|fenced|stopped) (\d+)", output)}
    return counts, set(re.findall(r"^passed (\S+)$", output, re.MULTILINE))


def test_simulated_rack():
    """Some seeds; together they pass every crash point of what hosts do with each other."""
    passed: set[str] = set()
    for seed in SEEDS:
        counts, names = soak(SIM, SECONDS, seed)
        assert counts["operations"] > 1000
        assert counts["payloads"] > 1000
        assert counts["deaths"] > 0
        passed |= names
    sources = [(build.ROOT / name).read_text() for name in MANY_HOSTS]
    assert {name for text in sources for name in re.findall(r'KVP_CRASH_POINT\("([^"]+)"\)', text)} <= passed


def test_real_instructions():
    """The hosts are processes of this machine, whose caches are coherent: what is shown is that nothing else breaks."""
    assert soak(NONCOHERENT, SECONDS, SEEDS[0])[0]["payloads"] > 1000


def test_under_sanitizers():
    assert soak(ASAN, SECONDS, SEEDS[-1])[0]["payloads"] > 1000


@pytest.mark.skipif("KVPOOL_RACK_LONG" not in os.environ, reason="a minute: set KVPOOL_RACK_LONG to a seed")
def test_a_minute():
    counts, _ = soak(SIM, "60", os.environ["KVPOOL_RACK_LONG"])
    assert min(counts[what] for what in ("killed", "lost", "fenced", "stopped")) > 0
