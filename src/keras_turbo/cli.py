"""The command line `keras-turbo`: run, bench, explain and doctor.

Each command imports what it needs when it is called, so that `--help` is quick and the
backend can be chosen before Keras is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import click

from keras_turbo import __version__, launch


class _Commands(click.Group):
    """The commands of this file, and `bench` from its own package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), "bench"})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "bench":
            return super().get_command(ctx, cmd_name)
        from keras_turbo.bench.cli import bench

        return bench


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="keras-turbo", message="%(prog)s %(version)s")
def cli() -> None:
    """Unchanged Keras 3 code on the PyTorch backend, run as lowered programs."""


@cli.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a script, -m module or -c code on lowered programs."""
    launch.main(list(arguments), "keras-turbo run")


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--training", is_flag=True, help="Explain a call with training=True.")
def explain(file: str, training: bool) -> None:
    """Say which layers of the saved model FILE are lowered, and why not where not."""
    keras = _keras()
    from keras_turbo.explain import explain as explain_model

    try:
        model = keras.saving.load_model(file, compile=False)
    except (ValueError, TypeError, OSError) as error:
        raise click.ClickException(f"{file} cannot be loaded: {error}") from error
    click.echo(str(explain_model(model, training)))


@cli.command()
def doctor() -> None:
    """Show versions, backend, devices and patches; fail where something stands in the way."""
    from keras_turbo import doctor as checks

    findings = checks.examine()
    click.echo(str(findings))
    if findings.conflicts:
        sys.exit(1)


def _keras() -> Any:
    """Keras on the torch backend."""
    from keras_turbo import api, backend_choice

    if importlib.util.find_spec("keras") is None:
        raise click.ClickException("Keras is not installed.")
    backend_choice.prefer_torch()
    import keras

    problem = api.obstacle()
    if problem is not None:
        raise click.ClickException(f"not active: {problem}.")
    return keras


def main() -> None:
    """The entry point.

    A script is run outside the command-line library, which would otherwise take its
    interrupts and broken pipes for its own.
    """
    if sys.argv[1:2] == ["run"]:
        launch.main(sys.argv[2:], "keras-turbo run")
    else:
        cli()


if __name__ == "__main__":
    main()
