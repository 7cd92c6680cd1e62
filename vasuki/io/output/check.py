"""A condition that answers have to meet, written over the fields of their type and computed by `pyarrow.compute`:

    amount >= 0 and (due is None or due > "2026-01-01") and 0 < len(items) <= 20

Comparisons, arithmetic, `and`, `or`, `not`, `x is None`, `x in [a, b]`, `len(x)`, and pyarrow's functions of one row by
name. Like SQL's CHECK, it is met unless it comes out false: what is compared with null is null.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vasuki.base.errors import JobFileError, did_you_mean, one_line

Row = dict[str, Any]  # scalars, by field
Compute = Callable[[Row], Any]

_MOST_CHARACTERS = 10_000
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "equal", ast.NotEq: "not_equal",
    ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater", ast.GtE: "greater_equal",
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "add_checked", ast.Sub: "subtract_checked", ast.Mult: "multiply_checked", ast.Div: "divide",
}  # fmt: skip


class Check:
    """A condition, read once.

    Args:
        text: the expression.
        fields: that it may name.

    Raises:
        JobFileError: it cannot be read, names another field, or does not fit the fields' types.
    """

    def __init__(self, text: str, fields: Collection[pa.Field]) -> None:
        self._fields = {field.name: field.type for field in fields}
        self._named: set[str] = set()
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"has more than {_MOST_CHARACTERS} characters")
            self._compute = self._read(ast.parse(text.strip(), mode="eval").body)
            found = self._compute(self._row({}))
        except SyntaxError as error:
            raise JobFileError(f"output.check: {error.msg} at character {error.offset}") from None
        except (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException) as error:
            raise JobFileError(f"output.check: {one_line(error) or type(error).__name__}") from None
        if not pa.types.is_boolean(found.type):
            raise JobFileError(f"output.check: comes out as {found.type}, and has to be true or false")

    def holds(self, answer: Any) -> bool:
        """Whether an answer meets it; one for which it cannot be computed does not."""
        values = answer if isinstance(answer, dict) else {"answer": answer}
        try:
            return self._compute(self._row(values)).as_py() is not False
        except (ValueError, TypeError, pa.ArrowException):  # such as an overflow
            return False

    def _row(self, values: Row) -> Row:
        return {name: _plain(pa.scalar(values.get(name), self._fields[name])) for name in self._named}

    def _read(self, node: ast.expr) -> Compute:
        match node:
            case ast.Name(name):
                self._named.add(name)
                if name not in self._fields:
                    raise ValueError(f"there is no field '{name}'{did_you_mean(name, list(self._fields))}")
                return lambda row: row[name]
            case ast.Constant(value) if not isinstance(value, bytes | complex | type(...)):
                scalar = pa.scalar(value)
                return lambda row: scalar
            case ast.Attribute(of, name):
                inner = self._read(of)
                return lambda row: _plain(pc.struct_field(inner(row), name))
            case ast.BoolOp(operator, parts):
                function = pc.and_kleene if isinstance(operator, ast.And) else pc.or_kleene
                return _folded(function, [self._read(part) for part in parts])
            case ast.UnaryOp(ast.Not(), of):
                return _called(pc.invert, [self._read(of)])
            case ast.UnaryOp(ast.USub(), of):
                return _called(pc.negate, [self._read(of)])
            case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
                return _called(getattr(pc, _COMPUTED[type(operator)]), [self._read(left), self._read(right)])
            case ast.Compare(left, operators, others):
                sides = [left, *others]
                pairs = zip(sides, operators, others, strict=False)
                return _folded(pc.and_kleene, [self._compared(*pair) for pair in pairs])
            case ast.Call(ast.Name(name), arguments, options):
                return self._call(name, arguments, options)
        raise ValueError(f"'{ast.unparse(node)[:60]}' cannot be computed here")

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Compute:
        of = self._read(left)
        match operator, right:
            case ((ast.Is() | ast.IsNot()), ast.Constant(None)):
                return _called(pc.is_null if isinstance(operator, ast.Is) else pc.is_valid, [of])
            case ((ast.In() | ast.NotIn()), (ast.List(values) | ast.Tuple(values))):
                found = _folded(pc.or_kleene, [self._compared(left, ast.Eq(), value) for value in values])
                return found if isinstance(operator, ast.In) else _called(pc.invert, [found])
        if type(operator) not in _COMPARED:
            raise ValueError(f"'{ast.unparse(ast.Compare(left, [operator], [right]))[:60]}' cannot be computed here")
        function = getattr(pc, _COMPARED[type(operator)])
        return _called(lambda one, other: function(*_alike(one, other)), [of, self._read(right)])

    def _call(self, name: str, arguments: list[ast.expr], options: list[ast.keyword]) -> Compute:
        of = [self._read(argument) for argument in arguments]
        named = {str(each.arg): ast.literal_eval(each.value) for each in options}
        if name == "len":
            return _called(_length, of)
        if name not in pc.list_functions() or pc.get_function(name).kind != "scalar" or not hasattr(pc, name):
            raise ValueError(f"there is no function '{name}'; see pyarrow.compute for those of one row")
        return _called(getattr(pc, name), of, named)


def _called(function: Callable[..., Any], of: list[Compute], options: dict[str, Any] | None = None) -> Compute:
    return lambda row: function(*(part(row) for part in of), **(options or {}))


def _folded(function: Callable[..., Any], parts: list[Compute]) -> Compute:
    if not parts:
        raise ValueError("a list has no values")

    def compute(row: Row) -> Any:
        found = parts[0](row)
        for part in parts[1:]:
            found = function(found, part(row))
        return found

    return compute


def _length(value: Any) -> Any:
    return pc.list_value_length(value) if pa.types.is_list(value.type) else pc.utf8_length(value)


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """The two sides of a comparison; a text beside a date is read as one."""
    if pa.types.is_temporal(one.type) and pa.types.is_string(other.type):
        return one, other.cast(one.type)
    if pa.types.is_temporal(other.type) and pa.types.is_string(one.type):
        return one.cast(other.type), other
    return one, other


def _plain(value: Any) -> Any:
    """A value of a dictionary as the text that it stands for."""
    return value.cast(value.type.value_type) if pa.types.is_dictionary(value.type) else value
