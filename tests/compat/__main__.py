"""`python -m tests.compat VERSION…`: tests versions of vLLM, one after the other.

Each version is installed, its tests are run on real engines of it, and its row in docs/versions.md
is written. The exit code is 0 only if every test of every version passed, faults of vLLM aside.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.environments import Unavailable
from tests.compat.environments import VERSION, interpreter_of
from tests.compat.results import Area, read_report, selections, write_row
from tests.docs.page import ROOT

PAGE = ROOT / "docs" / "versions.md"


def main(versions: list[str]) -> int:
    """Return the exit code."""
    if not versions or not all(map(VERSION.fullmatch, versions)):
        print('versions are needed: make compat VERSIONS="0.28.0 0.32.0"', file=sys.stderr)
        return 2
    whole = True
    for version in versions:
        began = time.monotonic()
        try:
            python = interpreter_of(version)
        except Unavailable as error:
            print(f"vLLM {version} cannot be installed here: {error}", file=sys.stderr)
            whole = False
            continue
        if (areas := run_tests(python, version)) is None:
            return 1
        PAGE.write_text(write_row(PAGE.read_text(), version, areas))
        counts = ", ".join(f"{name} {area}" for name, area in areas.items())
        print(f"vLLM {version}, {time.monotonic() - began:.0f} s: {counts}", flush=True)
        whole &= all(area.passed and not area.failed for area in areas.values())
    return 0 if whole else 1


def run_tests(python: Path, version: str) -> dict[str, Area] | None:
    """Run the tests on engines of an interpreter with this version of vLLM.

    None where pytest did not run to its end.
    """
    with tempfile.TemporaryDirectory(prefix="compat-") as directory:
        report = Path(directory, "report.xml")
        # What tests have to show is part of the older form alone.
        form = ("-o", "junit_family=xunit1", f"--junitxml={report}")
        command = (sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "vllm")
        done = subprocess.run(
            [*command, *form, *selections()],
            cwd=ROOT,
            env={**os.environ, "VLLM_PYTHON": str(python)},
            check=False,
        )
        return read_report(report.read_text(), version) if done.returncode in (0, 1) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
