"""The one thing that pyproject.toml cannot say: a C++ library that is left out where no compiler is found."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("trtllm_v4tree/native/src")

setup(
    ext_modules=[
        Extension(
            "trtllm_v4tree.native._ops",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cc"))],
            depends=[str(path) for pattern in ("*.h", "*.inl") for path in sorted(SOURCES.glob(pattern))],
            extra_compile_args=["-O3", "-pthread", "-std=c++17", "-fvisibility=hidden", "-Wno-psabi"],
            language="c++",
            optional=True,
        )
    ]
)
