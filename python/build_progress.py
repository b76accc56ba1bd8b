# SPDX-License-Identifier: Apache-2.0
"""Shows on the terminal how far a build is. pip keeps what a build prints to itself, and a build takes minutes."""

import contextlib
import os
import re
import select
import sys
import threading
import time

# A compiled source in the words of Ninja, "[3/57] ...", or of make, "[ 5%] ...".
SOURCE = re.compile(rb"\[ *(\d+/\d+|\d+%)\] Building \w+ object (?:\S*\.dir/)?(\S+)\.o\b")
# What cmake/cuda.cmake says of the CUDA kernels, or of why there are none.
ABOUT_CUDA = re.compile(rb"-- (CUDA kernels for .*|.*; the CUDA kernels are left out)")


def terminal_of_user():
    """A file descriptor of the terminal, where this process is in its foreground and prints elsewhere; else None."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    if os.tcgetpgrp(terminal) == os.getpgrp() and not os.isatty(1):
        return terminal
    os.close(terminal)
    return None


class Display:
    """One line of the terminal, written over and over: what was compiled last, and since when the build has run."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.start = time.monotonic()
        self.done = "configuring"
        self.shown = None

    def seconds(self):
        return f"{time.monotonic() - self.start:.0f} s"

    def write(self, text, end=""):
        self.shown = text
        with contextlib.suppress(OSError):  # a terminal that was closed meanwhile
            columns = os.get_terminal_size(self.terminal).columns or 80
            # The space at the end is for the installer's spinner, which moves one column back to turn.
            os.write(self.terminal, f"\r\033[K  {text[:max(columns - 4, 1)]} {end}".encode())

    def line(self, line):
        """Takes a line of the build's output."""
        if match := ABOUT_CUDA.match(line):
            self.write(match[1].decode(errors="replace"), end="\n")
        elif match := SOURCE.match(line):
            self.done = f"[{match[1].decode()}] {match[2].decode(errors='replace')}"

    def refresh(self):
        text = f"{self.seconds()} {self.done}"
        if text != self.shown:
            self.write(text)


def watch(source, output, display):
    """Copies the build's output from the pipe `source` to the descriptor `output` until it ends, and shows it."""
    rest = b""
    with open(source, "rb", buffering=0) as pipe, open(output, "wb", buffering=0, closefd=False) as copy:
        while True:
            display.refresh()
            if not select.select([pipe], [], [], 1)[0]:
                continue
            block = pipe.read(1 << 16)
            if not block:
                return
            copy.write(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                display.line(line)


@contextlib.contextmanager
def shown():
    """Shows the progress of the build that runs inside, where there is a terminal; standard output gets all it says."""
    terminal = terminal_of_user()
    if terminal is None:
        yield
        return
    display = Display(terminal)
    source, sink = os.pipe()
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(sink, 1)
    os.close(sink)
    watcher = threading.Thread(target=watch, args=(source, output, display))
    watcher.start()
    end = "failed after"
    try:
        yield
        end = "built in"
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)  # closes the pipe, whose reader so comes to its end
        watcher.join()
        display.write(f"{end} {display.seconds()}:")
        os.close(output)
        os.close(terminal)
