"""What the environment decides: mode and check of `enable()`, the launcher and the notebook.

Also how little happens before Keras is there, and on other backends than torch.
"""

from __future__ import annotations

import keras
import pytest

import keras_turbo
from keras_turbo import _ipython, dispatch
from tests.processes import TURBO, python, write


@pytest.mark.parametrize("mode", [None, "off", "on", "strict"])
@pytest.mark.parametrize("check", [None, "off", "first", "always"])
@pytest.mark.parametrize("switch", [keras_turbo.enable, lambda: _ipython.load(None)])
def test_the_environment_decides_what_no_argument_does(mode, check, switch, monkeypatch):
    keras_turbo.disable()
    for name, value in (("KERAS_TURBO", mode), ("KERAS_TURBO_CHECK", check)):
        if value is not None:
            monkeypatch.setenv(name, value)
    switch()
    assert keras_turbo.is_enabled() == (mode != "off")
    if mode != "off":
        assert dispatch.options.mode == (mode or "on")
        assert dispatch.options.check == (check or "first")


def test_the_environment_switches_off_what_is_on(monkeypatch):
    assert keras_turbo.is_enabled()
    monkeypatch.setenv("KERAS_TURBO", "off")
    keras_turbo.enable()
    assert not keras_turbo.is_enabled()


def test_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("KERAS_TURBO", "off")
    monkeypatch.setenv("KERAS_TURBO_CHECK", "always")
    keras_turbo.enable("strict")
    assert keras_turbo.is_enabled()
    assert (dispatch.options.mode, dispatch.options.check) == ("strict", "always")
    monkeypatch.setenv("KERAS_TURBO", "strict")
    keras_turbo.enable(check="off")
    assert (dispatch.options.mode, dispatch.options.check) == ("strict", "off")
    keras_turbo.enable("off")
    assert not keras_turbo.is_enabled()


def test_a_wrong_value_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("KERAS_TURBO_CHECK", "sometimes")
    with pytest.raises(ValueError, match=r"KERAS_TURBO_CHECK must be one of.*'sometimes'"):
        keras_turbo.enable()


SCRIPT = """
    import keras_turbo
    keras_turbo.enable()
    import keras
    from keras_turbo import dispatch
    print(keras_turbo.is_enabled(), dispatch.options)
"""


def test_launcher_and_script_agree(tmp_path):
    write(tmp_path, {"script.py": SCRIPT})
    done = python(*TURBO, "--strict", "script.py", home=tmp_path, KERAS_TURBO_CHECK="off")
    assert done.stdout == "True Options(mode='strict', check='off')\n", done.stderr


def test_enable_before_keras_remembers_the_environment(tmp_path):
    write(tmp_path, {"script.py": SCRIPT})
    done = python("script.py", home=tmp_path, KERAS_BACKEND="torch", KERAS_TURBO="strict")
    assert done.stdout == "True Options(mode='strict', check='first')\n", done.stderr


STOCK = """
    import sys
    import keras_turbo
    with keras_turbo.stock():
        print("keras" in sys.modules, "torch" in sys.modules)
        with keras_turbo.stock():
            pass
    print("keras" in sys.modules, "torch" in sys.modules)
    if sys.argv[1:]:
        keras_turbo.enable()
        with keras_turbo.stock():
            import keras, numpy as np
            layer = keras.layers.Dense(2)
            for _ in range(2):
                layer(np.ones((1, 2), "float32"))
            print(layer._keras_turbo)
        layer(np.ones((1, 2), "float32"))
        print(layer._keras_turbo is not None)
"""


@pytest.mark.parametrize("args", [(), ("enable",)])
def test_stock_imports_neither_keras_nor_torch(args, tmp_path):
    write(tmp_path, {"script.py": STOCK})
    done = python("script.py", *args, home=tmp_path, KERAS_BACKEND="torch")
    wanted = "False False\n" * 2 + "None\nTrue\n" * len(args)
    assert done.stdout == wanted, done.stderr


def test_stock_is_of_this_thread_and_ends():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    with keras_turbo.stock():
        layer(keras.ops.ones((1, 3)))
        with keras_turbo.stock():
            pass
        layer(keras.ops.ones((1, 3)))
        assert layer._keras_turbo is None
    layer(keras.ops.ones((1, 3)))
    assert layer._keras_turbo is not None


@pytest.mark.parametrize("backend", ["numpy", "jax", "tensorflow"])
def test_another_backend_gets_one_line_and_stock_keras(backend, tmp_path):
    # Keras's numpy backend takes some of its functions from jax.
    pytest.importorskip("jax" if backend == "numpy" else backend)
    code = """
        import keras, keras_turbo
        before = keras.layers.Layer.__call__
        keras_turbo.enable()
        print(keras.layers.Layer.__call__ is before, keras_turbo.is_enabled())
        with keras_turbo.stock():
            print(keras.layers.Dense(2)(keras.ops.ones((1, 3))).shape)
    """
    write(tmp_path, {"script.py": code})
    done = python(*TURBO, "script.py", home=tmp_path, KERAS_BACKEND=backend)
    assert done.stdout == "True False\n(1, 2)\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "keras_turbo" in line]
    assert said == [f"keras_turbo: not active: the Keras backend is '{backend}', not 'torch'."]


ERRORS = """
    import sys
    import keras, numpy as np
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head")])
    model.compile("sgd", "mse")
    x, y = np.ones((6, 4)), np.ones((6, 3))
    model.fit(x, y, verbose=0)
    def loss(y_true, y_pred):
        raise ZeroDivisionError("in a loss")
    kind = sys.argv[1]
    if kind == "fit":
        model.fit(x[:, :3], y, verbose=0)
    elif kind == "targets":
        model.fit(x, {"a": y, "b": y}, verbose=0)
    elif kind == "predict":
        model.predict(x[:, :2], verbose=0)
    elif kind == "batch":
        model.train_on_batch(x, y[:, :2])
    else:
        model.compile("sgd", loss)
        model.fit(x, y, verbose=0)
"""


@pytest.mark.parametrize("kind", ["fit", "targets", "predict", "batch", "loss"])
def test_errors_of_training_look_as_with_stock_keras(kind, tmp_path):
    write(tmp_path, {"script.py": ERRORS})
    plain = python("script.py", kind, home=tmp_path, KERAS_BACKEND="torch")
    turbo = python(*TURBO, "script.py", kind, home=tmp_path, KERAS_BACKEND="torch")
    assert plain.returncode == turbo.returncode == 1
    assert turbo.stderr == plain.stderr
