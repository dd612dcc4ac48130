"""The house keeps its shape: layers, one command line, one vocabulary."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from posbench import paths

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "posbench"
EXPERIMENTS = ROOT / "experiments"
PAPERS = {file.parent.name for file in EXPERIMENTS.glob("*/__init__.py")}
FILES = sorted([*PACKAGE.rglob("*.py"), *EXPERIMENTS.rglob("*.py")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAYERS = PROJECT["tool"]["posbench"]["layers"]
GROUND = {"errors", "late", "paths", "renamed", "schema", "versions"}


def module_of(file: Path) -> str:
    root = EXPERIMENTS if file.is_relative_to(EXPERIMENTS) else ROOT
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def layer_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] in PAPERS:
        return parts[0]
    return "api" if len(parts) == 1 else "ground" if parts[1] in GROUND else parts[1]


def layers_below(own: str) -> set[str]:
    """What a layer may import from: itself and those on its left; a paper from studies and those on their left."""
    last = "studies" if own in PAPERS else own
    return {own, *LAYERS[: LAYERS.index(last) + 1]}


def test_no_file_is_read_or_written_in_the_encoding_of_the_locale() -> None:
    """Windows has another one than the files."""
    unnamed = re.compile(r"\.read_text\(\)|\.write_text\([^\"',]*\)")
    found = [
        f"{file}:{number}"
        for file in sorted(paths.PACKAGE.rglob("*.py"))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if unnamed.search(line)
    ]
    assert not found


def imports(file: Path) -> list[tuple[int, str]]:
    """Line and name of every module of ours that a file imports, late and type-only imports included.

    A string that names a module counts, too: it may be imported by its name.
    """
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = named_module(node.value)
            if module:
                found.append((node.lineno, module))
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            # ``from posbench.model import rope`` is a module; ``from posbench.model.lm import LM`` a name.
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name
                if (ROOT / name.replace(".", "/")).is_dir() or file_of(name)
                else str(node.module)
                for name in whole
            ]
        found += [
            (node.lineno, name)
            for name in names
            if name.split(".")[0] in {"posbench", *PAPERS}
        ]
    return found


def named_module(text: str) -> str | None:
    """The module that a string is the dotted name of, or of something in it; None for any other text."""
    if not re.fullmatch(rf"(posbench|{'|'.join(PAPERS)})(\.\w+)+(:\w+)?", text):
        return None
    module = text.partition(":")[0]
    while module.count("."):
        if file_of(module):
            return module
        module = module.rpartition(".")[0]
    return None


def file_of(module: str) -> Path | None:
    root = EXPERIMENTS if module.split(".")[0] in PAPERS else ROOT
    path = root / module.replace(".", "/")
    there = [f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()]
    return there[0] if there else None


def test_every_package_has_a_layer() -> None:
    there = {layer_of(module_of(file)) for file in FILES} - {"api"}
    assert there == {*LAYERS, *PAPERS} and PAPERS


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix()
)
def test_imports_go_to_the_left(file: Path) -> None:
    own = layer_of(module_of(file))
    if own == "api":
        return  # the public API stands on everything, and nothing on it, as the next line asserts
    allowed = layers_below(own)
    wrong = [
        f"line {line}: {name}"
        for line, name in imports(file)
        if layer_of(name) not in allowed
    ]
    assert not wrong


def test_no_circle_between_modules() -> None:
    edges = defaultdict(set)
    for file in FILES:
        edges[module_of(file)] |= {name for _, name in imports(file)} - {
            module_of(file)
        }
    left = dict(edges)
    while left:
        free = [module for module, needed in left.items() if not needed & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_one_command_line() -> None:
    assert PROJECT["project"]["scripts"] == {"posbench": "posbench.cli.main:run"}
    for file in FILES:
        tree = ast.parse(file.read_text())
        modules = {
            (alias.name if isinstance(node, ast.Import) else str(node.module)).split(
                "."
            )[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if module_of(file) != "posbench.pipeline.multirun":  # mends Hydra's parser
            assert not modules & {"argparse", "optparse", "click", "typer"}, file
        assert "__main__" not in file.read_text().replace("lm_eval.__main__", ""), file
        # Composing a config is one public function.
        reads_arguments = module_of(file) in {
            f"posbench.pipeline.{n}" for n in ("compose", "arguments", "multirun")
        }
        assert "hydra" not in modules or reads_arguments, file


def test_the_formatter_is_off_for_data_tables_alone() -> None:
    off = [
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if re.search(r"# fmt: (off|skip)", file.read_text())
    ]
    assert set(off) <= {"posbench/model/families.py", "posbench/embedded/recipe.py"}


def test_makefile() -> None:
    text = (ROOT / "Makefile").read_text()
    named = re.findall(r"^([a-z][a-z-]*):", text, re.M)
    assert len(named) <= 13


WORDS = {
    "lean",
    "leans",
    "mend",
    "mended",
    "mends",
    "hand-over",
    "in_words_of_the_whole",
    "uses_search",
    "spans.py",
}
TEXTS = [
    *FILES,
    *(ROOT / "conf").rglob("*.yaml"),
    *(ROOT / "experiments").rglob("*.yaml"),
    *(ROOT / "docs").rglob("*.md"),
]
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_one_vocabulary() -> None:
    for file in TEXTS:
        text = file.read_text()
        assert "python -m posbench" not in text, file
        assert not WORDS & set(re.findall(r"[\w.-]+", text)), file


def names_in(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines, imports or sets, also those of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_docstrings_refer_to_names_that_exist() -> None:
    texts = {file: file.read_text() for file in FILES}
    names = {name for text in texts.values() for name in names_in(ast.parse(text))}
    names |= {module_of(file).rpartition(".")[2] for file in FILES}
    unknown = []
    for file, text in texts.items():
        for target in re.findall(
            r":(?:func|meth|class|attr|data|mod|exc):`~?(.+?)`", text
        ):
            # Names of other packages, as "torch.nn.Module", are theirs.
            own_package = target.split(".")[0] in {"posbench", *PAPERS}
            is_ours = own_package or target.count(".") < 2
            if is_ours and target.rpartition(".")[2] not in names:
                unknown.append(f"{file.relative_to(ROOT)}: {target}")
    assert not unknown
