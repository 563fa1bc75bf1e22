"""Source text in, one-place mutants of it out: operators, constants, conditions, calls, arguments.

Not mutated, because nothing depends on it or a message is all that would change: annotations, docstrings,
raise and assert statements, f-strings, decorators, imports, and bodies of protocols.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
}
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "mean": "sum", "minimum": "maximum"}
SYMMETRIC = {"min", "max", "minimum", "maximum", "equal", "allclose", "isclose", "array_equal"}
UNWRAPPED = {"detach", "clone", "copy", "contiguous", "abs", "float", "double", "sort"}
"""Methods without arguments that a mutant leaves out: x.detach() → x."""

SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}

Replace = Callable[[ast.AST], None]


@dataclass(frozen=True)
class Mutant:
    """The place-th mutant of a module. lines: first and last of the statement, or of its head, in the source;
    at_import: outside of every function. before, after: the text that changed."""

    path: str
    place: int
    lines: tuple[int, int]
    at_import: bool
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]}: {_short(self.before)}  →  {_short(self.after)}"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of one module, in the order of the source."""
    return [
        Mutant(path, number, place.lines, place.at_import, ast.unparse(place.node), ast.unparse(place.new))
        for number, place in enumerate(_places(ast.parse(source)))
    ]


def mutated(source: str, place: int) -> str:
    """The module's source with its place-th mutation made."""
    tree = ast.parse(source)
    chosen = _places(tree)[place]
    chosen.replace(chosen.new)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else line[:67] + "…"


@dataclass(frozen=True)
class _Place:
    node: ast.AST
    new: ast.AST
    replace: Replace
    lines: tuple[int, int]
    at_import: bool


@dataclass(frozen=True)
class _Where:
    lines: tuple[int, int] = (1, 1)
    at_import: bool = True

    def inside(self, node: ast.AST) -> _Where:
        """Where the children of `node` stand. A function's defaults are worked out where it is defined."""
        if isinstance(node, ast.arguments):
            return _Where(self.lines, True)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        at_import = self.at_import and not in_function
        if not isinstance(node, ast.stmt):
            return _Where(self.lines, at_import)
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        return _Where((node.lineno, max(node.lineno, last)), at_import)


def _places(tree: ast.Module) -> list[_Place]:
    return [
        _Place(node, new, replace, where.inside(node).lines, where.at_import)
        for node, replace, where in _walk(tree, _Where())
        for new in _variants(node)
    ]


def _walk(node: ast.AST, where: _Where) -> Iterator[tuple[ast.AST, Replace, _Where]]:
    """Every node that may change, with the function that puts another in its place."""
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS:
            continue
        if isinstance(value, ast.AST):
            children: list[tuple[ast.AST, Replace]] = [(value, _set(node, field))]
        elif isinstance(value, list):
            items = enumerate(value)
            children = [(item, _set_item(value, i)) for i, item in items if isinstance(item, ast.AST)]
        else:
            continue
        for child, replace in children:
            if not _is_skipped(child):
                yield child, replace, where
                yield from _walk(child, where.inside(child))


def _set(parent: ast.AST, field: str) -> Replace:
    return lambda new: setattr(parent, field, new)


def _set_item(items: list[ast.AST], index: int) -> Replace:
    return lambda new: items.__setitem__(index, new)


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, SKIPPED):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring, or the … of a protocol
    if isinstance(node, ast.ClassDef):
        return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return False


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    for kind, make in _MAKERS.items():
        if isinstance(node, kind):
            yield from make(node)


def _binary(node: ast.BinOp | ast.AugAssign) -> Iterator[ast.AST]:
    if type(node.op) in BINARY:  # without |, which joins types and dictionaries here
        yield _with(node, op=BINARY[type(node.op)]())


def _compare(node: ast.Compare) -> Iterator[ast.AST]:
    yield _with(node, ops=[COMPARE[type(node.ops[0])](), *node.ops[1:]])


def _boolean(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[ast.AST]:
    if isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
        return  # the comparison has its own mutant
    yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value, lineno=node.lineno)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value else 1.0)


def _statement(node: ast.Expr) -> Iterator[ast.AST]:
    call = node.value.value if isinstance(node.value, ast.Await) else node.value
    if isinstance(call, ast.Call):
        yield ast.Pass()


def _call(node: ast.Call) -> Iterator[ast.AST]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in NAMES:
        yield _with(node, func=_renamed(node.func, NAMES[name]))
    if isinstance(node.func, ast.Attribute) and name in UNWRAPPED and not node.args and not node.keywords:
        yield node.func.value
    if len(node.args) >= 2 and name not in SYMMETRIC:
        first, second = node.args[:2]
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.dump(first) != ast.dump(second):
            yield _with(node, args=[second, first, *node.args[2:]])
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])


def _renamed(function: ast.expr, name: str) -> ast.expr:
    return _with(function, **({"attr": name} if isinstance(function, ast.Attribute) else {"id": name}))


def _with(node: ast.AST, **fields: object) -> ast.AST:  # type: ignore[misc]
    """A shallow copy with other fields; the shared children are not changed by anybody."""
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


_MAKERS: dict[type | tuple[type, ...], Callable[..., Iterator[ast.AST]]] = {
    (ast.BinOp, ast.AugAssign): _binary,
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    (ast.If, ast.While, ast.IfExp): _condition,
    ast.Constant: _constant,
    ast.Expr: _statement,
    ast.Call: _call,
}
