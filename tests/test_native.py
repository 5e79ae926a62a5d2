"""The C core by itself: an example, old faults, races under sanitizers, damaged images, fuzzers, another CPU."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import native_build as build
import pytest

SECONDS = float(os.environ.get("KVPOOL_STRESS_SECONDS", "4"))
SEED = os.environ.get("KVPOOL_STRESS_SEED", "1")
FUZZ_SECONDS = os.environ.get("KVPOOL_FUZZ_SECONDS", "8")
EXAMPLE = "found: keys and values of sixteen tokens\na miss\n"

# TSan wants its shadow where recent kernels put mappings; without address randomisation it always fits.
FIXED = ["setarch", platform.machine(), "-R"]


@pytest.mark.parametrize("flavour", [build.PLAIN, build.CLANG], ids=lambda f: f.compiler)
def test_example(flavour):
    """A C11 program that sees nothing but the public header, without a warning of either compiler."""
    assert build.run([build.program(flavour, "native/example.c", "-std=c11", "-pedantic")]) == EXAMPLE


def test_clang_sees_no_doubtful_atomic():
    """Misaligned, too wide or implicitly ordered atomics are errors in this flavour."""
    assert len(build.core(build.CLANG)) == len(build.SOURCES)


def test_old_faults():
    """One small case for each fault that was ever found."""
    output = build.run([build.program(build.CRASH, "native/regress.c")])
    assert "FAILED" not in output
    assert len(output.splitlines()) >= 10, output


@pytest.mark.parametrize("flavour", [build.PLAIN, build.ASAN, build.TSAN], ids=lambda f: f.name)
def test_stress(flavour):
    """Workers as threads on one mapping: no race, no wrong byte, nothing left over."""
    command = [build.program(flavour, "native/stress.c"), str(SECONDS), SEED]
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    print(build.run([*(FIXED if flavour is build.TSAN else []), *command], env=options))


def test_pin_against_evict():
    """Never both, in some million rounds."""
    print(build.run([build.program(build.PLAIN, "native/duel.c"), str(SECONDS)]))


def test_sanitizer_sees_a_race(tmp_path):
    """The instrument works: the same program reports the one race that it is told to pass over."""
    source = Path(__file__).parent / "native" / "stress.c"
    (tmp_path / "stress.c").write_text(source.read_text().replace("race:kvp_copy_out", "race:nothing_at_all"))
    program = tmp_path / "stress"
    build.run([*build.TSAN.command(), tmp_path / "stress.c", *build.core(build.TSAN), "-o", program])
    with pytest.raises(AssertionError, match=r"(?s)data race.*kvp_copy_out"):
        build.run([*FIXED, program, "2", SEED], env={"TSAN_OPTIONS": "halt_on_error=1"})


def test_damaged_images():
    """Each bit of the superblock, some bytes of each area: refused with a reason, or a pool that works."""
    output = build.run([build.program(build.ASAN, "native/damage.c")])
    print(output)
    refused = re.search(r"superblock: (\d+) refused", output)
    assert refused
    assert int(refused[1]) > 5000


@pytest.mark.parametrize(("name", "longest"), [("image", 240), ("uri", 600), ("keys", 400)])
def test_fuzz(name, longest, tmp_path):
    program = build.program(build.FUZZ, f"fuzz/fuzz_{name}.c")
    output = build.run([program, f"-max_total_time={FUZZ_SECONDS}", "-timeout=5", "-seed=1", "-len_control=0",
                        f"-max_len={longest}", f"-artifact_prefix={tmp_path}/", tmp_path])  # fmt: skip
    runs = re.search(r"Done (\d+) runs", output)
    assert runs
    assert int(runs[1]) > 500


def test_other_cpu():
    """The same sources on aarch64: under an emulator, which shows no weak ordering, but runs every instruction."""
    emulated = ("-Wl,--wrap=syscall", str(build.ROOT / "tests/native/emulator.c"))
    example = build.program(build.ARM, "native/example.c", *emulated)
    stress = build.program(build.ARM, "native/stress.c", *emulated)
    build.need("qemu-aarch64-static")
    assert build.run(["qemu-aarch64-static", example]) == EXAMPLE
    print(build.run(["qemu-aarch64-static", stress, "2", SEED, "2"]))
