# SPDX-License-Identifier: Apache-2.0
"""What is under way, said to whom it waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PATIENCE = 2  # seconds


class Progress:
    """Called with what is under way: hands it to `target`, if that is a function, or writes it to standard error, if it
    is True, or None and standard error is a terminal and PATIENCE is over."""

    def __init__(self, target: bool | Callable[[str], None] | None) -> None:
        self.target = target
        self.started = time.monotonic()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.written = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.written and self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # the line is gone

    def __call__(self, text: str) -> None:
        seconds = time.monotonic() - self.started
        if callable(self.target):
            self.target(text)
        elif self.target or (self.target is None and self.terminal and seconds > PATIENCE):
            self.written = True
            start, end = ("\r\x1b[K", "") if self.terminal else ("", "\n")
            print(f"{start}report: {text}, {seconds:.0f} s", end=end, file=sys.stderr, flush=True)
