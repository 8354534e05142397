"""Numerics classes in the choice: what may follow the batch, what stays, and what it costs."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_lines import DIGEST, H200, LATER, OP, OTHER_DIGEST, RUN, bits, chosen, failed, line, rows

from kernreg.contract import variant_id
from kernreg.numerics import class_id
from kernreg.policy_file import Row, parse
from kernreg.tuning import journal
from kernreg.tuning.build import build, incumbents
from kernreg.tuning.choose import KEPT_VARIANTS, TIE, Table, Timings, leaders, of_row
from kernreg.tuning.journal import Result
from kernreg.tuning.prices import differences, flips, prices

DATA = Path(__file__).resolve().parent / "data"
BATCHES = (1, 8, 32, 128)
Times = Mapping[str, Sequence[float]]

# the narrow tile is fast where the batch is small, the wide one where it is large; `lone` is never best and never bad
TIMES: Times = {"a:8": (50, 400, 1900, 9000), "a:64": (90, 420, 1600, 6000), "lone": (60, 430, 1700, 6500)}


def timed(times: Times = TIMES, batches: Sequence[int] = BATCHES, **more: Any) -> list[Result]:
    return [line(v, us, batch, **more) for v, each in times.items() for us, batch in zip(each, batches, strict=True)]


def fingerprints(families: Mapping[str, object], **more: Any) -> list[Result]:
    return [bits(variant, family, **more) for variant, family in families.items()]


def table(results: Sequence[Result]) -> Table:
    timings = Timings()
    timings.add(results)
    return timings.table()


# --- classes


def test_inside_a_class_the_batch_chooses() -> None:
    text = build([*timed(), *fingerprints({"a:8": 1, "a:64": 1, "lone": 2})])
    assert chosen(text) == "triton.a:8<=8 triton.a:64"
    (row,) = rows(text)
    assert row.numerics and row.classes[row.numerics] == ("triton.a[BV=64]", "triton.a[BV=8]")
    assert sorted(row.classes.values()) == [("triton.a[BV=64]", "triton.a[BV=8]"), ("triton.lone",)]
    assert row.regret == 1.0
    small, large = row.entries
    assert (small.us, small.next, small.runner_up, dict(small.at)["batch"]) == (400, 420, "triton.a[BV=64]", 8)
    assert (large.us, large.next, large.runner_up, dict(large.at)["batch"]) == (6000, 9000, "triton.a[BV=8]", 128)


def test_a_class_is_named_after_its_bits() -> None:
    lines = fingerprints({"a:8": 1, "a:64": 1})
    (row,) = rows(build([*timed({v: TIMES[v] for v in ("a:8", "a:64")}), *lines]))
    assert row.numerics == class_id({lines[0].key: lines[0].bits})


def test_between_two_measured_batches_the_larger_decides() -> None:
    (row,) = rows(build([*timed(), *fingerprints({"a:8": 1, "a:64": 1, "lone": 2})]))
    takes = {batch: row.entry(batch).use.config["BV"] for batch in (1, 2, 8, 9, 31, 129, 10_000)}
    assert takes == {1: 8, 2: 8, 8: 8, 9: 64, 31: 64, 129: 64, 10_000: 64}


@pytest.mark.parametrize("families", [{"a:8": 1, "a:64": 2, "lone": 3}, {}, {"a:8": 1, "lone": 2}])
def test_without_equal_bits_there_is_one_variant(families: Mapping[str, object]) -> None:
    text = build([*timed(), *fingerprints(families)])
    assert chosen(text) == "triton.lone"
    (row,) = rows(text)
    assert bool(row.classes) == bool(row.numerics) == ("lone" in families)
    assert row.regret == pytest.approx(60 / 50)


def test_what_lacks_a_fingerprint_for_one_key_is_in_no_class() -> None:
    keys: list[dict[str, Any]] = [{"heads": "48/16"}, {"heads": "12/4"}]
    results = [r for facts in keys for r in timed(facts=facts)]
    known = [r for facts in keys for r in fingerprints({"a:8": 1, "a:64": 1, "lone": 2}, facts=facts)]
    assert chosen(build([*results, *known])) == "triton.a:8<=8 triton.a:64"
    gap = [r for r in known if (r.variant, r.facts["heads"]) != ("triton.a[BV=8]", "12/4")]
    text = build([*results, *gap])
    assert chosen(text) == "triton.lone"
    assert "triton.a[BV=8]" not in [v for part in rows(text)[0].classes.values() for v in part]


def test_the_least_worst_case_of_a_class_wins_not_the_fastest_somewhere() -> None:
    times = {"a:8": (50, 400, 1600, 9000), "a:64": (500, 400, 1600, 5000), "b": (65, 500, 2000, 6000), "c": (51, 800, 800, 9900)}
    text = build([*timed(times), *fingerprints({"a:8": 1, "a:64": 1, "b": 2, "c": 3})])
    assert chosen(text) == "triton.a:8<=32 triton.a:64" and rows(text)[0].regret == 2.0, "1600 / 800, against 2.5 of b"
    alone = build([*timed(times), *fingerprints({"a:8": 1, "a:64": 4, "b": 2, "c": 3})])
    assert chosen(alone) == "triton.a:8", "9000 / 5000 and 2.0, against 2.5 of b and 10 of the other tile"


def test_neighbours_share_a_variant_that_costs_next_to_nothing() -> None:
    times = {"a:8": (500, 4000, 15_950, 60_000), "a:16": (502, 3990, 15_900, 60_300), "a:64": (900, 4010, 15_880, 50_000)}
    text = build([*timed(times), *fingerprints(dict.fromkeys(times, 1))])
    assert chosen(text) == "triton.a:16<=32 triton.a:64"
    for batch, values in zip(BATCHES, zip(*times.values(), strict=True), strict=True):
        taken = times[f"a:{rows(text)[0].entry(batch).use.config['BV']}"][BATCHES.index(batch)]
        assert taken <= min(values) * TIE
    apart = {**times, "a:16": (520, 3990, 15_900, 60_300), "a:8": (500, 4200, 16_900, 60_000)}
    assert chosen(build([*timed(apart), *fingerprints(dict.fromkeys(times, 1))])) == "triton.a:8<=1 triton.a:64"


def test_a_fingerprint_that_comes_out_in_two_ways_is_none() -> None:
    known = fingerprints({"a:8": 1, "a:64": 1, "lone": 2})
    again = bits("a:8", "another")
    for results in ([*timed(), *known, again], [again, *known, *timed()]):
        assert chosen(build(results)) == "triton.lone"
    later = replace(again, run=LATER, date=LATER)
    assert chosen(build([*timed(), *known, later])) == "triton.lone", "moved bits are another class"
    assert chosen(build([*timed(), *known, replace(bits("a:8", 1), run=LATER, date=LATER)])) == "triton.a:8<=8 triton.a:64"


def test_fingerprints_of_different_compilers_are_not_compared() -> None:
    old, new = {"torch": "2.11.0", "triton": "3.6.0"}, {"torch": "2.11.0", "triton": "3.7.0"}
    known = fingerprints({"a:8": 1, "a:64": 1, "lone": 2}, software=old)
    moved = fingerprints({"a:64": 1, "lone": 2}, software=new, run=LATER, date=LATER)
    assert chosen(build([*timed(software=old), *known, *moved])) == "triton.lone"
    driver = [replace(r, software={**old, "driver": "5"}) for r in moved]
    assert chosen(build([*timed(software=old), *known, *driver])) == "triton.a:8<=8 triton.a:64"


def test_a_failed_variant_leaves_its_class() -> None:
    results = [*timed(), *fingerprints({"a:8": 1, "a:64": 1, "lone": 2})]
    racy = failed("a:64", step="bits", reason="racy: probe mixed, row 3: state")
    text = build([*results, racy])
    assert chosen(text) == "triton.lone" and "a[BV=64]" not in text


def test_a_class_that_cannot_serve_every_batch_is_not_taken() -> None:
    times = {"a:8": (50, 400), "b": (80, 500, 1700, 6500)}
    results = [line("a:8", us, batch) for us, batch in zip(times["a:8"], BATCHES, strict=False)] + timed({"b": times["b"]})
    assert chosen(build([*results, *fingerprints({"a:8": 1, "b": 2})])) == "triton.b"
    assert chosen(build([*results, *fingerprints({"a:8": 1, "b": 1})])) == "triton.a:8<=8 triton.b"


def test_a_quick_timing_makes_nobody_eligible_beside_full_ones() -> None:
    results = [*timed(), *fingerprints({"a:8": 1, "a:64": 1, "lone": 2, "hasty": 1})]
    hasty = timed({"hasty": (40, 300, 1000, 4000)}, stage="quick")
    text = build([*results, *hasty])
    assert chosen(text) == "triton.a:8<=8 triton.a:64" and "hasty" not in text
    assert rows(text)[0].regret == 1.6, "but it counts as what the choice costs"


# --- timings


def test_what_is_timed_again_counts_together_and_its_spread_is_noise() -> None:
    first, second, third = line("a", 100, spread=0.01), line("a", 110, stage="again"), line("a", 130, stage="again")
    for results in ([first, second], [second, first]):
        (cell,) = table(results).cells.values()
        assert cell["triton.a"].median == 105 and cell["triton.a"].samples == 14
        assert cell["triton.a"].spread == pytest.approx((110.11 - 99) / 210)
    (cell,) = table([first, second, third]).cells.values()
    assert cell["triton.a"].median == 110


def test_a_disturbed_timing_gives_way_to_a_clean_one() -> None:
    hot = line("a", 200, conditions={"throttle": ["hw_thermal"]})
    (cell,) = table([hot, line("a", 100, stage="again")]).cells.values()
    assert cell["triton.a"].median == 100
    (cell,) = table([hot, line("a", 300, stage="again", conditions={"foreign": 2})]).cells.values()
    assert cell["triton.a"].median == 250, "both were disturbed"


def test_a_call_for_each_layer_bears_its_part_of_the_floor() -> None:
    times = {"a": (9.0, 60.0), "b": (11.5, 50.0)}
    layers = timed(times, (1, 128))
    assert chosen(build(layers)) == "triton.b", "2.5 us a step are next to nothing"
    alone = [replace(r, load={"history": 4}) for r in layers]
    assert chosen(build(alone)) == "triton.a", "2.5 us a layer are not"


# --- what stays


def scaled(times: Times, factors: Mapping[str, float]) -> dict[str, list[float]]:
    return {v: [us * factors.get(v, 1.0) for us in each] for v, each in times.items()}


EQUAL: Mapping[str, object] = {"a:8": 1, "a:64": 1, "lone": 2}


@pytest.mark.parametrize("journals", ["one", "two"])
def test_small_gains_change_no_entry(journals: str) -> None:
    first = [*timed(), *fingerprints(EQUAL)]
    text = build(first)

    def second(**factors: float) -> str:
        times = scaled(TIMES, {name.replace("_", ":"): factor for name, factor in factors.items()})
        later = [*timed(times, run=LATER, date=LATER), *fingerprints(EQUAL, run=LATER, date=LATER)]
        return build([*first, *later]) if journals == "one" else build(later, previous=text)

    # at batch 8 the tiles are 5 % apart: 0.97 of the wide one is still worse, 0.94 better by 1 %, 0.91 by 4 %
    for factor in (0.97, 0.94):
        assert chosen(second(a_64=factor)) == chosen(text) == "triton.a:8<=8 triton.a:64"
    assert chosen(second(a_64=0.90)) == "triton.a:8<=1 triton.a:64"
    assert chosen(second(lone=0.93)) == chosen(text)


def test_a_class_gives_way_when_the_gain_exceeds_threshold_and_noise() -> None:
    times: Times = {"a:8": (50, 400, 1900, 9000), "a:64": (90, 420, 1600, 6000), "b": (52, 410, 1650, 6100)}
    known = {"a:8": 1, "a:64": 1, "b": 2}
    text = build([*timed(times), *fingerprints(known)])
    assert chosen(text) == "triton.a:8<=8 triton.a:64"
    for slower, spread, kept in ((1.02, 0.001, True), (1.2, 0.001, False), (1.2, 0.3, True)):
        later = scaled(times, {"a:8": slower, "a:64": slower})
        results = [*timed(later, run=LATER, spread=spread), *fingerprints(known, run=LATER)]
        found = build(results, previous=text)
        assert chosen(found) == (chosen(text) if kept else "triton.b"), (slower, spread)
        assert build(results, previous=found) == found


def test_an_incumbent_whose_class_broke_apart_holds_nothing() -> None:
    text = build([*timed(), *fingerprints(EQUAL)])
    results = [*timed(run=LATER), *fingerprints({"a:8": 1, "a:64": 3, "lone": 2}, run=LATER)]
    assert chosen(build(results, previous=text)) == "triton.lone"


def test_a_row_with_one_variant_opens_up_only_for_a_gain() -> None:
    times: Times = {"a:8": (50, 400, 1600, 6150), "a:64": (90, 420, 1600, 6000)}
    one = build(timed({"a:8": times["a:8"]}))
    assert chosen(one) == "triton.a:8"
    results = [*timed(times, run=LATER), *fingerprints({"a:8": 1, "a:64": 1}, run=LATER)]
    assert chosen(build(results)) == "triton.a:8<=32 triton.a:64"
    assert chosen(build(results, previous=one)) == "triton.a:8"


# --- the section


def test_a_section_records_the_sources_that_its_rows_use() -> None:
    families = {"a:8": 1, "b": 1, "c": 1}
    results = [
        *timed({"a:8": (50, 400, 1900, 9000), "c": (90, 500, 2000, 9900)}),
        *timed({"b": (90, 420, 1600, 6000)}, digest=OTHER_DIGEST),
    ]
    known = [replace(r, digest=OTHER_DIGEST if r.use == "triton.b" else DIGEST) for r in fingerprints(families)]
    text = build([*results, *known])
    assert chosen(text) == "triton.a:8<=8 triton.b"
    assert parse(text).devices["nvidia-h200"].kernels == {OP.name: {"triton.a": DIGEST, "triton.b": OTHER_DIGEST}}
    other = [replace(r, op="kda_ring_commit", use="triton.replay", row={"ring": 4}) for r in timed({"x": (1, 2, 3, 4)})]
    both = parse(build(other, previous=text)).devices["nvidia-h200"]
    assert both.kernels == {OP.name: {"triton.a": DIGEST, "triton.b": OTHER_DIGEST}, "kda_ring_commit": {"triton.replay": DIGEST}}


def test_a_row_says_that_its_kernel_changed_since() -> None:
    results = [*timed({"a": (1, 2, 3, 4)}), *timed({"b": (1, 2, 3, 4)}, row={"ring": 32, "folding": "every"})]
    fresh = build(results, installed={OP.name: {"triton.a": DIGEST, "triton.b": DIGEST}})
    assert fresh == build(results) and "stale" not in fresh.split("schema")[1]
    stale = build(results, installed={OP.name: {"triton.a": OTHER_DIGEST, "triton.b": DIGEST}})
    assert [row.stale for row in rows(stale)] == [True, False]
    assert build(results, previous=stale, installed={OP.name: {"triton.a": DIGEST, "triton.b": DIGEST}}) == fresh


def test_versions_of_ops_measured_apart_all_stand_in_the_section() -> None:
    ours = timed({"a": (1, 2, 3, 4)})
    other = [replace(r, op="kda_ring_commit", row={"ring": 4}, software={"torch": "2.11.0", "triton": "3.7.0"}) for r in ours]
    for results in ([*ours, *other], [*other, *ours]):
        assert parse(build(results)).devices["nvidia-h200"].measured["triton"] == "3.6.0, 3.7.0"
    alone = build(other, previous=build(ours))
    assert parse(alone).devices["nvidia-h200"].measured["triton"] == "3.6.0, 3.7.0"
    assert build([*ours, *other], previous=alone) == build([*ours, *other])


# --- whatever was measured


VARIANTS = ("a:8", "a:16", "b", "c")
KEYS: tuple[dict[str, Any], ...] = ({"heads": "48/16"}, {"heads": "12/4"})


@st.composite
def measurements(draw: st.DrawFn) -> list[Result]:
    """Runs with gaps, failures, quick and repeated timings, and fingerprints of up to three families."""
    results = []
    for run in (RUN, LATER)[: draw(st.integers(1, 2))]:
        common = {"run": run, "date": run}
        for variant in VARIANTS:
            if draw(st.integers(0, 9)) == 0:
                results.append(failed(variant, **common))
            for facts in KEYS:
                if draw(st.integers(0, 5)):
                    results.append(bits(variant, draw(st.integers(0, 2)), facts=facts, **common))
                for batch in draw(st.sampled_from([(1, 8, 64), (1, 8, 64), (8, 64), (1,)])):
                    us = draw(st.floats(5, 5000).map(lambda us: round(us, 2)))
                    stages = draw(st.sampled_from([("full",), ("full",), ("full", "again"), ("quick",)]))
                    factor = draw(st.floats(0.9, 1.1))
                    results += [
                        line(variant, us * (factor if stage == "again" else 1), batch, facts=facts, stage=stage, **common)
                        for stage in stages
                    ]
    return results


def _variants(row: Row) -> list[str]:
    return [variant_id(entry.use.kernel, entry.use.config) for entry in row.entries]


@settings(max_examples=60, deadline=None)
@given(measurements(), st.randoms(use_true_random=False))
def test_what_holds_of_every_build(results: list[Result], shuffled: random.Random) -> None:
    before = [r.to_line() for r in results]
    text = build(results) if any(r.timed for r in results) else ""
    if not text:
        return
    assert [r.to_line() for r in results] == before and build(results) == text
    mixed = list(results)
    shuffled.shuffle(mixed)
    assert build(mixed) == text
    assert build(results, previous=text) == text
    for row in rows(text):  # the reader has checked that the intervals cover every batch
        names = _variants(row)
        if len(names) > 1:
            assert row.numerics and set(names) <= set(row.classes[row.numerics])
            assert all(one != other for one, other in pairwise(names))
        if row.numerics:
            assert set(names) <= set(row.classes[row.numerics])
        assert len([v for part in row.classes.values() for v in part]) == len({v for part in row.classes.values() for v in part})
        _well_chosen(row, results)


def _well_chosen(row: Row, results: list[Result]) -> None:
    """What a row takes was timed in all its cells, did not fail, and its regret is the worst of them."""
    timings = Timings()
    for run in sorted({r.run for r in results}):
        timings.add([r for r in results if r.run == run])
    known = timings.table()
    taken = of_row(row)(known)
    assert set(taken) == set(known.batches) and not set(taken.values()) & timings.failed
    assert row.regret == pytest.approx(known.standing(taken).slowest, abs=6e-4)
    if row.numerics:
        keys = {next(iter(cell.values())).key for cell in known.cells.values()}
        assert {class_id({key: timings.bits[v][key] for key in keys}) for v in taken.values()} == {row.numerics}


@settings(max_examples=40, deadline=None)
@given(measurements(), st.randoms(use_true_random=False))
def test_leaders_are_few_and_of_every_class_that_leads(results: list[Result], shuffled: random.Random) -> None:
    first = [r for r in results if r.run == RUN]
    kept = leaders(first, 3)
    mixed = list(first)
    shuffled.shuffle(mixed)
    assert leaders(mixed, 3) == kept and len(kept) == len(set(kept)) <= 3
    choices = table(first).choices
    for choice in choices[:1]:
        assert set(kept) & set(choice.group.members)


# --- leaders


def test_leaders_stand_for_their_classes() -> None:
    crowd = {f"a:{n}": (100 + n, 1000 + n) for n in range(20)}
    rival = {"b:1": (101.0, 1500.0), "b:2": (150.0, 1005.0)}
    results = [
        line(v, us, batch, stage="quick")
        for v, each in {**crowd, **rival}.items()
        for us, batch in zip(each, (1, 128), strict=True)
    ]
    known = fingerprints({**dict.fromkeys(crowd, 1), **dict.fromkeys(rival, 2)})
    kept = leaders([*results, *known])
    assert len(kept) == KEPT_VARIANTS and {"triton.b[BV=1]", "triton.b[BV=2]"} <= set(kept)
    assert set(leaders(results)).isdisjoint({"triton.b[BV=1]", "triton.b[BV=2]"}), "alone, none of the two leads"


# --- close calls


def test_close_calls_are_named_the_closest_first() -> None:
    times: Times = {"a:8": (500, 4000, 19_000, 90_000), "a:64": (900, 4080, 16_000, 60_000), "b": (506, 4400, 16_100, 60_500)}
    found = table([*timed(times), *fingerprints({"a:8": 1, "a:64": 1, "b": 2})]).close()
    at = {json.loads(close.cell)["batch"]: close for close in found}
    assert at[8].variants == {"triton.a[BV=8]", "triton.a[BV=64]"} and at[8].gap == pytest.approx(0.02, abs=1e-3)
    assert [close.gap for close in found] == sorted(close.gap for close in found)
    assert 128 not in at, "nothing is close there"
    held = rows(build(timed({"b": times["b"]})))[0]
    beside = table([*timed(times), *fingerprints({"a:8": 1, "a:64": 1, "b": 2})]).close(of_row(held))
    assert any("triton.b" in close.variants for close in beside)


# --- what it costs


def test_a_price_is_the_slowdown_against_the_fastest_of_each_cell() -> None:
    results = [*timed(), *fingerprints({"a:8": 1, "a:64": 2, "lone": 3})]
    found = prices(results, parse(build(results)))
    assert found.cells == len(found.priced) == 4
    assert [price.regret for price in found.priced] == pytest.approx([60 / 50, 6500 / 6000, 1700 / 1600, 430 / 400])
    assert found.median == pytest.approx((430 / 400 + 6500 / 6000) / 2)
    assert found.worst and (found.worst.taken, found.worst.best, found.worst.cell["batch"]) == (
        "triton.lone",
        "triton.a[BV=8]",
        1,
    )
    free = [*timed(), *fingerprints(EQUAL)]
    assert {price.regret for price in prices(free, parse(build(free))).priced} == {1.0}
    nothing = prices(results, parse(build([line("x", 1.0, device={**H200, "id": "nvidia-a100"})])))
    assert (nothing.cells, nothing.priced, nothing.median, nothing.worst) == (4, (), None, None)


def test_differences_of_two_policies_say_what_they_cost() -> None:
    results = [*timed(), *fingerprints(EQUAL)]
    free, single = parse(build(results)), parse(build(timed()))
    (found,) = differences(free, single, results)
    assert (
        found.before == "batch 1-8: triton.a[BV=8], batch 9 and more: triton.a[BV=64]" and found.after == "any batch: triton.lone"
    )
    assert found.cost == pytest.approx((60 + 10) / (50 + 10) - 1) and found.most == pytest.approx(0.2)
    assert differences(free, free, results) == []
    (missing,) = differences(free, parse(build([line("x", 1.0, row={"ring": 32})])), results)[:1]
    assert (missing.after, missing.cost) == ("no row", None)


def test_flips_are_counted_over_shared_cells() -> None:
    one, other = timed(), timed(scaled(TIMES, {"a:64": 0.5}))
    assert (flips(one, one).flipped, flips(one, one).cells) == (0, 4)
    found = flips(one, [r for r in other if r.batch != 128])
    assert (found.flipped, found.cells) == (2, 3)


# --- published tables


def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", DATA / "published.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gb300", "h20-3e", "b300"])
def test_the_journals_of_published_tables_hold_the_tables(name: str) -> None:
    path = DATA / f"{name}.jsonl"
    assert path.read_text(encoding="utf-8") == published().text(name)
    assert {r.command.partition(" table")[0] for r in journal.read(path)} == {"published"}


def test_the_published_ring_table_gives_the_published_choice() -> None:
    found = rows(build(journal.read(DATA / "gb300.jsonl")))
    takes = {tuple(c.values[0] for c in row.when[1:3]): [entry.use.kernel for entry in row.entries] for row in found}
    assert takes[16, "every"] == takes[16, "lazy"] == ["triton.head_group"]
    assert {tuple(takes[ring, "lazy"]) for ring in (32, 64, 128)} == {("triton.per_head",)}
    (row,) = [row for row in found if row.when[1].values == (16,) and row.when[2].values == ("every",)]
    assert row.regret == pytest.approx(17.9 / 11.5, abs=1e-3), "what it costs that the batch may not choose"


# the fastest column of each table, by the last batch that it serves; batch 2 was not swept over BV
CROSSOVERS = {
    "h20-3e": {
        "ring": {1: "fused 16", 2: "unfused", 4: "fused 32", 64: "unfused"},
        "snapshot": {1: "fused 4", 64: "unfused"},
    },
    "b300": {
        "ring": {1: "fused 16", 2: "fused 4", 4: "fused 16", 16: "fused 32", 64: "unfused"},
        "snapshot": {4: "fused 4", 64: "unfused"},
    },
}


def kda_choices(results: Sequence[Result]) -> dict[str, dict[int, str]]:
    found = {}
    for row in parse(build(results)).ops["kda_chain_verify"]:
        if row.devices:
            takes = {batch: row.entry(batch).use for batch in (1, 2, 4, 16, 64)}
            names = {batch: " ".join(map(str, (use.kernel[7:], *use.config.values()))) for batch, use in takes.items()}
            found[str(row.when[1].values[0])] = {
                batch: names[batch] for batch in names if names.get(_next(batch)) != names[batch]
            }
    return found


def _next(batch: int) -> int:
    return {1: 2, 2: 4, 4: 16, 16: 64}.get(batch, 0)


def declared(results: Sequence[Result], equal: bool) -> list[Result]:
    """The journal with fingerprints for all its variants: the same ones, or each its own."""
    known = {(r.row_key, r.variant): replace(r, stage="bits", batch=0, us=None, samples=0, work=0) for r in results}
    names = {v: n for n, v in enumerate(sorted({v for _, v in known}))}
    return [*results, *(replace(r, bits=f"{0 if equal else names[v]:016x}") for (_, v), r in known.items())]


@pytest.mark.parametrize("name", CROSSOVERS)
def test_the_published_kda_tables_give_their_crossovers_if_bits_are_equal(name: str) -> None:
    results = journal.read(DATA / f"{name}.jsonl")
    assert kda_choices(declared(results, equal=True)) == CROSSOVERS[name]
    for other in (declared(results, equal=False), results):
        assert kda_choices(other) == {"ring": {64: "unfused"}, "snapshot": {64: "unfused"}}, "no batch rule"


def test_incumbents_are_the_rows_of_one_device() -> None:
    policy = parse(build([*timed(), *fingerprints(EQUAL)]))
    (row,) = incumbents(policy, OP.name, "nvidia-h200").values()
    assert len(row.entries) == 2
    assert incumbents(policy, OP.name, "nvidia-a100") == incumbents(None, OP.name, "nvidia-h200") == {}
