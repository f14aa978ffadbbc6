"""`keras-turbo bench --compile`: both models meet the compiler and compute the same.

Dynamo's own backend stands in for Inductor where only the pipeline is tested.
"""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import keras_turbo
from keras_turbo import compat
from keras_turbo.bench import compiling, report
from keras_turbo.bench.cli import bench

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.fixture
def quick_compiler(monkeypatch):
    """In the place of Inductor, whatever runs a graph as it is."""
    monkeypatch.setattr(compat, "inductor_compile", lambda module, examples, how: module)
    right = compiling.run_compiled

    def run(name, rounds, *args):
        return right(name, rounds, min_sample=0.0, backend="eager")

    monkeypatch.setattr(compiling, "run_compiled", run)


@pytest.mark.parametrize("name", compiling.CASES)
def test_both_models_are_whole_graphs_with_the_same_results(name, quick_compiler):
    row = compiling.run_compiled(name, 1)
    assert row.problems == [] and row.error <= compiling.TOLERANCE
    assert row.turbo_breaks == row.hand_breaks == 0
    # A recorded step of other sizes runs eagerly; Dynamo never sees it.
    assert row.turbo_recompiles == (0 if name.startswith("train") else 1)
    assert row.hand_recompiles == 1
    assert not keras_turbo.is_enabled()


def test_a_table_and_a_file_come_out(quick_compiler, tmp_path):
    path = tmp_path / "compiled.json"
    done = CliRunner().invoke(bench, ["mlp8", "--compile", "--rounds", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "mlp8" in done.stdout and "recompiles" in done.stdout and "0 / 0" in done.stdout
    (row,) = json.loads(path.read_text())["compiled"]
    assert row["workload"] == "mlp8" and row["turbo_recompiles"] == 1


def test_results_that_differ_fail_the_run(quick_compiler, monkeypatch):
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return x + 1

    right = compiling.CASES["mlp8"]

    def pair(backend):
        made = right(backend)
        return compiling.Pair(made.turbo, Wrong, made.batch, backend)

    monkeypatch.setitem(compiling.CASES, "mlp8", pair)
    done = CliRunner().invoke(bench, ["mlp8", "--compile", "--rounds", "1"])
    assert done.exit_code == 1 and "mlp8: the compiled models differ" in done.output


def test_unknown_names_and_two_tables_at_once_are_refused():
    done = CliRunner().invoke(bench, ["conv64", "--compile"])
    assert done.exit_code == 2 and "No such compiled workload: conv64" in done.output
    assert "Choose one of" in CliRunner().invoke(bench, ["--compile", "--isolate"]).output


def test_breaks_of_both_are_shown_side_by_side():
    row = compiling.Compiled("w", 1.0, 2.0, 0.5, 1e-3, 1e-3, 1.0, 0.1, 0.0, 3, 4, 5, 6)
    cells = [next(iter(column.cells)) for column in report.compiled_table([row]).columns]
    assert cells[-2:] == ["3 / 4", "5 / 6"] and "0.50" in cells
