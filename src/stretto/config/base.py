"""Base of all settings: their types, and the section."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from stretto.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

LARGEST_SEED = 2**63 - 1
"""TOML's largest integer, which torch and numpy take as well."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]


class Section(BaseModel):
    """A group of settings: immutable, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def require_seed(seed: int) -> None:
    """Refuse a seed that no settings would take, where it comes without any.

    Raises:
        ConfigError: it is out of range.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"seed = {seed}: must be from 0 to {LARGEST_SEED}")
