"""One self-contained HTML page of a study, and its figures as files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from mitigate import pareto, rescored
from mitigate.files import write_atomic
from mitigate.report import data, figures, gates, gates_figure, inline, rescoring, search_figures, space, style
from mitigate.report.progress import Progress, progress
from mitigate.rescored import Rescored
from mitigate.results import is_study
from mitigate.rows import Row

TEMPLATE = Path(__file__).with_name("template.html")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a report is about.

    Attributes:
        folder: the study's; its trials' weights are looked for there.
        rows: all trials, infeasible ones too.
        config: canonical SearchConfig, or empty.
        baselines: random searches to hold the search against.
    """

    folder: Path
    rows: Sequence[Row]
    config: dict[str, Any]
    baselines: Sequence[Progress] = ()

    @property
    def progress(self) -> Progress:
        """The search itself."""
        return progress(self.rows, self.config, self.config.get("name") or Path(self.folder).absolute().name)

    @property
    def space(self) -> dict[str, Any]:
        """Parameter to choices; empty where the config does not say."""
        return self.config.get("space") or {}

    def rescored(self) -> list[Rescored]:
        """The trials that were trained and scored again on fresh seeds."""
        return rescored.read(self.folder) if is_study(self.folder) else []

    def gate_profiles(self) -> list[tuple[Row, list[gates.GateProfile]]]:
        """Static gates of the plain compressor, the candidates and the front, as far as their weights are there."""
        found = [(row, gates.of_trial(self.folder, row)) for row in data.shown_rows(self.rows)]
        return [(row, profiles) for row, profiles in found if not isinstance(profiles, str)]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of the report: file name, heading and caption. `note` adds a sentence of this study to the caption."""

    name: str
    draw: Callable[[Study], Figure]
    heading: str
    caption: str
    note: Callable[[Study], str] = lambda study: ""


DRAWINGS = (
    Drawing(
        name="a_min_vs_kv",
        draw=lambda study: figures.a_min_vs_kv(study.rows),
        heading="Worst phase against KV bytes",
        caption="Each trial is a dot at its worst-phase accuracy, with its 95 % interval; the dash above it is the same trial's mean. "
        "The distance between the two is what a mean alone would hide.",
    ),
    Drawing(
        name="rescored",
        draw=lambda study: rescoring.figure(study.rescored()),
        heading="The chosen trials on fresh seeds",
        caption="The best of many trials is flattered by chance. Each trial here was fine-tuned again under other seeds and swept with other prompts: "
        "where the dots lie left of the diamond, luck had a part in the choice.",
        note=lambda study: rescoring.luck_line(study.rescored()) if study.rescored() else "",
    ),
    Drawing(
        name="phase_curves",
        draw=lambda study: figures.phase_curves(study.rows),
        heading="Phase curves",
        caption="Accuracy as the queried record moves through the residues. A flat curve has no weak spot; a dip that returns every stride is one.",
    ),
    Drawing(
        name="front_matrix",
        draw=lambda study: figures.front_matrix(study.rows),
        heading="All four objectives in pairs",
        caption="The steps show the front of the two objectives of that panel alone; blue dots are on the front of all four.",
    ),
    Drawing(
        name="parallel_coordinates",
        draw=lambda study: search_figures.parallel_coordinates(study.rows, study.space),
        heading="The search space",
        caption="Each line is a trial, from its parameters on the left to what came of it on the right. Trials of one level are fanned out; fewest KV bytes "
        "stand on top. Full attention is not in the space.",
    ),
    Drawing(
        name="importance",
        draw=lambda study: search_figures.importance(study.rows, study.space),
        heading="Importance of each parameter",
        caption="The share of an objective's variance over the trials that lies between the levels of one parameter. The tick is what shuffled trials "
        "reach; a bar that ends before it says nothing. A sampler tries good levels together, so one parameter may get another's credit.",
        note=lambda study: space.importance_note(study.rows, space.importances(study.rows, study.space)),
    ),
    Drawing(
        name="hypervolume",
        draw=lambda study: search_figures.hypervolume(study.progress, study.baselines),
        heading="Hypervolume over trials and time",
        caption="The volume that the front dominates in the four objectives, from the corner of 1.1 times full attention's bytes, no speed and no accuracy. "
        "Time is the trials' own, summed over workers, without pauses. Throughput is measured and noisy, so two runs of the same anchors can differ much.",
    ),
    Drawing(
        name="gate_profiles",
        draw=lambda study: gates_figure.gate_profiles(study.gate_profiles(), "No front trial here has weights with a static gate"),
        heading="Static gates",
        caption="softmax(b): the weight that a gate gives to each offset of a window before it looks at the token; a vector gate's mean over channels. A tall "
        "bar is a preference that returns with every window. Open a trial to see its own gates.",
    ),
)

HOW_TO_READ = (
    ("KV kept", "KV-cache bytes per token in the limit of a long context, as a fraction of full attention's. Less is better."),
    (
        "Mean accuracy",
        "fraction of queries answered exactly, averaged over all residues and over the padding protocols. It hides weak spots.",
    ),
    ("A_min", "accuracy at the worst residue, the lower of both protocols. This is what a fact gets that happens to stand in the wrong place."),
    ("Gap", "best minus worst residue, the larger of both protocols. Residue: position of the queried record modulo the sweep's period P."),
    (
        "On the front",
        "no other trial is at least as good in all four objectives (KV bytes, decode throughput, mean accuracy, A_min) and better in one. With four "
        "objectives and a noisy throughput few trials are dominated, so look at P(front), an approximate probability that ignores shared prompts. "
        "The best of many trials is flattered by chance: `mitigate rescore` trains the front again on fresh seeds.",
    ),
)


def write_report(study_dir: Path, rows: Sequence[Row], config_dict: dict[str, Any], baselines: Sequence[Progress] = ()) -> list[Path]:
    """Write `figures/*.png`, `figures/*.svg` and `report.html` into the study folder.

    Args:
        study_dir: where to write; also the STUDY of the export commands on the page, and where the trials' weights are looked for.
        rows: all trials, infeasible ones too.
        config_dict: canonical SearchConfig, or empty.
        baselines: random searches to hold the search against.

    Returns:
        The files written, `report.html` last.
    """
    written, inlined = list[Path](), list[tuple[Drawing, Markup | str]]()
    study = Study(folder=study_dir, rows=rows, config=config_dict, baselines=baselines)
    for drawing in DRAWINGS:
        figure = drawing.draw(study)
        vector = style.svg(figure)
        written.append(write_atomic(study_dir / "figures" / f"{drawing.name}.png", style.png(figure)))
        written.append(write_atomic(study_dir / "figures" / f"{drawing.name}.svg", vector))
        words = figures.why_empty(figure)
        inlined.append((drawing, words or Markup(style.inline(vector, drawing.name, escape(drawing.heading)))))
    page = render(study_dir, rows, config_dict, inlined, baselines)
    return [*written, write_atomic(study_dir / "report.html", page.encode())]


def render(
    study_dir: Path,
    rows: Sequence[Row],
    config_dict: dict[str, Any],
    inlined: Sequence[tuple[Drawing, Markup | str]],
    baselines: Sequence[Progress] = (),
) -> str:
    """The page as text. Everything from rows and config is escaped by the template. `inlined` are the figures, or why there is none."""
    study = Study(folder=study_dir, rows=rows, config=config_dict, baselines=baselines)
    probability = pareto.front_probability(rows)
    lines = [_line(place, row, study_dir, float(chance)) for place, (row, chance) in enumerate(zip(rows, probability, strict=True))]
    on_front, anchors = {id(row) for row in pareto.front(rows)}, {id(pareto.full_row(rows)), id(pareto.plain_row(rows))}
    for line, row in zip(lines, rows, strict=True):
        line["on_front"] = id(row) in on_front
        line["anchor"] = id(row) in anchors
    best = [line for line in sorted(lines, key=lambda line: data.by_cost(line["row"])) if line["on_front"] or line["anchor"]]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": data.percent, "bracket": data.bracket}
    places = {id(row): place for place, row in enumerate(rows)}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=config_dict.get("name") or Path(study_dir).absolute().name,
        facts=facts(rows, config_dict),
        space=study.space,
        headlines=data.headlines(rows),
        knees=[(knee, data.named(knee.row, 60), places[id(knee.row)]) for knee in pareto.knees(rows)],
        hypervolume=pareto.hypervolume(rows),
        best=best,
        nothing_finished=data.nothing_finished(rows),
        lines=lines,
        drawings=[(drawing, image, drawing.note(study), isinstance(image, Markup)) for drawing, image in inlined],
        how_to_read=HOW_TO_READ,
        sample=data.sample_line(rows),
        task=_task(rows, config_dict),
        config_json=pretty(config_dict),
        colours=style.COLOURS,
    )


def _line(place: int, row: Row, study_dir: Path, chance: float) -> dict[str, Any]:
    """What the template needs of one trial."""
    exportable = row.status == "ok" and row.trial is not None and not pareto.is_full(row)
    profiles = gates.of_trial(study_dir, row) if row.status == "ok" else ""
    kept = f", KV kept {data.percent(row.cost.kv_kept)}" if row.cost else ""
    return {
        "place": place,
        "row": row,
        "name": f"{data.named(row, 60)}: A_min {data.bracket(data.a_min_interval(row))}, mean {data.bracket(data.mean_interval(row))}{kept}",
        "mean": data.mean_interval(row),
        "worst": data.a_min_interval(row),
        "chance": None if chance != chance else chance,
        "spark": inline.sparkline(row),
        "curve": inline.curve(row),
        "gates": Markup("") if isinstance(profiles, str) else inline.gates(profiles),
        "why_no_gates": profiles if isinstance(profiles, str) else "",
        "sweeps": [(data.PROTOCOL_WORDS[score.protocol], score) for score in row.scores],
        "variant": pretty({"variant": pareto.variant_of(row)}),
        "config": pretty(row.config),
        "command": export_command(study_dir, row.trial) if exportable and row.trial is not None else None,
    }


def export_command(study_dir: Path, trial: int) -> str:
    """The shell line that exports a trial."""
    study = os.path.relpath(study_dir) if Path(study_dir).absolute().is_relative_to(Path.cwd()) else str(study_dir)
    return f"mitigate export {shlex.quote(study)} --trial {trial} --to {shlex.quote(f'{Path(study_dir).absolute().name}-trial-{trial}')}"


def pretty(plain: dict[str, Any]) -> str:
    """Indented JSON."""
    return json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False)


def facts(rows: Sequence[Row], config_dict: dict[str, Any]) -> list[tuple[str, str]]:
    """What was searched, with what, on what: (name, value) pairs, only those that are known."""
    trial = config_dict.get("trial") or (rows[0].config if rows else {})
    base, train, score = (trial.get(key) or {} for key in ("base", "train", "score"))
    versions = sorted({f"{name} {version}" for row in rows for name, version in row.versions.items()})
    found = [
        ("Trials", f"{len(rows)} of {config_dict['trials']}" if "trials" in config_dict else str(len(rows))),
        (
            "Sampler",
            " ".join(str(config_dict[key]) for key in ("sampler",) if key in config_dict) + (f", seed {config_dict['seed']}" if "seed" in config_dict else ""),
        ),
        ("Anchors", ", ".join(config_dict.get("anchors", ()))),
        ("Base model", _base(base)),
        (
            "Fine-tuning",
            f"{train['updates']} updates, batch {train['batch']}, learning rate {train['learning_rate']:g}"
            if {"updates", "batch", "learning_rate"} <= set(train)
            else "",
        ),
        ("Phase sweep", f"P = {score['period']} residues, {score['prompts']} prompts, seed {score.get('seed')}" if {"period", "prompts"} <= set(score) else ""),
        ("Device", ", ".join(sorted({row.device for row in rows}))),
        ("Kernels that ran", ", ".join(sorted({row.backend for row in rows}))),
        ("Versions", ", ".join(versions)),
    ]
    return [(name, value) for name, value in found if value]


def _base(base: dict[str, Any]) -> str:
    if not {"kind", "layers", "hidden", "heads", "kv_heads", "head_dim"} <= set(base):
        return str(base.get("kind", ""))
    heads = f"{base['heads']} query heads, {base['kv_heads']} KV head{'' if base['kv_heads'] == 1 else 's'} of dim {base['head_dim']}"
    return f"{base['kind']}: {base['layers']} layers, width {base['hidden']}, {heads}"


def _task(rows: Sequence[Row], config_dict: dict[str, Any]) -> str:
    """The protocol in words, with its numbers."""
    trial = config_dict.get("trial") or (rows[0].config if rows else {})
    task = trial.get("task") or {}
    if not {"records", "queries"} <= set(task):
        return ""
    return (
        f"Each prompt holds {task['records']} records, a key directly followed by its name, then {task['queries']} queries, "
        "each for another record; a query is answered when the most likely next token is the key's name. "
    )
