"""The fault matrix as one self-contained HTML page; reads the JSON form only."""

from __future__ import annotations

from html import escape
from typing import Any

from faultinject.judge import BROKEN, OUTCOMES, WORST_FIRST
from faultinject.matrix import words

_MEANING = {
    "contained": "a log or a counter shows it, nobody got an error",
    "surfaced": "whoever asked got an error",
    "hang": "did not end in time",
    "leak": "not everything was given back",
    "swallowed": "nothing shows the fault",
    "wrong_data": "a wrong result",
}
_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2330; --soft: #f2f4f8; --line: #c9d0dc; --mute: #6b7587;
  --good: #2f9e63; --fine: #3b82c4; --bad: #d6453d }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181f; --fg: #e4e8ef; --soft: #1d232d; --line: #414b5b; --mute: #8b95a7 }
}
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem }
h2 { font-size: 1.1rem; margin-top: 2rem }
.mute { color: var(--mute) }
.tiles { display: flex; gap: .6rem; flex-wrap: wrap; margin: 1rem 0 }
.tile { background: var(--soft); border-left: 4px solid var(--mute); border-radius: 6px; padding: .5rem .9rem;
  min-width: 6.5rem; max-width: 10rem }
.tile small { display: block; color: var(--mute); line-height: 1.25 }
.tile b { display: block; font-size: 1.5rem; line-height: 1.2 }
.contained { border-color: var(--good) }
.surfaced { border-color: var(--fine) }
.broken { border-color: var(--bad) }
.broken b { color: var(--bad) }
.wide { overflow-x: auto }
table { border-collapse: separate; border-spacing: 3px; font-size: 13px }
th { text-align: left; font-weight: 600; padding: .25rem .5rem; white-space: nowrap }
thead th { vertical-align: bottom }
tbody th { position: sticky; left: 0; background: var(--bg) }
th.action { text-align: center }
th.action span { writing-mode: vertical-rl; transform: rotate(180deg) }
td { border-radius: 5px; padding: .25rem .5rem; text-align: center; min-width: 2.2rem; background: var(--soft) }
td.c { color: #fff }
td.none { color: var(--line); background: none }
td.bad { background: var(--bad); color: #fff; font-weight: 600 }
td small { opacity: .85; display: block; font-size: 10px; line-height: 1.1 }
tr.unreached th { color: var(--bad) }
code { font: 12px ui-monospace, monospace; background: var(--soft); padding: .1rem .3rem; border-radius: 4px;
  user-select: all; overflow-wrap: anywhere }
li { margin: .35rem 0 }
summary { cursor: pointer; margin: .4rem 0 }
.tag { color: #fff; background: var(--bad); border-radius: 4px; padding: 0 .4rem; font-size: 12px }
.tag.ok { background: var(--mute) }
"""


def page(matrix: dict[str, Any]) -> str:
    """The page for a matrix in its JSON form."""
    title = f"Fault matrix{': ' + escape(matrix['target']) if matrix['target'] else ''}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p class="mute">{matrix["injections"]} injections of {len(matrix["scenarios"])} scenarios
at {len(matrix["sites"])} sites, {matrix["runs"]} runs, {matrix["seconds"]:.1f} s</p>
<div class="tiles">{"".join(_tile(name, matrix["outcomes"][name]) for name in OUTCOMES)}</div>
{_balances(matrix["balances"])}<h2>Sites and actions</h2>
<p class="mute">An injection is one run in which a call at the site (row) goes wrong as the action (column) says,
once or from then on. A cell counts them: green ended contained, blue surfaced, red broken. Hover for more.</p>
<div class="wide">{_table(matrix["sites"])}</div>
{_controls(matrix["controls"])}{_broken(matrix["broken"])}{_notes(matrix)}
</body></html>
"""


def _tile(outcome: str, count: int) -> str:
    kind = outcome if outcome not in BROKEN else "broken" if count else ""
    meaning = f"<small>{_MEANING[outcome]}</small>"
    return f'<div class="tile {kind}"><b>{count}</b>{outcome.replace("_", " ")}{meaning}</div>'


def _balances(balances: list[dict[str, Any]]) -> str:
    return "".join(
        f"<p>{escape(entry['name'])}: <b>{entry['taken']}</b> taken, <b>{entry['given_back']}</b> given back, "
        f"in {entry['runs']} runs</p>"
        for entry in balances
    )


def _table(rows: list[dict[str, Any]]) -> str:
    actions = list(dict.fromkeys(action for row in rows for action in row["cells"]))
    head = "".join(f'<th class="action"><span>{escape(action)}</span></th>' for action in actions)
    body = "".join(_row(row, actions) for row in rows)
    return f"<table><thead><tr><th>site</th><th>hits</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: dict[str, Any], actions: list[str]) -> str:
    if not row["reached"]:
        span = len(actions) + 1
        cell = f'<td colspan="{span}" class="bad">never reached</td>'
        return f'<tr class="unreached"><th>{escape(row["site"])}</th>{cell}</tr>'
    cells = "".join(_cell(row["cells"].get(action)) for action in actions)
    return f"<tr><th>{escape(row['site'])}</th><td>{row['hits']}</td>{cells}</tr>"


def _cell(cell: dict[str, int] | None) -> str:
    if cell is None:
        return '<td class="none">·</td>'
    total = sum(cell[outcome] for outcome in OUTCOMES)
    broken = sum(cell[outcome] for outcome in BROKEN)
    words = ", ".join(f"{cell[outcome]} {outcome}" for outcome in OUTCOMES if cell[outcome])
    tip = f"{words}; {cell['ordinals']} ordinals"
    if broken:
        worst = next(outcome for outcome in WORST_FIRST if cell[outcome])
        return f'<td class="bad" title="{tip}">{broken} / {total}<small>{worst.replace("_", " ")}</small></td>'
    share = round(100 * cell["contained"] / total)
    colour = f"linear-gradient(90deg,var(--good) {share}%,var(--fine) {share}%)"
    return f'<td class="c" style="background:{colour}" title="{tip}">{total}</td>'


def _controls(controls: list[dict[str, Any]]) -> str:
    if not controls:
        return ""
    body = "".join(
        f"<tr><th>{escape(control['name'])}</th><td>{escape(', '.join(control['sites']))}</td>"
        f"{_outcomes(control['before'])}{_outcomes(control['after'])}</tr>"
        for control in controls
    )
    return f"""<h2>With a bug put back</h2>
<p class="mute">A page that is all green must show that it can turn red. Each line puts one bug into the code on purpose
and tries the same injections again: on the left what came of them in the code as it is, on the right with the bug.
Red on the right is as it should be.</p>
<div class="wide"><table><thead><tr><th>bug</th><th>tried at</th><th>as it is</th><th>with the bug</th></tr></thead>
<tbody>{body}</tbody></table></div>
"""


def _outcomes(counts: dict[str, int]) -> str:
    kind = "bad" if set(counts) & set(BROKEN) else "c"
    colour = "" if kind == "bad" else f' style="background:var(--{"good" if "contained" in counts else "fine"})"'
    return f'<td class="{kind}"{colour}>{words(counts)}</td>'


def _broken(broken: list[dict[str, Any]]) -> str:
    if not broken:
        return ""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for entry in broken:
        groups.setdefault((entry["outcome"], entry["token"].partition(":")[0], entry["waived"]), []).append(entry)
    body = "".join(_group(*key, entries) for key, entries in groups.items())
    return f"<h2>Broken</h2><p class=mute>Replay one with <code>pytest --fault-replay TOKEN</code></p>{body}"


def _group(outcome: str, scenario: str, waived: bool, entries: list[dict[str, Any]]) -> str:
    tag, word = ("tag ok", f"{outcome} (waived)") if waived else ("tag", outcome)
    lines = "".join(f"<li><code>{escape(entry['token'])}</code><br>{escape(entry['reason'])}</li>" for entry in entries)
    summary = f'<span class="{tag}">{word.replace("_", " ")}</span> {escape(scenario)}: {len(entries)}'
    return f"<details{' open' * (len(entries) <= 4)}><summary>{summary}</summary><ul>{lines}</ul></details>"


def _notes(matrix: dict[str, Any]) -> str:
    notes = [f"Incomplete: {text}" for text in matrix["incomplete"]]
    notes += [
        f"Capped: {entry['scenario']}: {entry['site']} was hit {entry['seen']} times in role {entry['role']}"
        for entry in matrix["capped"]
    ]
    notes += [
        f"Waiver {waiver['pattern']} ({waiver['issue']}): "
        f"{waiver['waived']} of {waiver['matched']} injections waived as {waiver['outcome']}"
        for waiver in matrix["waivers"]
    ]
    if matrix["too_deep"]:
        notes.append(f"{matrix['too_deep']} hits that only come after max_faults faults were not visited")
    if matrix["missed"]:
        notes.append(f"{len(matrix['missed'])} hits did not come again when a fault was planned for them")
    if matrix["no_effect"]:
        notes.append(f"{matrix['no_effect']} actions had no effect at their hit and don't count")
    if not notes:
        return ""
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
