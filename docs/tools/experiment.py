"""docs/experiment.md, made from the schema: each key with its default, its values, and its comment
there.

python -m docs.tools.experiment > docs/experiment.md
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedstrata.common.experiment.short_form import ShortForm
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.attack import ATTACKS, Attack, OwnAttack
from fedstrata.common.methods.own_rule import OwnRule
from fedstrata.common.methods.selection import OwnSelection
from fedstrata.common.methods.settings import RULES, SELECTORS, RuleSettings, SelectionSettings
from fedstrata.common.model.codec_settings import CODEC_TABLES, CodecSettings, FormSettings
from fedstrata.common.model.codecs_by_name import CODECS as OF_CHANGES
from fedstrata.common.model.delta_codecs import OwnCodec
from fedstrata.common.settings.trainers import TRAINERS, OwnTrainer, TrainerTable
from fedstrata.common.settings.training import (
    AUGMENTATIONS,
    OBJECTIVES,
    OPTIMIZERS,
    AugmentationTable,
    ObjectiveTable,
    OptimizerTable,
    OwnAugmentation,
    OwnObjective,
)

INTRO: Final = """\
# The experiment

An experiment is a TOML file. This page has every key: first the [thirty that matter](#the-keys-that-matter), then all.
`python -m docs.tools.experiment` makes it from `common/settings/` and `common/experiment/`.

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
- In `deploy/experiments/` are the demo (`demo.toml`), a lab of four layers (`regions.toml`), Tempo's lab
  (`tempo-fashionmnist.toml`), and FedCross on a convex loss (`convex.toml`). The papers' tables and figures are
  [sweeps](reproduction.md).
"""
# keys of the short form; the other keys are for those who know why
MATTER: Final[Mapping[str, str]] = {
    "seed": "everything random comes from it",
    "rounds": "global rounds",
    "topology.institutions": "how many, or a list of names; 0: the devices are below the cloud",
    "topology.devices": "all devices of the lab: how many, or a list of names",
    "data.dataset": (
        "a [data set](data.md), `NAME.csv`, `NAME.npz`, `folder`, or [a "
        "function](own-data.md#a-data-set)"
    ),
    "data.root": "the folder of data sets; `{node}` in it is the name of the node that reads",
    "data.partition": (
        "[who gets which samples](data.md#partitions); `private`: each device has its own files"
    ),
    "data.concentration": "of Dirichlet partitions: smaller is more skewed",
    "model.name": "a [model](data.md#models), or [your class or function](own-models.md#a-model)",
    "model.initial": "a run or a file in safetensors' format whose model the run starts from",
    "training.epochs": "of a device in each local round",
    "training.batch_size": "samples",
    "training.learning_rate": "of SGD on devices",
    "training.momentum": "of SGD on devices",
    "training.objective": "what devices [minimise](algorithms/README.md#objectives)",
    "training.trainer": (
        "what trains: PyTorch, a [Flower app](flower.md), or [your class](own-trainers.md)"
    ),
    "cloud.participation": "share of the cloud's children that take part in a global round",
    "cloud.aggregation": (
        "the cloud's [rule](algorithms/README.md), or [yours](own-methods.md#a-rule)"
    ),
    "cloud.epoch_control": "`tempo`: the cloud decides each institution's epochs",
    "cloud.closing.rule": "`quorum`: a round does not wait for all its children",
    "cloud.privacy.unit": "what [noise](privacy.md) protects at this tier",
    "institution.rounds": "local rounds in each global round",
    "institution.participation": "share of an institution's devices in a local round",
    "institution.aggregation": "the institutions' rule",
    "links.wan": (
        "cloud to institution: a [profile](links.md), or `up_mbit`, `down_mbit`, `delay_ms`"
    ),
    "links.lan": "institution to device, likewise",
    "transfer.wan.up": (
        "the [codec](links.md#codecs) of uploads to the cloud; `transfer.lan` likewise"
    ),
    "transfer.idle_s": "seconds without progress after which a node counts as failed",
    "evaluation.at": "who [scores models](evaluation.md): the cloud, devices, or both",
    "stop.target": "the score at which the run ends",
}
SEVERAL: Final = 3  # tables in which the same key stands, to be listed once before them
SEE: Final[Mapping[str, str]] = {  # pages that explain a table
    "data": "[Data and models](data.md) describes the data sets and the partitions.",
    "model": "[Data and models](data.md#models) lists the models.",
    "cloud.aggregation": "One of the rules below, selected by `name`. "
    "[Algorithms](algorithms/README.md) has a page for"
    " each.\nRounds are the node's own count: the cloud's global rounds, an institution's local "
    "rounds.",
    "cloud.selection": "One of the selectors below, selected by `name`. [Client "
    "selection](algorithms/selection.md)"
    " has the formulas.",
    "evaluation": "[Evaluation](evaluation.md) explains what devices score, and what comes back.",
    "score": (
        "[Loss and score](own-models.md#loss-and-score) has the scores, and explains how to "
        "add one."
    ),
    "training.objective": "One of the objectives below, selected by `name`."
    " [Algorithms](algorithms/README.md#objectives) has their pages.",
    "training.augmentation": (
        "Flips and crops of images, or [your own](own-data.md#an-augmentation)."
    ),
    "training.trainer": "One of the trainers below, selected by `name`. [Your own "
    "trainers](own-trainers.md) explains"
    " how to write one.",
    "cloud.privacy": "[Privacy](privacy.md) explains units, noise and the accountant.",
    "cloud.secure": "[Secure sums](secure.md) explains what a round does then.",
    "cloud.closing": "The [protocol](protocol.md#closing-a-round) has the details.",
    "cloud.epoch_control": "The [page of Tempo](algorithms/tempo.md) has the equations.",
    "profiles.NAME": "[Links](links.md) lists the profiles that ship.",
    "links": "[Links](links.md) explains shaping and calibration.",
    "tiers.link.trace": "[Links](links.md#traces) has an example.",
    "tiers": "[Running](running.md#layers) shows labs with and without institutions.",
    "transfer.wan": "[Links](links.md#codecs) compares the codecs.",
    "tiers.transfer.up": "One of the codecs below, selected by `name`. `feedback` and what is "
    "left out are explained in"
    " [links](links.md#error-feedback).",
    "adversaries": "[Adversaries](adversaries.md) explains attacks, and who sees what.",
    "adversaries.attack": "One of the attacks below, selected by `name`.",
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
        **{name: CODEC_TABLES[name] for name in OF_CHANGES},
        "package.module:Name": OwnCodec,
    },
    Attack: {**ATTACKS, "package.module:Name": OwnAttack},
    TrainerTable: {**TRAINERS, "package.module:Name": OwnTrainer},
}
ORDER: Final = (
    "",
    "score",
    "evaluation",
    "stop",
    "topology",
    "data",
    "model",
    "training",
    "cloud",
    "institution",
    "tiers",
    "profiles",
    "links",
    "transfer",
    "hardware",
    "availability",
    "adversaries",
)
# what stands for the keys of a table of tables
NAMES: Final[Mapping[str, str]] = {"of": "NODE", "profiles": "NAME"}
HEAD: Final = "| key | default | values | meaning |\n|---|---|---|---|"
COMMENT: Final = re.compile(r"^(?P<code>.*?)(?:^| ) *# (?P<text>.*)$")


def page() -> str:
    """Return the page."""
    places: dict[type[BaseModel], list[str]] = {}
    tables = [*_tables(ShortForm, ""), *_tables(Tier, "tiers")]
    for path, table in sorted(tables, key=lambda each: ORDER.index(each[0].partition(".")[0])):
        places.setdefault(table, []).append(path)
    lines, shown = [INTRO, *_matter()], set[str]()
    for table, paths in places.items():
        heading = ", ".join(f"`{path}`" for path in paths) if paths != [""] else "Top level"
        lines.append(f"## {heading}\n")
        see = [f"{SEE[paths[0]]}\n"] if paths[0] in SEE else []
        if table in SELECTED:  # it stands for all tables that a name selects
            lines += [*see, *_selected(SELECTED[table])]
            continue
        lines += [f"{_text(table)}\n", *see]
        rows = dict(_rows(table))
        if rows and shown.issuperset(rows.values()):
            lines.append(
                f"Its keys are those of a table above: {', '.join(f'`{key}`' for key in rows)}.\n"
            )
        elif rows:
            lines += [HEAD, *rows.values(), ""]
        shown.update(rows.values())
    return "\n".join(lines).rstrip() + "\n"


def field_of(key: str) -> FieldInfo:
    """Return the field of a key of the short form, by its path. Raises KeyError."""
    table: type[BaseModel] | None = ShortForm
    for name in key.split("."):
        if table is None:
            raise KeyError(key)
        field = table.model_fields[name]
        table = _table_of(field)
    return field


def _matter() -> Iterator[str]:
    """Yield the lines of the keys that matter; a table that a name selects has the name that is its
    default.
    """
    yield "## The keys that matter\n"
    yield "| key | default | meaning |\n|---|---|---|"
    for key, meaning in MATTER.items():
        default = _default(field_of(key))
        shown = _shown(
            getattr(default, "name", None) if isinstance(default, BaseModel) else default
        )
        yield f"| `{key}` | {shown} | {meaning} |"
    yield ""


def _selected(tables: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Yield the lines of the tables that a name selects: keys that many of them share, and then
    those of each.
    """
    kinds: dict[type[BaseModel], list[str]] = {}
    for name, table in tables.items():
        kinds.setdefault(table, []).append(name)
    rows = {
        table: {key: row for key, row in _rows(table) if key != "name" or _is_choice(table, names)}
        for table, names in kinds.items()
    }
    count = Counter(row for each in rows.values() for row in each.values())
    shared = [row for row in count if count[row] >= SEVERAL]
    if shared:
        yield "Keys of several of them:\n"
        yield "| key | default | values | meaning | of |\n|---|---|---|---|---|"
        for row in shared:
            of = (
                name
                for table, names in kinds.items()
                if row in rows[table].values()
                for name in names
            )
            yield f"{row} {', '.join(of)} |"
        yield ""
    for table, names in kinds.items():
        own = [row for row in rows[table].values() if row not in shared]
        yield f"### {', '.join(names)}\n"
        yield f"{_text(table)}\n"
        if own:
            yield from (HEAD, *own, "")


def _is_choice(table: type[BaseModel], names: Iterable[str]) -> bool:
    """Return whether a table's `name` may be more than the names in its heading."""
    schema = table.model_json_schema()["properties"]["name"]
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return bool(listed) and not set(listed) <= {*names}


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
    of = "tables" if "$ref" in items else of
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
    """Return the comment of each key of a table, the inherited ones too: the lines above it, or the
    end of its line.
    """
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        above: list[str] = []
        for line in _source(owner).splitlines():
            match = COMMENT.match(line)
            code, text = (match["code"].rstrip(), match["text"]) if match else (line, "")
            key = re.match(r"    (\w+): ", code)
            if key and key[1] in table.model_fields:
                found[key[1]] = " ".join([*above, text] if text else above)
            above = [*above, text] if text and not code.strip() else []
    return found


_source: Final = cache(inspect.getsource)  # it parses the whole file each time


def _tables(table: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each table below one, itself first, by its path in the file."""
    yield path, table
    for key, field in table.model_fields.items():
        below = _table_of(field)
        if below is not None:
            name = f"{path}.{key}".lstrip(".")
            yield from _tables(
                below, f"{name}.{NAMES[key]}" if get_origin(field.annotation) is dict else name
            )


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the table that a key is, or that a table of tables has, the first of several; None for
    a value.
    """
    kinds: tuple[Any, ...] = get_args(field.annotation) or (field.annotation,)
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )


def _text(table: type[BaseModel]) -> str:
    return inspect.cleandoc(table.__doc__ or "")


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _shown(default: Any) -> str:
    return f"`{json.dumps(default)}`" if default not in (None, {}) else "not set"


def _rows(table: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield key and line of a table's keys, but for keys that are tables of their own."""
    fields = {key: field for key, field in table.model_fields.items() if _table_of(field) is None}
    if not fields:
        return
    schema, texts = table.model_json_schema()["properties"], meanings(table)
    for key, field in fields.items():
        shown = "required" if field.is_required() else _shown(_default(field))
        text = texts[key]
        text = (text[:1].upper() + text[1:]).rstrip(".")
        yield key, f"| `{key}` | {shown} | {values(schema[key])} | {text} |"


def _range(schema: Mapping[str, Any]) -> str:
    """Return the range of a number."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if below is not None and schema["type"] == "integer":
        high, below = below - 1, None
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    ends = (("above {}", above), ("{} or more", low), ("at most {}", high), ("below {}", below))
    return (
        ", ".join(words.format(_number(end)) for words, end in ends if end is not None)
        or "a number"
    )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
