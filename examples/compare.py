"""Run a script of this folder with stock Keras and under keras_turbo, side by side.

The script's last line holds `name=value` pairs; they are shown for both runs. Training carries
the last bit of a rounding on to later steps, so that accuracies may differ by a few answers;
it fails where they differ by more.
"""

import subprocess
import sys
from pathlib import Path

TOLERANCE = 0.02
RUNS = {
    "stock Keras": [],
    "keras_turbo": ["-m", "keras_turbo"],
}


def run(script, prefix):
    done = subprocess.run(
        [sys.executable, *prefix, str(script)], check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, end="")
    last = done.stdout.strip().splitlines()[-1]
    return dict(pair.split("=") for pair in last.split())


def main():
    script = Path(__file__).with_name(sys.argv[1] if len(sys.argv) > 1 else "digits.py")
    results = {}
    for name, prefix in RUNS.items():
        print(f"--- {script.name}, {name}", flush=True)
        results[name] = run(script, prefix)
    first, second = results.values()
    print(f"\n{'':10}  " + "  ".join(f"{name:>12}" for name in results))
    for key in first:
        print(f"{key:10}  {first[key]:>12}  {second[key]:>12}")
    if abs(float(first["accuracy"]) - float(second["accuracy"])) > TOLERANCE:
        sys.exit("the accuracies differ")


if __name__ == "__main__":
    main()
