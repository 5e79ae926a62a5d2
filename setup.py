"""What pyproject.toml cannot say: where cffi finds its builder, and the wheel's ABI tag."""

from setuptools import setup

setup(
    cffi_modules=[f"bindings/build.py:{mode}" for mode in ("coherent", "noncoherent", "sim")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
