"""The page in headless Chromium, where there is one: it asks for nothing, and a point can be chosen by the keyboard alone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mitigate import pareto
from mitigate.report import page
from tests.fake_rows import fake_rows, store_gates

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run".split()
PRESSES = """<script>
"use strict";
document.addEventListener("securitypolicyviolation", function (event) { document.body.dataset.refused = event.blockedURI; });
setTimeout(function () {
  function press(key) { document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: key, bubbles: true, cancelable: true })); }
  document.querySelector('.pick[tabindex="0"]').focus();
  press("ArrowRight"); press("Enter");
  document.querySelector("#front tr.trial").click();
  document.querySelectorAll("#front th button")[3].click();
  document.body.dataset.requests = performance.getEntriesByType("resource").length;
}, 0);
</script></body>"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


def test_the_page_asks_for_nothing_and_a_point_is_chosen_by_keyboard(tmp_path: Path) -> None:
    rows, study = fake_rows(8, 1, infeasible=0.0), tmp_path / "quick"
    store_gates(study, 1, window=8)
    page.write_report(study, rows, {})
    pressed = study / "pressed.html"
    pressed.write_text((study / "report.html").read_text(encoding="utf-8").replace("</body>", PRESSES), encoding="utf-8")
    assert CHROMIUM is not None
    own = [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000", "--dump-dom", pressed.as_uri()]
    done = subprocess.run([CHROMIUM, *QUIET, *own], capture_output=True, text=True, timeout=120, check=True)
    dom = done.stdout
    assert 'data-requests="0"' in dom and "data-refused" not in dom
    chosen = re.findall(r'id="a_min_vs_kv-pick-(\d+)"[^>]*aria-pressed="true"', dom)
    assert len(chosen) == 1
    row = rows[int(chosen[0])]
    shown = dom[dom.index('id="picked"') : dom.index('<section id="front">')]
    assert f"A_min {row.a_min:.3f}" in shown and row.config_sha256 in shown and "small curve" in shown
    assert pareto.is_full(row) or f"--trial {row.trial} --to quick-trial-{row.trial}" in html.unescape(shown)
    table = dom[dom.index('<section id="front">') : dom.index('<section id="figures">')]
    order = [float(value) for value in re.findall(r'<tr class="trial[^"]*"[^>]*>(?:\s*<td.*?</td>){3}\s*<td class="num" data-v="([\d.]+)"', table, re.DOTALL)]
    assert len(order) > 3 and order == sorted(order)
    assert 'aria-sort="ascending"' in table and table.count('class="inner"') == 1
