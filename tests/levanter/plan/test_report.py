"""The report of a verdict as text and as JSON: every number adds up, every line fits, nothing steers a terminal."""

import json
import re
from dataclasses import replace

import pytest
from helpers.golden import GOLDEN, assert_golden
from helpers.verdicts import (
    BATCH,
    CACHE,
    CLOCK,
    GIB,
    POD,
    failed_verdict,
    fitting_verdict,
    hostile_verdict,
    refused_verdict,
    tiny_budget,
    tiny_plan,
)

from haliax_ext.hlo import Scope
from haliax_ext.program import Program
from levanter.hardware import parse_accelerator
from levanter.html.format import columns, percent_between, seconds_text, span_text, three_digits, visible
from levanter.plan.aot import Compiled
from levanter.plan.report import render, timing, to_html, to_json, view
from levanter.plan.report.text_table import WIDTH, bar, paragraph, table
from levanter.plan.verdict import ProgramVerdict

pytestmark = pytest.mark.quick

SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
VERDICTS = {"fits": fitting_verdict, "refused": refused_verdict, "failed": failed_verdict}


def nbytes(text: str) -> int:
    """What `1.25 GiB` says, as bytes."""
    number, unit = text.split()
    return round(float(number) * SIZES[unit])


@pytest.mark.golden
@pytest.mark.parametrize("name", VERDICTS)
def test_golden_texts(name):
    text = render([VERDICTS[name]()])
    assert_golden(f"report/{name}.txt", text)
    assert max(columns(line) for line in text.splitlines()) <= WIDTH


@pytest.mark.golden
def test_golden_comparison():
    verdicts = [fitting_verdict(), refused_verdict(), failed_verdict()]
    text = render(verdicts)
    assert_golden("report/comparison.txt", text)
    assert max(columns(line) for line in text.splitlines()) <= WIDTH


def test_the_bytes_of_a_chip_add_up_to_its_memory():
    verdict = fitting_verdict()
    text = render([verdict])
    block = text.split("bytes on a chip", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^  (\w[\w ]*?)\s{2,}([\d.]+ \w+)", block, flags=re.M)
    sizes = {name: nbytes(size) for name, size in rows}
    assert sizes["kv cache"] == CACHE and sizes["batch"] == BATCH
    # Peak of 4 GiB beyond the inputs, of which 4 KiB are padding.
    assert sizes["temporaries"] == pytest.approx(4 * GIB, rel=0.01)
    assert sizes["layout padding"] == 4096
    assert sum(sizes.values()) == pytest.approx(POD.hbm_bytes, rel=0.001)


def test_bars_stand_where_the_bytes_are():
    """Each bar begins where the one above ended, and the last ends at the share of memory that is used."""
    block = render([fitting_verdict()]).split("bytes on a chip", 1)[1].split("\n\n", 1)[0]
    bars = dict(re.findall(r"^  (\w[\w ]*?)\s{2,}.*▕(.*)▏$", block, flags=re.M))
    width = len(bars["free"])
    assert bars["free"].index("┊") == width - 1
    start, end = len(bars["kv cache"]) - len(bars["kv cache"].lstrip()), len(bars["kv cache"].rstrip(" ┊"))
    assert (start, end) == (0, pytest.approx(CACHE / POD.hbm_bytes * width, abs=1))
    used = (CACHE + BATCH + 4 * GIB) / POD.hbm_bytes
    assert len(bars["temporaries"].rstrip(" ┊")) == pytest.approx(used * width, abs=1)


def test_a_comparison_marks_lower_bounds():
    """Compiled bytes and bounds by arithmetic stand in one column: 11.50 GiB as compiled, at least 20 of the other."""
    plain = fitting_verdict(programs=(ProgramVerdict(name="small", outcome=None),), headline="not compiled: 20 GiB")
    plain = replace(plain, lower_bound=20 * GIB)
    for page in (render([fitting_verdict(), plain]), to_html([fitting_verdict(), plain])):
        assert "≥ 20.00" in page and "≥ 11.50" not in page and "11.50" in page
    # Inputs alone are a bound, too.
    assert view.known_text(replace(plain, lower_bound=None)) == "≥ 7.50"
    assert "≥" not in render([fitting_verdict(), fitting_verdict()])
    assert to_json([plain])["verdicts"][0]["lower_bound_bytes"] == 20 * GIB


def test_a_refusal_shows_how_much_is_too_much():
    text = render([refused_verdict()])
    assert "DOES NOT FIT  36.93 GiB > 31.25 GiB (small)" in text
    assert re.search(r"too much +5\.68 GiB", text)
    assert "would take less: {embed: [data, model]}\n      → params:\n          embed: data" in text


def test_modules_add_up_to_the_compilers_cycles():
    """Every `estimated_cycles` of the golden text, loops counted three times, over v4's clock."""
    verdict = fitting_verdict()
    program = verdict.programs[0]
    found = timing.module_times(program)
    text = (GOLDEN / "hlo" / "small_v4.txt").read_text()
    entry = text[text.index("\nENTRY ") :]
    once = sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', entry))
    every = sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', text))
    seconds = (once + 3 * (every - once)) / CLOCK
    assert program.time is not None
    assert sum(part.seconds for part in found) + program.time.exposed == pytest.approx(program.time.expected)
    assert program.time.cycles == pytest.approx(seconds, rel=0.02)
    assert sum(part.seconds for part in found) == pytest.approx(1.25 * seconds, rel=0.02)
    mlp = next(part for part in found if part.name == "mlp")
    assert sum(mlp.during.values()) == pytest.approx(mlp.seconds)
    assert {"forward", "backward"} <= set(mlp.during)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformer.layers.self_attn.q_proj", "self_attn"),
        ("layers.mlp", "mlp"),
        ("layers", "layers, outside any module"),
        ("optimizer.scale_by_adam", "optimizer"),
        ("(unnamed)", "without a name"),
    ],
)
def test_modules_are_named_below_the_trunk(module, name):
    assert timing.module_name(Scope(module)) == name


def test_collectives_by_hand():
    """3 layers × (2 weights, forward and backward) of 2 MiB gathered over data: [1024, 2048] bf16, half on a device."""
    wires = {wire.over: wire for wire in timing.wires(fitting_verdict(), fitting_verdict().programs[0])}
    gathers = next(t for t in wires["data"].kinds if t.kind == "all-gather")
    assert (gathers.count, gathers.nbytes) == (12, 12 * 1024 * 1024 * 2)
    assert {wire.network for wire in wires.values()} == {"ICI"}
    busy, exposed = wires["data"].busy, wires["data"].exposed
    assert busy is not None and exposed is not None and exposed <= busy


@pytest.mark.parametrize(
    ("target", "ici", "dcn", "place"),
    [
        ("2xv5p-128", "ICI", "DCN", "2xv5p-128 (2 slices of 4×4×4: 128 chips, 32 hosts)"),
        ("h100x64", "NVLink", "network", "h100x64 (8 NVLink domains of 8: 64 GPUs, 8 hosts)"),
        ("gb200x144", "NVLink", "network", "gb200x144 (2 NVLink domains of 72: 144 GPUs, 36 hosts)"),
        ("l4x16", "PCIe", "network", "l4x16 (2 hosts of 8: 16 GPUs, 2 hosts)"),
        ("l4x1", "PCIe", "network", "l4x1 (1 GPU, 1 host)"),
    ],
)
def test_links_have_the_names_of_the_target(target, ici, dcn, place):
    verdict = replace(fitting_verdict(), accelerator=parse_accelerator(target))
    assert view.place(verdict) == place
    assert [view.link_name(verdict, name) for name in ("ici", "dcn", "unknown")] == [ici, dcn, "unknown"]
    for format_ in ("text", "html"):
        page = render([verdict]) if format_ == "text" else to_html([verdict])
        assert ici in page and (ici == "ICI" or not re.search(r"\bICI\b", page)), format_
    (wire, *_) = to_json([verdict])["verdicts"][0]["programs"][0]["collectives"]
    # Scripts compare `network` across targets; `link` is for people.
    assert (wire["network"], wire["link"]) == ("ICI", ici)


def test_rates_and_the_whole_job():
    verdict = fitting_verdict()
    program = verdict.programs[0]
    speed, time = timing.rate(verdict, program), program.time
    assert speed is not None and time is not None
    assert speed.tokens_per_second_per_chip == (
        pytest.approx(4_096 / 8 / time.high),
        pytest.approx(4_096 / 8 / time.low),
    )
    assert speed.expected == pytest.approx(4_096 / 8 / time.expected)
    assert time.low < time.expected <= time.high
    share = timing.utilization(program, program.mfu)
    assert share == pytest.approx(2e11 / (8 * POD.peak_flops() * time.expected))
    assert view.job_seconds(verdict) == (pytest.approx(100 * time.low), pytest.approx(100 * time.high))
    assert program.workload is not None
    unknown = replace(verdict, programs=(replace(program, workload=replace(program.workload, executions=None)),))
    assert view.job_seconds(unknown) is None
    assert "the number of executions is unknown" in render([unknown])


def test_without_the_compiler_there_is_arithmetic_only():
    verdict = fitting_verdict(programs=(ProgramVerdict(name="small", outcome=None),), headline="not compiled: 7.50 GiB")
    text = render([verdict])
    assert text.splitlines()[1] == "NOT COMPILED  7.50 GiB"
    assert "7.50 GiB of 30.75 GiB (inputs alone)" in text
    assert "  temporaries  " not in text.split("programs")[0] and "time of" not in text
    assert "modelled" in render([verdict, verdict])


def test_devices_without_a_limit():
    plan = tiny_plan()
    verdict = fitting_verdict(budget=replace(tiny_budget(plan), hbm_bytes=None), accelerator=None, target="local")
    text = render([verdict])
    assert text.startswith("eval_lm on local (8 × ")
    assert "bytes on a chip while small runs: 11.50 GiB (as compiled)" in text
    assert "free" not in text.split("bytes on a chip")[1].split("\n\n")[0]
    assert to_json([verdict])["verdicts"][0]["hbm_bytes"] is None


def test_what_was_not_looked_at_is_no_fault():
    verdict = fitting_verdict()
    absent = "tokenizer: not checked here: org/model <not> here & now"
    stage = replace(verdict.stages[0], findings=(absent,))
    assert view.findings(replace(verdict, stages=(stage,))) == ()
    wrong = replace(stage, status="refused", findings=("a bad key", absent))
    assert view.findings(replace(verdict, stages=(wrong,))) == ("a bad key",)
    assert "not checked here\n  • tokenizer: org/model <not> here & now" in render([verdict])


def test_nothing_steers_the_terminal():
    verdict = hostile_verdict()
    for text in (render([verdict]), render([verdict, verdict])):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
        assert "\\x1b[31mred\\x07" in text and "日本語 naïve" in text
        text.encode("utf-8")
        assert max(columns(line) for line in text.splitlines()) <= WIDTH


def test_json_is_plain_and_says_the_same():
    verdict = fitting_verdict()
    document = to_json([verdict, refused_verdict(), failed_verdict(), hostile_verdict()])
    again = json.loads(json.dumps(document, allow_nan=False, ensure_ascii=False).encode("utf-8"))
    assert again == document
    assert again["schema"] == "levanter.plan/1"
    first, second, third, _ = again["verdicts"]
    assert [v["state"] for v in again["verdicts"][:3]] == ["fits", "does not fit", "bad input"]
    assert [v["exit_code"] for v in again["verdicts"][:3]] == [0, 3, 2]
    assert sum(first["bytes"]["groups"].values()) == first["bytes"]["used_bytes"] == first["peak_bytes"]
    assert sum(array["bytes"] for array in first["arrays"]) == first["programs"][0]["input_bytes"]
    assert second["programs"][0]["refusal"]["needed_bytes"] == round(36.93 * GIB)
    assert third["mesh"] is None and third["programs"] == []
    time = first["programs"][0]["time"]
    assert time["low_seconds"] <= time["expected_seconds"] <= time["high_seconds"]


@pytest.mark.golden
def test_json_keys_are_a_promise():
    def keys(value, at=""):
        if isinstance(value, dict):
            for key, entry in value.items():
                # Keys that are names of the run's own things, not ours.
                inside = f"{at}.*" if at.endswith((".groups", ".by_pass", ".axes")) else f"{at}.{key}"
                yield from keys(entry, inside)
        elif isinstance(value, list) and value:
            for entry in value:
                yield from keys(entry, f"{at}[]")
        else:
            yield at

    document = to_json([fitting_verdict(), refused_verdict()])
    assert_golden("report/json_keys.txt", "\n".join(sorted(set(keys(document)))))


def test_infinite_numbers_become_null():
    verdict = fitting_verdict()
    program = replace(verdict.programs[0], mfu=(float("inf"), float("nan")))
    document = to_json([replace(verdict, programs=(program,))])
    assert document["verdicts"][0]["programs"][0]["mfu"] == {"low": None, "high": None, "expected": None}
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.2, 1.45, "1.20–1.45 s"),
        (0.0123, 0.0456, "12.3–45.6 ms"),
        (0.0, 0.0, "0 s"),
        (5e-7, 5e-7, "0.5 µs"),
        (90.0, 119.0, "90.0–119 s"),
        (90.0, 150.0, "1.50–2.50 min"),
        (7200.0, 7200.0, "2.00 h"),
        (860_000.0, 1_296_000.0, "9.95–15.0 days"),
        (1.0, 1.001, "1.00 s"),
    ],
)
def test_durations(low, high, text):
    assert span_text(low, high) == text


def test_numbers():
    assert [three_digits(x) for x in (0, 0.01234, 0.9999, 9.996, 99.96, 1234567)] == [
        "0",
        "0.0123",
        "1.00",
        "10.0",
        "100",
        "1,230,000",
    ]
    assert seconds_text(0.25) == "250 ms"
    assert percent_between(0.3811, 0.4562) == "38.1–45.6 %"
    assert percent_between(0.45, 0.4501) == "45.0 %"
    assert visible("a\x00b\tc\nd") == "a\\x00b\tc\nd"


@pytest.mark.parametrize("width", [1, 7, 44])
def test_bars_never_leave_their_scale(width):
    for begin in range(0, 101, 5):
        for length in range(0, 101 - begin, 5):
            drawn = bar(begin / 100, length / 100, width=width, mark=1.0)
            assert len(drawn) == width
            full = sum("▏▎▍▌▋▊▉█▐".find(c) >= 0 for c in drawn)
            assert abs(full - length / 100 * width) < 2
            assert (full > 0) == (length > 0)


def test_tables_cut_paths_in_front():
    rows = [("x" * 200 + ".weight", "1 GiB"), ("日本語" * 4, "22 MiB")]
    lines = table(rows, align=("left", "right"))
    assert all(columns(line) <= WIDTH for line in lines)
    assert lines[0].startswith("  …x") and lines[0].endswith(".weight   1 GiB")
    assert len({columns(line) for line in lines}) == 1


def test_paragraphs_wrap_wide_letters_and_break_long_words():
    lines = paragraph("一二三 " * 40 + "x" * 300 + " end\n    indented stays", mark="• ")
    assert all(columns(line) <= WIDTH for line in lines)
    assert lines[0].startswith("  • 一二三") and all(line.startswith("    ") for line in lines[1:])
    assert "".join(lines).count("x") == 300
    assert lines[-1] == "        indented stays"
    assert paragraph("a    b", indent=0) == ["a    b"]
    for lead in range(90, 112):
        assert not any(line.endswith("533") for line in paragraph("x" * lead + " links 533 ms, and more", indent=0))


def test_programs_of_saving_that_fit_are_one_line_and_one_that_does_not_is_shown():
    """Each runs beside 20 GiB that stay; the second needs more than a v4 has left."""
    verdict = fitting_verdict()
    plan = tiny_plan()
    names = ("save.gather.1", "save.gather.2", "save.gather.with.a.name.as.long.as.they.come.of.a.large.array")
    plan = replace(plan, saving=tuple(Program(name=name, function=abs, inputs=()) for name in names))
    outcome = next(p.outcome for p in verdict.programs if isinstance(p.outcome, Compiled))

    def saved(name: str, peak: int) -> ProgramVerdict:
        held = replace(outcome, name=name, memory=replace(outcome.memory, peak=peak))
        return ProgramVerdict(name=name, outcome=held, coresident_bytes=20 * GIB)

    more = (saved(names[0], GIB), saved(names[1], 11 * GIB), saved(names[2], 2 * GIB))
    text = render([replace(verdict, plan=plan, programs=(*verdict.programs, *more))])
    flat = " ".join(text.split())
    assert f"2 more Programs for loading and saving: at most 22.00 GiB ({names[2]})" in flat
    # The table shortens names.
    (row,) = [line for line in text.splitlines() if "gather.2 " in line and "does not fit" in line]
    assert "31.00 GiB" in row and "20.00 GiB" in row
    assert max(columns(line) for line in text.splitlines()) <= WIDTH
