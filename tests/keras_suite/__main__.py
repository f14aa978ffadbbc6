"""Command line: run Keras's own tests stock and under keras_turbo and compare them.

python -m tests.keras_suite [--quick] [--full] [--strict] [--jobs N] [--only layers/core ...]
"""

from __future__ import annotations

import argparse
import sys

from tests.keras_suite.compare import Comparison
from tests.keras_suite.suite import QUICK, Suite, select


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.keras_suite", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--full", action="store_true", help="fail if an optional dependency of a test is missing"
    )
    parser.add_argument("--strict", action="store_true", help="a fallback fails the test")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATH", help="under keras/src")
    parser.add_argument("-k", dest="keyword", help="pytest's -k")
    parser.add_argument("--check", default="first", choices=("off", "first", "always"))
    parser.add_argument(
        "--deep", action="store_true", help="programs also for first calls, every call compared"
    )
    parser.add_argument("--json", help="write the whole comparison there")
    options = parser.parse_args(argv)

    only = options.only or (list(QUICK) if options.quick else [])
    files = select(only)
    if not files:
        parser.error(f"no test files under {only}")
    suite = Suite(
        files, jobs=options.jobs, keyword=options.keyword, check=options.check, deep=options.deep
    )
    print(suite.header(only), flush=True)
    stock = suite.run("stock")
    print(stock.summary(), flush=True)
    turbo = suite.run("strict" if options.strict else "on")
    print(turbo.summary(), flush=True)
    comparison = Comparison(stock, turbo)
    suspects = comparison.suspects()
    if suspects:
        print(f"running {len(suspects)} tests that differ once more, both ways", flush=True)
        comparison.retry(suite.run("stock", suspects), suite.run(turbo.mode, suspects))
    print(comparison.report(full=options.full))
    if options.json:
        comparison.save(options.json)
    return comparison.exit_code(full=options.full)


if __name__ == "__main__":
    sys.exit(main())
