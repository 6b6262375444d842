"""The page: self-contained, escaped, complete. It is parsed, not searched, where that matters."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mitigate import pareto
from mitigate.config import VariantConfig, to_dict
from mitigate.config_search import SearchConfig
from mitigate.report import page
from mitigate.rows import Row
from tests.fake_rows import fake_failure, fake_row, fake_rows, store_gates

EVIL = "</pre><script>alert('x')</script>&<b onclick=\"x\">"
CONFIG = to_dict(SearchConfig(name="quick", trials=20, space={"window": (8, 16), "stagger": ("none", "half")}))
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes, text by section, and whether the tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.text: list[str] = []
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        where = self.stack[-1] if self.stack else ""
        if where in self.raw:
            self.raw[where].append(data)
        else:
            self.text.append(data)


def render(rows: list[Row], config: dict[str, object] | None = None, folder: Path = Path("results/quick")) -> str:
    """The page without its figures, which cost most of the time."""
    return page.render(folder, rows, CONFIG if config is None else config, [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[Row]]:
    """A study folder with a full report."""
    folder = tmp_path_factory.mktemp("quick")
    rows = [*fake_rows(5, 1), fake_failure(5, EVIL, VariantConfig())]
    return folder, page.write_report(folder, rows, CONFIG), rows


def test_report_writes_figures_and_one_page(whole: tuple[Path, list[Path], list[Row]]) -> None:
    folder, written, _ = whole
    names = [path.relative_to(folder).as_posix() for path in written]
    expected = [f"figures/{drawing.name}.{kind}" for drawing in page.DRAWINGS for kind in ("png", "svg")]
    assert names == [*expected, "report.html"] and all(path.stat().st_size > 0 for path in written)
    assert sorted(path.name for path in folder.iterdir()) == ["figures", "report.html"]


def test_page_needs_no_network(whole: tuple[Path, list[Path], list[Row]]) -> None:
    text = (whole[0] / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.stack == []
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"):
                assert value is not None and value.startswith(("#", "data:")), (tag, name, value)
            if name == "style":
                assert not re.search(r"url\((?!#)", value or "")
    code = "".join(parsed.raw["style"] + parsed.raw["script"])
    assert "@import" not in code and not re.search(r"url\((?!#)|//|fetch\(|XMLHttpRequest|import\(", code)
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_page_holds_every_figure_inline_with_its_own_ids(whole: tuple[Path, list[Path], list[Row]]) -> None:
    parsed = Page((whole[0] / "report.html").read_text(encoding="utf-8"))
    large = [attributes for tag, attributes in parsed.tags if tag == "svg" and not (attributes.get("class") or "").startswith(("spark", "small"))]
    empty = {"importance": "compressed trials: too few to tell", "gate_profiles": "No front trial here has weights", "rescored": "No trial has been re-scored"}
    assert [attributes["aria-label"] for attributes in large] == [drawing.heading for drawing in page.DRAWINGS if drawing.name not in empty]
    assert all(reason in "".join(parsed.text) for reason in empty.values())
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_everything_is_escaped() -> None:
    row = fake_row(0, EVIL, VariantConfig(), np.random.default_rng(0))
    row = row.model_copy(update={"device": EVIL, "backend": EVIL, "versions": {EVIL: EVIL}, "config": row.config | {EVIL: EVIL}})
    text = render(
        [row, fake_failure(1, EVIL, VariantConfig())], CONFIG | {"name": EVIL, "space": {EVIL: [EVIL]}, "anchors": [EVIL], "sampler": EVIL}, Path(EVIL)
    )
    parsed = Page(text)
    assert parsed.stack == [] and sum(tag == "script" for tag, _ in parsed.tags) == 1
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert "".join(parsed.text).count("alert(") > 8 and "alert(" not in "".join(parsed.raw["script"])


def test_all_trials_and_their_errors_are_listed() -> None:
    rows = fake_rows(20, seed=1)
    text = "".join(Page(render(rows)).text)
    assert all(row.label in text for row in rows)
    failures = [row for row in rows if row.error]
    assert failures and text.count("FloatingPointError: loss is <nan> after 31 updates & never came back") == len(failures)
    assert "All 20 trials" in text


def test_headlines_and_candidates_show_mean_and_worst_phase() -> None:
    rows = fake_rows(20, seed=1)
    text = " ".join("".join(Page(render(rows)).text).split())
    assert f"Plain W8/S8 keeps 12.5 % of the KV bytes: mean accuracy {rows[1].mean_accuracy:.3f}" in text
    for knee in pareto.knees(rows):
        assert knee.reason in text


def test_each_compressed_trial_has_its_export_command_and_config() -> None:
    rows = fake_rows(12, seed=1)
    text = "".join(Page(render(rows)).text)
    commands = set(re.findall(r"mitigate export results/quick --trial (\d+) --to quick-trial-\1", text))
    assert commands == {str(row.trial) for row in rows if row.status == "ok" and not pareto.is_full(row)}
    assert all(row.config_sha256 in text for row in rows)
    assert all(f"{score.a_min_cross_fitted:.3f}" in text for row in rows for score in row.scores)
    assert page.pretty(rows[3].config) in text


def test_command_quotes_what_a_shell_would_split() -> None:
    assert page.export_command(Path("my results/a b"), 3) == "mitigate export 'my results/a b' --trial 3 --to 'a b-trial-3'"


def test_tables_carry_sortable_values_in_every_row() -> None:
    parsed = Page(render(fake_rows(20, seed=1)))
    heads = [tag for tag, attributes in parsed.tags if tag == "th" and attributes.get("scope") == "col"]
    assert len(heads) == 22
    values = [attributes["data-v"] for tag, attributes in parsed.tags if tag == "td" and attributes.get("class") == "num"]
    assert values and all(float(value) >= 0 for value in values if value)


def test_what_is_left_out_of_the_accuracies_is_told() -> None:
    text = " ".join("".join(Page(render(fake_rows(3))).text).split())
    assert "queries, each for another record; a query is answered when the most likely next token is the key's name. Outer padding" in text


def test_what_was_searched_is_told() -> None:
    text = "".join(Page(render(fake_rows(3))).text)
    for words in ("3 of 20", "tpe, seed 0", "space: window", "8, 16", "torch 2.13.0", "cpu (2 cores)", "reference", "24 residues", "32 records", "96 prompts"):
        assert words in text, words


@pytest.mark.parametrize(
    "rows", [[], [fake_failure(0, "x", VariantConfig())], fake_rows(1), fake_rows(3, protocols=["in_sequence"]), fake_rows(300)], ids=range(5)
)
@pytest.mark.parametrize("config", [{}, CONFIG], ids=["bare", "config"])
def test_any_number_of_rows_renders(rows: list[Row], config: dict[str, object]) -> None:
    parsed = Page(render(rows, config))
    assert parsed.stack == []
    if not any(row.status == "ok" for row in rows):
        assert ("No trial has metrics: 1 infeasible (" if rows else "No trial has finished with metrics yet.") in "".join(parsed.text)


def test_phone_and_dark_mode_are_provided_for() -> None:
    text = render(fake_rows(2))
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and "overflow-x: auto" in text


def test_each_point_of_the_headline_has_its_trial_to_show(whole: tuple[Path, list[Path], list[Row]]) -> None:
    folder, _, rows = whole
    parsed = Page((folder / "report.html").read_text(encoding="utf-8"))
    ids = {attributes["id"] for _, attributes in parsed.tags if attributes.get("id")}
    finished = [place for place, row in enumerate(rows) if row.status == "ok"]
    assert {f"a_min_vs_kv-pick-{place}" for place in finished} == {name for name in ids if name is not None and "-pick-" in name}
    names = {attributes["id"]: attributes["data-name"] for _, attributes in parsed.tags if "data-name" in attributes}
    assert set(names) == {f"about-{place}" for place in range(len(rows))}
    for place in finished:
        name = names[f"about-{place}"] or ""
        assert f"A_min {rows[place].a_min:.3f}" in name and f"mean {rows[place].mean_accuracy:.3f}" in name
    picks = [attributes["data-pick"] for _, attributes in parsed.tags if "data-pick" in attributes]
    assert picks == [str(next(i for i, row in enumerate(rows) if row is knee.row)) for knee in pareto.knees(rows)]


def test_details_stand_once_with_a_curve_each() -> None:
    rows = fake_rows(6, 1)
    parsed = Page(render(rows))
    curves = [attributes for tag, attributes in parsed.tags if tag == "svg" and attributes.get("class") == "small curve"]
    assert len(curves) == sum(row.status == "ok" for row in rows)
    assert "".join(parsed.text).count("Its weights are not in the study folder.") == sum(row.status == "ok" and not pareto.is_full(row) for row in rows)


def test_gates_of_a_trial_are_drawn_where_its_weights_are(tmp_path: Path) -> None:
    rows = fake_rows(3)
    store_gates(tmp_path, 1, window=8)
    parsed = Page(page.render(tmp_path, rows, CONFIG, []))
    drawn = [attributes for tag, attributes in parsed.tags if tag == "svg" and attributes.get("class") == "small gates"]
    bars = [attributes for tag, attributes in parsed.tags if tag == "rect" and attributes.get("class") == "bar"]
    assert len(drawn) == 1 and len(bars) == 4 * 8
    assert all(float(bar["height"] or "nan") > 0 for bar in bars)
