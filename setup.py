"""The compiled parts. Where they cannot be built, Shoal installs without them and uses Gloo."""

from setuptools import Extension, setup


def native(name: str, *files: str, headers: tuple[str, ...] = ()) -> Extension:
    folder = f"shoal/transport/{name}"
    return Extension(
        f"shoal.transport.{name}._{name}",
        [f"{folder}/{file}" for file in (f"_{name}.c", *files)],
        depends=["shoal/transport/arithmetic.h", *(f"{folder}/{file}" for file in headers)],
        extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-strict-aliasing", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,
    )


TCP = ("engine.c", "frames.c", "messages.c", "endings.c")
setup(ext_modules=[native("shm"), native("tcp", *TCP, headers=("engine.h",))])
