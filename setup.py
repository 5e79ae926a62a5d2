"""What pyproject.toml cannot say: where cffi finds its builder, and the wheel's ABI tag."""

from setuptools import setup

setup(
    cffi_modules=["bindings/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
