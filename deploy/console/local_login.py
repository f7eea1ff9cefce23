"""The login of the broker of `fedstrata run`, kept for other commands of the same user on this machine.

A file that only its owner can read, by the broker's port, while the run lasts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.host.files import private, private_folder
from common.net.address import is_loopback

FOLDER = "/var/tmp/fedstrata-logins-{uid}"


@contextmanager
def kept(port: int, login: tuple[str, str]) -> Iterator[None]:
    """Keep a login for the commands of this user. Where that is not possible, `watch` needs the login by hand."""
    path = _path(port)
    try:
        private_folder(path.parent)
        path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", opener=private) as file:
            file.write("\n".join(login))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def find(host: str, port: int) -> tuple[str, str] | None:
    """Return the login of a broker of this machine that a run of this user started, None if there is none."""
    if not is_loopback(host) or not _path(port).exists():
        return None
    try:
        private_folder(_path(port).parent)  # others could put a login there to learn what is sent
        with open(_path(port), encoding="utf-8", opener=private) as file:
            name, _, password = file.read().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return (name, password) if password else None


def _path(port: int) -> Path:
    return Path(FOLDER.format(uid=os.geteuid())) / str(port)
