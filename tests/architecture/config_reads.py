"""Which keys of the configuration the package reads, by the types that annotations give to expressions.

A type is the set of the package's classes that an annotation names: ``Iterator[Source]``, ``Source | None`` and
``dict[str, Source]`` are all {Source}. So an iteration, a subscript or a copy keeps the type, and an attribute that is
not annotated has the type of what is assigned to it. A name has one type in a whole function. An expression of unknown
type reads nothing: the rule asks for an annotation where it cannot follow.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

Types = frozenset[str]
_UNKNOWN: Types = frozenset()
_PASSES = 4  # types travel through at most this many assignments of attributes to attributes

# What returns the same elements as it takes.
_SAME = {
    "copy", "deepcopy", "enumerate", "filter", "get", "groupby", "items", "iter", "list", "max", "min", "model_copy",
    "next", "pop", "replace", "_replace", "reversed", "set", "sorted", "tuple", "values", "vars", "zip", "chain",
    "pairwise", "product", "zip_longest",
}  # fmt: skip

_ASSIGNING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem)


class ConfigReads:
    """The reads of fields of sections in some modules."""

    def __init__(self, trees: dict[str, ast.Module]):
        """Infer the types.

        Args:
            trees: parsed modules by dotted name.
        """
        self._bases: dict[str, list[str]] = {}
        self._members: dict[str, dict[str, Types]] = defaultdict(lambda: defaultdict(frozenset))
        self._globals: dict[str, Types] = defaultdict(frozenset)
        self._declared: dict[str, tuple[str, list[str]]] = {}
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._bases[node.name] = [_name(base) for base in node.bases if isinstance(base, ast.Name)]
                    self._declared[node.name] = (module, _fields(node))
        for _ in range(2):  # an alias may name another one
            for tree in trees.values():
                self._declare(tree)
        # By module and class, with all nodes of each.
        self._functions = [
            (module, owner, list(ast.walk(node))) for module, tree in trees.items() for owner, node in _functions(tree)
        ]
        for _ in range(_PASSES):
            for _, owner, nodes in self._functions:
                self._environment(nodes, owner)

    def fields(self) -> dict[tuple[str, str], str]:
        """The module of each field of each section, by the section's class and the field's name."""
        return {
            (name, field): module
            for name, (module, fields) in self._declared.items()
            if "Section" in self._ancestors(name)
            for field in fields
        }

    def read(self, *, but_in: Iterable[str] = ()) -> set[tuple[str, str]]:
        """The fields that some module other than these reads, by class and name; of a derived class those of its base
        are the base's."""
        found = set()
        for module, owner, nodes in self._functions:
            if module in but_in:
                continue
            environment = self._environment(nodes, owner)
            words = {node.value for node in nodes if isinstance(node, ast.Constant)}
            for node in nodes:
                value, names = _read_attributes(node, words)
                types = self._type(value, environment)
                found |= {(of, name) for one in types for of in (one, *self._ancestors(one)) for name in names}
        return found

    def _ancestors(self, name: str) -> list[str]:
        found: list[str] = []
        for base in self._bases.get(name, []):
            found += [base, *self._ancestors(base)]
        return found

    def _declare(self, tree: ast.Module) -> None:
        """Types of what the module and its classes declare."""
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._globals[node.name] |= self._annotation(node.returns)
            elif isinstance(node, ast.AnnAssign):
                self._globals[_name(node.target)] |= self._annotation(node.annotation)
            elif isinstance(node, ast.Assign):
                for target in node.targets:  # an alias, or a class that is made by a call
                    self._globals[_name(target)] |= self._annotation(node.value)
            elif isinstance(node, ast.ClassDef):
                members = self._members[node.name]
                for inner in node.body:
                    if isinstance(inner, ast.AnnAssign):
                        members[_name(inner.target)] |= self._annotation(inner.annotation)
                    elif isinstance(inner, ast.FunctionDef):
                        members[inner.name] |= self._annotation(inner.returns)

    def _annotation(self, node: ast.AST | None) -> Types:
        """The classes that an annotation names."""
        found: set[str] = set()
        for inner in ast.walk(node) if node is not None else ():
            name = _name(inner)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
                name = inner.value
            found |= {name} if name in self._bases else self._globals.get(name, _UNKNOWN)
        return frozenset(found)

    def _environment(self, nodes: list[ast.AST], owner: str | None) -> dict[str, Types]:
        """Types of the names in a function and the functions inside it. Assignments to attributes are kept.

        Args:
            nodes: all of the function, itself first.
            owner: its class.
        """
        environment: dict[str, Types] = defaultdict(frozenset)
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                arguments = node.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    environment[argument.arg] |= self._annotation(argument.annotation)
                if isinstance(node, ast.FunctionDef):
                    environment[node.name] |= self._annotation(node.returns)
        if owner is not None and nodes[0].args.args:
            environment[nodes[0].args.args[0].arg] |= {owner}
        assigning = [node for node in nodes if isinstance(node, _ASSIGNING)]
        for _ in range(_PASSES):
            before = dict(environment)
            for node in assigning:
                self._assign(node, environment)
            if environment == before:
                break
        return environment

    def _assign(self, node: ast.AST, environment: dict[str, Types]) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, environment)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._bind(node.target, node.value, environment)
            if isinstance(node, ast.AnnAssign):
                self._set(node.target, self._annotation(node.annotation), environment)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind(node.target, node.iter, environment)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr, environment)

    def _bind(self, target: ast.AST, value: ast.AST, environment: dict[str, Types]) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) else []
            # The targets of a table of rows, ``for a, b in ((x, y), (z, w))``, are its columns.
            rows = [row.elts for row in values if isinstance(row, ast.Tuple) and len(row.elts) == len(target.elts)]
            for index, one in enumerate(target.elts):
                if rows and len(rows) == len(values):
                    for row in rows:
                        self._bind(one, row[index], environment)
                else:
                    self._bind(one, values[index] if len(values) == len(target.elts) else value, environment)
        else:
            self._set(target, self._type(value, environment), environment)

    def _set(self, target: ast.AST, types: Types, environment: dict[str, Types]) -> None:
        if isinstance(target, ast.Name):
            environment[target.id] |= types
        elif isinstance(target, ast.Starred):
            self._set(target.value, types, environment)
        elif isinstance(target, ast.Attribute):
            for name in self._type(target.value, environment):
                self._members[name][target.attr] |= types

    def _type(self, node: ast.AST | None, environment: dict[str, Types]) -> Types:
        """The classes that an expression, or its elements, may be of."""
        if isinstance(node, ast.Name):
            if node.id in environment:
                return environment[node.id]
            return frozenset({node.id}) if node.id in self._bases else self._globals.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            found = self._member(self._type(node.value, environment), node.attr)
            return found or self._of_module(node, environment)
        if isinstance(node, ast.Call):
            of_function = self._type(node.func, environment)
            if of_function or _name(node.func) not in _SAME:
                return of_function
            taken = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            return self._union(taken, environment)
        if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            return self._type(node.elt, environment)
        if isinstance(node, ast.Lambda):
            return self._type(node.body, environment)
        parts = {
            ast.Subscript: ("value",), ast.Starred: ("value",), ast.NamedExpr: ("value",), ast.BoolOp: ("values",),
            ast.IfExp: ("body", "orelse"), ast.Tuple: ("elts",), ast.List: ("elts",), ast.Set: ("elts",),
            ast.Dict: ("values",), ast.DictComp: ("value",), ast.BinOp: ("left", "right"),
        }.get(type(node), ())  # fmt: skip
        values = [getattr(node, part) for part in parts]
        return self._union((one for of in values for one in (of if isinstance(of, list) else [of])), environment)

    def _union(self, nodes: Iterable[ast.AST], environment: dict[str, Types]) -> Types:
        return _UNKNOWN.union(*(self._type(node, environment) for node in nodes))

    def _member(self, types: Types, attribute: str) -> Types:
        owners = (of for name in types for of in (name, *self._ancestors(name)))
        return _UNKNOWN.union(*(self._members[of].get(attribute, _UNKNOWN) for of in owners))

    def _of_module(self, node: ast.Attribute, environment: dict[str, Types]) -> Types:
        """Of ``module.name``: what the package has under this name."""
        if not isinstance(node.value, ast.Name) or node.value.id in environment:
            return _UNKNOWN
        return frozenset({node.attr}) if node.attr in self._bases else self._globals.get(node.attr, _UNKNOWN)


def unread_config_fields(trees: dict[str, ast.Module]) -> list[str]:
    """Keys of the configuration that no module reads from their section. A rule that only checks a key gives it no
    effect, so the modules of rules do not count.

    Args:
        trees: the modules of the package by dotted name.
    """
    reads = ConfigReads(trees)
    rules = [name for name in trees if re.fullmatch(r"glm46\.config\.(check|rules_\w+)", name)]
    unread = reads.fields().keys() - reads.read(but_in=rules)
    return sorted(f"{reads.fields()[one]}.{'.'.join(one)}" for one in unread)


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _fields(node: ast.ClassDef) -> list[str]:
    return [_name(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign)]


def _functions(tree: ast.Module) -> Iterator[tuple[str | None, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, each with its class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))


def _read_attributes(node: ast.AST, words: set) -> tuple[ast.AST | None, set[str]]:
    """Object and name of ``object.name``; of ``getattr(object, name)`` with a computed name, all words of the
    function."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.value, {node.attr}
    if isinstance(node, ast.Call) and _name(node.func) == "getattr":
        return node.args[0], {node.args[1].value} if isinstance(node.args[1], ast.Constant) else words
    return None, set()
