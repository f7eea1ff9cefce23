"""A link's rates and delay on a network interface of this host, set by `tc`.

    sending     interface, egress hook  -> ifb "fs-up-N": tbf, netem   -> the interface's own queue
    -> network
    receiving   interface, ingress hook -> ifb "fs-down-N": tbf, netem -> this host

Filters of a clsact qdisc redirect packets to intermediate functional blocks (ifb); N is the
interface's index. The interface keeps its own qdisc, and traffic that no filter matches keeps its
speed. Nothing is stored elsewhere: `clear` reads the names of the ifb devices, and the alias of
"fs-up-N", which has the interface's former gso_max_segs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.validation_messages import explain
from fedstrata.common.settings.links import LinkSettings, Profile, shipped
from fedstrata.common.settings.tables import named
from fedstrata.deploy.links.kernel import (
    FRAME_BYTES,
    LOOPBACK,
    CommandRefused,
    IpAddress,
    batch,
    check_delays,
    query,
    shaping,
    single_frames,
)

KERNEL_DEFAULTS: Final = frozenset({"noop", "noqueue", "pfifo_fast", "fq_codel", "mq", "fq"})
ETHERNET_BYTES: Final = 14
MODULES: Final = (
    "Load what the kernel lacks: modprobe -a ifb sch_ingress sch_tbf cls_u32 act_mirred."
)

_BLOCK: Final = re.compile(r"fs-(?:up|down)-([0-9]+)")
_SEGMENTS: Final = re.compile(r"gso_max_segs=([0-9]+)")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: its name and index, its largest frame in bytes, and the segments of its
    largest packet.
    """

    name: str
    index: int
    frame_bytes: int
    gso_max_segs: int

    def block(self, way: str) -> str:
        """Return the name of the ifb device that shapes a direction, up or down."""
        return f"fs-{way}-{self.index}"


def link_of(
    profile: str | None, *, up_mbit: float | None, down_mbit: float | None, delay_ms: float | None
) -> LinkSettings:
    """Return a profile's link with the given numbers in place of its own. Raises
    InvalidExperiment.
    """
    given = {"profile": profile, "up_mbit": up_mbit, "down_mbit": down_mbit, "delay_ms": delay_ms}
    try:
        return LinkSettings.model_validate(
            named(
                "PROFILE",
                {key: value for key, value in given.items() if value is not None},
                shipped(),
            )
        )
    except ValidationError as error:
        raise explain(error, LinkSettings) from None


def apply(name: str, link: Profile, peers: Collection[IpAddress] = ()) -> None:
    """Shape what this host sends and receives on an interface, in place of what an earlier call has
    set.

    `link.up_mbit` is the rate of what is sent, `link.down_mbit` of what is received; the delay is
    for both. With `peers` only traffic with these addresses is shaped. If a command fails, all of
    it is undone. Raises InvalidExperiment.
    """
    if not _rates(link):
        raise InvalidExperiment(
            "PROFILE", None, "the link has no rate and no delay", "Name a profile, or use --up."
        )
    _check_free(name)
    clear(name)
    interface = _interface(name)
    try:
        with _explained(name):
            batch("ip", blocks(interface, link))
            _check_delays(interface, link)
            batch("tc", shapers(interface, link))
            batch("tc", filters(interface, link, peers))
    except InvalidExperiment:
        # without the right to set anything there is nothing to undo
        with suppress(InvalidExperiment):
            clear(name)
        raise


def clear(name: str | None = None) -> list[str]:
    """Undo `apply` on an interface, or on all of this host; return the interfaces. Raises
    InvalidExperiment.
    """
    cleared = []
    with _explained(name or "all"):
        listed = query("ip", "-details", "link", "show")
        names = {each["ifindex"]: each["ifname"] for each in listed}
        if name is not None:
            _check_known(name, names.values())
        for index, found in _blocks(listed).items():
            owner = names.get(index)  # None: an adapter that was unplugged
            if name is not None and owner != name:
                continue
            if owner is not None:
                cleared.append(owner)
                if any(
                    qdisc["kind"] == "clsact"
                    for qdisc in query("tc", "qdisc", "show", "dev", owner)
                ):
                    batch("tc", [f"qdisc del dev {owner} clsact"])
                former = _SEGMENTS.fullmatch(found.get(f"fs-up-{index}", ""))
                if former:
                    batch("ip", [f"link set dev {owner} gso_max_segs {former[1]}"])
            batch("ip", [f"link del dev {block}" for block in found])
    return cleared


def blocks(interface: Interface, link: Profile) -> list[str]:
    """Return the `ip` commands that create the ifb devices of a link, and let senders pass single
    frames if it is slow.

    The former gso_max_segs is noted before it is changed.
    """
    lines = []
    for block in (interface.block(way) for way in _rates(link)):
        lines += [f"link add {block} type ifb", f"link set dev {block} up"]
    if single := single_frames(interface.name, link.up_mbit):
        lines += [
            f"link set dev {interface.block('up')} alias gso_max_segs={interface.gso_max_segs}",
            *single,
        ]
    return lines


def shapers(interface: Interface, link: Profile) -> list[str]:
    """Return the `tc` commands that shape the ifb devices of a link."""
    return [
        line
        for way, mbit in _rates(link).items()
        for line in shaping(
            interface.block(way),
            mbit=mbit,
            delay_ms=link.delay_ms,
            frame_bytes=interface.frame_bytes,
        )
    ]


def filters(interface: Interface, link: Profile, peers: Collection[IpAddress]) -> list[str]:
    """Return the `tc` commands that redirect the traffic with these peers, or all traffic, to the
    ifb devices.
    """
    lines = [f"qdisc add dev {interface.name} clsact"]
    for way in _rates(link):
        hook, side = ("egress", "dst") if way == "up" else ("ingress", "src")
        matches = [] if peers else ["protocol all prio 1 u32 match u32 0 0"]
        for peer in peers:
            protocol, selector, prio = ("ip", "ip", 1) if peer.version == 4 else ("ipv6", "ip6", 2)
            matches.append(
                f"protocol {protocol} prio {prio} u32 match {selector} {side} "
                f"{peer}/{peer.max_prefixlen}"
            )
        action = f"action mirred egress redirect dev {interface.block(way)}"
        lines += [f"filter add dev {interface.name} {hook} {match} {action}" for match in matches]
    return lines


def _rates(link: Profile) -> Mapping[str, float | None]:
    """Return the rates of the directions that are to be shaped, Mbit/s; None = unlimited, with a
    delay.
    """
    rates = {"up": link.up_mbit, "down": link.down_mbit}
    return {way: mbit for way, mbit in rates.items() if mbit is not None or link.delay_ms}


def _blocks(listed: Collection[Mapping[str, Any]]) -> dict[int, dict[str, str]]:
    """Return the ifb devices that `apply` has created, with their aliases, by the index of the
    interface.
    """
    found: dict[int, dict[str, str]] = {}
    for each in listed:
        ours = _BLOCK.fullmatch(each["ifname"])
        if ours and each.get("linkinfo", {}).get("info_kind") == "ifb":
            found.setdefault(int(ours[1]), {})[each["ifname"]] = each.get("ifalias", "")
    return found


def _interface(name: str) -> Interface:
    with _explained(name):
        (shown,) = query("ip", "-details", "link", "show", "dev", name)
    frame_bytes = max(FRAME_BYTES, shown["mtu"] + ETHERNET_BYTES)
    return Interface(name, shown["ifindex"], frame_bytes, shown["gso_max_segs"])


def _check_known(name: str, names: Iterable[str]) -> None:
    """Check that an interface is among those of this host that lead to others. Raises
    InvalidExperiment.
    """
    usual = [other for other in names if other != LOOPBACK and not _BLOCK.fullmatch(other)]
    if name not in usual:
        problem = "not an interface that leads to another host"
        raise InvalidExperiment("--device", name, problem, f"There are: {', '.join(usual)}.")


def _check_free(name: str) -> None:
    """Check that an interface exists and that nobody else shapes it. Raises InvalidExperiment."""
    with _explained(name):
        listed = query("ip", "-details", "link", "show")
        indices = {each["ifname"]: each["ifindex"] for each in listed}
        _check_known(name, indices)
        kinds = [qdisc["kind"] for qdisc in query("tc", "qdisc", "show", "dev", name)]
    ours = {"clsact"} if indices[name] in _blocks(listed) else set()
    for kind in kinds:
        if kind not in KERNEL_DEFAULTS | ours:
            hook = kind if kind in ("clsact", "ingress") else "root"
            raise InvalidExperiment(
                "--device",
                name,
                f"it has a qdisc {kind} that fedstrata has not set",
                f"Remove it if nothing needs it: tc qdisc del dev {name} {hook}",
            )


def _check_delays(interface: Interface, link: Profile) -> None:
    """Check that the kernel can emulate the link's delay. Raises InvalidExperiment."""
    if not link.delay_ms:
        return
    try:
        check_delays(interface.block("up"))
    except CommandRefused as error:
        raise InvalidExperiment(
            "delay_ms",
            link.delay_ms,
            f"this kernel has no netem for delays ({error.problem})",
            "Load it (modprobe sch_netem), or omit the delay (--delay 0).",
        ) from None


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise InvalidExperiment instead of CommandRefused."""
    try:
        yield
    except CommandRefused as error:
        raise InvalidExperiment("--device", name, error.problem, error.remedy or MODULES) from None
