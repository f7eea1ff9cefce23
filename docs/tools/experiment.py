"""docs/experiment.md, made from the schema: each key with its default, its values, and its comment there.

python -m docs.tools.experiment > docs/experiment.md
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.experiment.codecs import CODECS, CodecSettings, FormSettings
from common.experiment.methods import RULES, SELECTORS, RuleSettings, SelectionSettings
from common.experiment.short_form import ShortForm
from common.experiment.tiers import Tier
from common.experiment.trainers import TRAINERS, OwnTrainer, TrainerTable
from common.experiment.training import (
    AUGMENTATIONS,
    OBJECTIVES,
    OPTIMIZERS,
    AugmentationTable,
    ObjectiveTable,
    OptimizerTable,
    OwnAugmentation,
    OwnObjective,
)
from common.methods.selection import OwnSelection
from common.methods.single_model import OwnRule
from common.model.delta_codecs import OwnCodec
from common.model.table import CODECS as OF_CHANGES

INTRO: Final = """\
# The experiment

An experiment is a TOML file. This page has every key. It is made from `common/experiment/` by
`python -m docs.tools.experiment`.

```sh
fedstrata run my.toml --set training.epochs=2 --set 'data={ dataset = "digits" }'     # override a key, or a table
fedstrata run my.toml --dry-run                                                       # print the effective experiment
```

- A name stands for the table that it selects: `objective = "fedprox"` below `[training]`, or
  `--set cloud.aggregation=fedcross`.
- Omitted keys have the default. A key without a default may stay unset ("not set").
- An unknown key, a wrong value and an impossible lab end the command with exit code 4 and one line: the key, the value,
  the problem and the remedy.
- The cloud alone gets the file. The other nodes receive the experiment through the broker.
- A lab of one or two tiers has the short form: `topology`, `cloud`, `institution`, `links.wan`, `links.lan`,
  `transfer.wan`, `transfer.lan`. Any lab has a table `[[tiers]]` for each tier in place of these. `--set
  tiers.NAME.KEY=...` sets a key of a tier in both forms; the tiers of the short form are `wan` and `lan`.
- In `deploy/experiments/` are the demo (`demo.toml`), a lab of four layers (`regions.toml`), and Tempo's lab
  (`tempo-fashionmnist.toml`). The papers' tables and figures are [sweeps](reproduction.md).
"""
SEE: Final[Mapping[str, str]] = {  # pages that explain a table
    "data": "[Data and models](data.md) describes the data sets and the partitions.",
    "model": "[Data and models](data.md#models) lists the models and explains how to use one's own.",
    "cloud.aggregation": "One of the rules below, selected by `name`. [Algorithms](algorithms/README.md) has a page for"
    " each.\nRounds are the node's own count: the cloud's global rounds, an institution's local rounds.",
    "cloud.selection": "One of the selectors below, selected by `name`. [Client selection](algorithms/selection.md)"
    " has the formulas.",
    "evaluation": "[Evaluation](evaluation.md) explains what devices score, and what comes back.",
    "score": "[Your model, your data](own.md#the-score) has the functions of one's own.",
    "training.objective": "One of the objectives below, selected by `name`."
    " [Algorithms](algorithms/README.md#objectives) has their pages.",
    "training.augmentation": "Flips and crops of images, or [one's own](extend.md#an-augmentation).",
    "training.trainer": "One of the trainers below, selected by `name`. [Your own method](extend.md#a-trainer) explains"
    " how to write one.",
    "cloud.privacy": "[Privacy](privacy.md) explains units, noise and the accountant.",
    "cloud.closing": "The [protocol](protocol.md#closing-a-round) has the details.",
    "cloud.epoch_control": "The [page of Tempo](algorithms/tempo.md) has the equations.",
    "profiles.NAME": "[Links](links.md) lists the profiles that ship.",
    "links": "[Links](links.md) explains shaping and calibration.",
    "tiers.link.trace": "[Links](links.md#traces) has an example.",
    "tiers": "[Operations](operations.md#layers) shows labs with and without institutions.",
    "transfer.wan": "[Links](links.md#codecs) compares the codecs.",
    "tiers.transfer.up": "One of the codecs below, selected by `name`. `feedback` and what is left out are explained in"
    " [links](links.md#error-feedback).",
    "hardware": "[Devices](devices.md#emulated-hardware) explains the emulation.",
}
SELECTED: Final[Mapping[type[BaseModel], Mapping[str, type[BaseModel]]]] = {
    RuleSettings: {**RULES, "package.module:Name": OwnRule},
    SelectionSettings: {**SELECTORS, "package.module:Name": OwnSelection},
    OptimizerTable: OPTIMIZERS,
    ObjectiveTable: {**OBJECTIVES, "package.module:Name": OwnObjective},
    AugmentationTable: {**AUGMENTATIONS, "package.module:Name": OwnAugmentation},
    CodecSettings: {
        "[delta+]FORM[+zstd]": FormSettings,
        **{name: CODECS[name] for name in OF_CHANGES},
        "package.module:Name": OwnCodec,
    },
    TrainerTable: {**TRAINERS, "package.module:Name": OwnTrainer},
}
ORDER: Final = (
    "", "score", "evaluation", "stop", "topology", "data", "model", "training", "cloud", "institution", "tiers",
    "profiles", "links", "transfer", "hardware", "availability",
)  # fmt: skip
NAMES: Final[Mapping[str, str]] = {"of": "NODE", "profiles": "NAME"}  # what stands for the keys of a table of tables
COMMENT: Final = re.compile(r"^(?P<code>.*?)(?:^| ) *# (?P<text>.*)$")


def page() -> str:
    """Return the page."""
    places: dict[type[BaseModel], list[str]] = {}
    tables = [*_tables(ShortForm, ""), *_tables(Tier, "tiers")]
    for path, table in sorted(tables, key=lambda each: ORDER.index(each[0].partition(".")[0])):
        places.setdefault(table, []).append(path)
    lines = [INTRO]
    for table, paths in places.items():
        heading = ", ".join(f"`{path}`" for path in paths) if paths != [""] else "Top level"
        lines.append(f"## {heading}\n")
        see = [f"{SEE[paths[0]]}\n"] if paths[0] in SEE else []
        if table in SELECTED:  # it stands for all tables that a name selects
            lines += see
            for name, selected in SELECTED[table].items():
                lines += [f"### {name}\n", f"{_text(selected)}\n", *_rows(selected)]
        else:
            lines += [f"{_text(table)}\n", *see, *_rows(table)]
    return "\n".join(lines).rstrip() + "\n"


def values(schema: Mapping[str, Any]) -> str:
    """Return what values a key may have, from its JSON schema."""
    if "anyOf" in schema:
        return ", or ".join(values(form) for form in schema["anyOf"] if form.get("type") != "null")
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if listed:
        return ", ".join(f"`{json.dumps(value)}`" for value in listed)
    each = next(iter(schema.get("patternProperties", {}).values()), schema)
    items = each.get("items", {})
    of = "lists" if items.get("type") == "array" else "numbers" if "minimum" in items else "names"
    kinds = {
        "boolean": "true, false",
        "string": "a name" if "pattern" in schema else "text",
        "array": f"{schema['minItems']} numbers" if "minItems" in schema else f"a list of {of}",
        "object": _object(each, of) if each is not schema else "a table",
    }
    return kinds.get(schema["type"]) or _range(schema)


def _object(each: Mapping[str, Any], of: str) -> str:
    if "items" in each:
        return f"a table of lists of {of}"
    return "a table of tables of numbers" if each.get("type") == "object" else "a table of numbers"


def meanings(table: type[BaseModel]) -> dict[str, str]:
    """Return the comment of each key of a table, the inherited ones too: the lines above it, or the end of its line."""
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        above: list[str] = []
        for line in inspect.getsource(owner).splitlines():
            match = COMMENT.match(line)
            code, text = (match["code"].rstrip(), match["text"]) if match else (line, "")
            key = re.match(r"    (\w+): ", code)
            if key and key[1] in table.model_fields:
                found[key[1]] = " ".join([*above, text] if text else above)
            above = [*above, text] if text and not code.strip() else []
    return found


def _tables(table: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each table below one, itself first, by its path in the file."""
    yield path, table
    for key, field in table.model_fields.items():
        below = _table_of(field)
        if below is not None:
            name = f"{path}.{key}".lstrip(".")
            yield from _tables(below, f"{name}.{NAMES[key]}" if get_origin(field.annotation) is dict else name)


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the table that a key is, or that a table of tables has, the first of several; None for a value."""
    kinds: tuple[Any, ...] = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _text(table: type[BaseModel]) -> str:
    return inspect.cleandoc(table.__doc__ or "")


def _rows(table: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of a table's keys, but for keys that are tables of their own."""
    fields = {key: field for key, field in table.model_fields.items() if _table_of(field) is None}
    if not fields:
        return
    schema, texts = table.model_json_schema()["properties"], meanings(table)
    yield "| key | default | values | meaning |\n|---|---|---|---|"
    for key, field in fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = f"`{json.dumps(default)}`" if default not in (None, {}) else "not set"
        shown = "required" if field.is_required() else shown
        text = texts[key]
        text = (text[:1].upper() + text[1:]).rstrip(".")
        yield f"| `{key}` | {shown} | {values(schema[key])} | {text} |"
    yield ""


def _range(schema: Mapping[str, Any]) -> str:
    """Return the range of a number."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if below is not None and schema["type"] == "integer":
        high, below = below - 1, None
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    ends = (("above {}", above), ("{} or more", low), ("at most {}", high), ("below {}", below))
    return ", ".join(words.format(_number(end)) for words, end in ends if end is not None) or "a number"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
