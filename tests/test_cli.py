"""The command line `keras-turbo`, the doctor, and where a backend was chosen."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import keras
import pytest
from click.testing import CliRunner

import keras_turbo
from keras_turbo import backend_choice, doctor, patch, report
from keras_turbo.cli import cli
from tests.processes import OTHER_BACKEND, TURBO, python, write

COMMAND = str(Path(sys.executable).with_name("keras-turbo"))


def invoke(*args: str):
    return CliRunner().invoke(cli, args)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home in which nobody has chosen a backend."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delenv("KERAS_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def config(folder: Path, **values):
    path = folder / "keras.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


KERAS_OWN = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


def test_nobody_chose_a_backend(home, monkeypatch):
    assert backend_choice.find() is None
    config(home / ".keras", **KERAS_OWN)
    assert backend_choice.find() is None
    config(home / ".keras", floatx="float32")
    assert backend_choice.find() is None
    (home / ".keras" / "keras.json").write_text("{")
    assert backend_choice.find() is None
    monkeypatch.setenv("KERAS_BACKEND", "")
    assert backend_choice.find() is None


def test_a_file_chose_a_backend(home, monkeypatch):
    path = config(home / ".keras", **{**KERAS_OWN, "backend": "jax"})
    assert backend_choice.find() == backend_choice.Choice("jax", str(path))
    config(home / ".keras", **{**KERAS_OWN, "epsilon": 1e-6})
    assert backend_choice.find() == backend_choice.Choice("tensorflow", str(path))
    monkeypatch.setenv("KERAS_HOME", str(home / "elsewhere"))
    assert backend_choice.find() is None
    path = config(home / "elsewhere", backend="openvino")
    assert backend_choice.find() == backend_choice.Choice("openvino", str(path))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert backend_choice.find() == backend_choice.Choice("torch", "KERAS_BACKEND")


def test_torch_is_preferred_only_where_nobody_chose(home, monkeypatch):
    monkeypatch.setattr(backend_choice.os, "environ", environ := dict(backend_choice.os.environ))
    config(home / ".keras", backend="jax")
    backend_choice.prefer_torch()
    assert "KERAS_BACKEND" not in environ
    (home / ".keras" / "keras.json").unlink()
    backend_choice.prefer_torch()
    assert environ["KERAS_BACKEND"] == "torch"


def test_help_lists_all_commands():
    done = invoke("--help")
    assert done.exit_code == 0
    for command in ("run", "bench", "explain", "doctor"):
        assert f"\n  {command} " in done.output
    assert invoke("--version").output == f"keras-turbo {keras_turbo.__version__}\n"
    assert invoke("bench", "--help").exit_code == 0
    assert invoke("nonsense").exit_code == 2


@pytest.mark.parametrize("training", [False, True])
def test_explain_a_file(tmp_path, training):
    path = str(tmp_path / "model.keras")
    inputs = keras.Input((4,))
    keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs), name="m").save(path)
    done = invoke("explain", path, *(["--training"] if training else []))
    assert done.exit_code == 0
    assert "head  Dense       lowered" in done.output
    assert done.output.endswith(f"2 lowered, 0 stock (training={training})\n")


def test_explain_what_is_no_model(tmp_path):
    assert invoke("explain", str(tmp_path / "none.keras")).exit_code == 2
    path = tmp_path / "text.keras"
    path.write_text("no model")
    done = invoke("explain", str(path))
    assert done.exit_code == 1
    assert "cannot be loaded" in done.output


def test_doctor_finds_nothing_wrong():
    keras_turbo.disable()
    done = invoke("doctor")
    assert done.exit_code == 0, done.output
    facts = dict(doctor.examine().facts)
    assert facts["keras"] == keras.__version__
    assert facts["backend"] == "torch, chosen by KERAS_BACKEND"
    assert {"python", "torch", "numpy", "devices", "threads"} <= set(facts)
    assert "Layer.__call__" in doctor.examine().patches
    assert not keras_turbo.is_enabled()
    assert done.output.endswith("conflicts:\n  none\n")


def test_doctor_shows_the_patches_in_force():
    findings = doctor.examine()
    assert len(findings.patches) == len(patch.ledger())
    assert keras_turbo.is_enabled()


def test_doctor_names_another_package(monkeypatch):
    keras_turbo.disable()
    monkeypatch.setattr(keras.layers.Layer, "__call__", lambda self, *args, **kwargs: None)
    (conflict,) = doctor.examine().conflicts
    assert conflict.startswith("Layer.__call__ has been replaced by another package")
    assert __file__ in conflict


@pytest.mark.parametrize(
    ("value", "said"), [("off", "switched off by KERAS_TURBO"), ("perhaps", "must be one of")]
)
def test_doctor_reads_the_environment(monkeypatch, value, said):
    monkeypatch.setenv("KERAS_TURBO", value)
    done = invoke("doctor")
    assert done.exit_code == 1
    assert said in done.output
    assert "patched:\n  nothing" in done.output


def test_doctor_on_another_backend(tmp_path):
    write(tmp_path, {"keras/__init__.py": OTHER_BACKEND + "\nclass layers:\n    Layer = int\n"})
    write(
        tmp_path,
        {
            "keras/__init__.py": """
                __file__ = __file__
                class config:
                    backend = staticmethod(lambda: "jax")
                class layers:
                    class Layer:
                        def __call__(self): pass
            """
        },
    )
    done = python(
        "-m", "keras_turbo.cli", "doctor", home=tmp_path, PYTHONPATH=str(tmp_path),
        KERAS_BACKEND="jax",
    )  # fmt: skip
    assert done.returncode == 1
    assert "jax, chosen by KERAS_BACKEND" in done.stdout
    assert "not active: the Keras backend is 'jax', not 'torch'" in done.stdout


def test_doctor_without_keras(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    (conflict,) = doctor.examine().conflicts
    assert conflict.startswith("not active: keras cannot be imported")


def test_run_is_the_launcher(tmp_path):
    write(tmp_path, {"script.py": "import sys\nprint(sys.argv, sys.path[0])\n1 / 0\n"})
    write(tmp_path, {"stop.py": "raise KeyboardInterrupt"})
    for args in (["script.py", "--help", "-m"], ["-c", "import sys; sys.exit(4)"], ["stop.py"]):
        launched = python(*TURBO, *args, home=tmp_path)
        run = python(COMMAND, "run", *args, home=tmp_path)
        assert (run.stdout, run.stderr) == (launched.stdout, launched.stderr)
        assert run.returncode == launched.returncode
    assert python(COMMAND, "run", home=tmp_path).stderr.startswith("usage: keras-turbo run ")
    assert invoke("run", "--help").output.startswith("usage: keras-turbo run ")


def test_report_without_keras(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras_turbo.dispatch")
    assert report.text() == "keras_turbo report: Keras ran without keras_turbo"


@pytest.mark.allow_fallback("NO_RULE")
def test_report(monkeypatch):
    from keras_turbo import dispatch

    class Own(keras.layers.Layer):
        def call(self, x):
            return x + 1

    monkeypatch.setattr(dispatch, "journal", None)
    report.start()
    assert "no call ran stock Keras" in report.text()
    x = keras.ops.ones((2, 4))
    own = Own(name="own")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")])
    for _ in range(3):
        own(x)
        model(x)
    text = report.text()
    assert text.startswith("keras_turbo report: 2 layers lowered, 0 stock inside\n")
    assert "own   NO_RULE  2" in text


def test_extension_functions_are_found():
    from keras_turbo import _ipython

    assert isinstance(keras_turbo.load_ipython_extension, types.FunctionType)
    _ipython.unload(None)
    assert not keras_turbo.is_enabled()
    keras_turbo.load_ipython_extension(None)
    assert keras_turbo.is_enabled()
    keras_turbo.unload_ipython_extension(None)
    assert not keras_turbo.is_enabled()
