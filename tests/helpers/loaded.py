"""A script in a process of its own, which tells what it has imported."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
LOADED = """
import runpy, sys
script = sys.argv.pop(1)
sys.argv[0] = script
sys.path.insert(0, script.rpartition("/")[0])
status = 0
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    status = end.code
heavy = {"torch", "transformers", "trl", "accelerate", "peft", "datasets", "pandas"}
print("\\nheavy:", status, *sorted(heavy & set(sys.modules)))
"""


def run(script, *arguments, **environment):
    """Run a script in a process of its own; returns what it printed, its status, and the heavy modules it loaded."""
    command = [sys.executable, "-c", LOADED, str(SCRIPTS / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    shown, _, told = done.stdout.rpartition("\nheavy: ")
    assert told, done.stdout + done.stderr
    status, *heavy = told.split()
    return shown, done.stderr, status, set(heavy)
