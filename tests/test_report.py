"""What a user looks at: the report as text, in a notebook, as JSON, as a plot; savings; the live line."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

import autofuse
from autofuse.figures import bars
from autofuse.patch import Site
from autofuse.plan import Plan, Row
from autofuse.report import Counters, Report, Tuning
from autofuse.savings import Savings
from autofuse.tables import BADGES, arrow, render, share


def sites(count, operation="layer_norm", provider="torch"):
    return [Site(f"h.{i}.ln", "torch.nn.LayerNorm", operation, provider) for i in range(count)]


def measured(name="loss", status="kept", **changes):
    row = Row(name, status, "fewer rows", sites(3), 1.5e-7, 800.0, 600.0, 0.25, (0.21, 0.29), 1670.0, 555.0)
    return replace(row, **changes)


SLOWER = measured(
    "compile", "rejected", reason="not faster", gain=-0.05, interval=(-0.08, -0.02), after_ms=630.0
)
DONE = Tuning("done", 40, 33.0, 1.0, 800.0, 400.0, (0.48, 0.52), 1024, 2000.0, 1000.0)


def make(*rows, tuning=DONE):
    return Report(list(rows), "this CPU", "GPT2", Counters(50, 50), [], True, tuning)


NINE = [
    measured("precision", gain=0.31, interval=(0.27, 0.35)),
    measured("norms", gain=0.016, interval=(0.004, 0.03)),
    measured("activations", "rejected", gain=-0.03, interval=(-0.05, -0.01)),
    measured("attention", "rejected", gain=0.002, interval=(-0.009, 0.014)),
    measured("loss", gain=0.13, interval=(0.1, 0.16)),
    measured("padding", gain=0.02, interval=(-0.1, 0.14)),
    measured("optimizer", gain=0.085),
    measured("compile", gain=0.07, interval=(0.05, 0.09)),
    measured("tf32", gain=0.015, interval=(0.01, 0.02)),
]


# --- text ----------------------------------------------------------------------------------------


def test_the_text_says_what_was_measured():
    text = render([measured(), SLOWER], "title", make(measured(), SLOWER).lines(), 160)
    kept, rejected = (next(x for x in text.splitlines() if f"│ {name}" in x) for name in ("loss", "compile"))
    for part in ("kept", "3/3", "fewer rows", "800 → 600", "25% (21 to 29)", "1.5e-07", "1,670 → 555"):
        assert part in kept
    for part in ("rejected", "not faster", "800 → 630", "-5% (-8 to -2)"):
        assert part in rejected
    assert "· LayerNorm h.0.ln … (3): layer_norm by torch" in text
    assert "0.800 s → 0.400 s per step: 2.00 times as fast as the loop was (1.92 to 2.08)." in text
    assert "1,280 → 2,560 tokens per second." in text
    assert "Peak memory of a step: 2,000 → 1,000 MB, 50% less." in text
    assert "Tuning took 40 steps of the training and 33.0 s, 1.0 s more" in text
    assert "won back after 2 steps" in text  # 1 s at 0.4 s per step is 2.5, to the even


def test_every_figure_comes_from_the_rows():
    """The rows and the tuning hold distinct figures; whatever number is printed is one of them."""
    row = measured(before_ms=731.0, after_ms=517.0, gain=0.29, interval=(0.23, 0.37), error=4.1e-7)
    row = replace(row, peak_before_mb=911.0, peak_after_mb=613.0, sites=sites(11))
    tuning = Tuning("done", 19, 47.0, 0.0, 733.0, 521.0)
    text = render([row], "", make(row, tuning=tuning).lines(), 200)
    own = {731, 517, 29, 23, 37, 4.1e-7, 911, 613, 11, 19, 47, 0.733, 0.521, 1.41, 50}
    own |= {95, 0}  # the interval's level; the first layer's name
    assert {float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)} == {float(x) for x in own}


def test_nothing_helped():
    report = make(SLOWER, tuning=replace(DONE, final_ms=None))
    assert "Nothing helped: the loop is as it was." in str(report)
    assert "times as fast" not in str(report) and "won back" not in str(report)
    assert "Tuning took 40 steps" in str(report)


def test_what_was_undone_had_helped():
    report = make(measured(status="rejected", reason="undone"))
    assert "Undone: the loop is as it was." in report.lines()
    assert report.savings(1).hours_saved < 0  # the tuning's price
    assert [bar.end for bar in bars(report.rows, report.tuning)] == [800.0, 600.0, 800.0]


@pytest.mark.parametrize(
    ("tuning", "expected"),
    [
        (Tuning(), "How much faster it is was not measured."),
        (Tuning("waiting"), "the tuner waits"),
        (Tuning("measuring", 12, 10.2), "Still measuring: 12 steps in 10.2 s so far."),
        (replace(DONE, extra_seconds=-2.0), "no more than these steps would have taken before."),
        (replace(DONE, final_ms=900.0), "0.89 times as fast"),
        (replace(DONE, baseline_ms=8.0, final_ms=4.0), "8.00 ms → 4.00 ms per step"),
        (replace(DONE, peak_after_mb=2200.0), "10% more"),
        (replace(DONE, notes=["dropout was on"]), "dropout was on"),
    ],
)
def test_the_sentences_of_the_tuner(tuning, expected):
    report = make(measured(), tuning=tuning)
    assert any(expected in line for line in report.lines()), report.lines()


def test_a_slower_loop_is_never_won_back():
    assert "won back" not in str(make(measured(), tuning=replace(DONE, final_ms=900.0)))


@pytest.mark.parametrize("rows", [[measured(), SLOWER], NINE, [Row("norms", "planned", "why")], []])
@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 100, 118, 200])
def test_no_width_breaks_it(rows, width):
    report = make(*rows)
    text = render(rows, "autofuse", report.lines(), width)
    assert max(map(len, text.splitlines())) <= max(width, 20)
    bare = re.sub(r"[\s│]", "", text)
    for row in rows:
        for part in (row.name, row.status, arrow(row.before_ms, row.after_ms), row.reason):
            assert part.replace(" ", "") in bare
    assert "…" not in bare.replace("h.0.ln…(3)", "")  # nothing was cut


def test_the_width_is_the_terminals(monkeypatch):
    report = make(*NINE)
    for columns in (60, 90, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert 40 < max(map(len, str(report).splitlines())) <= columns
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: __import__("os").terminal_size(fallback))
    assert max(map(len, str(report).splitlines())) <= 118


def test_rich_prints_it_in_colour():
    for thing in (make(measured()), Plan([measured()], "this CPU")):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
        console.print(thing)
        assert "\x1b[32mkept" in console.file.getvalue()


def test_brackets_are_not_markup():
    row = Row("norms[0]", "kept", "see x[bold]y[/bold] and [/]", [Site("a[0]", "b", "c[red]", ":smile:")])
    text = render([row], "Net[int] on [red]", ["a note with [/] and 'logits[0]'"], 150)
    for part in ("norms[0]", "x[bold]y[/bold] and [/]", "a[0]", "c[red]", ":smile:", "Net[int] on [red]"):
        assert part in text
    assert "a note with [/] and 'logits[0]'" in text


figure = st.none() | st.floats(-1e5, 1e5) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])
interval = st.none() | st.tuples(st.floats(-2, 1), st.floats(-2, 1))
any_row = st.builds(
    Row,
    name=st.text("abc[]<&:", max_size=12),
    status=st.sampled_from(["kept", "rejected", "skipped", "planned", "measuring"]),
    reason=st.text(max_size=80),
    sites=st.just([]) | st.just(sites(4)),
    error=figure,
    before_ms=figure,
    after_ms=figure,
    gain=figure,
    interval=interval,
    peak_before_mb=figure,
    peak_after_mb=figure,
)


@pytest.mark.filterwarnings("ignore:constrained_layout")  # figures that no clock ever gave
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(any_row, max_size=4),
    width=st.integers(1, 150),
    state=st.sampled_from(["not measured", "waiting", "measuring", "done"]),
    tuning=st.builds(Tuning, baseline_ms=figure, final_ms=figure, interval=interval, tokens_per_step=figure),
)
def test_whatever_is_known_it_prints(rows, width, state, tuning):
    report = make(*rows, tuning=replace(tuning, state=state))
    assert render(rows, "title", report.lines(), width)
    assert "<table" in report._repr_html_()


def test_rows_without_a_figure_print_no_figure():
    report = make(Row("norms", "kept"), Row("loss", "rejected"), tuning=Tuning())
    text = render(report.rows, "title", report.lines(), 118)
    assert not re.search(r"None|nan|%|ms per step|MB|error", text + report._repr_html_())


def test_formats():
    assert [arrow(1234.5, 1.0), arrow(99.94, 5.0), arrow(0.5, 0.25)] == [
        "1,234 → 1",
        "99.9 → 5.0",
        "0.500 → 0.250",
    ]
    assert share(0.25) == "25%" and share(0.004) == "0.4%" and share(-0.0001) == "0.0%"
    assert share(0.3, (0.299, 0.301)) == "30.0% (29.9 to 30.1)"


# --- notebook and JSON ---------------------------------------------------------------------------

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Checks that every element is closed in its order, and collects text and attributes."""

    def __init__(self, html):
        super().__init__()
        self.open, self.seen, self.words, self.styles = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.styles.append(dict(attrs).get("style") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_html_is_a_table_with_everything_in_it():
    page = Page(make(measured(), SLOWER)._repr_html_())
    assert page.seen.count("table") == 1 and page.seen.count("tr") == 3 and "pre" not in page.seen
    words = " ".join(page.words)
    for part in (
        "800 → 600",
        "25% (21 to 29)",
        "1.5e-07",
        "1,670 → 555",
        "2.00 times as fast",
        "layer_norm by torch",
    ):
        assert part in words
    assert any(BADGES["kept"] in style for style in page.styles)
    assert any(BADGES["rejected"] in style for style in page.styles)


def test_html_escapes():
    evil = '<script>alert("&")</script>'
    row = Row(evil, evil, evil, [Site(evil, evil, evil, evil)], gain=0.1, before_ms=1.0)
    report = Report([row], evil, evil, notes=[evil])
    html = report._repr_html_() + Plan([row], evil, evil, evil)._repr_html_()
    page = Page(html)
    assert "script" not in page.seen and evil in page.words


def test_html_needs_nothing_and_fits_any_theme():
    html = make(*NINE)._repr_html_()
    assert not re.search(r"<(style|link|script|img)\b|url\((?!#)", html)
    assert 'fill="black"' not in html and "#000000" not in html and "currentColor" in html


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("status", BADGES)
def test_white_can_be_read_on_a_status(status):
    assert 1.05 / (luminance(BADGES[status]) + 0.05) >= 4.5


def test_html_has_the_waterfall_only_where_something_was_measured():
    assert "svg" in Page(make(measured())._repr_html_()).seen
    assert "svg" not in Page(make(Row("norms", "kept"), tuning=Tuning())._repr_html_()).seen
    assert "svg" not in Page(make(Row("norms", "kept", gain=0.5), tuning=Tuning())._repr_html_()).seen


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.delitem(sys.modules, "autofuse.figures")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_matplotlib(no_matplotlib):
    page = Page(make(measured())._repr_html_())
    assert "table" in page.seen and "svg" not in page.seen
    with pytest.raises(ImportError, match=r"pip install autofuse\[plot\]"):
        make(measured()).plot()


def test_json_and_back():
    report = make(measured(), SLOWER, Row("norms", "skipped", "why"))
    data = json.loads(report.to_json())
    assert data["tuning"]["baseline_ms"] == 800.0 and data["tuning"]["speedup"] == 2.0
    assert data["rows"][0]["interval"] == [0.21, 0.29]
    again = Report.from_dict(data)
    assert again == report and again.to_dict() == report.to_dict() and str(again) == str(report)


# --- the plot ------------------------------------------------------------------------------------


def drawn(figure):
    """(left, right) of each bar, from the top."""
    found = [(p.get_x(), p.get_x() + p.get_width()) for p in figure.axes[0].patches]
    return [tuple(sorted(ends)) for ends in found]


def test_the_waterfall_goes_from_before_to_now():
    rows = [measured("loss", gain=0.25), SLOWER, measured("norms", gain=0.5, interval=None)]
    figure = make(*rows, tuning=replace(DONE, final_ms=300.0)).plot()
    assert isinstance(figure, Figure)
    expected = [(0, 800), (600, 800), (600, 630), (300, 600), (0, 300)]
    assert [pytest.approx(ends) for ends in expected] == drawn(figure)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "before",
        "loss",
        "compile",
        "norms",
        "now",
    ]
    hollow = [patch.get_facecolor()[3] == 0 for patch in axes.patches]
    assert hollow == [False, False, True, False, False]
    words = [text.get_text() for text in axes.texts]
    assert words == ["800 ms", "25% (21 to 29)", "-5% (-8 to -2), not kept", "50%", "300 ms"]
    errors = [c.get_segments()[0][:, 0] for c in axes.collections]
    assert [pytest.approx(sorted(x)) for x in errors] == [(800 * 0.71, 800 * 0.79), (600 * 1.02, 600 * 1.08)]


def test_dollars_in_a_name_are_no_formula():
    report = make(measured("$\\frac$"))
    report.model = "Net$_{$"
    FigureCanvasAgg(report.plot()).draw()


def test_the_waterfall_has_the_order_of_the_tuner():
    report = make(measured("a"), measured("b"), tuning=replace(DONE, order=["b", "a"]))
    assert [bar.label for bar in bars(report.rows, report.tuning)][1:3] == ["b", "a"]


def test_what_the_parts_do_not_explain_is_a_bar_of_its_own():
    *_, rest, now = bars([measured(gain=0.25)], DONE)
    assert (rest.kind, rest.start, rest.end, rest.text) == ("rest", 600.0, 400.0, "33%")
    assert (now.start, now.end) == (0.0, 400.0)
    assert [b.kind for b in bars([measured(gain=0.25)], replace(DONE, final_ms=601.0))] == [
        "before",
        "saved",
        "now",
    ]


def test_while_measuring_now_is_what_was_found_so_far():
    assert bars([measured(gain=0.25)], Tuning("measuring", baseline_ms=800.0))[-1].end == 600.0
    assert bars([measured(gain=0.25)], Tuning("measuring"))[0].end == 800.0  # the row's own


LONG = [
    measured(f"patch {i} of a long name", "rejected", gain=-0.123, interval=(-1.456, 0.9)) for i in range(3)
]


@pytest.mark.parametrize(
    "rows", [[measured()], [SLOWER], NINE, [SLOWER] * 9, LONG], ids=["one", "bad", "nine", "slow", "long"]
)
def test_no_words_of_the_plot_overlap_or_are_cut(rows):
    figure = make(*rows).plot()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    words = [*axes.texts, *axes.get_yticklabels(), *figure.texts, axes.xaxis.label]
    words += [tick for tick in axes.get_xticklabels() if tick.get_position()[0] <= axes.get_xlim()[1]]
    boxes = [word.get_window_extent(canvas.get_renderer()) for word in words if word.get_text()]
    assert len(boxes) >= 2 * len(rows) + 6
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    for text, patch in zip(axes.texts, axes.patches, strict=True):
        bar = patch.get_window_extent(canvas.get_renderer())
        assert text.get_window_extent(canvas.get_renderer()).x0 > bar.x1


def test_plot_saves_and_leaves_no_figure_open(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    figure = make(measured()).plot(tmp_path / "waterfall.png")
    make(measured()).plot(tmp_path / "waterfall.svg")
    assert (tmp_path / "waterfall.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "waterfall.svg").read_text()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == before


@pytest.mark.parametrize(
    ("state", "message"), [("waiting", "train some more steps first"), ("not measured", "measure=True")]
)
def test_nothing_measured_is_said(state, message):
    report = make(Row("norms", "kept"), tuning=Tuning(state))
    with pytest.raises(RuntimeError, match=message):
        report.plot()
    with pytest.raises(RuntimeError, match=message):
        report.savings(24)


# --- savings -------------------------------------------------------------------------------------

FREE = replace(DONE, steps=0, extra_seconds=0.0)


def test_savings():
    saved = make(measured(), tuning=FREE).savings(
        hours=100, price_per_hour=3, kilowatts=0.7, grams_co2_per_kwh=300
    )
    assert saved.hours == 100 and saved.hours_saved == 50 and saved.money_saved == 150
    assert saved.kwh_saved == pytest.approx(35) and saved.kg_co2_saved == pytest.approx(10.5)
    assert saved.interval == pytest.approx((48, 52))
    assert str(saved) == (
        "Saves 50.00 of 100.00 hours (48.00 to 52.00), 150.00 in money, 35.00 kWh and 10.50 kg of CO2."
    )
    assert saved.to_dict()["hours_saved"] == 50
    with pytest.raises(AttributeError):
        saved.hours_saved = 1


def test_what_was_not_given_is_not_made_up():
    saved = make(measured(), tuning=replace(FREE, interval=None)).savings(24)
    assert saved == Savings(24.0, 12.0)
    assert str(saved) == "Saves 12.00 of 24.00 hours."


def test_tuning_is_paid_for():
    """4,500 steps of 0.8 s are an hour; 40 were tuned in 33 s; the others take 0.4 s."""
    saved = make(measured()).savings(1)
    assert saved.hours_saved * 3600 == pytest.approx(4500 * 0.8 - (33 + 4460 * 0.4))
    assert make(measured()).savings(0).hours_saved == pytest.approx(-1 / 3600)


def test_savings_where_nothing_helped():
    saved = make(SLOWER, tuning=replace(DONE, final_ms=None)).savings(10)
    assert saved.hours_saved == pytest.approx(-1 / 3600) and saved.interval is None
    assert "tuning has cost more" in str(saved)


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, math.inf, "24", True])
@pytest.mark.parametrize("name", ["hours", "price_per_hour", "kilowatts", "grams_co2_per_kwh"])
def test_nonsense_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*expected a finite number that is not negative"):
        make(measured()).savings(**{"hours": 24, name: value})


def test_co2_needs_kilowatts():
    with pytest.raises(ValueError, match="give kilowatts too"):
        make(measured()).savings(24, grams_co2_per_kwh=300)


def test_the_public_names():
    assert autofuse.Report is Report and autofuse.Plan is Plan
