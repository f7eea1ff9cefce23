"""The instructions of a host's processor, on which bits depend, and where a run and its readers
have them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.processor import LIMITS, instructions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma avx512f avx512bw avx512dq avx512vl\n", "AVX-512"),
        ("flags : fpu avx2 fma avx512f\n", "AVX2"),  # a part of AVX-512, as some processors have it
        ("flags : fpu avx\n", None),
        ("processor : 0\nFeatures : fp asimd evtstrm\n", "NEON"),
        ("Features : fp asimd sve\n", "SVE"),
        ("nothing that is known\n", None),
    ],
)
def test_the_first_kind_that_a_processor_has(
    text: str, expected: str | None, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert instructions(tmp_path, {}) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (LIMITS, "AVX2"),
        ({**LIMITS, "ONEDNN_MAX_CPU_ISA": "ALL"}, "AVX-512"),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "AVX-512"),
    ],
)
def test_avx_512_is_held_back_by_all_limits_together(
    environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2 fma avx512f avx512bw avx512dq avx512vl\n")
    assert instructions(tmp_path, environment) == expected


def test_a_host_without_that_file_has_none(tmp_path: Path) -> None:
    assert instructions(tmp_path) is None


def test_a_run_has_those_of_its_host(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({"name": "here"}), direct=True)
    folder.release()
    assert json.loads((folder.path / "manifest.json").read_text())["instructions"] == instructions()
