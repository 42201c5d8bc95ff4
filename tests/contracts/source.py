"""What a wheel's Python sources define, found by ``ast``: nothing of it is imported."""

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Gone(LookupError):
    """A name or an argument that is not in the wheel."""


@dataclass(frozen=True)
class Found:
    """A definition, and the module it stands in."""

    module: str
    node: ast.AST


class Sources:
    """The modules of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Module -> file in the wheel."""
        files = [name for name in self._zip.namelist() if name.endswith(".py")]
        return {f.removesuffix(".py").removesuffix("/__init__").replace("/", "."): f for f in files}

    @cache  # noqa: B019 - as long-lived as the test run
    def tree(self, module: str) -> ast.Module:
        if module not in self._files:
            raise Gone(f"there is no module {module}")
        return ast.parse(self._zip.read(self._files[module]))

    def find(self, path: str) -> Found:
        """``package.module.Class.method``: where that is defined, through imports and bases.

        Raises:
            Gone: some part of the path does not exist.
        """
        parts = path.split(".")
        cut = next(
            (i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in self._files), None
        )
        if cut is None:
            raise Gone(f"there is no module {path}")
        module = ".".join(parts[:cut])
        found = Found(module, self.tree(module))
        for name in parts[cut:]:
            found = self._inside(found, name)
        return found

    def _inside(self, found: Found, name: str) -> Found:
        if isinstance(found.node, ast.Module):
            return self._in_module(found.module, name)
        if isinstance(found.node, ast.ClassDef):
            for owner in self._lineage(found):
                for node in _statements(owner.node):
                    if name in _names(node):
                        return Found(owner.module, node)
        where = ".".join(filter(None, (found.module, getattr(found.node, "name", ""))))
        raise Gone(f"{name} is not in {where}")

    def _in_module(self, module: str, name: str) -> Found:
        if f"{module}.{name}" in self._files:
            return Found(f"{module}.{name}", self.tree(f"{module}.{name}"))
        for node in _statements(self.tree(module)):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(source, alias.name)
                    if alias.name == "*" and source in self._files:
                        try:
                            return self._in_module(source, name)
                        except Gone:
                            continue
            elif name in _names(node):
                return Found(module, node)
        raise Gone(f"{name} is not in {module}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self._files[module].endswith("/__init__.py"):
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _lineage(self, found: Found) -> Iterator[Found]:
        """The class and its bases, as far as they are in the wheel."""
        yield found
        for base in found.node.bases:
            name = ast.unparse(base).split("[")[0]
            try:
                parent = self._in_module(found.module, name.partition(".")[0])
                for part in name.split(".")[1:]:
                    parent = self._inside(parent, part)
            except Gone:
                continue  # torch's, or the standard library's
            if isinstance(parent.node, ast.ClassDef):
                yield from self._lineage(parent)

    def arguments(self, found: Found) -> set[str]:
        """What a function or a class's constructor takes; ``**`` where that is not written down."""
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _arguments(found.node)
        if not isinstance(found.node, ast.ClassDef):
            return {"**"}
        fields: set[str] = set()
        for owner in self._lineage(found):
            for node in owner.node.body:
                if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
                    return fields | _arguments(node)
            for node in owner.node.body:
                if isinstance(node, ast.AnnAssign):
                    fields |= _names(node)
        return fields

    def says(self, module: str) -> set[str]:
        """Every string, annotated name and assigned attribute in a module or a package."""
        inside = [m for m in self._files if m == module or m.startswith(f"{module}.")]
        if not inside:
            raise Gone(f"there is no module {module}")
        said: set[str] = set()
        for name in inside:
            for node in ast.walk(self.tree(name)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    said.add(node.value)
                elif isinstance(node, ast.AnnAssign):
                    said |= _names(node)
                elif _is_stored(node, ast.Attribute):
                    said.add(node.attr)
        return said


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Top-level statements, those within ``if``, ``try`` and ``with`` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _names(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {child.id for child in ast.walk(node) if _is_stored(child, ast.Name)}


def _is_stored(node: ast.AST, kind: type[ast.Name | ast.Attribute]) -> bool:
    return isinstance(node, kind) and isinstance(node.ctx, ast.Store)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    taken = node.args
    names = {arg.arg for arg in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    return names | ({"**"} if taken.kwarg else set())
