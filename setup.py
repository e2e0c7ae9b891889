"""The compiled parts. Where they cannot be built, Shoal installs without them and uses Gloo."""

from setuptools import Extension, setup


def native(name: str) -> Extension:
    folder = f"shoal/transport/{name}"
    return Extension(
        f"shoal.transport.{name}._{name}",
        [f"{folder}/_{name}.c"],
        depends=["shoal/transport/arithmetic.h"],
        extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-strict-aliasing", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(ext_modules=[native("shm"), native("tcp")])
