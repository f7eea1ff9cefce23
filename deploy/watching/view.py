"""View of a watched lab, for `watch`, `run` and `cloud`.

Lines are laid out by hand: a rich table of 200 rows takes too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final, TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from common.protocol.messages import NodeState, Step
from common.protocol.status import STEPS
from deploy.console.tabular import age, size
from deploy.watching.formatting import activity, advances, counts, missing, sparkline, step
from deploy.watching.lab import Flow, Node, WatchedLab, is_gone

# Okabe and Ito's colours, safe for colour-blind readers. All information is in the text, too.
GREEN, ORANGE, SKY, RED = "#009e73", "#e69f00", "#56b4e9", "#d55e00"
STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys((NodeState.LOST, NodeState.FAILED, NodeState.DISCONNECTED, "refused"), f"bold {RED}"),
    "done": GREEN, NodeState.FINISHED: GREEN, "training": ORANGE,
    "fetching": SKY, "offering": SKY, "measuring": SKY, "absent": "dim", "left": "dim",
}  # fmt: skip
NOTES: Final = 3
WIDE: Final = 90
MISSING_MOST: Final = 8  # nodes that are named
COARSE_S: Final = 300.0  # more time left is shown in minutes or hours
SPARK_NARROW, SPARK_WIDE = 12, 30  # global rounds


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column: its least width on narrow and on wide terminals, and the terminal width from which it is shown."""

    title: str
    narrow: int
    wide: int
    from_width: int = 0
    text: bool = False


NAME = ViewColumn("node", 18, 22, text=True)
STATE = ViewColumn("state", 8, 12, text=True)
ROUND = ViewColumn("round", 6, 8)
UP = ViewColumn("up", 11, 11, WIDE)
DOWN = ViewColumn("down", 11, 11, WIDE)
LOSS = ViewColumn("loss", 8, 8, 110)
EPOCHS = ViewColumn("epochs", 6, 6, 120)
COLUMNS: Final = (NAME, STATE, ROUND, UP, DOWN, LOSS, EPOCHS)
Cells: TypeAlias = Mapping[ViewColumn, str]


@dataclass(frozen=True, slots=True)
class View:
    """View settings. `width` and `height` of the terminal; None: not a terminal, and nothing is cropped or left out.

    `devices`: false = only counts of devices, else one by one as the height permits; `plain`: ASCII only.
    """

    width: int | None
    height: int | None
    devices: bool | None = None
    plain: bool = False

    def picture(self, lab: WatchedLab, now: float, notes: Sequence[str]) -> list[Text]:
        """Return the lines of the current state, with the last of the notes below."""
        lines = self._head(lab, now)
        if any(node.state != "absent" for node in lab.nodes.values()):
            rest = len(lines) + 3 + len(notes[-NOTES:])  # with the titles, the line above them, and the cursor's line
            room = None if self.height is None else max(1, self.height - rest)
            lines += [Text(), *self._tree(lab, now, room=room)]
        lines += [Text(note, style=RED) for note in notes[-NOTES:]]
        for line in lines:
            line.no_wrap = True
            if self.width is not None:
                line.truncate(self.width, overflow="crop" if self.plain else "ellipsis")
        return lines

    def _head(self, lab: WatchedLab, now: float) -> list[Text]:
        title = Text.assemble((lab.experiment.name, "bold"))
        known = bool(lab.run)
        title.append(f"  global round {lab.global_round}/{lab.experiment.rounds}" if known else "  starting")
        if lab.cloud.alive and (left_s := lab.left_s(now)) is not None:
            title.append(f"  about {age(left_s) if left_s >= COARSE_S else f'{left_s:.0f} s'} left")
        lines = [title, *self._scores(lab)]
        if lab.run:
            lines.append(Text(lab.run, style="dim"))
        if lab.folder:
            lines.append(Text(f"{lab.folder}{''.join(f'  broker {each.address}' for each in lab.brokers)}", "dim"))
        for broker in lab.brokers:
            if not broker.up:
                text = f"broker {broker.address} disconnected for {now - broker.since:.0f} s"
                lines.append(Text(text, f"bold {RED}"))
        if silent_s := lab.silent_s(lab.cloud, now):
            lines.append(Text(f"no status from the cloud for {silent_s:.0f} s", f"bold {RED}"))
        if absent := missing(lab):
            more = f"; {len(absent) - MISSING_MOST} more" if len(absent) > MISSING_MOST else ""
            text = f"waiting for {'; '.join(absent[:MISSING_MOST])}{more}"
            lines += [Text(line, ORANGE) for line in wrap(text, self.width or len(text))]
        flows = lab.flows()
        if any(flow.total for flow in flows.values()):
            tiers = lab.experiment.tier_names
            for tier in tiers:
                up, down = flows[f"{tier}_up"], flows[f"{tier}_down"]
                lines.append(Text(f"{tier.upper():<{max(map(len, tiers))}}  up {_flow(up)}  down {_flow(down)}"))
        return lines

    def _scores(self, lab: WatchedLab) -> list[Text]:
        """Return the line of the score and the test loss, or where those are unknown of the training loss."""
        rounds = lab.progress.scores
        found = [each.score for each in rounds if each.score is not None]
        losses = [each.loss for each in rounds if each.loss is not None]
        training = [each.train_loss for each in rounds if each.train_loss is not None]
        scores = [(lab.experiment.score.label, found), ("loss", losses)] if found else [("training loss", training)]
        scores = [(name, values) for name, values in scores if values]
        most = SPARK_WIDE if self._is_wide else SPARK_NARROW
        bars = ["" if self.plain else sparkline(values, most=most) for _, values in scores]
        parts = [f"{name} {values[-1]:.4f} {bar}".rstrip() for (name, values), bar in zip(scores, bars, strict=True)]
        return [Text("   ".join(parts))] if parts else []

    @property
    def _is_wide(self) -> bool:
        return self.width is None or self.width >= WIDE

    def _tree(self, lab: WatchedLab, now: float, *, room: int | None) -> list[Text]:
        """Return the titles and the rows of the tree."""

        def openable(node: Node) -> bool:
            return (self.devices is not False or node.role != "device") and (lab.follows or is_known(node))

        rows = rows_of(lab.cloud, room=room, openable=openable)
        rates = {each.name: each.rates() for each in lab.nodes.values() if each.status is not None}
        cells = [{} if isinstance(row, HiddenNodes) else _cells(lab, row, rates, depth) for depth, row in rows]
        widths = {column: self._width(column, cells) for column in COLUMNS if self._has(column, cells)}
        lines = [self._line({column: column.title for column in COLUMNS}, widths, "dim")]
        for (depth, row), content in zip(rows, cells, strict=True):
            if isinstance(row, HiddenNodes):
                lines.append(Text(f"{'  ' * depth}{_hidden(lab, row)}", style="dim"))
            else:
                line = self._line(content, widths, f"bold {RED}" if is_gone(row.state) else "")
                self._part(line, lab, row, now)
                lines.append(line)
        return lines

    def _has(self, column: ViewColumn, cells: Sequence[Cells]) -> bool:
        """Return whether the terminal has room for a column, and the column has content."""
        room = self.width is None or self.width >= column.from_width
        return room and (not column.from_width or any(each.get(column) for each in cells))

    def _width(self, column: ViewColumn, cells: Sequence[Cells]) -> int:
        least = column.wide if self._is_wide else column.narrow
        widest = max(least, *(cell_len(each.get(column, "")) for each in cells))
        return min(widest, max(least, self.width // 3)) if column is NAME and self.width is not None else widest

    def _line(self, cells: Cells, widths: Mapping[ViewColumn, int], style: str) -> Text:
        line = Text()
        for column, width in widths.items():
            text = cells.get(column, "")
            if column.text:
                own = STYLES.get(text.rstrip("?"), "") if column is STATE else ""
                cut = text if cell_len(text) <= width else set_cell_size(text, width - 1) + ("~" if self.plain else "…")
                line.append(set_cell_size(cut, width) + " ", style=style or own)
            else:
                line.append(f"{text:>{width}} ", style=style if style == "dim" else "")
        return line

    def _part(self, line: Text, lab: WatchedLab, node: Node, now: float) -> None:
        """Add the node's activity: a progress bar if there is a measure of it, and text."""
        children = list(node.children.values())
        done, working = node.participants
        waits = node.state == NodeState.INIT or (node is lab.cloud and not working)
        if is_gone(node.state):
            line.append(node.text, style=RED)
        elif node is not lab.cloud and (silent_s := lab.silent_s(node, now)):
            line.append(f"no status for {silent_s:.0f} s", style=RED)
        elif node is lab.cloud and working:
            self._bar(line, done / working, "done" if done == working else "training")
            line.append(f"{done}/{working} results")
        elif children and waits and (lab.follows or any(map(is_known, children))):
            waits_for = f", waits for {node.text}" if node.text else ""
            line.append(f"{sum(child.alive for child in children)}/{len(children)} present{waits_for}")
        elif node.state == NodeState.INIT:
            line.append(f"waits for {node.text}" if node.text else "prepares", style="dim")
        elif node.step is Step.TRAINING and working and node.works:
            share = (_local_round(node) + done / working) / _rounds(lab, node)
            self._bar(line, share, "training")
            line.append(f"{done}/{working} {lab.experiment.tier_below(node.name).children}s")
        elif (name := activity(node)) != node.state:
            if advances(node):
                self._bar(line, node.done, name)
            line.append(step(node), style=STYLES.get(name, ""))
            self._size(line, node)
        elif node.entry is not None and node.entry.seconds > 0:
            line.append(f"{node.entry.seconds:.1f} s in its last round", style="dim")

    def _size(self, line: Text, node: Node) -> None:
        """Add the received bytes of a model, if its manifest is known and the line has room."""
        if node.entry is None or not node.entry.size or not advances(node):
            return
        text = f"  {size(node.done * node.entry.size)} of {size(node.entry.size)}"
        if self.width is None or line.cell_len + len(text) <= self.width:
            line.append(text, style="dim")

    def _bar(self, line: Text, share: float, name: str) -> None:
        width = 20 if self.width is None or self.width >= 140 else 8
        full, empty = ("#", ".") if self.plain else ("\u2588", "\u2591")
        filled = round(min(1.0, share) * width)
        line.append(full * filled, style=STYLES.get(name, "")).append(empty * (width - filled) + " ", style="dim")


def is_known(node: Node) -> bool:
    """Return whether anything is known of a node: its presence, or what its parent reports."""
    return bool(node.states) or node.entry is not None


def _round(lab: WatchedLab, node: Node) -> str:
    if node is lab.cloud:
        return f"{lab.global_round}/{lab.experiment.rounds}"
    if node.role == "institution":
        return f"{_local_round(node) + 1}/{_rounds(lab, node)}" if node.participants[1] else ""
    key = None if node.parent is None or node.step in (None, Step.IDLE) else node.parent.key
    return f"{key.global_round + 1}.{key.local_round + 1}" if key is not None else ""


def _rounds(lab: WatchedLab, node: Node) -> int:
    """Return how many rounds an institution runs in a global round."""
    return lab.experiment.rounds_of(lab.experiment.tree.depth(node.name))


def _local_round(node: Node) -> int:
    """Return the current local round of an institution, counted from 0; 0 before the first of its global round."""
    key, above = node.key, None if node.parent is None else node.parent.key
    if key is None or (above is not None and key.global_round != above.global_round):
        return 0
    return key.local_round


def _cells(lab: WatchedLab, node: Node, rates: Mapping[str, Mapping[str, tuple[float, float]]], depth: int) -> Cells:
    state = node.state if node.proven or not node.alive else f"{node.state}?"  # ?: only a retained presence
    cells = {NAME: "  " * depth + node.name, STATE: state, ROUND: _round(lab, node)}
    if (entry := node.entry) is None or node.parent is None:
        return cells
    if (found := rates.get(node.parent.name, {}).get(node.name)) is not None:
        cells |= {UP: f"{size(found[0])}/s", DOWN: f"{size(found[1])}/s"}
    if entry.loss is not None:
        cells[LOSS] = f"{entry.loss:.4f}"
    return cells | {EPOCHS: str(entry.epochs or "")}


def _hidden(lab: WatchedLab, row: HiddenNodes) -> str:
    """Return the text of nodes without a row of their own."""
    parent, children = row.parent, row.children
    kind = lab.experiment.tier_below(parent.name).children
    more = "more " if len(children) < len(parent.children) else ""
    text = f"{len(children)} {more}{kind}{'s' if len(children) > 1 else ''}"
    deeper = [node for child in children for node in below(child)]
    lost = sum(is_gone(node.state) for node in deeper)
    text += f" with {len(deeper)} nodes below" if deeper else ""
    text += f", {lost} of them lost" if lost else ""
    known = parent.status is not None or any(map(is_known, children)) or lab.follows
    return f"{text}: {counts(parent, children) if known else 'fedstrata watch shows them'}"


def _flow(flow: Flow) -> str:
    return f"{size(flow.total):>9} {size(flow.rate) + '/s':>11}"


# The rows that a picture of limited height shows: lost and slow nodes first, each below its parents.


@dataclass(frozen=True, slots=True)
class HiddenNodes:
    """Children of a node that have no row of their own."""

    parent: Node
    children: tuple[Node, ...]


Row: TypeAlias = tuple[int, Node | HiddenNodes]  # with its depth


def rows_of(root: Node, *, room: int | None, openable: Callable[[Node], bool]) -> list[Row]:
    """Return the rows of a tree, at most `room`, or at least the root's; None: unlimited.

    A node has a row of its own if `openable` and if there is room. The other children of a shown node share one row.
    """
    nodes = list(below(root, openable))
    if room is not None:
        nodes = _fitting(root, nodes, room)
    return list(_rows(root, 0, {id(node) for node in nodes}))


def _rows(node: Node, depth: int, shown: set[int]) -> Iterator[Row]:
    yield depth, node
    hidden = []
    for child in node.children.values():
        if id(child) in shown:
            yield from _rows(child, depth + 1, shown)
        else:
            hidden.append(child)
    if hidden:
        yield depth + 1, HiddenNodes(node, tuple(hidden))


def below(node: Node, openable: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yield the nodes below a node, parents before their children; nothing below one that is not `openable`."""
    for child in filter(openable, node.children.values()):
        yield child
        yield from below(child, openable)


def _fitting(root: Node, nodes: list[Node], room: int) -> list[Node]:
    """Return the most urgent nodes, with their parents, that fit into `room` rows."""
    hidden = {id(root): len(root.children)}  # children without a row, of each node with one
    lines = 1 + bool(root.children)
    shown = []
    urgencies = _urgencies(root, nodes)
    for node in sorted(nodes, key=lambda node: urgencies[id(node)]):
        chain = []  # the node, and its parents without a row
        parent: Node | None = node
        while parent is not None and id(parent) not in hidden:
            chain.append(parent)
            parent = parent.parent
        if parent is None or not chain:
            continue
        left = {id(each): len(each.children) - bool(place) for place, each in enumerate(chain)}
        added = len(chain) + sum(count > 0 for count in left.values()) - (hidden[id(parent)] == 1)
        if lines + added <= room:
            lines += added
            hidden[id(parent)] -= 1
            hidden |= left
            shown += chain
    return shown


def _urgencies(root: Node, nodes: list[Node]) -> dict[int, tuple[bool, int, int, bool, int, float]]:
    """Return a sort key for each node, parents before children in `nodes`.

    Missing ones come first, one of each parent before the second ones. The others follow by depth, those of one depth
    by their progress in the round.
    """
    found: dict[int, tuple[bool, int, int, bool, int, float]] = {}
    depths, gone = {id(root): 0}, Counter[int]()
    for node in nodes:
        home = id(node.parent)
        depths[id(node)] = depths[home] + 1
        missing = is_gone(node.state) or node.state == "absent"
        gone[home] += missing
        rank = gone[home] if missing else 0
        step = STEPS.index(node.step or Step.IDLE)
        found[id(node)] = (not missing, rank, depths[id(node)], not node.works, step, round(node.done, 1))
    return found
