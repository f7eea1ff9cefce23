"""The names of the codecs: the forms in which a model is transferred. `common.model.codecs` implements them.

    [delta+]form[+zstd]        form: fp32, fp16, bf16, int8

The list is here because an experiment names codecs. Two combinations are not codecs: `delta+fp32` without zstd is as
large as fp32, and deltas are not used downward, see `DOWN`.
"""

from __future__ import annotations

import difflib
from typing import Final

from common.errors import InvalidExperiment
from common.experiment.tables import SettingsTable

DELTA: Final = "delta"
ZSTD: Final = "zstd"
FORMS: Final = ("fp32", "fp16", "bf16", "int8")

# From a parent to its children. A delta is against a model that both ends hold. Upward that is the model of the task
# that is being answered. Downward it would be the last model that this one child fetched: one child drawn anew or
# restarted would need another blob than the others, which ends the broadcast, and under a lossy form it would train
# from another model than had it not restarted, which ends reproducibility.
DOWN: Final = tuple(form + end for form in FORMS for end in ("", f"+{ZSTD}"))
# From a child to its parent.
UP: Final = (*DOWN, *(f"{DELTA}+{name}" for name in DOWN if name != "fp32"))


class Codecs(SettingsTable):
    """The codecs of a tier's models. `fp32` is bit for bit."""

    up: str = "fp32"  # towards the cloud: `[delta+]FORM[+zstd]`, FORM is `fp32`, `fp16`, `bf16` or `int8`
    down: str = "fp32"  # towards the devices: `FORM[+zstd]`


PLAIN: Final = Codecs()


def check_name(key: str, name: str, known: tuple[str, ...]) -> None:
    """Check that a codec's name is one of those known in this place. Raises InvalidExperiment."""
    if name in known:
        return
    if name in UP:
        remedy = "Children may hold different models. Use a delta for `up`, and here one of " + ", ".join(known) + "."
        raise InvalidExperiment(key, name, "deltas are not used downward", remedy)
    if name == f"{DELTA}+fp32":
        raise InvalidExperiment(key, name, "saves nothing", "Use fp32, or delta+fp32+zstd.")
    close = difflib.get_close_matches(name, known, 1)
    remedy = f"Did you mean {close[0]!r}? " if close else ""
    raise InvalidExperiment(key, name, "no such codec", f"{remedy}Known here: {', '.join(known)}.")
