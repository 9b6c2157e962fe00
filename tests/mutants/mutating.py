"""Mutants of the suite's checks: one module, one change.

The changes are those of a kept library, `mutmut`: what it does to numbers, strings, names, assignments,
calls, operators, keywords, conditionals and `match`.  All of a module is changed, its decorated functions
and its module level too.  Left out is what is no check:

- docstrings, imports, annotations, ``__all__``, decorators, and defaults that are more than a name, a number
  or a string;
- f-strings, with the expressions in them: they are wording;
- wording in other literals: what is raised; of `Failed`, `CouldNotRun`, `NotApplicable`, `Evidence`,
  ``rig.fail`` and ``first_few`` the texts (not `fault`, `where` and `trace`); of `Found` the value, what is
  allowed and the message (not the path nor the place);
- a literal with a blank in it that a function assigns, returns, yields, appends, or hands on as ``why`` or
  ``saw``; literals that are compared, looked up, or are arguments of anything else are changed;
- the literal that texts are joined with, and the choice between two texts;
- arguments that are wording, taken away or made None: of the calls named above, and any f-string of several
  words;
- arguments of ``len`` and ``isinstance`` that are taken away or made None, which only crashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_assignment

ROOT: Final = Path(__file__).resolve().parents[2]
SUITE: Final = ROOT / "conformance" / "kvc_conformance"
BESIDE: Final = ("golden", "oracle", "footprint", "states", "content", "outcomes")

SPOKEN: Final = frozenset({"Failed", "CouldNotRun", "NotApplicable", "Evidence", "fail", "first_few"})
"""What takes words for people; its keywords other than these words are judged by programs."""

SPOKEN_KEYWORDS: Final = frozenset({"why", "saw", "message", "needs"})
FOUND_KEPT: Final = (0, 4)
"""Of `Found`: the path and the place."""

UNTOUCHED_CALLS: Final = frozenset({"len", "isinstance"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: dotted name.
        function: qualified name of what it is in; "": the module itself.
        line: where it begins.
        before: the code that is changed.
        after: what it is changed to.
        nth: of those in this function that read the same.
    """

    module: str
    function: str
    line: int
    before: str
    after: str
    nth: int

    @property
    def id(self) -> str:
        """Stays the same while the function's name and the code that is changed do."""
        named = "\0".join([self.module, self.function, self.before, self.after, str(self.nth)])
        return hashlib.sha256(named.encode()).hexdigest()[:10]


def modules() -> dict[str, Path]:
    """What is mutated: dotted name and file."""
    found = {
        f"kvc_conformance.checks.{file.stem}": file
        for file in sorted((SUITE / "checks").glob("*.py"))
        if file.stem != "__init__"
    }
    found |= {f"kvc_conformance.{name}": SUITE / f"{name}.py" for name in BESIDE}
    return found | {"kvcontract.contract.check": ROOT / "kvcontract" / "contract" / "check.py"}


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._module = module
        self._above: list[cst.CSTNode] = []
        self._names: list[str] = []
        self._line = 1
        self.found: list[tuple[str, int, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _left_out(node, self._above):
            return False
        position = self.get_metadata(PositionProvider, node, None)
        if position is not None:
            self._line = position.start.line
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and not _unfit(node, operator):
                for other in operator(node):
                    if operator is operator_arg_removal and _only_wording(node, other):
                        continue
                    self.found.append((".".join(self._names), self._line, node, other))
        self._above.append(node)
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._above and self._above[-1] is original_node:
            self._above.pop()
            if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
                self._names.pop()


def _called(node: cst.CSTNode) -> str:
    """The last name of what is called; "" for anything else."""
    if not isinstance(node, cst.Call):
        return ""
    if isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return node.func.value if isinstance(node.func, cst.Name) else ""


def _literal(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString | cst.ConcatenatedString | cst.FormattedString)


def _text(node: cst.CSTNode) -> bool:
    """Whether it is wording by its looks: an f-string, a literal with a blank, or made of such."""
    match node:
        case cst.FormattedString():
            return True
        case cst.SimpleString():
            return " " in node.value
        case cst.ConcatenatedString():
            return _text(node.left) or _text(node.right)
        case cst.BinaryOperation():
            return _text(node.left) or _text(node.right)
        case cst.IfExp():
            return _choice(node)
        case _:
            return False


def _choice(node: cst.IfExp) -> bool:
    """Whether it chooses between two texts."""
    arms = (node.body, node.orelse)
    return any(_text(arm) for arm in arms) and all(_literal(arm) or _text(arm) for arm in arms)


def _left_out(node: cst.CSTNode, above: Sequence[cst.CSTNode]) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom() | cst.FormattedString():
            return True
        case cst.Param(default=cst.BaseExpression() as default):
            return not isinstance(default, cst.Name | cst.BaseNumber | cst.BaseString)
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__all__"))]):
            return True
        case cst.IfExp():
            return _choice(node)
        case cst.SimpleString() | cst.ConcatenatedString():
            return _spoken(node, above)
    return False


_THROUGH: Final = (
    cst.ConcatenatedString,
    cst.BinaryOperation,
    cst.BooleanOperation,
    cst.IfExp,
    cst.Tuple,
    cst.List,
    cst.Element,
)


def _spoken(node: cst.CSTNode, above: Sequence[cst.CSTNode]) -> bool:
    """Whether a literal is shown to people, and nothing else is done with it."""
    blank, keyword = _text(node), ""
    below = node
    for item in reversed(above):
        match item:
            case cst.Arg():
                keyword = item.keyword.value if item.keyword else ""
            case cst.Call():
                at = next((i for i, arg in enumerate(item.args) if arg is below), None)
                return _told(item, at, keyword, blank=blank)
            case cst.Attribute():
                return item.attr.value == "join"
            case cst.Raise():
                return True
            case cst.Return() | cst.Yield() | cst.Assign() | cst.AugAssign() | cst.AnnAssign():
                return blank and any(isinstance(outer, cst.FunctionDef) for outer in above)
            case _ if not isinstance(item, _THROUGH):
                return False
        below = item
    return False


def _told(call: cst.Call, at: int | None, keyword: str, *, blank: bool) -> bool:
    """Whether a literal among a call's arguments is wording.

    Args:
        call: what it is an argument of, or part of one.
        at: of which.
        keyword: by which, or "".
        blank: whether the literal has a blank.
    """
    name = _called(call)
    if name == "Found":
        return at not in FOUND_KEPT
    if name in SPOKEN:
        return not keyword or keyword in SPOKEN_KEYWORDS
    return blank and (keyword in SPOKEN_KEYWORDS or name in {"append", "extend"})


def _unfit(node: cst.CSTNode, operator: Any) -> bool:
    if operator is operator_assignment and isinstance(node, cst.Assign | cst.AnnAssign):
        return node.value is not None and _text(node.value)
    return operator is operator_arg_removal and _called(node) in UNTOUCHED_CALLS


def _only_wording(node: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether a call with an argument less, or None for one, differs in words alone."""
    if not isinstance(node, cst.Call) or not isinstance(other, cst.Call):
        return False
    name = _called(node)
    changed_at = [i for i, arg in enumerate(node.args) if all(arg is not same for same in other.args)]
    if all(_spoken_arg(node.args[i]) for i in changed_at):
        return True
    if name == "Found":
        return all(i not in FOUND_KEPT for i in changed_at)
    return name in SPOKEN and all(node.args[i].keyword is None for i in changed_at)


def _spoken_arg(arg: cst.Arg) -> bool:
    """Whether an argument is wording by its name, or a sentence."""
    if arg.keyword and arg.keyword.value in SPOKEN_KEYWORDS:
        return True
    return isinstance(arg.value, cst.FormattedString) and any(
        " " in part.value.strip() for part in arg.value.parts if isinstance(part, cst.FormattedStringText)
    )


def _found(name: str, source: str) -> Iterator[tuple[Mutant, cst.Module, cst.CSTNode, cst.CSTNode]]:
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Visitor(wrapper.module)
    wrapper.visit(visitor)
    seen: dict[tuple[str, str, str], int] = {}
    same: set[tuple[int, str]] = set()
    for function, line, node, other in visitor.found:
        before, after = (wrapper.module.code_for_node(item).strip() for item in (node, other))
        if before == after or (id(node), after) in same:
            continue
        same.add((id(node), after))
        nth = seen[function, before, after] = seen.get((function, before, after), -1) + 1
        yield Mutant(name, function, line, before, after, nth), wrapper.module, node, other


def mutants(name: str) -> list[Mutant]:
    """All of a module."""
    source = modules()[name].read_text(encoding="utf-8")
    return [found[0] for found in _found(name, source)]


def sources(wanted: Iterable[Mutant]) -> dict[str, str]:
    """The whole module of each mutant, by the mutant's id."""
    by_module: dict[str, set[str]] = {}
    for mutant in wanted:
        by_module.setdefault(mutant.module, set()).add(mutant.id)
    made: dict[str, str] = {}
    for name, ids in by_module.items():
        source = modules()[name].read_text(encoding="utf-8")
        for mutant, module, node, other in _found(name, source):
            if mutant.id in ids:
                changed = module.deep_replace(node, other)
                made[mutant.id] = changed.code if isinstance(changed, cst.Module) else ""
                compile(made[mutant.id], name, "exec", dont_inherit=True)
    return made
