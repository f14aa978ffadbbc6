"""Comparing a stock run with a turbo run, test by test, and reporting it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from tests.keras_suite.allowed import ALLOWED
from tests.keras_suite.suite import Result, Run

_GOOD = ("passed", "skipped", "xfailed", "xpassed")
_MISSING = Result("missing", "the test gave no result (a worker died, or it was not collected)")


class Comparison:
    """Two runs of the same tests.

    Attributes:
        new: the tests that stock Keras does not fail and turbo does, with turbo's error.
        unstable: those that did not do so when both were run once more.
        allowed: those for which a reason is on record.
        stock_too: the tests that stock Keras fails.
    """

    def __init__(self, stock: Run, turbo: Run) -> None:
        self.stock = stock
        self.turbo = turbo
        self.stock_too = sorted(t for t, r in stock.results.items() if r.outcome not in _GOOD)
        self.new: dict[str, str] = {}
        self.allowed: dict[str, str] = {}
        self.unstable: dict[str, str] = {}
        for test, result in stock.results.items():
            after = turbo.results.get(test, _MISSING)
            if result.outcome in _GOOD and not _kept(result, after):
                kind = self.allowed if test in ALLOWED else self.new
                kind[test] = after.error or after.outcome
        for file, error in turbo.uncollected.items():
            if file not in stock.uncollected:
                self.new[file] = error

    def suspects(self) -> list[str]:
        """The tests to run once more: new failures that are single tests."""
        return [test for test in self.new if test in self.stock.results]

    def retry(self, stock: Run, turbo: Run) -> None:
        """Take the tests out of `new` that fail stock, or pass turbo, at the second try."""
        for test in self.suspects():
            before = stock.results.get(test, _MISSING)
            after = turbo.results.get(test, _MISSING)
            if before.outcome not in _GOOD or _kept(before, after):
                self.unstable[test] = self.new.pop(test)
            else:
                self.new[test] = after.error or self.new[test]

    def report(self, full: bool = False) -> str:
        lines: list[str] = []
        turbo = self.turbo
        lines.append(
            f"programs: {turbo.counts['lowered']} lowered, {turbo.counts['served']} calls "
            f"served by them, {sum(turbo.fallbacks.values())} fallbacks"
        )
        lines += _reasons(turbo.fallbacks)
        missing = collections.Counter(self.stock.uncollected.values())
        if missing:
            lines.append(f"files that could not be collected: {sum(missing.values())}")
            lines += [f"  {count:4d}  {error}" for error, count in missing.most_common()]
        lines += _listing("fail stock too", dict.fromkeys(self.stock_too, ""))
        lines += _listing("unstable: differed once, not twice", self.unstable, errors=True)
        lines += _listing("allowed to differ", {t: ALLOWED[t] for t in self.allowed}, errors=True)
        idle = [t for t in ALLOWED if t in self.stock.results and t not in self.allowed]
        lines += _listing("allowed to differ, yet equal", dict.fromkeys(idle, ""))
        lines += _listing("NEW FAILURES", self.new, errors=True)
        if not turbo.counts["lowered"]:
            lines.append("FAILED: not one program was lowered: keras_turbo did not run")
        if full and missing:
            lines.append("FAILED: files could not be collected; install keras-turbo[conformance]")
        lines.append(f"{turbo.count('passed')} passed, {len(self.new)} failed")
        return "\n".join(lines)

    def exit_code(self, full: bool = False) -> int:
        ran = self.turbo.counts["lowered"] and self.turbo.count("passed")
        return int(bool(self.new) or not ran or (full and bool(self.stock.uncollected)))

    def save(self, path: str) -> None:
        """Write everything as JSON."""
        content: dict[str, Any] = {
            "new": self.new,
            "unstable": self.unstable,
            "allowed": self.allowed,
            "stock_too": self.stock_too,
        }
        for run in (self.stock, self.turbo):
            content["stock" if run is self.stock else "turbo"] = {
                "mode": run.mode,
                "seconds": run.seconds,
                "counts": run.counts,
                "fallbacks": dict(run.fallbacks.most_common()),
                "uncollected": run.uncollected,
                "results": {test: vars(result) for test, result in run.results.items()},
            }
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _kept(before: Result, after: Result) -> bool:
    """Whether a test that is good in stock Keras is as good under turbo."""
    if before.outcome == "passed":
        return after.outcome == "passed"
    return after.outcome in _GOOD


def _reasons(fallbacks: collections.Counter[str]) -> list[str]:
    """Fallbacks by reason, each with the classes and details that are behind most of it."""
    by_reason: dict[str, collections.Counter[str]] = {}
    for key, count in fallbacks.items():
        reason, layer, detail = key.split("|", 2)
        known = by_reason.setdefault(reason, collections.Counter())
        known[f"{layer} ({detail})" if detail else layer] += count
    lines = []
    for reason, sources in sorted(by_reason.items(), key=lambda item: -item[1].total()):
        lines.append(f"  {sources.total():6d}  {reason}")
        lines += [f"          {count:6d}  {name[:100]}" for name, count in sources.most_common(6)]
    return lines


def _listing(title: str, tests: dict[str, str], errors: bool = False) -> list[str]:
    if not tests:
        return []
    lines = [f"{title}: {len(tests)}"]
    for test, error in tests.items():
        lines.append(f"  {test}")
        if errors and error:
            lines.append(f"      {error}")
    return lines
