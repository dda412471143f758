"""Every README.md says what is there: its code runs, its paths, tests and options exist, its tables are complete."""

import argparse
import ast
import dataclasses
import fnmatch
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.launch import launch_command_parser
from tiny import word_tokenizer
from training import ParityWorkflow, gradients, make_trainer, relative_gap
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, TrlParser

from turngrpo.data_prep import load_corpus
from turngrpo.trainer import Trajectory, Turn, TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.inherited_options import REFUSED
from turngrpo.trainer.measuring.metrics import COST_NAMES
from turngrpo.trainer.reading.rollout import Completion, collect

ROOT = Path(__file__).parents[1]
FOLDERS = ("accelerate_configs", "data_prep", "rewards", "scripts", "tests", "trainer")  # .venv and typings/ apart
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
PAGES = [ROOT / "README.md", *(path for path in FILES if path.name == "README.md")]
README = PAGES[0].read_text(encoding="utf-8")
METRICS = (ROOT / "trainer" / "measuring" / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "trainer" / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts" / "benchmarks").glob("*.py")])
COMMANDS = [path for path in SCRIPTS if "\ndef main(" in path.read_text(encoding="utf-8")]
VLLM_OPTIONS = {"--enable-lora", "--max-lora-rank", "--lora-modules"}  # of `vllm serve`, which is not installed here

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def section(title, page=README):
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def block_with(text):
    return next(code for code in blocks(README) if text in code)


def first_column(text):
    """Every name in backticks in the first cells of a page's tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


# ---- code ----


@every_page
def test_every_python_block_compiles_and_imports_what_exists(page):
    for code in blocks(page.read_text(encoding="utf-8")):
        tree = ast.parse(code)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), str(page), "exec"), {})


def test_the_workflow_of_the_readme_runs(tmp_path, monkeypatch):
    block = block_with("class AnswerTwice")
    assert len(block.splitlines()) <= 45
    (tmp_path / "readme_workflow.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("readme_workflow")
    tokenizer = word_tokenizer("Answer in \\boxed{}. Your first answer was: Check it and again. \\boxed{2}")
    replies = {0: "\\boxed{ 2 } <|im_end|>", 1: "\\boxed{ 1 } <|im_end|>"}

    class Scripted:
        def generate(self, requests):
            ids = [tokenizer(replies[request.key.turn])["input_ids"] for request in requests]
            self.prompts = [tokenizer.decode(request.prompt_ids) for request in requests]
            return [Completion(i, [0.0] * len(i), "eos") for i in ids]

    engine, workflow = Scripted(), module.AnswerTwice()
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None))
    (trajectory,) = collect(workflow, engine, tokenizer, [{"question": "code of red"}], [0], [0], 0, 0)
    assert len(trajectory.turns) == 2 and trajectory.parsed
    assert trajectory.answer == "1"  # the second answer, not the first one's 2
    assert "was:\\boxed{2}Check" in engine.prompts[0]  # the second prompt shows the first answer


def test_the_rewards_of_the_readme_run():
    names = {}
    exec(block_with("def short_memory_reward"), names)
    turns = [Turn(1, [], [], [], "eos", "<think>x</think>"), Turn(2, [], [], [], "eos", "x")]
    read = [Trajectory({}, 0, 0, [*turns, Turn(None, [], [], [], "eos", "")], memory_tokens=n) for n in (50, 51)]
    assert names["short_memory_reward"](trajectories=read) == [0.2, 0.0]
    assert names["think_first_reward"](trajectories=read[:1]) == [[0.1, 0.0, None]]


class NoSteps(ParityWorkflow):
    """Every turn stands outside the step count, as an answer turn does."""

    def advance(self, state, turn):
        turn.step = None
        return super().advance(state, turn)


def test_the_loss_of_the_readme_trains(tmp_path):
    names = {"TurnGRPOTrainer": TurnGRPOTrainer}
    exec(block_with("class AnswersCountDouble"), names)
    plain, doubled = (
        make_trainer(tmp_path / kind, NoSteps(), turn_reward_funcs=None, alpha=1.0) for kind in ("plain", "doubled")
    )
    doubled.__class__ = names["AnswersCountDouble"]
    twice = {name: 2 * gradient for name, gradient in gradients(plain).items()}
    assert relative_gap(gradients(doubled), twice) < 1e-6


def test_the_corpus_of_the_readme_loads(tmp_path):
    lines = [line.strip() for line in section("Your own corpus").splitlines() if line.startswith("    {")]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corpus = load_corpus(tmp_path / "corpus.jsonl", tokenizer=word_tokenizer(), chunk_size=100)
    rows = [row for split in corpus.values() for row in split]
    evidence = {row["id"]: [chunk["text"] for chunk in row["chunks"] if chunk["evidence"]] for row in rows}
    assert evidence == {"c-17": ["..."], "c-18": ["... Closing is on May 3. ..."]}


# ---- tables ----


def test_every_option_of_trl_stands_in_the_table():
    table = section("Inherited options under a workflow", OPTIONS)
    own = [name for name in GRPOConfig.__annotations__ if not name.startswith("vllm_")]
    missing = [name for name in [*own, *REFUSED] if f"`{name}`" not in table and not name.startswith("vllm_")]
    assert missing == []
    assert "every `vllm_*`" in table


def test_every_name_in_the_table_of_options_is_one():
    known = {field.name for kind in (GRPOConfig, TrainingArguments) for field in dataclasses.fields(kind)}
    known |= {*inspect.signature(GRPOTrainer.__init__).parameters, *REFUSED, "vllm_*"}
    known |= {
        "TrainingArguments",
        "PeftModel",
        "IterableDataset",
        "trust_remote_code",
    }  # kinds, an argument
    table = section("Inherited options under a workflow", OPTIONS)
    assert [name for name in first_column(table) if name not in known] == []


def test_the_papers_values_are_those_of_the_config():
    table = section("The paper's values", OPTIONS)
    paper = TurnGRPOConfig.paper(output_dir="unused", use_cpu=True, bf16=False)
    shown = {
        "| chunk size | {} tokens |": (paper.chunk_size,),
        "| max prompt / response | {} / {} tokens |": (paper.max_prompt_length, paper.max_completion_length),
        "| alpha | {} |": (paper.alpha,),
        "| clip | {:.2f} |": (paper.epsilon,),
        "| rollouts per prompt | {} |": (paper.num_generations,),
        "| prompts per rollout batch | {} |": (paper.gradient_accumulation_steps,),  # batches of one group each
        "| temperature, top_p (validation) | {}, {} |": (paper.eval_temperature, paper.eval_top_p),
        "| KL coefficient (not in the paper) | {} |": (paper.beta,),
    }
    for line, values in shown.items():
        assert line.format(*values) in table, line


def test_every_metric_stands_in_the_table():
    names = [
        *COST_NAMES,
        *(f"update_accuracy/{side}" for side in ("evidence", "evidence_free", "balanced")),
        *(f"exit/{kind}" for kind in ("exact", "early", "late")),
        *"format/parsed answer/accuracy turns/mean response_tokens/mean memory_tokens/mean memory/cut reward".split(),
        *"frac_reward_zero_std kl ratio/mean ratio/max clip/active clip/outside".split(),
        *"behavior_gap/mean behavior_gap/max".split(),
    ]
    assert [name for name in names if f"`{name}`" not in METRICS] == []


def test_every_name_in_the_table_of_metrics_is_in_the_code():
    """A name is a text in the code that measures, or fits one made there: f"exit/{name}" is exit/*."""
    folders = [ROOT / "trainer" / name for name in ("measuring", "evaluation", "objective")]
    known = {"loss", "grad_norm", "learning_rate", "epoch"}  # transformers' own
    for path in (path for folder in folders for path in folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
                known.update({"".join(parts)} if str(parts[0]).partition("/")[1] else ())
    for name in first_column(METRICS):
        if name.startswith(("time/", "tokens/")):
            assert name in COST_NAMES
        else:
            assert any(fnmatch.fnmatch(name, one) or fnmatch.fnmatch(one, name) for one in known), name


def test_every_metric_that_a_run_logs_stands_in_the_table(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, beta=0.1)
    trainer.train()
    patterns = [name.replace("NAME", "*") for name in first_column(METRICS)]
    summary = "train_runtime train_samples_per_second train_steps_per_second total_flos train_loss step".split()
    logged = {name for log in trainer.state.log_history for name in log if name not in summary}
    assert {"kl", "reward", "time/optimisation"} <= logged
    assert [name for name in logged if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_equation_has_a_function():
    rows = [line.split(" | ") for line in section("Equation, function, test").splitlines() if line.startswith("| ")]
    names = [name for row in rows[2:] for name in re.findall(r"`([\w.]+)`", row[1])]
    assert len(names) > 12
    for name in names:
        module, _, attribute = f"turngrpo.{'' if name.startswith('rewards.') else 'trainer.'}{name}".rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:  # a method
            module, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        assert callable(getattr(owner, attribute)), name


def test_the_reading_order_names_every_room():
    order = section("Reading order")
    parts = [path for path in (ROOT / "trainer").iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    rooms = [path for path in (ROOT / "trainer").glob("*.py") if path.name != "__init__.py"]
    missing = [f"trainer/{path.name}/" for path in parts if f"`trainer/{path.name}/`" not in order]
    missing += [f"trainer/{path.name}" for path in rooms if f"`trainer/{path.name}`" not in order]
    missing += [f"{name}/" for name in ("data_prep", "rewards", "scripts", "tests") if f"`{name}/`" not in order]
    assert missing == []


# ---- paths and tests ----


@every_page
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    top = "|".join(FOLDERS)
    for name in re.findall(rf"(?<![\w./-])(?:{top})/[\w./-]*", text):
        assert name in first_column(METRICS) or (ROOT / name.rstrip(".")).exists(), name
    known = {path.name for path in FILES}
    for name in re.findall(r"`([\w.-]+\.(?:py|yaml|sh))`", text):  # of this folder, or of one named before it
        assert name in known, name
        assert page == PAGES[0] or (page.parent / name).exists() or f"/{name}" in text, name
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@every_page
def test_every_test_that_a_page_names_exists(page):
    for line in page.read_text(encoding="utf-8").splitlines():
        file = None
        for path, name in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", line):
            file = path or file
            assert file is not None, f"{name}: no file stands before it"
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_the_equations_have_tests():
    assert len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", README)) >= 15


# ---- commands ----


class Parser(BaseException):
    """The parser of a script, taken where it would parse."""

    def __init__(self, parser):
        self.options = {"--config"} if isinstance(parser, TrlParser) else set()  # which that one takes out before
        for action in parser._actions:
            self.options.update(action.option_strings)
            for command in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                self.options.update(name for one in command._actions for name in one.option_strings)


@pytest.fixture(scope="module")
def options():
    """Every option of every script, by its path under the root."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:

        def parse(parser, *arguments, **named):
            raise Parser(parser)

        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        for name in ("CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM"):  # which run_lab.py sets
            patch.setenv(name, "")
        for path in COMMANDS:
            patch.setattr(sys, "argv", [str(path)])
            with pytest.raises(Parser) as taken:
                importlib.import_module(path.stem).main()
            found[str(path.relative_to(ROOT))] = taken.value.options
    found["scripts/benchmarks/gpu_check.sh"] = found["scripts/benchmarks/gpu_check.py"]
    return found


def code_spans(text):
    """What stands in backticks in the prose of a page."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("    "))
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]


def commands(text):
    """(options of the launcher, script, options) of every command in a text, joined over lines that end with \\."""
    text = text.replace("\\\n", " ")
    spans = [line.split("  #")[0] for line in text.splitlines() if line.startswith(("    ", "#     "))]
    spans += code_spans(text)
    for span in spans:
        for launcher, script, given in re.findall(r"([^;]*?)(scripts/[\w/]+\.(?:py|sh))([^;]*)", span):
            yield re.findall(r"--\w+", launcher), script, re.findall(r"(?<!\S)--[\w-]+", given)


def check_commands(text, options):
    launch = launch_command_parser()._option_string_actions
    count = 0
    for before, script, given in commands(text):
        count += 1
        assert [name for name in before if name not in launch] == [], script
        assert not given or [name for name in given if name not in options[script]] == [], script
    return count


@every_page
def test_every_option_that_a_page_gives_exists(page, options):
    text = page.read_text(encoding="utf-8")
    check_commands(text, options)
    known = {name for script in options.values() for name in script} | VLLM_OPTIONS
    known |= set(launch_command_parser()._option_string_actions)
    alone = [span for span in code_spans(text) if span.startswith("--")]
    assert [name for span in alone for name in re.findall(r"(?<!\S)--[\w-]+", span) if name not in known] == []


class Parsed(BaseException):
    """What a script's own parser made of a whole command, taken where it has parsed."""

    def __init__(self, found, left):
        self.found, self.left = vars(found), left


@every_page
def test_every_command_of_a_page_is_parsed_by_its_script(page, monkeypatch):
    """Values, choices and what is required too; a corpus, which the parser does not ask for, is looked for here."""
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser, *arguments, **named):
        raise Parsed(*parse(parser, *arguments, **named))

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM"):  # which run_lab.py sets
        monkeypatch.setenv(name, "")
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        command = re.match(r" {4}(?:uv run|bash|python|accelerate) .*?(scripts/[\w/]+)\.(?:py|sh)(.*)", line)
        if command is None:
            continue
        monkeypatch.setattr(sys, "argv", [command[1], *shlex.split(command[2], comments=True)])
        with pytest.raises(Parsed) as taken:
            importlib.import_module(Path(command[1]).name).main()
        found = taken.value.found
        assert taken.value.left == [], line
        if Path(command[1]).name in ("train", "sft", "evaluate"):
            assert any(found.get(name) for name in ("corpus", "targets", "dataset_name", "quickstart")), line


def test_the_readme_shows_every_script(options):
    shown = {script for page in PAGES for _, script, _ in commands(page.read_text(encoding="utf-8"))}
    missing = [name for name in options if name.count("/") == 1 and name not in shown]
    assert missing == []


def test_the_commands_in_docstrings_and_recipes_exist(options):
    count = 0
    for path in FILES:
        if path.suffix == ".py" and "scripts" in path.parts and "tests" not in path.parts:
            count += check_commands(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "", options)
        elif path.suffix == ".yaml":
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
            for name in re.findall(r"(?:scripts|accelerate_configs)/[\w./]+", "\n".join(lines)):
                assert (ROOT / name.rstrip(".")).exists(), name
            count += check_commands("\n".join(lines), options)
    assert count > 40


def test_the_links_of_the_readme_never_lead_to_the_root_of_the_disk(tmp_path):
    page = (ROOT / "trainer/export/README.md").read_text(encoding="utf-8")
    lines = [line for line in section("Mounting", page).splitlines() if line.startswith("    ")]
    script = "\n".join(line for line in lines if "serve" not in line)
    assert script.count("ln -s") == 2
    for name in ("MODEL", "out/adapters/contracts/latest"):
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0 and "parameter null or not set" in done.stderr
        shutil.rmtree(tmp_path / "mounted")
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / f"file_of_{name.split('/')[0]}").touch()
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert {path.name for path in (tmp_path / "mounted").iterdir()} == {"file_of_MODEL", "file_of_out"}
