"""The result of a reader, and the conversion of any array, tensor or PyTorch data set to it.

Floats become float32; uint8 of three or more dimensions are images, [N, H, W] of one channel, and
[N, H, W, C] only where nothing else is likely; other integers are tokens, int64. Classes are
integers, int64 [N], without gaps unless their number is given; numbers become float32 [N, T].

Data of the user's own come from a function named in the experiment, `data.dataset =
"package.module:function"`. It is called with those of the keywords `root`, a Path, and `node`, the
reading node's name, that it accepts. It returns `Parts`, or a pair of training and test set: each a
PyTorch data set, or a pair of samples and targets, or samples, targets and users. Unless
`data.partition` is private the result must be the same everywhere: each node splits the training
samples by itself. If it is private, a device returns None for the test set and the cloud for the
training set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import described
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings import own
from fedstrata.common.settings.data import NUMBERS, Data

Samples = (
    npt.NDArray[np.uint8] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32]
)
Labels = npt.NDArray[np.int64]
Targets = Labels | npt.NDArray[np.float32]
Array = npt.NDArray[Any]

MOST_BYTES = 16 << 30  # of samples in memory
NAME_MOST = 200  # characters of a name in a message
IMAGES_DIM = 3  # with the samples' own dimension, the least
CHANNELS = (1, 3, 4)  # grey, colour, colour and transparency
DATASET_KEY: Final = "data.dataset"
FORMS: Final = (
    "Return two pairs of samples and targets: (x, y), (x_test, y_test), or two PyTorch data sets."
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Images uint8 [N, C, H, W] or texts int64 [N, L]; labels int64 [N], below `classes`.

    Tables and own data may be float32 [N, ...], which is taken as it is; their uint8 becomes -1 to
    1. Their labels may be numbers, float32 [N, T], T being `classes`. `tokens` is 0 but for texts.
    If the files name the users of the training samples, `owners` int64 [N] are indices in `users`,
    which are sorted.
    If they name those of the test samples, too, `test_owners` are theirs, -1 for a user without
    training samples. `names`: of the classes, if they have any. `notes`: what the user should know
    of the files, a line each.
    """

    train: Samples
    train_labels: Targets
    test: Samples
    test_labels: Targets
    classes: int
    tokens: int = 0
    users: tuple[str, ...] = ()
    owners: Labels | None = None
    names: Sequence[str] = ()
    notes: Sequence[str] = ()
    test_owners: Labels | None = None


def some(names: Sequence[object], *, most: int = 3) -> str:
    """Return the first few of many names, long ones cut, and the number of the others."""
    shown = []
    for text in map(str, names[:most]):
        shown.append(text[:NAME_MOST] + "..." * (len(text) > NAME_MOST))
    listed = ", ".join(shown)
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed


class Refuse(Protocol):
    """Raises InvalidExperiment for a problem and its remedy."""

    def __call__(self, problem: str, remedy: str) -> NoReturn:
        """Raise it."""


def read_own(data: Data, root: Path, node: str) -> Parts:
    """Return what the function returns, converted and checked. Raises InvalidExperiment."""
    with own.guarded({DATASET_KEY: data.dataset}):
        return _read(data, root, node)


def _read(data: Data, root: Path, node: str) -> Parts:
    def refuse(problem: str, remedy: str) -> NoReturn:
        own.refuse(DATASET_KEY, data.dataset, problem, remedy)

    result = own.call(DATASET_KEY, data.dataset, {"root": root, "node": node})
    if isinstance(result, Parts):
        names_of = np.array([*result.users, ""])  # of -1: nobody
        users = None if result.owners is None else names_of[result.owners]
        testers = None if result.test_owners is None else names_of[result.test_owners]
        train = (result.train, result.train_labels, users)
        test = (result.test, result.test_labels, testers)
        classes = result.classes
        tokens = result.tokens
        names = result.names
        notes = result.notes
        return parts_of(
            data,
            train,
            test,
            refuse=refuse,
            classes=classes,
            tokens=tokens,
            names=names,
            notes=notes,
        )
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        refuse(f"returns {type(result).__name__}", FORMS)
    train, test = (_part(each, refuse) for each in result)
    return parts_of(data, train, test, refuse=refuse)


def _part(found: Any, refuse: Refuse) -> tuple[Any, Any, Any]:
    """Return samples, targets and users, None for what is not there."""
    if found is None:
        return None, None, None
    if isinstance(found, (tuple, list)) and len(found) in (2, 3):
        samples, targets, *owners = found
        return samples, targets, owners[0] if owners else None
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")) or hasattr(found, "dtype"):
        refuse(f"returns {type(found).__name__} for one of both sets", FORMS)
    return *stacked(found, refuse), None


def parts_of(
    data: Data,
    train: tuple[Any, Any, Any],
    test: tuple[Any, Any, Any],
    *,
    refuse: Refuse,
    classes: int = 0,
    tokens: int = 0,
    names: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Parts:
    """Return converted samples and targets. Raises InvalidExperiment through `refuse`.

    `train` and `test` are samples, targets and users, None if they have none. One of both may have
    no samples: None. `classes`, `tokens`: their numbers if they are known, else those that occur;
    `names`, `notes`: see `Parts`.
    """
    found = [_samples(each, refuse, of) for each, of in ((train[0], "training"), (test[0], "test"))]
    first = next((each for each in found if each is not None), None)
    if first is None:
        refuse("has no samples", "Return some.")
    nothing: Samples = np.empty((0, *first.shape[1:]), first.dtype)
    samples = _filled(found, nothing)
    if samples[0].dtype != samples[1].dtype or samples[0].shape[1:] != samples[1].shape[1:]:
        shapes = " and ".join(f"{each.dtype} {list(each.shape)}" for each in samples)
        refuse(f"has training and test samples of {shapes}", "Convert one of them.")
    given = [
        _targets(data, each, refuse, of) for each, of in ((train[1], "training"), (test[1], "test"))
    ]
    width = next((each.shape[1:] for each in given if each is not None), ())
    kind = np.float32 if data.targets == NUMBERS else np.int64
    labels = _filled(given, np.empty((0, *width), kind))
    if labels[0].shape[1:] != labels[1].shape[1:]:
        problem = "has other numbers to predict in training than in test"
        refuse(problem, "Give all samples the same.")
    for each, of in zip(samples, labels, strict=True):
        if len(each) != len(of):
            refuse(f"has {len(each)} samples with {len(of)} targets", "Give each sample one.")
    if data.targets == NUMBERS:
        classes = width[0]
    else:
        named = data.classes if isinstance(data.classes, int) else len(names)
        classes = named or classes or _classes(labels, refuse)
    users, owners = _users(train[2], len(samples[0]), refuse)
    names_of_test, places = _users(test[2], len(samples[1]), refuse)
    test_owners = None
    if owners is not None and places is not None:
        known = {name: place for place, name in enumerate(users)}
        numbers = np.array([known.get(name, -1) for name in names_of_test], np.int64)
        test_owners = numbers[places]
    if first.dtype == np.int64:
        tokens = tokens or 1 + max(int(each.max(initial=0)) for each in samples)
        if any(len(each) and not 0 <= each.min() <= each.max() < tokens for each in samples):
            remedy = "Check `tokens`, or convert the samples to float32."
            refuse(f"has integers outside of 0 to {tokens - 1}", remedy)
    looked_at = samples[0] if len(samples[0]) else samples[1]
    notes = [*notes, *_unlikely(looked_at)]
    return Parts(
        samples[0],
        labels[0],
        samples[1],
        labels[1],
        classes,
        tokens,
        users,
        owners,
        names,
        notes,
        test_owners,
    )


def rows_to_test(count: int, share: float, *, refuse: Refuse) -> npt.NDArray[np.bool_]:
    """Return which of `count` rows of a table are for testing, bool [count]: at least one, and not
    all.

    They are drawn once and for all, so that no run's seed has a say.
    """
    if count < 2:
        refuse(f"has {count} rows", "It needs at least two, one to train and one to test.")
    picked = np.zeros(count, np.bool_)
    tests = min(count - 1, max(1, round(share * count)))
    picked[generator(0, Purpose.PARTITION, "test rows").permutation(count)[:tests]] = True
    return picked


def _classes(labels: Sequence[Targets], refuse: Refuse) -> int:
    """Return the number of classes that occur: 0 to n - 1, each of them."""
    found = np.unique(np.concatenate(labels)).tolist()
    if found and found[0] < 0:
        refuse(
            f"has labels that should be 0 to n - 1, and {found[0]} among them",
            "Number the classes from 0.",
        )
    if found != list(range(len(found))):
        problem = (
            f"has {len(found)} classes with the labels {some(found)}, for which a model "
            f"would have {found[-1] + 1}"
        )
        remedy = f"Number them from 0 to {len(found) - 1}, or set data.classes = {found[-1] + 1}."
        refuse(problem, remedy)
    return len(found)


def _unlikely(samples: Samples) -> list[str]:
    """Return a line if samples may be images whose channels are last, which a model would take for
    rows of pixels.
    """
    shape = samples.shape[1:]
    if len(shape) != IMAGES_DIM or samples.dtype == np.int64:
        return []
    odd = samples.dtype == np.uint8 and (shape[0] > max(CHANNELS) or shape[2] in CHANNELS)
    if not odd and not _channels_last(shape):
        return []
    images = (
        f"{samples.dtype} samples of {list(shape)} are images of {shape[0]} channels, "
        f"{shape[1]} x {shape[2]} pixels"
    )
    return [f"{images}. If their channels are last, use x.transpose(0, 3, 1, 2)"]


def _channels_last(shape: Sequence[int]) -> bool:
    """Return whether (H, W, C) is likely, and (C, H, W) is not."""
    return shape[2] in CHANNELS and shape[0] not in CHANNELS


def _samples(found: Any, refuse: Refuse, part: str) -> Samples | None:
    if found is None:
        return None
    array = array_of(found, "samples", refuse)
    if array.ndim < 2:
        remedy = "Give each sample a shape of its own: [N, ...]."
        refuse(f"has samples of shape {list(array.shape)}", remedy)
    kind = array.dtype.kind
    if kind in "fb":
        with np.errstate(over="ignore"):
            floats = np.ascontiguousarray(array, np.float32)
        check_finite(floats, f"{part} samples", refuse)
        return floats
    if array.dtype == np.uint8 and array.ndim >= IMAGES_DIM:
        if array.ndim == IMAGES_DIM + 1 and _channels_last(array.shape[1:]):
            array = array.transpose(0, 3, 1, 2)
        if array.ndim == IMAGES_DIM:
            array = array[:, None]
        return np.ascontiguousarray(array)
    if kind not in "iu" or array.dtype == np.uint8:
        remedy = "Convert them: floats, uint8 images [N, C, H, W], or integers that are tokens."
        refuse(f"has samples of {array.dtype} {list(array.shape)}", remedy)
    return np.ascontiguousarray(array, np.int64)


def _filled(found: Sequence[Any], nothing: Any) -> list[Any]:
    """Return arrays with `nothing` in place of those that are missing."""
    filled = list(found)
    for place, each in enumerate(found):
        if each is None:
            filled[place] = nothing
    return filled


def check_finite(array: Array, what: str, refuse: Refuse) -> None:
    """Refuse floats that are not finite in float32, by the first one's place along the first
    dimension.
    """
    if array.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        finite = np.atleast_1d(np.isfinite(np.asarray(array, np.float32)))
    if not finite.all():
        first = int(finite.argmin())
        place = np.unravel_index(first, finite.shape)[0]
        problem = f"has {what} that are not finite in float32, the first in place {place}"
        refuse(f"{problem}: {array.flat[first]}", "Replace such values, or drop these samples.")


def _targets(data: Data, found: Any, refuse: Refuse, part: str) -> Targets | None:
    if found is None:
        return None
    array = array_of(found, "targets", refuse)
    if data.targets == NUMBERS:
        if array.dtype.kind not in "fbiu" or array.ndim not in (1, 2):
            remedy = "Convert them to floats, [N] or [N, T]."
            refuse(f"has targets of {array.dtype} {list(array.shape)}", remedy)
        if array.ndim == 1:
            array = array[:, None]
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(array, np.float32)
        check_finite(numbers, f"{part} targets", refuse)
        return numbers
    if array.dtype.kind not in "biu" or array.ndim != 1:
        how = ""
        if array.ndim == 2:
            how = {1: " by y[:, 0]"}.get(array.shape[1], " by y.argmax(1) if they are one-hot")
        remedy = f"Convert them to integers from 0, [N]{how}, or set data.targets = 'numbers'."
        refuse(f"has targets of {array.dtype} {list(array.shape)}, which are no classes", remedy)
    return np.ascontiguousarray(array, np.int64)


def _users(found: Any, count: int, refuse: Refuse) -> tuple[tuple[str, ...], Labels | None]:
    """Return the users' names, sorted, and each sample's index in them."""
    if found is None:
        return (), None
    array = array_of(found, "users", refuse)
    if array.shape != (count,) or array.dtype.kind not in "iuUS":
        refuse(
            f"has users of {array.dtype} {list(array.shape)}",
            f"Give each of {count} samples a name or a number.",
        )
    names, owners = np.unique(array, return_inverse=True)
    return tuple(str(name) for name in names), owners.astype(np.int64)


def array_of(found: Any, what: str, refuse: Refuse) -> Array:
    """Return an array, a tensor or nested lists as an array."""
    try:
        array = found if isinstance(found, np.ndarray) else np.asarray(found)
    except (TypeError, ValueError) as error:
        refuse(
            f"has {what} that are no array ({described(error)})",
            "Return arrays or tensors of one shape.",
        )
    if array.nbytes > MOST_BYTES:
        refuse(f"has {what} of {array.nbytes / 1e9:.0f} GB", f"Use at most {MOST_BYTES >> 30} GiB.")
    return array


def stacked(pairs: Any, refuse: Refuse) -> tuple[Array, Array]:
    """Return the samples and targets of a PyTorch data set, read once: `pairs[i]` is a sample and
    its target.
    """
    samples: list[Array] = []
    targets: list[Array] = []
    total = 0
    for place in range(len(pairs)):
        try:
            pair = pairs[place]
        except BaseException as error:
            error.add_note(f"its sample {place}")
            raise
        if not isinstance(pair, Sequence) or len(pair) != 2:
            refuse(
                f"its sample {place} is no pair of a sample and its target",
                "Let the data set return pairs.",
            )
        samples.append(array_of(pair[0], "samples", refuse))
        targets.append(array_of(pair[1], "targets", refuse))
        total += samples[-1].nbytes
        if samples[-1].shape != samples[0].shape or targets[-1].shape != targets[0].shape:
            shapes = f"{list(samples[-1].shape)} instead of {list(samples[0].shape)}"
            refuse(
                f"its sample {place} has another shape, {shapes}", "Bring all samples to one shape."
            )
        if total > MOST_BYTES:
            refuse(
                f"its samples take more than {MOST_BYTES >> 30} GiB",
                "Use fewer or smaller samples.",
            )
    if not samples:
        refuse("has no samples", "Return some.")
    return np.stack(samples), np.stack(targets)
