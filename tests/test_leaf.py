"""LEAF's JSON: small files of its form, merged in any order; and everything that may be wrong with
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, splits, stored
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.readers import leaf
from fedstrata.common.settings.evaluation import EvaluationSettings
from fedstrata.device.training.batches import LocalDataset, load_local_dataset

Users = dict[str, tuple[list[Any], list[Any]]]

SONNET = (
    "Shall I compare thee to a summer's day? Thou art more lovely and more temperate: Rough "
    "winds do shake"
)


def write(root: Path, name: str, part: str, file: str, users: Users, *, more: int = 0) -> Path:
    """Write a file as LEAF does; `more` is added to each num_samples."""
    folder = root / name / "data" / part
    folder.mkdir(parents=True, exist_ok=True)
    tree = {
        "users": list(users),
        "num_samples": [len(y) + more for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path = folder / f"all_data_{file}_niid_05_keep_100_{part}_9.json"
    path.write_text(json.dumps(tree))
    return path


def image(value: int) -> list[float]:
    return [value / 255] + [1.0] * 783  # white paper


def femnist(root: Path, *, names: tuple[str, str] = ("0", "1")) -> None:
    write(
        root,
        "femnist",
        "train",
        names[0],
        {"f3": ([image(3)], [61]), "f1": ([image(1), image(9)], [0, 35])},
    )
    write(root, "femnist", "train", names[1], {"f2": ([image(2)], [10]), "f0": ([], [])})
    write(root, "femnist", "test", names[0], {"f1": ([image(11)], [1])})
    write(root, "femnist", "test", names[1], {"f2": ([image(12)], [2]), "f9": ([image(13)], [3])})


def shakespeare(root: Path, text: str = SONNET) -> None:
    rows = [text[i : i + 80] for i in range(3)]
    users: Users = {"HAMLET_A": (rows, [text[i + 80] for i in range(3)])}
    write(root, "shakespeare", "train", "0", users)
    write(root, "shakespeare", "test", "0", {"HAMLET_A": (rows[2:], [text[82]])}, more=78)


def tweet(text: str) -> list[str]:
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", "someone", text, "training"]


def sent140(root: Path) -> None:
    users: Users = {"ann": ([tweet("I'm happy, happy today!"), tweet("Happy")], [1, 0])}
    write(root, "sent140", "train", "0", users)
    write(root, "sent140", "test", "0", {"ann": ([tweet("a " * 30 + "happy")], [1])})
    (root / "sent140" / "embs.json").write_text(
        json.dumps({"vocab": ["happy", ",", "I'm", "!"], "emba": [[0.5] * 3]})
    )


def load(name: str, root: Path) -> datasets.Dataset:
    return datasets.load(parse({"data": {"dataset": name, "root": str(root)}}).data)


def test_femnist_merges_all_files_and_sorts_the_users(tmp_path: Path) -> None:
    femnist(tmp_path)
    data = load("femnist", tmp_path)
    assert data.inputs == Inputs((1, 28, 28), 62) and data.train_images.dtype == torch.uint8
    assert data.users == ("f1", "f2", "f3")  # f0 has no sample
    assert data.owners is not None and data.owners.tolist() == [0, 0, 1, 2]
    assert data.train_images[:, 0, 0, 0].tolist() == [
        1,
        9,
        2,
        3,
    ] and data.train_labels.tolist() == [0, 35, 10, 61]
    assert data.test_images[:, 0, 0, 0].tolist() == [11, 12, 13] and data.test_labels.tolist() == [
        1,
        2,
        3,
    ]


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    femnist(tmp_path / "a")
    femnist(tmp_path / "b", names=("1", "0"))
    one, other = load("femnist", tmp_path / "a"), load("femnist", tmp_path / "b")
    assert one.users == other.users and torch.equal(one.train_images, other.train_images)
    assert torch.equal(one.test_labels, other.test_labels)


def test_femnist_is_normalised_as_the_authors_do(tmp_path: Path) -> None:
    femnist(tmp_path)
    data = load("femnist", tmp_path)
    images = data.normaliser()(data.train_images)
    assert images.shape == (4, 1, 28, 28)
    assert images[0, 0, 0, 0].item() == pytest.approx((0.5 - 1 / 255) / 0.5, abs=1e-6)
    assert images[0, 0, 0, 1].item() == pytest.approx(-1)


def test_every_grey_value_survives(tmp_path: Path) -> None:
    values = list(range(256))
    write(tmp_path, "femnist", "train", "0", {"f": ([image(value) for value in values], [0] * 256)})
    write(tmp_path, "femnist", "test", "0", {"f": ([image(0)], [0])})
    assert load("femnist", tmp_path).train_images[:, 0, 0, 0].tolist() == values


def test_shakespeare_is_rows_of_characters(tmp_path: Path) -> None:
    shakespeare(tmp_path)
    data = load("shakespeare", tmp_path)
    assert data.inputs == Inputs((80,), 80, tokens=80) and data.train_images.dtype == torch.uint8
    assert "".join(leaf.ALPHABET[i] for i in data.train_images[1].tolist()) == SONNET[1:81]
    assert [leaf.ALPHABET[i] for i in data.train_labels.tolist()] == list(SONNET[80:83])
    texts = data.normaliser()(data.train_images)
    assert texts.dtype == torch.int64 and torch.equal(texts, data.train_images)
    assert len(data.test_labels) == 1, "the file's num_samples lies: 79"


def test_the_alphabet_has_its_order() -> None:
    assert len(leaf.ALPHABET) == len(set(leaf.ALPHABET)) == 80
    assert [leaf.ALPHABET.index(character) for character in '\n !.09:?AZ[]az}'] == [
        0, 1, 2, 10, 11, 20, 21, 24, 25, 50, 51, 52, 53, 78, 79,
    ]  # fmt: skip


@pytest.mark.parametrize("stranger", ["é", "|", "\t", "\U0001f600", "\0"])
def test_a_character_outside_the_alphabet_is_a_space(tmp_path: Path, stranger: str) -> None:
    shakespeare(tmp_path, SONNET[:80] + stranger + SONNET[81:])
    shakespeare(tmp_path / "plain", SONNET[:80] + " " + SONNET[81:])
    data, plain = load("shakespeare", tmp_path), load("shakespeare", tmp_path / "plain")
    assert torch.equal(data.train_images, plain.train_images) and torch.equal(
        data.train_labels, plain.train_labels
    )
    assert data.train_labels[0] == leaf.ALPHABET.index(" ") == 1


def test_sent140_is_rows_of_words(tmp_path: Path) -> None:
    sent140(tmp_path)
    data = load("sent140", tmp_path)
    assert data.inputs == Inputs((25,), 2, tokens=5)
    happy, comma, i_am, mark, unknown = range(5)
    assert data.train_images[0, :7].tolist() == [i_am, happy, comma, happy, unknown, mark, unknown]
    assert (data.train_images[0, 6:] == unknown).all()
    assert (data.train_images[1] == unknown).all(), "the case matters"
    assert (data.test_images[0] == unknown).all(), "the 31st word is not read"
    assert data.train_labels.tolist() == [1, 0]


@pytest.mark.parametrize("place", ["sent140/embs.json", "../models/sent140/embs.json"])
@pytest.mark.parametrize("last", [True, False])
def test_the_vocabulary_is_read_without_its_vectors(tmp_path: Path, place: str, last: bool) -> None:
    root = tmp_path / "data"
    sent140(root)
    (root / "sent140" / "embs.json").unlink()
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    words = json.dumps([f"w{i}" for i in range(2000)])
    path.write_text(
        f'{{"emba": [[1]], "vocab": {words}}}' if last else f'{{"vocab": {words}, "emba": [[0.5, 1'
    )
    assert load("sent140", root).tokens == 2001


def test_a_vocabulary_longer_than_a_piece(tmp_path: Path) -> None:
    sent140(tmp_path)
    words = [f"{i:07}" + "x" * 100_000 for i in range(200)]
    (tmp_path / "sent140" / "embs.json").write_text(json.dumps({"vocab": words, "emba": []}))
    assert load("sent140", tmp_path).tokens == 201


def test_a_word_that_stands_twice_counts_once(tmp_path: Path) -> None:
    sent140(tmp_path)
    (tmp_path / "sent140" / "embs.json").write_text(
        json.dumps({"vocab": ["happy", "happy", "!"], "emba": []})
    )
    data = load("sent140", tmp_path)
    assert data.tokens == 3 and data.train_images[0, :6].tolist() == [2, 0, 2, 0, 2, 1]


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"vocab": []}', b'{"vocab": [1]}', b'{"vocab": ["a", ', b"\xff\xfe"]
)
def test_a_damaged_vocabulary(tmp_path: Path, raw: bytes) -> None:
    sent140(tmp_path)
    (tmp_path / "sent140" / "embs.json").write_bytes(raw)
    with pytest.raises(InvalidExperiment, match=r"embs\.json.*this file"):
        load("sent140", tmp_path)


@pytest.mark.parametrize("name", ["femnist", "shakespeare", "sent140"])
def test_a_missing_set_names_the_layout_and_the_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidExperiment) as caught:
        load(name, tmp_path / "nowhere")
    assert caught.value.exit_code == 4
    assert str(tmp_path / "nowhere" / name) in str(caught.value)
    assert "git clone https://github.com/TalwalkarLab/leaf && " in str(caught.value)
    assert f"leaf/data/{name} && ./preprocess.sh" in str(caught.value)


def test_a_set_without_its_test_part(tmp_path: Path) -> None:
    write(tmp_path, "femnist", "train", "0", {"f": ([image(0)], [0])})
    with pytest.raises(InvalidExperiment, match=r"femnist/data/test/\*\.json"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"[1, 2]",
        lambda raw: b"\xff" + raw,
        lambda raw: b"[" * 100_000,
        lambda raw: raw.replace(b'"user_data"', b'"userdata"'),
        lambda raw: raw.replace(b'"y"', b'"z"', 1),
        lambda raw: raw.replace(b'"users": ["f3", ', b'"users": ['),
        lambda raw: raw.replace(b'"y": [61]', b'"y": [61, 61]'),
        lambda raw: raw.replace(b'"y": [61]', b'"y": ["Z"]'),
        lambda raw: raw.replace(b'"y": [61]', b'"y": [6.5]'),
        lambda raw: raw.replace(b'"y": [61]', b'"y": 61'),
        lambda raw: raw.replace(b"[1.0, ", b"[", 1).replace(b" 1.0, 1.0,", b" 1.0,", 1),
        lambda raw: raw.replace(b" 1.0,", b" 255,", 1),
        lambda raw: raw.replace(b" 1.0,", b" NaN,", 1),
        lambda raw: raw.replace(b" 1.0,", b' "white",', 1),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    femnist(tmp_path)
    path = tmp_path / "femnist" / "data" / "train" / "all_data_0_niid_05_keep_100_train_9.json"
    raw = path.read_bytes()
    assert damage(raw) != raw
    path.write_bytes(damage(raw))
    with pytest.raises(InvalidExperiment) as caught:
        load("femnist", tmp_path)
    assert str(caught.value).startswith("data.root = ") and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "users", "problem"),
    [
        ("femnist", "test", {"f8": ([image(1)], [62])}, "labels that should be 0 to 61"),
        # a user in two files is left from another split
        (
            "femnist",
            "train",
            {"f2": ([image(5)], [5])},
            "the user 'f2', which is also in another file",
        ),
        (
            "shakespeare",
            "train",
            {"ZOE": (["too short"], ["a"])},
            "a sample of 'ZOE' that does not fit shakespeare",
        ),
        (
            "shakespeare",
            "train",
            {"ZOE": ([SONNET[:80]], ["ab"])},
            "a sample of 'ZOE' that does not fit shakespeare",
        ),
        (
            "shakespeare",
            "train",
            {"ZOE": ([5], ["a"])},
            "a sample of 'ZOE' that does not fit shakespeare",
        ),
        (
            "shakespeare",
            "train",
            {"ZOE": ([None], ["a"])},
            "a sample of 'ZOE' that does not fit shakespeare",
        ),
        ("sent140", "train", {"bob": ([tweet("a")[:4]], [1])}, "a sample of 'bob'"),
    ],
)
def test_a_file_that_does_not_fit_the_others_is_refused(
    tmp_path: Path, name: str, part: str, users: Users, problem: str
) -> None:
    {"femnist": femnist, "shakespeare": shakespeare, "sent140": sent140}[name](tmp_path)
    write(tmp_path, name, part, "2", users)
    with pytest.raises(InvalidExperiment, match=problem):
        load(name, tmp_path)


def test_owners_and_samples_agree(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    users: Users = {
        f"u{i:02}": ([image(i)] * n, [i % 62] * n)
        for i, n in enumerate(draw.integers(0, 5, 30).tolist())
    }
    shuffled = {name: users[name] for name in draw.permutation(list(users)).tolist()}
    write(tmp_path, "femnist", "train", "0", shuffled)
    write(tmp_path, "femnist", "test", "0", {"u00": ([image(0)], [0])})
    data = load("femnist", tmp_path)
    assert data.owners is not None
    assert [f"u{value:02}" for value in data.train_images[:, 0, 0, 0].tolist()] == [
        data.users[i] for i in data.owners
    ]


# A device of one user


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store each set, and return the folder of the stored ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "SMALL_BYTES", 1)
    datasets._load.cache_clear()
    return tmp_path / "cache" / "fedstrata" / "data"


def by_user(root: Path, devices: int = 3, **more: Any) -> Experiment:
    data = {"dataset": "femnist", "root": str(root), "partition": "natural"}
    model, nodes = {"name": "cnn_femnist"}, {"institutions": 0, "devices": devices}
    return parse({"topology": nodes, "data": data | more, "model": model, "evaluation": SCORED})


SCORED = {"at": "devices", "data": "users"}
CPU = torch.device("cpu")


def samples_of(local: LocalDataset) -> list[Any]:
    tests = local.tests
    scored = (
        []
        if tests is None
        else [tests.images[tests.samples].tolist(), tests.labels[tests.samples].tolist()]
    )
    return [
        local.images[local.samples].tolist(),
        local.labels[local.samples].tolist(),
        local.partition,
        scored,
    ]


@pytest.mark.parametrize(
    "evaluation", [SCORED, {"at": "devices", "data": "held_out"}, {"at": "cloud"}]
)
def test_a_device_of_one_user_reads_its_samples_alone(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, str]
) -> None:
    write(
        tmp_path,
        "femnist",
        "train",
        "0",
        {"f3": ([image(3)] * 2, [61, 4]), "f1": ([image(1), image(9)], [0, 35])},
    )
    write(
        tmp_path,
        "femnist",
        "train",
        "1",
        {"f2": ([image(i) for i in range(5)], [*range(5)]), "f0": ([], [])},
    )
    write(
        tmp_path,
        "femnist",
        "test",
        "0",
        {"f1": ([image(11)], [1]), "f9": ([image(13)] * 2, [3, 4])},
    )
    write(tmp_path, "femnist", "test", "1", {"f2": ([image(12), image(14)], [2, 9])})
    lab = by_user(tmp_path).model_copy(
        update={"evaluation": EvaluationSettings.model_validate(evaluation)}
    )
    found = {}
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_load", pytest.fail)  # of all users
        for node in ("device-0", "device-1", "device-2"):
            local = load_local_dataset(lab, node, accelerator=CPU)
            assert len(local.images) <= 5
            found[node] = samples_of(local)
    assert found["device-1"][1] and found["device-0"] != found["device-2"]
    monkeypatch.setattr(datasets, "load_user", lambda *_, **__: None)
    assert found == {
        node: samples_of(load_local_dataset(lab, node, accelerator=CPU)) for node in found
    }


def test_a_new_user_reads_alone_and_what_needs_others_reads_all(
    tmp_path: Path, shared: Path
) -> None:
    femnist(tmp_path)
    lab = by_user(tmp_path, devices=2)
    assert load_local_dataset(lab, "device-2", accelerator=CPU).images[:, 0, 0, 0].tolist() == [3]
    assert splits.own_user(lab, node="device-2") is not None
    with pytest.raises(InvalidExperiment, match="no user 3"):
        load_local_dataset(lab, "device-3", accelerator=CPU)
    for other in (
        by_user(tmp_path, normalise="own"),
        by_user(tmp_path, noise=0.1),
        by_user(tmp_path, node_samples=1),
    ):
        assert splits.own_user(other, node="device-0") is None
    with pytest.raises(InvalidExperiment, match="has 3 users"):
        load_local_dataset(by_user(tmp_path, devices=4), "device-0", accelerator=CPU)


def test_a_damaged_stored_set_is_created_again_by_a_device(tmp_path: Path, shared: Path) -> None:
    femnist(tmp_path)
    lab = by_user(tmp_path, devices=2)
    whole = samples_of(load_local_dataset(lab, "device-0", accelerator=CPU))
    (file,) = shared.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: -784 * 4] + bytes(784 * 4))  # of the samples, the last tensors
    assert splits.own_user(lab, node="device-0") is None
    assert samples_of(load_local_dataset(lab, "device-0", accelerator=CPU)) == whole
    assert file.read_bytes() == content and splits.own_user(lab, node="device-0") is not None
