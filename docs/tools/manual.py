"""Generator of docs/commands.md from the commands: `python -m docs.tools.manual >
docs/commands.md`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer

from fedstrata.deploy.cli.main import app

INTRO: Final = """\
# Commands

Made from the code by `python -m docs.tools.manual`. Standard output is data (`--format json`: one object, or one per
line), standard error is for people. An option takes precedence over its environment variable, that over the
experiment's file, and that over the default.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | wrong usage |
| 3 | no connection, or the login was refused |
| 4 | the experiment is invalid, or a device cannot take part in it |
| 5 | no progress for `transfer.idle_s` (while bytes or training steps move, no node is given up) |
| 6 | a file or folder of this machine cannot be used: the disk is full or read-only, the folder is another user's |
| 130 | interrupted |
"""
EXAMPLES: Final[Mapping[str, str]] = {
    "run": "fedstrata run demo --set rounds=5",
    "cloud": "fedstrata cloud my.toml --broker 10.0.0.1",
    "institution": (
        "fedstrata institution --name institution-0 --broker 10.0.0.1 --child-broker localhost"
    ),
    "links apply": "sudo fedstrata links apply wan-50mbit --to 10.0.0.1",
    "links clear": "sudo fedstrata links clear",
    "lab status": "fedstrata lab status --broker 10.0.0.1",
    "audit": "fedstrata audit 89f8b0 --shadows 8",
    "check": "fedstrata check mine:Rule --set beta=0.9",
    "doctor": "fedstrata doctor --lab rack.toml",
    "provision": "fedstrata provision rack.toml --out kits",
    "device": "fedstrata device --name device-0 --parent institution-0 --broker 10.0.0.1",
    "broker": "fedstrata broker --host 0.0.0.0 --insecure",
    "watch": "fedstrata watch --broker 10.0.0.1 --devices",
    "plan": "fedstrata plan demo",
    "sweep": "fedstrata sweep study/two --direct --only images=clean",
    "report": "fedstrata report runs/20261120T130301Z-demo-89f8b0",
    "experiments": "fedstrata experiments",
    "new": "fedstrata new mine --rule",
    "export": "fedstrata export 89f8b0 --tensorboard boards --follow",
    "replay": "fedstrata replay 89f8b0",
    "compare": "fedstrata compare runs/*tempo* runs/*fixed* --target 0.9 --format latex",
    "runs list": "fedstrata runs list --runs runs",
    "runs sharpness": "fedstrata runs sharpness runs/fedavg runs/fedcross",
    "runs divergence": "fedstrata runs divergence runs/central runs/tempo runs/fedavg",
    "runs delete": "fedstrata runs delete 89f8b0",
    "data check": "fedstrata data check --root data",
    "data partition": "fedstrata data partition demo --out partition",
}
SEVERAL: Final = 2  # commands with the same option, to be listed once
# typer's own; their texts change with its releases
TYPERS: Final = ("help", "install_completion", "show_completion")


def manual() -> str:
    """Return the page."""
    found = [(name, command, dict(_options(command))) for name, command in commands()]
    rows = Counter((option, row) for *_, options in found for option, row in options.items())
    # most common
    shared = {
        option: row for (option, row), count in reversed(rows.most_common()) if count >= SEVERAL
    }
    lines = [
        INTRO,
        "## fedstrata\n\nOptions of all commands, before or after the command's name:\n",
        *_table(dict(_options(typer.main.get_command(app)))),
        "## Options of several commands\n",
        *_table(dict(sorted(shared.items()))),
    ]
    for name, command, options in found:
        lines += [
            f"## fedstrata {name}\n",
            f"{inspect.cleandoc(command.help)}\n",
            f"```sh\n{EXAMPLES[name]}\n```\n",
        ]
        lines += _table(
            {option: row for option, row in options.items() if row != shared.get(option)}
        )
        several = [option for option, row in options.items() if row == shared.get(option)]
        if several:
            lines.append(
                f"[Of several commands](#options-of-several-commands): {', '.join(several)}.\n"
            )
    return "\n".join(lines).rstrip() + "\n"


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each command with its full name after `fedstrata`. Untyped: typer bundles its own
    click.
    """
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _options(command: Any) -> Iterator[tuple[str, str]]:
    """Yield name and line of each option."""
    for one in command.params:
        if one.name not in TYPERS and not getattr(one, "hidden", False):
            row = _row(one)
            yield row.split(" | ")[0].removeprefix("| "), row


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    if rows:
        yield "| option | default | meaning |\n|---|---|---|"
        yield from rows.values()
        yield ""


def _variables(parameter: Any) -> list[str]:
    """Return the environment variables of an option."""
    given = parameter.envvar or []
    return [given] if isinstance(given, str) else list(given)


def _row(parameter: Any) -> str:
    text = " ".join((parameter.help or "", *(f"`{name}`" for name in _variables(parameter))))
    named = parameter.param_type_name == "option"
    name = (
        " / ".join(f"`{o}`" for o in (*parameter.opts, *parameter.secondary_opts))
        if named
        else parameter.name.upper()
    )
    default = parameter.default
    shown = default not in (None, "", [], ()) and not isinstance(default, bool)
    return (
        f"| {name} | {'required' if parameter.required else f'`{default}`' if shown else ''} | "
        f"{text} |"
    )


if __name__ == "__main__":
    print(manual(), end="")
