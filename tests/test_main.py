"""`python -m keras_turbo` runs code as plain Python does, to the last byte of a traceback.

Each case is run twice, by plain Python and by the launcher, in the same folder; standard
output, standard error and the exit code must be the same.
"""

from __future__ import annotations

import signal
import zipfile

import pytest

from tests.processes import OTHER_BACKEND, TURBO, python, write

SHOW = """
    import sys
    print(__name__, repr(__doc__), globals().get("__file__"), sys.argv, sys.path)
    print(sorted(name for name in globals() if name != "__cached__"), __spec__ is None)
    print(__package__, type(__loader__), __builtins__)
    print(vars(sys.modules["__main__"]) is globals())
"""

FAIL = """
    def inner(x):
        return 1 / x

    def outer():
        try:
            inner(0)
        except ZeroDivisionError as error:
            raise KeyError("second") from error

    try:
        outer()
    except KeyError:
        raise RuntimeError("third")
"""

SCRIPTS = {
    "identity": SHOW,
    "exit_code": "import sys; print('before'); sys.exit(3)",
    "exit_text": "import sys; sys.exit('no luck')",
    "exit_none": "raise SystemExit",
    "chain": FAIL,
    "group": "raise ExceptionGroup('many', [ValueError(1), KeyError(2)])",
    "syntax": "print('never')\nx = = 1\n",
    "indent": "if True:\nprint(1)\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint('ok')\n",
    "empty_traceback": "raise ValueError('a\\nb')",
    "bad_import": "import broken",
    "no_import": "import there_is_no_such_module",
    "hook": """
        import sys, traceback
        def hook(kind, error, trace):
            print("hook", kind, error, len(traceback.extract_tb(trace)), sys.excepthook is hook)
        sys.excepthook = hook
        1 / 0
    """,
    "interrupt": "raise KeyboardInterrupt",
    "pickle": """
        import pickle
        class Thing:
            pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, Thing.__module__)
    """,
    "spawn": """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """,
    "at_exit": """
        import atexit, sys
        state = "global"
        atexit.register(lambda: print(state, sys.modules["__main__"].state))
    """,
    "thread": """
        import threading, time
        def late():
            time.sleep(0.1)
            import __main__
            print(__main__.value)
        value = 7
        threading.Thread(target=late).start()
    """,
    "annotations": "x: int = 1\nprint(__annotations__)\n",
    "no_future": "def f(x: 1 + 1): pass\nprint(f.__annotations__)\n",
}


def assert_same(home, *args: str, stdin: str | None = None, options=(), **extra: str):
    plain = python(*options, *args, home=home, stdin=stdin, **extra)
    turbo = python(*options, *TURBO, *args, home=home, stdin=stdin, **extra)
    assert turbo.stdout == plain.stdout
    assert turbo.stderr == plain.stderr
    assert turbo.returncode == plain.returncode
    return turbo


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, tmp_path):
    write(tmp_path, {"script.py": SCRIPTS[name], "broken.py": "def f(): 1 / 0\nf()\n"})
    done = assert_same(tmp_path, "script.py", "a", "--strict", "-m")
    if name == "identity":
        assert "['script.py', 'a', '--strict', '-m']" in done.stdout
    if name == "interrupt":
        assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("path", ["./script.py", "sub/../script.py", "link.py", "sub/linked.py"])
def test_script_by_another_path(path, tmp_path):
    write(tmp_path, {"script.py": SHOW, "sub/other.py": "x = 1"})
    (tmp_path / "link.py").symlink_to("script.py")
    (tmp_path / "sub" / "linked.py").symlink_to(tmp_path / "script.py")
    assert_same(tmp_path, path, "a")
    assert_same(tmp_path, str(tmp_path / path))


def test_folder_and_archive(tmp_path):
    write(tmp_path, {"folder/__main__.py": SHOW, "failing/__main__.py": FAIL})
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "folder" / "__main__.py", "__main__.py")
    for target in ("folder", "failing", "app.zip"):
        assert_same(tmp_path, target, "a")


def test_compiled_script(tmp_path):
    write(tmp_path, {"script.py": FAIL})
    python("-m", "compileall", "-q", "-b", "script.py", home=tmp_path)
    assert_same(tmp_path, "script.pyc")


def test_missing_script(tmp_path):
    assert assert_same(tmp_path, "none.py").returncode == 2


@pytest.mark.parametrize(
    "args",
    [
        ("-m", "single", "a", "-c"),
        ("-msingle",),
        ("-m", "package", "a"),
        ("-m", "package.inner"),
        ("-m", "failing"),
        ("-m", "interrupt"),
        ("-m", "missing"),
        ("-m", "package.missing"),
        ("-m", "no_main"),
    ],
    ids=" ".join,
)
def test_module(args, tmp_path):
    write(
        tmp_path,
        {
            "single.py": SHOW,
            "failing.py": FAIL,
            "interrupt.py": "raise KeyboardInterrupt",
            "package/__init__.py": "import sys; print('package', sys.argv)",
            "package/__main__.py": SHOW,
            "package/inner.py": SHOW,
            "no_main/__init__.py": "",
        },
    )
    assert_same(tmp_path, *args)


@pytest.mark.parametrize(
    "args", [("-c", "{show}", "a"), ("-c{show}",), ("-c", "1 / 0"), ("-c", "x = ="), ("-c",)]
)
def test_command(args, tmp_path):
    show = "import sys; print(sys.argv, sys.path, sorted(globals()), __spec__, __loader__)"
    args = [arg.replace("{show}", show) for arg in args]
    if args == ["-c"]:
        done = python(*TURBO, *args, home=tmp_path)
        assert done.returncode == 2
        assert "expected for the -c option" in done.stderr
    else:
        assert_same(tmp_path, *args)


def test_standard_input(tmp_path):
    assert_same(
        tmp_path, "-", "a", stdin="import sys; print(sys.argv, sys.path, __file__)\n1 / 0\n"
    )


@pytest.mark.parametrize("option", ["-P", "-O"])
def test_interpreter_options(option, tmp_path):
    write(tmp_path, {"script.py": SHOW})
    assert_same(tmp_path, "script.py", options=(option,))
    assert_same(tmp_path, "-c", "import sys; print(sys.path, __debug__)", options=(option,))


def test_broken_keras(tmp_path):
    """What Keras raises while it is imported looks as if nobody else were there."""
    for error in ("ImportError('no torch')", "ValueError('bad config')", "KeyboardInterrupt"):
        write(
            tmp_path,
            {"keras/__init__.py": f"raise {error}", "script.py": "def f():\n    import keras\nf()"},
        )
        assert_same(tmp_path, "script.py", PYTHONPATH=str(tmp_path))


def test_keras_mended_and_imported_again(tmp_path):
    write(
        tmp_path,
        {
            "keras/__init__.py": """
                import os
                if "MENDED" not in os.environ:
                    raise ImportError("not yet")
                class config:
                    backend = staticmethod(lambda: "jax")
            """,
            "script.py": """
                import os
                try:
                    import keras
                except ImportError:
                    os.environ["MENDED"] = "1"
                import keras
                print(type(keras.__spec__.loader).__name__, vars(keras.__spec__.loader).keys())
            """,
        },
    )
    done = python(*TURBO, "script.py", home=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "SourceFileLoader dict_keys(['name', 'path'])\n"
    assert done.stderr == "keras_turbo: not active: the Keras backend is 'jax', not 'torch'.\n"


@pytest.mark.parametrize(
    ("keras", "said"),
    [
        (OTHER_BACKEND, "the Keras backend is 'jax', not 'torch'"),
        ("__version__ = '2.15.0'", "this Keras is older than Keras 3"),
    ],
)
def test_one_line_where_it_cannot_work(keras, said, tmp_path):
    script = """
        import keras, keras_turbo, sys
        before = dict(vars(keras))
        keras_turbo.enable()
        keras_turbo.enable("strict")
        print(keras_turbo.is_enabled(), vars(keras) == before, "torch" in sys.modules)
    """
    write(tmp_path, {"keras/__init__.py": keras, "script.py": script})
    done = python(*TURBO, "script.py", home=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stderr == f"keras_turbo: not active: {said}.\n"
    assert done.stdout == "False True False\n"
    assert done.returncode == 0


def test_switched_off(tmp_path):
    write(tmp_path, {"keras/__init__.py": OTHER_BACKEND, "script.py": "import keras; print(1)"})
    done = python(*TURBO, "script.py", home=tmp_path, PYTHONPATH=str(tmp_path), KERAS_TURBO="off")
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


@pytest.mark.parametrize("args", [(), ("--strict",), ("--unknown", "x.py"), ("-x",), ("-m",)])
def test_usage_errors(args, tmp_path):
    done = python(*TURBO, *args, home=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: python -m keras_turbo ")


def test_unknown_option_in_the_environment(tmp_path):
    done = python(*TURBO, "-c", "print(1)", home=tmp_path, KERAS_TURBO="perhaps")
    assert done.returncode == 2
    assert "KERAS_TURBO must be one of on, strict, off; got 'perhaps'" in done.stderr


def test_help_and_version(tmp_path):
    assert python(*TURBO, "--help", home=tmp_path).stdout.startswith("usage: python -m ")
    assert python(*TURBO, "--version", home=tmp_path).stdout.startswith("keras-turbo ")


def test_importing_imports_neither_keras_nor_torch(tmp_path):
    code = (
        "import sys, keras_turbo, keras_turbo.launch, keras_turbo.cli, keras_turbo._ipython;"
        "dir(keras_turbo); keras_turbo.enable('strict'); keras_turbo.is_enabled();"
        "keras_turbo.disable(); keras_turbo.fallbacks(); keras_turbo.Reason; keras_turbo.rule;"
        "heavy = {'keras', 'torch', 'numpy', 'rich', 'matplotlib'};"
        "print(heavy & set(sys.modules), [f for f in sys.meta_path if 'keras' in repr(f)])"
    )
    assert python("-c", code, home=tmp_path).stdout == "set() []\n"


WITH_KERAS = """
    import sys
    import keras
    import numpy as np
    import keras_turbo

    class Odd(keras.layers.Layer):
        def call(self, x):
            return x + 1

    def main():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="head"), Odd()])
        for _ in range(int(sys.argv[2])):
            model(np.ones((2, 4), "float32"))
        print(keras.config.backend(), keras_turbo.is_enabled())
        model(np.ones((2, int(sys.argv[1])), "float32"))

    main()
"""


def test_torch_is_chosen_and_the_report_outlives_the_models(tmp_path):
    write(tmp_path, {"script.py": WITH_KERAS})
    # The first run leaves Keras's own configuration file behind, which is no choice either.
    for _ in range(2):
        done = python(*TURBO, "--report", "script.py", "4", "3", home=tmp_path)
        assert done.stdout == "torch True\n"
        assert done.returncode == 0
        assert "keras_turbo report:" in done.stderr
        assert " Dense       lowered" in done.stderr
        assert " Odd         stock    NO_RULE" in done.stderr


def test_an_error_of_keras_looks_as_with_stock_keras(tmp_path):
    write(tmp_path, {"script.py": WITH_KERAS})
    plain = python("script.py", "5", "3", home=tmp_path, KERAS_BACKEND="torch")
    turbo = python(*TURBO, "script.py", "5", "3", home=tmp_path)
    assert turbo.returncode == plain.returncode == 1
    assert "incompatible with the layer" in plain.stderr
    assert turbo.stderr == plain.stderr


def test_strict_names_the_layer_and_the_reason(tmp_path):
    write(
        tmp_path,
        {
            "script.py": """
                import keras, numpy as np
                class Own(keras.layers.Layer):
                    def call(self, x):
                        return x + 1
                layer = Own(name="mine")
                for _ in range(2):
                    layer(np.ones((2, 4), "float32"))
            """
        },
    )
    done = python(*TURBO, "--strict", "script.py", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "keras_turbo.fallback.FallbackError: keras_turbo (strict): layer 'mine' of class Own "
        "ran stock Keras: NO_RULE"
    )
    assert "site-packages/keras_turbo" not in done.stderr
    assert python(*TURBO, "script.py", home=tmp_path, KERAS_TURBO="strict").returncode == 1
    assert python(*TURBO, "script.py", home=tmp_path).returncode == 0


def test_our_frames_stay_where_they_name_a_bug_of_ours(tmp_path):
    write(
        tmp_path,
        {
            "script.py": """
                import keras, numpy as np, keras_turbo
                class Own(keras.layers.Layer):
                    def call(self, x):
                        return x
                def fail():
                    raise ZeroDivisionError("in an effect")
                @keras_turbo.rule(Own)
                def rule(ctx, layer, x):
                    ctx.effect(fail)
                    return x
                layer = Own()
                for _ in range(2):
                    layer(np.ones((2, 4), "float32"))
            """
        },
    )
    done = python(*TURBO, "--strict", "script.py", home=tmp_path)
    cause, error = done.stderr.split("The above exception was the direct cause")
    assert "keras_turbo program" in cause
    assert "ran stock Keras: ERROR" in error
    assert "keras_turbo/" not in error


def test_notebook_extension(tmp_path):
    code = """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "keras_turbo")
        import sys
        print("keras" in sys.modules)
        import keras, keras_turbo
        from keras_turbo import patch
        print(keras_turbo.is_enabled(), bool(patch.ledger()))
        shell.run_line_magic("unload_ext", "keras_turbo")
        print(keras_turbo.is_enabled(), bool(patch.ledger()))
        shell.run_line_magic("load_ext", "keras_turbo")
        print(keras_turbo.is_enabled())
    """
    write(tmp_path, {"script.py": code})
    done = python(
        "script.py", home=tmp_path, KERAS_BACKEND="torch", IPYTHONDIR=str(tmp_path / "ipython")
    )
    assert done.stdout == "False\nTrue True\nFalse False\nTrue\n", done.stderr
