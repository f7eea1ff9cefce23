"""Roles without PyTorch install on 64-bit ARM boards from wheels alone, without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

PROJECT: Final = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
PLATFORMS: Final = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
RESOLVE: Final = ("install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:", "--report", "-")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip, which gives up at once where its index cannot be reached."""
    shared = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "--timeout", "60"]
    return subprocess.run([*shared, *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def _index() -> None:
    """Skip where pip reaches no package index."""
    done = pip(*RESOLVE, "--no-deps", "xxhash")
    if done.returncode:
        pytest.skip(f"pip reaches no package index: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.usefixtures("_index")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_all_dependencies_have_wheels_for_64_bit_arm(tmp_path: Path, python: str) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--implementation", "cp", "--python-version", python, "--target", str(tmp_path)]
    done = pip(*RESOLVE, *platforms, *target, *PROJECT["dependencies"])
    assert done.returncode == 0, done.stderr
    wheels = [each["download_info"]["url"].rpartition("/")[2] for each in json.loads(done.stdout)["install"]]
    assert len(wheels) >= len(PROJECT["dependencies"])
    assert [name for name in wheels if not name.endswith(("aarch64.whl", "-any.whl"))] == []
    assert any(name.startswith("numpy-") and "aarch64" in name for name in wheels)
    assert not any(name.startswith(("torch", "nvidia")) for name in wheels)
