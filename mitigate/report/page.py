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

from mitigate import pareto
from mitigate.files import write_atomic
from mitigate.report import data, figures, style
from mitigate.rows import Row

TEMPLATE = Path(__file__).with_name("template.html")


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of the report: file name, heading and caption."""

    name: str
    draw: Callable[[Sequence[Row]], Figure]
    heading: str
    caption: str


DRAWINGS = (
    Drawing(
        name="a_min_vs_kv",
        draw=figures.a_min_vs_kv,
        heading="Worst phase against KV bytes",
        caption="Each trial is a dot at its worst-phase accuracy, with its 95 % interval; the dash above it is the same trial's mean. "
        "The distance between the two is what a mean alone would hide.",
    ),
    Drawing(
        name="phase_curves",
        draw=figures.phase_curves,
        heading="Phase curves",
        caption="Accuracy as the queried record moves through the residues. A flat curve has no weak spot; a dip that returns every stride is one.",
    ),
    Drawing(
        name="front_matrix",
        draw=figures.front_matrix,
        heading="All four objectives in pairs",
        caption="The steps show the front of the two objectives of that panel alone; blue dots are on the front of all four.",
    ),
)

HOW_TO_READ = (
    ("KV kept", "KV-cache bytes per token in the limit of a long context, as a fraction of full attention's. Less is better."),
    (
        "Mean accuracy",
        "fraction of queries answered exactly, averaged over all residues and over the padding protocols. Queries whose answer an earlier query of "
        "the prompt already showed are left out. It hides weak spots.",
    ),
    ("A_min", "accuracy at the worst residue, the lower of both protocols. This is what a fact gets that happens to stand in the wrong place."),
    ("Gap", "best minus worst residue, the larger of both protocols. Residue: position of the queried record modulo the sweep's period P."),
    (
        "On the front",
        "no other trial is at least as good in all four objectives (KV bytes, decode throughput, mean accuracy, A_min) and better in one. With four "
        "objectives and a noisy throughput few trials are dominated, so look at P(front), an approximate probability that ignores shared prompts. "
        "The best of many trials is flattered by chance: rescore a choice with another seed.",
    ),
)


def write_report(study_dir: Path, rows: Sequence[Row], config_dict: dict[str, Any]) -> list[Path]:
    """Write `figures/*.png`, `figures/*.svg` and `report.html` into the study folder.

    Args:
        study_dir: where to write; also the STUDY of the export commands on the page.
        rows: all trials, infeasible ones too.
        config_dict: canonical SearchConfig, or empty.

    Returns:
        The files written, `report.html` last.
    """
    written, inlined = [], []
    for drawing in DRAWINGS:
        figure = drawing.draw(rows)
        vector = style.svg(figure)
        written.append(write_atomic(study_dir / "figures" / f"{drawing.name}.png", style.png(figure)))
        written.append(write_atomic(study_dir / "figures" / f"{drawing.name}.svg", vector))
        inlined.append((drawing, Markup(style.inline(vector, drawing.name, escape(drawing.heading)))))
    page = render(study_dir, rows, config_dict, inlined)
    return [*written, write_atomic(study_dir / "report.html", page.encode())]


def render(study_dir: Path, rows: Sequence[Row], config_dict: dict[str, Any], inlined: Sequence[tuple[Drawing, Markup]]) -> str:
    """The page as text. Everything from rows and config is escaped by the template."""
    probability = pareto.front_probability(rows)
    lines = [_line(row, study_dir, float(chance)) for row, chance in zip(rows, probability, strict=True)]
    on_front, anchors = {id(row) for row in pareto.front(rows)}, {id(pareto.full_row(rows)), id(pareto.plain_row(rows))}
    for line, row in zip(lines, rows, strict=True):
        line["on_front"] = id(row) in on_front
        line["anchor"] = id(row) in anchors
    best = [line for line in sorted(lines, key=lambda line: data.by_cost(line["row"])) if line["on_front"] or line["anchor"]]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": data.percent, "bracket": data.bracket}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=config_dict.get("name") or Path(study_dir).absolute().name,
        facts=facts(rows, config_dict),
        space=config_dict.get("space") or {},
        headlines=data.headlines(rows),
        knees=[(knee, data.named(knee.row, 60)) for knee in pareto.knees(rows)],
        hypervolume=pareto.hypervolume(rows),
        best=best,
        nothing_finished=data.nothing_finished(rows),
        lines=lines,
        drawings=inlined,
        how_to_read=HOW_TO_READ,
        sample=data.sample_line(rows),
        task=_task(rows, config_dict),
        config_json=pretty(config_dict),
        colours=style.COLOURS,
    )


def _line(row: Row, study_dir: Path, chance: float) -> dict[str, Any]:
    """What the template needs of one trial."""
    exportable = row.status == "ok" and row.trial is not None and not pareto.is_full(row)
    return {
        "row": row,
        "mean": data.mean_interval(row),
        "worst": data.a_min_interval(row),
        "chance": None if chance != chance else chance,
        "spark": sparkline(row),
        "sweeps": [(data.PROTOCOL_WORDS[score.protocol], score) for score in row.scores],
        "variant": pretty({"variant": pareto.variant_of(row)}),
        "config": pretty(row.config),
        "command": export_command(study_dir, row.trial) if exportable and row.trial is not None else None,
    }


def export_command(study_dir: Path, trial: int) -> str:
    """The shell line that exports a trial."""
    study = os.path.relpath(study_dir) if Path(study_dir).absolute().is_relative_to(Path.cwd()) else str(study_dir)
    return f"mitigate export {shlex.quote(study)} --trial {trial} --to {shlex.quote(f'{Path(study_dir).absolute().name}-trial-{trial}')}"


def sparkline(row: Row, width: int = 96, height: int = 24) -> Markup:
    """The phase curves of a row as a tiny inline SVG; the ring marks the worst residue of all."""
    drawn, worst = [], min(row.scores, key=lambda score: score.a_min.value, default=None)
    for score in row.scores:
        step = (width - 8) / max(score.period - 1, 1)
        at = [(4 + step * i, height - 3 - (height - 6) * value) for i, value in enumerate(score.accuracy)]
        drawn.append(f'<polyline class="{score.protocol}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
        if score is worst and max(score.accuracy) > min(score.accuracy):
            x, y = at[score.worst_residue]
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>')
    body = "".join(drawn)
    return (
        Markup(f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">{body}</svg>') if drawn else Markup("")
    )


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
        f"Each prompt holds {task['records']} records, a key directly followed by its name, then {task['queries']} queries; "
        "a query is answered when the most likely next token is the key's name. A query whose answer an earlier query of the prompt already showed is left "
        "out of the scores. "
    )
