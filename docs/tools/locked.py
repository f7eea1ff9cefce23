"""Generator of the exact versions in `deploy/locked`, with the hashes of all files of each: `make
lock`.

    python -m docs.tools.locked             keep the files' versions where `pyproject.toml` permits
    python -m docs.tools.locked --newest    take the newest

A file is a set of packages: `base` is what every role needs, that of an extra what it needs beside
`base`, and `dev` what tests and checks need beside all others. They hold for every system and
Python; no file names an index, so that a mirror of PyPI will do. PyTorch's own packages are files
of their own, one for each build, and one of PyPI's last CPU build for aarch64: a set that needs
PyTorch has what all builds need.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "deploy" / "locked"
PROJECT: Final = ROOT / "pyproject.toml"
CPU_INDEX: Final = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
CPU: Final = "torch-cpu"
# PyPI's wheels for aarch64 are CPU builds up to these, and bring CUDA from torch 2.12 on.
BOARD: Final = "torch-aarch64"
BOARD_NEEDS: Final = "torch>=2.10,<2.11\ntorchvision>=0.25,<0.26\n"
LOWEST_PYTHON: Final = "3.11"
# What builds the project besides its own requirements: editable, for a clone that is worked on.
EDITABLE: Final = "editables"
# The sets of extras, each without what `base` has; `dev` has all extras, and comes last.
EXTRAS: Final = ("learning", "embedded", "report", "methods", "docs")
COMPILE: Final = (
    sys.executable,
    "-m",
    "uv",
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--python-version",
    LOWEST_PYTHON,
    "--generate-hashes",
    "--no-annotate",
    "--no-header",
    "--no-emit-index-url",
    "--no-sources",
)
HEADER: Final = "# Made by `make lock`. Installed by deploy/locked/install.sh.\n"
UNHASHED: Final = "# Without hashes: the index of CPU builds gave none.\n"


def blocks(text: str) -> list[str]:
    """Return the requirements of a file, each with its continued lines: `name==version ; marker`,
    then its hashes.
    """
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if line.startswith(" "):
            found[-1] += line
        else:
            found.append(line)
    return found


def name_of(block: str) -> str:
    """Return the name of the package that a requirement names."""
    return block.partition("==")[0]


def is_pytorch(name: str) -> bool:
    """Return whether a package belongs to PyTorch's build, or to the libraries of CUDA that one of
    them needs.
    """
    return name in {"torch", "torchvision", "triton"} or name.startswith(("nvidia-", "cuda-"))


def compiled(
    words: Iterable[str], *, given: str = "", kept: str = "", constraints: str = ""
) -> list[str]:
    """Return the requirements that uv finds for its words, and for those `given` as the lines of a
    file.

    Those of `kept` are preferred, those of `constraints` binding. Exits if uv fails.
    """
    with tempfile.TemporaryDirectory() as home:
        out, bound = Path(home) / "out.txt", Path(home) / "constraints.txt"
        out.write_text(kept, encoding="utf-8")
        bound.write_text(constraints, encoding="utf-8")
        line = [*COMPILE, "--constraint", str(bound), "--output-file", str(out), *words]
        done = subprocess.run(
            line, input=given, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        return blocks(out.read_text(encoding="utf-8"))


def beside(found: Sequence[str], *others: Sequence[str]) -> list[str]:
    """Return the requirements that none of the other sets has."""
    known = {block for other in others for block in other}
    return [block for block in found if block not in known]


def of_index(versions: Mapping[str, str]) -> str:
    """Return the file of PyTorch's CPU builds: with the hashes of their index, without if it is out
    of reach.
    """
    lines = "".join(f"{name}=={version}\n" for name, version in versions.items())
    line = [*COMPILE, "--no-deps", "--default-index", CPU_INDEX, "-"]
    done = subprocess.run(line, input=lines, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        lines = done.stdout
    if "--hash=" in lines:
        return HEADER + lines
    print(f"torch-cpu.txt has no hashes: {CPU_INDEX} gave none. {done.stderr}", file=sys.stderr)
    return HEADER + UNHASHED + lines


def main() -> None:
    """Write all files, or none."""
    kept = ""
    board_kept = ""
    if "--newest" not in sys.argv[1:]:
        files_kept = [
            path for path in sorted(FOLDER.glob("*.txt")) if path.stem not in (CPU, BOARD)
        ]
        kept = "".join(path.read_text(encoding="utf-8") for path in files_kept)
        board_kept = (FOLDER / f"{BOARD}.txt").read_text(encoding="utf-8")
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    building = "\n".join([*project["build-system"]["requires"], EDITABLE])
    everything = "".join(compiled([str(PROJECT), "--extra", "dev", "-"], given=building, kept=kept))
    base = compiled([str(PROJECT)], constraints=everything)
    sets = {"base": base, "build": compiled(["-"], given=building, constraints=everything)}
    for extra in EXTRAS:
        sets[extra] = beside(
            compiled([str(PROJECT), "--extra", extra], constraints=everything), base
        )
    pytorch = [block for block in sets["learning"] if is_pytorch(name_of(block))]
    sets["torch"] = pytorch
    sets["learning"] = beside(sets["learning"], pytorch)
    development = compiled([str(PROJECT), "--extra", "dev"], constraints=everything)
    sets["dev"] = beside(development, *sets.values())
    sets[BOARD] = compiled(["--no-deps", "-"], given=BOARD_NEEDS, kept=board_kept)
    files = {name: HEADER + "".join(found) for name, found in sets.items()}
    versions = {}
    for block in pytorch:
        name, _, rest = block.partition("==")
        if name in {"torch", "torchvision"}:
            versions[name] = rest.split()[0]
    files[CPU] = of_index(versions)
    for name, text in files.items():
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
