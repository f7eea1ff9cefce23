"""Steps of SGD recorded once, and run from then on without Python and without autograd.

With small models on a CPU, autograd and Python take as long as the kernels. For each shape of a
batch, the operations that torch dispatches below autograd in one whole step (gradients, clipping,
optimiser) are recorded and written as a loop over many batches in TorchScript, which needs no
compiler. The same kernels run in the same order, so the models are those of autograd, bit for bit.
A program is used only if that was seen (`program_of`): what it makes of two random batches equals
what the plain steps make of them, and both were recorded as the same operations.

Code of the user's own may do in a later step what it did not do in these. So its programs are
compared as they run (`Comparison`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import isfinite
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[Sequence[Tensor]], Tensor]
Loop = Callable[..., None]

_DETACH: Final = torch.ops.aten.detach.default
_NEW: Final = torch.ops.aten.new_empty_strided.default
_COPY: Final = torch.ops.aten.copy_.default
_POOL_BACKWARD: Final = torch.ops.aten.max_pool2d_with_indices_backward.default
# of operations whose results are not a function of shapes, or which code may have looked at
_UNKNOWN: Final = {
    torch.Tag.nondeterministic_seeded: "may draw random numbers",
    torch.Tag.data_dependent_output: "gives Python a value",
    torch.Tag.dynamic_output_shape: "has a shape that depends on values",
}
# the name of the learning rate in every optimiser's kernel; it is an argument of a program
RATE: Final = "lr"
AS_IT_IS: Final = (1.0,)
# of the numbers of a trial: code that reads them takes other branches
CONTRASTS: Final = (1.0, 0.0, 1e3)
COMPARED: Final = 64  # of the steps of a program of own code one is compared


class NotRecordable(Exception):
    """The operations of a step are not a function of the batch and the state alone."""


class NoTorchScript(NotRecordable):
    """This release of PyTorch has no TorchScript, which runs the programs."""


class ProgramDiffers(Exception):
    """A program has not made what its step makes by autograd."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A dispatched operation."""

    call: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def read(self) -> Iterator[Tensor]:
        """The tensors among the arguments."""
        return chain(_tensors(self.args), _tensors(tuple(self.kwargs.values())))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while it is entered. It keeps their tensors, so that each has an id of its
    own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler when the mode is first entered, 150 MB and
        seconds.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        self.operations.append(Operation(func, args, kwargs or {}, result))
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A step as a text: a function of the state, a batch and the learning rate.

    `numbers` are the sizes in it, apart from the text, so that batches of any size share one.
    `constants` are the tensors that the step reads and did not make; they are read anew in each
    step. `lists`: places in the state.
    """

    text: str
    numbers: Sequence[int]
    constants: Sequence[Tensor]
    lists: Sequence[Sequence[int]]

    def equals(self, other: Recording) -> bool:
        """Return whether both are the same operations on the same constants."""
        same = len(self.constants) == len(other.constants) and all(
            map(is_, self.constants, other.constants)
        )
        return same and (self.text, self.numbers, self.lists) == (
            other.text,
            other.numbers,
            other.lists,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Whole steps over batches of one shape: `forms` are the shapes, strides and types of a batch's
    tensors.
    """

    loop: Loop
    recording: Recording
    forms: Sequence[object]

    def fits(self, batches: Sequence[Tensor]) -> bool:
        """Return whether n batches, whose tensors are [n, ...], are of the form that was tried."""
        return _forms([each[0] for each in batches]) == self.forms

    def run(
        self, state: Sequence[Tensor], batches: Sequence[Tensor], *, rate: float, losses: Tensor
    ) -> None:
        """Take a step for each of n batches, whose tensors are [n, ...], and change the state as
        the steps do.

        Each batch's loss, times its samples, is added to `losses`, float64 [].
        """
        recording = self.recording
        lists = [list(map(state.__getitem__, places)) for places in recording.lists]
        # Optimised it would merge matrix products, and have other bits. The switch is each thread's
        # own.
        torch._C._set_graph_executor_optimize(False)
        with torch.no_grad():  # the weights are leaves
            self.loop(
                list(state),
                list(batches),
                recording.constants,
                lists,
                recording.numbers,
                rate,
                losses,
            )


def program_of(
    step: Step,
    state: Sequence[Tensor],
    batches: Sequence[Sequence[Tensor]],
    *,
    rate: float,
    hidden: Callable[[], bytes] = bytes,
    factors: Sequence[float] = AS_IT_IS,
) -> Program:
    """Return the program of a step, tried on two random batches, whose tensors are [W, ...]. Raises
    NotRecordable.

    `step(batch)` takes a step of SGD with this learning rate, in place, and returns its loss,
    detached. The state is the same before and after. `hidden` returns what the user's own code
    keeps beside it: a step that changes that is not recorded. The trial is repeated with the state
    and the batches times each of `factors`, the first one being 1.
    """
    before = _copies(state)
    kept = hidden()
    program: Program | None = None
    try:
        for factor in factors:
            start = [_times(tensor, factor, counts=True) for tensor in before]
            some = [_all_times(batch, factor) for batch in batches]
            _restore(state, start)
            recordings = []
            expected = _no_losses(state)
            for batch in some:
                with Recorder() as recorder:
                    loss = step(batch)
                expected.add_(loss, alpha=len(batch[0]))
                recordings.append(_recording(recorder.operations, state, batch, loss))
            if hidden() != kept:
                problem = "code keeps something beside the state, or draws random numbers"
                raise NotRecordable(problem)
            first, second = recordings
            program = program or Program(_compiled(first.text), first, _forms(batches[0]))
            if not (program.recording.equals(first) and first.equals(second)):
                raise NotRecordable("the operations differ from batch to batch")
            after = _copies(state)
            losses = _no_losses(state)
            _restore(state, start)
            stacked = [torch.stack(each) for each in zip(*some, strict=True)]
            try:
                program.run(state, stacked, rate=rate, losses=losses)
            except RuntimeError as error:
                raise NotRecordable(
                    f"its operation {_failed(error)} cannot run in a program"
                ) from None
            if not _same((*state, losses), (*after, expected)):
                raise NotRecordable("the program makes other bits")
        assert program is not None
        return program
    finally:
        _restore(state, before)


@dataclass(slots=True, eq=False)
class Comparison:
    """The programs of own code, compared with steps by autograd in a training of `steps` steps.

    These are its first step, its last one, and one of `COMPARED`. `hidden`: as in `program_of`.
    """

    steps: int
    hidden: Callable[[], bytes]
    left: int = 0  # steps of a program until the next comparison

    def now(self, done: int) -> bool:
        """Return whether to compare the next step, `done` being taken."""
        return self.left == 0 or done == self.steps - 1

    def some(self, most: int, done: int) -> int:
        """Return how many steps a program takes before the next comparison, at most so many."""
        count = min(most, self.left, self.steps - 1 - done)
        self.left -= count
        return count

    def take(
        self,
        program: Program,
        step: Step,
        state: Sequence[Tensor],
        batch: Sequence[Tensor],
        *,
        rate: float,
        losses: Tensor,
    ) -> None:
        """Take a step by autograd, and the same by a program, as `Program.run` does. Raises
        ProgramDiffers.
        """
        before = _copies(state)
        kept = self._hidden()
        by_program = _no_losses(state)
        program.run(state, [tensor[None] for tensor in batch], rate=rate, losses=by_program)
        made = _copies(state)
        _restore(state, before)
        by_autograd = _no_losses(state)
        by_autograd.add_(step(batch), alpha=len(batch[0]))
        if not _same((*state, by_autograd), (*made, by_program)):
            raise ProgramDiffers("a recorded step makes other bits")
        if self._hidden() != kept:
            raise ProgramDiffers("code keeps something beside the state, or draws random numbers")
        losses.add_(by_autograd)
        self.left = COMPARED - 1

    def _hidden(self) -> bytes:
        try:
            return self.hidden()
        except RuntimeError as error:
            raise ProgramDiffers(str(error)) from None


def _failed(error: RuntimeError) -> str:
    """Return the operation at which TorchScript failed: its error has the line, and marks it in the
    next one.
    """
    line = str(error).partition("<--- HERE")[0].rpartition("\n")[0]
    found: list[str] = re.findall(r"torch\.ops\.([\w.]+)", line)
    if found:
        return found[-1]
    return "of some kind"


def _times(tensor: Tensor, factor: float, *, counts: bool = False) -> Tensor:
    """Return numbers times a factor. Other tensors are as they are, but those that count are larger
    by the factor.
    """
    if factor == 1:
        return tensor
    if tensor.is_floating_point():
        return tensor * factor
    if counts and tensor.dtype == torch.int64:
        return tensor + int(factor)
    return tensor


def _all_times(batch: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [_times(tensor, factor) for tensor in batch]


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same values; NaN equals NaN."""
    return all(
        torch.equal(one, other)
        or bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
        for one, other in zip(found, wanted, strict=True)
    )


def _forms(batch: Sequence[Tensor]) -> list[object]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch]


def _copies(state: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in state]


def _no_losses(state: Sequence[Tensor]) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=state[0].device)


@torch.no_grad()
def _restore(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)
        tensor.grad = None  # of a step that failed


def _recording(
    operations: Sequence[Operation], state: Sequence[Tensor], batch: Sequence[Tensor], loss: Tensor
) -> Recording:
    """Return a step's operations as a text. Raises NotRecordable."""
    names = {id(tensor): f"s{place}" for place, tensor in enumerate(state)}
    names |= {id(tensor): f"b{place}" for place, tensor in enumerate(batch)}
    writer = _ProgramWriter(names, {id(tensor): place for place, tensor in enumerate(state)})
    last_read = {
        id(tensor): place for place, operation in enumerate(operations) for tensor in operation.read
    }
    following = iter(enumerate(operations))
    for place, operation in following:
        for tag, problem in _UNKNOWN.items():
            if tag in operation.call.tags:
                raise NotRecordable(f"its operation {operation.call.overloadpacket} {problem}")
        if operation.call is _DETACH:
            writer.names[id(operation.result)] = writer.text(operation.args[0])
        elif (
            _is_copy(operations[place : place + 2])
            and last_read[id(operations[place + 1].args[1])] == place + 1
        ):
            # A gradient that autograd would have taken over as it is, had the recorder not kept it,
            # too.
            writer.names[id(operation.result)] = writer.text(operations[place + 1].args[1])
            next(following)
        else:
            try:
                writer.write(operation)
            except NotRecordable as error:
                raise NotRecordable(
                    f"its operation {operation.call.overloadpacket} {error}"
                ) from None
    return writer.recording(len(state), len(batch), samples=len(batch[0]), loss=loss)


def _is_copy(pair: Sequence[Operation]) -> bool:
    """Return whether two operations make a copy of a tensor with its own strides."""
    if [operation.call for operation in pair] != [_NEW, _COPY]:
        return False
    made, source = pair[1].args[:2]
    return (
        made is pair[0].result and isinstance(source, Tensor) and source.stride() == made.stride()
    )


@dataclass(slots=True)
class _ProgramWriter:
    """The lines of a loop, the names of its tensors by id, its constants, and its numbers."""

    names: dict[int, str]
    state: Mapping[int, int]  # places by id
    constants: list[Tensor] = field(default_factory=list)
    lists: list[list[int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def write(self, operation: Operation) -> None:
        """Write the call of an operation; one in place on each tensor of a list as so many calls.

        TorchScript would drop a change of a list's tensors, unless the list is an argument.
        """
        name = operation.call.overloadpacket.__name__
        if name.startswith("_foreach_") and name.endswith("_"):
            for place in range(len(operation.args[0])):
                arguments = []
                for arg in operation.args:
                    one = arg[place] if isinstance(arg, (list, tuple)) else arg
                    arguments.append(self.text(one))
                arguments += [f"{key}={self.text(v)}" for key, v in operation.kwargs.items()]
                call = f"torch.ops.aten.{name.removeprefix('_foreach_')}"
                self.lines.append(f"{call}({', '.join(arguments)})")
            return
        arguments = [self.text(value) for value in operation.args]
        last = torch.channels_last
        if operation.call is _POOL_BACKWARD and operation.args[1].is_contiguous(memory_format=last):
            # With a gradient in another order torch would reorder all that the kernel reads and
            # writes.
            arguments[0] = f"torch.ops.aten.contiguous({arguments[0]}, memory_format={last})"
        for key, value in operation.kwargs.items():
            text = RATE if key == RATE else self.text(value)
            arguments.append(f"{key}={text}")
        call = f"torch.ops.{operation.call.overloadpacket!s}({', '.join(arguments)})"
        target = self._target(operation.result)
        if target:
            call = f"{target} = {call}"
        self.lines.append(call)

    def text(self, value: Any) -> str:
        """Return the text of an argument. Raises NotRecordable for one that has none."""
        match value:
            case Tensor():
                if id(value) not in self.names:
                    self.names[id(value)] = f"c{len(self.constants)}"
                    self.constants.append(value)
                found = self.names[id(value)]
            case list() | tuple() if value and all(id(each) in self.state for each in value):
                self.lists.append([self.state[id(each)] for each in value])
                found = f"l{len(self.lists) - 1}"
            case list() | tuple():
                found = f"[{', '.join(map(self.text, value))}]"
            case torch.dtype() | torch.memory_format() | torch.layout():
                found = str(value)
            case torch.device():
                found = f"torch.device({str(value)!r})"
            case None | bool() | str():
                found = repr(value)
            case int():
                found = self._number(value)
            case float() if isfinite(value):
                found = repr(value)
            case _:
                raise NotRecordable(f"has the argument {value!r}, which a program cannot have")
        return found

    def recording(self, state: int, batch: int, *, samples: int, loss: Tensor) -> Recording:
        """Return the text: a loop over batches."""
        size = self._number(samples)
        added = f"torch.ops.aten.add_(losses, {self.text(loss)}, alpha={size})"
        body = [
            f"b{place} = torch.ops.aten.select(batches[{place}], 0, k)" for place in range(batch)
        ]
        unpacked = []
        for source, count in (
            ("state", state),
            ("constants", len(self.constants)),
            ("lists", len(self.lists)),
            ("numbers", len(self.numbers)),
        ):
            if count:
                names = ", ".join(f"{source[0]}{place}" for place in range(count))
                unpacked.append(f"{names}, = {source}")
        tensors = "state: List[Tensor], batches: List[Tensor], constants: List[Tensor]"
        lines = [
            f"def loop({tensors}, lists: List[List[Tensor]], "
            f"numbers: List[int], {RATE}: float, losses: Tensor):",
            *unpacked,
            "for k in range(torch.ops.aten.size(batches[0], 0)):",
            *(f"    {line}" for line in (*body, *self.lines, added)),
        ]
        return Recording("\n    ".join(lines) + "\n", self.numbers, self.constants, self.lists)

    def _number(self, value: int) -> str:
        self.numbers.append(value)
        return f"n{len(self.numbers) - 1}"

    def _target(self, result: Any) -> str:
        """Return the left side of an assignment, "" for an operation in place, whose tensor has a
        name.
        """
        if isinstance(result, (list, tuple)) and result:
            names = [self._target(item) or "_" for item in result]
            return "".join(f"{name}, " for name in names).rstrip()
        if not isinstance(result, Tensor) or id(result) in self.names:
            return ""
        name = self.names[id(result)] = f"t{len(self.names)}"
        return name


@cache
def _compiled(text: str) -> Loop:
    """Return the function of a text, by TorchScript. Raises NoTorchScript."""
    try:
        from torch.jit import CompilationUnit  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise NoTorchScript(str(error)) from None

    loop: Loop = CompilationUnit(text).loop
    return loop


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
