"""The one compiled part. Where it cannot be built, Shoal installs without it and uses Gloo."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "shoal.transport.shm._shm",
            ["shoal/transport/shm/_shm.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-strict-aliasing", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
