"""What a new user mistypes: one line with what is wrong and what to write instead, and the exit code for it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from common.errors import MESSAGE_MOST
from tests.helpers.commands import invoke

COMMANDS = [
    ("instituton", "'instituton': no such command of fedstrata. Did you mean 'institution'?"),
    ("exprt", "Did you mean 'export'?"),
    ("data chek", "'chek': no such command of fedstrata data. Did you mean 'check'?"),
    ("runs lst", "Did you mean 'list'?"),
    ("help", "There are: "),
    ("demo", "'demo': no such command of fedstrata. Did you mean 'run demo'?"),
    ("mine.toml", "Did you mean 'run mine.toml'?"),
    ("version", "Did you mean '--version'?"),
]
OPTIONS = [
    ("run demo --format jsn", "--format = 'jsn': not one of its values. Did you mean 'json'?"),
    ("run demo --format yaml", "There are: table, json."),
    ("compare x --format latx", "Did you mean 'latex'?"),
    ("broker --kind mosquito", "--kind = 'mosquito': not one of its values. Did you mean 'mosquitto'?"),
    ("--log-format xml runs list", "--log-format = 'xml': not one of its values. There are: text, json."),
    ("--log-level loud runs list", "--log-level: 'loud': use debug, info, warning or error."),
    ("run demo --dry-run --log-level loud", "--log-level: 'loud': use debug, info, warning or error."),
    ("--versin", "--versin: no such option of fedstrata. Did you mean '--version'?"),
    ("run demo --seed 3", "--seed: no such option of fedstrata run. Did you mean --set seed=VALUE?"),
    ("run demo --rounds 3", "Did you mean --set rounds=VALUE?"),
    ("plan demo --epochs 3", "Did you mean --set training.epochs=VALUE?"),
    ("run demo --run x", "Did you mean '--runs'?"),
    ("run demo --xyzzy", "--xyzzy: no such option of fedstrata run. There are: set, dry-run, "),
    ("run demo --set", "--set: requires an argument."),
    ("run demo --direct=3", "--direct: does not take a value."),
    ("run demo more", "unexpected extra argument"),
    ("broker --port 99999", "--port = '99999': too large. Write 65535 or less."),
    ("broker --port abc", "--port = 'abc': not a whole number."),
    ("compare x --target 90%", "--target = '90%': not a number. Write a fraction: 0.9 for 90 %."),
    ("plan demo --interface 0", "--interface = '0': too small. Write 0.001 or more."),
    ("runs prune --days -1", "--days = '-1': too small. Write 0 or more."),
    ("cloud demo --connect-timeout 0", "--connect-timeout = '0': too small. Write 0.1 or more."),
    ("report x --figure-formats gif", "--figure-formats: 'gif': use pdf, png, svg."),
    ("compare x --allow links", "--allow: no such option"),
]
USE = [
    ("run", "EXPERIMENT: name an experiment"),
    ("run dmeo", "EXPERIMENT: no file and no experiment has the name 'dmeo'. Did you mean 'demo'?"),
    ("compare", "RUN: missing. Folders of runs"),
    ("check", "NAME: missing. A rule"),
    ("institution", "--name: missing. This institution's name"),
    ("institution --name a/b", "--name: 'a/b' is not a node name. Use 1 to 64 letters"),
    ("institution --name cloud", "--name: 'cloud' is reserved: use another name."),
    ("institution --name i --parent i", "--parent: 'i' is its own name."),
    ("institution --name i --parent 'a b'", "--parent: 'a b' is not a node name."),
    ("device --name a --parent a", "--parent: 'a' is its own name."),
    ("device --name a --name a", "--name: duplicate name."),
    ("device --name a --parent x --parent y", "--parent: 2 values given for 1 names."),
    ("device --name a --slots 0", "--slots: '0': use auto, or a number from 1."),
    ("device --name a --together", "--together: valid only with --once."),
    ("run demo --accelerator cuda", "--accelerator: valid only with --direct or --simulate."),
    ("run demo --direct --netns", "--direct: valid only without --simulate and --netns."),
    ("run demo --plan --direct", "--plan: valid only for a new lab of processes."),
    ("run demo --lab 'a b'", "--lab: 'a b' is not a lab name."),
    ("run demo --resume x", "a resumed run keeps its experiment"),
]
EXPERIMENT = [
    ("run nofile.toml", "experiment = 'nofile.toml': No such file"),
    ("run demo --set aggregation.name=fedcros", "Did you mean cloud.aggregation or institution.aggregation?"),
    ("run demo --set dataset=digit", "dataset = 'digit': unknown key. Did you mean data.dataset?"),
    ("run demo --set data.dataset=digit", "Did you mean 'digits'?"),
    ("run demo --set model.name=cnn_digit", "Did you mean 'cnn_digits'?"),
    ("run demo --set data.partition=dirichelet", "Did you mean 'dirichlet'?"),
    ("run demo --set training.lr=0.1", "Did you mean 'learning_rate'?"),
    ("run demo --set rounds", "--set = 'rounds': not of the form key=value."),
    ("run demo --set .=1", "--set = '.=1': not of the form key=value."),
    (f"run demo --set {'a.' * 2000}b=1", "no key is that deep. Write for instance training.epochs=2."),
    (f"run demo --set rounds=0x{'f' * 5000}", "rounds = a number of too many digits: too many local rounds of each"),
    (f"run demo --set rounds={'9' * 5000}", " ... (5,002 characters) ... "),
    ("run demo --set training.objective=fedprx", "training.objective.name = 'fedprx': no objective has this name."),
    ("run demo --set topology.devices=3000", "Use at most 143 devices, or lower data.min_samples."),
    ("run demo --set model=lenet5", "does not accept images of [1, 8, 8] of the data set. Use mlp_digits or"),
    ("run demo --set topology.institutions=0", "institution.rounds = 2: this lab has no institution."),
    ("run demo --set transfer.wan.up=fp17", "Did you mean 'fp16'?"),
    ("run demo --set hardware.default=raspbery", "Did you mean 'raspberry-pi-5'?"),
    ("cloud demo --broker localhost:99999", "--broker = 'localhost:99999'"),
    ("device --name a --broker localhost:1 --tls-key no", "--tls-key = 'no': a key without its certificate."),
    ("device --name a --broker localhost:1 --password-file no", "a password without its login. Give --username, too."),
    ("cloud demo --broker ''", "--broker = '': '' is not an address."),
    ("sweep study/two --set seed=3", "--set = 'seed=3': the sweep has seeds. Use --seeds."),
    ("sweep study/two --broker localhost:x", "--broker = 'localhost:x': 'localhost:x' is not an address."),
    (
        "links apply lte --to nowhere.invalid",
        "--to = 'nowhere.invalid': no address is known: Name or service not known.",
    ),
    ("cloud demo --broker mqtt://localhost", "is not an address. Write host, host:port"),
    ("cloud demo --lab no.toml", "lab = 'no.toml': No such file"),
    ("device --name a --broker localhost:1 --accelerator gpu", "--accelerator = 'gpu': no accelerator has this name."),
    ("institution --name i --broker localhost:1 --metrics 9464", "--metrics = '9464': not host:port."),
    ("run demo --metrics 127.0.0.1:port", "--metrics = '127.0.0.1:port': not host:port."),
    ("run demo --metrics 127.0.0.1:99999", "--metrics = '127.0.0.1:99999': not host:port."),
    ("run demo --set data.dataset=cifar10", "data_batch_1"),
    ("run demo --direct --set data.dataset=mnist", "data.root = 'data': not found: "),
    (
        "cloud demo --broker localhost:1 --set data.dataset=femnist",
        "femnist/data/train/*.json. To fetch them: git clone",
    ),
    (
        "cloud demo --broker localhost:1 --set links.enforce=kernel"
        " --set 'links.wan={ trace = { seconds = [0, 5], up_mbit = [5, 6], down_mbit = [5, 6] } }'",
        "'kernel': institution-0's link has a trace, and `fedstrata links apply` sets fixed rates. Use links.enforce =",
    ),
    ("run demo --set model.name=nomod:f", "model.name = 'nomod:f': cannot be imported (ModuleNotFoundError"),
    ("run demo --direct --set data.dataset=nomod:f", "data.dataset = 'nomod:f': cannot be imported"),
    ("run demo --set institution.aggregation.name=nomod:F", "institution.aggregation.name = 'nomod:F': cannot be"),
    ("plan demo --set training.objective.name=nomod:F", "training.objective.name = 'nomod:F': cannot be imported"),
    ("cloud demo --broker localhost:1 --set cloud.selection.name=nomod:F", "cloud.selection.name = 'nomod:F': cannot"),
    ("run demo --direct --accelerator gpu", "--accelerator = 'gpu': no accelerator has this name. Use cpu, cuda"),
    ("run --resume x", "--resume = 'x': not a run's folder. Name a folder under runs/."),
    ("cloud --resume x", "--resume = 'x': not a run's folder."),
    ("broker --host 0.0.0.0", "--host = '0.0.0.0': reachable by others"),
    ("broker --password-file no", "--password-file = 'no': No such file or directory. Name a file"),
    ("broker --tls-cert no", "--tls-cert, --tls-key = 'no': No such file"),
    ("report x", "RUN = 'x': not a run's folder"),
    ("runs list --runs no", "--runs = 'no': No such file or directory."),
    ("export x", "no tracker is chosen"),
    ("check os:system", "is in Python's standard library"),
    ("check mine", "not of the form package.module:Name."),
    ("data check mnst", "data.dataset = 'mnst': not read from a root. Did you mean 'mnist'?"),
    ("provision no.toml", "lab = 'no.toml': No such file"),
]
FILES = [
    ("run demo --runs /proc/no", "--runs = '/proc/no': No such file or directory. Name another folder."),
    ("run demo --direct --runs /dev/null", "--runs = '/dev/null': Not a directory."),
    ("cloud demo --broker localhost:1 --runs /dev/null", "--runs = '/dev/null': Not a directory."),
    ("plan demo --out /proc/no/plan.json", "'/proc/no/plan.json': No such file or directory. Name another place, in"),
    ("sweep study/two --direct --html /proc/no/page.html", "'/proc/no/page.html': No such file or directory. Name"),
]
BY_CODE = {2: (*COMMANDS, *OPTIONS, *USE), 4: EXPERIMENT, 6: FILES}
ALL = [(line, code, words) for code, lines in BY_CODE.items() for line, words in lines]
FOREIGN = ("Errno", "Input should be", "Value error", "validation error", "Traceback", "^[", "Usage:", "string_")


@pytest.mark.parametrize(("line", "code", "words"), ALL, ids=[line[:100] for line, *_ in ALL])
def test_a_mistake_ends_with_one_line(
    line: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*shlex.split(line))
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("fedstrata: ") and done.stderr.count("\n") == 1
    assert words in done.stderr and len(done.stderr) < MESSAGE_MOST + 20
    assert not any(text in done.stderr for text in FOREIGN)
    assert not any(tmp_path.iterdir())


CONTENTS: list[tuple[bytes, str, str]] = [  # of a file, the command that reads it, and words of the line
    (b"name = 'Z\xfcrich'", "run", "not TOML: byte 0xfc in line 1 is not utf-8. Fix that line."),
    (b"seed = " + b"9" * 5000, "run", "not TOML: a number has too many digits. Fix that line."),
    (b"seed = 0x" + b"f" * 5000, "run", "seed = a number of too many digits: too large."),
    (b"a." * 5000 + b"a = 1", "run", "not TOML: nested too deeply. Fix that line."),
    (b"a = " + b"[" * 5000, "run", "not TOML: nested too deeply. Fix that line."),
    (b"[machines.a]\naddress = 'b'", "run", "a lab's file. Name an experiment, and this one by --lab."),
    (b"[links.wan]\nup = 3", "plan", "links.wan.up = 3: unknown key. Did you mean 'up_mbit'?"),
    (b"rounds = 3", "sweep", "not a sweep: it has no [axes]. Use `fedstrata run` for an experiment."),
    (b"title = 'T'\n[axes]\n'model.name' = ['lenet']", "sweep", "cell lenet: model.name = 'lenet': no such model."),
    (b"name = 'rack'", "provision", "broker = None: missing. Add this key."),
    (b"{", "plan demo --calibration", "not a file of --calibrate. Measure with `fedstrata plan --calibrate`."),
]


@pytest.mark.parametrize(("content", "command", "words"), CONTENTS, ids=[words[:30] for *_, words in CONTENTS])
def test_a_mistake_in_a_file_ends_with_one_line(content: bytes, command: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_bytes(content)
    done = invoke(*command.split(), file)
    assert done.exit_code == 4, done.stderr
    assert done.stderr.startswith("fedstrata: ") and done.stderr.count("\n") == 1
    assert words in done.stderr and not any(text in done.stderr for text in FOREIGN)
