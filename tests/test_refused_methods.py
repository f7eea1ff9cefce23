"""What an experiment may not say of methods, losses and scores: key, value, what is wrong, remedy."""

from __future__ import annotations

import pytest

from tests import test_refused_experiments

# As in test_refused_experiments.py.
REFUSED = """
cloud.aggregation = {name = 'krum', wrong = 9}; topology = {institutions = 20, devices = 20} |
    cloud.aggregation.wrong = 9: needs 21 uploads, of 20 children that take part. Lower it,
cloud.aggregation = {name = 'krum', keep = 20}; topology = {institutions = 20, devices = 20} |
    cloud.aggregation.keep = 20: 1 of 20 uploads may be wrong. Use at most 19.
cloud.aggregation = {name = 'trimmed_mean', trim = 0.04}; topology = {institutions = 20, devices =
    20} | cloud.aggregation.trim = 0.04: needs 25 uploads, of 20 children that take part. Raise
    it,
cloud.aggregation = {name = 'trimmed_mean', trim = 0.5}; topology = {institutions = 20, devices =
    20} | cloud.aggregation.trim = 0.5: too large. Write a number below 0.5.
cloud.aggregation = {name = 'median', weights = 'data'}; topology = {institutions = 20, devices =
    20} | cloud.aggregation.weights = 'data': unknown key. It belongs to fedavg and independent
    and
cloud.norm_bound = {action = 'clip', factor = 0.5} | cloud.norm_bound.factor = 0.5: too small.
    Write 1 or more.
topology = {institutions = 0, devices = 4}; cloud.closing = {rule = 'quorum', quorum = 1,
    deadline_s = 1}; cloud.aggregation = 'fedbuff' | cloud.closing.rule = 'quorum': the rule
    fedbuff goes without it. Use 'all', or another
topology = {institutions = 0, devices = 4}; cloud.selection = 'round_robin'; cloud.aggregation =
    'fedbuff' | cloud.selection.name = 'round_robin': the rule fedbuff goes without it. Use
    'fraction',
topology = {institutions = 0, devices = 4}; cloud.norm_bound.action = 'clip'; cloud.aggregation =
    'fedbuff' | cloud.norm_bound.action = 'clip': the rule fedbuff goes without it. Use 'off', or
    another
topology = {institutions = 0, devices = 4}; cloud.epoch_control = 'tempo'; cloud.aggregation =
    'fedbuff' | cloud.epoch_control.name = 'tempo': it compares the uploads of a global round, and
topology = {institutions = 0, devices = 4}; cloud.participation = 0.5; cloud.aggregation = {name =
    'fedbuff', buffer = 3} | cloud.aggregation.buffer = 3: more than the 2 children that train at
    once. Use at most 2.
cloud.aggregation = 'clusamp'; cloud.selection = 'round_robin'; cloud.participation = 0.5 |
    cloud.selection.name = 'round_robin': the rule clusamp goes without it. Use 'fraction',
institution.aggregation = 'scaffold' | training.objective.name = 'cross_entropy':
    institution.aggregation.name = 'scaffold' needs another
training.objective = 'feddyn' | training.objective.name = 'feddyn': needs the rule 'feddyn',
    institution.aggregation.name is 'fedavg'
cloud.aggregation = 'scaffold'; training.objective = 'scaffold' | cloud.aggregation.name =
    'scaffold': its children must be devices. Use it in
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection = {name =
    'power_of_choice', candidates = 2} | cloud.selection.candidates = 2: 4 of 8 children take
    part, and are chosen among the candidates. Use 4 to 8
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection = {name =
    'power_of_choice', candidates = 9} | cloud.selection.candidates = 9: 4 of 8 children take
    part, and are chosen among the
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection = {name =
    'fedcluster', clusters = 3} | cloud.selection.clusters = 3: 4 of 8 children take part, all of
    one cluster. Use 1 to 2.
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection =
    'power_of_choise' | cloud.selection.name = 'power_of_choise': no selector has this name. Did
    you mean 'power_of_choice'
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection = {name =
    'fraction', candidates = 4} | cloud.selection.candidates = 4: unknown key. It belongs to
    power_of_choice; this is
topology = {institutions = 0, devices = 8}; cloud.participation = 0.5; cloud.selection = {name =
    'oort', cut_off = 0.0} | cloud.selection.cut_off = 0.0: too small. Write a number above 0.
cloud.aggregation = {name = 'control:Control', weights = 'uniform', extras_down = ['c'], extras_up
    = ['change']} | cloud.aggregation.name = 'control:Control': its children must be devices. Use
    it in
institution.aggregation = {name = 'control:Control', weights = 'uniform', extras_down = ['c'],
    extras_up = ['a', 'a']} | institution.aggregation.extras_up = ['a', 'a']: duplicate name. Name
    each vector once.
institution.aggregation = {name = 'control:Control', weights = 'uniform', extras_down = ['c'],
    extras_up = ['A']} | institution.aggregation.extras_up.0 = 'A': not of the form that is
    needed. Write lower-case
training.loss = 'huber': data.targets are classes. Use cross_entropy or
data.dataset = 'mine:load'; data.targets = 'numbers'; training.loss = 'cross_entropy' |
    training.loss = 'cross_entropy': data.targets are numbers. Use mean_squared_error or
data.dataset = 'mine:load'; data.targets = 'numbers'; training.loss = 'hubr' | training.loss =
    'hubr': no such loss. Did you mean 'huber'?
score.name = 'r2': data.targets are classes. Use accuracy or package.module:function.
score.name = 'a:b' | score.better ... not known of a:b. Set it to 'higher' or 'lower'.
data.dataset = 'mine:load'; data.targets = 'numbers'; score.better = 'lower' | score.better =
    'lower': r2 is better when higher. Omit it.
score.target = 0.5: unknown key. Did you mean stop.target?
data.dataset = 'mine:load'; data.targets = 'numbers'; training.objective = 'cross_entropy' |
    training.objective.name = 'cross_entropy': training.loss is mean_squared_error. Omit
data.dataset = 'mine:load'; data.targets = 'numbers'; training.objective = 'fedgen' |
    training.objective.name = 'fedgen': it needs labels, and data.targets are numbers. Use
data.dataset = 'mine:load'; data.targets = 'numbers'; cloud.aggregation = 'feddf' |
    cloud.aggregation.name = 'feddf': it needs classes, and data.targets are numbers. Use
data.dataset = 'mine:load'; data.targets = 'numbers'; data.partition = 'dirichlet' |
    data.partition = 'dirichlet': the targets are numbers, which have no classes. Set data.bins
data.dataset = 'mine:load'; data.targets = 'numbers'; data.partition = 'shards' | data.partition =
    'shards': the targets are numbers, which have no classes. Set data.bins,
data.targets = 'numbers': the samples of digits have classes. Omit it, or use a table or
data.partition = 'private': digits is the same on every node. Use iid, dirichlet or
data.dataset = 'mine:load'; data.targets = 'numbers'; data.bins = 5 | data.bins = 5: no effect
    with data.dataset mine:load and data.partition iid. Omit it; it
evaluation.held_out = 0.2: no effect with evaluation.at = 'cloud'. Omit it, or set
evaluation.at = 'devices'; evaluation.accelerator = 'auto' | evaluation.accelerator = 'auto': no
    effect with evaluation.at = 'devices'. Omit it, or
evaluation.at = 'devices'; evaluation.data = 'test'; evaluation.held_out = 0.2 |
    evaluation.held_out = 0.2: no effect with evaluation.data = 'test'. Omit it, or set
evaluation.at = 'devices'; evaluation.held_out = 1.0 | evaluation.held_out = 1.0: too large. Write
    a number below 1.
evaluation.personalised = true | evaluation.personalised = True: no effect with evaluation.at =
    'cloud'. Omit it, or set
evaluation.at = 'devices'; evaluation.data = 'users' | evaluation.data = 'users': data.partition
    is 'iid', and devices are no users. Use data.partition
training.trainer = 'mine:T'; score.also = ['mine:f1'] | score.also = ['mine:f1']: training.trainer
    mine:T has one score. Omit it.
score.also = ['accuracy'] | score.also = 'accuracy': two scores have this name. Name each score
    once, and functions
score.also = ['a:f1', 'b:f1'] | score.also = 'a:f1': two scores have this name. Name each score
    once, and functions
score.also = ['r2'] | score.also = 'r2': data.targets are classes. Use accuracy or
    package.module:function.
evaluation.at = 'devices'; evaluation.participation = 0.0 | evaluation.participation = 0.0: too
    small. Write a number above 0.
evaluation.at = 'both'; cloud.aggregation = {name = 'fedbuff', buffer = 1} | evaluation.at =
    'both': cloud.aggregation.name = 'fedbuff' has tasks of several rounds. Use "cloud".
evaluation.at = 'devices'; evaluation.data = 'test'; data.dataset = 'folder'; data.partition =
    'private'; data.classes = ['a', 'b']; model.name = 'cnn_fedavg' | evaluation.data = 'test':
    every device has samples of its own, and the cloud alone has
cloud.evaluate_every = 2: unknown key. Known keys: participation, selection, aggregation,
model.name = 'mlp_digits'; model.initial = 'runs/one'; model.same_initial = false |
    model.same_initial = False: devices begin with model.initial. Omit one of the two.
training.trainer = 'mine:Trainer'; model.same_initial = false | model.same_initial = False:
    training.trainer mine:Trainer has its arrays. Omit it.
model.name = 'mlp_digits'; model.same_initial = false; transfer.wan.up = 'delta+int8'; topology =
    {institutions = 0, devices = 6} | model.same_initial = False: transfer.wan.up = 'delta+int8'
    rounds differences to the model received, and devices begin with others. Use fp32, or
topology = {institutions = 0, devices = 4}; transfer.wan.up = {name = 'topk', feedback = true};
    training.objective = 'feddyn'; cloud.aggregation = 'feddyn' | transfer.wan.up.feedback = True:
    the objective 'feddyn' keeps the change that it sends,
topology = {institutions = 2, devices = 4}; cloud.aggregation = {name = 'fedcda', smoothness_of =
    {institution-2 = 2.0}} | cloud.aggregation.smoothness_of = 'institution-2': no institution or
    device has this
topology = {institutions = 2, devices = 4}; cloud.aggregation = {name = 'fedcda', smoothness_of =
    {device-1 = 2.0}} | cloud.aggregation.smoothness_of.device-1 = 'device-1': no institution: the
    rule's
"""


@pytest.mark.parametrize("case", REFUSED.strip().replace("\n    ", " ").splitlines())
def test_it_is_refused_with_its_key_and_value_and_a_remedy(case: str) -> None:
    test_refused_experiments.test_it_is_refused_with_its_key_and_value_and_a_remedy(case)
