"""Trainings on a device in place of a GPU, in a process of their own.

PyTorch starts the threads of its backward passes once, for the devices that it knows then. And a
device, once it is registered, is there for all later tests of a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.memory_device import why_not

CASES: Final = Path(__file__).parent / "helpers" / "memory_device_cases.py"
TIMEOUT_S: Final = 280.0
PLAIN: Final = "-q -p no:cacheprovider --no-header --color=no"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_no_tensor_stays_behind_and_a_lack_of_memory_is_survived(marked: str) -> None:
    words = [sys.executable, "-m", "pytest", str(CASES), "-m", marked, *PLAIN.split()]
    done = subprocess.run(
        words,
        cwd=CASES.parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
