"""The malloc settings, told to a process of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = "from common.node.memory import keep_large_buffers; print(keep_large_buffers())"


@pytest.mark.parametrize("setting", ["", "system"])
def test_glibc_is_told_unless_it_shall_be_left_alone(setting: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, "FEDSTRATA_MALLOC": setting}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    told = platform.libc_ver()[0] == "glibc" and setting != "system"
    assert done.stdout.strip() == str(told)
