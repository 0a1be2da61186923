"""Every seam is tried, each can be taken away, and then its loss is told and cells run where that is promised."""

from __future__ import annotations

import json

from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.doctor import probe_runner
from nbddp.capabilities.doctor.examination import examine
from nbddp.capabilities.doctor.findings import Findings
from nbddp.capabilities.doctor.seams import SEAMS, ProbeResult
from nbddp.notebook.commands import overview

WORKING = {seam.key: ProbeResult(True, True) for seam in SEAMS}
MACHINE = {"cores": 2, "memory": 24 << 30, "gpus": ["NVIDIA H100", "NVIDIA H100"]}


def test_every_seam_has_a_trial_and_a_place_in_the_table() -> None:
    keys = [seam.key for seam in SEAMS]
    assert len(set(keys)) == len(keys)
    assert set(probe_runner.TRIALS) == set(keys)
    assert set(probe_runner.NAMES) <= set(keys)


def test_trials_that_end_their_process_are_told_with_what_came_before() -> None:
    line = json.dumps({"seam": SEAMS[0].key, "present": True, "works": True, "why": ""})
    code = f"import os; print({line!r}, flush=True); os.abort()"
    found = examine(command=("-c", code))
    assert found.verdicts == {SEAMS[0].key: ProbeResult(True, True)}
    assert found.ended == f"the checks ended at {SEAMS[1].key}: the process was killed by SIGABRT"
    assert f"{len(SEAMS)} private APIs: 1 work, 0 fail, {len(SEAMS) - 1} not tried" in str(found)
    assert "No module named nothing_here" in examine(command=("-m", "nothing_here")).ended


def test_html_says_the_same() -> None:
    shown = Findings(
        {"torch": "<2>"}, MACHINE, {**WORKING, SEAMS[0].key: ProbeResult(False, False, "a < b")}
    )._repr_html_()
    assert "torch &lt;2&gt;" in shown
    assert f"{SEAMS[0].library}: {SEAMS[0].key}: a &lt; b. Lost: {SEAMS[0].without}" in shown


def test_the_verdict_comes_first_then_what_differs_and_the_rest_is_folded() -> None:
    found = Findings({"torch": "2"}, MACHINE, {**WORKING, SEAMS[3].key: ProbeResult(False, False, "gone")})
    text, html = str(found), found._repr_html_()
    assert text.startswith(f"{len(SEAMS)} private APIs: {len(SEAMS) - 1} work, 1 fail, 0 not tried")
    assert text.index("gone") < text.index("Lost: ")
    shown, _, folded = html.partition("<details>")
    assert shown.startswith(f"<div><b>{len(SEAMS)} private APIs")
    assert shown.count("<tr") == 2, "the head, and the one that fails"
    assert SEAMS[3].without in shown
    assert folded.count("<tr") == 1 + len(SEAMS)
    whole = Findings({"torch": "2"}, MACHINE, WORKING)._repr_html_()
    assert "<table" not in whole.partition("<details>")[0]


def test_doctor_is_told_and_completed() -> None:
    assert "%ddp doctor" in overview()
    assert "python -m nbddp doctor" in overview("python -m nbddp")
    assert complete_command("doc") == ["doctor"]
