"""`hfpaged telemetry`: what is shipped to look at metrics and traces."""

from __future__ import annotations

import argparse

from hfpaged.telemetry.exporting import SHIPPED, export

LINE = "a Grafana dashboard, Prometheus alerts and a Jaeger setup, to be written out"

EPILOG = """\
examples:
  hfpaged telemetry export monitoring            then: cd monitoring && docker compose up
  hfpaged telemetry export monitoring --force    after an update, where files were changed
"""

NEXT = """\
Next, one of:
  cd {folder} && docker compose up
      Grafana on http://localhost:3000, Prometheus on :9090, Jaeger on :16686
  your own: import grafana-dashboard.json into Grafana; take alerts.yml and the job of prometheus.yml into Prometheus

Then, in the process to be looked at (traces.md has more):
  from prometheus_client import start_http_server
  from hfpaged import telemetry

  telemetry.instrument()
  start_http_server(9464)"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and what it does."""
    parser = subparsers.add_parser("telemetry", help=LINE, description=LINE)
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    line = "write the shipped files into a folder"
    listed = "\n".join(f"  {name:24}{what}" for name, what in SHIPPED.items())
    action = actions.add_parser(
        "export", help=line, description=f"{line}\n\nfiles:\n{listed}", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    action.add_argument("folder", metavar="DIR", help="made where there is none")
    action.add_argument("--force", action="store_true", help="replace files that were changed")


def run(args: argparse.Namespace) -> int:
    """Write the files and say what to do with them. Raises InvalidConfigError."""
    exported = export(args.folder, force=args.force)
    print(f"{args.folder}:")
    for name, state in exported:
        print(f"  {state:10} {name:24}{SHIPPED[name]}")
    print()
    print(NEXT.format(folder=args.folder))
    return 0
