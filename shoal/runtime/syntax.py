"""Syntax trees of Python text, made by one thread at a time.

CPython counts how deep a tree is in one place for all threads: where two of them make trees at
once, `ast.parse` may raise SystemError ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import ast
import threading

_lock = threading.Lock()


def parse_expression(text: str) -> ast.Expression:
    """Raises what `ast.parse` raises."""
    with _lock:
        return ast.parse(text, mode="eval")


def parse_module(text: str) -> ast.Module:
    """Raises what `ast.parse` raises."""
    with _lock:
        return ast.parse(text)
