"""The codecs of a tier's models: their names, and the tables of those that go up.

A codec is the form in which a model is transferred. `[delta+]FORM[+zstd]` is a form of each number
(`common/model/codecs.py`). The others send a part of what a node's work has changed, and are a file
of `common/model/` and a line of `common/model/codecs_by_name.py` each, or `package.module:Name`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.model import codecs_by_name
from fedstrata.common.settings.tables import NamedTables, Selected, SettingsTable

if TYPE_CHECKING:
    from fedstrata.common.model.delta_codecs import DeltaCodec

# Two combinations are not codecs: `delta+fp32` without zstd is as large as fp32, and deltas are not
# used downward.
FORMS: Final = ("fp32", "fp16", "bf16", "int8")
DELTA: Final = "delta"
ZSTD: Final = "zstd"
USELESS: Final = f"{DELTA}+fp32"

# From a parent to its children. A delta is against a model that both ends hold. Upward that is the
# model of the task that is being answered. Downward it would be the last model that this one child
# fetched: one child drawn anew or restarted would need another blob than the others, which ends the
# broadcast, and under a lossy form it would train from another model than had it not restarted,
# which ends reproducibility.
DOWN: Final = tuple(form + end for form in FORMS for end in ("", f"+{ZSTD}"))
# From a child to its parent, but for those of the table.
UP: Final = (*DOWN, *(f"{DELTA}+{name}" for name in DOWN if name != "fp32"))


class CodecSettings(SettingsTable):
    """The settings of a codec that goes up, and what they build.

    `sparse`: whether it sends a change of some columns alone.
    """

    sparse: ClassVar[bool] = False

    name: str  # the codec
    # Whether a sender keeps what the codec leaves out of a model, and adds it to the next one
    # (error feedback).
    feedback: bool = False

    @property
    def delta(self) -> bool:
        """Whether it encodes the difference to the model received."""
        return True

    @property
    def exact(self) -> bool:
        """Whether the decoded model is the encoded one, bit for bit."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether it sends too little each time, and nobody adds the rest without feedback."""
        return False

    def build(self) -> DeltaCodec:
        """Return the arithmetic of a codec of changes. Raises InvalidExperiment."""
        raise NotImplementedError

    def check(self, key: str) -> None:
        """Check the settings. Raises InvalidExperiment."""
        if self.feedback and self.exact:
            problem = f"{self.name} leaves out nothing that could be added next time"
            raise InvalidExperiment(
                f"{key}.feedback", True, problem, "Use a lossy codec, or omit it."
            )


class FormSettings(CodecSettings):
    """A form of each number, `[delta+]FORM[+zstd]`; FORM is `fp32`, `fp16`, `bf16` or `int8`."""

    name: Annotated[str, Field(json_schema_extra={"enum": list(UP)})] = UP[0]  # the codec

    @property
    def delta(self) -> bool:
        """Whether its name begins with `delta`."""
        return self.name.startswith(DELTA)

    @property
    def exact(self) -> bool:
        """Whether the form is fp32."""
        return FORMS[0] in self.name


CODEC_TABLES: Final = NamedTables[CodecSettings](
    {
        **dict.fromkeys(UP, "fedstrata.common.model.codec_settings:FormSettings"),
        **codecs_by_name.CODECS,
    }
)
UpCodec = Annotated[CodecSettings, Selected(CODEC_TABLES, codecs_by_name.OWN_CODEC, "codecs")]


class Codecs(SettingsTable):
    """The codecs of a tier's models. `fp32` is bit for bit."""

    up: UpCodec = FormSettings()  # towards the cloud: one of the tables below, or its name
    # towards the devices: `FORM[+zstd]`, FORM is `fp32`, `fp16`, `bf16` or `int8`
    down: str = "fp32"

    @field_validator("up", mode="before")
    @classmethod
    def _useful(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("name") == USELESS:
            raise PydanticCustomError("saves_nothing", "saves nothing")
        return tree


PLAIN: Final = Codecs()


def check_codecs(key: str, codecs: Codecs) -> None:
    """Check the codecs of a tier, whose key is given. Raises InvalidExperiment."""
    codecs.up.check(f"{key}.up")
    name = codecs.down
    if name in DOWN:
        return
    if name in CODEC_TABLES:
        remedy = (
            "Children may hold different models. Use a delta for `up`, and here one of "
            + ", ".join(DOWN)
            + "."
        )
        raise InvalidExperiment(f"{key}.down", name, "deltas are not used downward", remedy)
    close = difflib.get_close_matches(name, DOWN, 1)
    remedy = f"Did you mean {close[0]!r}? " if close else ""
    raise InvalidExperiment(
        f"{key}.down", name, "no such codec", f"{remedy}Known here: {', '.join(DOWN)}."
    )
