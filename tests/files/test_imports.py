"""Which files a user's class is made of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posbench import paths
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
    assert found == {
        paths.EXPERIMENTS / "yu2025" / name
        for name in ("__init__.py", "layer_selection.py", "ablations.py")
    }
