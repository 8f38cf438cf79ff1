"""`routetrace experts` against a real server, files, and definitions of its figures."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from routetrace.cli.commands import app
from routetrace.cli.experts import figures
from routetrace.cli.experts.command import capacities_of, requests_of_file
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.experts.analysis.simulation import hit_curves, passes_of, steps_of
from routetrace.experts.analysis.stats import ExpertStats
from routetrace.experts.forecast import ExpertForecast
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.commands import commands
from support.models.expert_rows import drawn
from support.terminal import screen

LAYOUT = ModelLayout((1, 2, 4), 6, 24, 4)
TRACES, ROWS = 4, 60
IDS = [drawn(ROWS, 3, 24, 4, seed) for seed in range(TRACES)]
SOURCE = figures.Source("run grpo-17", "tiny", date(2026, 1, 2))
ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run "experts": four traces of one model, oldest first, and one with a hole."""
    with run_server() as server:
        model = {"model": "/models/tiny-moe"}
        feeder = Feeder(server.target, LAYOUT, run="experts", attributes=model)
        for number, rows in enumerate(IDS):
            handle = feeder.begin(f"t{number}", prompt_len=10, labels={"group": "g"})
            feeder.step(rows, [[handle, 0, ROWS]])
            feeder.finish(handle, ROWS + 1)
        handle = feeder.begin("hole", prompt_len=10)
        feeder.step(IDS[0][:20], [[handle, 0, 20]])
        feeder.step(IDS[0][30:], [[handle, 30, 30]])
        feeder.finish(handle, ROWS + 1)
        feeder.close()
        # Of another engine, which reports another model, and of one that reports none.
        for number, known in enumerate(({"model": "other/moe"}, {})):
            name = f"e{number + 1}"
            feeder = Feeder(server.target, LAYOUT, run="models", engine_id=name, attributes=known)
            handle = feeder.begin(f"m{number}", prompt_len=10)
            feeder.step(IDS[0], [[handle, 0, ROWS]])
            feeder.finish(handle, ROWS + 1)
            feeder.close()
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    return partial(commands(monkeypatch, server.target, "experts"), "experts")


def report(done: Any) -> dict[str, Any]:
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def recording(tmp_path):
    """A file of two requests, and its rows."""
    rows = drawn(120, 3, 24, 4, 8)
    path = tmp_path / "rows.npz"
    np.savez(path, ids=rows, E=24, bound=np.arange(120) % 60 == 0)
    return path, rows


# ---------------------------------------------------------------------------- report


def test_stored_traces_older_half_fitted_newer_half_measured(cli):
    found = report(cli("t0", "t1", "t2", "t3", "--json"))
    assert (found["requests"], found["rows"], found["layer_ids"]) == (4, 240, [1, 2, 4])
    stats = ExpertStats(3, 24)
    for rows in IDS:
        stats.add(rows)
    assert found["load"] == stats.load.tolist()
    for at, layer in enumerate(found["layers"]):
        assert layer["entropy"] == pytest.approx(stats.entropy[at], abs=1e-4)
        assert layer["max_violation"] == pytest.approx(stats.max_violation[at], abs=1e-4)
        assert layer["overlap"] == pytest.approx(stats.overlap[at], abs=1e-4)
        for pair in layer["together"]:
            a, b = pair["experts"]
            assert pair["lift"] == pytest.approx(stats.coactivation[at, a, b], abs=1e-2)
    forecast = ExpertForecast.fit(np.concatenate(IDS[:2]), num_experts=24)
    passes = passes_of(steps_of(np.concatenate(IDS[2:]), 24))
    cache = found["cache"]
    curves = hit_curves(passes, 24, cache["capacities"], list(cache["hit_rate"]), forecast)
    assert list(curves) == ["lru", "lfu", "hazard", "belady"]
    for name, counts in curves.items():
        assert cache["hit_rate"][name] == [round(count.hit_rate, 4) for count in counts]
        assert cache["moved"][name] == [round(count.moved / 360, 3) for count in counts]


def test_all_and_label_take_the_oldest_first(cli):
    by_name = report(cli("t0", "t1", "t2", "t3", "--json"))
    assert report(cli("--label", "group=g", "--json")) == by_name
    everything = report(cli("--all", "--json"))
    assert (everything["requests"], everything["rows"]) == (5, 290)


def test_missing_cells_are_not_counted(cli):
    found = report(cli("hole", "--json"))
    assert found["rows"] == 50
    # One trace: its first half is learnt from.
    assert (found["fitted_on_rows"], found["measured_on_rows"]) == (20, 30)


EXTRAS = ("--ranks", "4", "--replicas", "4", "--ahead", "4")


def test_a_table(cli):
    text = cli("--all", "--capacity", "6,50%", *EXTRAS).stdout
    assert "290 rows of 5 requests, 3 layers, top-4 of 24 experts" in text
    found = report(cli("--all", "--capacity", "6,50%", *EXTRAS, "--json"))

    def line(words: str) -> list[str]:
        (cells,) = re.findall(rf"^ *{re.escape(words)}  +(.*)$", text, re.M)
        return cells.split()

    assert line(f"hit rate, {found['cache']['passes']} passes") == [
        "lru",
        "lfu",
        "hazard",
        "belady",
    ]
    for at, words in enumerate(("6 slots (25%)", "12 slots (50%)")):
        rates = [rate[at] for rate in found["cache"]["hit_rate"].values()]
        assert line(words) == [f"{rate:.1%}" for rate in rates]
    first = [row for row in found["warm_start"]["rows"] if row["capacity"] == 6]
    for warm, words in ((False, "6 slots, first 64 passes"), (True, "the same, warm start")):
        rates = [row["hit_rate"] for row in first if row["warm"] is warm]
        assert line(words) == [*(f"{rate:.1%}" for rate in rates), "-"]
    ahead = [row for row in found["prefetch"] if row["capacity"] == 6 and row["ahead"]]
    assert line("6 slots, 4 copied ahead") == [*(f"{row['hit_rate']:.1%}" for row in ahead), "-"]
    assert line("the same, 4 ahead") == [*(f"{row['moved']:.2f}" for row in ahead), "-"]
    moved = [values[0] for values in found["cache"]["moved"].values()]
    assert line("6 slots, copied a pass") == [f"{value:.2f}" for value in moved]
    assert re.search(
        r"^load of 4 ranks +contiguous +round-robin +balanced, 4 replicas$", text, re.M
    )
    loads = [f"{row['max_over_mean']:.3f}" for row in found["placement"]]
    assert line("most loaded / mean") == loads


def test_a_placement_of_other_ranks_says_so(cli, recording, tmp_path):
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(np.arange(24).reshape(2, 12).tolist()))
    text = cli("--npz", str(recording[0]), "--ranks", "4", "--placement", str(file)).stdout
    assert re.search(r"^load of 4 ranks .* given, 2 ranks$", text, re.M)


def test_numbers_of_one_are_singular(cli, tmp_path):
    path = tmp_path / "two.npz"
    np.savez(path, ids=drawn(2, 1, 24, 4, 1), E=24)
    for words in ((), ("--full",)):
        text = cli("--npz", str(path), "--capacity", "1", *words).stdout
        assert "2 rows of 1 request, 1 layer, top-4" in text
        assert not re.search(r"\b1 (rows|requests|layers|passes|tokens|slots)\b", text)
        assert "1 pass" in text


@pytest.fixture
def wide(tmp_path):
    """A file of a model with 48 layers of 128 experts, and its rows."""
    rows = drawn(60, 48, 128, 8, 1)
    path = tmp_path / "wide.npz"
    np.savez(path, ids=rows, E=128, bound=np.arange(60) % 30 == 0)
    return path, rows


@pytest.mark.long
def test_all_tables_fit_one_screen(wide):
    words = ("experts", "--npz", str(wide[0]), "--passes", "4")
    for extras in ((), ("--ahead", "8", "--ranks", "8", "--replicas", "8")):
        shown = screen(*words, *extras)
        assert 15 <= len(shown) <= 22
        assert max(map(len, shown)) <= 79
        assert shown[-1] == (
            "--help and docs/experts.md, The figures, explain the words; --full: all layers"
        )


@pytest.mark.long
def test_full_tables_are_whole_at_80_columns(wide):
    words = ("experts", "--npz", str(wide[0]), "--passes", "4", "--full")
    shown = screen(*words, "--ahead", "8", "--ranks", "8", "--replicas", "8")
    assert max(map(len, shown)) <= 80
    for header in ("dead experts", "frequency", "copied under lru", "at layer"):
        assert all(re.search(rf"\b{word}\b", "\n".join(shown)) for word in header.split())
    layers = [line for line in shown if re.match(r" *47 +0\.\d{3} ", line)]
    assert [re.search(r" \d\d\.\d%$", line.rstrip()) is not None for line in layers] == [True]


def test_the_words_of_the_tables_are_explained(cli):
    """In --help and on the page that the last line names."""
    said = re.sub(r"[\s│]+", " ", cli("--help").stdout)
    page = (ROOT / "docs" / "experts.md").read_text("utf-8")
    (section,) = re.findall(r"^## The figures\n(.*?)(?=^## )", page, re.M | re.S)
    for word in ("balanced", "violation", "dead", "entropy", "top 10", "overlap", "next layer",
                 "by frequency", "hazard", "belady", "warm start", "copied"):  # fmt: skip
        assert f"{word}" in said, word
        assert word in section, word


def test_means_and_extremes_over_the_layers(wide, cli):
    path, rows = wide
    stats = ExpertStats(48, 128)
    for part in np.split(rows, 2):
        stats.add(part)
    (line,) = re.findall(r"^max violation +(.*)$", cli("--npz", str(path)).stdout, re.M)
    mean, low, low_layer, high, high_layer = map(float, line.split())
    found = stats.max_violation
    assert (low_layer, high_layer) == (found.argmin(), found.argmax())
    assert [mean, low, high] == pytest.approx([found.mean(), found.min(), found.max()], abs=0.006)


@pytest.mark.long
def test_full_has_each_layer_and_capacity(wide, cli):
    said = cli("--npz", str(wide[0]), "--full").stdout
    assert [int(n) for n in re.findall(r"^ *(\d+) +0\.\d{3} ", said, re.M)] == [*range(48)]
    assert len(re.findall(r"^ *\d+ +hazard ", said, re.M)) == 6
    brief = cli("--npz", str(wide[0])).stdout
    assert re.findall(r"^(\d+) slots \(", brief, re.M) == ["16", "32", "64"]
    assert re.findall(r"^(\d+) slots, first", brief, re.M) == ["32"], "a quarter of the experts"


def test_layers_are_cut(cli):
    whole, cut = report(cli("--all", "--json")), report(cli("--all", "--json", "--layers", "2,4"))
    assert cut["layer_ids"] == [2, 4]
    assert cut["load"] == whole["load"][1:]
    assert "layer_ids" in cli("--all", "--layers", "3", code=2).output


def test_files_as_get_writes_them(cli, tmp_path):
    runner = CliRunner()
    for number in range(TRACES):
        words = ["get", f"t{number}", "-o", str(tmp_path / f"{number}.npz")]
        assert runner.invoke(app, words).exit_code == 0
    files = [word for n in range(TRACES) for word in ("--npz", str(tmp_path / f"{n}.npz"))]
    assert report(cli(*files, "--json")) == report(cli("t0", "t1", "t2", "t3", "--json"))


def test_recordings_need_no_server(recording):
    path, rows = recording
    done = CliRunner().invoke(
        app, ["experts", "--npz", str(path), "--json", "--target", "127.0.0.1:1"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["fitted_on_rows"], found["measured_on_rows"]) == (60, 60)
    assert found["layer_ids"] == [0, 1, 2]
    for request, expected in zip(requests_of_file(path), np.split(rows, 2), strict=True):
        np.testing.assert_array_equal(request.rows, expected)


def test_what_is_learnt_from_another_file_is_not_measured(cli, recording, tmp_path):
    path, rows = recording
    other = tmp_path / "other.npz"
    np.savez(other, ids=drawn(50, 3, 24, 4, 99), E=24)
    found = report(cli("--npz", str(path), "--fit-npz", str(other), "--json"))
    assert (found["fitted_on_rows"], found["measured_on_rows"], found["rows"]) == (50, 120, 120)


def test_a_batch_and_a_limit(cli, recording):
    path, rows = recording
    words = ("--npz", str(path), "--fit-npz", str(path), "--json", "--capacity", "12")
    cache = report(cli(*words, "--batch", "2"))["cache"]
    assert (cache["batch"], cache["passes"]) == (2, 60)
    starts = np.arange(120) % 60 == 0
    steps = steps_of(rows, 24, starts=starts, batch=2)
    passes = passes_of(steps)
    # Learnt from passes of as many, too.
    forecast = ExpertForecast.fit(rows, num_experts=24, starts=starts, batch=2)
    curves = hit_curves(passes, 24, [12], list(cache["hit_rate"]), forecast)
    assert cache["hit_rate"] == {name: [round(c[0].hit_rate, 4)] for name, c in curves.items()}
    assert cache["needed"] == round(np.mean([len(n) for layer in passes for n in layer]), 3)
    assert report(cli(*words, "--passes", "7"))["cache"]["passes"] == 7
    # A long request leaves room for the others.
    few = report(cli(*words, "--batch", "2", "--passes", "7"))["cache"]
    needed = [len(n) for layer in passes_of(steps[:7]) for n in layer]
    assert (few["passes"], few["needed"]) == (7, round(np.mean(needed), 3))


def test_copied_ahead(cli, recording):
    found = report(cli("--npz", str(recording[0]), "--json", "--capacity", "8", "--ahead", "4"))
    rows = {(row["policy"], row["ahead"]): row for row in found["prefetch"]}
    assert rows["lru", 0]["hit_rate"] == found["cache"]["hit_rate"]["lru"][0]
    assert rows["lru", 0]["moved"] == found["cache"]["moved"]["lru"][0]
    assert rows["lru", 4]["moved"] > rows["lru", 0]["moved"]
    assert "prefetch" not in report(cli("--npz", str(recording[0]), "--json"))


# ---------------------------------------------------------------------------- placement


def test_a_given_placement(cli, recording, tmp_path):
    path, rows = recording
    slots = np.arange(24).reshape(4, 6)
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(slots.tolist()))
    words = ("--npz", str(path), "--json", "--ranks", "4")
    found = report(cli(*words, "--placement", str(file)))["placement"]
    by_name = {row.pop("placement"): row for row in found}
    assert by_name["given"] == by_name["contiguous"]
    load = np.bincount(rows[60:, 1].ravel(), minlength=24).reshape(4, 6).sum(1)
    assert by_name["given"]["rank_share"][1] == pytest.approx(
        (load / load.sum()).tolist(), abs=1e-5
    )
    # For each layer; the third rank has replicas of what the first one has.
    each = np.stack([np.concatenate([slots, slots[[2, 3, 0, 1]]], 1)] * 3)
    file.write_text(json.dumps(each.tolist()))
    given = report(cli("--npz", str(path), "--json", "--placement", str(file)))["placement"][0]
    assert (given["placement"], given["ranks"], given["replicas"]) == ("given", 4, 24)
    shared = (load + load[[2, 3, 0, 1]]) / 2 / load.sum()
    assert given["rank_share"][1] == pytest.approx(shared.tolist(), abs=1e-5)


@pytest.mark.parametrize("text", ["[[0, 1], [2]]", "[[0.5]]", "nothing", "[[0, 1]]", "[1]"])
def test_bad_placements(cli, recording, tmp_path, text):
    file = tmp_path / "placement.json"
    file.write_text(text)
    assert "lacement" in cli("--npz", str(recording[0]), "--placement", str(file), code=2).output


# ---------------------------------------------------------------------------- errors


def test_bad_words(cli, recording, tmp_path):
    path = str(recording[0])
    for words in (
        (),
        ("t0", "--all"),
        ("t0", "--npz", path),
        ("--npz", path, "--capacity", "x"),
        ("--npz", path, "--capacity", "0"),
        ("--npz", path, "--ranks", "5"),
        ("--npz", path, "--ranks", "4", "--replicas", "3"),
        ("--npz", path, "--layers", "7"),
    ):
        cli(*words, code=2)
    for words in (
        ("--label", "group=none"),
        ("nobody",),
        ("--npz", str(tmp_path / "none.npz")),
    ):
        cli(*words, code=1)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"ids": np.zeros((3, 1, 1), int)},
        {"ids": np.zeros((3, 1)), "E": 4},
        {"ids": np.zeros((3, 1, 1), int), "E": 4, "bound": np.zeros(2, bool)},
        {"ids": np.full((3, 1, 1), 4), "E": 4},
        {"topk_ids": np.zeros((3, 1, 1), int)},
    ],
)
def test_files_that_hold_something_else(cli, tmp_path, arrays):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    cli("--npz", str(path), code=2)


def test_a_file_that_is_none(cli, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no")
    cli("--npz", str(tmp_path / "a.npz"), code=2)


def test_models_are_not_mixed(cli, recording, tmp_path):
    np.savez(tmp_path / "b.npz", ids=drawn(20, 3, 16, 4, 1), E=16)
    done = cli("--npz", str(recording[0]), "--npz", str(tmp_path / "b.npz"), code=2)
    assert "one model: top-4 of 24" in done.output


def test_capacities():
    assert capacities_of("16, 32", 128) == (16, 32)
    assert capacities_of("25%,50%", 128) == (32, 64)
    assert capacities_of(None, 128) == ()
    for text in ("a", "1,,2", "-1", "12.5%"):
        with pytest.raises(InvalidArgument):
            capacities_of(text, 128)


# ---------------------------------------------------------------------------- pictures


def test_without_matplotlib_the_extra_is_named(cli, recording, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = cli("--npz", str(recording[0]), "--png", str(tmp_path / "out"), code=2)
    assert "pip install matplotlib" in done.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidArgument):
        figures.draw({}, tmp_path, SOURCE)


def test_nothing_imports_matplotlib_before_it_draws():
    assert "\nimport matplotlib" not in inspect.getsource(figures)


@needs_matplotlib
def test_pictures(cli, recording, tmp_path):
    out = tmp_path / "out"
    done = cli("--npz", str(recording[0]), "--png", str(out), "--ranks", "4")
    names = ["experts-hit-rate.png", "experts-load.png", "experts-ranks.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert path.read_bytes().startswith(PNG)
        assert str(path) in done.stderr


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture
def made(monkeypatch) -> list[Any]:
    """Figures that are drawn, in place of their files."""
    found: list[Any] = []
    monkeypatch.setattr(figures, "_save", lambda figure, file: found.append(figure) or file)
    return found


@needs_matplotlib
def test_pictures_name_their_rows_and_cover_nothing(cli, recording, tmp_path, made):
    found = report(cli("--npz", str(recording[0]), "--ranks", "4", "--json"))
    figures.draw(found, tmp_path, SOURCE)
    tokens = found["rows"], found["cache"]["passes"], found["placement"][0]["rows"]
    assert len(made) == len(tokens) == 3
    for figure, number in zip(made, tokens, strict=True):
        title, origin = figure.get_suptitle().split("\n")
        assert title
        parts = origin.split("  |  ")
        assert (parts[0], parts[3]) == ("run grpo-17", "2026-01-02")
        assert parts[1] == "tiny (3 MoE layers, top-4 of 24 experts)"
        assert parts[2].startswith(f"{number:,} ")
        assert all(axes.get_legend() is None for axes in figure.axes)
    (_, legend, _) = (figure.legends for figure in made)
    assert [text.get_text().partition(":")[0] for text in legend[0].get_texts()] == list(
        found["cache"]["hit_rate"]
    )


def models_of(made: list[Any]) -> set[str]:
    found = {figure.get_suptitle().split("  |  ")[1].partition(" (")[0] for figure in made}
    made.clear()
    return found


@needs_matplotlib
def test_pictures_name_the_model_that_engines_report(cli, recording, tmp_path, made):
    out = ("--png", str(tmp_path))
    cli("--all", *out)
    assert models_of(made) == {"tiny-moe"}
    cli("--all", *out, "--model", "given")
    assert models_of(made) == {"given"}
    cli("--all", "--run", "models", *out)
    assert models_of(made) == {"other/moe"}
    for words in (("m1", "--run", "models"), ("--npz", str(recording[0]))):
        cli(*words, *out)
        assert models_of(made) == {"model not named"}
    cli("--npz", str(recording[0]), "--model", "given", *out, "--layers", "0-1")
    assert "rows.npz, layers 0-1  |  given (2 MoE layers," in made[0].get_suptitle()


@needs_matplotlib
def test_a_picture_of_some_layers_says_of_how_many(cli, recording):
    found = report(cli("--npz", str(recording[0]), "--json")) | {"cached_layers": [0, 2]}
    assert "(2 of 3 MoE layers, top-4" in figures._hit_rates(found, SOURCE).get_suptitle()
    assert "(3 MoE layers, top-4" in figures._load(found, SOURCE).get_suptitle()


@needs_matplotlib
def test_captions_stay_in_the_picture(cli, recording):
    found = report(cli("--npz", str(recording[0]), "--json"))
    source = SOURCE._replace(rows="run " + "r" * 60, model="Qwen/" + "Q" * 60)
    figure = figures._hit_rates(found, source)
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1
    assert figure.get_suptitle().count("\n") == 3
    assert figure.get_suptitle().endswith("2026-01-02")


@needs_matplotlib
def test_equal_policies_are_all_visible():
    rates = {name: [0.1, 0.5] for name in ("lru", "lfu", "hazard", "belady")}
    found = {"cache": {"capacities": [2, 4], "passes": 9, "batch": 1, "hit_rate": rates,
                       "moved": rates}}  # fmt: skip
    found |= {"layer_ids": [0], "num_experts": 8, "top_k": 1}
    lines = figures._hit_rates(found, SOURCE).axes[0].get_lines()
    drawn_with = [(line.get_linewidth(), line.get_markersize()) for line in lines[:3]]
    assert sorted(drawn_with, reverse=True) == drawn_with, "each one is seen around the next"
    assert len({line.get_marker() for line in lines}) == 4
    assert lines[3].get_linestyle() == "--"


def load_of(*load: list[int]) -> dict[str, Any]:
    layers = list(range(len(load)))
    return {"load": load, "layer_ids": layers, "num_experts": len(load[0]), "top_k": 1, "rows": 32}


@needs_matplotlib
def test_an_even_load_is_the_neutral_colour():
    figure = figures._load(load_of([8, 8, 8, 8], [4, 8, 8, 12], [4, 4, 4, 20]), SOURCE)
    (shown,) = figure.axes[0].images
    colours = shown.cmap(shown.norm(shown.get_array()))
    white = colours[0, 0]
    assert white[:3].min() > 0.95
    assert (colours[1, 1] == white).all()
    assert colours[2, 0, 2] > colours[2, 0, 0]  # half the mean: blue
    assert colours[2, 3, 0] > colours[2, 3, 2]  # more than the mean: red
    assert shown.norm.vmin == -shown.norm.vmax
    assert not figure.legends, "no expert is dead"


@needs_matplotlib
def test_dead_experts_have_a_colour_of_their_own():
    figure = figures._load(load_of([0, 1, 24, 39], [16, 16, 16, 16]), SOURCE)
    for axes in figure.axes[:2]:
        (shown,) = axes.images
        colours = shown.cmap(shown.norm(shown.get_array()))[0, :, :3].tolist()
        red, green, blue = colours[0 if axes is figure.axes[0] else 3]
        assert red == green == blue < 0.8, "grey, which the scale has not"
        assert colours.count([red, green, blue]) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["dead: no token chose it (1 of 8)"]
    # The scale reaches the lowest load, 1/16 of the mean, though the highest is 2.4 times it.
    assert (shown.norm.vmin, shown.norm.vmax) == (-4, 4)


@needs_matplotlib
def test_ranks_have_means_and_a_dot_for_each_layer():
    share = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.3, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2]]
    row = {"ranks": 4, "replicas": 0, "rows": 9, "rank_share": share}
    found = {"placement": [row | {"placement": "contiguous"},
                           row | {"placement": "balanced", "replicas": 4}]}  # fmt: skip
    found |= {"layer_ids": [3, 4, 5], "num_experts": 8, "top_k": 1}
    figure = figures._ranks(found, SOURCE)
    left, right = figure.axes[:2]
    np.testing.assert_allclose(left.images[0].get_array(), [[1, 2, 1.6]] * 2)
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels == ["contiguous\nmean 1.53", "balanced, 4 replicas\nmean 1.53"]
    dots = [line for line in right.get_lines() if line.get_marker() == "o"]
    assert [dot.get_xdata().tolist() for dot in dots] == [[1, 2, 1.6]] * 2
    bars = [line for line in right.get_lines() if line.get_linewidth() == 2]
    assert [bar.get_xdata()[0] for bar in bars] == pytest.approx([4.6 / 3] * 2)


# ---------------------------------------------------------------------------- docs/experts.md


def test_the_page_shows_every_picture():
    page = (ROOT / "docs" / "experts.md").read_text("utf-8")
    shown = set(re.findall(r"\]\(experts/([\w-]+\.png)\)", page))
    assert shown == {path.name for path in (ROOT / "docs" / "experts").glob("*.png")}
    results = json.loads((ROOT / "docs" / "experts" / "results.json").read_text("utf-8"))
    assert {name.rpartition("-")[0].removesuffix("-hit") for name in shown} == set(results)
    for name, found in results.items():
        for at, slots in enumerate(found["cache"]["capacities"]):
            rates = {policy: rate[at] for policy, rate in found["cache"]["hit_rate"].items()}
            assert max(rates.values()) == rates["belady"], (name, slots)


@pytest.mark.long
@needs_matplotlib
def test_the_report_is_made_without_recordings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("experts_report")
    monkeypatch.setattr(report, "DATA", tmp_path)
    monkeypatch.setattr(sys, "argv", ["experts_report", "--quick", "--out", str(tmp_path)])
    report.main()
    page = (tmp_path / "experts.md").read_text("utf-8")
    assert "No recordings were at hand" in page
    assert page.startswith((ROOT / "docs" / "experts.md").read_text("utf-8")[:2000])
    for part in ("load", "hit-rate", "ranks"):
        assert (tmp_path / "experts" / f"drawn-{part}.png").read_bytes().startswith(PNG)
        assert f"(experts/drawn-{part}.png)" in page
