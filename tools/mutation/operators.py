"""What one line can be changed to: every single-line change that some operator offers.

A change splices one line of the text at the place of one node of the syntax tree, so that the rest of the file stays byte-equal. Left alone
are: docstrings and other texts, annotations, decorators, assertions, `__all__`, citations, what stands inside a `raise` or builds an error
(its text is for people; dropping the whole `raise` is offered), branches for type checkers, log calls and `__repr__`.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")), ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"}
SYMMETRIC = {"min", "max", "gcd", "lcm", "isclose", "minimum", "maximum", "add", "isinstance", "issubclass", "getattr", "hasattr", "range"}
LOG_CALLS = {"debug", "info", "warning", "warn", "print", "exception"}
UNTOUCHED_KEYWORDS = {"hint", "strict", "check", "encoding", "stacklevel"}  # texts, defensive checks
UNTOUCHED_NAMES = {"__all__", "__slots__", "CITE", "cite"}
COMPILED = re.compile("jit|kernel|inlined|called|allocating|helper")  # in decorators of what numba compiles (`meshwright.kernels.compile`)
SHIFTED_UP_TO = 100  # larger numbers are doubled and halved: one more of a million says nothing


@dataclass(frozen=True)
class Mutation:
    """One changed line. `scope` is the function or class it stands in, `compiled` says that numba compiles it."""

    path: str
    line: int
    before: str
    after: str
    operator: str
    scope: str
    compiled: bool = False

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        if lines[self.line - 1] != self.before:
            raise ValueError(f"{self.path}:{self.line} is not what it was")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


class _Finder(ast.NodeVisitor):
    """Walks one module; `found` holds (line, column, end column, text instead, operator, scope, compiled), columns in bytes."""

    def __init__(self, source: str) -> None:
        self.lines = [line.encode() for line in source.split("\n")]
        self.found: list[tuple[int, int, int, str, str, str, bool]] = []
        self.scope: list[str] = []
        self.returns: list[str] = []
        self.compiled = False

    def offer(self, line: int, start: int, end: int, text: str, operator: str) -> None:
        self.found.append((line, start, end, text, operator, ".".join(self.scope), self.compiled))

    def instead(self, node: ast.stmt | ast.expr, text: str, operator: str) -> None:
        """Offers `text` in place of a node that stands on one line."""
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            self.offer(node.lineno, node.col_offset, node.end_col_offset, text, operator)

    def between(self, left: ast.expr, right: ast.expr, token: str, text: str, operator: str) -> None:
        """Offers `text` for the operator `token` between two operands, where both ends stand on one line."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        gap = self.lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        pattern = r"\s+".join(re.escape(word) for word in token.split())
        if match := re.search(rf"(?<!\w){pattern}(?!\w)" if token[0].isalpha() else pattern, gap):
            start = left.end_col_offset + len(gap[: match.start()].encode())
            self.offer(right.lineno, start, start + len(match[0].encode()), text, operator)

    def text(self, node: ast.expr) -> str:
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    # Statements

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        marks = " ".join(ast.unparse(d) for d in node.decorator_list)
        if node.name in ("__repr__", "__str__") or "overload" in marks or "abstractmethod" in marks:
            return
        outer = self.compiled
        self.compiled = outer or bool(COMPILED.search(marks))
        self.scope.append(node.name)
        self.returns.append(ast.unparse(node.returns) if node.returns else "")
        for part in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None), *node.body):
            self.visit(part)
        self.scope.pop()
        self.returns.pop()
        self.compiled = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for part in node.body:
            self.visit(part)
        self.scope.pop()

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self.instead(node, "pass", "drop raise")

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test or "__name__" in test:
            return
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            self.instead(node.test, f"not {self.text(node.test)}", "negate condition")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func).rpartition(".")[2]
            if called in LOG_CALLS:
                return
            self.instead(node, "pass", "drop call")
        if not isinstance(value, ast.Constant):
            self.visit(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.instead(node, "pass", "drop statement")
        signs = {ast.Add: ("+=", "-="), ast.Sub: ("-=", "+=")}
        if type(node.op) in signs:
            self.between(node.target, node.value, *signs[type(node.op)], "arithmetic")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if any(n in UNTOUCHED_NAMES or n.startswith("__") for n in names):
            return
        if not self.scope and any(n.lstrip("_")[:1].isupper() and not n.isupper() for n in names):
            return  # an alias of types
        if all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self.instead(node, "pass", "drop statement")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not (isinstance(node.target, ast.Name) and node.target.id in UNTOUCHED_NAMES):
            self.visit(node.value)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self.instead(node, "pass", "drop jump")

    visit_Break = visit_Continue

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.instead(node, "pass", "drop return")
            return
        if not isinstance(node.value, ast.Constant) and node.value.lineno == node.value.end_lineno:
            typed = self.returns[-1] if self.returns else ""
            empty = {"int": "0", "float": "0.0", "bool": f"not ({self.text(node.value)})"}.get(typed, "None")
            self.instead(node.value, empty, "other result")
        self.visit(node.value)

    # Expressions

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # a text; and Python 3.11 has no true columns inside

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for k, op in enumerate(node.ops):
            token, others = COMPARISONS[type(op)]
            for other in others:
                self.between(operands[k], operands[k + 1], token, other, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        token, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, token, other, "and or")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        plain = not any(isinstance(x, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or _is_text(x) for x in (node.left, node.right))
        if plain and type(node.op) in ARITHMETIC:
            token, other = ARITHMETIC[type(node.op)]
            self.between(node.left, node.right, token, other, "arithmetic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and node.lineno == node.end_lineno:
            self.instead(node, self.text(node.operand) if node.operand.lineno == node.lineno else "", "drop not")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.instead(node, str(not value), "constant")
        elif isinstance(value, int | float):
            for other in (value + 1, value - 1) if abs(value) <= SHIFTED_UP_TO else (value * 2, value // 2):
                self.instead(node, repr(other), "constant")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp) and bound.lineno == bound.end_lineno:
                self.instead(bound, f"{self.text(bound)} + 1", "slice bound")
                self.instead(bound, f"{self.text(bound)} - 1", "slice bound")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        if called.endswith("Error") or called in LOG_CALLS:
            return
        if called in NAMES:
            start = node.func.end_col_offset or 0
            if node.func.lineno == node.func.end_lineno:
                self.offer(node.func.lineno, start - len(called), start, NAMES[called], "other function")
        if called not in SYMMETRIC:
            for a, b in zip(node.args, node.args[1:], strict=False):
                one_line = a.lineno == b.lineno == a.end_lineno == b.end_lineno
                if one_line and not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred) and not _is_text(a) and not _is_text(b):
                    line = self.lines[a.lineno - 1]
                    gap = line[a.end_col_offset : b.col_offset].decode()
                    if a.end_col_offset is not None and b.end_col_offset is not None:
                        self.offer(a.lineno, a.col_offset, b.end_col_offset, self.text(b) + gap + self.text(a), "swapped arguments")
        self.visit(node.func)
        for part in node.args[1:] if called in ("cast", "TypeVar") else node.args:
            if called != "reshape" or not isinstance(part, ast.UnaryOp):  # NumPy takes any negative length for -1
                self.visit(part)
        for keyword in node.keywords:
            if keyword.arg not in UNTOUCHED_KEYWORDS:
                self.visit(keyword.value)


def _is_text(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)) or isinstance(node, ast.JoinedStr)


def mutations(path: str, source: str, line: int | None = None) -> list[Mutation]:
    """All changes of one module, or of one line of it, that compile and mean another syntax tree, in the order of the text."""
    return [made for made in _offers(path, source) if line in (None, made.line) and _counts(made, source)]


def _offers(path: str, source: str) -> list[Mutation]:
    """What the operators offer; whether it compiles is not looked at yet."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    found = []
    for line, start, end, text, operator, scope, compiled in sorted(finder.found):
        before = finder.lines[line - 1]
        after = before[:start] + text.encode() + before[end:]
        if after != before and b"# pragma" not in before:
            found.append(Mutation(path, line, before.decode(), after.decode(), operator, scope, compiled))
    return found


def _counts(made: Mutation, source: str) -> bool:
    try:
        return ast.dump(ast.parse(made.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _rank(*words: object) -> str:
    return hashlib.sha256("\0".join(str(w) for w in words).encode()).hexdigest()


def draw(root: Path, paths: Iterable[str], number: int, seed: int) -> list[Mutation]:
    """`number` changes of as many lines, every line with a change equally likely.

    A line's rank depends on the seed, its text and the function around it, not on its place: what is moved or edited elsewhere leaves the
    draw as it is.
    """
    sources = {path: (root / path).read_text(encoding="utf-8") for path in sorted(paths)}
    drawn: list[Mutation] = []
    for _, offers in sorted(_ranked_lines(sources, seed), key=lambda entry: entry[0]):
        if len(drawn) == number:
            break
        by_rank = sorted(offers, key=lambda m: _rank(seed, m.scope, m.after.strip(), m.operator))
        drawn += [made for made in by_rank if _counts(made, sources[made.path])][:1]
    return drawn


def _ranked_lines(sources: dict[str, str], seed: int) -> Iterator[tuple[str, list[Mutation]]]:
    seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for path, source in sources.items():
        lines: defaultdict[int, list[Mutation]] = defaultdict(list)
        for made in _offers(path, source):
            lines[made.line].append(made)
        for offers in lines.values():
            alike = (offers[0].scope, offers[0].before.strip())
            seen[alike] += 1
            yield _rank(seed, *alike, seen[alike]), offers
