"""The order in which modules stand on each other, which of them are light, and imports on a platform without fcntl."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# A module imports only from what stands before it: rooms from top to bottom, and in a room from left to right.
ORDER = """
    trainer             faults files awaiting watching showing writing processes
    data_prep           chunking corpus_format splits corpus code_facts code_corpus memagent needle world gold
    data_prep           world_corpus stock_arithmetic __init__
    trainer/reading     __init__ limits gates chat_format rollout workflows trial
    rewards             answers gates stock __init__
    trainer/objective   __init__ advantages losses fused_head exact_kl iteration
    trainer/forward     __init__ policy batching joined_attention shared_prefix decoding scoring lora_layers support
    trainer/forward     whole_weights
    trainer/sampling    __init__ noise engine_check padded_decoder transformers_engine server served_adapter
    trainer/sampling    vllm_engine chat_engine
    trainer             reward_calls
    trainer/evaluation  __init__ intervals
    trainer/measuring   __init__ metrics behavior_check turn_record trackers update_log convergence
    trainer/runs        __init__ proof identity fingerprint checkpoints resume columns ledger compare interruption
    trainer/export      __init__ base_model model_card versions merge hub exporter
    trainer             inherited_options config checks turn_grpo_trainer
    trainer/evaluation  evaluate forced_gates whole_document
    trainer             warm_start __init__
    scripts/arguments   help_page
    scripts/lib         schedule running output curves lookup options
    scripts/arguments   commands
    scripts/lib         adapters tokenizing loading served reporting
    scripts/jobs        gpu_memory quickstart evaluating reading inspecting stopping training imitating exporting
    scripts/lab         __init__ archive config stages data training testing exercise probes report experiment
    scripts/page        __init__ sources turns texts counting charts tiles embedding writing
    scripts/benchmarks  startup workers common values floor trainers exact_kl gated_step rollout scaling train_step
    scripts/benchmarks  gpu_check endurance ledger_cost learning
    scripts             compare_states evaluate export_adapter inspect_group memory_estimate prepare_corpus
    scripts             read_document report run_lab sft train
"""
PLACES = [f"{room}/{name}" for room, *names in map(str.split, ORDER.split("\n")[1:-1]) for name in names]

# Rooms and what none of their imports may be. numpy is no burden, datasets is what a corpus is made of.
HEAVY = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed")
LIGHT_ROOMS = {
    "trainer/reading": HEAVY,
    "rewards": HEAVY,
    "data_prep": HEAVY,
    "trainer/objective": ("transformers", "trl", "accelerate", "peft", "deepspeed", "torch.distributed"),
}
LIGHT_MODULES = [
    "turngrpo.trainer",
    "turngrpo.trainer.faults",
    "turngrpo.trainer.files",
    "turngrpo.trainer.awaiting",
    "turngrpo.trainer.watching",
    "turngrpo.trainer.showing",
    "turngrpo.trainer.writing",
    "turngrpo.trainer.reading.gates",
    "turngrpo.trainer.reading.limits",
    "turngrpo.trainer.reading.rollout",
    "turngrpo.trainer.reading.workflows",
    "turngrpo.trainer.reading.trial",
    "turngrpo.trainer.sampling.server",
    "turngrpo.trainer.sampling.vllm_engine",
    "turngrpo.trainer.sampling.chat_engine",
    "turngrpo.trainer.evaluation.intervals",
    "turngrpo.trainer.evaluation.forced_gates",
    "turngrpo.data_prep",
    "turngrpo.rewards",
]


class Import(NamedTuple):
    """`module` (dotted, absolute) that line `line` imports `name` from, None where the module itself."""

    module: str
    name: str | None
    line: int
    at_runtime: bool  # False below `if TYPE_CHECKING:`


def source_modules(root: Path) -> dict[str, Path]:
    """Return every module of the four folders: its place as in ORDER, and its file."""
    files = [file for top in ("data_prep", "rewards", "trainer", "scripts") for file in (root / top).rglob("*.py")]
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(files)}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def imports_of(place: str, file: Path) -> list[Import]:
    """Return the imports of a file in their order, those inside functions and below TYPE_CHECKING too."""
    package = ["turngrpo", *place.split("/")[:-1]] if not place.startswith("scripts/") else place.split("/")[:-1]

    def walk(node: ast.AST, at_runtime: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno, at_runtime) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (Import(module, alias.name, node.lineno, at_runtime) for alias in node.names)
        exempt = node.body if _is_type_checking(node) else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_runtime and child not in exempt)

    return list(walk(ast.parse(file.read_text(encoding="utf-8")), True))


def place_of(module: str, importer: str, places: set[str]) -> str | None:
    """Return the place of one of our modules, as `importer` finds it: in the package, beside itself or in scripts/."""
    parts = module.split(".")
    if parts[0] == "turngrpo":
        candidates = ["/".join(parts[1:])]
    elif importer.startswith("scripts/"):
        candidates = [f"{folder}/{'/'.join(parts)}" for folder in (importer.rsplit("/", 1)[0], "scripts")]
        candidates += ["/".join(parts)] if parts[0] == "scripts" else []
    else:
        return None
    return next((p for c in candidates for p in (c, f"{c}/__init__") if p in places), None)


def target_of(found: Import, importer: str, places: set[str]) -> str | None:
    """Return the place that an import leads to; a name may be a module of its own."""
    inner = place_of(f"{found.module}.{found.name}", importer, places) if found.name else None
    return inner or place_of(found.module, importer, places)


def where_to_add(place: str, order: list[str], arrows: dict[str, list[tuple[str, int]]]) -> str:
    """Say between which modules of the list a new one belongs."""
    room, name = place.rsplit("/", 1)
    rank = {p: i for i, p in enumerate(order)}
    below = [to for to, _ in arrows[place] if to in rank]
    above = [other for other, targets in arrows.items() if other in rank and place in (to for to, _ in targets)]
    after = f", after {max(below, key=rank.__getitem__)}" if below else ""
    before = f", before {min(above, key=rank.__getitem__)}" if above else ""
    advice = f"add {name!r} to a line of the room {room!r}{after}{before}"
    return f"{place}.py is not in ORDER of tests/test_imports.py: {advice}"


def circle(arrows: dict[str, list[tuple[str, int]]]) -> list[str]:
    """Return the places along one circle of imports, the first again at the end; empty where there is none."""
    done: set[str] = set()

    def search(place: str, path: list[str]) -> list[str]:
        if place in path:
            return [*path[path.index(place) :], place]
        if place in done:
            return []
        found = next((c for to, _ in arrows[place] if (c := search(to, [*path, place]))), [])
        done.add(place)
        return found

    return next((found for place in sorted(arrows) if (found := search(place, []))), [])


def order_faults(root: Path, order: list[str]) -> list[str]:
    """Return a line for every module that is not listed, listed module that is gone, arrow back up, and a circle."""
    modules = source_modules(root)
    places = set(modules)
    runtime = {
        place: list(
            dict.fromkeys(
                (to, found.line)
                for found in imports_of(place, file)
                if found.at_runtime and (to := target_of(found, place, places)) not in (None, place)
            )
        )
        for place, file in modules.items()
    }
    rank = {place: i for i, place in enumerate(order)}
    faults = [where_to_add(place, order, runtime) for place in modules if place not in rank]
    faults += [f"ORDER lists {place}.py, which does not exist: take it out" for place in order if place not in places]
    faults += [f"ORDER lists {place} twice" for place in rank if order.count(place) > 1]
    faults += [
        f"{place}.py, line {line}: {place} imports {to}, which stands after it in ORDER; move what it needs further "
        "down, or the import further up"
        for place, targets in runtime.items()
        for to, line in targets
        if place in rank and to in rank and rank[to] > rank[place]
    ]
    around = circle(runtime)
    if around:
        steps = [
            f"{a}.py, line {next(n for to, n in runtime[a] if to == b)}, imports {b}"
            for a, b in zip(around, around[1:], strict=False)
        ]
        faults.append("a circle of imports: " + "; ".join(steps))
    return faults


@cache
def defined_names(file: Path) -> frozenset[str]:
    """Return the names that a module has at its top level, imported ones and those in its __all__ too."""
    tree, names = ast.parse(file.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return frozenset(names)


def missing_names(root: Path) -> list[str]:
    """Return a line for every import, below TYPE_CHECKING too, of a module or a name of ours that is not there."""
    modules = source_modules(root)
    faults = []
    for place, file in modules.items():
        for found in imports_of(place, file):
            target = target_of(found, place, set(modules))
            if target is None and found.module.split(".")[0] == "turngrpo" and found.module != "turngrpo":
                faults.append(f"{place}.py, line {found.line}: there is no module {found.module}")
            elif target is not None and found.name and place_of(found.module, place, set(modules)) == target:
                if found.name not in defined_names(modules[target]):
                    faults.append(f"{place}.py, line {found.line}: {target}.py has no {found.name}")
    return faults


def test_every_module_imports_only_what_stands_before_it():
    faults = order_faults(ROOT, PLACES)
    assert not faults, "\n".join(faults)


def test_every_imported_name_exists():
    faults = missing_names(ROOT)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_no_light_room_imports_a_heavy_library(room):
    faults = []
    for place, file in source_modules(ROOT).items():
        if place.rsplit("/", 1)[0] != room:
            continue
        for found in imports_of(place, file):
            whole = f"{found.module}.{found.name}" if found.name else found.module
            heavy = [name for name in LIGHT_ROOMS[room] if f"{whole}.".startswith(f"{name}.")]
            if heavy and found.at_runtime:
                faults.append(f"{place}.py, line {found.line} imports {whole}: {room} must do without {heavy[0]}")
        if "torch.distributed" in LIGHT_ROOMS[room]:
            faults += [
                f"{place}.py, line {node.lineno} uses torch.distributed: {room} knows nothing of processes"
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
            ]
    assert not faults, "\n".join(faults)


def run_python(code: str, *arguments: str) -> str:
    """Run code in a process of its own and return what it printed; fails with what it said otherwise."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FIRST_HEAVY = """
import importlib, sys, traceback
heavy = sys.argv[2].split(",")
class Watch:  # says who imports a heavy library first; a look whether it is installed imports nothing
    def find_spec(self, name, path=None, target=None):
        lines = traceback.format_stack()[:-1]
        if name in heavy and not any("<frozen importlib.util>" in line for line in lines):
            ours = [line for line in lines if "<frozen" not in line]
            sys.exit(f"{sys.argv[1]} must do without {name}, which is imported here:\\n" + "".join(ours))
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
assert not set(heavy) & set(sys.modules), sorted(set(heavy) & set(sys.modules))
"""


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_brings_no_heavy_library(module):
    run_python(FIRST_HEAVY, module, ",".join(HEAVY))


WITHOUT_FCNTL = """
import importlib, sys, tempfile, warnings
from pathlib import Path
asked = []
class NoFcntl:  # as on a platform without it
    def find_spec(self, name, path=None, target=None):
        if name == "fcntl":
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asked.append(frame.f_globals["__name__"])
            raise ImportError("No module named 'fcntl'")
assert sys.modules.pop("fcntl", None) is None, "fcntl was there before anything could hide it"
sys.meta_path.insert(0, NoFcntl())
sys.path[:0] = sys.argv[2].split(",")
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print("asked for fcntl:", sorted(set(asked)))
ours = [name for name in asked if name.split(".")[0] in ("turngrpo", "lib", "jobs", "lab")]
assert not ours, f"{ours} import fcntl themselves: use turngrpo.trainer.files.locked"
import filelock
assert any(name.startswith("filelock") for name in asked), f"filelock has not tried fcntl, only {asked} have"
assert filelock.FileLock is filelock.SoftFileLock, filelock.FileLock
from turngrpo.trainer.files import locked
with tempfile.TemporaryDirectory() as folder, locked(Path(folder), wait=False):
    try:
        with locked(Path(folder), wait=False):
            sys.exit("two holders of one lock")
    except BlockingIOError as error:
        assert "another process holds" in str(error)
"""


def test_every_module_of_the_package_imports_without_fcntl():
    """filelock asks for fcntl in a try and falls back to a lock file; nothing of ours asks for it."""
    names = [place for place in source_modules(ROOT) if not place.startswith("scripts/")]
    modules = ",".join("turngrpo." + place.removesuffix("/__init__").replace("/", ".") for place in names)
    print(run_python(WITHOUT_FCNTL, modules, str(ROOT / "scripts")))


# ---- the checks themselves, on a small tree where each fault is known ----


def small_tree(folder: Path, **files: str) -> Path:
    for name, text in ({"trainer__low": "", "trainer__high": "from turngrpo.trainer import low\n"} | files).items():
        path = folder / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


SMALL = ["trainer/low", "trainer/high"]


def test_order_of_a_sound_tree(tmp_path):
    assert order_faults(small_tree(tmp_path), SMALL) == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\nfrom turngrpo.trainer.high import x\n", ["trainer/low.py, line 2: trainer/low imports trainer/high"]),
        ("def f():\n    from . import high\n", ["trainer/low.py, line 2: trainer/low imports trainer/high"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import high\n", []),
    ],
    ids=["back up", "in a function", "for types alone"],
)
def test_an_arrow_back_up_is_named_and_a_circle_too(tmp_path, text, expected):
    faults = order_faults(small_tree(tmp_path, trainer__low=text), SMALL)
    assert [fault[: len(start)] for fault, start in zip(faults, expected, strict=False)] == expected
    assert [fault for fault in faults if fault.startswith("a circle")] == (
        [
            "a circle of imports: trainer/high.py, line 1, imports trainer/low; trainer/low.py, line 2, imports "
            "trainer/high"
        ]
        if expected
        else []
    )


def test_a_new_module_is_told_its_place(tmp_path):
    tree = small_tree(tmp_path, trainer__mid="from .low import x\n", trainer__high="import turngrpo.trainer.mid\n")
    assert order_faults(tree, SMALL) == [
        "trainer/mid.py is not in ORDER of tests/test_imports.py: add 'mid' to a line of the room 'trainer', after "
        "trainer/low, before trainer/high"
    ]


def test_a_name_for_types_alone_must_exist(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from turngrpo.trainer.low import Gone\n"
    assert missing_names(small_tree(tmp_path, trainer__high=text)) == [
        "trainer/high.py, line 3: trainer/low.py has no Gone"
    ]
