"""The power chip of a Raspberry Pi 5, and the counters of processors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# `vcgencmd pmic_read_adc`, shortened: the last three have no current.
RECORDED: Final = """\
     3V7_WL_SW_A current(0)=0.09174404A
       3V3_SYS_A current(1)=0.07417228A
      VDD_CORE_A current(7)=2.13120000A
     3V7_WL_SW_V volt(8)=3.69432000V
       3V3_SYS_V volt(9)=3.30934400V
      VDD_CORE_V volt(15)=0.72155920V
         EXT5V_V volt(24)=5.10464000V
          BATT_V volt(25)=0.00488400V
            HDMI_V volt(23)=5.08710000V
"""
RANGE: Final = 262_143_328_850  # microjoules, of many processors
REPORTS: Final = f"test $1 = pmic_read_adc || exit 1\ncat <<'END'\n{RECORDED}END"


def vcgencmd(folder: Path, script: str = REPORTS) -> Path:
    """Write a `vcgencmd` that is this script."""
    path = folder / "vcgencmd"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def zone(root: Path, folder: str, name: str, microjoules: int | str) -> Path:
    """Write a zone as /sys/class/powercap has it; return its counter."""
    path = root / "class" / "powercap" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"
