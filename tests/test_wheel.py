"""The wheel holds every module of the source tree, and all of them import from it where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("data_prep", "rewards", "trainer")

# Without site's .pth files, and so without the finder of an editable install; libraries come from this environment.
IMPORT_ALL = """
import importlib, sys
target, libraries, *names = sys.argv[1:]
sys.path[:0] = [target, libraries]
found = [finder for finder in sys.meta_path if "Editable" in getattr(finder, "__name__", type(finder).__name__)]
assert not found, f"an editable install would stand in for the wheel: {found}"
for name in names:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name} does not import from the wheel ({error}): is its package in pyproject.toml's list?")
    assert module.__file__.startswith(target), f"{name} is {module.__file__}, not the wheel's"
"""


def run(*command: object, **options) -> None:
    """Run a command to its end; fails with what it said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


def source_files(root: Path) -> set[str]:
    """Return the path inside a wheel of every module below the package's folders."""
    files = (file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    return {f"turngrpo/{file.relative_to(root).as_posix()}" for file in files}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def build(tree: Path, target: Path) -> Path:
    """Build the wheel of a tree with the setuptools of this environment, offline, as a frontend would."""
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    target.mkdir(exist_ok=True)
    run(sys.executable, "-c", code, target, cwd=tree)
    (wheel,) = target.glob("*.whl")
    return wheel


def copy_of_tree(target: Path) -> Path:
    """Copy what a wheel is made of, so that nothing is built in the checkout."""
    target.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target)
    return target


def missing_from(wheel: Path, tree: Path) -> list[str]:
    """Return the modules of a tree that its wheel lacks, and those that it has besides."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    return sorted(packed ^ source_files(tree))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return build(copy_of_tree(folder / "tree"), folder / "dist")


def test_the_wheel_holds_the_modules_of_the_source_tree(wheel):
    wrong = missing_from(wheel, ROOT)
    assert not wrong, f"the wheel and the source tree differ in {wrong}: see packages in pyproject.toml"


def test_every_module_imports_from_the_installed_wheel(wheel, tmp_path):
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:  # a wheel of pure Python is installed by unpacking it
        archive.extractall(installed)
    names = sorted(map(module_name, source_files(ROOT)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    libraries = sysconfig.get_paths()["purelib"]
    run(sys.executable, "-I", "-S", "-c", IMPORT_ALL, installed, libraries, *names, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("package", ["turngrpo.trainer.runs", "turngrpo.rewards"])
def test_a_package_that_is_not_listed_is_missed(package, tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    text = (tree / "pyproject.toml").read_text(encoding="utf-8")
    assert text.count(f'    "{package}",\n') == 1
    (tree / "pyproject.toml").write_text(text.replace(f'    "{package}",\n', ""), encoding="utf-8")
    missing = missing_from(build(tree, tmp_path / "dist"), tree)
    expected = f"{package.replace('.', '/')}/"
    assert missing and all(name.startswith(expected) for name in missing)
