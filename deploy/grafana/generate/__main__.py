"""Writes the dashboards: `python -m deploy.grafana.generate`."""

from deploy.grafana.generate import DASHBOARDS, generated

if __name__ == "__main__":
    for name, text in generated().items():
        (DASHBOARDS / name).write_text(text)
