"""The tool of the recipe 'calculator'."""

from __future__ import annotations


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


multiply.deterministic = True  # type: ignore[attr-defined]
