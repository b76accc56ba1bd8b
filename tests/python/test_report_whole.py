# SPDX-License-Identifier: Apache-2.0
"""The evaluation over several batches and of the whole model: metrics, times, errors by head, progress, HTML, plot."""

import io
import sys
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from distrattention import Settings, replace_sdpa, report
from distrattention.evaluation import Time, measure, progress
from distrattention.evaluation.measure import Call

SETTINGS = [Settings("energy", 2), Settings("lsh", 4)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):  # [B, N, 64]
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).eval()


def first_call(model, x):
    q, k, v = model[0].qkv(x).reshape(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
    return Call(q, k, v)


def error(output, exact, axes=None):
    return torch.linalg.vector_norm(output - exact, dim=axes) / torch.linalg.vector_norm(exact, dim=axes)


def test_one_setting_needs_no_list(model):
    found = report(model, normal(1, 64, 64), Settings("energy", 2), repeats=1)
    assert found.settings == (Settings("energy", 2),) and len(found.layers[0].measurements) == 1


@torch.no_grad()
def test_batches_alike_are_one_call_and_others_are_not(model):
    batches = [normal(2, 200, 64), normal(2, 200, 64, seed=1), normal(1, 100, 64)]
    found = report(model, batches=batches, settings=SETTINGS, repeats=1)
    assert found.batches == 3 and str(found).startswith("3 batches\n")
    assert [(layer.name, layer.batches) for layer in found.layers] == [("0", 2), ("1", 2), ("0", 1), ("1", 1)]
    calls = [first_call(model, x) for x in batches[:2]]
    exact = torch.stack([call.run(Settings("exact"))[0] for call in calls])
    singles = [report(model, x, SETTINGS, repeats=1) for x in batches]
    for n, setting in enumerate(SETTINGS):
        output = torch.stack([call.run(setting)[0] for call in calls])
        measured = found.layers[0].measurements[n]
        parts = [single.layers[0].measurements[n] for single in singles[:2]]
        assert measured.error == pytest.approx(error(output, exact).item(), rel=1e-4)
        assert measured.total_variation == pytest.approx(sum(part.total_variation for part in parts) / 2)
        assert measured.row_cosine_min == pytest.approx(min(part.row_cosine_min for part in parts))
        with replace_sdpa(setting):
            outputs = [model(x) for x in batches]
        difference = sum((o - model(x)).square().sum() for o, x in zip(outputs, batches))
        whole = (difference / sum(model(x).square().sum() for x in batches)).sqrt().item()
        assert found.outputs[0].errors[n] == pytest.approx(whole, rel=1e-4)


def test_a_loader_holds_batches(model):
    loader = DataLoader(normal(4, 60, 64), batch_size=2)
    assert [layer.batches for layer in report(model, batches=loader, settings=SETTINGS, repeats=1).layers] == [2, 2]
    one = normal(1, 60, 64)
    for given, arguments in (("neither", {}), *(("both", {"batch": one, "batches": some}) for some in (loader, []))):
        with pytest.raises(TypeError, match=f"batch and batches were {given} given; allowed: one of them"):
            report(model, settings=SETTINGS, **arguments)
    with pytest.raises(ValueError, match="and one batch at least"):
        report(model, batches=[], settings=SETTINGS)


@torch.no_grad()
def test_a_metric_stands_beside_the_errors(model):
    batches = [{"input": normal(1, 90, 64)}, {"input": normal(1, 90, 64, seed=1)}]

    def loss(output, batch):
        return F.mse_loss(output, batch["input"])

    found = report(model, batches=batches, settings=SETTINGS, metric=loss, repeats=1)
    (metric,) = found.metrics
    assert metric.name == "loss"
    assert metric.exact == pytest.approx(sum(loss(model(**b), b).item() for b in batches) / 2, rel=1e-4)
    for setting, value in zip(SETTINGS, metric.values):
        with replace_sdpa(setting):
            assert value == pytest.approx(sum(loss(model(**b), b).item() for b in batches) / 2, rel=1e-4)
        assert value != metric.exact
    assert f"\nloss             {metric.exact:.4g}" in str(found)
    named = report(model, batches[0], SETTINGS, repeats=1, metric={"a": loss, "b": lambda output, batch: 2})
    assert [(m.name, len(m.values)) for m in named.metrics] == [("a", 2), ("b", 2)] and named.metrics[1].exact == 2
    assert report(model, batches[0], SETTINGS, repeats=1, metric=lambda o, b: 1).metrics[0].name == "metric"
    with pytest.raises(ValueError, match="metric was given with end_to_end=False"):
        report(model, batches[0], SETTINGS, metric=loss, end_to_end=False)


@torch.no_grad()
def test_errors_by_head(model):
    x = normal(2, 90, 64)
    found = report(model, x, SETTINGS, repeats=1, per_head=True)
    call = first_call(model, x)
    exact = call.run(Settings("exact"))[0]
    for n, setting in enumerate(SETTINGS):
        expected = error(call.run(setting)[0], exact, (0, 2, 3))
        assert found.layers[0].measurements[n].head_errors == pytest.approx(expected.tolist(), rel=1e-4)
    assert "Errors of O by head" in str(found)
    plain = report(model, x, SETTINGS, repeats=1)
    assert plain.layers[0].measurements[0].head_errors is None and "by head" not in str(plain)


def test_times_of_the_whole_model(model, monkeypatch):
    """3 ms for a call of exact attention, 1 and 2 ms for those of the settings; 10 ms and more for the model."""
    of_calls = {Settings("exact"): 3.0, SETTINGS[0]: 1.0, SETTINGS[1]: 2.0}
    of_model = iter([20.0, 10.0, 12.0, 8.0, 10.5] * 2)  # as it is, exact twice, and the settings

    def milliseconds(run, device):
        arguments = getattr(run, "args", ("torch",))
        return of_calls.get(arguments[0], 4.0) if len(arguments) == 1 else next(of_model)

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    found = report(model, normal(1, 60, 64), SETTINGS, repeats=2)
    whole = found.whole
    assert (whole.as_it_is, whole.exact) == (Time(20, 20, 20), Time(11, 10, 12)) and whole.twins == (10, 12)
    assert [time.ms for time in whole.times] == [8, 10.5]
    assert whole.speeds == (11 / 8, None)
    assert (whole.exact_share, whole.shares) == (6 / 11, (2 / 8, 4 / 10.5))
    table = str(found).split("Time of the whole model (two runs with exact attention differ by 20.0%)\n")[1]
    cells = [line.split() for line in table.splitlines()]
    assert ["exact", "11.00", "(10.00-12.00)", "1.00", "55%"] in cells
    assert ["energy", "G=2", "8.00", "(8.00-8.00)", "1.38", "25%"] in cells
    assert report(model, normal(1, 60, 64), SETTINGS, repeats=1, end_to_end=False).whole is None


@pytest.mark.parametrize(("exact_ms", "ms", "twins", "expected"), [
    (3.0, 2.0, (3.0, 3.0), 1.5),
    (3.0, 2.0, (2.8, 3.2), 1.5),
    (3.0, 2.0, (2.0, 3.0), None),
    (3.0, 4.0, (3.2, 2.8), 0.75),
    (3.0, 3.1, (3.2, 2.8), None),
    (7.2, 2.9, (3.8, 7.2), None),
    (3.0, 2.0, (2.4, 3.2), None),
])
def test_no_speed_where_two_runs_of_one_kernel_differ_by_more(exact_ms, ms, twins, expected):
    from distrattention.evaluation.result import speed

    assert speed(exact_ms, ms, twins) == expected


def test_progress(model, monkeypatch, capsys):
    said = []
    report(model, batches=[normal(1, 60, 64)] * 2, settings=SETTINGS, repeats=1, progress=said.append)
    assert "batch 2, attention call 1 (0)" in said and "the whole model with setting 2 of 2" in said
    report(model, normal(1, 60, 64), SETTINGS, repeats=1)
    assert capsys.readouterr().err == ""  # no terminal
    report(model, normal(1, 60, 64), SETTINGS, repeats=1, progress=True)
    assert "report: batch 1, attention call 2 (1), 0 s\n" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for patience, silent in ((1000, True), (-1, False)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setattr(progress, "PATIENCE", patience)
        report(model, normal(1, 60, 64), SETTINGS, repeats=1)
        written = sys.stderr.getvalue()
        assert (written == "") == silent
    assert "\r\x1b[Kreport: batch 1, attention call 1" in written and written.endswith("\r\x1b[K")


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1] += [""] * int(dict(attributes).get("colspan", 1))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += text


def test_notebooks_see_tables(model):
    named = nn.ModuleDict({"a<b": model[0]}).eval()
    found = report(named, lambda m: m["a<b"](normal(1, 60, 64)), SETTINGS, repeats=1)
    cells = Cells()
    cells.feed(found._repr_html_())
    assert cells.open == [] and len({len(row) for row in cells.rows[:4]}) == 1
    assert cells.rows[0][:2] == ["attention call", "Q"] and cells.rows[1][0] == "a<b"
    assert f"{found.layers[0].measurements[0].error:.3f}" in cells.rows[2]
    assert [row for row in cells.rows if row[0] == "energy G=2"]


def test_the_plot_has_a_point_a_layer_and_no_lines(tmp_path, model, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    found = report(model, normal(1, 60, 64), SETTINGS, repeats=1)
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path: drawn.append(figure))
    found.plot(tmp_path / "report.svg")
    (axes,) = drawn[0].axes
    assert axes.get_xlabel().startswith("speed") and axes.get_ylabel() == "error of O"
    points = [tuple(point) for group in axes.collections for point in group.get_offsets()]
    expected = [(m.speed or 1.0, m.error) for layer in found.layers for m in layer.measurements]
    torch.testing.assert_close(torch.tensor(sorted(points)), torch.tensor(sorted(expected)).double())
    assert len(axes.lines) == 1  # the speed of 1
    colours = {tuple(group.get_edgecolor()[0]) for group in axes.collections}
    assert len(colours) == len(SETTINGS)
    monkeypatch.undo()
    found.plot(tmp_path / "report.svg")
    assert "<svg" in (tmp_path / "report.svg").read_text()
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
