"""The command line: `trajectory-guard COMMAND ...`, also `python -m trajectory_guard`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from trajectory_guard._version import __version__
from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["main", "parse"]


class Command(NamedTuple):
    """One subcommand: `module` holds `NAME_arguments(parser)` and `NAME_command(args) -> exit status`."""

    help: str
    module: str


COMMANDS = {
    "fit": Command("fit a law to the ladder of a manifest", "trajectory_guard.commands"),
    "forecast": Command("write the loss to expect along a planned run", "trajectory_guard.commands"),
    "backtest": Command("hold rungs out and show how well each law forecasts them", "trajectory_guard.commands"),
    "inspect": Command("say what a fit holds, and draw it", "trajectory_guard.commands"),
    "plan": Command("say how many parameters and tokens a ladder recommends", "trajectory_guard.commands"),
    "replay": Command("run a guard over a log and print what it would have said", "trajectory_guard.replay"),
    "report": Command("replay a log and write one page about the run", "trajectory_guard.report"),
    "tensorboard": Command("add a guard to a TensorBoard run logged without", "trajectory_guard.add_tensorboard"),
    "watch": Command("guard a running run from outside, by the log that it writes", "trajectory_guard.watch"),
}
"""Subcommands in the order help shows them. A module is imported only for its own command."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of one command line; as argparse does, exits with status 2 where they are not valid."""
    parser = argparse.ArgumentParser(
        prog="trajectory-guard", description="Watch a training run's loss against a forecast of its whole loss curve."
    )
    parser.add_argument("--version", action="version", version=f"trajectory-guard {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name in words[:1]:
            getattr(importlib.import_module(command.module), f"{name}_arguments")(subparser)
    return parser.parse_args(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, 2 for an error of ours."""
    args = parse(list(sys.argv[1:] if argv is None else argv))
    run = getattr(importlib.import_module(COMMANDS[args.command].module), f"{args.command}_command")
    try:
        return run(args)
    except TrajectoryGuardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output closed it (`| head`); nothing is wrong with the run.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
