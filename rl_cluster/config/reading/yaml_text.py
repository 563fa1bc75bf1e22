"""YAML 1.2 text in, plain data out, and back: only true and false are booleans, 010 is ten, 1:30 is text."""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import BaseResolver

from rl_cluster.errors import BadInputError

MOST_NODES = 100_000
"""Entries of a text whose aliases are written out; a file of a few lines can otherwise grow without bound."""


class _CoreSchema(BaseResolver):
    """Which plain scalars are numbers, booleans or null: https://yaml.org/spec/1.2.2/#103-core-schema.

    1e-6 and .5 are numbers; hexadecimal and octal numbers, dates and << are text.
    """

    def __init__(self, version: Any = None, loader: Any = None, loadumper: Any = None) -> None:
        super().__init__(loadumper or loader)

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)


class _Constructor(SafeConstructor):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            if key.tag != "tag:yaml.org,2002:str":
                raise MarkedYAMLError(problem=f"key {key.value} is not text", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
        r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        list("-+0123456789."),
    ),
):
    _CoreSchema.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


class _Quoting(_CoreSchema):
    """For writing: text that YAML 1.1 would take for a date, a number or a boolean is quoted, too."""


_Quoting.add_implicit_resolver(
    "tag:yaml.org,2002:yaml-1.1",
    re.compile(r"^(?:[-+.0-9].*|=|<<|(?i:y|n|yes|no|on|off))$"),
    list("-+.0123456789=<yYnNoO"),
)


class _Representer(SafeRepresenter):
    def represent_float(self, data: float) -> Any:
        """1.0e-06, which YAML 1.1's readers take for a number, too."""
        node = super().represent_float(data)
        if "." not in node.value:
            node.value = node.value.replace("e", ".0e")
        return node

    def represent_str(self, data: str) -> Any:
        """With escapes where it holds a line break, of which Unicode has more than YAML 1.2."""
        style = '"' if data and data.splitlines() != [data] else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(float, _Representer.represent_float)
_Representer.add_representer(str, _Representer.represent_str)


def parse_yaml(text: str, source: str) -> Any:
    """Plain dicts, lists and scalars.

    Raises BadInputError with `source`, line and column: for text that is not YAML, a key given twice, and
    aliases that grow beyond MOST_NODES entries.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Constructor = _CoreSchema, _Constructor
    try:
        data = yaml.load(text)
    except DuplicateKeyError as error:
        key = re.match(r'found duplicate key "(.*?)"', str(error.problem))
        raise _refusal(
            source, error, f"key {key[1]!r} is given twice" if key else str(error.problem)
        ) from None
    except MarkedYAMLError as error:
        raise _refusal(source, error, str(error.problem or error.context)) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise BadInputError(f"{source}: not valid YAML: {error}.") from None
    if _num_nodes(data) > MOST_NODES:
        raise BadInputError(
            f"{source}: not valid YAML: its aliases (*name) stand for more than {MOST_NODES} entries. "
            "Write out what they mean."
        )
    return data


def dump_yaml(data: Any) -> str:
    """Block style, keys in their order; parse_yaml and YAML 1.1's readers read it back to equal data."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _Quoting, _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    yaml.width = 110
    text = io.StringIO()
    yaml.dump(data, text)
    return text.getvalue()


def _refusal(source: str, error: MarkedYAMLError, problem: str) -> BadInputError:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    return BadInputError(f"{where}: not valid YAML: {problem}.")


def _num_nodes(data: Any) -> int:
    """Entries with aliases written out, counted as far as MOST_NODES."""
    count, open_nodes = 0, [data]
    while open_nodes and count <= MOST_NODES:
        node = open_nodes.pop()
        count += 1
        if isinstance(node, dict):
            open_nodes.extend(node.values())
        elif isinstance(node, list):
            open_nodes.extend(node)
    return count
