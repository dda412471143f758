"""The page as one HTML text: tables and curves made here, the trajectories as data that page.js shows."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from lib.curves import COLUMNS

from turngrpo.trainer.evaluation.intervals import wilson
from turngrpo.trainer.showing import visible

from . import charts, counting
from .embedding import packed
from .sources import Found, flat
from .tiles import tiles, warnings
from .turns import FAULTS, choose, overview, whole

FOLDER = Path(__file__).parent / "static"
NOTES = 2000  # bytes for what is said only after the trajectories were packed
PROJECTS = 50  # lines of a table at most
NOT_SHOWN = ("train_projects", "reward_timeout")  # digests
SHOWN_ELSEWHERE = ("before", "after", "policies", "seconds")


def write_page(found: Found, limit: int, max_bytes: int) -> tuple[str, int]:
    """Return the page with at most `limit` trajectories and `max_bytes`, and how many trajectories it shows.

    Tables and curves are shown whatever they take.
    """
    everything = overview(found)
    chosen = choose(everything, limit)
    shell = Shell(found, everything)
    room = max_bytes - len(shell.page("", len(chosen)).encode()) - NOTES
    data, shown = packed(found, whole(found, chosen), room)
    return shell.page(data, shown), shown


class Shell:
    """Everything on the page but the trajectories."""

    def __init__(self, found: Found, everything: Sequence[dict[str, Any]]):
        self.found, self.everything = found, everything
        self.environment = Environment(
            loader=FileSystemLoader(FOLDER),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
        )
        self.environment.filters |= {"number": number, "seconds": seconds, "exact": json.dumps}
        self.tables = tables(everything)
        self.curves = {name: charts.curves(logs, found.policies) for name, logs in found.history.items() if logs}

    def page(self, data: str, shown: int) -> str:
        """Return the page with the packed data of so many trajectories."""
        script = (FOLDER / "page.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        found = self.found
        settings = {
            name: value for name, value in flat(found.config).items() if name.split(" · ")[-1] not in NOT_SHOWN
        }
        return self.environment.get_template("page.html.jinja").render(
            found=found,
            title=found.path.resolve().name,
            state=state_of(found),
            tiles=tiles(found, self.everything),
            warnings=warnings(self.everything),
            notes=list(dict.fromkeys(found.notes)),
            settings=settings,
            corpus=flat(found.corpus),
            outcome={
                n: v for n, v in flat({k: v for k, v in found.summary.items() if k not in SHOWN_ELSEWHERE}).items()
            },
            columns={name: label for name, label in COLUMNS.items() if _is_measured(found.policies, name)},
            metrics=sorted({name for one in found.policies.values() for name in one.get("metrics", {})}),
            curves=self.curves,
            ends=charts.ends,
            tests=[
                one | {"interval": wilson(one["correct"] / one["responses"], one["responses"])} for one in found.tests
            ],
            tables=self.tables,
            shown=shown,
            total=len(self.everything),
            style=(FOLDER / "page.css").read_text(encoding="utf-8"),
            script=script,
            script_digest=digest,
            data=data,
        )


def tables(everything: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is counted: by part of the run, iteration, kind of chunk and project."""
    parts = counting.parts(everything)
    by_source = {
        source: [one for one in everything if one["source"] == source]
        for source in dict.fromkeys(one["source"] for one in everything)
    }
    counted = [one for part in parts for one in part.trajectories]
    by_project = counting.grouped(counted, lambda one: one.get("project") or "")
    by_project.pop("", None)
    largest = sorted(by_project, key=lambda name: -len(by_project[name]))[:PROJECTS]
    rest = f", the {PROJECTS} read most of {len(by_project)}" if len(by_project) > PROJECTS else ""
    total = counting.shares(everything)
    return {
        "faults": [name for name in FAULTS if total[name].total],
        "parts": parts,
        "rewards": [counting.rewards(part.trajectories) for part in parts],
        "iterations": {
            source: {
                iteration: (counting.shares(these), counting.mean(one.get("reward") for one in these))
                for iteration, these in counting.grouped(own, lambda one: one["iteration"]).items()
            }
            for source, own in by_source.items()
        },
        "project_heading": f"By project{rest}",
        "projects": {
            project: [
                counting.shares(one for one in part.trajectories if one.get("project") == project) for part in parts
            ]
            for project in sorted(largest)
        },
        "kinds": {
            kind: [counting.shares(part.trajectories, kind) for part in parts] for kind in counting.kinds_of(counted)
        },
    }


def _is_measured(policies: Mapping[str, Any], name: str) -> bool:
    return any(name in one.get("metrics", {}) for one in policies.values())


def _shown(value: Any) -> Any:
    """Make what would steer visible in every text that the template shows; Jinja2 escapes it after that."""
    return visible(value) if type(value) is str else "" if value is None else value


def number(value: Any) -> str:
    """Return a number in four digits, and what is none as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def seconds(costs: Mapping[str, float]) -> dict[str, float]:
    """Return the costs that are seconds, without those that are tokens."""
    return {purpose: value for purpose, value in costs.items() if "tokens/" not in purpose}


def state_of(found: Found) -> str:
    """Return in words how far the run is."""
    if found.kind != "training":
        return found.kind
    last = max((log["update"] for log in found.history[""]), default=0)
    limit = found.config.get("trainer", {}).get("max_steps") or -1
    of = f" of {limit}" if limit > 0 else ""
    return f"training, {'finished' if found.summary else 'going on or ended early'}, {last}{of} updates"
