"""Build kvpool.bindings._native (cffi, API mode).

setuptools runs this file from the project root; nothing imports it at run time. The declarations are cut out of the
C headers, so a header is the only statement of its API and the C compiler checks that cffi reads it as C does.
"""

import re
from pathlib import Path

from cffi import FFI

LAYERS = ("coherence", "allocator", "native")  # each may include only those before it
HEADERS = ("coherence/coherence.h", "allocator/allocator.h", "native/kvpool.h")
PARTS = re.compile(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", re.DOTALL)


def declarations(header: str) -> str:
    """The parts of a header between its cdef marks."""
    return "".join(PARTS.findall(Path(header).read_text()))


def files(pattern: str) -> list[str]:
    """Files of the C layers, bottom first."""
    return [str(path) for layer in LAYERS for path in sorted(Path(layer).glob(pattern))]


ffibuilder = FFI()
for name in HEADERS:
    ffibuilder.cdef(declarations(name))
ffibuilder.set_source(
    "kvpool.bindings._native",
    '#include "native/kvpool.h"\n',
    sources=files("*.c"),
    depends=files("*.h"),
    include_dirs=["."],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
)
