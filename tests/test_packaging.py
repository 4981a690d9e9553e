"""The wheel and the sdist: what is in them, and that the wheel works far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import pytest

import specdepth

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIRS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
TOP_FOLDERS = sorted(folder for package, folder in PACKAGE_DIRS.items() if package.count(".") <= 1)


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the project as git would commit them: no build output, nothing ignored."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the sdist of the tracked files, built without network."""
    # A copy, since setuptools keeps a build/ folder from which deleted files return to the wheel.
    source = tmp_path_factory.mktemp("source")
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist"),
        *("--outdir", str(out), "."),
        cwd=source,
    )
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel installed in it, as in site-packages."""
    target = tmp_path_factory.mktemp("site")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--disable-pip-version-check", "--no-compile", "--target", str(target), str(wheel)),
        cwd=target,
    )
    return target


def in_wheel(name: str) -> str | None:
    """Where the wheel keeps the project's file `name`; None if it belongs to no package."""
    for folder in TOP_FOLDERS:
        if name.startswith(f"{folder}/"):
            inner = name.removeprefix(f"{folder}/")
            return f"specdepth/{inner}" if folder.startswith("src/") else f"specdepth/{name}"
    return None


def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_each_tracked_file_of_the_packages_and_nothing_else(
    tracked: list[str], wheel: Path
) -> None:
    expected = sorted(filter(None, map(in_wheel, tracked)))
    packaged = sorted(name for name in wheel_names(wheel) if ".dist-info/" not in name)
    assert packaged == expected
    assert "specdepth/py.typed" in packaged


def test_the_wheel_holds_the_files_unchanged(tracked: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in tracked:
            packaged = in_wheel(name)
            if packaged is not None:
                assert archive.read(packaged) == (ROOT / name).read_bytes(), name


def test_no_file_of_the_packages_is_ignored_by_git(tracked: list[str]) -> None:
    on_disk = {
        path.relative_to(ROOT).as_posix()
        for folder in TOP_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # temporary files of atomic writes come and go
    unknown = {name for name in on_disk - set(tracked) if (ROOT / name).exists()}
    assert not unknown


def test_each_folder_with_code_is_listed_as_a_package() -> None:
    found = {
        PurePosixPath(init.parent.relative_to(ROOT)).as_posix()
        for folder in TOP_FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(PACKAGES) == sorted(PACKAGE_DIRS)
    assert found == set(PACKAGE_DIRS.values())


def test_wheel_sdist_and_package_agree_on_the_version(dist: Path, wheel: Path) -> None:
    version = specdepth.__version__
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"specdepth-{version}.dist-info/METADATA"))
    assert metadata["Version"] == version
    assert metadata["Name"] == "specdepth"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (dist / f"specdepth-{version}.tar.gz").is_file()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    info = f"specdepth-{specdepth.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert "specdepth = specdepth.agents.cli:main" in commands


def test_the_sdist_holds_all_that_the_wheel_is_built_from(tracked: list[str], dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    needed = {name for name in tracked if in_wheel(name) is not None}
    assert needed | {"pyproject.toml", "LICENSE", "README.md"} <= names


def test_the_installed_wheel_imports_from_its_own_place(site: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, sys, pathlib\n"
        "site = pathlib.Path(sys.argv[1]).resolve()\n"
        "for name in sys.argv[2:]:\n"
        "    file = pathlib.Path(importlib.import_module(name).__file__).resolve()\n"
        "    assert file.is_relative_to(site), (name, file)\n"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    run(sys.executable, "-c", code, str(site), *PACKAGES, cwd=tmp_path, env=env)


def test_a_checkout_in_the_working_directory_does_not_shadow_the_wheel(
    site: Path, tmp_path: Path
) -> None:
    (tmp_path / "specdepth" / "scheduler").mkdir(parents=True)
    code = "import specdepth.scheduler, sys; print(specdepth.scheduler.__file__)"
    env = os.environ | {"PYTHONPATH": str(site)}
    printed = run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert Path(printed.strip()).is_relative_to(site)


def test_python_dash_m_specdepth_shows_its_commands(site: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(site)}
    shown = run(sys.executable, "-m", "specdepth", "--help", cwd=tmp_path, env=env)
    for command in ("demo", "profile", "train", "evaluate", "export", "generate"):
        assert command in shown


def test_type_checkers_are_shown_each_file_of_the_package() -> None:
    hints = ROOT / ".types" / "specdepth"
    shown = {entry.name: entry.resolve() for entry in hints.iterdir()}
    front = {
        path.name: path.resolve()
        for path in (ROOT / "src" / "specdepth").iterdir()
        if path.name != "__pycache__"
    }
    folders = {folder: (ROOT / folder).resolve() for folder in TOP_FOLDERS if "/" not in folder}
    assert shown == front | folders
    assert not any(os.path.isabs(os.readlink(entry)) for entry in hints.iterdir())
