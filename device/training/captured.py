"""Gradients without autograd: the operations of one forward and backward pass, captured and replayed.

With small models on a CPU, autograd and Python take as long as the kernels. For each shape of a batch, the operations
that torch dispatches below autograd are recorded once and written as a TorchScript function of the batch and the
weights, which needs no compiler and runs without Python. From then on it is called instead. The same kernels run in the
same order, so the gradients are those of autograd bit for bit. The first replay of each shape is compared with
autograd; where they differ, and where a pass cannot be replayed, autograd goes on.

Correct only if the operations do not depend on the values of a batch, which is known of fedstrata's models and losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor
from torch.jit import CompilationUnit, optimized_execution  # type: ignore[attr-defined, unused-ignore]
from torch.utils._python_dispatch import TorchDispatchMode

Loss = Callable[..., Tensor]
Replay = Callable[..., Sequence[Tensor]]

_DETACH: Final = torch.ops.aten.detach.default
_NEW: Final = torch.ops.aten.new_empty_strided.default
_COPY: Final = torch.ops.aten.copy_.default
_POOL_BACKWARD: Final = torch.ops.aten.max_pool2d_with_indices_backward.default


class NotReplayable(Exception):
    """The operations of a pass are not a function of the batch alone."""


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
    """Records operations while it is entered. It keeps their tensors, so that each has an id of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler when the mode is first entered, 150 MB and seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        self.operations.append(Operation(func, args, kwargs or {}, result))
        return result


class CapturedGradients:
    """The gradients of a loss: of one model, or of A models at once, whose weights are [A, ...] and losses [A].

    `loss(weights, *batch)`, of leaves and of a batch's tensors, returns the loss [] or the losses [A], and updates
    nothing. A shape is recorded at its use number `recorded_use`, from 1; autograd takes the earlier ones.
    """

    def __init__(self, loss: Loss, *, recorded_use: int = 1) -> None:
        self._loss = loss
        self._recorded_use = recorded_use
        self._uses: Counter[object] = Counter()
        self._replays: dict[object, Replay | None] = {}
        self._compared: set[object] = set()

    def backward(self, weights: Sequence[Tensor], *batch: Tensor) -> Tensor:
        """Write each weight's gradient to `.grad`, None before; return the loss [] or the losses [A], detached."""
        shape = tuple((tensor.shape, tensor.stride()) for tensor in batch)
        if shape not in self._replays:
            self._uses[shape] += 1
            seldom = self._uses[shape] < self._recorded_use
            return self._by_autograd(weights, batch) if seldom else self._record(shape, weights, batch)
        replay = self._replays[shape]
        if replay is None:
            return self._by_autograd(weights, batch)
        if shape not in self._compared:
            return self._compare(shape, replay, weights, batch)
        loss, *gradients = replay(*batch, *weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return loss

    def replays(self) -> bool:
        """Return whether the shapes that were recorded so far are all replayed."""
        return bool(self._replays) and all(self._replays.values())

    def _by_autograd(self, weights: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        losses = self._loss(weights, *batch)
        torch.autograd.backward(losses.sum() if losses.dim() else losses)  # each depends on its own model's weights
        return losses.detach()

    def _record(self, shape: object, weights: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        with Recorder() as recorder:
            loss = self._by_autograd(weights, batch)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        self._replays[shape] = None
        if len(gradients) == len(weights):
            with suppress(NotReplayable):
                self._replays[shape] = function_of(recorder.operations, (*batch, *weights), (loss, *gradients))
        return loss

    def _compare(self, shape: object, replay: Replay, weights: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        replayed: Sequence[Tensor] = ()
        with suppress(RuntimeError):  # of an operation that makes less without gradients: LSTM's
            replayed = replay(*batch, *weights)
        loss = self._by_autograd(weights, batch)
        expected = [loss, *(weight.grad for weight in weights)]
        if len(replayed) == len(expected) and all(map(_same, replayed, expected)):
            self._compared.add(shape)
        else:
            self._replays[shape] = None
        return loss


def function_of(operations: Sequence[Operation], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Replay:
    """Return a function of `inputs` that runs the operations and returns `results`. Raises NotReplayable.

    All other tensors that the operations read and did not make are constants: they are read anew in each call. Results
    have the strides that they had.
    """
    for operation in operations:
        tags = operation.call.tags
        if torch.Tag.nondeterministic_seeded in tags or torch.Tag.data_dependent_output in tags:
            raise NotReplayable
    writer = _Writer({id(tensor): f"i{place}" for place, tensor in enumerate(inputs)})
    last_read = {id(tensor): place for place, operation in enumerate(operations) for tensor in operation.read}
    following = iter(enumerate(operations))
    for place, operation in following:
        if operation.call is _DETACH:
            writer.names[id(operation.result)] = writer.text(operation.args[0])
        elif _is_copy(operations[place : place + 2]) and last_read[id(operations[place + 1].args[1])] == place + 1:
            # A gradient that autograd would have taken over as it is, had the recorder not kept it, too.
            writer.names[id(operation.result)] = writer.text(operations[place + 1].args[1])
            next(following)
        else:
            writer.write(operation)
    return writer.function(len(inputs), results)


def _is_copy(pair: Sequence[Operation]) -> bool:
    """Return whether two operations make a copy of a tensor with its own strides."""
    if [operation.call for operation in pair] != [_NEW, _COPY]:
        return False
    made, source = pair[1].args[:2]
    return made is pair[0].result and isinstance(source, Tensor) and source.stride() == made.stride()


@dataclass(slots=True)
class _Writer:
    """The lines of a function, the names of its tensors by id, its constants, and its numbers.

    Most numbers are sizes. As an argument they leave one text for batches of any shape, which is compiled once.
    """

    names: dict[int, str]
    constants: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def write(self, operation: Operation) -> None:
        """Write the call of an operation."""
        arguments = [self.text(value) for value in operation.args]
        if operation.call is _POOL_BACKWARD and _is_channels_last(operation.args[1]):
            # With a gradient in another order torch would reorder all that the kernel reads and writes.
            arguments[0] = f"torch.ops.aten.contiguous({arguments[0]}, memory_format=torch.channels_last)"
        arguments += [f"{key}={self.text(value)}" for key, value in operation.kwargs.items()]
        call = f"torch.ops.{operation.call.overloadpacket!s}({', '.join(arguments)})"
        self.lines.append(f"{self._target(operation.result)} = {call}")

    def text(self, value: Any) -> str:
        """Return the text of an argument. Raises NotReplayable for one that has none."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = f"c{len(self.constants)}"
                self.constants.append(value.detach())  # has the same memory
            return self.names[id(value)]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if type(value) is int:
            self.numbers.append(value)
            return f"n[{len(self.numbers) - 1}]"
        if value is None or isinstance(value, (bool, str)) or (isinstance(value, float) and isfinite(value)):
            return repr(value)
        raise NotReplayable

    def function(self, inputs: int, results: Sequence[Tensor]) -> Replay:
        """Return the function."""
        returned = ", ".join(self.text(tensor) for tensor in results)
        parameters = [*(f"i{place}" for place in range(inputs)), *(f"c{place}" for place in range(len(self.constants)))]
        lines = [f"def replay({', '.join(parameters)}, n: List[int]):", *self.lines, f"return {returned}\n"]
        try:
            made = _compiled("\n    ".join(lines))
        except RuntimeError:  # of an operation or an argument that TorchScript does not have
            raise NotReplayable from None
        constants = *self.constants, self.numbers

        def replay(*batch: Tensor) -> Sequence[Tensor]:
            # Optimised it would merge matrix products; the weights are leaves.
            with torch.no_grad(), optimized_execution(False):
                found: Sequence[Tensor] = made(*batch, *constants)
            return found

        return replay

    def _target(self, result: Any) -> str:
        """Return the left side of an assignment; an operation in place returns a tensor that has its name."""
        if isinstance(result, (list, tuple)) and result:
            return "".join(f"{self._target(item)}, " for item in result)
        if not isinstance(result, Tensor) or id(result) in self.names:
            return "_"
        name = self.names[id(result)] = f"t{len(self.names)}"
        return name


@cache
def _compiled(text: str) -> Replay:
    function: Replay = CompilationUnit(text).replay
    return function


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.stride() == other.stride() and torch.equal(one, other)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
