"""The launcher behind `python -m keras_turbo` and `keras-turbo run`.

It reads the options in front of the script, chooses torch where nobody has chosen a backend,
leaves the import hook behind, and hands over to the script for good.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from keras_turbo import __version__, api, backend_choice, config, import_hook, report, script

USAGE = """\
usage: {program} [--strict] [--report] script.py [argument ...]
       {program} [--strict] [--report] -m module [argument ...]
       {program} [--strict] [--report] -c code [argument ...]

Run unchanged Keras code on lowered programs.

options:
  --strict    raise FallbackError where a layer would run stock Keras
  --report    at exit, print on stderr what was lowered and what was not
  --version   print the version and stop
  -h, --help  print this text and stop

environment:
  KERAS_TURBO        off, on or strict
  KERAS_TURBO_CHECK  off, first or always: when to compare with stock Keras
"""


class UsageError(Exception):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Command:
    """What to run, and how.

    Attributes:
        kind: `"script"`, `"-m"`, `"-c"` or `"-"`.
        target: the file, module or code.
        args: the arguments behind it.
        strict: whether a fallback raises.
        report: whether to print the report at exit.
    """

    kind: str
    target: str
    args: list[str]
    strict: bool = False
    report: bool = False


def parse(arguments: list[str]) -> Command:
    """Split a command line into options of ours and what belongs to the script.

    Raises:
        UsageError: for an unknown option, or where there is nothing to run.

    Example:

    >>> from keras_turbo.launch import parse
    >>> parse(["--strict", "train.py", "--strict"]).args
    ['--strict']
    """
    rest = list(arguments)
    flags = {"--strict": False, "--report": False}
    while rest and rest[0] in flags:
        flags[rest.pop(0)] = True
    if not rest:
        raise UsageError("there is nothing to run")
    first = rest.pop(0)
    kind, target = "script", first
    if first == "-":
        kind = "-"
    elif first[:2] in ("-m", "-c"):
        kind, target = first[:2], first[2:]
        if not target:
            if not rest:
                raise UsageError(f"argument expected for the {kind} option")
            target = rest.pop(0)
    elif first.startswith("-"):
        raise UsageError(f"unknown option {first}")
    return Command(kind, target, rest, flags["--strict"], flags["--report"])


def main(arguments: list[str], program: str) -> None:
    """Run a command line; returns, raises or exits as the script does.

    Args:
        arguments: the command line behind the program's name.
        program: how the user called it, for the usage text.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE.format(program=program), end="")
        return
    if arguments[:1] == ["--version"]:
        print(f"keras-turbo {__version__}")
        return
    try:
        command = parse(arguments)
        options = config.resolve("strict" if command.strict else None)
    except (UsageError, ValueError) as error:
        print(f"{USAGE.format(program=program)}\n{error}", file=sys.stderr)
        sys.exit(2)
    backend_choice.prefer_torch()
    if command.strict:
        # For an `enable()` of the script's own, and for child processes.
        os.environ["KERAS_TURBO"] = options.mode
    if command.report:
        report.at_exit()
    import_hook.install(lambda: _enable(options, command))
    _run(command)


def _enable(options: config.Options, command: Command) -> None:
    api.enable(options.mode, options.check)
    if command.report and api.is_enabled():
        report.start()


def _run(command: Command) -> None:
    if command.kind == "-m":
        script.run_module(command.target, command.args)
    elif command.kind == "-c":
        script.run_command(command.target, command.args)
    elif command.kind == "-":
        script.run_stdin(command.args)
    else:
        script.run_script(command.target, command.args)
