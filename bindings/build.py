"""Build the C core once per mode (cffi, API mode): kvpool.bindings._coherent, _noncoherent and _sim.

setuptools runs this file from the project root; nothing imports it at run time. The declarations are cut out of the
C headers, so a header is the only statement of its API and the C compiler checks that cffi reads it as C does. The
three modules have the same text and declarations; KVP_MODE (coherence/words.h) says what a store, a write-back and a
fence are.
"""

import re
from pathlib import Path

from cffi import FFI

LAYERS = ("coherence", "allocator", "native")  # each may include only those before it
HEADERS = ("coherence/coherence.h", "allocator/allocator.h", "native/kvpool.h")
PARTS = re.compile(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", re.DOTALL)
MODES = ("coherent", "noncoherent", "sim")  # in the order of their numbers


def declarations(header: str) -> str:
    """The parts of a header between its cdef marks."""
    return "".join(PARTS.findall(Path(header).read_text()))


def files(pattern: str) -> list[str]:
    """Files of the C layers, bottom first."""
    return [str(path) for layer in LAYERS for path in sorted(Path(layer).glob(pattern))]


def builder(mode: str) -> FFI:
    """The builder of one mode's module."""
    made = FFI()
    for name in HEADERS:
        made.cdef(declarations(name))
    made.set_source(
        f"kvpool.bindings._{mode}",
        '#include "native/kvpool.h"\n',
        sources=files("*.c"),
        depends=files("*.h"),
        include_dirs=["."],
        define_macros=[("KVP_MODE", str(MODES.index(mode)))],
        # Across files, and nothing but the module's entry is visible: small functions of the lower layers cost no call.
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden", "-flto"],
        extra_link_args=["-pthread", "-O2", "-flto"],
    )
    return made


coherent, noncoherent, sim = (builder(mode) for mode in MODES)
