"""Turns pydantic's errors into Problems: the dotted field, the value, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rl_cluster.config.reading.problems import NO_VALUE, Problem, nearest
from rl_cluster.config.reading.schema import Place, keys, locate, paths, tags

Context = Mapping[str, Any]


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem per wrong field; the several failures of a plain union's members become one."""
    problems: dict[str, Problem] = {}
    for entry in error.errors(include_url=False):
        place = locate(model, entry["loc"])
        problem = _problem(entry, place, model)
        known = problems.get(problem.field)
        if known is not None and known.reason != problem.reason:
            reason = f"{known.reason}, or {problem.reason}"
            problem = Problem(problem.field, problem.value, reason, known.remedy)
        problems[problem.field] = problem
    # A list counts its valid entries only, so that a wrong entry also makes it look too short.
    return [p for field, p in problems.items() if not any(f.startswith(field + ".") for f in problems)]


def _problem(entry: Any, place: Place, model: type[BaseModel]) -> Problem:
    kind, context, value = entry["type"], entry.get("ctx", {}), entry.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(place, value, model)
    if kind == "missing":
        return Problem(place.path, NO_VALUE, "is required", f"Add {place.path} to the configuration.")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_tag(context, place)
    reason, remedy = _wrong_value(kind, context, value)
    return Problem(place.path or "the configuration", value, reason or entry["msg"], remedy)


def _unknown_key(place: Place, value: Any, model: type[BaseModel]) -> Problem:
    *parents, word = place.path.split(".")
    prefix = ".".join(parents) + "." if parents else ""
    known = list(keys(place.section))
    close = nearest(word, known)
    elsewhere = sorted((p for p in paths(model) if p.split(".")[-1] == word), key=len)
    if place.path in elsewhere:
        remedy = f"It belongs to another choice of {'.'.join(parents)}. Known here: {', '.join(known)}."
    elif close is not None or elsewhere:
        meant = [f"{prefix}{close}"] if close is not None else []
        remedy = f"Did you mean {' or '.join([*meant, *elsewhere])}?"
    else:
        remedy = f"Known here: {', '.join(known)}."
    return Problem(place.path, value, "unknown key", remedy)


def _wrong_tag(context: Context, place: Place) -> Problem:
    discriminator = str(context["discriminator"]).strip("'")
    options = tags(place.annotation)
    field = f"{place.path}.{discriminator}"
    choose = f"Choose one of: {', '.join(options)}."
    if "tag" not in context:
        return Problem(field, NO_VALUE, "is required", choose)
    return Problem(field, context["tag"], "is not known", _choose(str(context["tag"]), options))


def _choose(given: Any, options: list[str]) -> str:
    close = nearest(given, options) if isinstance(given, str) else None
    meant = f"Did you mean {close}? " if close else ""
    return f"{meant}Choose one of: {', '.join(options)}."


# kind of pydantic's error -> (reason, remedy)
_TYPES: dict[str, tuple[str, str]] = {
    "int_type": ("must be a whole number", "Write it without quotes or decimals."),
    "int_from_float": ("must be a whole number", "Write it without decimals."),
    "int_parsing": ("must be a whole number", "Write it without quotes or decimals."),
    "float_type": ("must be a number", "Write it without quotes, for example 0.5 or 1e-6."),
    "finite_number": ("must be a finite number", "Give an ordinary number."),
    "bool_type": ("must be true or false", "Write true or false, without quotes."),
    "string_type": ("must be text", "Put it in quotes."),
    "tuple_type": ("must be a list", "Write it as [a, b]."),
    "list_type": ("must be a list", "Write it as [a, b]."),
    "dict_type": ("must be a mapping", "Write it as {key: value}."),
    "model_type": ("must be a section of keys", "Write it as {key: value}, or leave it out."),
    "model_attributes_type": ("must be a section of keys", "Write it as {key: value}."),
}

_BOUNDS: dict[str, tuple[str, str]] = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def _wrong_value(kind: str, context: Context, value: Any) -> tuple[str, str]:
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return (
            f"{words} {context[bound]}",
            f"Give a number that is {words.removeprefix('must be ')} {context[bound]}.",
        )
    if kind == "literal_error":
        options = [o.strip("'") for o in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return "is not one of the choices", _choose(value, options)
    other = _LENGTHS.get(kind)
    return other(context) if other else ("", "See the section's documentation in rl_cluster/config.")


_LENGTHS: dict[str, Callable[[Context], tuple[str, str]]] = {
    "too_short": lambda c: (f"needs {c['min_length']} or more entries", "Add entries to the list."),
    "too_long": lambda c: (f"takes at most {c['max_length']} entries", "Shorten the list."),
}
