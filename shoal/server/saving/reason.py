"""Why a file could not be written, in the words of the operating system."""

from __future__ import annotations

import os
import re

_OS_ERROR = re.compile(r"\(os error ([0-9]{1,4})\)")  # in errors of safetensors


def in_words(error: BaseException) -> str:
    """`no space left on device`; the text of the error where the system has no part in it."""
    matched = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else None
    if number is None and matched is not None:
        number = int(matched[1])
    if number is None:
        return str(error)
    words = os.strerror(number)
    return words[:1].lower() + words[1:]
