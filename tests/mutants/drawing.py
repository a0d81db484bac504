"""Mutants of a room: every small change that an operator can make, and a draw of them.

The operators are those of cosmic-ray, but for two that choose without a seed, and one
of our own, which drops a statement. A place in the code is drawn first, and then one of
its changes: otherwise a sum, which eleven operators change, would outweigh a condition.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword
from typing_extensions import override

Position = tuple[int, int]


class Mutant(NamedTuple):
    """One change to one file.

    Args:
        file: path of the file below the root of the checkout.
        position: line and column of the change in the file.
        operator: name of the operator that makes it.
        occurrence: number of the change among all that the operator can make here.
    """

    file: str
    position: Position
    operator: str
    occurrence: int

    def source(self, root: Path) -> str:
        """The file's text with the change."""
        text = (root / self.file).read_text(encoding="utf-8")
        changed = mutate_code(text, OPERATORS[self.operator], self.occurrence)
        assert changed is not None, f"{self} changes nothing"
        return changed


class DropStatement(Operator):
    """Replaces a call, or an assignment to an attribute or an element, by `pass`.

    An assignment to a name is left alone: what reads the name would fail at once.
    """

    @override
    def mutation_positions(self, node: Any) -> Any:
        if node.type == "simple_stmt" and _has_an_effect(node.children[0]):
            yield node.start_pos, node.end_pos

    @override
    def mutate(self, node: Any, index: int) -> Any:
        statement = node.children[0]
        prefix = statement.get_first_leaf().prefix
        node.children[0] = Keyword("pass", statement.start_pos, prefix)
        return node

    @classmethod
    @override
    def examples(cls) -> Any:
        return (Example("stop()\n", "pass\n"), Example("a.b = 1\n", "pass\n"))


def _has_an_effect(statement: Any) -> bool:
    if statement.type == "atom_expr":
        return statement.children[-1].get_code().startswith("(")
    is_assignment = statement.type == "expr_stmt"
    return is_assignment and statement.children[0].type == "atom_expr"


_UNSEEDED = ("VariableReplacer", "VariableInserter")
# cosmic-ray annotates nothing, and its methods seem to return None.
_PROVIDER: Any = OperatorProvider()
OPERATORS: dict[str, Any] = {
    "DropStatement": DropStatement(),
    **{name: _PROVIDER[name]() for name in _PROVIDER if name not in _UNSEEDED},
}


def draw(root: Path, files: Iterable[Path], number: int, seed: str) -> list[Mutant]:
    """Mutants at `number` places of these files, or at all places if they are fewer."""
    places: dict[tuple[str, Position], list[Mutant]] = defaultdict(list)
    for file in files:
        for mutant in mutants_of(root, file):
            places[mutant.file, mutant.position].append(mutant)
    generator = random.Random(seed)
    order = sorted(places)
    generator.shuffle(order)
    drawn: list[Mutant] = []
    for place in order:
        if len(drawn) == number:
            break
        generator.shuffle(places[place])
        # A place has none where every change is a syntax error, or none at all.
        drawn += [m for m in places[place] if _is_another_program(m, root)][:1]
    return drawn


def mutants_of(root: Path, file: Path) -> Iterator[Mutant]:
    """All mutants of a file, whether or not they can be compiled."""
    text = (root / file).read_text(encoding="utf-8")
    ignored = list(_positions_without_effect(text))
    occurrences: dict[str, int] = defaultdict(int)
    for node in ast_nodes(parso.parse(text)):
        for name, operator in OPERATORS.items():
            for start, _ in operator.mutation_positions(node):
                if not any(begin <= start < end for begin, end in ignored):
                    yield Mutant(str(file), start, name, occurrences[name])
                occurrences[name] += 1


# A base class's promises; without them the program is the same.
_PROMISES = {"override", "abstractmethod", "overload", "final", "runtime_checkable"}


def _positions_without_effect(text: str) -> Iterator[tuple[Position, Position]]:
    """Annotations, and decorators that only type checkers read."""
    for node in ast.walk(ast.parse(text)):
        found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for decorator in getattr(node, "decorator_list", []):
            if ast.unparse(decorator).rpartition(".")[2] in _PROMISES:
                yield (decorator.lineno, decorator.col_offset - 1), _end(decorator)
        for annotation in filter(None, found):
            yield (annotation.lineno, annotation.col_offset), _end(annotation)


def _end(node: ast.expr) -> Position:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _is_another_program(mutant: Mutant, root: Path) -> bool:
    before = (root / mutant.file).read_text(encoding="utf-8")
    try:
        return ast.dump(ast.parse(mutant.source(root))) != ast.dump(ast.parse(before))
    except (SyntaxError, AssertionError):
        return False
