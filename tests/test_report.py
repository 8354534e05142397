"""`kernreg report`: the numbers of the page, its safety and form, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tune_program import tool

from kernreg import Backend, Kernel, Registry, cli, dispatch, ops, policy, registry
from kernreg.report.chart import SLOWDOWNS, draw
from kernreg.report.collect import collect
from kernreg.report.data import Report, RowReport
from kernreg.report.page import microseconds, page
from kernreg.tuning import journal
from kernreg.tuning.journal import JournalError, Result
from kernreg.tuning.prices import Prices, prices

ROOT = Path(__file__).resolve().parent.parent
RUN, LATER = "2026-11-30T10:00:00Z", "2026-12-01T10:00:00Z"
H200 = {"id": "nvidia-h200", "name": "NVIDIA H200", "arch": "sm_90", "sms": 132}
SMALL, BIG, OTHER = "fast.small[BV=16]", "fast.big", "fast.other"
WORK = 42_700_000  # bytes for each row of a call: 10 us at the bandwidth of a copy

POLICY = """\
schema: 1
devices:
  nvidia-h200: {name: "NVIDIA H200", arch: "sm_90", sms: 132}
ops:
  gdn_ring_commit:
    - when: {device: nvidia-h200, ring: 16}
      class: k7f3a91c2
      classes: {k7f3a91c2: ["fast.small[BV=16]", "fast.big"], k0bb31e55: ["fast.other"]}
      batch:
        - {upto: 4, use: fast.small, us: 30.0, next: 33.0, runner_up: "fast.big", at: {batch: 4}}
        - {upto: rest, use: fast.big, us: 320.0, next: 304.0, runner_up: "fast.other", at: {batch: 16}}
    - otherwise: {use: torch.reference}
"""

# microseconds by variant, at batches 1, 4 and 16
TIMES = {SMALL: (20.0, 60.0, 480.0), BIG: (40.0, 80.0, 320.0), OTHER: (25.0, 66.0, 304.0)}
BATCHES = (1, 4, 16)


@pytest.fixture
def known() -> Registry:
    made = Registry()
    made.add_op(ops.gdn_ring_commit)
    small = Kernel("gdn_ring_commit", "fast.small", "textwrap:fill", {"BV": (16, 32)}, {"BV": 16})
    others = [Kernel("gdn_ring_commit", f"fast.{name}", "bisect:bisect") for name in ("big", "other")]
    made.add(Backend("fast", (small, *others)))
    made.add(Backend("torch", (Kernel("gdn_ring_commit", "torch.reference", "heapq:merge"),)))
    return made


def line(known: Registry, variant: str, us: float, batch: int = 1, **more: Any) -> Result:
    """One full timing, with a spread of 2 % to either side."""
    use = variant.partition("[")[0]
    made = Result(
        run=RUN,
        op="gdn_ring_commit",
        row={"ring": 16},
        facts={"heads": "48/16"},
        batch=batch,
        load={"layers": 48, "history": 4},
        use=use,
        config={"BV": 16} if use == "fast.small" else {},
        digest=known.source_digest(known.kernel("gdn_ring_commit", use))[:16],
        stage="full",
        us=(us * 0.98, us, us * 1.02),
        work=batch * WORK,
        device=H200,
        software={"driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"},
        conditions={"sm_mhz": 1980, "throttle": [], "foreign": 0},
        command="tools/tune.py all",
        date=RUN,
    )
    return replace(made, **more)


def failed(known: Registry, variant: str, reason: str, **more: Any) -> Result:
    made = line(known, variant, 1.0, stage="failed", batch=0, load={}, step="bits", reason=reason, **more)
    return replace(made, us=None, work=0)


@pytest.fixture
def results(known: Registry) -> list[Result]:
    """Three variants, two loads; in the second load only batch 4 was timed, and everything takes twice as long."""
    made = [line(known, v, us, batch) for v, times in TIMES.items() for us, batch in zip(times, BATCHES, strict=True)]
    more = {"layers": 48, "history": 16}
    return [*made, *(line(known, v, times[1] * 2, 4, load=more) for v, times in TIMES.items())]


def report_of(results: Sequence[Result], known: Registry, text: str = POLICY) -> Report:
    return collect(results, policy.parse(text, "dispatch.yaml"), known, ["a.jsonl"])


def row_of(results: Sequence[Result], known: Registry, text: str = POLICY) -> RowReport:
    (place,) = report_of(results, known, text).places
    (row,) = place.rows
    return row


def worst(price: Prices) -> float | None:
    return price.worst and price.worst.regret


class TestNumbers:
    def test_what_the_policy_takes_comes_first_and_has_its_batches_and_class(
        self, results: list[Result], known: Registry
    ) -> None:
        row = row_of(results, known)
        assert [(s.letter, s.variant, s.numerics, s.serves) for s in row.standings] == [
            ("A", SMALL, "k7f3a91c2", ("batch 1-4",)),
            ("B", BIG, "k7f3a91c2", ("batch 5 and more",)),
            ("C", OTHER, "k0bb31e55", ()),
        ]
        assert [(s.variant, s.span, s.us, s.stale) for s in row.servings] == [
            (SMALL, "batch 1-4", 30.0, ()),
            (BIG, "batch 5 and more", 320.0, ()),
        ]

    def test_the_price_is_over_the_fastest_of_each_cell(self, results: list[Result], known: Registry) -> None:
        price = row_of(results, known).price
        assert sorted(one.regret for one in price.priced) == [1.0, 1.0, 1.0, 320 / 304]
        assert (price.cells, price.median) == (4, 1.0)
        assert str(price.worst) == f"ring=16 heads=48/16 batch=16 layers=48 history=4: {BIG} against {OTHER}"

    def test_a_choice_that_was_not_timed_has_no_price(self, results: list[Result], known: Registry) -> None:
        row = row_of([r for r in results if r.use != "fast.big"], known)
        assert (len(row.price.priced), row.price.cells) == (3, 4)
        alone = row_of([r for r in results if r.use == "fast.other"], known)
        assert (alone.price.median, alone.price.worst) == (None, None)

    def test_charts_share_what_is_common_and_order_what_is_not(self, results: list[Result], known: Registry) -> None:
        row = row_of(results, known)
        assert row.common == {"heads": "48/16", "layers": 48}
        assert [load.facts for load in row.loads] == [{"history": 4}, {"history": 16}]

    def test_the_limit_is_the_bytes_over_the_bandwidth(self, results: list[Result], known: Registry) -> None:
        load = row_of(results, known).loads[0]
        assert load.limit == pytest.approx({1: 10.0, 4: 40.0, 16: 160.0})
        assert load.reached(16) == pytest.approx(0.5)
        elsewhere = [replace(r, device={**H200, "id": "nvidia-h20", "name": "NVIDIA H20"}) for r in results]
        (place,) = report_of(elsewhere, known).places
        assert place.bandwidth is None and place.rows[0].loads[0].limit == {}
        (place,) = collect(results, policy.parse(POLICY), known, bandwidths={"nvidia-h200": 8.54e12}).places
        assert place.bandwidth == 8.54e12 and place.rows[0].loads[0].limit == pytest.approx({1: 5.0, 4: 20.0, 16: 80.0})

    def test_a_crossover_lies_between_the_batches_where_the_lead_changes(self, results: list[Result], known: Registry) -> None:
        row = row_of(results, known)
        (found,) = row.loads[0].crossovers
        assert (found.low, found.high, found.before, found.after) == (4, 16, "A", "C")
        # at batch 4 the other is 1.1x slower, at 16 it is 480/304 times faster: the logarithms meet nearer to 4
        assert found.batch == pytest.approx(4 * 4 ** (0.09531 / (0.09531 + 0.45676)), rel=1e-4)

    def test_a_lead_within_the_noise_is_no_crossover(self, known: Registry) -> None:
        noisy = [
            line(known, SMALL, 100.0, 1),
            line(known, BIG, 101.5, 1),
            line(known, SMALL, 300.0, 4),
            line(known, BIG, 200.0, 4),
        ]
        assert row_of(noisy, known).loads[0].crossovers == ()
        clear = [replace(r, us=(r.median, r.median, r.median)) for r in noisy]
        assert len(row_of(clear, known).loads[0].crossovers) == 1

    def test_a_later_run_replaces_what_an_earlier_one_measured(self, results: list[Result], known: Registry) -> None:
        row = row_of([*results, line(known, SMALL, 21.0, 1, run=LATER, date=LATER)], known)
        point = row.loads[0].at("A", 1)
        assert point and point.us[1] == 21.0

    def test_a_screening_time_shows_where_it_is_the_fastest_or_there_is_nothing_else(
        self, results: list[Result], known: Registry
    ) -> None:
        quick = [replace(r, stage="quick") if r.use == "fast.other" else r for r in results]
        row = row_of(quick, known)
        assert worst(row.price) == 320 / 304 and row.screened == 0
        assert {p.stage for p in row.loads[0].lines["C"]} == {"quick"}
        slow = [replace(r, us=(900.0, 900.0, 900.0)) if r.use == "fast.other" else r for r in quick]
        row = row_of(slow, known)
        assert [s.variant for s in row.standings] == [SMALL, BIG] and row.screened == 1
        alone = row_of([replace(r, stage="quick") for r in results], known)
        assert len(alone.standings) == 3 and alone.loads[0].lines["A"][0].stage == "quick"

    def test_what_failed_is_out_and_has_its_reason(self, results: list[Result], known: Registry) -> None:
        report = report_of([*results, failed(known, OTHER, "racy: row 3 of state")], known)
        (place,) = report.places
        (one,) = place.failures
        assert (one.use, one.step, one.reason, one.variants, one.rows) == (
            "fast.other",
            "bits",
            "racy: row 3 of state",
            (OTHER,),
            ("ring=16",),
        )
        assert OTHER not in {s.variant for s in place.rows[0].standings} and place.rows[0].failed == 1
        assert worst(place.price) == 1.0

    def test_fingerprints_are_counted_and_are_no_timings(self, results: list[Result], known: Registry) -> None:
        bits = replace(line(known, BIG, 1.0), stage="bits", bits="0123456789abcdef", us=None, batch=0, load={}, work=0)
        (place,) = report_of([*results, bits], known).places
        assert place.runs[0].counts == {"full": 12, "bits": 1}
        assert place.rows == (row_of(results, known),)

    def test_disturbed_results_are_marked_and_counted(self, results: list[Result], known: Registry) -> None:
        hot = {"sm_mhz": 1200, "throttle": ["power cap"], "foreign": 2}
        (place,) = report_of([replace(results[0], conditions=hot), *results[1:]], known).places
        (marked,) = [p for load in place.rows[0].loads for points in load.lines.values() for p in points if p.marks]
        assert marked.marks == ("throttled: power cap", "beside 2 other processes on the GPU")
        (run,) = place.runs
        assert (run.throttled, run.foreign, run.clocks) == ({"power cap": 1}, 1, "1200-1980 MHz")

    def test_a_kernel_that_changed_since_makes_its_entries_stale(self, results: list[Result], known: Registry) -> None:
        old = [replace(r, digest="0" * 16) if r.use == "fast.big" else r for r in results]
        (place,) = report_of(old, known).places
        assert set(place.changed) == {"fast.big"}
        assert [bool(s.stale) for s in place.rows[0].servings] == [False, True]

    def test_a_source_that_the_policy_was_not_measured_with_is_stale(self, results: list[Result], known: Registry) -> None:
        text = POLICY.replace("sms: 132}", f'sms: 132, kernels: {{gdn_ring_commit: {{fast.small: "{"1" * 16}"}}}}}}')
        row = row_of(results, known, text)
        assert "1111111111111111" in row.servings[0].stale[0]

    def test_a_key_that_the_policy_cannot_be_asked_for_is_still_shown(self, results: list[Result], known: Registry) -> None:
        row = row_of([replace(r, facts={"heads": "48/16", "colour": "red"}) for r in results], known)
        assert "no fact colour" in row.problem
        assert row.servings == () and len(row.standings) == 3 and row.price.priced == ()
        assert "no fact rink" in page(report_of([replace(r, row={"rink": 16}) for r in results], known))

    def test_a_device_without_a_section_says_so(self, results: list[Result], known: Registry) -> None:
        text = re.sub("(?m)^    - when.*?(?=^    - other)", "", POLICY, flags=re.DOTALL)
        row = row_of(results, known, text)
        assert [(s.variant, s.level, s.local) for s in row.servings] == [("torch.reference", "any device", False)]
        elsewhere = [replace(r, device={**H200, "id": "nvidia-h100", "name": "NVIDIA H100"}) for r in results]
        assert {(s.level, s.local) for s in row_of(elsewhere, known).servings} == {("same arch and SM count", False)}

    def test_a_result_without_a_device_is_refused(self, results: list[Result], known: Registry) -> None:
        with pytest.raises(JournalError, match=r"gdn_ring_commit, run 2026.*device is \{\}"):
            report_of([replace(results[0], device={})], known)


class TestChart:
    def test_slowdowns_are_placed_by_their_size_and_the_letters_apart(self, results: list[Result], known: Registry) -> None:
        chart = draw(row_of(results, known).loads[0])
        heights = sorted(y for _, y in chart.letters)
        assert all(b - a >= 10 - 0.11 for a, b in pairwise(heights))
        assert SLOWDOWNS[0] - 10 <= heights[0] and heights[-1] <= SLOWDOWNS[1]
        assert [text for _, text in chart.slowdowns.ticks] == ["fastest", "+1%", "+5%", "+10%", "+20%", "+50%"]
        assert [text for _, text in chart.ticks] == ["1", "4", "16"]

    def test_the_strip_has_what_the_policy_takes(self, results: list[Result], known: Registry) -> None:
        chart = draw(row_of(results, known).loads[0])
        assert [span.letter for span in chart.spans] == ["A", "B"]
        assert chart.spans[0].x + chart.spans[0].width == pytest.approx(chart.spans[1].x, abs=0.2)
        assert chart.times.taken.count("L") == 2 and chart.times.limit.count("L") == 2


# --- the page


class Page(HTMLParser):
    """Reads a page strictly: tags nest, ids are unique. Keeps attributes, tables, and text by tag."""

    VOID = frozenset({"meta", "br", "wbr", "path", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append((dict(attrs).get("class") or "", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, (tag, self.open, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)
        if "td" in self.open or "th" in self.open:
            kind, text = self.cells[-1]
            self.cells[-1] = (kind, text + data)

    def values(self, *names: str) -> list[str]:
        return [value for _, name, value in self.attributes if name in names]


def check_form(text: str) -> Page:
    """One page, whole, that refers to nothing outside itself."""
    read = Page(text)
    ids = read.values("id")
    assert len(ids) == len(set(ids))
    assert all(value.startswith("#") and value[1:] in ids for value in read.values("href", "xlink:href"))
    assert set(read.values("aria-labelledby")) <= set(ids)
    assert not read.values("src", "srcset", "data", "action", "poster")
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    tags = {tag for tag, _, _ in read.attributes}
    assert not tags & {"script", "link", "iframe", "object", "embed", "img", "base"}
    assert not re.search(r"https?://|url\(|@import|<script", text)
    assert text.startswith("<!DOCTYPE html>")
    return read


class TestPage:
    def test_it_is_whole_and_refers_to_nothing(self, results: list[Result], known: Registry) -> None:
        read = check_form(page(report_of(results, known), "kernreg report"))
        assert "kernreg report" in read.text

    def test_the_same_bytes_for_the_same_report(self, results: list[Result], known: Registry) -> None:
        assert page(report_of(results, known)) == page(report_of(list(results), known))

    def test_every_time_is_in_a_table_and_what_is_taken_is_marked(self, results: list[Result], known: Registry) -> None:
        read = check_form(page(report_of(results, known)))
        shown = [text for _, text in read.cells]
        for result in results:
            assert result.us
            low, middle, high = map(microseconds, result.us)
            assert any(text.startswith(f"{middle}{low}-{high}") for text in shown), result
        taken = {text for kind, text in read.cells if "taken" in kind.split()}
        assert taken == {"20.0019.60-20.40", "60.0058.80-61.20", "320.00313.60-326.40", "120.00117.60-122.40"}
        assert "160.0050% reached" in shown
        assert "chosen: batch 1-4" in shown and "+5.3 %" in shown

    @pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "a & b]]>", "</style>"])
    def test_everything_is_escaped(self, results: list[Result], known: Registry, evil: str) -> None:
        odd = [replace(r, command=evil, software={evil: evil}, run=evil, conditions={"throttle": [evil]}) for r in results]
        odd = [replace(r, facts={"heads": evil}) for r in odd]
        odd += [failed(known, SMALL, evil), replace(failed(known, BIG, "no"), use=evil, step=evil, config={evil: evil})]
        odd += [replace(r, op=evil, row={evil: evil}, device={**H200, "name": f"NVIDIA {evil}"}) for r in odd]
        made = collect(odd, policy.parse(POLICY, evil), known, [evil])
        read = check_form(page(made, evil))
        assert "".join(read.text).count(evil) > 10

    def test_a_time_is_rounded_by_its_size(self) -> None:
        assert [microseconds(value) for value in (9.1234, 12.345, 123.456, 6910.013)] == ["9.123", "12.35", "123.46", "6910.0"]


# --- the command


class TestCommand:
    @pytest.fixture
    def files(self, known: Registry, results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(registry, "default", lambda: known)
        monkeypatch.setattr(dispatch, "shipped_policy", lambda: tmp_path / "dispatch.yaml")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "dispatch.yaml").write_text(POLICY)
        folder = tmp_path / "tools" / "measurements"
        folder.mkdir(parents=True)
        (folder / "nvidia-h200.jsonl").write_text("".join(f"{r.to_line()}\n" for r in results))
        return tmp_path

    @staticmethod
    def run(*args: str) -> int:
        with pytest.raises(SystemExit) as stop:
            cli.app(["report", *args])
        return int(stop.value.code or 0)

    def test_it_writes_a_page_and_says_so(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run() == 0
        assert "wrote report.html" in capsys.readouterr().out
        read = check_form((files / "report.html").read_text())
        assert "dispatch.yaml" in read.text and any("tools/measurements/nvidia-h200.jsonl" in text for text in read.text)

    def test_json(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--json", "--output", "other.html", "--journal", "tools/measurements/nvidia-h200.jsonl") == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["file"], said["bytes"]) == ("other.html", (files / "other.html").stat().st_size)
        (place,) = said["places"]
        assert (place["op"], place["keys"], place["cells"], place["compared"]) == ("gdn_ring_commit", 1, 4, 4)
        assert (place["median"], place["worst"]) == (1.0, 320 / 304)

    def test_the_bandwidth_is_the_one_measured_beside_the_policy(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = files / "tools" / "comparisons"
        folder.mkdir()
        (folder / "nvidia-h200.jsonl").write_text('{"section": "copy", "bytes_per_second": 3210000000000}\n')
        assert self.run() == 0
        assert "3.21 TB/s" in (files / "report.html").read_text()
        (folder / "nvidia-h200.jsonl").write_text('{"section": "copy"}\n')
        capsys.readouterr()
        assert self.run() == 1
        assert "nvidia-h200.jsonl, line 1: not a line of a comparison" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "code", "message"),
        [
            ("", 1, "odd.jsonl: no results yet"),
            ('{"schema": 1}\n{}\n', 1, "odd.jsonl, line 1: no field run"),
            (None, 2, "odd.jsonl"),
        ],
    )
    def test_a_bad_journal_is_named_and_nothing_is_written(
        self, files: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: int, message: str
    ) -> None:
        if text is not None:
            Path("odd.jsonl").write_text(text)
        assert self.run("--journal", "odd.jsonl") == code
        assert message in capsys.readouterr().err
        assert not Path("report.html").exists()

    def test_no_journal_at_all(self, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.rmtree(files / "tools")
        assert self.run() == 2
        assert "--journal" in capsys.readouterr().err

    def test_without_jinja_the_command_to_install_it(
        self, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "jinja2", None)
        assert self.run() == 1
        assert "pip install 'kernreg[report]'" in capsys.readouterr().err
        assert not Path("report.html").exists()

    def test_it_imports_neither_torch_nor_without_need_jinja(self, tmp_path: Path) -> None:
        code = (
            "import sys, kernreg, kernreg.cli\n"
            "print('jinja2' in sys.modules)\n"
            "sys.argv = ['kernreg', 'report', '--journal', 'none.jsonl']\n"
            "try: kernreg.cli.main()\n"
            "except SystemExit as stop: print(stop.code, {'torch', 'triton', 'pynvml'} & set(sys.modules))"
        )
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert got.stdout == "False\n2 set()\n"


# --- the shipped journal


@pytest.fixture(scope="module")
def shipped() -> Report:
    paths = sorted((ROOT / "tools" / "measurements").glob("*.jsonl"))
    if not paths:
        pytest.skip("no measurements outside a checkout")
    known = cli._as_elsewhere(registry.default())
    return collect(journal.read(*paths), policy.load(ROOT / "dispatch.yaml", known), known, [path.name for path in paths])


class TestShipped:
    def test_every_measured_row_of_the_policy_is_there(self, shipped: Report) -> None:
        shown = {serving.source for place in shipped.places for row in place.rows for serving in row.servings}
        rows = {row.source for rows in shipped.policy.ops.values() for row in rows if row.devices and row.measured}
        assert rows and rows <= shown

    def test_the_choice_was_timed_everywhere_and_its_regret_is_that_of_the_file(self, shipped: Report) -> None:
        recorded = {row.source: row.regret for rows in shipped.policy.ops.values() for row in rows if row.regret}
        for place in shipped.places:
            for row in place.rows:
                assert len(row.price.priced) == row.price.cells
                (source,) = {serving.source for serving in row.servings}
                assert worst(row.price) == pytest.approx(recorded[source], abs=6e-4)

    def test_the_price_is_the_one_that_tune_says(self, shipped: Report) -> None:
        tune, results = tool(), journal.read(*sorted((ROOT / "tools" / "measurements").glob("*.jsonl")))
        of_all = prices(results, shipped.policy)
        assert of_all.priced and (len(shipped.price.priced), shipped.price.cells) == (len(of_all.priced), of_all.cells)
        assert (shipped.price.median, worst(shipped.price)) == (of_all.median, worst(of_all))
        text = f"median {shipped.price.median:.3f}, worst {worst(shipped.price):.3f} "
        assert text in tune.price(shipped.policy, results)
        for place in shipped.places:
            alone = prices([r for r in results if r.op == place.op and r.device["id"] == place.device.id], shipped.policy)
            assert (place.price.median, worst(place.price)) == (alone.median, worst(alone))

    def test_the_page_stays_small(self, shipped: Report) -> None:
        text = page(shipped)
        check_form(text)
        assert len(text.encode()) < 3e6


# --- a browser


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here")
    return found


def browse(browser: str, folder: Path, file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    general = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")
    command = [browser, *general, f"--user-data-dir={folder / 'profile'}", "--window-size=1280,2400", *flags, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def pixels(png: bytes) -> tuple[tuple[int, ...], int]:
    """The first pixel of a PNG, and how many different bytes its rows have as stored: few if it is blank."""
    chunks: list[bytes] = []
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            chunks.append(png[at + 8 : at + 8 + length])
        at += 12 + length
    raw = zlib.decompress(b"".join(chunks))
    return tuple(raw[1:4]), len(set(raw))  # whatever the first row's filter, its first pixel is stored as it is


@pytest.fixture
def shown(results: list[Result], known: Registry, tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "report.html"
    made = report_of([*results, failed(known, OTHER, "racy: row 3 of state", row={"ring": 32})], known)
    file.write_text(page(made))
    yield file


class TestBrowser:
    def test_charts_and_tables_are_there_and_nothing_complains(self, browser: str, shown: Path, tmp_path: Path) -> None:
        got = browse(browser, tmp_path, shown, "--dump-dom")
        dom = got.stdout
        assert "CONSOLE" not in got.stderr
        assert dom.count("<figure") == 2 and dom.count('role="img"') == 1 and dom.count("<table") == 6
        assert "racy: row 3 of state" in dom and "chosen: batch 1-4" in dom

    def test_what_the_console_says_would_be_seen(self, browser: str, shown: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad.html"
        bad.write_text(shown.read_text().replace("<main", '<img src="https://example.invalid/x.png"><main', 1))
        assert "CONSOLE" in browse(browser, tmp_path, bad, "--dump-dom").stderr

    @pytest.mark.parametrize(("scheme", "paper"), [("light", (255, 255, 255)), ("dark", (0x14, 0x17, 0x1B))])
    def test_it_is_painted_in_either_scheme(
        self, browser: str, shown: Path, tmp_path: Path, scheme: str, paper: tuple[int, ...]
    ) -> None:
        picture = tmp_path / "page.png"
        preferred = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
        browse(browser, tmp_path, shown, preferred, f"--screenshot={picture}")
        first, kinds = pixels(picture.read_bytes())
        assert first == paper and kinds > 200

    def test_a_blank_picture_would_be_seen(self, browser: str, tmp_path: Path) -> None:
        blank, picture = tmp_path / "blank.html", tmp_path / "page.png"
        blank.write_text("<!DOCTYPE html><title>blank</title>")
        browse(browser, tmp_path, blank, f"--screenshot={picture}")
        assert pixels(picture.read_bytes())[1] < 20
