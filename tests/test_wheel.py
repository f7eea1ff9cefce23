"""What is built: one package, `fedstrata`, from a checkout and from a source distribution alike."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.commands import invoke

ROOT = Path(__file__).parents[1]
ROOMS = ("cloud", "common", "deploy", "device", "institution")
BUILD = (
    "import sys; from hatchling import build as b; print(getattr(b, "
    "f'build_{sys.argv[1]}')(sys.argv[2]))"
)


def built(kind: str, source: Path, out: Path) -> Path:
    words = [sys.executable, "-P", "-c", BUILD, kind, str(out)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=True)
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    subprocess.run(["tar", "-xf", built("sdist", ROOT, folder), "-C", folder], check=True)
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def installed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a wheel of a source distribution installs."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built("wheel", unpacked, folder)) as wheel:
        wheel.extractall(folder)
    return folder


def names_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix != ".whl" and path.is_file()
    }


def test_a_wheel_has_nothing_beside_fedstrata(installed: Path) -> None:
    names = names_in(installed)
    assert {name.partition("/")[0] for name in names} == {"fedstrata", "fedstrata-0.1.0.dist-info"}
    files = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sources = {f"fedstrata/{name}" for name in files.stdout.split()}
    left_out = {
        "prometheus/alerts_test.yml",
        "locked/build.txt",
        "locked/dev.txt",
        "locked/docs.txt",
    }
    assert sources - names == {f"fedstrata/deploy/{name}" for name in left_out}


def test_a_checkouts_wheel_is_that_of_its_source_distribution(
    installed: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(built("wheel", ROOT, tmp_path)) as wheel:
        assert {info.filename for info in wheel.infolist() if not info.is_dir()} == names_in(
            installed
        )


def test_a_kit_is_made_of_a_built_wheel(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(
        'name = "rack"\nbroker = "main"\ntls = false\nbrokers = { main = { machine = "server" } }\n'
        'machines = { server = { address = "127.0.0.1", cloud = true } }\n'
    )
    kits = tmp_path / "kits"
    done = invoke(
        "provision", tmp_path / "lab.toml", "--wheel", built("wheel", ROOT, tmp_path), "--out", kits
    )
    assert done.exit_code == 0, done.stderr
    kept = {path.name for path in (kits / "server" / "locked").iterdir()}
    assert {"install.sh", "base.txt", "learning.txt"} <= kept and "dev.txt" not in kept


def test_an_installed_fedstrata_imports_none_of_the_users_packages(
    installed: Path, tmp_path: Path
) -> None:
    """Beside packages, and in a folder with files, of the same names as its rooms."""
    for name in ROOMS:
        (installed / name).mkdir(exist_ok=True)
        (installed / name / "__init__.py").write_text("raise SystemExit('a package of the user')\n")
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    code = (
        "import sys\n"
        "sys.argv[1:] = ['run', 'demo', '--direct', '--set', 'rounds=1', '--runs', "
        f"{str(tmp_path / 'runs')!r}]\n"
        "from fedstrata.deploy.cli.main import app\n"
        "app(standalone_mode=False)\n"
        f"wrong = [name for name in sys.modules if name.partition('.')[0] in {ROOMS!r}]\n"
        "sys.exit(', '.join(wrong) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "model.safetensors").exists() and str(installed) not in (
        run / "manifest.json"
    ).read_text()


@pytest.mark.parametrize("made", ["nothing", "a link", "a text"])
def test_a_checkout_imports_its_own_files_whatever_its_links_are(tmp_path: Path, made: str) -> None:
    (tmp_path / "fedstrata").mkdir()
    (tmp_path / "fedstrata" / "__init__.py").write_bytes(
        (ROOT / "fedstrata" / "__init__.py").read_bytes()
    )
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("print(__name__, __file__)")
    if made == "a link":  # of `make links`
        (tmp_path / "fedstrata" / "common").symlink_to("../common")
    if made == "a text":  # as Git writes a link where there are none
        (tmp_path / "fedstrata" / "common").write_text("../common")
    words = [sys.executable, "-P", "-c", "import fedstrata.common"]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"fedstrata.common {tmp_path / 'common' / '__init__.py'}\n", done.stderr
