"""Find the Python files that a user's classes depend on, whatever their module."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from posbench import paths
from posbench.files.atomic import write_text
from posbench.files.checksums import cache_folder

PLOT_DECORATOR = "plot.styled"
"""Decorator of plotting functions: left out of the hashed code, as they move no number."""
CODE_CACHE = "code.json"
"""Cache file: a checksum of its second line, and the reduced code of Python files."""
MAX_KEPT_FILES = 1000
"""Files whose reduced code is cached: enough for several versions of posbench."""
LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
"""Folders of installed libraries, whose versions are recorded."""


class SourceCode(NamedTuple):
    """The code of a file that can change a result.

    Attributes:
        text: Its content; of Python without comments, docstrings and functions that draw.
        imports: Dotted names of all that it may import by absolute names, with the packages around each.
    """

    text: bytes
    imports: tuple[str, ...] = ()


class ModuleLocation(NamedTuple):
    """Location of a module; a package also has folders, a namespace package only folders."""

    file: Path | None
    folders: list[str] | None


def user_files(classes: Iterable[type]) -> set[Path]:
    """Return the files of classes and their base classes, and of all that these import, however indirectly.

    Imports inside functions count. posbench, the standard library and installed libraries do not, except for
    the installed package of a class itself.
    """
    classes = list(classes)
    own_packages = {cls.__module__.partition(".")[0] for cls in classes}
    pending = [base.__module__ for cls in classes for base in cls.__mro__]
    seen = set[str]()
    files = set[Path]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        location = locate_module(name)
        if location is None or location.file is None:
            continue
        is_own = name.partition(".")[0] in own_packages
        if _is_users(location.file, is_own):
            files.add(location.file)
            pending += _imported_modules(name, location)
    return files


def _is_users(file: Path, is_own: bool) -> bool:
    """Whether a file is a user's; ``is_own``: it is of the package of a class of theirs."""
    if file.is_relative_to(paths.EXPERIMENTS):
        return True  # a paper's, which is read as a user's; in a wheel it lies in the package
    if file.is_relative_to(paths.PACKAGE):
        return False
    if LIBRARY_FOLDERS.intersection(file.parts):
        return is_own
    return not file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def locate_module(name: str) -> ModuleLocation | None:
    """Find the location of a module without importing it; None if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        folders = getattr(module, "__path__", None)
        return _location(file, folders)
    parent = name.rpartition(".")[0]
    search_path: list[str] | None = None
    if parent:
        package = locate_module(parent)
        if package is None or package.folders is None:
            return None
        search_path = package.folders
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search_path)
        if spec:
            file = spec.origin if spec.has_location else None
            return _location(file, spec.submodule_search_locations)
    return None


def _location(file: str | None, folders: Iterable[str] | None) -> ModuleLocation:
    path = Path(file).resolve() if file else None
    if path and not path.is_file():
        path = None
    return ModuleLocation(path, None if folders is None else list(folders))


def _imported_modules(name: str, location: ModuleLocation) -> Iterator[str]:
    """Yield the names of all modules that a module may import, with the packages around each.

    ``from a import b`` may name the module ``a.b``, or an attribute of ``a``.
    """
    package = name if location.folders is not None else name.rpartition(".")[0]
    if location.file is None or location.file.suffix != ".py":
        return
    tree = _parsed(location.file.read_bytes())
    if tree is not None:
        yield from _imported_names(tree, package)


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the same for the syntax tree of a module; ``package`` is the one that relative imports begin at."""
    for node in _statements(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue  # it reaches beyond the outermost package, and fails when it is run
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for imported in names:
            parts = imported.split(".")
            for count in range(1, len(parts) + 1):
                yield ".".join(parts[:count])


def read_code(file: Path) -> SourceCode:
    """Return the code of a file that can change a result, or all of a file that this Python cannot parse."""
    content = file.read_bytes()
    if file.suffix != ".py":
        return SourceCode(content)
    key = hashlib.sha256(_reduction() + content).hexdigest()
    entry = _code_cache().pop(key, None) or _reduced(content)
    if entry is None:
        return SourceCode(content)
    _code_cache()[key] = entry  # the last ones were used last
    text, imports = entry
    return SourceCode(text.encode(), tuple(imports))


def _reduced(content: bytes) -> tuple[str, list[str]] | None:
    """Text and imports of :class:`SourceCode`; None where the content is no Python of this version."""
    tree = _parsed(content)
    if tree is None:
        return None
    imports = sorted(set(_imported_names(tree, package="")))
    for node in [tree, *_statements(tree)]:
        body = getattr(node, "body", None)
        if body:
            node.body = [part for part in body if not (_is_text(part) or _draws(part))]  # type: ignore[attr-defined]
    return ast.unparse(tree), imports


@cache
def _reduction() -> bytes:
    """Return a digest of this module and the Python version, on which the reduced code depends."""
    return Path(__file__).read_bytes() + sys.version.encode()


@cache
def _code_cache() -> dict[str, tuple[str, list[str]]]:
    """Results of :func:`_reduced` by content hash, with those that :func:`keep_code` saved in earlier processes."""
    folder = cache_folder()
    if folder is None:
        return {}
    with suppress(OSError, ValueError):
        checksum, _, text = (folder / CODE_CACHE).read_text("utf-8").partition("\n")
        if checksum == hashlib.sha256(text.encode()).hexdigest():
            kept: dict[str, tuple[str, list[str]]] = json.loads(text)
            _kept_keys().update(kept)
            return kept
    return {}


@cache
def _kept_keys() -> set[str]:
    """Keys of :func:`_code_cache` that its file holds."""
    return set()


def keep_code() -> None:
    """Save the reduced code of files, so that the next process parses only changed ones."""
    folder = cache_folder()
    entries = _code_cache()
    if folder is None or entries.keys() <= _kept_keys():
        return
    text = json.dumps(dict(list(entries.items())[-MAX_KEPT_FILES:]))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CODE_CACHE, f"{checksum}\n{text}")
    _kept_keys().update(entries)


def _parsed(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a module; None if it is not valid in this version of Python."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):
        return None


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside a node, at every depth."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for part in getattr(node, field, None) or ():
            if isinstance(part, ast.stmt):
                yield part
            yield from _statements(part)


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is a string literal: a docstring of its scope, or of the assignment before."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return False
    return isinstance(node.value.value, str)


def _draws(node: ast.stmt) -> bool:
    """Whether a statement defines a function that draws."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator) == PLOT_DECORATOR for decorator in node.decorator_list
    )
