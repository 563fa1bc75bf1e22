"""The base of every config model: frozen, and strict about unknown keys and types."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _absolute(path: str) -> str:
    local = Path(path).expanduser()
    return str(local.absolute()) if path and local.exists() else path


LocalPath = Annotated[str, AfterValidator(_absolute)]
"""A file or folder, or a name of the hub. What exists here becomes absolute: workers, and resumed runs, may
have another working directory."""


class Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
