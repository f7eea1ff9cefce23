"""An event loop whose clock jumps to the next timer, so that an hour of a lab takes only its
computing time.

There is no sleeping, and there are no sockets. A callback belongs to the simulated process in whose
context it was scheduled: the callbacks of a killed process are dropped, those of a stopped one are
kept until it continues. The order of callbacks, futures and tasks is deterministic.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, Final, Protocol, TypeVar


class CallbackOwner(Protocol):
    """A simulated process, as the event loop sees it."""

    name: str
    tasks: set[asyncio.Task[Any]]
    killed: bool
    stopped: bool
    slept_s: float
    kept: list[OwnedHandle]


OWNER: ContextVar[CallbackOwner | None] = ContextVar("owner", default=None)


class OwnedHandle(asyncio.TimerHandle):
    """A callback, now or at a time, that runs only while its process runs.

    `by_owner`: its time is by the clock of its process, which stands still while the host sleeps.

    It is made and run as by asyncio, but without asking for the debug mode: every message needs
    some twenty of them.
    """

    __slots__ = ("by_owner", "owner")
    owner: CallbackOwner | None
    by_owner: bool

    def __init__(
        self,
        when: float | None,
        callback: Any,
        args: Any,
        loop: VirtualLoop,
        context: Context | None,
        *,
        by_owner: bool = False,
    ) -> None:
        self._when = when
        self._scheduled = when is not None
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None
        self.owner = self._context.get(OWNER)
        self.by_owner = by_owner

    def due(self) -> float:
        """Return the time of a timer, by the clock of the simulation."""
        assert self._when is not None
        if self.by_owner and self.owner is not None:
            return self._when + self.owner.slept_s
        return self._when

    def _run(self) -> None:
        owner = self.owner
        if owner is not None and (owner.killed or owner.stopped):
            if not owner.killed:
                owner.kept.append(self)
            return
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio does
            message = f"Exception in callback {self._callback!r}"
            self._loop.call_exception_handler(
                {"message": message, "exception": error, "handle": self}
            )


class NumberedFuture(asyncio.Future[Any]):
    """A future that is hashed by a number: hashes of addresses would make the order in sets differ
    between runs.
    """

    def __init__(self, *, loop: VirtualLoop) -> None:
        self._number = loop.number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task that is hashed by a number."""

    def __init__(self, coroutine: Any, *, loop: VirtualLoop, **options: Any) -> None:
        self._number = loop.number()
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


START_S: Final = 1000.0
TURNS_BEFORE_CREEP: Final = 200  # loop turns at one instant; an undisturbed lab needs a few dozen
CREEP_S: Final = 1e-7
TIMERS_KEPT: Final = 100  # cancelled ones, before they are removed
TURNS_MOST: Final = 100_000

_T = TypeVar("_T")


class SimulationError(Exception):
    """The simulation cannot continue."""


class Deadlock(SimulationError):
    """There is neither a callback nor a timer left."""


class Livelock(SimulationError):
    """Callbacks schedule one another without end at one instant."""


class TimeLimit(SimulationError):
    """The limit of virtual time was reached."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. `errors` has the contexts passed to its exception handler.

    Work for executors runs in the caller's thread. To simulate races with threads, it randomly
    starts or ends up to `executor_delay_s` late; or `work` is called with the function, and with
    what to call at its end.

    `crept_s`: the time added after many turns at one instant, because comparisons of times may
    differ in their last bit for ever.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, seed: int = 0, *, executor_delay_s: float = 0.0) -> None:
        self._now = START_S
        self._turns = 0
        self._numbers = count()
        self.time_limit = math.inf
        self.crept_s = 0.0
        self.executor_delay_s = executor_delay_s
        self.work: Callable[[Callable[[], None], Callable[[], None]], None] | None = None
        self.errors: list[dict[str, Any]] = []
        self._timers: list[tuple[float, int, OwnedHandle]] = []
        super().__init__()
        self._random = random.Random(f"{seed} executor")
        self.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.set_task_factory(_new_task)

    @property
    def now(self) -> float:
        """Virtual seconds, of which a sleeping host sees none."""
        return self._now

    def time(self) -> float:
        """Return virtual seconds by the clock of the present process, which stands still while its
        host sleeps.
        """
        owner = OWNER.get()
        if owner is None:
            return self._now
        return self._now - owner.slept_s

    def number(self) -> int:
        """Return the next number of a counter. It orders objects that would else be ordered by
        their addresses.
        """
        return next(self._numbers)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call back in the next turn."""
        handle = OwnedHandle(None, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back at a time; timers of one instant fire in the order in which they were set."""
        return self._add(OwnedHandle(when, callback, args, self, context, by_owner=True))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back after some seconds by the clock of the callback's process."""
        timer = OwnedHandle(self._now + delay, callback, args, self, context, by_owner=True)
        if timer.owner is not None:
            timer._when -= timer.owner.slept_s  # type: ignore[operator]
        return self._add(timer)

    def call_on(
        self, when: float, callback: Any, *args: Any, context: Context
    ) -> asyncio.TimerHandle:
        """Call back at a time by `now`: the network and the machines do not sleep with a
        process.
        """
        return self._add(OwnedHandle(when, callback, args, self, context))

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future whose hash does not depend on its address."""
        return NumberedFuture(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Run a function in the caller's thread; the future may complete later."""
        future: asyncio.Future[_T] = self.create_future()
        outcome: list[tuple[_T | None, Exception | None]] = []

        def begin() -> None:
            try:
                outcome.append((func(*args), None))
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                outcome.append((None, error))

        def end() -> None:
            result, error = outcome[0]
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def begin_late() -> None:
            begin()
            end()

        if self.work is not None:
            self.work(begin, end)
        elif not self.executor_delay_s:
            begin_late()
        elif self._random.random() < 0.5:
            self.call_later(self._random.random() * self.executor_delay_s, begin_late)
        else:
            begin()
            self.call_later(self._random.random() * self.executor_delay_s, end)
        return future

    def resume(self, process: CallbackOwner, *, slept_s: float) -> None:
        """Run the handles kept while a process was stopped in the next turn; `slept_s`: its timers
        are late by it.
        """
        kept = process.kept
        process.kept = []
        process.slept_s += slept_s
        for handle in kept:
            if slept_s and handle.by_owner:
                handle._scheduled = True
                self._add(handle)
            else:
                self._ready.append(handle)
        if slept_s:
            self._timers[:] = [(timer.due(), number, timer) for _, number, timer in self._timers]
            heapq.heapify(self._timers)

    def _add(self, timer: OwnedHandle) -> asyncio.TimerHandle:
        heapq.heappush(self._timers, (timer.due(), next(self._numbers), timer))
        return timer

    def discard(self) -> None:
        """Drop all callbacks and close the loop."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._ready.clear()
        self._timers.clear()
        self.close()

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        """Run turns until the loop is stopped: each advances the clock unless callbacks wait, and
        runs what is due.

        Here a timer fires at its time, not a bit before, and timers of one instant in the order in
        which they were set.
        """
        timers = self._timers
        ready = self._ready
        pop = heapq.heappop
        while True:
            if self._timer_cancelled_count > max(TIMERS_KEPT, len(timers) // 2):
                timers[:] = [timer for timer in timers if not timer[2]._cancelled]
                heapq.heapify(timers)
                self._timer_cancelled_count = 0
            while timers and timers[0][2]._cancelled:
                pop(timers)
                self._timer_cancelled_count -= 1
            if ready or self._stopping or (timers and timers[0][0] <= self._now):
                self._count_turn()
            else:
                at = timers[0][0] if timers else math.inf
                self._jump(at)
            now = self._now
            while timers and timers[0][0] <= now:
                timer = pop(timers)[2]
                timer._scheduled = False
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _jump(self, when: float) -> None:
        """Advance the clock to the next timer."""
        if when == math.inf:
            raise Deadlock(f"nothing is scheduled after t = {self._now - START_S:.3f} s")
        self._now = when
        self._turns = 0
        if when > self.time_limit:
            raise TimeLimit(f"t = {self._now - START_S:.1f} s")

    def _count_turn(self) -> None:
        """Note one more turn at this instant."""
        self._turns += 1
        if self._turns > TURNS_BEFORE_CREEP:
            self._now += CREEP_S
            self.crept_s += CREEP_S
        if self._turns > TURNS_MOST:
            raise Livelock(f"{TURNS_MOST} turns at t = {self._now - START_S:.6f} s")


def _new_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    task = NumberedTask(coroutine, loop=loop, **options)
    owner = OWNER.get()
    if owner is not None:
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task
