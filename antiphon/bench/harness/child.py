"""A child's end of `children`: makes one object, then answers calls of its methods until the parent hangs up. A call
may also name a function, which is given the object.

    python -m antiphon.bench.harness.child SOCKET NUMBER      # `mpi` in place of the number: the rank of mpiexec

The child calls the parent at a Unix socket, which works in a node of a box, under `mpiexec` and in another
interpreter alike. That interpreter may lack antiphon, so this file imports nothing but the standard library. One call,
one answer; what goes wrong is an answer too. Between calls the child is blocked in a read: it neither spins nor is it
stopped by a signal, which would look like death to its fellows.

A method that yields goes on until the next call: its first value is the answer, then it is advanced again and again.
"""

import ctypes
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
UNDER_MPIEXEC = "mpi"
_FOR_PEOPLE = {"UserError", "PeerLost", "PeerTimeout"}  # errors whose message says everything


def end_with_parent() -> None:
    """Be killed when the thread that started this process ends (Linux): a stopped child would keep its memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_us(command: Sequence[str]) -> list[str]:
    """The same command, which gets SIGTERM when the thread that starts it ends, however that is (Linux). It is for
    servers, which then end their workers."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-P", "-c", _END_WITH_PARENT, str(os.getpid()), *command]


def answer_calls(socket: str, number: int) -> None:
    """A whole child's life. The parent sends what makes the object first: a callable, or the file that defines `load`,
    and its arguments."""
    end_with_parent()
    try:
        connection = Client(socket, family="AF_UNIX")
        assert isinstance(connection, Connection)
        connection.send((number, os.getpid()))
    except OSError:
        return  # the parent was interrupted, and waits for no one
    target: Any = None
    try:
        make, arguments = connection.recv()
        target = _answer(connection, lambda: _callable(make)(*arguments), keep=True)
        while True:
            method, arguments = connection.recv()
            answer = _answer(connection, lambda: _method(target, method)(*arguments))  # noqa: B023
            if isinstance(answer, Iterator):
                _go_on(connection, answer)
    except (EOFError, OSError):
        pass  # the parent has hung up
    finally:
        if hasattr(target, "close"):
            target.close()


def _method(target: Any, method: str | Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(target, method) if isinstance(method, str) else partial(method, target)
    return found


def _callable(make: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = runpy.run_path(make)["load"] if isinstance(make, str) else make
    return found


def _answer(connection: Connection, call: Callable[[], Any], *, keep: bool = False) -> Any:
    """Send (None, result) or (what went wrong, None); the traceback goes to the log. `keep`: the result stays here. An
    iterator's first value is sent."""
    try:
        result = call()
        sent = None if keep else next(result) if isinstance(result, Iterator) else result
    except Exception as error:
        traceback.print_exc()
        for_people = _FOR_PEOPLE & {base.__name__ for base in type(error).__mro__}
        connection.send((str(error) if for_people else f"{type(error).__name__}: {error}", None))
        return None
    connection.send((None, sent))
    return result


def _go_on(connection: Connection, work: Iterator[Any]) -> None:
    while not connection.poll() and next(work, connection) is not connection:
        pass
    if hasattr(work, "close"):
        work.close()


def main() -> int:
    socket, number = sys.argv[1:]
    if number == UNDER_MPIEXEC:
        from mpi4py import MPI

        number = str(MPI.COMM_WORLD.rank)
    answer_calls(socket, int(number))
    return 0


if __name__ == "__main__":  # helper processes that an engine spawns import this file again
    sys.exit(main())
