# SPDX-License-Identifier: Apache-2.0
"""Runs the README's Python snippets, and the commands marked `<!-- test -->`, as a reader would: each by itself.

A snippet that depends on an earlier one fails here. All run in one temporary folder, in the README's order, with the
repository's examples and data in it; they find the files that earlier ones wrote. The examples that embed whole
documents look at a few passages, unless DISTR_LONG is set.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LINKS = ("data", "examples")
FENCE = re.compile(r"(?P<marked><!-- test -->\n+)?^```(?P<language>python|bash)\n(?P<text>.*?)^```$", re.M | re.S)


class Snippet(NamedTuple):
    line: int  # of the README, where the text starts
    language: str
    text: str


def snippets(text):
    """All Python blocks, and the bash blocks that stand behind a line `<!-- test -->`."""
    return [
        Snippet(text.count("\n", 0, match.start("text")) + 1, match["language"], match["text"])
        for match in FENCE.finditer(text)
        if match["language"] == "python" or match["marked"]
    ]


def commands(snippet):
    """The `python ...` commands of a bash block as argument lists, for this interpreter; others are an error."""
    found = []
    for words in (shlex.split(line, comments=True) for line in snippet.text.splitlines()):
        if words:
            assert words[0] == "python", f"README.md:{snippet.line}: {words[0]}; allowed in a marked block: python"
            short = "examples/semantic_search.py" in words and "DISTR_LONG" not in os.environ
            found.append([sys.executable, *words[1:], *(["--passages", "8"] if short else [])])
    return found


def run(snippet, folder):
    """Runs a snippet in `folder`; raises AssertionError with the README's line and what was printed."""
    if snippet.language == "python":
        # As many empty lines in front as the README has: a traceback's line numbers are those of the README.
        script = folder / f"README_line_{snippet.line}.py"
        script.write_text("\n" * (snippet.line - 1) + snippet.text, encoding="utf-8")
        calls = [[sys.executable, str(script)]]
    else:
        calls = commands(snippet)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    if "PYTHONPATH" in environment:  # what it names is relative to where the tests were started
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environment["PYTHONPATH"].split(os.pathsep)))
    for call in calls:
        done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        message = f"README.md:{snippet.line}: {shlex.join(call[1:])} failed\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, message


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("readme")
    for name in LINKS:
        (path / name).symlink_to(ROOT / name)
    return path


@pytest.mark.parametrize("snippet", snippets(README.read_text(encoding="utf-8")), ids=lambda s: f"line_{s.line}")
@pytest.mark.timeout(660)
def test_runs_as_written(snippet, folder):
    run(snippet, folder)


def test_readme_has_a_snippet_for_each_integration():
    text = "\n".join(s.text for s in snippets(README.read_text(encoding="utf-8")))
    names = ("scaled_dot_product_attention", "flash_attn_func", "replace_sdpa", "transformers", "timm", "report")
    assert [name for name in names if name not in text] == []


EXAMPLE = """# Title

```python
first = 1
```

```bash
not run
```

<!-- test -->

```bash
python -c "open('made', 'w')"  # a comment
```

```cpp
int x;
```

```python
assert open("made").read() == ""
print("before")
first += 1
```
"""


def test_finds_snippets_and_their_lines():
    assert [(s.line, s.language) for s in snippets(EXAMPLE)] == [(4, "python"), (14, "bash"), (22, "python")]


def test_snippets_run_by_themselves_and_name_the_line(tmp_path):
    first, bash, dependent = snippets(EXAMPLE)
    run(first, tmp_path)
    run(bash, tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)README.md:22.*before.*line 24.*NameError.*'first'"):
        run(dependent, tmp_path)


def test_other_commands_are_refused():
    with pytest.raises(AssertionError, match="README.md:3: curl; allowed"):
        commands(Snippet(3, "bash", "curl somewhere\n"))
