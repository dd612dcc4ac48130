"""Which files a user's class is made of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posbench import paths
from posbench.files import imports
from posbench.files.imports import user_files
from posbench.methods import ScaleChannel
from yu2025.layer_selection import LayerSelection

FILES = {
    "users_method.py": """
import json
import torch
from posbench.methods import ScaleChannel
import users_package.inside.deep as deep
from users_package import sibling
from users_base import Base

class Mine(Base):
    def changed(self, lm):
        import users_lazy
        try:
            import no_such_module_of_theirs
        except ImportError:
            pass
""",
    "users_base.py": "from posbench.methods import ScaleChannel\nclass Base(ScaleChannel): pass\n",
    "users_lazy.py": "from users_end import *\n",
    "users_end.py": "import users_method\n",
    "users_unused.py": "",
    "users_package/__init__.py": "",
    "users_package/sibling.py": "from . import relative\nfrom .inside import more\n",
    "users_package/relative.py": "",
    "users_package/inside/__init__.py": "",
    "users_package/inside/deep.py": "from ..other import NUMBER\nfrom ....beyond import x\n",
    "users_package/inside/more.py": "",
    "users_package/other.py": "NUMBER = 1\n",
    "users_package/unused.py": "",
}
UNUSED = {"users_unused.py", "users_package/unused.py"}
FAILS_WHEN_RUN = "from ....beyond import x\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Writes modules into a folder that they can be imported from."""
    before = set(sys.modules)

    def write_files(files: dict[str, str], folder: str = "code") -> Path:
        root = tmp_path / folder
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(root))
        return root

    yield write_files
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def test_all_that_a_class_imports_counts_and_nothing_else(write: Callable) -> None:
    deep = "users_package/inside/deep.py"
    root = write({**FILES, deep: FILES[deep].replace(FAILS_WHEN_RUN, "")})
    cls = importlib.import_module("users_method").Mine
    (root / deep).write_text(FILES[deep])
    found = {file.relative_to(root).as_posix() for file in user_files([cls])}
    assert found == FILES.keys() - UNUSED
    assert "users_lazy" not in sys.modules, "nothing is imported for it"


def test_the_package_of_an_installed_class_counts_and_other_libraries_do_not(
    write: Callable,
) -> None:
    root = write(
        {
            "users_plugin/__init__.py": "",
            "users_plugin/method.py": "import users_library\nfrom . import helper\nclass Mine: pass\n",
            "users_plugin/helper.py": "",
            "users_library.py": "",
        },
        "site-packages",
    )
    cls = importlib.import_module("users_plugin.method").Mine
    names = {"__init__.py", "method.py", "helper.py"}
    assert user_files([cls]) == {root / "users_plugin" / name for name in names}


def test_a_file_that_cannot_be_parsed_counts_itself(write: Callable) -> None:
    root = write(
        {
            "users_two.py": "try:\n    import users_old\nexcept SyntaxError:\n    pass\nclass Mine: pass\n",
            "users_old.py": "print 'Python 2'\n",
        }
    )
    cls = importlib.import_module("users_two").Mine
    assert user_files([cls]) == {root / "users_two.py", root / "users_old.py"}


def test_classes_of_posbench_need_no_files() -> None:
    assert user_files([ScaleChannel]) == set()


@pytest.mark.parametrize("installed", [False, True])
def test_a_papers_modules_are_followed_as_a_users(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:  # a wheel has the papers inside the package
        monkeypatch.setattr(paths, "PACKAGE", paths.EXPERIMENTS.parent)
    found = user_files([LayerSelection])
    # layer_selection imports ablations, and that one common.
    names = ("__init__.py", "layer_selection.py", "ablations.py", "common.py")
    assert found == {paths.EXPERIMENTS / "yu2025" / name for name in names}


@pytest.fixture
def new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Forgets what this process read of files; its cache folder is one of the test's own."""
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "cache"))

    def forget() -> None:
        imports._code_cache.cache_clear()
        imports._kept_keys.cache_clear()

    forget()
    yield forget
    forget()


def test_code_from_the_cache_is_the_code_of_the_file(
    tmp_path: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(paths.PACKAGE.glob("*/*.py"))[:40]
    read = [imports.read_code(file) for file in files]
    imports.keep_code()
    new_process()
    with monkeypatch.context() as patch:
        patch.setattr(imports, "_parsed", lambda content: pytest.fail("parsed again"))
        assert [imports.read_code(file) for file in files] == read
    kept = tmp_path / "cache" / imports.CODE_CACHE
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged in (bytes(data), data[:1000], b"", b"\xff\n{}"):
        kept.write_bytes(damaged)
        new_process()
        assert [imports.read_code(file) for file in files] == read


def test_comments_and_docstrings_do_not_count_and_all_else_does(
    tmp_path: Path, new_process: Callable[[], None]
) -> None:
    file = tmp_path / "code.py"
    texts = []
    for source in (
        "x = 1\n",
        "x = 1\n",
        '"""A docstring."""\n# A comment.\nx = (1)\n',
        "x = 2\n",
        "x = 1\nimport os.path\n",
    ):
        file.write_text(source)
        texts.append(imports.read_code(file).text)
        imports.keep_code()
        new_process()
    assert texts[0] == texts[1] == texts[2] == b"x = 1"
    assert texts[3:] == [b"x = 2", b"x = 1\nimport os.path"]
    assert imports.read_code(file).imports == ("os", "os.path")


def test_the_cache_of_code_is_bounded(
    tmp_path: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "MAX_KEPT_FILES", 3)
    file = tmp_path / "code.py"
    for number in range(6):
        file.write_text(f"x = {number}")
        imports.read_code(file)
        imports.keep_code()
        new_process()
    assert [text for text, _ in imports._code_cache().values()] == [
        "x = 3",
        "x = 4",
        "x = 5",
    ]
