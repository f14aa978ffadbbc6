"""The benchmark computes what it says, and fails where a model computes something else.

No test asserts a time: two rounds prove that the pipeline works.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import socket

import pytest
import torch
from click.testing import CliRunner

import keras_turbo
from keras_turbo import passes, registry, rules
from keras_turbo.bench import breaks, case, isolate, measure, overhead, report, result
from keras_turbo.bench.cli import bench
from keras_turbo.bench.workloads import WORKLOADS, generate

RESULT_KEYS = {field.name for field in dataclasses.fields(result.Result)}


def run(*arguments: str):
    """Run the command in this process."""
    return CliRunner().invoke(bench, arguments)


@pytest.fixture
def tiny_generation(monkeypatch):
    """A generation workload of a few tokens, under a name of its own."""
    tiny = dataclasses.replace(
        WORKLOADS["generate32"],
        name="tiny",
        inputs=WORKLOADS["llm_small"].inputs,
        run=lambda model, window: generate(model, window, tokens=3),
    )
    monkeypatch.setitem(WORKLOADS, "tiny", tiny)
    return tiny


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_three_models_of_a_workload_agree(name):
    ready = case.prepare(WORKLOADS[name], seed=1)
    turbo_error, hand_error = case.errors(ready)
    assert case.disagreements(turbo_error, hand_error) == []
    # Turbo must have computed its own part, not have left it to stock Keras.
    programs = ready.turbo_model._keras_turbo.programs
    assert [row for program in programs for row in program.rows if not row.lowered] == []
    assert not getattr(ready.stock_model, "_keras_turbo", None)


@pytest.mark.parametrize("name", ["mlp8", "cnn", "llm_small"])
def test_every_weight_of_the_reference_matters(name):
    ready = case.prepare(WORKLOADS[name])
    with torch.no_grad():
        before = ready.hand()
        for key, weight in ready.reference.state_dict().items():
            if key.endswith("num_batches_tracked"):
                continue
            saved = weight.clone()
            weight.add_(torch.rand_like(weight))
            # A bias of the keys shifts all scores of a row alike, but this one holds more.
            assert not torch.equal(ready.hand(), before), key
            weight.copy_(saved)


def test_the_cnn_has_the_size_it_is_known_for():
    assert case.prepare(WORKLOADS["cnn"]).stock_model.count_params() == 113_866


def test_a_table_and_a_file_come_out(tmp_path):
    path = tmp_path / "results" / "bench.json"
    done = run("mlp8_b1", "--rounds", "2", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "mlp8_b1" in done.stdout and "turbo/hand" in done.stdout
    assert "rounds" in done.stderr
    data = json.loads(path.read_text())
    assert data["schema"] == result.SCHEMA and data["rounds"] == 2
    (row,) = data["workloads"]
    assert set(row) == RESULT_KEYS
    assert row["graph_breaks"] == 0 and row["problems"] == []
    assert {"cpu", "cores", "threads", "torch", "keras", "date", "load"} <= set(data["machine"])
    assert socket.gethostname() not in path.read_text().split('"')


def test_the_command_leaves_turbo_off():
    run("mlp8_b1", "--rounds", "1", "--no-breaks")
    assert not keras_turbo.is_enabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_other_token_ids_fail_the_run(tiny_generation, monkeypatch, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ("tiny", "--rounds", "1", "--no-breaks", "--json", str(path))
    assert run(*arguments).exit_code == 0
    right = case.Case.turbo
    monkeypatch.setattr(case.Case, "turbo", lambda self: (right(self) + 1) % 1024)
    done = run(*arguments)
    assert done.exit_code == 1
    assert "tiny: turbo gives other ids" in done.output and "DIFFERENT" in done.output
    assert json.loads(path.read_text())["workloads"][0]["turbo_error"] is None


def test_a_reference_that_is_another_model_fails_the_run(monkeypatch):
    right = case.Case.hand
    monkeypatch.setattr(case.Case, "hand", lambda self: right(self) + 1e-3)
    done = run("mlp8_b1", "--rounds", "1", "--no-breaks")
    assert done.exit_code == 1
    assert "the hand-written model differs" in done.output


def test_list_names_every_workload_and_quick_only_the_small_ones():
    done = run("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(WORKLOADS)
    quick = {name for name, workload in WORKLOADS.items() if workload.quick}
    assert {"mlp8", "cnn", "llm", "generate32"} <= quick < set(WORKLOADS)


def test_mistakes_on_the_command_line_are_explained(monkeypatch):
    assert "No such workload: nope" in run("nope").output
    assert "Choose one of" in run("--isolate", "--overhead").output
    assert "main table" in run("--isolate", "--plot", "x.png").output
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("mlp8", "--plot", "x.png")
    assert done.exit_code == 1 and "pip install 'keras-turbo[bench]'" in done.output


def test_turbo_that_cannot_be_enabled_is_an_error(monkeypatch):
    monkeypatch.setenv("KERAS_TURBO", "off")
    done = run("mlp8_b1", "--rounds", "1", "--no-breaks")
    assert done.exit_code == 1 and "cannot be enabled" in done.output


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert run("mlp8_b1", "--rounds", "1", "--no-breaks", "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_isolate_times_every_family_and_pass(tmp_path):
    path = tmp_path / "isolate.json"
    done = run("mlp8", "--isolate", "--rounds", "1", "--json", str(path))
    assert done.exit_code == 0, done.output
    parts = [row["part"] for row in json.loads(path.read_text())["isolate"]]
    wanted = [f"pass {name}" for name in isolate.all_passes()]
    assert {"reuse_owned_memory", "use_rows"} <= set(isolate.all_passes())
    assert parts == ["family models", "family core", *wanted]


@pytest.mark.allow_fallback("NO_RULE")
def test_a_configuration_lowers_only_what_it_names():
    ready = case.prepare(WORKLOADS["mlp8_b1"])
    table, all_passes = registry.rules(), passes.PASSES
    with torch.no_grad():
        expected = ready.stock()

    def program_of(*families: str):
        model = isolate.lowered(ready, isolate.Configuration(frozenset(families), ()))
        with torch.no_grad():
            assert case.distance(model(ready.x), expected) <= case.TOLERANCE
        return model, model._keras_turbo.programs

    model, programs = program_of("core")
    assert programs == () and all(layer._keras_turbo.programs for layer in model.layers)
    _, (program,) = program_of("models")
    assert sum(row.lowered for row in program.rows) == 1
    _, (program,) = program_of("models", "core")
    assert all(row.lowered for row in program.rows) and "relu_(" not in program.code
    everything = isolate.Configuration(frozenset(rules.FAMILIES), ("reuse_owned_memory",))
    (program,) = isolate.lowered(ready, everything)._keras_turbo.programs
    assert "relu_(" in program.code
    assert registry.rules() == table and all_passes == passes.PASSES


def test_overhead_reports_the_hit_path_and_lowering():
    measured = overhead.overhead(case.prepare(WORKLOADS["mlp8_b1"]), rounds=2)
    assert measured.layers == 9 and measured.lowering > 0
    assert run("mlp8_b1", "--overhead", "--rounds", "2").exit_code == 0


def test_graph_breaks_are_counted_and_a_failure_is_explained():
    class Broken(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x + 1

    count, why = breaks.graph_breaks(Broken(), torch.ones(2))
    assert count == 1 and why
    count, why = breaks.graph_breaks(None, torch.ones(2))
    assert count is None and why


def test_measure_takes_turns_and_warms_up_before_each_sample():
    log: list[str] = []
    contenders = [
        measure.Contender(lambda: log.append("a"), lambda: log.append("prepare")),
        measure.Contender(lambda: log.append("b")),
    ]
    ticks: list[int] = []
    samples = measure.measure(contenders, 3, min_sample=0.0, tick=lambda: ticks.append(1))
    assert [len(times) for times in samples] == [3, 3] and len(ticks) == 3
    assert log[-15:] == ["prepare", "a", "a", "b", "b"] * 3


def test_measure_leaves_the_collector_as_it_was():
    def fail() -> None:
        raise ValueError("in the middle of a sample")

    with pytest.raises(ValueError, match="middle"):
        measure.measure([measure.Contender(fail)], 1)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_ratios_are_paired_and_noise_is_that_of_one_thing_against_itself():
    assert measure.ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5
    assert measure.difference([1.0, 20.0], [0.5, 19.5]) == 0.5
    assert measure.noise([1.0] * 30) == 0.0
    assert measure.noise([1.0]) == float("inf")
    assert measure.noise([1.0, 1.1] * 15) == pytest.approx(0.1)
    assert measure.is_noise(0.92, 0.1) and not measure.is_noise(0.9, 0.1)
    assert not measure.is_noise(0.01, 2.0)


def test_numbers_are_printed_in_the_unit_that_suits_them():
    assert report.seconds(1.5) == "1.5 s"
    assert report.seconds(0.0123) == "12.3 ms"
    assert report.seconds(4.2e-5) == "42 us"
    assert report.seconds(-3e-7) == "-0.3 us"
    assert report.ratio(0.99, noise=0.02) == "0.99 (noise)"
    assert report.ratio(0.48, noise=0.02) == "0.48"
    assert report.ratio(0.031, noise=0.02) == "0.031"
    assert report.error(float("inf")) == "DIFFERENT"
