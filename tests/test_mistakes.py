"""What a new user mistypes: one line with what is wrong and what to write instead, and the exit
code for it.
"""

from __future__ import annotations

import shlex
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from fedstrata.cloud.results import RunFolder
from fedstrata.common.errors import MESSAGE_MOST, InvalidExperiment, RunFailed
from fedstrata.common.experiment.reading import load
from fedstrata.common.settings.tables import parsed
from fedstrata.common.text import counted
from fedstrata.deploy.cli.chosen import kept_once_begun
from fedstrata.deploy.console.shipped import shipped
from fedstrata.deploy.watching.showing import CloudLog
from tests.helpers.commands import invoke
from tests.helpers.records import a_global_round

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
    (
        "broker --kind mosquito",
        "--kind = 'mosquito': not one of its values. Did you mean 'mosquitto'?",
    ),
    (
        "--log-format xml runs list",
        "--log-format = 'xml': not one of its values. There are: text, json.",
    ),
    ("--log-level loud runs list", "--log-level: 'loud': use debug, info, warning or error."),
    (
        "run demo --dry-run --log-level loud",
        "--log-level: 'loud': use debug, info, warning or error.",
    ),
    ("--versin", "--versin: no such option of fedstrata. Did you mean '--version'?"),
    (
        "run demo --seed 3",
        "--seed: no such option of fedstrata run. Did you mean --set seed=VALUE?",
    ),
    ("run demo --rounds 3", "Did you mean --set rounds=VALUE?"),
    ("plan demo --epochs 3", "Did you mean --set training.epochs=VALUE?"),
    ("run demo --run x", "Did you mean '--runs'?"),
    ("run demo --xyzzy", "--xyzzy: no such option of fedstrata run. There are: set, dry-run, "),
    ("run demo --set", "--set: requires an argument."),
    ("run demo --direct=3", "--direct: does not take a value."),
    (
        "institution --name i --lab rack.toml",
        "'rack.toml' is a lab's file: give the lab's name, which the file has.",
    ),
    ("doctor --name 'a b'", "--name: 'a b' is not a node name."),
    ("run demo more", "'more': one argument too many. See fedstrata run --help."),
    ("experiments demo digits", "'demo': one argument too many. See fedstrata experiments --help."),
    ("broker --port 99999", "--port = '99999': too large. Write 65535 or less."),
    ("broker --port abc", "--port = 'abc': not a whole number."),
    ("compare x --target 90%", "--target = '90%': not a number. Write a fraction: 0.9 for 90 %."),
    ("plan demo --interface 0", "--interface = '0': too small. Write 0.001 or more."),
    ("cloud demo --connect-timeout 0", "--connect-timeout = '0': too small. Write 0.1 or more."),
    ("report x --figure-formats gif", "--figure-formats: 'gif': use pdf, png, svg."),
    ("compare x --allow links", "--allow: no such option"),
]
EMPTY = [  # as of a variable of the shell that is not set: a path would be the current folder
    ("run ''", "'': an empty value. Write one, or omit it."),
    ("run demo --runs ''", "--runs: an empty value. Write one, or omit it."),
    ("run demo --set ''", "--set: an empty value. Write one, or omit it."),
    ("cloud demo --broker ''", "--broker: an empty value. Write one, or omit it."),
    (
        "cloud demo --broker localhost --username ''",
        "--username: an empty value. Write one, or omit it.",
    ),
]
USE = [
    ("run", "EXPERIMENT: name an experiment"),
    ("run dmeo", "EXPERIMENT: no file and no experiment has the name 'dmeo'. Did you mean 'demo'?"),
    ("compare", "RUN: missing. Folders of runs"),
    ("check", "NAME: missing. Name a class"),
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
    ("run demo --direct --simulate", "--direct: valid only without --simulate."),
    (
        "device --name a --name b --name c --parent i --broker one --broker two",
        "2 values given for 3 names",
    ),
    ("run demo --lab 'a b'", "--lab: 'a b' is not a lab name."),
    ("run demo --resume x", "a resumed run keeps its experiment"),
    ("run demo --direct --lab X", "--lab: valid only without --direct and --simulate."),
    ("run demo --simulate --insecure", "--insecure: valid only without --direct and --simulate."),
    (
        "run demo --direct --metrics 127.0.0.1:0",
        "--metrics: valid only without --direct and --simulate.",
    ),
    ("institution --name a --name b", "--name: given twice. Give it once."),
    (
        "cloud demo --broker localhost:1 --broker=localhost:2",
        "--broker: given twice. Give it once.",
    ),
    ("--log-level debug --log-level info runs list", "--log-level: given twice. Give it once."),
    ("check --list x", "NAME: valid only without --list, which checks nothing."),
    ("check --list --set a=1", "--set: valid only without --list, which checks nothing."),
    ("sweep study/two --lab 'a b'", "--lab: 'a b' is not a lab name. Use 1 to 64 letters"),
    (
        "sweep study/two --table --direct",
        "--direct: valid only without --table, which runs nothing.",
    ),
    ("sweep study/two --table --jobs 2", "--jobs: valid only without --table, which runs nothing."),
    ("sweep study/two --dry-run --format latex", "--format: with --dry-run it is table or json."),
    ("lab status --wait inf", "--wait = 'inf': too large. Write 1000000000 or less."),
    ("plan demo --interface inf", "--interface = 'inf': too large. Write 100000 or less."),
    (
        "device --name d --broker localhost:1 --allow 'a b'",
        "--allow: 'a b': not a package. Write for instance",
    ),
]
WRONG_USE = [
    ("run demo --sets rounds=3", "--sets: no such option of fedstrata run. Did you mean"),
    ("run demo --simulate --workers 0", "--workers = '0': too small. Write 1 or more."),
    ("run demo --direct --workers 2", "--workers: valid only with --simulate."),
    ("run demo --energy csv:x", "--energy: no such option of fedstrata run. There are: set,"),
    (
        "cloud demo --broker localhost --lab 'two words'",
        "--lab: 'two words' is not a lab name. Use 1 to 64 letters,",
    ),
    (
        "cloud demo --broker localhost --connect-timeout -1",
        "--connect-timeout = '-1': too small. Write 0.1 or more.",
    ),
    (
        "institution --name 'ä' --broker localhost",
        "--name: 'ä' is not a node name. Use 1 to 64 letters,",
    ),
    (
        "device --name d --broker localhost --slots -1",
        "--slots: '-1': use auto, or a number from 1.",
    ),
    (
        "device --name d --lab 'x/y' --broker localhost",
        "--lab: 'x/y' is not a lab name. Use 1 to 64 letters,",
    ),
    ("doctor --name d --parent d", "--parent: no such option of fedstrata doctor. There are:"),
    ("plan demo --format xml", "--format = 'xml': not one of its values. There are: table,"),
    ("sweep", "FILE: missing. The sweep: a TOML file, or the name of one"),
    ("sweep study/none", "FILE: no file and no experiment has the name 'study/none'."),
    ("sweep study/two --seeds 0", "--seeds = '0': too small. Write 1 or more."),
    ("sweep study/two --seeds many", "--seeds = 'many': not a whole number. Write for instance 5."),
    ("sweep study/two --size tiny", "--size = 'tiny': not one of its values. There are: small,"),
    (
        "sweep study/two --table --format pdf",
        "--format = 'pdf': not one of its values. There are: table,",
    ),
    (
        "sweep study/two --direct --simulate",
        "--simulate: use one of --simulate, --direct and a lab.",
    ),
    ("compare x --format html5", "--format = 'html5': not one of its values. There are:"),
    ("compare x --by banana", "--by: no such option of fedstrata compare. There are: runs,"),
    ("export x --to wandb", "--to: no such option of fedstrata export. There are: runs,"),
    ("provision no.toml --out", "--out: requires an argument."),
    ("broker --kind rabbitmq", "--kind = 'rabbitmq': not one of its values. There are:"),
    ("broker --port -1", "--port = '-1': too small. Write 1 or more."),
    ("broker --acl no.acl", "--acl: no such option of fedstrata broker. There are: host,"),
    ("data partition", "EXPERIMENT: missing. The experiment: a TOML file, or a name"),
    ("runs list --sort", "--sort: no such option of fedstrata runs list. Did you mean"),
    ("runs delete", "RUN: missing. Folders of runs, or of a sweep, or prefixes"),
    ("runs sharpness", "RUN: missing. Folders of runs, or of a sweep, or prefixes"),
    ("runs sharpness x --points 0", "--points: no such option of fedstrata runs sharpness. There"),
    ("lab statos", "'statos': no such command of fedstrata lab. Did you mean"),
    ("links apply", "--to: name the broker by --to, or an interface by --device."),
    ("links apply lte", "--to: name the broker by --to, or an interface by --device."),
    (
        "links apply lte --interface nowhere0",
        "--interface: no such option of fedstrata links apply. There",
    ),
    ("links show", "'show': no such command of fedstrata links. There are:"),
    ("new", "NAME: missing. The new folder, and the experiment's name."),
    (
        "watch --once --format xml",
        "--format = 'xml': not one of its values. There are: table, json.",
    ),
    ("lab status --wait x", "--wait = 'x': not a number. Write for instance 0.5."),
    ("lab start", "'start': no such command of fedstrata lab. Did you mean 'status'?"),
    ("links aply", "'aply': no such command of fedstrata links. Did you mean 'apply'?"),
    ("links apply lte --up -1 --to 127.0.0.1", "--up = '-1': too small. Write 0.001 or more."),
    ("links clear --all", "--all: no such option of fedstrata links clear. There are: device."),
    (
        "doctor --brokers x",
        "--brokers: no such option of fedstrata doctor. Did you mean '--broker'?",
    ),
    ("provision", "LAB: missing. The lab's file, lab.toml."),
    ("export", "RUN: missing. Folders of runs, or of a sweep, or prefixes of runs' ids."),
    ("replay", "RUN: missing. Folder of a run that finished, or a prefix of its id."),
    ("report", "RUN: missing. Folders of runs, or of a sweep, or prefixes of runs' ids."),
    ("experiments list", "'list': one argument too many. See fedstrata experiments --help."),
    ("runs list x", "'x': one argument too many. See fedstrata runs list --help."),
    (
        "runs delete x --force",
        "--force: no such option of fedstrata runs delete. There are: runs, yes.",
    ),
    ("runs sharpness x --samples 0", "--samples = '0': too small. Write 1 or more."),
    (
        "runs resume x",
        "'resume': no such command of fedstrata runs. There are: list, delete, sharpness,",
    ),
    (
        "data check --roots x",
        "--roots: no such option of fedstrata data check. Did you mean '--root'?",
    ),
    (
        "data partition demo more",
        "'more': one argument too many. See fedstrata data partition --help.",
    ),
    (
        "data fetch mnist",
        "'fetch': no such command of fedstrata data. There are: check, partition.",
    ),
    ("check fedavg fedmr", "'fedmr': one argument too many. See fedstrata check --help."),
    ("broker --prot 1", "--prot: no such option of fedstrata broker. Did you mean '--port'?"),
    ("cloud", "EXPERIMENT: name an experiment, or resume a run with --resume FOLDER."),
    (
        "institution --name i --slots 3",
        "--slots: no such option of fedstrata institution. There are: name, parent,",
    ),
    ("device", "--name: missing. This device's name. Repeat it for several devices in one"),
    ("run demo --dry", "--dry: no such option of fedstrata run. Did you mean '--dry-run'?"),
    ("plan demo --rounds 0", "--rounds = '0': too small. Write 1 or more."),
    ("sweep study/two --jobs 0", "--jobs = '0': too small. Write 1 or more."),
    (
        "--log-levl debug run demo",
        "--log-levl: no such option of fedstrata. Did you mean '--log-level'?",
    ),
    ("ruN demo", "'ruN': no such command of fedstrata. Did you mean 'run'?"),
    ("provison a.toml", "'provison': no such command of fedstrata. Did you mean 'provision'?"),
    (
        "institutions --name i",
        "'institutions': no such command of fedstrata. Did you mean 'institution'?",
    ),
    ("devices --name a", "'devices': no such command of fedstrata. Did you mean 'device'?"),
    ("clouds demo", "'clouds': no such command of fedstrata. Did you mean 'cloud'?"),
    ("link apply", "'link': no such command of fedstrata. Did you mean 'links'?"),
    ("new x y", "'y': one argument too many. See fedstrata new --help."),
    ("watch --timeout -1", "--timeout = '-1': too small. Write 0.1 or more."),
    ("lab status --wait -1", "--wait = '-1': too small. Write 0.1 or more."),
    (
        "links apply lte --up fast --to 127.0.0.1",
        "--up = 'fast': not a number. Write for instance 0.5.",
    ),
    ("doctor --format xml", "--format = 'xml': not one of its values. There are: table, json."),
    ("provision a.toml b.toml", "'b.toml': one argument too many. See fedstrata provision --help."),
    ("export x --tensorbord a", "--tensorbord: no such option of fedstrata export. Did you mean"),
    ("replay x y", "'y': one argument too many. See fedstrata replay --help."),
    ("report x --format csv", "--format = 'csv': not one of its values. There are: table, json."),
    (
        "experiments --format yaml",
        "--format = 'yaml': not one of its values. There are: table, json.",
    ),
    ("runs list --format csv", "--format = 'csv': not one of its values. There are: table, json."),
    ("runs sharpness x --distance x", "--distance = 'x': not a number. Write for instance 0.5."),
    (
        "data check digits --format csv",
        "--format = 'csv': not one of its values. There are: table, json.",
    ),
    ("check x --data", "--data: requires an argument."),
    ("broker mosquitto", "'mosquitto': one argument too many. See fedstrata broker --help."),
    ("cloud demo demo", "'demo': one argument too many. See fedstrata cloud --help."),
    (
        "institution i --broker localhost:1",
        "--name: missing. This institution's name in the experiment.",
    ),
    ("device --name ''", "--name: an empty value. Write one, or omit it."),
    ("run demo --simulate=yes", "--simulate: does not take a value."),
    ("plan demo --rounds x", "--rounds = 'x': not a whole number. Write for instance 5."),
    ("sweep study/two --jobs x", "--jobs = 'x': not a whole number. Write for instance 5."),
    ("--log-level", "--log-level: requires an argument."),
]
EXPERIMENT = [
    ("run nofile.toml", "experiment = 'nofile.toml': No such file"),
    (
        "run demo --set aggregation.name=fedcros",
        "Did you mean cloud.aggregation or institution.aggregation?",
    ),
    ("run demo --set dataset=digit", "dataset = 'digit': unknown key. Did you mean data.dataset?"),
    ("run demo --set data.dataset=digit", "Did you mean 'digits'?"),
    ("run demo --set model.name=cnn_digit", "Did you mean 'cnn_digits'?"),
    ("run demo --set data.partition=dirichelet", "Did you mean 'dirichlet'?"),
    ("run demo --set training.lr=0.1", "Did you mean 'learning_rate'?"),
    ("run demo --set rounds", "--set = 'rounds': not of the form key=value."),
    ("run demo --set .=1", "--set = '.=1': not of the form key=value."),
    ("run demo --set name=“x”", "--set = 'name=“x”': curly quotes. Write straight ones."),
    ("run demo --set “rounds=3”", "curly quotes. Write straight ones."),
    ("run demo --set data.dataset=\u2018digits\u2019", "curly quotes. Write straight ones."),
    ("run demo --set data.min_samples=100000", "each device needs 100000. Lower data.min_samples."),
    ("lab status --lab no.toml", "lab = 'no.toml': No such file"),
    (
        f"run demo --set {'a.' * 2000}b=1",
        "no key is that deep. Write for instance training.epochs=2.",
    ),
    (
        f"run demo --set rounds=0x{'f' * 5000}",
        "rounds = a number of too many digits: too many local rounds of each",
    ),
    (f"run demo --set rounds={'9' * 5000}", " ... (5,002 characters) ... "),
    (
        "run demo --set training.objective=fedprx",
        "training.objective.name = 'fedprx': no objective has this name.",
    ),
    ("run demo --set topology.devices=3000", "Use at most 143 devices, or lower data.min_samples."),
    (
        "run demo --set model=lenet5",
        "does not accept images of [1, 8, 8] of the data set. Use linear_digits or",
    ),
    (
        "run demo --set topology.institutions=0",
        "institution.rounds = 2: this lab has no institution.",
    ),
    ("run demo --set transfer.wan.up=fp17", "Did you mean 'fp16'?"),
    ("run demo --set hardware.default=raspbery", "Did you mean 'raspberry-pi-5'?"),
    ("cloud demo --broker localhost:99999", "--broker = 'localhost:99999'"),
    (
        "device --name a --broker localhost:1 --tls-key no",
        "--tls-key = 'no': a key without its certificate.",
    ),
    (
        "device --name a --broker localhost:1 --password-file no",
        "a password without its login. Give --username, too.",
    ),
    ("sweep study/two --set seed=3", "--set = 'seed=3': the sweep has seeds. Use --seeds."),
    (
        "sweep study/two --broker localhost:x",
        "--broker = 'localhost:x': 'localhost:x' is not an address.",
    ),
    (
        "links apply lte --to nowhere.invalid",
        "--to = 'nowhere.invalid': no address is known: Name or service not known.",
    ),
    ("cloud demo --broker mqtt://localhost", "is not an address. Write host, host:port"),
    ("cloud demo --lab no.toml", "lab = 'no.toml': No such file"),
    (
        "device --name a --broker localhost:1 --accelerator gpu",
        "--accelerator = 'gpu': no accelerator has this name.",
    ),
    (
        "institution --name i --broker localhost:1 --metrics 9464",
        "--metrics = '9464': not host:port.",
    ),
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
        "links.enforce = 'kernel': only token buckets replay a trace. Use links.enforce =",
    ),
    (
        "run demo --set model.name=nomod:f",
        "model.name = 'nomod:f': cannot be imported (ModuleNotFoundError",
    ),
    (
        "run demo --direct --set data.dataset=nomod:f",
        "data.dataset = 'nomod:f': cannot be imported",
    ),
    (
        "run demo --set institution.aggregation.name=nomod:F",
        "institution.aggregation.name = 'nomod:F': cannot be",
    ),
    (
        "plan demo --set training.objective.name=nomod:F",
        "training.objective.name = 'nomod:F': cannot be imported",
    ),
    (
        "cloud demo --broker localhost:1 --set cloud.selection.name=nomod:F",
        "cloud.selection.name = 'nomod:F': cannot",
    ),
    (
        "run demo --direct --accelerator gpu",
        "--accelerator = 'gpu': no accelerator has this name. Use cpu, cuda",
    ),
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
WRONG_VALUES = [
    ("run demo --set data.root=", "data.root = '': empty. Write a text, or omit the key."),
    (
        "run demo --set data.target_column=",
        "data.target_column = '': empty. Write a text, or omit the key.",
    ),
    ("run demo --set model.initial=", "model.initial = '': empty. Write a text, or omit the key."),
    (
        "sweep study/two --direct --accelerator gpu",
        "--accelerator = 'gpu': no accelerator has this name. Use cpu,",
    ),
    (
        "sweep study/two --set method=FedAvg",
        "--set = 'method=FedAvg': an axis of the sweep. Use --only method=VALUE.",
    ),
    (
        "links clear --device nowhere0",
        "--device = 'nowhere0': not an interface that leads to another host. There are:",
    ),
    ("data check mnist --root no", "data.root = 'no': not found:"),
    ("run demo --set rounds=", "rounds = '': not a whole number. Write for instance 5."),
    ("run demo --set rounds=three", "rounds = 'three': not a whole number. Write for instance 5."),
    ("run demo --set cloud=3", "cloud = 3: not a table. Write a table of participation,"),
    (
        "run demo --set cloud.aggregation=FedAvg",
        "cloud.aggregation.name = 'FedAvg': no rule has this name.",
    ),
    (
        "run demo --set training.batch_size=0",
        "training.batch_size = 0: too small. Write 1 or more.",
    ),
    (
        "run demo --set training.learning_rate=-0.1",
        "training.learning_rate = -0.1: too small. Write a number",
    ),
    (
        "run demo --set data.partition=iid --set data.concentration=0.5",
        "data.concentration = 0.5: no effect with data.dataset",
    ),
    (
        "run demo --set evaluation.at=device",
        "evaluation.at = 'device': not one of its values. Did you",
    ),
    ("run demo --set stop.target=90", "stop.target = 90.0: no accuracy. Write a fraction above 0"),
    (
        "run demo --set cloud.participation=2",
        "cloud.participation = 2: too large. Write 1 or less.",
    ),
    (
        "run demo --set cloud.min_available=0",
        "cloud.min_available = 0: too small. Write 1 or more, or write a number above 0.",
    ),
    (
        "run demo --set institution.entering=-1",
        "institution.entering = -1: too small. Write 0 or more.",
    ),
    (
        "run demo --set availability.moves.device-9=[]",
        "availability.moves.device-9 = []: too short. Give at least",
    ),
    (
        'run demo --set "availability.moves={device-0=[{at_s=3}]}"',
        "availability.moves.device-0.0.parent: missing. Add this key.",
    ),
    ("run demo --set links.wan=5g", "links.wan = '5g': no profile has this name. There are:"),
    ("run demo --set links.enforce=tc", "links.enforce = 'tc': not one of its values. There are:"),
    ("run demo --set transfer.idle_s=0", "transfer.idle_s = 0: too small. Write a number above 0."),
    ("run demo --set transfer.codec=fp16", "transfer.codec = 'fp16': unknown key. Known keys:"),
    ("run demo --set hardware.device-0=pi5", "hardware.device-0 = 'pi5': unknown key. Known keys:"),
    (
        "run demo --set hardware.default.step_s=-1",
        "hardware.default.step_s = -1: too small. Write a number",
    ),
    (
        "run demo --set model.personal=fc",
        "model.personal = 'fc': not a list. Write for instance [\"a\",",
    ),
    (
        "run demo --set \"training.trainer={name='flower'}\"",
        "training.trainer.client_fn: neither it nor app is set.",
    ),
    (
        "run demo --set training.trainer=sgdd",
        "training.trainer.name = 'sgdd': no trainer has this name.",
    ),
    (
        "run demo --set \"training.objective={name='fedprox', mu=-1}\"",
        "training.objective.mu = -1: too small. Write 0 or more.",
    ),
    (
        'run demo --set "cloud.privacy={clip_norm=0}"',
        "cloud.privacy.clip_norm = 0: too small. Write a number",
    ),
    (
        "run demo --set \"cloud.selection='random'\"",
        "cloud.selection.name = 'random': no selector has this name.",
    ),
    ("run demo --metrics localhost", "--metrics = 'localhost': not host:port. Use a free"),
    (
        "cloud demo --broker localhost:0",
        "--broker = 'localhost:0': 'localhost:0' is not an address.",
    ),
    (
        "cloud demo --broker localhost --tls-ca no.crt",
        "--tls-ca = 'no.crt': No such file or directory. Name the",
    ),
    (
        "cloud demo --broker localhost --tls-cert a.crt",
        "--tls-cert, --tls-key = 'a.crt': No such file or directory.",
    ),
    (
        "institution --name i --broker localhost --child-broker 'x:y'",
        "--child-broker = 'x:y': 'x:y' is not an address. Write",
    ),
    (
        "device --name d --broker localhost --accelerator tpu",
        "--accelerator = 'tpu': no accelerator has this name. Use",
    ),
    (
        "device --name d --broker localhost --energy csv:watts.csv",
        "--energy = 'csv:watts.csv': no such source of energy. Use",
    ),
    (
        "device --name d --broker localhost --energy plug:",
        "--energy = 'plug:': no such source of energy. Use auto,",
    ),
    ("sweep demo", "not a sweep: it has no [axes]"),
    ("sweep study/two --only method", "--only = 'method': not of the form axis=value. Write for"),
    (
        "sweep study/two --only methods=FedAvg",
        "--only = 'methods': no axis has this name. Did you mean",
    ),
    (
        "sweep study/two --only method=fedavg",
        "--only = 'method=fedavg': the axis has no such value. Did",
    ),
    ("compare .", "RUN = '.': no run in it. List the runs: fedstrata runs list."),
    ("replay x", "RUN = 'x': not a run's folder, and no run id has this"),
    (
        "provision lab.toml --wheel no.whl",
        "lab = 'lab.toml': No such file or directory. Name a lab's",
    ),
    ("check :y", "name = ':y': not of the form package.module:Name. Write for"),
    (
        "check common.methods.fedavg:FedAvg --set a",
        "--set = 'a': not of the form key=value. Write for instance",
    ),
    (
        "broker --tls-cert a --tls-key b",
        "--tls-cert, --tls-key = 'a b': No such file or directory.",
    ),
    ("data check", "data.root = 'data': contains no data set. Known folders:"),
    ("data check digits --root no", "data.dataset = 'digits': not read from a root. There are:"),
    ("runs delete no", "RUN = 'no': not a run's folder, and no run id has this"),
    ("runs delete .", "RUN = '.': no run in it. List the runs: fedstrata runs list."),
    ("compare . --target 0.9", "RUN = '.': no run in it. List the runs: fedstrata runs list."),
    ("runs list --runs no", "--runs = 'no': No such file or directory. Name another folder."),
    (
        "run demo --set cloud.rounds=3",
        "cloud.rounds = 3: unknown key. Did you mean rounds or institution.rounds?",
    ),
    ("run demo --set institution.rounds=0", "institution.rounds = 0: too small. Write 1 or more."),
    ("run demo --set rounds=1e3", "rounds = 1000.0: not a whole number. Write for instance 5."),
    ("run demo --set seed=x", "seed = 'x': not a whole number. Write for instance 5."),
    (
        "run demo --set name=",
        "name = '': not of the form that is needed. Write letters, digits, _ . and -,",
    ),
    ("run demo --set topology.devices=0", "topology.devices = 0: too small. Write 1 or more."),
    (
        "run demo --set data.concentration=0",
        "data.concentration = 0: too small. Write a number above 0.",
    ),
    ("run demo --set model.projection=-1", "model.projection = -1: too small. Write 0 or more."),
    ("run demo --set training.epochs=0", "training.epochs = 0: too small. Write 1 or more."),
    (
        "run demo --set links.tolerance=-1",
        "links.tolerance = -1: too small. Write a number above 0.",
    ),
    ("run demo --set transfer.window=0", "transfer.window = 0: too small. Write 2 or more."),
    ("run demo --set hardware.spread=-1", "hardware.spread = -1: too small. Write 0 or more."),
    ("run demo --set evaluation.every=0", "evaluation.every = 0: too small. Write 1 or more."),
    (
        "run demo --set stop.monitor=accuracy",
        "stop.monitor = 'accuracy': not one of its values. There are: score, loss.",
    ),
    (
        "run demo --set score.name=acc",
        "score.name = 'acc': no such score. Did you mean 'accuracy'?",
    ),
    (
        "run demo --set availability.device-0=x",
        "availability.device-0 = 'x': unknown key. Known keys: trace, moves.",
    ),
    (
        "run demo --set profiles.x.up_mbit=-1",
        "profiles.x.up_mbit = -1: too small. Write a number above 0.",
    ),
    ("run demo --set =3", "--set = '=3': not of the form key=value. Write for instance seed=3."),
    (
        "run demo --set rounds:3",
        "--set = 'rounds:3': not of the form key=value. Write for instance seed=3.",
    ),
    ("run demo --set Rounds=3", "Rounds = 3: unknown key. Did you mean 'rounds'?"),
    (
        "data partition demo --set data.partition=iidd",
        "data.partition = 'iidd': not one of its values. Did you mean 'iid'?",
    ),
    (
        "run demo --set cloud.epoch_control=temp",
        "cloud.epoch_control.name = 'temp': not one of its values. Did you mean",
    ),
    (
        "run demo --set institution.min_available=5",
        "institution.min_available = 5: more than the children of a parent (4). Use at",
    ),
    ("run demo --set rounds=true", "rounds = True: not a whole number. Write for instance 5."),
    (
        "run demo --set 'name=a b'",
        "name = 'a b': not of the form that is needed. Write letters, digits, _ . and",
    ),
    (
        "run demo --set topology.institutions=-1",
        "topology.institutions = -1: too small. Write 0 or more.",
    ),
    ("run demo --set data.noise=-1", "data.noise = -1: too small. Write 0 or more."),
    (
        "run demo --set model.layers=3",
        "model.layers = 3: unknown key. Known keys: name, projection, initial,",
    ),
    (
        "run demo --set training.batch_size=ten",
        "training.batch_size = 'ten': not a whole number. Write for instance 5.",
    ),
    (
        "run demo --set links.check=off1",
        "links.check = 'off1': not one of its values. Did you mean 'off'?",
    ),
    (
        "run demo --set transfer.chunk_bytes=10",
        "transfer.chunk_bytes = 10: too small. Write 32768 or more.",
    ),
    (
        "run demo --set hardware.default.slowdown=0",
        "hardware.default.slowdown = 0: too small. Write 1 or more.",
    ),
    (
        "run demo --set evaluation.at=nowhere",
        "evaluation.at = 'nowhere': not one of its values. There are: cloud, devices,",
    ),
    ("run demo --set stop.patience=0", "stop.patience = 0: too small. Write 1 or more."),
    (
        "run demo --set 'availability.moves={device-0=[{at_s=-3,parent=\"institution-1\"}]}'",
        "availability.moves.device-0.0.at_s = -3: too small. Write 0 or more.",
    ),
]
FILES = [
    (
        "run demo --runs /proc/no",
        "--runs = '/proc/no': No such file or directory. Name another folder.",
    ),
    ("run demo --direct --runs /dev/null", "--runs = '/dev/null': Not a directory."),
    ("cloud demo --broker localhost:1 --runs /dev/null", "--runs = '/dev/null': Not a directory."),
    (
        "sweep study/two --direct --kept /proc/no",
        "No such file or directory. Name another place, in a folder that exists",
    ),
]
BY_CODE = {
    2: (*COMMANDS, *OPTIONS, *EMPTY, *USE, *WRONG_USE),
    4: (*EXPERIMENT, *WRONG_VALUES),
    6: FILES,
}
ALL = [(line, code, words) for code, lines in BY_CODE.items() for line, words in lines]
FOREIGN = (
    "Errno",
    "Input should be",
    "Value error",
    "validation error",
    "Traceback",
    "^[",
    "Usage:",
    "string_",
)


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


# of a file, the command that reads it, and words of the line
CONTENTS: list[tuple[bytes, str, str]] = [
    (b"name = 'Z\xfcrich'", "run", "not TOML: byte 0xfc in line 1 is not utf-8. Fix that line."),
    (b"seed = " + b"9" * 5000, "run", "not TOML: a number has too many digits. Fix that line."),
    (b"seed = 0x" + b"f" * 5000, "run", "seed = a number of too many digits: too large."),
    (b"a." * 5000 + b"a = 1", "run", "not TOML: nested too deeply. Fix that line."),
    (b"a." * 20_000 + b"a = 1", "run", "not TOML: nested too deeply. Fix that line."),
    (
        b"x = { " + b"'a' . " * 20_000 + b"a = 1 }",
        "run",
        "not TOML: nested too deeply. Fix that line.",
    ),
    (b"# " + b"x" * 1_048_576, "run", "larger than 1 MB. Name a TOML file."),
    (b"a = " + b"[" * 5000, "run", "not TOML: nested too deeply. Fix that line."),
    (
        b"[machines.a]\naddress = 'b'",
        "run",
        "a lab's file. Name an experiment, and this one by --lab.",
    ),
    (b"[links.wan]\nup = 3", "plan", "links.wan.up = 3: unknown key. Did you mean 'up_mbit'?"),
    (
        b"rounds = 3",
        "sweep",
        "not a sweep: it has no [axes]. Use `fedstrata run` for an experiment.",
    ),
    (
        b"title = 'T'\n[axes]\n'model.name' = ['lenet']",
        "sweep",
        "cell lenet: model.name = 'lenet': no such model.",
    ),
    (b"name = 'rack'", "provision", "broker: missing. Add this key."),
    ("name = “x”".encode(), "run", "curly quotes in line 1. Write straight ones."),
    (
        "rounds = 2\nname = \u2018x\u2019".encode(),
        "provision",
        "curly quotes in line 2. Write straight ones.",
    ),
    (
        b"name = 'x'\nrounds = 2",
        "provision",
        "an experiment: it has no [machines]. Name a lab's TOML file.",
    ),
    (
        b"name = 'x'\nrounds = 2",
        "lab status --lab",
        "it.toml': an experiment: it has no [machines]. Name a lab's",
    ),
    (
        b"title = 'T'\n[axes.method]\nA = {}",
        "doctor --lab",
        "a sweep: it has no [machines]. Name a lab's TOML file.",
    ),
    (b"", "sweep study/two --table --runs", "it.toml': not a folder. Name another place."),
    (b"", "sweep study/two --table --kept", "it.toml': not a folder. Name another place."),
    (
        b"name = 'rack'\nbroker = 'b'\n[brokers]\n[machines.a]\nadress = 'b'",
        "provision",
        "machines.a.adress = 'b': unknown key. Did you mean 'address'?",
    ),
    (b"{", "plan demo --speeds", "it.toml': unreadable: "),
    (b"[1]", "plan demo --speeds", "it.toml': has no speeds of machines. Name a simulated run."),
    (
        b"\n",
        "cloud demo --broker localhost:1 --username u --password-file",
        "an empty file. Write the password into it.",
    ),
    (
        b"title = 'T'\n[axes]\nrounds = [1, 2, 1]",
        "sweep",
        "axes.rounds = 1: a value twice. Write each value once.",
    ),
    (
        b"title = 'T'\n[axes]\nseed = [1, 2]",
        "sweep",
        "axes.seed.1.seed = 1: the sweep has seeds. Set seeds instead.",
    ),
    (
        b"title = 'T'\n[axes]\nrounds = [1, 2]\n[[where]]\nrounds = 3",
        "sweep",
        "where.rounds = '3': the axis has no such value. There are: 1, 2.",
    ),
]


@pytest.mark.parametrize(
    ("content", "command", "words"), CONTENTS, ids=[words[:30] for *_, words in CONTENTS]
)
def test_a_mistake_in_a_file_ends_with_one_line(
    content: bytes, command: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "it.toml"
    file.write_bytes(content)
    done = invoke(*command.split(), file)
    assert done.exit_code == 4, done.stderr
    assert done.stderr.startswith("fedstrata: ") and done.stderr.count("\n") == 1
    assert words in done.stderr and not any(text in done.stderr for text in FOREIGN)


def measured(*words: str | Path) -> tuple[Result, int]:
    """Return a command's result, and the most bytes that Python's objects took meanwhile."""
    tracemalloc.start()
    try:
        done = invoke(*words)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return done, most


@pytest.mark.parametrize(
    "key", [b"a." * 20_000 + b"a", b"[" + b"a." * 20_000 + b"a]", b"x = [{" + b'"a".' * 20_000]
)
def test_a_file_with_a_long_key_takes_little_memory(key: bytes, tmp_path: Path) -> None:
    """tomllib keeps each beginning of a key: of 40 kB 1.2 GB."""
    (file := tmp_path / "it.toml").write_bytes(key + b" = 1")
    done, most = measured("run", file)
    assert done.exit_code == 4 and "nested too deeply" in done.stderr
    assert most < 30_000_000


@pytest.mark.parametrize(
    "line",
    [
        "[{:x}]",
        "[[{:x}]]",
        "[ {:x}" + ".a" * 98 + " ] # x",
        "'{:x}'" + ".a" * 98 + " = 1",
        "{:x}.a = 1",
    ],
)
def test_a_file_of_many_tables_is_refused_before_it_is_parsed(line: str, tmp_path: Path) -> None:
    """tomllib takes a kilobyte for each: of 1 MB half a gigabyte."""
    lines = (line.format(number) for number in range(52_000 if len(line) < 20 else 4_000))
    (file := tmp_path / "it.toml").write_text("\n".join(lines))
    done, most = measured("run", file)
    assert done.exit_code == 4 and done.stderr.count("\n") == 1, done.stderr
    assert "its headers and keys have more than 50,000 parts. Write fewer tables." in done.stderr
    assert most < 30_000_000


def test_numbers_of_a_long_list_are_no_headers() -> None:
    assert len(parsed("times = [\n" + "[1.5],\n" * 60_000 + "0.25, 1.5\n]")["times"]) == 60_002


def test_a_file_without_end_is_not_read() -> None:
    done = invoke("run", "/dev/zero")
    assert done.exit_code == 4 and done.stderr.endswith(
        "'/dev/zero': larger than 1 MB. Name a TOML file.\n"
    )


LAB_FILE = """
name = "rack"
broker = "main"
tls = false
brokers = { main = { machine = "server" } }
machines = { server = { address = "127.0.0.1", cloud = true } }
institutions = { institution-0 = { machine = "server" } }
devices = [{ names = ["device-0..2"], machine = "server", parent = "institution-0" }]
"""


def test_doctor_examines_nodes_of_the_labs_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(LAB_FILE)
    done = invoke("doctor", "--lab", file, "--name", "device-77")
    assert done.exit_code == 4 and done.stderr.count("\n") == 1
    assert "--name = 'device-77': no node of the lab rack. Did you mean 'device-" in done.stderr


def test_one_is_singular() -> None:
    assert [counted(count, "global rounds") for count in (0, 1, 2, 1000)] == [
        "0 global rounds", "1 global round", "2 global rounds", "1,000 global rounds"
    ]  # fmt: skip
    nodes = {"institutions": 1, "devices": 2}
    facts = {
        "run": "r",
        "experiment": "x",
        "nodes": nodes,
        "global_rounds": 1,
        "model": "m",
        "model_bytes": 1,
    }
    one = load(shipped()["demo"], ())
    assert "1 institution, 2 devices" in str(CloudLog(one).line("run", {**facts, "folder": "f"}))


def test_an_error_that_would_come_again_has_no_command_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, lines in (
        (InvalidExperiment("a", 1, "no", "Yes."), 0),
        # after a global round: own code that was corrected goes on
        (InvalidExperiment("a", 1, "no", "Yes."), 1),
        (RunFailed("so"), 1),
        (KeyboardInterrupt(), 2),  # after the terminal's ^C
    ):
        folder = RunFolder.create(tmp_path, load(shipped()["demo"], ()))
        folder.begun = True
        if lines:
            folder.add_round(a_global_round(1, 0.5))
        with pytest.raises(type(error)), kept_once_begun(folder, ["fedstrata", "run"]):
            raise error
        folder.release()
        assert capsys.readouterr().err.count("\n") == lines


def test_a_figures_folder_is_checked_before_they_are_drawn(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    run = make_run(tmp_path, {})
    (tmp_path / "file").touch()
    done = invoke("report", run, "--figures", tmp_path / "file")
    assert done.exit_code == 4 and done.stderr.count("\n") == 1 and "--figures = " in done.stderr
    assert not (run / "report.html").exists()
