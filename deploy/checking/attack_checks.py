"""What `fedstrata check` tries of an attack of the user's own: all that it does, twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from fedstrata.common.methods.adversary import Adversaries, Adversary
from fedstrata.common.methods.attack import AttackedUpload, LabelledSamples

COLUMNS: Final = 1000
COLLUDERS: Final = 3
CLASSES: Final = 4


def of(name: str, keywords: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what was tried, and its problem, "" for none. Raises InvalidExperiment."""
    table = {"attack": {**keywords, "name": name}, "nodes": ["device-0"]}
    adversary = Adversary("device-0", Adversaries.model_validate(table), 1, 1)
    known = np.random.default_rng(1).standard_normal((COLLUDERS + 1, COLUMNS)).astype(np.float32)
    images = np.arange(16 * 64, dtype=np.uint8).reshape(16, 1, 8, 8)
    samples = LabelledSamples(images, np.arange(16) % CLASSES, CLASSES)

    def sent() -> Any:
        given = (known[0], known[-1], adversary.chance(0), list(known[:-1]), COLLUDERS, COLLUDERS)
        return adversary.sent(AttackedUpload(*given))

    def poisoned() -> Any:
        found = adversary.poisoned(samples)
        return np.append(found.images.ravel(), found.labels)

    def wanted() -> Any:
        found = adversary.wanted(samples)
        return np.append(found.images.ravel(), found.labels)

    tried: dict[str, Callable[[], Any]] = {
        "upload": sent,
        "dispatch": lambda: adversary.dispatched(0, "device-1", known[0]),
        "poison": poisoned,
        "targets": wanted,
        "report": lambda: adversary.reported(16, 0.5),
        "delay_s": lambda: adversary.delay_s(0),
    }
    for array in (known, images, samples.labels):
        array.flags.writeable = False  # one that writes into what it is given fails
    for method, call in tried.items():
        if adversary.attack.does(method):
            same = np.array_equal(call(), call(), equal_nan=True)
            remedy = "twice the same, it returns others: draw from the generator that it gets"
            yield method, "" if same else remedy
