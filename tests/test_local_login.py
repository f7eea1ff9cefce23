"""The login of a run's own broker, which the user's other commands find and nobody else has."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.experiment.reading import load
from deploy.brokers.guard import one_login
from deploy.console import local_login
from deploy.local.network import OWN_LOGIN, one_host
from tests.helpers.commands import DEMO, invoke


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_login, "FOLDER", str(tmp_path / "logins"))
    return tmp_path / "logins"


def test_a_login_is_found_while_its_run_lasts(folder: Path) -> None:
    with local_login.kept(1883, ("name", "secret")):
        assert local_login.find("127.0.0.1", 1883) == local_login.find("localhost", 1883) == ("name", "secret")
        assert local_login.find("127.0.0.1", 1884) is None and local_login.find("10.0.0.1", 1883) is None
        assert (folder / "1883").stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert local_login.find("127.0.0.1", 1883) is None


def test_a_folder_that_others_write_to_is_not_believed(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "1883").write_text("name\nsecret")
    assert local_login.find("127.0.0.1", 1883) is None
    with local_login.kept(1883, ("name", "other")):
        assert (folder / "1883").read_text() == "name\nsecret"


def test_watch_enters_the_broker_of_this_users_run_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["watch", "--once", "--timeout", "0.5", "--connect-timeout", "0.1", "--broker"]
    with one_host(load(DEMO), tmp_path) as network:
        entered = invoke(*words, network.upward["cloud"])
        assert entered.exit_code == 5 and "no active run" in entered.output
        monkeypatch.setattr(local_login, "FOLDER", str(tmp_path / "another user's"))
        refused = invoke(*words, network.upward["cloud"])
        assert refused.exit_code == 3 and "authori" in refused.output
        given = {name: network.environment[name] for name in ("FEDSTRATA_USERNAME", "FEDSTRATA_PASSWORD")}
        assert invoke(*words, network.upward["cloud"], env=given).exit_code == 5
        assert network.environment.keys() == OWN_LOGIN.keys()


def test_each_run_has_a_password_of_its_own_that_is_not_shown() -> None:
    one, other = one_login(), one_login()
    assert one.login is not None and one.login != other.login
    assert one.login[1] not in repr(one) and one.login[1] not in "".join(one.mosquitto())
