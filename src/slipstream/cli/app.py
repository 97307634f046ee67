"""The `slipstream` program: its commands, where each is, and how errors leave it (2: wrong use, 1: failure)."""

from __future__ import annotations

import sys

import click

from slipstream import __version__
from slipstream.cli.commands import Group
from slipstream.errors import SlipstreamError, UsageError

CLI = "slipstream.cli."
bench = Group(
    {
        "decode": CLI + "bench:decode",
        "prefill": CLI + "bench:prefill",
        "cost": CLI + "bench:cost",
        "start": CLI + "bench:start",
        "peers": CLI + "bench:peers",
        "host": CLI + "bench:host",
        "table": CLI + "bench:results",
        "serve": CLI + "bench_serving:serve",
        "replay": CLI + "bench_serving:replay_trace",
        "record": CLI + "bench_serving:record",
        "idle-training": CLI + "bench_training:idle_training",
        "structured": CLI + "bench_api:structured",
        "restart": CLI + "bench_api:restart",
        "spec": CLI + "bench_spec:spec",
        "spec-prediction": CLI + "bench_spec:spec_prediction",
    },
    "Measure: decode and prefill against the ceiling, start, peers.",
)
traffic = Group(
    {
        "import": CLI + "traffic:import_",
        "export": CLI + "traffic:export",
        "stats": CLI + "traffic:stats",
        "delete": CLI + "traffic:delete",
    },
    "Recorded answers: import, export, stats, delete.",
)
drafter = Group(
    {
        "train": CLI + "drafter:train",
        "eval": CLI + "drafter:evaluate",
        "figure": CLI + "drafter_figure:figure",
        "list": CLI + "drafter:list_",
        "deploy": CLI + "drafter_deploy:deploy",
        "watch": CLI + "drafter_deploy:watch",
    },
    "Your own drafter: train, eval, figure, deploy, watch, list.",
)
app = Group(
    {
        "pull": CLI + "pull:pull",
        "generate": CLI + "generate:generate",
        "chat": CLI + "chat:chat",
        "probe": CLI + "probe:probe",
        "ceiling": CLI + "ceiling:ceiling",
        "levers": CLI + "levers:levers_command",
        "explain": CLI + "explain:explain",
        "serve": CLI + "serve:serve",
        "quality": CLI + "quality:quality",
        "run-batch": CLI + "run_batch:run_batch",
        "collect-env": CLI + "collect_env:collect_env",
        "bench": bench,
        "traffic": traffic,
        "drafter": drafter,
    },
    "An LLM inference engine that runs against its own ceiling.",
    "slipstream",
)
click.version_option(__version__, prog_name="slipstream")(app)


def main() -> None:
    """Run, and turn errors into a line on standard error and an exit code."""
    try:
        app(prog_name="slipstream", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UsageError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(2)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
