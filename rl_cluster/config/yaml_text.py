"""YAML text in, plain data out, without YAML 1.1's traps: 1e-6 is a number, a key given twice is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rl_cluster.errors import BadInputError


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-6 as a number, leaves dates as text and refuses keys given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is not text", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)$|^[-+]?(?:[0-9][0-9_]*)?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?[0-9][0-9_]*\.$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))


def parse_yaml(text: str, source: str) -> Any:
    """Plain dicts, lists and scalars.

    Raises BadInputError with `source`, line and column. Only true and false are booleans (YAML 1.2), so
    that `on`, `off`, `yes` and `no` stay text.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise BadInputError(f"{where}: not valid YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInputError(f"{source}: not valid YAML: {error}.") from None
