# SPDX-License-Identifier: Apache-2.0
"""Runs the snippets of README.md and docs/*.md as a reader would, each by itself.

Python blocks are run, those with `<!-- torchrun -->` before them by two processes with the variables that torchrun
sets, and so are the commands of bash blocks, which have a line before them: `<!-- test -->`, or `<!-- gpu -->` for
those that need one. A snippet that depends on an earlier one fails here. The snippets of a page run in one temporary
folder, in the page's order, with the repository's examples and data in it. The example that embeds whole documents is
run here where DISTR_LONG is set; else test_example.py runs it with a few passages. C++ is built by
tests/install/install_test.py.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from programs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = ("data", "examples", "LICENSE")
DISTR = Path(os.environ.get("DISTR_BINARY", ROOT / "build" / "distr"))
MARK = r"(?:<!-- (?P<mark>test|gpu|torchrun) -->\n+)?"
FENCE = re.compile(MARK + r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
SET_UP = ("apt", "pip", "cmake", "build/venv/bin/python")  # what blocks of `sh` do, which tools/test does in its way


class Snippet(NamedTuple):
    page: str
    line: int  # of the page, where the text starts
    language: str
    mark: str | None
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(page, text):
    """All fenced blocks of a page."""
    return [
        Snippet(page, text.count("\n", 0, match.start("text")) + 1, match["language"], match["mark"], match["text"])
        for match in FENCE.finditer(text)
    ]


def snippets(page, text):
    """The blocks that are run."""
    return [block for block in blocks(page, text) if block.language == "python" or block.mark]


EVERY = [block for page in PAGES for block in blocks(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))]
RUN = [block for block in EVERY if block.language == "python" or block.mark]


def commands(snippet):
    """The `python ...` and `distr ...` commands of a bash block as argument lists; others are an error."""
    found = []
    for words in (shlex.split(line, comments=True) for line in snippet.text.splitlines()):
        if words:
            assert words[0] in ("python", "distr"), f"{snippet}: {words[0]}; allowed in a marked block: python, distr"
            if "examples/semantic_search.py" in words and "DISTR_LONG" not in os.environ:
                assert len(words) == 3 and words[2][0] != "-", f"{snippet}: allowed: a query, as in test_example.py"
                continue
            found.append(words)
    return found


def run(snippet, folder):
    """Runs a snippet in `folder`; raises AssertionError with the page's line and what was printed."""
    if snippet.language == "python":
        # As many empty lines in front as the page has: a traceback's line numbers are those of the page.
        script = folder / f"{Path(snippet.page).stem}_line_{snippet.line}.py"
        script.write_text("\n" * (snippet.line - 1) + snippet.text, encoding="utf-8")
        calls = [["python", str(script)]]
    else:
        calls = commands(snippet)
    environment = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    for call in calls:
        if call[0] == "python":
            ranks = 2 if snippet.mark == "torchrun" else 1
            done = run_ranks(ranks, *call[1:], folder=folder, environment=environment)
        else:
            command = [str(DISTR.absolute()), *call[1:]]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        message = f"{snippet}: {shlex.join(call[1:])} failed\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, message


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each page."""
    made = {}

    def folder(page):
        if page not in made:
            made[page] = tmp_path_factory.mktemp(Path(page).stem)
            for name in LINKS:
                (made[page] / name).symlink_to(ROOT / name)
        return made[page]

    return folder


@pytest.mark.parametrize("snippet", RUN, ids=str)
@pytest.mark.timeout(660)
def test_runs_as_written(snippet, folders):
    if snippet.mark == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if re.search(r"^distr ", snippet.text, re.M) and not DISTR.exists():
        pytest.skip(f"no command at {DISTR}")
    run(snippet, folders(snippet.page))


def test_no_block_is_left_out():
    for block in EVERY:
        if block.language == "sh":  # set-up
            lines = [line for line in block.text.splitlines() if line]
            assert [line for line in lines if line.split()[0] not in SET_UP] == [], block
        elif block.language == "bash":
            assert block.mark, f"{block}: a bash block that is not run; allowed: <!-- test --> before it, or sh"
        elif block.language in ("cpp", "cmake"):
            assert block.page == "docs/cpp.md", f"{block}: {block.language}; allowed: in docs/cpp.md, which is built"
        else:
            assert block.language == "python", f"{block}: {block.language or 'no language'}"


def test_there_is_a_snippet_for_each_entry():
    text = "\n".join(snippet.text for snippet in RUN)
    names = ("scaled_dot_product_attention", "flash_attn_func", "replace_sdpa", "transformers", "timm", "report",
             "distributed import attention")  # fmt: skip
    assert [name for name in names if name not in text] == []


EXAMPLE = """# Title

```python
first = 1
```

```sh
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
    found = [(snippet.line, snippet.language, snippet.mark) for snippet in snippets("page.md", EXAMPLE)]
    assert found == [(4, "python", None), (14, "bash", "test"), (22, "python", None)]


def test_snippets_run_by_themselves_and_name_the_line(tmp_path):
    first, bash, dependent = snippets("page.md", EXAMPLE)
    run(first, tmp_path)
    run(bash, tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)page.md:22.*before.*line 24.*NameError.*'first'"):
        run(dependent, tmp_path)


def test_other_commands_are_refused():
    with pytest.raises(AssertionError, match="page.md:3: curl; allowed"):
        commands(Snippet("page.md", 3, "bash", "test", "curl somewhere\n"))
