"""Whether the tests of Prometheus's rules notice a change of each: of numbers, comparisons, sums,
labels and times.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.helpers.monitoring import SHIPPED, needs_prometheus

CASES: Final = "alerts_test.yml"
FILES: Final = ("rules.yml", "alerts.yml")
COMPARED: Final = {
    "> ": (">= ", "< "),
    "< ": ("<= ", "> "),
    "== 0": ("!= 0", "== 1"),
    "== 1": ("!= 1", "== 0"),
}
SUMMED: Final = {"sum by": "max by", "max by": "min by", "min by": "max by", "max_over": "min_over"}
pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(600)]


def changed(expr: str) -> Iterator[str]:
    """Yield an expression with one change each."""
    for words in (COMPARED, {old: (new,) for old, new in SUMMED.items()}):
        for old, every in words.items():
            for at in (match.start() for match in re.finditer(re.escape(old), expr)):
                for new in every:
                    yield expr[:at] + new + expr[at + len(old) :]
    # bounds and factors
    for match in re.finditer(r"(?<![\w.:])\d+(?:\.\d+)?(?:e\d+)?(?![\w.:])", expr):
        if match[0] not in ("0", "1"):
            for factor in (0.9, 1.1):
                yield expr[: match.start()] + repr(float(match[0]) * factor) + expr[match.end() :]
    for match in re.finditer(r"\[(\d+)m\]", expr):
        for seconds in (30 * int(match[1]), 120 * int(match[1])):
            yield expr[: match.start()] + f"[{seconds}s]" + expr[match.end() :]
    for match in re.finditer(r'\b(\w+)(=|!=|=~)"([^"]+)"', expr):
        yield expr[: match.start()] + f'{match[1]}{match[2]}"x{match[3]}"' + expr[match.end() :]
    for match in re.finditer(r"by \(([\w, ]+)\)", expr):
        labels = match[1].split(", ")
        for label in labels:
            left = ", ".join(each for each in labels if each != label)
            yield expr[: match.start(1)] + left + expr[match.end(1) :]


def mutants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a file of rules with one change in one rule, and what was changed."""
    for file in FILES:
        text = (SHIPPED / file).read_text()
        for number, rule in enumerate(yaml.safe_load(text)["groups"][0]["rules"]):
            changes = [{"expr": expr} for expr in changed(rule["expr"])]
            if "for" in rule:
                seconds = int(rule["for"][:-1]) * (60 if rule["for"][-1] == "m" else 1)
                changes += [{"for": f"{seconds - 10}s"}, {"for": f"{seconds + 10}s"}]
            if "alert" in rule:
                changes.append({"labels": {"severity": "other"}})
            for change in changes:
                made = yaml.safe_load(text)
                made["groups"][0]["rules"][number] |= change
                yield f"{rule.get('record') or rule['alert']}: {change}", file, made


def last_s(case: dict[str, Any]) -> int:
    """Return when a case looks last, in seconds."""
    looks = [*case.get("promql_expr_test", ()), *case.get("alert_rule_test", ())]
    times = [str(look["eval_time"]) for look in looks]
    return max(int(time[:-1]) * (60 if time[-1] == "m" else 1) for time in times)


def unnoticed(
    folder: Path, mutant: tuple[str, str, dict[str, Any]], cases: list[dict[str, Any]]
) -> str | None:
    what, file, made = mutant
    for name in FILES:
        shutil.copyfile(SHIPPED / name, folder / name)
    (folder / file).write_text(yaml.safe_dump(made))
    for case in cases:
        (folder / CASES).write_text(yaml.safe_dump(case))
        words = ["promtool", "test", "rules", CASES]
        if subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode:
            return None
    return what


def test_each_change_of_a_rule_is_noticed(tmp_path: Path) -> None:
    whole = yaml.safe_load((SHIPPED / CASES).read_text())
    # one by one, the short ones first: two cases of 40 minutes are half of the CPU seconds
    cases = [{**whole, "tests": [case]} for case in sorted(whole["tests"], key=last_s)]
    every = list(mutants())
    folders = [tmp_path / str(number) for number in range(len(every))]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        looked = pool.map(unnoticed, folders, every, [cases] * len(every))
        found = [what for what in looked if what is not None]
    assert found == [] and len(every) > 100
