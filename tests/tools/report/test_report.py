"""`fusion-trace report`: the page, in figures and in a browser without a screen."""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from fusion_rt.tracing.format import NOBODY, Kind
from fusion_trace.analyse import critical_path, diff, stragglers
from fusion_trace.analyse.overlap import PARTS, by_step, partitions
from fusion_trace.analyse.recorded_steps import understand
from fusion_trace.analyse.whatif import FRAMED, Change, answer
from fusion_trace.cli import app
from fusion_trace.export import picture
from fusion_trace.read import job
from fusion_trace.read.choice import ChoiceError, StepRange
from fusion_trace.report import charts, figures, html_page, timeline
from fusion_trace.report.charts import plain
from fusion_trace.report.curves import CHANGES, MOST_ACTIONS, RATES
from fusion_trace.report.figures import MOST_COLUMNS, Report, analyse
from fusion_trace.report.findings import findings
from fusion_trace.report.sections import sections
from fusion_trace.report.wording import duration, interval
from tests.diagnosis import generator
from tests.tools.synthetic import MS, Job, Straggler, Tape, cheap, simulate

plotly = pytest.importorskip("plotly", reason="reports need plotly, which is in the extra `trace`")
SECTIONS = ("overview", "ranks", "overlap", "stragglers", "links", "critical-path", "timeline", "usage", "whatif")
HOSTILE = "<img src=x onerror=alert(1)>@@PLOTLY@@</script>"
JOB = Job(
    nodes=4, steps=200, buckets=2, bandwidth=120e6, bucket_nbytes=1 << 20, chunk_nbytes=1 << 18, skews={1: 7 * MS},
    straggler=Straggler("compute", 3, factor=1.6, steps=range(60, 140)),
)  # fmt: skip
SMALL = replace(JOB, steps=14, straggler=None, bandwidth=2e9)


@dataclass
class Made:
    """A trace, what was found in it, and its page. `charts`: by name, as they are in the page."""

    trace: job.JobTrace
    report: Report
    text: str
    charts: dict[str, Any]


def make(folder: Path, what: Job) -> Made:
    truth = simulate(what)
    for tape in truth.tapes.values():
        tape.host = HOSTILE if tape.node == 3 else tape.host
        tape.rows = [(*row[:3], HOSTILE if row[3] == "loss" else row[3], *row[4:]) for row in tape.rows]
        _use(tape)
    truth.write(folder)
    trace = job.load([str(folder)], "/nowhere")
    report = analyse(trace, measure=cheap)
    text = html_page.render(trace.job, sections(report), html_page.plotly_js())
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    return Made(trace, report, text, json.loads(found[1]))


def _use(tape: Tape) -> None:
    """Half a processor of workers, and memory that grows from 1 GiB by 1 MiB ten times a second."""
    ends = [row[0] for row in tape.rows if row[6] == Kind.STEP_END]
    tape.rows = [
        (time, 1 + (time - ends[0]) // 2 if kind == Kind.STEP_END else value, clock, name, plan, extra, kind, peer)
        for time, value, clock, name, plan, extra, kind, peer in tape.rows
    ]
    for number, time in enumerate(range(min(row[0] for row in tape.rows), max(row[0] for row in tape.rows), 100 * MS)):
        tape.rows.append((time, (1 << 30) + (number << 20), 0, "", 0, 0, Kind.MEMORY, NOBODY))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """200 steps of 4 ranks."""
    return make(tmp_path_factory.mktemp("rings"), JOB)


def test_all_sections_are_there_and_the_page_is_small_enough(made: Made) -> None:
    assert re.findall(r'<section id="([^"]*)">', made.text) == list(SECTIONS)
    assert len(made.text.encode()) <= 5e6
    assert {name.rpartition("-")[0] for name in made.charts} == set(SECTIONS[1:])
    for name in made.charts:
        assert f'id="{name}"' in made.text


class Loaded(HTMLParser):
    """What a page's elements refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]


def test_a_page_needs_nothing_from_elsewhere(made: Made) -> None:
    from plotly.offline import get_plotlyjs

    assert Loaded(made.text).found == [f"#{name}" for name in SECTIONS]
    _, _, rest = made.text.partition('<script type="application/json"')
    packed = re.search(r'id="plotly">([^<]*)<', rest)
    assert packed is not None
    assert gzip.decompress(b64decode(packed[1])).decode() == get_plotlyjs()
    assert "http" not in rest.replace(packed[1], "")


def test_charts_are_what_plotly_knows(made: Made) -> None:
    from plotly.graph_objects import Figure

    for chart in made.charts.values():
        Figure(chart)  # raises for what it does not know


def test_steps_are_those_of_the_analysis_and_their_parts_add_up(made: Made) -> None:
    found = partitions(made.trace)
    bars, single = made.charts["ranks-0"]["data"], made.charts["ranks-1"]["data"]
    assert [bar["name"] for bar in bars] == list(PARTS)
    for rank in range(4):
        its = [part for part in found if part.rank == rank]
        for place, name in enumerate(PARTS):
            assert bars[place]["x"][rank] == pytest.approx(fmean(getattr(part, name) for part in its) / 1e6, abs=1e-4)
            ours = single[rank * len(PARTS) + place]
            assert ours["x"] == [part.number for part in its]
            assert ours["y"] == pytest.approx([getattr(part, name) / 1e6 for part in its], abs=1e-4)
        mean = fmean(part.ns for part in its)
        assert sum(bar["x"][rank] for bar in bars) == pytest.approx(mean / 1e6, abs=1e-3)
        assert f"<td>rank {rank}</td><td class=n>{len(its)}</td><td class=n>{duration(mean)}</td>" in made.text


def test_a_single_step_is_seen_in_the_histogram_beside_thousands() -> None:
    few, many = (charts.length_bars(((0.0, 1e6, 2e6), counts)) for counts in ((1, 5), (1, 5000)))
    assert "type" not in few["layout"]["yaxis"]
    axis = many["layout"]["yaxis"]
    assert axis["type"] == "log"
    assert 10 ** axis["range"][0] < 1
    assert 10 ** axis["range"][1] > 5000


def test_links_say_no_more_than_clocks_tell(made: Made) -> None:
    bandwidths, latencies = (made.charts[f"links-{place}"]["data"][0] for place in (1, 2))
    for link in made.report.links:
        assert link.latency is not None
        text, us = (latencies[name][link.source][link.target] for name in ("text", "z"))
        error = link.clock_error / 1e3
        assert text == (f"below<br>{error:,.0f}" if link.latency * 1e6 < error else f"{link.latency * 1e6:,.0f}")
        assert us >= error or us == pytest.approx(link.latency * 1e6)
        told = bandwidths["text"][link.source][link.target].replace("<br>", " ")
        assert f"<td class=n>{told} Mbit/s</td>" in made.text


def test_the_straggler_is_named_and_seen(made: Made) -> None:
    (found,) = stragglers.find(made.trace)
    assert (found.cause, found.rank, found.steps) == ("compute", 3, tuple(range(60, 140)))
    told = html.unescape(made.text)
    assert f"Rank 3 (host {HOSTILE}) keeps the others waiting: compute (forward and backward), " in told
    assert f"+{duration(found.extra)} in 80 of 199 steps; {duration(found.lost)} lost" in told
    rows = made.charts["stragglers-0"]["data"][0]["z"]
    slow = [number for number, ms in zip(made.charts["stragglers-0"]["data"][0]["x"], rows[3], strict=True) if ms > 5]
    assert slow == list(range(60, 140))


def test_links_are_in_the_matrix(made: Made) -> None:
    nbytes, bandwidth, _ = (made.charts[f"links-{place}"]["data"][0]["z"] for place in range(3))
    for source in range(4):
        for target in range(4):
            used = target == (source + 1) % 4  # the synthetic job's ring
            assert (nbytes[source][target] is not None) is used
            if used:
                # In 199 steps: 2 (n - 1) pieces of two buckets, and the loss.
                sent = 199 * 6 * (2 * (1 << 20) // 4 + 4)
                assert nbytes[source][target] == pytest.approx(sent / 2**20, rel=0.01)
                assert bandwidth[source][target] == pytest.approx(120e6 * 8e-6, rel=0.1)


def test_the_path_of_a_step_of_median_length_is_beside_the_longest_and_the_sum(made: Made) -> None:
    path, longest, paths = made.report.path, made.report.longest, made.report.paths
    assert path is not None
    assert longest is not None
    number = path.step.number
    assert (path,) == critical_path.find(made.trace, StepRange(number, number + 1))
    lengths = sorted(fmean(part.ns for part in column) for column in zip(*_by_rank(made), strict=True))
    of_steps = {
        step: fmean(part.ns for part in partitions(made.trace, StepRange(step, step + 1)))
        for step in (number, longest.step.number)
    }
    assert list(of_steps.values()) == [lengths[99], lengths[-1]]
    for place, each in enumerate((path, longest)):
        bars = made.charts[f"critical-path-{place}"]["data"]
        assert sum(sum(bar["x"]) for bar in bars) == pytest.approx(each.step.ns / 1e6, abs=0.01)
    assert paths == critical_path.find(made.trace)  # all 199 steps: there is room for so many
    mean = fmean(each.ns for each in paths)
    of_each = "".join(
        f"<td class=n>{told}</td>" for told in (duration(mean), "100%", duration(path.ns), duration(longest.ns))
    )
    assert f"<td>all of it</td><td></td>{of_each}" in made.text


def test_of_many_steps_some_paths_are_summed_from_begin_to_end() -> None:
    assert figures.evenly([3, 5, 8], 4) == [3, 5, 8]
    some = figures.evenly(range(1, 1001), 240)
    assert len(some) == len(set(some)) == 240
    assert some[0] == 1
    assert some[-1] > 990
    assert {b - a for a, b in pairwise(some)} == {4, 5}


def test_processors_and_memory_are_drawn(made: Made) -> None:
    busy, memory = made.charts["usage-0"]["data"], made.charts["usage-1"]["data"]
    assert "usage-2" not in made.charts  # nothing on GPUs
    assert [line["name"] for line in busy] == [f"rank {rank}" for rank in range(4)]
    assert all(value == pytest.approx(0.5, rel=1e-3) for line in busy for value in line["y"])
    assert [line["line"]["dash"] for line in memory] == ["solid"] * 4 + ["dot"] * 4
    assert memory[7]["name"] == plain(f"daemon of {HOSTILE}")
    for line in memory:
        assert line["y"] == sorted(line["y"])
        assert 1 <= line["y"][0] < line["y"][-1] < 1.1
    assert "<td>rank 0</td><td class=n>0.50</td><td class=n>0.50</td><td class=n>1.00 GiB</td>" in made.text


def _by_rank(made: Made) -> list[list[Any]]:
    found = partitions(made.trace)
    return [[part for part in found if part.rank == rank] for rank in range(4)]


def test_the_timeline_has_a_typical_step_and_the_slowest_with_all_that_merge_would_draw(made: Made) -> None:
    drawn, path = made.report.drawn, made.report.path
    assert path is not None
    lengths = {number: max(part.ns for part in its) for number, its in by_step(partitions(made.trace)).items()}
    slowest = sorted(lengths, key=lambda number: -lengths[number])[:3]
    assert [step.number for step in drawn] == list(dict.fromkeys([path.step.number, *slowest]))
    step = drawn[0]
    parts = [part for part in partitions(made.trace) if part.number == step.number]
    begin = min(part.begin for part in parts)
    assert step.ns == max(part.end for part in parts) - begin
    assert step.ns > step.longest == lengths[step.number]  # ranks do not begin at once
    expected = {
        (track.name, each.name, max(each.begin - begin, 0), min(each.end - begin, step.ns))
        for process in picture.draw(made.trace).processes
        if process.name.startswith("rank 3 ")
        for track in process.tracks
        if track.name.partition(" (")[0] in ("script", "waits", "memory", "handed over")
        for each in track.slices
        if each.end > begin and each.begin < begin + step.ns
    }
    found = {(bar.track, bar.what, bar.begin, bar.begin + bar.ns) for bar in step.bars if bar.process == "rank 3"}
    # Rows of what overlaps are numbered by what is there, which is less in a step than in the job.
    assert {each[1:] for each in found} == {each[1:] for each in expected}
    assert len(found) == len(expected) > 5
    assert {bar.kind for bar in step.bars} >= {"forward", "backward", "reduce", "operation", "sending", "receiving"}
    chart = made.charts["timeline-0"]
    shown = [trace for trace in chart["data"] if trace["visible"]]
    assert sum(len(trace["x"]) for trace in shown) == len(step.bars)
    buttons = chart["layout"]["updatemenus"][0]["buttons"]
    assert [button["label"] for button in buttons] == [
        f"step {each.number}: {duration(lengths[each.number])}, {each.why}" for each in drawn
    ]


def test_the_steps_of_the_timeline_can_be_chosen(tmp_path: Path) -> None:
    simulate(SMALL).write(tmp_path)
    trace = job.load([str(tmp_path)], "/nowhere")
    assert [step.number for step in analyse(trace, measure=cheap, drawn=StepRange(3, 6)).drawn] == [3, 4, 5]
    with pytest.raises(ChoiceError, match="--timeline: the trace has steps 1 to 13, and none of these"):
        analyse(trace, measure=cheap, drawn=StepRange(40, 41))
    shown = CliRunner().invoke(
        app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html"), "--steps", "2:", "--timeline", "7"]
    )
    assert shown.exit_code == 0, shown.output
    assert '"steps":[7]' in (tmp_path / "r.html").read_text()


def test_a_step_with_very_many_activities_keeps_the_longest(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_BARS", 10)
    whole = made.report.drawn[0]
    parts = partitions(made.trace)
    (short,) = timeline.find(made.trace, parts, StepRange(whole.number, whole.number + 1), 0)
    assert (len(short.bars), short.left_out) == (10, len(whole.bars) - 10)
    assert sorted(bar.ns for bar in short.bars) == sorted(bar.ns for bar in whole.bars)[-10:]


def test_curves_are_what_whatif_says_with_their_ranges(made: Made) -> None:
    curves = made.report.curves
    recorded = understand(made.trace, most_actions=MOST_ACTIONS)
    drawn = made.charts["whatif-0"]["data"]
    lines = [line for line in drawn if line["mode"] != "lines"]
    assert [line["name"] for line in lines] == [*(title for title, _ in CHANGES), "recorded"]
    told = answer(recorded, Change(), cheap)
    for place, (_, change) in enumerate(CHANGES):
        band = drawn[2 * place]
        assert band["x"] == [rate / 1e6 for rate in (*RATES, *RATES[::-1])]
        for at in (0, len(RATES) - 1):
            expected = answer(recorded, replace(change, rate=RATES[at]), cheap).changed
            figure = curves.curves[place].steps[at]
            assert figure == expected.step
            assert f"<td class=n>{interval(figure)}</td>" in made.text
            assert lines[place]["y"][at] == pytest.approx(figure.value * 1e3, abs=1e-4)
            assert lines[place]["text"][at] == interval(figure)
            assert band["y"][at] == pytest.approx(figure.low * 1e3, abs=1e-4)
            assert band["y"][-1 - at] == pytest.approx(figure.high * 1e3, abs=1e-4)
    assert (curves.error, curves.step) == (told.error, told.recorded.step)
    assert lines[0]["y"] == sorted(lines[0]["y"], reverse=True)
    assert lines[3]["y"][0] < lines[2]["y"][0] < lines[0]["y"][0]  # topk, fp16, as recorded
    assert curves.rate == pytest.approx(120e6 * 8 * FRAMED, rel=0.1)
    assert curves.told == curves.curves[0].steps[RATES.index(curves.faster)]


def test_names_are_texts_and_nothing_else(made: Made) -> None:
    assert "<img" not in made.text
    assert made.text.count("</script>") == 3
    assert html.escape(HOSTILE) in made.text
    assert plain(HOSTILE) in json.dumps(made.charts, ensure_ascii=False)  # as plotly takes texts


LOOK_CLOSER = """
const range = () => document.getElementById("timeline-0").layout.xaxis.range.slice();
const later = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  while (!document.body.dataset.drawn) await later(20);
  const ranges = [], chart = document.getElementById("timeline-0");
  document.querySelector(".zoom [data-do=in]").click();
  await later(50);
  ranges.push(range());
  chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  await later(50);
  ranges.push(range());
  location.hash = "step-" + chart.layout.meta.steps[1];
  await later(200);
  ranges.push(range());
  const area = chart.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
  const finger = (place, identifier) => new Touch(
    { identifier, target: area, clientX: box.left + place * box.width, clientY: box.top + 5 }
  );
  const touch = (name, ...places) => area.dispatchEvent(
    new TouchEvent(name, { bubbles: true, cancelable: true, touches: places.map(finger) })
  );
  touch("touchstart", 0.4, 0.6);
  touch("touchmove", 0.3, 0.7);
  await later(50);
  touch("touchend", 0.3);
  ranges.push(range());
  touch("touchmove", 0.1);
  await later(50);
  touch("touchend");
  ranges.push(range());
  document.body.dataset.ranges = JSON.stringify(ranges);
})();
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the command chromium (Debian's package)")
def test_the_page_in_a_browser(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(made.text.replace("</body>", f"<script>{LOOK_CLOSER}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path}/user", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "source: chrome://" not in line]
    assert told == []  # what pages of the browser's own have to say, on a busy machine, is not ours
    assert f'data-drawn="{len(made.charts)}"' in done.stdout
    assert done.stdout.count("main-svg") >= len(made.charts)
    assert "<img" not in done.stdout.partition("<body")[2].partition('<script type="application/json"')[0]
    assert "There are no charts" not in done.stdout.partition("<script")[0]
    words = re.sub(r"<[^>]*>", " ", done.stdout.partition("<main>")[2].partition("</main>")[0])
    for axis in (
        "mean of a step, ms",
        "hidden, %",
        "ms longer",
        "payload, MiB",
        "ms of step ",
        "ms since the step began",
        "seconds since the first record",
        "memory, GiB",
        "a step, ms",
    ):
        assert axis in words
    assert "without stragglers" in words  # a legend
    first, second = made.report.drawn[0].ns / 1e6, made.report.drawn[1].ns / 1e6
    ranges = json.loads(html.unescape(re.search(r'data-ranges="([^"]*)"', done.stdout)[1]))  # type: ignore[index]
    assert ranges[0] == pytest.approx([first / 4, first * 3 / 4], abs=1e-4)  # closer, by the button
    assert ranges[1] == pytest.approx([first * 3 / 8, first * 7 / 8], abs=1e-4)  # later, by a key
    assert ranges[2] == pytest.approx([0, second], abs=1e-4)  # another step, by the address
    assert ranges[3] == pytest.approx([second / 4, second * 3 / 4], abs=1e-4)  # closer, by two fingers
    assert ranges[4] == pytest.approx([second * 0.35, second * 0.85], abs=1e-4)  # later, by the one that is left


def test_the_command_writes_a_page_and_says_what_it_found(tmp_path: Path) -> None:
    simulate(SMALL).write(tmp_path)
    out = tmp_path / "r.html"
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(out), "--steps", "2:", "--json"])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.output)
    assert (document["job"], document["file"], document["bytes"]) == ("synthetic", str(out), out.stat().st_size)
    assert document["findings"]
    assert "Step times" in out.read_text()
    assert ">2-13</td>" in out.read_text()


def test_jobs_are_shown_beside_each_other(tmp_path: Path) -> None:
    this = replace(SMALL, nodes=2, steps=40)
    jobs = {
        "now": this,
        "slow": replace(this, forward=16 * MS, name="slow"),
        "same": replace(this, seed=3, name="same"),
    }
    for name, what in jobs.items():
        simulate(what).write(_folder(tmp_path, name))
    out = tmp_path / "r.html"
    beside = [word for name in ("slow", "same") for word in ("--beside", str(tmp_path / name))]
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "now"), "-o", str(out), *beside])
    assert shown.exit_code == 0, shown.output
    text = out.read_text()
    assert re.findall(r'<section id="([^"]*)">', text) == [*SECTIONS[:2], "beside", *SECTIONS[2:]]
    assert "From job slow to job synthetic: steps are faster by " in text
    assert "From job same to job synthetic: no change." in text
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    drawn = json.loads(found[1])
    for place, name in enumerate(jobs):
        its = diff.samples(job.load([str(tmp_path / name)], "/nowhere")).measures
        line, lengths = (drawn[f"beside-{chart}"]["data"][place] for chart in (0, 1))
        assert line["y"] == [charts.ms(ns) for ns in its["step"].tolist()]
        assert (lengths["x"][0], lengths["x"][-1]) == (
            charts.ms(min(its["step"].tolist())),
            charts.ms(max(its["step"].tolist())),
        )
        parts = [bar["x"][place] for bar in drawn["beside-2"]["data"]]
        assert sum(parts) == pytest.approx(its["step"].mean() / 1e6, abs=1e-3)
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "now"), *["--beside", "other"] * 9])
    assert "at most 8 jobs are shown beside another" in str(shown.exception)


def test_without_links_or_steps_sections_say_so(tmp_path: Path) -> None:
    alone = make(_folder(tmp_path, "alone"), replace(SMALL, nodes=1, ranks_per_node=2))
    assert "Left out: all ranks are on one host" in alone.text
    assert "There is nothing to show: all ranks are on one node" in alone.text
    short = make(_folder(tmp_path, "short"), replace(SMALL, steps=1))
    assert re.findall(r'<section id="([^"]*)">', short.text) == ["overview"]
    assert findings(short.report)[0].what.startswith("No rank has a whole training step")


def test_many_steps_are_drawn_as_means(tmp_path: Path) -> None:
    many = replace(SMALL, nodes=1, ranks_per_node=1, buckets=1, tensors=1, loss=False, steps=2 * MOST_COLUMNS + 10)
    report = make(tmp_path, many).report
    assert len(report.columns) <= MOST_COLUMNS
    assert sum(column.last - column.first + 1 for column in report.columns) == many.steps - 1
    found = [part.ns for part in partitions(report.trace)]
    assert sum(report.columns[0].parts[0].values()) == pytest.approx(fmean(found[:3]))


def test_a_rare_spike_stays_visible_among_many_steps() -> None:
    steps, slow = 2 * MOST_COLUMNS, 301
    when = tuple(float(step == slow) for step in range(steps))
    shape = generator.Shape(nodes=3, steps=steps, buckets=1)
    trace = generator.make(shape, generator.Fault("forward", when, frozenset({1}), more=200 * MS)).trace
    parts = partitions(trace)
    columns, (edges, counts) = figures.columns_of(parts), figures.lengths_of(parts)
    (column,) = (each for each in columns if each.first <= slow <= each.last)
    longest = max((part for part in parts if part.rank == 1), key=lambda part: part.ns)
    assert column.longest[1][:2] == (slow, longest.ns) == (longest.number, longest.ns)
    assert column.longest[1][2] < 0.3 * longest.ns
    assert column.slower[1] > 180 * MS
    drawn = [chart for chart in charts.step_bars(columns, [1])["data"] if chart["name"] == "longest of these"]
    assert max(drawn[0]["y"]) == charts.ms(longest.ns)
    assert sum(counts) == len(parts)
    assert counts[-1] >= 1
    assert edges[-1] == max(part.ns for part in parts)


def test_what_is_missing_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(SMALL).write(tmp_path)
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "r.html")])
    assert "r.html cannot be written: No such file or directory" in str(shown.exception)
    monkeypatch.setitem(sys.modules, "plotly", None)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "pip install plotly" in str(shown.exception)


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path
