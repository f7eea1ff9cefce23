"""Tables: CSV files against what was written, npz files that mean harm, samples that are split or a
device's own.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning import datasets, splits
from fedstrata.common.learning.datasets import Dataset
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.readers import table_files
from fedstrata.common.learning.readers.reader_result import Parts, rows_to_test
from fedstrata.common.learning.readers.table_files import read_csv
from fedstrata.common.settings.data import Data, root_below
from tests.helpers.commands import invoke
from tests.helpers.examples import examples

Files = Callable[..., Path]


def table(**more: Any) -> Data:
    tree = {"dataset": "t.csv", "target_column": "y", "standardise": False, **more}
    if tree.get("partition") == "private":
        del tree["standardise"]
    return parse({"data": tree}).data


def numbers(**more: Any) -> Data:
    return table(**{"targets": "numbers", **more})


def read(root: Path, text: str, data: Data, *, test: bool = False) -> Parts:
    (root / "t.csv").write_text(text, encoding="utf-8")
    return read_csv(data, root, test=test)


CELL = st.floats(-1e6, 1e6, width=32)
NAME = st.text("abc, ;\"'äß\n", min_size=1, max_size=6).map(str.strip).filter(bool)


@examples(60)
@given(
    rows=st.lists(st.tuples(CELL, CELL, CELL, NAME), min_size=2, max_size=12),
    separator=st.sampled_from([",", ";", "\t"]),
    bom=st.booleans(),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[float, float, float, str]],
    separator: str,
    bom: bool,
    quoting: Any,
) -> None:
    root = tmp_path_factory.mktemp("t")
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, quoting=quoting)
    writer.writerows([("a", "y", "b", "who"), *rows])
    (root / "t.csv").write_text(
        text.getvalue(), encoding="utf-8-sig" if bom else "utf-8", newline=""
    )
    found = read_csv(numbers(user_column="who", partition="natural"), root, test=False)
    names = {"", "na", "n/a", "nan", "null", "none"}
    assert not names & {row[3].lower() for row in rows}
    picked = rows_to_test(len(rows), 0.2, refuse=lambda problem, remedy: pytest.fail(problem))
    for part, targets, kept in (
        (found.train, found.train_labels, ~picked),
        (found.test, found.test_labels, picked),
    ):
        mine = [row for row, keep in zip(rows, kept, strict=True) if keep]
        assert np.array_equal(part, np.array([(row[0], row[2]) for row in mine], np.float32))
        assert np.array_equal(targets[:, 0], np.array([row[1] for row in mine], np.float32))
    users = sorted({row[3].strip() for row, test in zip(rows, picked, strict=True) if not test})
    assert list(found.users) == users and found.owners is not None
    kept_rows = [row for row, test in zip(rows, picked, strict=True) if not test]
    assert [users[owner] for owner in found.owners] == [row[3].strip() for row in kept_rows]


def test_classes_are_numbers_by_value_then_texts_or_as_listed(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(
        f"{i},{name}\n" for i, name in enumerate(["10", "b", "2", "2.0", "b", "1"])
    )
    found = read(tmp_path, text, table())
    places = dict(
        zip(
            [*found.train[:, 0], *found.test[:, 0]],
            [*found.train_labels, *found.test_labels],
            strict=True,
        )
    )
    assert found.classes == 4 and [places[float(i)] for i in range(6)] == [2, 3, 1, 1, 3, 0]
    listed = read(tmp_path, text, table(classes=["b", "1", "2", "10", "c"]))
    assert listed.classes == 5 and {0, 1, 2, 3} == {*listed.train_labels, *listed.test_labels}
    with pytest.raises(
        InvalidExperiment, match=r"data\.classes = 3: .*t\.csv also has '10', 'b' in column 'y'"
    ):
        read(tmp_path, text, table(classes=3))


def test_features_are_scaled_by_the_training_rows_and_targets_by_the_experiment(
    tmp_path: Path,
) -> None:
    rows = np.random.default_rng(1).normal(5, 3, (50, 2))
    text = "a,same,y\n" + "".join(f"{a},7,{y}\n" for a, y in rows)
    found = read(tmp_path, text, numbers(standardise=True, target_scale=10.0))
    assert found.train[:, 0].mean() == pytest.approx(0, abs=1e-6) and found.train[
        :, 0
    ].std() == pytest.approx(1)
    assert (found.train[:, 1] == 0).all() and (found.test[:, 1] == 0).all()
    plain = read(tmp_path, text, numbers())
    mean, deviation = (
        plain.train[:, 0].mean(dtype=np.float64),
        plain.train[:, 0].std(dtype=np.float64),
    )
    assert np.allclose(found.test[:, 0], (plain.test[:, 0] - mean) / deviation, atol=1e-5)
    assert np.allclose(found.test_labels * 10, plain.test_labels, rtol=1e-6)


def test_a_file_of_test_samples_takes_the_place_of_drawn_ones(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("a,y\n9,c\n8,a\n")
    found = read(tmp_path, "a,y\n1,a\n2,b\n3,b\n", table(test_file="more.csv"))
    assert found.train[:, 0].tolist() == [1, 2, 3] and found.test[:, 0].tolist() == [9, 8]
    assert (
        found.train_labels.tolist() == [0, 1, 1]
        and found.test_labels.tolist() == [2, 0]
        and found.classes == 3
    )
    (tmp_path / "more.csv").write_text("b,y\n9,c\n")
    with pytest.raises(
        InvalidExperiment, match=r"more\.csv'?: has other features than t\.csv: a, b"
    ):
        read(tmp_path, "a,y\n1,a\n2,b\n", table(test_file="more.csv"))


def test_missing_values_are_an_error_or_their_rows_are_left_out(tmp_path: Path) -> None:
    text = "a,note,y\n1,,0\n2,x,1\nNA,x,1\n4,x,\n5,x,1\n6,x,0\n"
    with pytest.raises(
        InvalidExperiment,
        match=r"no value in line 4, column 'a'\. Fill it in, or set data\.missing",
    ):
        read(tmp_path, text, table(ignored_columns=["note"]))
    found = read(tmp_path, text, table(ignored_columns=["note"], missing="drop"))
    assert sorted([*found.train[:, 0], *found.test[:, 0]]) == [1, 2, 5, 6]


def labelled(names: list[str], *, lacking: dict[int, str] | None = None) -> str:
    """Return a table of these classes, whose rows `lacking` have something else than a number in
    column `a`.
    """
    return "a,y\n" + "".join(
        f"{(lacking or {}).get(i, str(i))},{name}\n" for i, name in enumerate(names)
    )


@pytest.mark.parametrize("missing", ["error", "drop"])
@pytest.mark.parametrize("word", ["None", "NA", "null", "none", "nan", "?"])
def test_a_class_may_have_the_name_of_a_missing_value(
    tmp_path: Path, missing: str, word: str
) -> None:
    found = read(tmp_path, labelled([word, "Apnea", "Insomnia"] * 20), table(missing=missing))
    assert found.names == sorted([word, "Apnea", "Insomnia"]) and found.classes == 3
    assert len(found.train) + len(found.test) == 60 and found.notes == [
        f"{tmp_path}/t.csv: column 'y' has {word!r} in 20 rows, which counts as a name: in a "
        "column of texts only empty"
        " cells are missing values"
    ]
    listed = read(
        tmp_path, labelled([word, "Apnea"] * 20), table(missing=missing, classes=["Apnea", word])
    )
    assert len(listed.train) + len(listed.test) == 40 and listed.notes == []


@pytest.mark.parametrize("classes", [None, 2, ["1", "0"]])
def test_among_numbers_such_a_word_is_a_missing_value(tmp_path: Path, classes: Any) -> None:
    text = labelled(["0", "1", "nan", "1", "0", "", "0", "1"], lacking={3: "?"})
    with pytest.raises(
        InvalidExperiment,
        match=r"no value in line 5, column 'a'\. Fill it in, or set data\.missing",
    ):
        read(tmp_path, text, table(classes=classes))
    with pytest.raises(
        InvalidExperiment,
        match=r"no value in line 4, column 'y'\. Fill it in, or set data\.missing",
    ):
        read(tmp_path, text.replace("?,1", "3,1").replace("5,\n", ""), table(classes=classes))
    found = read(tmp_path, text, table(classes=classes, missing="drop"))
    assert found.classes == 2 and sorted([*found.train[:, 0], *found.test[:, 0]]) == [0, 1, 4, 6, 7]
    assert found.notes == [
        f"{tmp_path}/t.csv: 3 of 8 rows lack a value and are left out (2 without a class, 1 of "
        "'1'),"
        " the first in line 5, column 'a'"
    ]


def test_users_may_have_such_a_name_too(tmp_path: Path) -> None:
    data = table(user_column="who", partition="natural")
    for ids, word in ((["NA", "Bo", "Al"], "NA"), (["7", "nan", "8"], "nan")):
        rows = "".join(f"{i},{i % 2},{ids[i % 3]}\n" for i in range(30))
        found = read(tmp_path, f"a,y,who\n{rows}", data)
        assert (
            found.users == tuple(sorted(ids))
            and f"column 'who' has {word!r} in 10 rows" in found.notes[0]
        )
    with pytest.raises(InvalidExperiment, match="no value in line 3, column 'who'"):
        read(tmp_path, "a,y,who\n1,0,7\n2,1, \n3,1,8\n", data)


def test_rows_that_are_left_out_are_counted_by_class_and_no_class_is_lost(tmp_path: Path) -> None:
    names = ["a"] * 20 + ["b"] * 20
    found = read(
        tmp_path, labelled(names, lacking={3: "", 5: "NA", 30: "null"}), table(missing="drop")
    )
    assert found.notes == [
        f"{tmp_path}/t.csv: 3 of 40 rows lack a value and are left out (2 of 'a', 1 of 'b'),"
        " the first in line 5, column 'a'"
    ]
    lost = labelled(names, lacking=dict.fromkeys(range(20, 40), "NA"))
    with pytest.raises(InvalidExperiment) as refused:
        read(tmp_path, lost, table(missing="drop"))
    assert str(refused.value) == (
        f"data.missing = 'drop': leaves no row of class 'b' in {tmp_path}/t.csv; the first "
        "missing value is in line 22,"
        " column 'a'. Fill in the values, or list columns that lack many in data.ignored_columns."
    )
    with pytest.raises(InvalidExperiment, match="leaves no row of any class in"):
        read(tmp_path, "a,y\n,1\n,2\n", numbers(missing="drop"))
    kept = read(tmp_path, lost, table(missing="drop", partition="private", classes=["a", "b"]))
    assert (
        len(kept.train) == 20
        and "20 of 40 rows lack a value and are left out (20 of 'b')" in kept.notes[0]
    )
    counted = read(tmp_path, "a,y\n1,NA\n2,2\n3,3\n", numbers(missing="drop"))
    assert counted.notes == [
        (
            f"{tmp_path}/t.csv: 1 of 3 rows lack a value and are left out, the first in line 2, "
            "column 'y'"
        )
    ]


def test_long_names_are_cut_in_messages(tmp_path: Path) -> None:
    text = labelled(["x" * 100_000, "y"] * 4)
    with pytest.raises(InvalidExperiment) as refused:
        read(tmp_path, text, table(classes=["y"]))
    assert "also has 'xxxxx" in str(refused.value) and len(str(refused.value)) < 600 + len(
        str(tmp_path)
    )
    lost = labelled(["x" * 100_000, "y"] * 4, lacking=dict.fromkeys(range(0, 8, 2), ""))
    with pytest.raises(InvalidExperiment, match="leaves no row of class 'xxx") as refused:
        read(tmp_path, lost, table(missing="drop"))
    assert len(str(refused.value)) < 600 + len(str(tmp_path))


def test_a_leading_zero_is_part_of_a_name(tmp_path: Path) -> None:
    found = read(tmp_path, labelled(["07", "7", "8", "7.0", "-01", "00", "0"] * 4), table())
    assert found.names == ["-01", "0", "00", "07", "7", "8"]
    written = read(tmp_path, labelled(["1.000000000000000000e+00", "2e0", "+1"] * 4), table())
    assert written.names == ["1", "2"]  # as numpy.savetxt writes them
    listed = read(tmp_path, labelled(["07", "7.0"] * 4), table(classes=["7.0", "07"]))
    assert listed.names == ["7", "07"]
    with pytest.raises(
        InvalidExperiment, match=r"data\.classes = .*: '7' is listed twice\. List it once"
    ):
        read(tmp_path, labelled(["7"] * 4), table(classes=["7.0", "7"]))


def test_numbers_are_no_classes_unless_listed(tmp_path: Path) -> None:
    text = labelled(["0.5", "1.5", "2"] * 4)
    with pytest.raises(
        InvalidExperiment, match=r"data\.target_column = 'y': .* such as 0\.5 .*'numbers', or list"
    ):
        read(tmp_path, text, table())
    assert read(tmp_path, text, table(classes=["0.5", "1.5", "2.0"])).classes == 3
    prices = read(tmp_path, labelled([str(i * 1000) for i in range(40)]), table())
    assert (
        "column 'y' has 40 classes in 40 rows. If it has numbers, set data.targets = 'numbers'"
        in prices.notes[-1]
    )
    assert read(tmp_path, labelled([str(i % 20) for i in range(40)]), table()).notes == []


@pytest.mark.parametrize(("usual", "other"), [(0.1, 0.2), (1e9 / 3, 5.0), (0.0, 1e-3), (-7.7, 0.0)])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_column_that_never_changes_in_training_has_the_deviation_1(
    tmp_path: Path, usual: float, other: float, rounded: bool
) -> None:
    values = [usual * (1 + 2**-52 * (i % 3) * rounded) for i in range(1001)]
    rows = "".join(f"{i},{value!r},{i % 2}\n" for i, value in enumerate(values))
    (tmp_path / "more.csv").write_text(f"a,same,y\n1,{other!r},0\n2,{usual!r},1\n")
    found = read(tmp_path, f"a,same,y\n{rows}", table(standardise=True, test_file="more.csv"))
    assert np.abs(found.train[:, 1]).max() < 1e-6
    assert found.test[:, 1].tolist() == pytest.approx(
        [other - usual, 0], rel=1e-6, abs=1e-6 * abs(usual)
    )
    assert found.train[:, 0].std() == pytest.approx(1)


def test_a_class_of_the_test_samples_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("a,y\n9,Cat\n8,dog\n")
    (tmp_path / "t.csv").write_text("a,y\n1,cat\n2,dog\n3,cat\n")
    tree = {
        "dataset": "t.csv",
        "root": str(tmp_path),
        "target_column": "y",
        "test_file": "more.csv",
    }
    assert datasets.load(parse({"data": tree}).data).notes == (
        "t.csv: no training sample has these classes of the test samples: 'Cat'",
        "t.csv: no test sample has these classes of the training samples: 'cat'",
    )


@examples(60)
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_a_table_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    root = tmp_path_factory.mktemp("t")
    (root / "t.csv").write_bytes(b"a,y\n1,2\n" + raw)
    (root / "t.npz").write_bytes(raw)
    try:
        read_csv(numbers(), root, test=False)
    except InvalidExperiment:
        pass
    with pytest.raises(InvalidExperiment):
        datasets.load(parse({"data": {"dataset": "t.npz", "root": str(root)}}).data)


def test_a_table_of_a_device_stays_below_the_folder_of_its_host(tmp_path: Path) -> None:
    data = table(root="../elsewhere")
    with pytest.raises(InvalidExperiment, match="outside"):
        root_below(data, "device-0", allowed=tmp_path)
    assert root_below(table(root="{node}"), "device-0", allowed=tmp_path) == str(
        tmp_path / "{node}"
    )


def private(root: Path, **more: Any) -> Data:
    tree = {
        "dataset": "t.csv",
        "root": str(root / "{node}"),
        "target_column": "y",
        "partition": "private",
    }
    return parse({"data": {**tree, **more}}).data


def test_each_device_has_its_own_table_and_the_cloud_one_to_test(tmp_path: Path) -> None:
    for node, text in (("device-0", "1,no\n2,yes\n"), ("device-1", "3,yes\n"), ("cloud", "4,no\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "t.csv").write_text(f"a,y\n{text}")
    data = private(tmp_path, classes=["no", "yes"])
    first, second, cloud = (
        datasets.load(data, node=node) for node in ("device-0", "device-1", "cloud")
    )
    assert first.train_images[:, 0].tolist() == [1, 2] and first.train_labels.tolist() == [0, 1]
    assert second.train_labels.tolist() == [1] and not len(second.test_labels)
    assert cloud.test_images.tolist() == [[4]] and not len(cloud.train_labels)
    assert first.inputs == second.inputs == cloud.inputs == Inputs((1,), 2)
    numbers = private(tmp_path, targets="numbers")
    (tmp_path / "device-0" / "t.csv").write_text("a,y\n1,0.5\n")
    assert datasets.load(numbers, node="device-0").train_labels.tolist() == [[0.5]]
    with pytest.raises(InvalidExperiment, match=r"data\.partition = 'private': .*nothing is split"):
        splits.split_of(parse({"data": data.model_dump(mode="json")}))
    with pytest.raises(InvalidExperiment, match=r"not found: .*device-9/t\.csv"):
        datasets.load(data, node="device-9")


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Dataset]:
    """A function that writes arrays and loads them as a data set."""

    # a process reads a file only once
    folders = (tmp_path / str(number) for number in itertools.count())

    def load(more: dict[str, Any] | None = None, **arrays: Any) -> Dataset:
        root = next(folders)
        root.mkdir()
        np.savez(root / "t.npz", **arrays)
        return datasets.load(
            parse({"data": {"dataset": "t.npz", "root": str(root), **(more or {})}}).data
        )

    return load


X = np.arange(24, dtype=np.float64).reshape(12, 2)


def test_arrays_are_split_unless_they_have_test_samples(archive: Callable[..., Dataset]) -> None:
    found = archive(x=X, y=np.arange(12) % 3)
    assert (len(found.train_labels), len(found.test_labels)) == (10, 2) and found.inputs == Inputs(
        (2,), 3
    )
    found = archive(
        x=X, y=np.arange(12) % 3, x_test=X[:3].astype(np.float32), y_test=np.array([2, 1, 0])
    )
    assert found.test_labels.tolist() == [2, 1, 0] and np.array_equal(found.train_images.numpy(), X)
    users = np.array(["b", "a"] * 6)
    found = archive(
        {"partition": "natural"}, x=X, y=np.arange(12), user=users, x_test=X[:1], y_test=[3]
    )
    assert (
        found.users == ("a", "b")
        and found.owners is not None
        and found.owners.tolist() == [1, 0] * 6
    )


def test_images_tokens_and_labels_in_arrays(archive: Callable[..., Dataset]) -> None:
    images = np.full((6, 4, 5), 255, np.uint8)
    found = archive(x=images, y=np.arange(6))
    assert (
        found.inputs == Inputs((1, 4, 5), 6) and (found.normaliser()(found.train_images) == 1).all()
    )
    found = archive(x=np.arange(12, dtype=np.int16).reshape(4, 3), y=np.arange(4))
    assert found.inputs == Inputs((3,), 4, 12)
    found = archive({"targets": "numbers"}, x=X, y=np.ones((12, 3), np.int64))
    assert found.inputs == Inputs((2,), 3, numbers=True)
    samples = found.train_images[:2]
    copy = found.normaliser()(samples)
    assert (copy == samples).all() and copy.data_ptr() != samples.data_ptr()


def test_labels_may_have_gaps_if_the_number_of_classes_is_given(
    archive: Callable[..., Dataset],
) -> None:
    found = archive({"classes": 7}, x=X, y=1 + np.arange(12) % 3)
    assert found.classes == 7 and {*found.train_labels.tolist(), *found.test_labels.tolist()} == {
        1,
        2,
        3,
    }
    with pytest.raises(InvalidExperiment, match="labels that should be 0 to 2, and are 3 too"):
        archive({"classes": 3}, x=X, y=1 + np.arange(12) % 3)


def test_arrays_of_other_names_are_named(archive: Callable[..., Dataset]) -> None:
    found = archive(x=X, y=np.arange(12) % 2, X_test=X[:2], users=np.arange(12), z=X[:0])
    (note,) = found.notes
    assert note.endswith("t.npz: these arrays are not read: X_test, users, z")
    assert archive(x=X, y=np.arange(12) % 2).notes == ()
    own = {"partition": "private", "classes": 2}
    found = archive(own, x=X, y=np.arange(12) % 2, x_test=X[:2], y_test=np.arange(2))
    assert len(found.test_labels) == 12 and found.notes[0].endswith("are not read: x_test, y_test")


def test_channels_are_first_or_certainly_last(archive: Callable[..., Dataset]) -> None:
    images = np.arange(6 * 8 * 9 * 3).reshape(6, 8, 9, 3).astype(np.uint8)
    y, no_test = np.arange(6), {"x_test": images[:1], "y_test": np.array([0])}
    last = archive(x=images, y=y, **no_test)
    assert last.inputs == Inputs((3, 8, 9), 6) and np.array_equal(
        last.train_images, images.transpose(0, 3, 1, 2)
    )
    first = archive(
        x=images.transpose(0, 3, 1, 2),
        y=y,
        x_test=images[:1].transpose(0, 3, 1, 2),
        y_test=np.array([0]),
    )
    assert np.array_equal(first.train_images, last.train_images)
    assert archive(
        x=images[..., :1], y=y, x_test=images[:1, ..., :1], y_test=np.array([0])
    ).inputs.shape == (1, 8, 9)
    notes = [each for each in (*last.notes, *first.notes) if "channels" in each]
    assert notes == []


@pytest.mark.parametrize(
    ("shape", "kind", "channels"),
    [
        ((8, 8, 3), np.float32, 8),
        ((3, 8, 3), np.uint8, 3),
        ((12, 6, 6), np.uint8, 12),
        ((8, 8, 12), np.uint8, 8),
    ],
)
def test_channels_that_may_be_last_are_named(
    archive: Callable[..., Dataset], shape: tuple[int, ...], kind: Any, channels: int
) -> None:
    found = archive(x=np.zeros((6, *shape), kind), y=np.zeros(6, int))
    assert found.inputs.shape == shape and len(found.notes) == 1
    assert (
        f"are images of {channels} channels, {shape[1]} x {shape[2]} pixels. If" in found.notes[0]
    )
    assert "use x.transpose(0, 3, 1, 2)" in found.notes[0]


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 28, 28), (2, 9, 7), (8,), (4, 6)])
@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_usual_shapes_are_not_named(
    archive: Callable[..., Dataset], shape: tuple[int, ...], kind: Any
) -> None:
    if kind == np.uint8 and len(shape) == 1:
        shape = (4, 5)
    assert archive(x=np.zeros((6, *shape), kind), y=np.zeros(6, int)).notes == ()


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": X}, r"has no array 'y' but x"),
        ({"x": X, "y": np.arange(11)}, r"x of \[12, 2\] and y of \[11\]"),
        ({"x": X, "y": np.arange(12), "x_test": X}, "only one of x_test and y_test"),
        ({"x": X[:, 0], "y": np.arange(12)}, "shape"),
        ({"x": X.astype(complex), "y": np.arange(12)}, "x is an array of complex"),
        ({"x": X.astype(object), "y": np.arange(12)}, "x is an array of object"),
        ({"x": np.where(X > 3, np.nan, X), "y": np.arange(12)}, "not finite"),
        (
            {"x": X, "y": X[:, 0]},
            r"targets of float64 \[10\], which are no classes.*data\.targets = 'numbers'",
        ),
        (
            {"x": X, "y": -np.arange(12)},
            "labels that should be 0 to n - 1, and -11 among them. Number the classes from 0",
        ),
        (
            {"x": X, "y": 1 + np.arange(12) % 3},
            r"3 classes with the labels 1, 2, 3, .* 4\. Number them from 0 to 2, or",
        ),
        (
            {"x": X, "y": 1000 * (np.arange(12) % 3)},
            r"would have 2001\. .*, or set data\.classes = 2001\.",
        ),
        (
            {"x": X, "y": np.arange(12) * 10**12},
            r"12 classes with the labels 0, 1000000000000, 2000000000000 and 9 more",
        ),
        ({"x": X, "y": np.arange(12) % 3 / 2}, "which are no classes"),
        (
            {"x": X, "y": np.eye(3, dtype=int)[np.arange(12) % 3]},
            r"\[N\] by y\.argmax\(1\) if they are one-hot, or",
        ),
        (
            {"x": X, "y": np.arange(12)[:, None]},
            r"int64 \[10, 1\], which are no classes\. .* \[N\] by y\[:, 0\], or",
        ),
        (
            {"x": np.where(X == 5, -np.inf, X), "y": np.arange(12)},
            "has x that are not finite .* place 2: -inf",
        ),
        (
            {"x": np.where(X == 5, 1e39, X), "y": np.arange(12)},
            r"has x that are not finite .* place 2: 1e\+39",
        ),
        (
            {"x": np.float64(np.nan), "y": np.arange(12)},
            "has x that are not finite .* place 0: nan",
        ),
        (
            {"x": X, "y": np.where(X[:, 0] == 6, np.nan, X[:, 0])},
            "has y that are not finite .* place 3: nan",
        ),
        ({"x_train": X, "y_train": np.arange(12)}, "has no array 'x' but x_train, y_train"),
        (
            {"x": X, "y": np.arange(12), "x_test": X * np.nan, "y_test": np.arange(12)},
            "has x_test that are not finite",
        ),
        ({"x": X.astype(np.uint8), "y": np.arange(12)}, r"samples of uint8 \[10, 2\]"),
    ],
)
def test_wrong_arrays_are_refused(
    archive: Callable[..., Dataset], arrays: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        archive(**arrays)


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def member(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b" " * (117 - len(header)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            member("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000), }"),
            "does not fit into this file",
        ),
        (
            member(
                "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999, 2), }"
            ),
            "npz file",
        ),
        (
            member("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n."),
            "array of object",
        ),
        (member("{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2), }"), "npz file"),
        (member("{'descr': 'x', 'shape': 3}"), "npz file"),
        (b"\x93NUMPY\x09\x00", "npz file"),
        (b"", "npz file"),
    ],
)
def test_an_archive_that_lies_about_its_size_is_refused_before_memory_is_taken(
    tmp_path: Path, raw: bytes, problem: str
) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", raw)
        file.writestr("y.npy", raw)
    with pytest.raises(InvalidExperiment, match=problem):
        datasets.load(parse({"data": {"dataset": "t.npz", "root": str(tmp_path)}}).data)


def test_arrays_that_do_not_fit_into_memory_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "t.npz", x=X, y=np.arange(12))
    data = parse({"data": {"dataset": "t.npz", "root": str(tmp_path)}}).data
    monkeypatch.setattr(table_files, "MOST_BYTES", X.nbytes + 12 * 8 - 1)
    with pytest.raises(InvalidExperiment, match=r"y of \[12\] does not fit into this file"):
        datasets.load(data)


def test_nothing_is_unpickled(archive: Callable[..., Dataset]) -> None:
    with pytest.raises(InvalidExperiment, match="array of object"):
        archive(x=np.array([Harm()], dtype=object), y=np.arange(1))


def test_numbers_are_split_evenly_by_size_by_user_and_by_quantiles(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=400)
    rows = "".join(f"{i},{y},{'ab'[i % 2]}\n" for i, y in enumerate(values))
    (tmp_path / "t.csv").write_text(f"a,y,who\n{rows}")
    tree = {
        "dataset": "t.csv",
        "root": str(tmp_path),
        "target_column": "y",
        "targets": "numbers",
        "user_column": "who",
    }

    def parts(**more: Any) -> splits.Split:
        return splits.split_of(
            parse({"topology": {"institutions": 1, "devices": 2}, "data": {**tree, **more}})
        )

    even, sizes, users = (
        parts(),
        parts(partition="quantity", concentration=0.5),
        parts(partition="natural"),
    )
    assert [len(part) for part in even.partitions] == [160, 160] and even.kind == "bin"
    lengths = [len(part) for part in sizes.partitions]
    assert sum(lengths) == 320 and lengths[0] != lengths[1] and min(lengths) >= 10
    assert (
        sorted(np.concatenate(sizes.partitions)) == list(range(320)) and len(users.partitions) == 2
    )
    skewed = parts(partition="shards", shards=1, bins=10)
    targets = datasets.load(parse({"data": tree}).data).train_labels.numpy()[:, 0]
    low, high = sorted((targets[part] for part in skewed.partitions), key=np.mean)
    assert low.max() <= high.min() and np.bincount(skewed.labels).tolist() == [32] * 10
    assert len({each.digest for each in (even, sizes, users, skewed)}) == 4


def test_the_commands_describe_and_split_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 7},{i / 3}\n" for i in range(100)))
    Path("lab.toml").write_text(
        'topology = { institutions = 1, devices = 2 }\n[data]\ndataset = "t.csv"\nroot = '
        '"."\ntargets = "numbers"\n'
        'target_column = "y"\npartition = "dirichlet"\nbins = 4\n'
    )
    done = invoke("data", "check", "lab.toml", "--format", "json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["train"], facts["test"], facts["shape"]) == (80, 20, [2])
    assert (facts["numbers"], facts["classes"]) == (1, 0)
    done = invoke("data", "partition", "lab.toml")
    assert done.exit_code == 0 and done.stdout.startswith("device\tparent\tsamples\tbins"), (
        done.stderr
    )
    devices = json.loads(Path("partition/partition.json").read_text())["devices"]
    assert sum(sum(device["by_bin"]) for device in devices.values()) == 80
    assert Path("partition/partition.svg").read_text().startswith("<?xml")
    Path("device-0").mkdir()
    Path("device-0/t.csv").write_text("a,y\n1,2\n")
    Path("own.toml").write_text(
        '[data]\ndataset = "t.csv"\nroot = "{node}"\ntargets = "numbers"\ntarget_column = '
        '"y"\npartition = "private"\n'
    )
    done = invoke("data", "check", "own.toml", "--node", "device-0", "--format", "json")
    assert done.exit_code == 0 and json.loads(done.stdout)["train"] == 1, done.stderr
    assert invoke("data", "check", "own.toml").exit_code == 4
