"""The compiled parts. Where they cannot be built, Shoal installs without them and uses Gloo.

Wheels that cibuildwheel makes for others always have them.
"""

import os

from setuptools import Extension, setup


def native(folder: str, name: str, *files: str, headers: tuple[str, ...] = ()) -> Extension:
    return Extension(
        f"{folder.replace('/', '.')}.{name}",
        [f"{folder}/{file}" for file in (f"{name}.c", *files)],
        depends=["shoal/comm/transport/arithmetic.h", *(f"{folder}/{file}" for file in headers)],
        extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-strict-aliasing", "-pthread"],
        extra_link_args=["-pthread"],
        optional="CIBUILDWHEEL" not in os.environ,
    )


TCP = ("engine.c", "frames.c", "messages.c", "endings.c")
setup(
    ext_modules=[
        native("shoal/comm/transport/shm", "_shm"),
        native("shoal/comm/transport/tcp", "_tcp", *TCP, headers=("engine.h",)),
        native("shoal/server/embedding", "_rows"),
        native("shoal/replica", "_peer_sum"),
        native("shoal/server/protocol", "_frames"),
    ]
)
