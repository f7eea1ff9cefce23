"""What an experiment may not say: refused with key, value, what is wrong and what to do, in TOML
and in JSON.
"""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse

# Lines of a file, and after a bar, or the colon, the message; three dots stand for a part of it.
REFUSED = """
ronds = 3: unknown key. Did you mean 'rounds'?
Seed = 3: unknown key. Did you mean 'seed'?
training.solver = 'sgd' | training.solver = 'sgd' ... unknown key ... Known keys: epochs, batch_size, learn
cloud.rounds = 2: unknown key. Did you mean rounds or institution.rounds?
cloud.closing.qorum = 2: unknown key. Did you mean 'quorum'?
links.wan.up_mbits = 2: unknown key. Did you mean 'up_mbit'?
links.wan.delay_ms = 1e9 | links.wan.delay_ms = 1000000000.0: a message and its answer take 2e+06 s, so no node ever
    joins. Use less, or more than that for transfer.idle_s, now 120.
links.of.device-0.delay_ms = 60000 | links.of.device-0.delay_ms = 60000.0 ... take 120 s
links.lan = {trace = {seconds = [0], up_mbit = [1], down_mbit = [1], delay_ms = [90000]}} |
    links.lan.delay_ms = 90000.0 ... take 180 s
links.wan.down_mbit = 1e-9 | links.wan.down_mbit = 1e-09: a message of 1 kB takes 8e+06 s, so no node ever joins. Use
    more, or a longer transfer.idle_s, now 120.
links.of.device-0.up_mbit = 5e-5 | links.of.device-0.up_mbit = 5e-05 ... takes 160 s
links.van = {}: unknown key. Did you mean 'wan'?
links.of.device-0.up = 2: unknown key. Did you mean 'up_mbit'?
profiles.mine.delay = 2: unknown key. Did you mean 'delay_ms'?
profile.mine = {} | profile = {'mine': {}}: unknown key. Did you mean 'profiles'?
xyzzy = 'plugh' | xyzzy = 'plugh' ... unknown key ... Known keys: name, seed, rounds
cloud.aggregation = {name = 'fedcross', alph = 0.9} |
    cloud.aggregation.alph = 0.9 ... unknown key ... Did you mean 'alpha'?
cloud.aggregation = {name = 'fedadp', xyzzy = 1} |
    cloud.aggregation.xyzzy = 1 ... unknown key ... Known keys: name, step, a.
cloud.aggregation.alpha = 0.9: unknown key. It belongs to fedcross; this is fedavg.
institution.aggregation = {name = 'fedcda', first_stage_rounds = 5} |
    institution.aggregation.first_stage_rounds = 5 ... unknown key ...
    It belongs to fedcross and fedmr; this is fedcda.
seed = 'one': not a whole number. Write for instance 5.
cloud.min_available = 1.5: not a whole number. Write for instance 5, or write a number below 1.
seed = 1.0: not a whole number. Write for instance 5.
seed = true | seed = True: not a whole number. Write for instance 5.
seed = -1: too small. Write 0 or more.
seed = 9223372036854775808: too large. Write a number below 9223372036854775808.
rounds = 0: too small. Write 1 or more.
name = 'no spaces' | name = 'no spaces' ... a letter or digit first
name = 3: not a text. Write it in quotes.
training.learning_rate = 'fast': not a number. Write for instance 0.5.
training.learning_rate = 0: too small. Write a number above 0.
training.momentum = 1.0: too large. Write a number below 1.
training = 3 | training = 3 ... not a table
data.dataset = 'imagenet' | data.dataset = 'imagenet' ... There are: digits, mnist,
data.concentration = inf: not a finite number. Write for instance 0.5.
data.concentration = nan: not a finite number. Write for instance 0.5.
adversaries = 3: not a list. Write a table [[adversaries]] for each.
adversaries = [{share = 0.5}] | adversaries.0.attack ... missing. Add this key.
adversaries = [{attack = 'nope', share = 0.5}] |
    adversaries.0.attack.name = 'nope': no attack has this name. There are: label_flip, backdoor,
adversaries = [{attack = {name = 'scaled', std = 2.0}, share = 0.5}] |
    adversaries.0.attack.std = 2.0: unknown key. It belongs to gaussian and free_rider and equivocation; this is scaled.
adversaries = [{attack = 'scaled'}] | adversaries.nodes = []: names no adversary. Give nodes, or below, or share
adversaries = [{attack = 'scaled', nodes = ['device-0'], share = 0.5}] |
    adversaries.nodes = ['device-0']: share is given, too.
adversaries = [{attack = 'scaled', nodes = ['device-9']}] |
    adversaries.nodes = 'device-9': no institution or device has this name. Did you mean 'device-0'?
adversaries = [{attack = 'scaled', below = 'device-0'}] | adversaries.below = 'device-0': no device is below it
adversaries = [{attack = 'scaled', nodes = ['device-0']}, {attack = 'late', nodes = ['device-0']}] |
    adversaries.nodes = 'device-0': is an adversary of another table, too. Give it one attack.
adversaries = [{attack = 'lie', share = 1.0}] |
    adversaries.knows = 'itself': lie computes with the uploads of others. Set knows = "colluders" or "siblings".
adversaries = [{attack = 'late', share = 1.0, knows = 'siblings'}] |
    adversaries.knows = 'siblings': late sends no upload of its own. Use "itself".
adversaries = [{attack = 'late', nodes = ['institution-0']}] |
    adversaries.attack.name = 'late': only a device can do that. Name devices in nodes, or use below.
adversaries = [{attack = 'equivocation', nodes = ['device-0']}] |
    adversaries.attack.name = 'equivocation': only an institution sends models to others.
adversaries = [{attack = 'silent', nodes = ['device-0']}] |
    adversaries.attack.name = 'silent': rounds of institution-0 would wait for device-0 for ever.
cloud.closing.rule = 'most': not one of its values. There are: all, quorum.
training.recorded = 'yes': not one of its values. There are: auto, true, false.
cloud.aggregation = 3: not a table. Write a name, or a table.
cloud.aggregation.weights = 'size' | cloud.aggregation.weights = 'size' ... There are: data, uniform.
cloud.aggregation = {name = 'fedcross', alpha = 0.4} | cloud.aggregation.alpha = 0.4 ... Write 0.5 or more.
institution.aggregation = {name = 'fedcross', propeller_alpha = 0} |
    institution.aggregation.propeller_alpha = 0 ... Write a number above 0.
institution.aggregation = {name = 'fedmr', granularity = 'layer'} |
    institution.aggregation.granularity = 'layer' ... not one of its values
cloud.aggregation = {name = 'fedcda', warmup = {name = 'fedcross'}} |
    cloud.aggregation.warmup.name = 'fedcross': no rule of a warm-up has this name. There are: fedavg, fedavgm
cloud.aggregation = {name = 'fedcda', warmup = {name = 'fedadam'}} |
    cloud.aggregation.warmup.learning_rate = 'not set'
cloud.aggregation = {name = 'fedcda', warmup = {name = 'fedavgm', weights = 'uniform'}} |
    cloud.aggregation.warmup.weights = 'uniform': the weights are those of fedcda. Remove it.
cloud.aggregation = {name = 'fedcda', refine = {name = 'fedlaw'}} |
    cloud.aggregation.refine.name = 'fedlaw': no distillation has this name. There are: feddf, fedbe.
cloud.aggregation = {name = 'fedcda', refine = {name = 'feddf'}} |
    cloud.aggregation.name = 'fedcda': needs samples at the node, and data.node_samples is 0.
cloud.aggregation = {name = 'fedcda', refine = {name = 'feddf', step = {name = 'fedavgm'}}} |
    cloud.aggregation.refine.step = 'fedavgm': no place for a step. Remove it.
cloud.aggregation = {name = 'fedcda', depth = 0} | cloud.aggregation.depth = 0 ... Write 1 or more.
cloud.epoch_control.control = 'mean' | cloud.epoch_control.control = 'mean' ... not one of its values
transfer.window = 65: too large. Write 64 or less.
transfer.chunk_bytes = 1000: too small. Write 32768 or more.
transfer.keepalive_s = 4: too small. Write 5 or more.
transfer.keepalive_s = 65536: too large. Write 65535 or less.
links.enforce = 'kernal': not one of its values. Did you mean 'kernel'?
links.wan.delay_ms = -1: too small. Write 0 or more.
links.lan.profile = 3: not a text. Write it in quotes.
links.lan = 3 | links.lan = 3 ... not a table. Write the name of a profile, or a table of up_mbit,
tiers = 3: not a list. Write a table [[tiers]] for each.
tiers = [3] | tiers.0 = 3 ... not a table. Write a table of name,
links.of = ['device-0']: not a table. Write { key = value }, or the keys below [table].
links = 'lte': not a table. Write a table of enforce, check, tolerance, of, wan, lan.
profiles.lte = 3; links.lan = 'lte' | profiles.lte = 3: not a table. Write a table of up_mbit, down_mbit, delay_ms.
profiles.lte.up_mbit = 0; links.lan = 'lte' | profiles.lte.up_mbit = 0: too small. Write a number above 0.
profiles."no spaces" = {} | profiles.no spaces = 'no spaces' ... a letter or digit first
topology.institutions = -1: too small. Write 0 or more.
topology.devices = 2.5: not a whole number. Write for instance 5.
topology.devices = ['ok', 'not ok'] | topology.devices.1 = 'not ok' ... a letter or digit first
topology.devices = ['ok', 7] | topology.devices.1 = 7: not a text. Write it in quotes.
topology.members = ['a']: not a table. Write { key = value }, or the keys below [table].
topology.members.institution-0 = 'device-0' | topology.members.institution-0 = 'device-0' ... not a list
cloud.aggregation = {name = 'fedcros', alpha = 0.9} |
    cloud.aggregation.name = 'fedcros' ... no rule has this name ... Did you mean 'fedcross'?
cloud.aggregation = {name = 'FedAvg', alpha = 0.9} |
    cloud.aggregation.name = 'FedAvg' ... no rule has this name ... Did you mean 'fedavg'?
cloud.aggregation = {name = 'xyzzy', alpha = 0.9} |
    cloud.aggregation.name = 'xyzzy' ... no rule has this name ...
    There are: fedavg, independent, fedcross, fedmr, fedcda, fedadp, fedavgm,
profiles.mine = {}; links.wan = 'wan-10mbt' |
    links.wan = 'wan-10mbt' ... no profile has this name ... Did you mean 'wan-10mbit'?
profiles.mine = {}; links.lan.profile = 'lan-1G' |
    links.lan = 'lan-1G' ... no profile has this name ... Did you mean 'lan-1g'?
profiles.mine = {}; links.of.device-0 = 'min' |
    links.of.device-0 = 'min' ... no profile has this name ... Did you mean 'mine'?
profiles.mine = {}; links.wan = 'xyzzy' | links.wan = 'xyzzy' ... no profile has this name ... There are: wan-10mbit,
topology.devices = 30; links.of.device-1O = 'lte' |
    links.of = 'device-1O' ... no institution or device ... Did you mean 'device-1
topology.devices = ['fedcross']; links.of.fedcross.up = 2 |
    links.of.fedcross.up = 2 ... unknown key ... Did you mean 'up_mbit'?
topology = {institutions = ['a'], devices = ['d', 'e'], members = {a = ['d']}} |
    topology.members = 'e' ... is in no institution ... exactly one
topology = {institutions = ['a', 'b'], devices = ['d', 'e'], members = {a = ['d', 'e'], b = ['e']}} |
    topology.members = ' ... is in more than one institution ... exactly one
topology = {institutions = 3, devices = 2} | topology.devices =  ... would have no device ... at least one device
topology = {institutions = ['a', 'b'], devices = ['d'], members = {a = ['d']}} |
    topology.devices =  ... would have no device ... at least one device
topology = {institutions = 1, devices = []} | topology.devices =  ... would have no device ... at least one device
topology.institutions = [] | topology.institutions = [] ... no institution ... at least one institution
topology.institutions = ['x', 'y', 'x'] | topology.institutions = 'x': duplicate name. Give every node its own name.
topology.devices = ['x', 'y', 'x'] | topology.devices = 'x': duplicate name. Give every node its own name.
topology.institutions = ['cloud'] | topology = 'cloud': the name is reserved. Give every node its own name.
topology.devices = ['all'] | topology = 'all': the name is reserved. Give every node its own name.
topology = {institutions = ['x'], devices = ['x']} | topology = 'x' ... two roles share ... its own name
topology = {institutions = ['a'], devices = ['d'], members = {a = ['d'], b = ['d'], c = [], e = [], f = []}} |
    topology.members.b = ['d'] ... no institution has this name ... institutions: a
topology = {institutions = ['a'], devices = ['d'], members = {a = ['d', 'e']}} |
    topology.members = 'e' ... not a device of topology.devices ... Add it
cloud.closing = {rule = 'quorum', deadline_s = 1.0} |
    cloud.closing.quorum ... needs it ... Set cloud.closing.quorum
institution.closing = {rule = 'quorum', quorum = 1} |
    institution.closing.deadline_s ... needs it ... Set institution.closing.deadline_s
institution.participation = 0.0 | institution.participation = 0.0 ... selects no clients ... above 0 and at most 1
institution.participation = -0.5 | institution.participation = -0.5 ... selects no clients ... above 0 and at most 1
"""


@pytest.mark.parametrize("case", REFUSED.strip().replace("\n    ", " ").splitlines())
def test_it_is_refused_with_its_key_and_value_and_a_remedy(case: str) -> None:
    lines, bar, message = case.partition(" | ")
    if not bar:
        lines, message = case.partition(": ")[0], case
    tree = tomllib.loads(lines.replace("; ", "\n"))
    start, *parts = message.split(" ... ")
    for form in (tree, json.dumps(tree)):
        with pytest.raises(InvalidExperiment) as caught:
            parse(form)
        text = str(caught.value)
        assert text.startswith(start) and re.search(
            ".*".join(map(re.escape, ["", *parts])), text[len(start) :]
        ), text
        assert caught.value.exit_code == 4 and caught.value.parts[0] == start.partition(" =")[0]
        assert not re.search(r"Input|Correct the value|\^", text)
