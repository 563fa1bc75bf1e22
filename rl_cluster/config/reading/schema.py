"""Walks over the config models: which keys a section has, and what a place in pydantic's error means."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import BaseModel


def keys(model: type[BaseModel]) -> dict[str, Any]:
    """Every key of a section as it is written in YAML, with its annotation."""
    return {field.alias or name: _annotation(field) for name, field in model.model_fields.items()}


def _annotation(field: Any) -> Any:
    """The field's type, its discriminator kept (pydantic moves it from Annotated to the field)."""
    discriminator = field.discriminator
    return _Tagged(field.annotation, discriminator) if discriminator else field.annotation


@dataclass(frozen=True)
class _Tagged:
    annotation: Any
    discriminator: str


def _strip(annotation: Any) -> tuple[list[Any], str | None]:
    """The alternatives of a type without None, and the key that tells them apart."""
    discriminator = None
    while True:
        if isinstance(annotation, _Tagged):
            annotation, discriminator = annotation.annotation, annotation.discriminator
        elif typing.get_origin(annotation) is Annotated:
            base, *extras = typing.get_args(annotation)
            found = [e.discriminator for e in extras if getattr(e, "discriminator", None)]
            annotation, discriminator = base, (found or [discriminator])[0]
        else:
            break
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [a for a in typing.get_args(annotation) if a is not type(None)], discriminator
    return [annotation], discriminator


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def tag_of(model: type[BaseModel], discriminator: str) -> tuple[str, ...]:
    """The values of the discriminator that choose this model."""
    return tuple(typing.get_args(model.model_fields[discriminator].annotation))


def tags(annotation: Any) -> list[str]:
    """All the values that a discriminated union's discriminator may take."""
    alternatives, discriminator = _strip(annotation)
    if discriminator is None:
        return []
    return [tag for model in alternatives for tag in tag_of(model, discriminator)]


@dataclass(frozen=True)
class Place:
    """path: dotted, as the user writes it. section: the model that the last key belongs to.
    annotation: the type at the place, None where the key is unknown."""

    path: str
    section: type[BaseModel]
    annotation: Any


def locate(root: type[BaseModel], location: tuple[int | str, ...]) -> Place:
    """Translate a location of pydantic's into a path of the user's.

    pydantic puts the tags of discriminated unions and the names of plain unions' members between the
    keys; the types say which elements these are.
    """
    path: list[str] = []
    section: type[BaseModel] = root
    annotation: Any = root
    for element in location:
        alternatives, discriminator = _strip(annotation)
        if discriminator is not None:
            chosen = [m for m in alternatives if element in tag_of(m, discriminator)]
            annotation = chosen[0] if chosen else None
        elif len(alternatives) == 1 and is_section(alternatives[0]):
            section = alternatives[0]
            path.append(str(element))
            annotation = keys(section).get(str(element))
        elif len(alternatives) == 1:
            path.append(str(element))
            arguments = [a for a in typing.get_args(alternatives[0]) if a is not Ellipsis]
            annotation = arguments[0] if arguments else None
        else:
            annotation = _member(alternatives, str(element))
    return Place(".".join(path), section, annotation)


def _member(alternatives: list[Any], label: str) -> Any:
    """The member of a plain union that pydantic calls `label`, such as `tuple[str, ...]`."""
    for alternative in alternatives:
        if str(alternative).startswith(label.split("[")[0]) or getattr(alternative, "__name__", "") == label:
            return alternative
    return None


def paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted path of a configuration, sections included; list items are left out."""
    for key, annotation in keys(model).items():
        yield prefix + key
        for alternative in _strip(annotation)[0]:
            if is_section(alternative):
                yield from paths(alternative, f"{prefix}{key}.")
