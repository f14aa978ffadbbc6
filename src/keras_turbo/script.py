"""Running a user's code as `__main__`, indistinguishable from what plain Python does.

The code gets a `__main__` module, an argument list and a first path entry of its own. What
it raises leaves through the interpreter, which handles exit codes and signals as always; only
the frames of this package are taken out of the traceback when it is shown.
"""

from __future__ import annotations

import builtins
import itertools
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

from keras_turbo.fallback import FallbackError

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

# The module that was `__main__` until now must outlive the script.
_outer_main = sys.modules["__main__"]


def run_script(path: str, args: list[str]) -> None:
    """Run a file, or the `__main__` of a directory or zip archive, like `python path`."""
    sys.argv[:] = [path, *args]
    full_path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    if pkgutil.get_importer(path) is not None:
        _set_first_path(full_path)
        _new_main()
        _run(lambda: runpy._run_module_as_main("__main__", alter_argv=False))  # type: ignore[attr-defined]
        return
    try:
        code = _read(full_path)
    except OSError as error:
        sys.stderr.write(
            f"{sys.orig_argv[0]}: can't open file {full_path!r}: "
            f"[Errno {error.errno}] {error.strerror}\n"
        )
        sys.exit(2)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main()
    main.__file__ = full_path
    main.__cached__ = None
    main.__loader__ = SourceFileLoader("__main__", full_path)
    _run_code(code, full_path, main)


def run_module(name: str, args: list[str]) -> None:
    """Run a module, like `python -m name`."""
    sys.argv[:] = ["-m", *args]
    _set_first_path(os.getcwd())
    _new_main()
    _run(lambda: runpy._run_module_as_main(name))  # type: ignore[attr-defined]


def run_command(source: str, args: list[str]) -> None:
    """Run a string of code, like `python -c source`."""
    sys.argv[:] = ["-c", *args]
    _set_first_path("")
    _run_code(source, "<string>", _new_main())


def run_stdin(args: list[str]) -> None:
    """Run what comes on standard input, like `python -`."""
    sys.argv[:] = ["-", *args]
    _set_first_path("")
    main = _new_main()
    main.__file__ = "<stdin>"
    main.__cached__ = None
    _run_code(sys.stdin.read(), "<stdin>", main)


def _read(path: str) -> bytes | types.CodeType:
    with open(path, "rb") as file:
        compiled = pkgutil.read_code(file)
        if compiled is not None:
            return compiled
        file.seek(0)
        return file.read()


def _set_first_path(entry: str) -> None:
    """Replace the path entry that Python made for this package's own start."""
    if not sys.flags.safe_path:
        sys.path[0] = entry


def _new_main() -> Any:
    main = types.ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def _run_code(source: Any, name: str, main: Any) -> None:
    def execute() -> None:
        code = source
        if not isinstance(source, types.CodeType):
            code = compile(source, name, "exec", dont_inherit=True)
        exec(code, vars(main))

    _run(execute)


def _run(execute: Callable[[], Any]) -> None:
    try:
        execute()
    except BaseException:
        _show_without_our_frames()
        raise


def _show_without_our_frames() -> None:
    """Let the interpreter show the exception as if the script had been run by itself."""
    show = sys.excepthook

    def excepthook(kind: Any, error: BaseException, _: types.TracebackType | None) -> None:
        sys.excepthook = show
        _clean(error, set())
        sys.last_traceback = error.__traceback__
        show(kind, error, error.__traceback__)

    sys.excepthook = excepthook


def _clean(error: BaseException, seen: set[int]) -> None:
    """Take our frames out of the traceback of an exception and of those it came from."""
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _cleaned(error.__traceback__)
    if isinstance(error, FallbackError):
        # What it came from is a bug of ours, and its frames say where.
        return
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if other is not None:
            _clean(other, seen)


def _cleaned(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is _run.__code__:
            # All frames so far led to the script.
            kept.clear()
        elif _is_ours(code.co_filename):
            # Keras was imported through the import hook: the way there is ours as well.
            while kept and _is_import_machinery(kept[-1].tb_frame.f_code.co_filename):
                kept.pop()
        else:
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in itertools.pairwise([*kept, None]):
        entry.tb_next = following  # type: ignore[union-attr]
    return kept[0] if kept else None


def _is_ours(filename: str) -> bool:
    return filename.startswith((_PACKAGE, "<keras_turbo "))


def _is_import_machinery(filename: str) -> bool:
    return filename.startswith("<frozen importlib")
