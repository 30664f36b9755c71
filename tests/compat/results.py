"""The results of a version's tests by area, and the table of versions in docs/versions.md. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

# The tests of each column.
AREAS: Mapping[str, Sequence[str]] = {
    "engine contract": (
        "tests/contract/test_engine_contract.py::TestProcessOnVllm",
        "tests/contract/test_engine_contract.py::TestRemoteOnVllm",
    ),
    "start-up facts": ("tests/e2e/test_engine_facts.py",),
    "endpoints": (
        "tests/e2e/test_openai_sdk.py", "tests/e2e/test_anthropic_sdk.py", "tests/e2e/test_wire.py",
    ),
    "usage": ("tests/e2e/test_usage.py",),
    "tenants": ("tests/e2e/test_tenants.py", "tests/e2e/test_engine_environment.py"),
    "cancellation": ("tests/e2e/test_cancellation.py",),
    "continuation": ("tests/e2e/test_continuation.py",),
    "metrics page": ("tests/e2e/test_engines_page.py",),
}  # fmt: skip
# Tests that fail by a fault of vLLM's own, and the version that mends it (docs/versions.md).
FAULTS_OF_VLLM: Mapping[str, str] = {
    # The end of an earlier turn's thought ends the next one, too.
    "tests.e2e.test_openai_sdk::test_async_client_streams_many_answers_at_once": "0.30",
}
_TABLE = re.compile(r"(<!-- compat: .*? -->\n)(.*)(<!-- end of compat -->)", re.DOTALL)


@dataclass(slots=True)
class Area:
    """The tests of one area that passed and failed; `faulty` failed by a fault of vLLM."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    faulty: int = 0

    def __str__(self) -> str:
        count = self.passed + len(self.failed) + self.faulty
        if self.passed == count > 0:
            return f"all {count}"
        found = f"{self.passed} of {count}"
        return f"{found}, vLLM's fault: {self.faulty}" if self.faulty else found


def read_report(xml: str, version: str) -> dict[str, Area]:
    """Return the areas of pytest's report in JUnit's form; skipped tests are left out."""
    found = {name: Area() for name in AREAS}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        outcomes = {child.tag for child in case}
        if "skipped" in outcomes:
            continue
        area = found[_area_of(case.attrib["classname"])]
        test = f"{case.attrib['classname']}::{case.attrib['name']}"
        if not outcomes & {"failure", "error"}:
            area.passed += 1
        elif _age(version) < _age(FAULTS_OF_VLLM.get(test, "0")):
            area.faulty += 1
        else:
            area.failed.append(test)
    return found


def _area_of(classname: str) -> str:
    for name, places in AREAS.items():
        for place in places:
            dotted = place.replace(".py", "").replace("::", "/").replace("/", ".")
            if classname == dotted or classname.startswith(f"{dotted}."):
                return name
    raise LookupError(classname)


def write_row(page: str, version: str, areas: Mapping[str, Area]) -> str:
    """Return the page with the row of a version; the rows of other versions stay."""
    table = _TABLE.search(page)
    assert table is not None
    rows = {line.split("|")[1].strip(): line for line in table[2].splitlines()[2:]}
    rows[version] = _line(version, *map(str, areas.values()))
    head = [_line("vLLM", *AREAS), _line(*["---"] * (len(AREAS) + 1))]
    body = "\n".join([*head, *(rows[name] for name in sorted(rows, key=_age))])
    return page[: table.start(2)] + f"{body}\n" + page[table.end(2) :]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _age(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def selections() -> Iterable[str]:
    """Yield what pytest is to run."""
    for places in AREAS.values():
        yield from places
