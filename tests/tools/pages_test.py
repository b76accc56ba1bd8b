# SPDX-License-Identifier: Apache-2.0
"""The pages for readers: every relative link of every Markdown file leads somewhere, and the README keeps its form."""

import ast
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 150  # of the README
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = []
    for title in HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return found


def dead_links(page):
    """["line: target"] of the relative links of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    prose = CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    dead = []
    for match in LINK.finditer(prose):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(f"{prose.count(chr(10), 0, match.start()) + 1}: {match[1]}")
    return dead


class Links(unittest.TestCase):
    def test_no_link_is_dead(self):
        listing = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
        names = subprocess.run(listing, cwd=ROOT, check=True, text=True, capture_output=True).stdout.split()
        self.assertGreater(len(names), 20)
        dead = {name: dead_links(ROOT / name) for name in names if (ROOT / name).exists()}
        self.assertEqual({name: found for name, found in dead.items() if found}, {})

    def test_every_page_can_be_reached_from_the_readme(self):
        seen, todo = set(), [ROOT / "README.md"]
        while todo:
            page = todo.pop()
            if page in seen or page.suffix != ".md":
                continue
            seen.add(page)
            targets = (match[1].partition("#")[0] for match in LINK.finditer(page.read_text(encoding="utf-8")))
            todo += [(page.parent / target).resolve() for target in targets if target and ":" not in target]
        self.assertEqual(sorted(set((ROOT / "docs").rglob("*.md")) - seen), [])

    def test_dead_ones_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            page, other = Path(folder) / "page.md", Path(folder) / "other.md"
            other.write_text("# A *b*: `c_d`, e!\n\n# Twice\n\n# Twice\n\n```sh\n# no heading\n```\n")
            good = ["other.md", "other.md#a-b-c_d-e", "other.md#twice-1", "#own-title", "https://a.example/b#c"]
            bad = ["none.md", "other.md#a", "other.md#no-heading", "#b", "none.png"]
            lines = [f"[x]({target}) `[code](none)`" for target in good] + [f"![x [y]]({target})" for target in bad]
            page.write_text("# Own title\n" + "\n".join(lines) + "\n```md\n[x](none)\n```\n")
            self.assertEqual(dead_links(page), [f"{n}: {target}" for n, target in enumerate(bad, 7)])

    def test_the_api_has_every_public_name(self):
        tree = ast.parse((ROOT / "python/distrattention/__init__.py").read_text(encoding="utf-8"))
        assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
        names = {"Settings", "UnavailableError", *ast.literal_eval(assigned["_HOMES"])}
        api = (ROOT / "docs/api.md").read_text(encoding="utf-8")
        self.assertEqual(sorted(names - set(re.findall(r"^::: [\w.]+\.(\w+)$", api, re.M))), [])


class Readme(unittest.TestCase):
    def setUp(self):
        self.text = (ROOT / "README.md").read_text(encoding="utf-8")

    def test_it_is_short(self):
        self.assertLessEqual(len(self.text.splitlines()), MOST_LINES)

    def test_its_first_commands_set_up_and_test(self):
        commands = re.findall(r"^    (\S+)", self.text, re.M)
        self.assertEqual(commands[:2], ["tools/quickstart", "tools/test"])
        self.assertLess(self.text.index("    tools/test"), self.text.index("```"))


if __name__ == "__main__":
    unittest.main()
