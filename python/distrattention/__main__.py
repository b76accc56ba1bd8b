# SPDX-License-Identifier: Apache-2.0
"""`python -m distrattention doctor`."""

import argparse
import sys
from collections.abc import Sequence

import distrattention


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Exits with 2 for arguments that are not known."""
    parser = argparse.ArgumentParser("distrattention", description="Exact and approximate attention for PyTorch.")
    parser.add_argument("--version", action="version", version=distrattention.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    told = "tells what is installed, what was built, what this machine has and what would run"
    commands.add_parser("doctor", help=told, description=f"{told[0].upper()}{told[1:]}.")
    parser.parse_args(arguments)
    from distrattention import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
