"""The dashboards as code; `make dashboards` writes them to deploy/grafana/dashboards/."""

from pathlib import Path

from deploy.grafana.generate.engines import engines
from deploy.grafana.generate.overview import overview
from deploy.grafana.generate.queries import written
from deploy.grafana.generate.tenants import tenants

DASHBOARDS = Path(__file__).parents[1] / "dashboards"


def generated() -> dict[str, str]:
    """Return the text of each file in DASHBOARDS by its name."""
    boards = {"overview": overview(), "engines": engines(), "tenants": tenants()}
    return {f"{name}.json": written(board) for name, board in boards.items()}
