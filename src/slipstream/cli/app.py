"""The `slipstream` program: its commands, and how errors leave it (2: wrong use, 1: failure)."""

from __future__ import annotations

import sys

import typer

from slipstream.cli import (
    bench,
    bench_api,
    bench_serving,
    bench_spec,
    ceiling,
    chat,
    collect_env,
    drafter,
    drafter_deploy,
    explain,
    generate,
    levers,
    probe,
    pull,
    quality,
    run_batch,
    serve,
    traffic,
)
from slipstream.errors import SlipstreamError, UsageError

app = typer.Typer(
    help="An LLM inference engine that runs against its own ceiling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("pull")(pull.pull)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("probe")(probe.probe)
app.command("ceiling")(ceiling.ceiling)
app.command("levers")(levers.levers_command)
app.command("explain")(explain.explain)
app.command("serve")(serve.serve)
app.command("quality")(quality.quality)
app.command("run-batch")(run_batch.run_batch)
app.command("collect-env")(collect_env.collect_env)
bench.app.command("serve")(bench_serving.serve)
bench.app.command("replay")(bench_serving.replay_trace)
bench.app.command("record")(bench_serving.record)
bench.app.command("structured")(bench_api.structured)
bench.app.command("restart")(bench_api.restart)
bench.app.command("spec")(bench_spec.spec)
bench.app.command("spec-prediction")(bench_spec.spec_prediction)
drafter.app.command("deploy")(drafter_deploy.deploy)
drafter.app.command("watch")(drafter_deploy.watch)
app.add_typer(bench.app, name="bench")
app.add_typer(traffic.app, name="traffic")
app.add_typer(drafter.app, name="drafter")


def main() -> None:
    """Run, and turn errors into a line on standard error and an exit code."""
    try:
        app()
    except UsageError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(2)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
