# SPDX-License-Identifier: Apache-2.0
"""The names of the strategies, from the command, which has them from the library's table."""

import json
import os
import subprocess
from pathlib import Path

BINARY = Path(os.environ.get("DISTR_BINARY", Path(__file__).resolve().parents[2] / "build" / "distr")).absolute()
STRATEGIES = tuple(json.loads(subprocess.check_output([BINARY, "info", "--json"]))["strategies"])
