"""The tool of the recipe 'calculator'."""

from __future__ import annotations


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


multiply.deterministic = True  # type: ignore[attr-defined]
