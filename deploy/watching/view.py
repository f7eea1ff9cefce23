"""View of a watched lab, for `watch`, `run` and `cloud`.

Lines are laid out by hand: a rich table of 200 rows takes 150 ms, these lines 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final, Literal, TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from fedstrata.common.protocol.messages import LIVING, NodeState, Step
from fedstrata.common.text import counted
from fedstrata.deploy.console.tabular import age, size
from fedstrata.deploy.watching.formatting import (
    activity,
    advances,
    counts,
    missing,
    sparkline,
    step,
)
from fedstrata.deploy.watching.lab_state import WatchedLab
from fedstrata.deploy.watching.nodes import UNKNOWN, Node, is_gone
from fedstrata.deploy.watching.rows import HiddenNodes, below, rows_of

# Okabe and Ito's colours, safe for colour-blind readers. All information is in the text, too.
GREEN = "#009e73"
ORANGE = "#e69f00"
SKY = "#56b4e9"
RED = "#d55e00"
STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, "refused"), f"bold {RED}"
    ),
    "done": GREEN,
    NodeState.FINISHED: GREEN,
    "training": ORANGE,
    "fetching": SKY,
    "offering": SKY,
    "measuring": SKY,
    "absent": "dim",
    "left": "dim",
}
NOTES: Final = 3
MISSING_MOST: Final = 8  # nodes that are named
COARSE_S: Final = 300.0  # more time left is shown in minutes or hours
SPARKS: Final = 20  # global rounds
WIDE: Final = 140  # with longer bars
UNLIMITED: Final = 1_000_000  # the width and height of what is no terminal
VIEW_COLUMNS: Final = (  # title, least width, and the width of the terminal from which it is shown
    ("node", 18, 0),
    ("state", 8, 0),
    ("round", 6, 0),
    ("up", 11, 90),
    ("down", 11, 90),
    ("loss", 8, 110),
    ("epochs", 6, 120),
)
# places of columns; numbers begin with the last one
NAME = 0
STATE = 1
ROUND = 2
Cells: TypeAlias = Sequence[str]  # of a row, in the order of VIEW_COLUMNS


@dataclass(frozen=True, slots=True)
class View:
    """View settings.

    `devices`: false = only counts of devices, else one by one as the height permits; `plain`: ASCII
    only.
    """

    width: int = UNLIMITED
    height: int = UNLIMITED
    devices: bool | None = None
    plain: bool = False

    def picture(self, lab: WatchedLab, now: float, notes: Iterable[str]) -> list[Text]:
        """Return the lines of the current state, with the last of the notes below."""
        below_tree = [Text(note, RED) for note in [*notes][-NOTES:]]
        lines = self._head(lab, now)
        if any(node.state != UNKNOWN for node in lab.nodes.values()):
            # the titles, the line above, and the cursor's line
            room = self.height - len(lines) - len(below_tree) - 3
            lines += [Text(), *self._tree(lab, now, room=room)]
        lines += below_tree
        overflow: Literal["crop", "ellipsis"] = "crop" if self.plain else "ellipsis"
        for line in lines:
            line.no_wrap = True
            line.truncate(self.width, overflow=overflow)
        return lines

    def _head(self, lab: WatchedLab, now: float) -> list[Text]:
        title = Text.assemble((lab.experiment.name, "bold"))
        done = f"  global round {lab.global_round}/{lab.experiment.rounds}"
        if not lab.run:
            done = "  starting"
        title.append(done)
        if lab.cloud.alive and (left_s := lab.left_s(now)) is not None:
            left = age(left_s) if left_s >= COARSE_S else f"{left_s:.0f} s"
            title.append(f"  about {left} left")
        lines = [title, self._scores(lab), Text(lab.run, "dim")]
        if lab.folder:
            brokers = [f"broker {each.address}" for each in lab.brokers]
            lines.append(Text("  ".join([lab.folder, *brokers]), "dim"))
        for broker in lab.brokers:
            if not broker.up:
                text = f"broker {broker.address} disconnected for {now - broker.since:.0f} s"
                lines.append(Text(text, f"bold {RED}"))
        if silent_s := lab.silent_s(lab.cloud, now):
            lines.append(Text(f"no status from the cloud for {silent_s:.0f} s", f"bold {RED}"))
        if absent := missing(lab):
            names = [name for name, _ in absent[:MISSING_MOST]]
            if more := sum(count for _, count in absent[MISSING_MOST:]):
                names.append(f"{more} more")
            lines += [
                Text(each, ORANGE) for each in wrap(f"waiting for {'; '.join(names)}", self.width)
            ]
        return [line for line in (*lines, *_traffic(lab)) if line]

    def _scores(self, lab: WatchedLab) -> Text:
        """Return the score and the test loss, or where no round was evaluated the training loss."""
        rounds = lab.progress.scores
        scores = {
            lab.experiment.score_label: [each.score for each in rounds],
            "loss": [each.loss for each in rounds],
        }
        if lab.score is None:
            scores = {"training loss": [each.train_loss for each in rounds]}
        parts = []
        for name, found in scores.items():
            values = [value for value in found if value is not None]
            bars = "" if self.plain else sparkline(values, most=SPARKS)
            parts += [f"{name} {value:.4f} {bars}".rstrip() for value in values[-1:]]
        return Text("   ".join(parts))

    def _tree(self, lab: WatchedLab, now: float, *, room: int) -> list[Text]:
        """Return the titles and the rows of the tree."""

        def openable(node: Node) -> bool:
            return node.reported and (self.devices is not False or node.role != "device")

        rows = rows_of(lab.cloud, room=room, openable=openable)
        cells = {row.name: _cells(lab, row, depth) for depth, row in rows if isinstance(row, Node)}
        widths = self._widths([*cells.values()])
        lines = [self._line([title for title, _, _ in VIEW_COLUMNS], widths, "dim")]
        for depth, row in rows:
            if isinstance(row, HiddenNodes):
                lines.append(Text(f"{'  ' * depth}{_hidden(lab, row)}", "dim"))
                continue
            style = f"bold {RED}" if is_gone(row.state) else ""
            line = self._line(cells[row.name], widths, style)
            self._add_activity(line, *_activity(lab, row, now))
            lines.append(line)
        return lines

    def _widths(self, cells: Sequence[Cells]) -> dict[int, int]:
        """Return the width of each column that has content, and for which the terminal has room."""
        widths = {}
        for place, (_, least, from_width) in enumerate(VIEW_COLUMNS):
            longest = max(cell_len(row[place]) for row in cells)
            if self.width >= from_width and (longest or not from_width):
                widths[place] = max(least, longest)
        widths[NAME] = min(widths[NAME], max(VIEW_COLUMNS[NAME][1], self.width // 3))
        return widths

    def _line(self, cells: Cells, widths: Mapping[int, int], style: str) -> Text:
        line = Text()
        for place, width in widths.items():
            text = cells[place]
            own = STYLES.get(text.rstrip("?"), "") if place == STATE else ""
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + ("~" if self.plain else "\u2026")
            text = text.rjust(width) if place >= ROUND else set_cell_size(text, width)
            line.append(f"{text} ", style or own)
        return line

    def _add_activity(self, line: Text, text: str, style: str, share: float | None) -> None:
        if share is not None:
            full, empty = "#." if self.plain else "\u2588\u2591"
            width = 20 if self.width >= WIDE else 8
            filled = round(min(1.0, share) * width)
            line.append(full * filled, style).append(f"{empty * (width - filled)} ", "dim")
        line.append(text, style)


def _traffic(lab: WatchedLab) -> list[Text]:
    """Return a line for each tier, none before anything was sent."""
    flows = lab.flows()
    if not any(flow.total for flow in flows.values()):
        return []
    text = {
        name: f"{size(flow.total):>9} {size(flow.rate) + '/s':>11}" for name, flow in flows.items()
    }
    tiers = lab.experiment.tier_names
    widest = max(map(len, tiers))
    return [
        Text(f"{tier.upper():<{widest}}  up {text[f'{tier}_up']}  down {text[f'{tier}_down']}")
        for tier in tiers
    ]


def _hidden(lab: WatchedLab, row: HiddenNodes) -> str:
    """Return the text of nodes without a row of their own."""
    parent = row.parent
    children = row.children
    more = "more " if len(children) < len(parent.children) else ""
    text = counted(len(children), f"{more}{lab.experiment.tier_below(parent.name).children}s")
    deeper = [node for child in children for node in below(child)]
    lost = sum(is_gone(node.state) for node in deeper)
    text += f" with {len(deeper)} nodes below" if deeper else ""
    text += f", {lost} of them lost" if lost else ""
    return f"{text}: {counts(parent, children) or 'not reported'}"


def _cells(lab: WatchedLab, node: Node, depth: int) -> Cells:
    # ?: only a retained presence
    state = node.state if node.proven or not node.alive else f"{node.state}?"
    rates = [f"{size(rate)}/s" for rate in node.rates] if node.rates is not None else ["", ""]
    entry = node.entry
    loss = "" if entry is None or entry.loss is None else f"{entry.loss:.4f}"
    epochs = "" if entry is None else str(entry.epochs or "")
    return "  " * depth + node.name, state, _round(lab, node), *rates, loss, epochs


def _round(lab: WatchedLab, node: Node) -> str:
    if node is lab.cloud:
        return f"{lab.global_round}/{lab.experiment.rounds}"
    if node.role == "institution":
        if node.participants[1]:
            return f"{_local_round(node) + 1}/{_rounds(lab, node)}"
        return ""
    key = None if node.parent is None or node.step in (None, Step.IDLE) else node.parent.key
    if key is not None:
        return f"{key.global_round + 1}.{key.local_round + 1}"
    return ""


def _rounds(lab: WatchedLab, node: Node) -> int:
    """Return how many rounds an institution runs in a global round."""
    return lab.experiment.rounds_of(lab.experiment.tree.depth(node.name))


def _local_round(node: Node) -> int:
    """Return the current local round of an institution, counted from 0; 0 before the first of its
    global round.
    """
    key = node.key
    above = None if node.parent is None else node.parent.key
    if key is None or (above is not None and key.global_round != above.global_round):
        return 0
    return key.local_round


def _activity(lab: WatchedLab, node: Node, now: float) -> tuple[str, str, float | None]:
    """Return what a node does, its style, and the share that is done, None if that is not known."""
    done, working = node.participants
    if trouble := _trouble(lab, node, now):
        return trouble, RED, None
    if node is lab.cloud and working:
        return f"{done}/{working} results", GREEN if done == working else ORANGE, done / working
    if node.state == NodeState.INIT or node is lab.cloud:
        return _preparation(node), "dim", None
    if node.step is Step.TRAINING and working and node.works:
        share = (_local_round(node) + done / working) / _rounds(lab, node)
        return f"{done}/{working} {lab.experiment.tier_below(node.name).children}s", ORANGE, share
    if node.entry is None or (name := activity(node)) == node.state:
        seconds = 0.0 if node.entry is None else node.entry.seconds
        return f"{seconds:.1f} s in its last round" if seconds > 0 else "", "dim", None
    nbytes = node.entry.size if advances(node) else 0
    moved = f"  {size(node.done * nbytes)} of {size(nbytes)}" if nbytes else ""
    return step(node) + moved, STYLES.get(name, ""), node.done if advances(node) else None


def _trouble(lab: WatchedLab, node: Node, now: float) -> str:
    """Return why a node is gone, or for how long it has published no record; empty if neither is
    so.
    """
    if is_gone(node.state):
        seen = f"last seen {age(now - node.seen_at)} ago" if node.proven else ""
        return "; ".join(filter(None, (node.text, seen)))
    silent_s = 0.0 if node is lab.cloud else lab.silent_s(node, now)
    if silent_s:
        return f"no status for {silent_s:.0f} s"
    return ""


def _preparation(node: Node) -> str:
    """Return how many children of a node are present, if it has published that, and for which it
    waits.
    """
    waits = f"waits for {node.text}" if node.text else ""
    if node.status is None:
        return waits or ("prepares" if node.state == NodeState.INIT else "")
    present = sum(group.count for group in node.tally if group.state in LIVING)
    return f"{present}/{len(node.children)} present{waits and ', '}{waits}"
