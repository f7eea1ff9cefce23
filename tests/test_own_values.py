"""What files of own code keep: their globals and classes, compared by value."""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.common.settings.own_values import changed, kept_in_files

TEXT = """
import itertools, random, threading
import numpy as np
import torch
import {beside}
from functools import lru_cache

NUMBER, TEXT, TABLE = 1, "a", {{"a": [1]}}
COUNT = itertools.count()
ARRAY, TENSOR = np.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
GENERATORS = [np.random.default_rng(1), random.Random(1), torch.Generator()]
LAYER = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
LOCK = threading.Lock()

def numbers():
    n = 0
    while True:
        n += 1
        yield n

NUMBERS = numbers()

class Net:
    calls = 0
    def __init__(self):
        self.lock, self.inside = threading.Lock(), 0
    def forward(self, x, seen=[]):
        return x

OBJECT = Net()
SELF = [OBJECT]
SELF.append(SELF)

def counting():
    seen = [0]
    def count():
        seen[0] += 1
        return count
    return count

COUNTER = counting()

@lru_cache
def table(n):
    return n
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "besides.py").write_text("KEPT = []\n")
    (tmp_path / "keepers.py").write_text(TEXT.format(beside="besides"))
    import keepers  # type: ignore[import-not-found]

    return keepers


CHANGES: dict[str, Callable[[Any], object]] = {
    "keepers.NUMBER": lambda file: setattr(file, "NUMBER", 2),
    "keepers.TEXT": lambda file: setattr(file, "TEXT", "b"),
    "keepers.TABLE": lambda file: file.TABLE["a"].append(1),
    "keepers.NEW": lambda file: setattr(file, "NEW", 1),
    "keepers.COUNT": lambda file: next(file.COUNT),
    "keepers.ARRAY": lambda file: file.ARRAY.__setitem__(1, 1),
    "keepers.TENSOR": lambda file: file.TENSOR.add_(1),
    "keepers.GENERATORS": lambda file: file.GENERATORS[2].manual_seed(7),
    "keepers.LAYER": lambda file: file.LAYER.eval(),
    "keepers.NUMBERS": lambda file: (next(file.NUMBERS), next(file.NUMBERS)),
    "keepers.Net.calls": lambda file: setattr(file.Net, "calls", 1),
    "keepers.Net.forward": lambda file: file.Net.forward.__defaults__[0].append(1),
    "keepers.table": lambda file: setattr(file.table, "marked", 1),
    "keepers.COUNTER": lambda file: file.COUNTER(),
    "besides.KEPT": lambda file: file.besides.KEPT.append(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_named(name: str, files: Any) -> None:
    before = kept_in_files(["keepers:Net"])
    assert changed(before, kept_in_files(["keepers:Net"])) == []
    CHANGES[name](files)
    assert changed(before, kept_in_files(["keepers:Net"])) == (
        [] if name == "keepers.table" else [name]
    )


def test_what_an_object_keeps_beside_what_cannot_be_pickled_is_compared(files: Any) -> None:
    before = kept_in_files(["keepers:Net"])
    files.OBJECT.inside += 1
    assert changed(before, kept_in_files(["keepers:Net"])) == ["keepers.OBJECT", "keepers.SELF"]


def test_a_cache_that_fills_is_no_change(files: Any) -> None:
    before = kept_in_files(["keepers:Net"])
    files.table(3)
    assert changed(before, kept_in_files(["keepers:Net"])) == []


def test_installed_packages_and_fedstratas_own_are_not_looked_at(files: Any) -> None:
    found = {label.partition(".")[0] for label in kept_in_files(["keepers:Net"])}
    assert found == {"keepers", "besides"}
    assert kept_in_files([]) == kept_in_files(["absent:Net"]) == {}


VALUES = (
    weakref.ref(Path),
    itertools.cycle([1]),
    threading.Event(),
    (each for each in [1]),
    np.float32(1),
    torch.zeros(2, dtype=torch.complex64),
    torch.zeros(0, dtype=torch.bool),
    object(),
    lambda: 1,
    {1, 2},
    re.compile("a"),
    memoryview(b"a"),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_of_all_kinds_can_be_compared(value: object, files: Any) -> None:
    files.VALUE = value
    before = kept_in_files(["keepers:Net"])
    assert changed(before, kept_in_files(["keepers:Net"])) == []
