"""A dashboard: its variables, rows of panels and links to the other dashboards."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    Panel,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.grafana.generate.queries import LEDGER_SOURCE, POSTGRES, PROMETHEUS_SOURCE

TAG = "vllm-gateway"
Panels = Sequence[Builder[Panel]]


def source(name: str, label: str) -> Builder[VariableModel]:
    """Return the variable for one of the data sources: prometheus or ledger."""
    plugin = POSTGRES if name == "ledger" else "prometheus"
    return dashboard.DatasourceVariable(name).label(label).type(plugin)


def choice(name: str, label: str, about: str, query: str) -> Builder[VariableModel]:
    """Return a variable with several or all values selectable.

    `query` is `label_values(...)` for Prometheus, or SQL with columns __text and __value.
    """
    sql = query.lower().startswith("select")
    variable = dashboard.QueryVariable(name).label(label).description(about)
    variable.datasource(LEDGER_SOURCE if sql else PROMETHEUS_SOURCE)
    variable.query(query if sql else {"query": query, "refId": name})
    variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    variable.multi(True).include_all(True)
    if not sql:  # in SQL, Grafana writes all values as a list
        variable.all_value(".*")
    return variable.current(VariableOption(selected=True, text="All", value="$__all"))


def board(
    uid: str,
    title: str,
    about: str,
    variables: Sequence[Builder[VariableModel]],
    rows: Mapping[str, Panels],
    *,
    since: str = "now-1h",
    refresh: str = "30s",
) -> Dashboard:
    """Return a dashboard; `rows` are panels by heading."""
    made = dashboard.Dashboard(title).uid(uid).description(about).tags([TAG]).editable()
    made.time(since, "now").refresh(refresh).tooltip(DashboardCursorSync.CROSSHAIR)
    made.timezone("browser")
    others = dashboard.DashboardLink("Dashboards of the gateway")
    others.type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    made.link(others.include_vars(True).keep_time(True))
    for variable in variables:
        made.with_variable(variable)
    for heading, panels in rows.items():
        made.with_row(dashboard.Row(heading))
        for panel in panels:
            made.with_panel(panel)
    whole = made.build()
    for number, panel_or_row in enumerate(whole.panels or (), start=1):
        panel_or_row.id_val = number
    return whole
