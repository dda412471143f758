"""What every command may be told; no model library is imported, so that a wrong option is found at once."""

from dataclasses import dataclass

from lib.options import ReadingOptions, option
from trl import ModelConfig, ScriptArguments

CORPUS = "a corpus file; scripts/prepare_corpus.py makes one"
MODEL = "a model's folder or its name on the Hub"


@dataclass
class ModelOptions(ModelConfig):
    """trl's ModelConfig, whose LoRA options say whether they were given."""

    lora_r: int | None = option(None, "LoRA rank; 16, or the one of the adapter that is gone on with.")  # type: ignore[assignment]
    lora_alpha: int | None = option(None, "LoRA alpha; 32, or the one of the adapter that is gone on with.")  # type: ignore[assignment]
    lora_dropout: float | None = option(None, "LoRA dropout; 0.05, or the one of the adapter that is gone on with.")  # type: ignore[assignment]


@dataclass
class TrainArguments(ScriptArguments):
    """What to read, how, and what is rewarded; the dataset options of trl serve the workflow single_turn."""

    corpus: str | None = option(None, "Corpus file (JSON Lines with a manifest line).")
    validation_fraction: float = option(0.1, "Share of the projects that are held out for validation.")
    split_seed: int = option(0, "Seed of the split by project.")
    workflow: str = option("gated", "gated, memagent, single_turn, or a class or instance as my_module.Workflow.")
    layout: str | None = option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = option(None, "Instruction of chunk turns; the workflow's own when left out.")
    strict_format: bool | None = option(None, "Reward an unparsed trajectory 0; true for gated.")
    exit_gate: bool | None = option(None, "Stop where the exit gate says so; true for gated.")
    reward_funcs: list[str] | None = option(
        None, "Trajectory rewards by short name or dotted path; gated: the method's."
    )
    turn_reward_funcs: list[str] | None = option(
        None, "Turn rewards by short name or dotted path; gated: update_reward."
    )
    validation_rows: int | None = option(None, "Evaluate on a sample of so many validation rows; all when left out.")
    validation_members: int = option(1, "Readings of every validation row, >= 1.")
    early_stopping_patience: int | None = option(
        None,
        "End when metric_for_best_model has not improved for so many evaluations; needs load_best_model_at_end.",
    )
    early_stopping_threshold: float = option(0.0, "An improvement by no more than this is none, >= 0.")
    adapter_name: str | None = option(None, "Name of the exported adapter; the output directory's when left out.")
    quickstart: bool = option(False, "Make the needle corpus and the tiny warm-started model first.")
    threads: int | None = option(None, "CPU threads of torch; torch's own choice when left out.")
    dry_run: bool = option(False, "Check corpus, lengths and options, estimate the memory, and stop.")
    probe: bool = option(False, "With --dry_run: also a real rollout and update of a group, for the seconds it takes.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        if self.quickstart:
            return {}
        rows = {"corpus": CORPUS}
        if self.workflow == "single_turn":
            rows = {"dataset_name": "a JSON Lines file or dataset with a column prompt, which single_turn reads"}
        elif "." in self.workflow:
            rows = {"corpus": f"{CORPUS}, or --dataset_name"}
        if self.corpus or self.dataset_name:
            rows = {}
        return rows | {"model_name_or_path": MODEL}


@dataclass
class SftArguments:
    """What to imitate, and how its prompts are made."""

    corpus: str | None = option(None, "Corpus file: the gold turns of its training projects are imitated.")
    targets: str | None = option(None, "JSON Lines file, or dataset name, with columns prompt and completion.")
    validation_fraction: float = option(0.1, "Share of the projects that are held out.")
    split_seed: int = option(0, "Seed of the split by project.")
    workflow: str = option("gated", "gated, memagent, or one of your own that reads as they do (my_module.Workflow).")
    layout: str | None = option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = option(None, "Instruction of chunk turns; the workflow's own when left out.")
    gate_noise: float = option(0.0, "Probability in [0, 1) that a gold gate is flipped, for an imperfect start.")
    read_on: float = option(0.0, "Probability in [0, 1) that a gold reading goes on after the last evidence.")
    chunk_size: int = option(5000, "Tokens per chunk where the corpus holds whole documents.")
    max_memory_tokens: int = option(1024, "A memory longer than this is cut, as in training.")
    template_kwargs: str | None = option(None, "JSON for the chat template, as --chat_template_kwargs of train.py.")
    think: bool = option(False, "Imitate think blocks too: what is asked, and the line that says it or: not here.")
    allow_changed: list[str] | None = option(
        None, "What a resume may go on with although it differs, on purpose: names as its refusal says them."
    )

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        return ({} if self.targets else {"corpus": f"{CORPUS}, or --targets"}) | {"model_name_or_path": MODEL}


@dataclass
class EvaluateArguments(ReadingOptions):
    """What to evaluate on what, and where the numbers go."""

    model: str = option(None, "Model or adapter (folder or name on the Hub); with --base_url a name of the server.")
    corpus: str = option(None, "Corpus file.")
    output: str = option(None, "JSON file to write; an existing one is replaced.")
    adapter: str | None = option(None, "Adapter folder; with --base_url only its manifest is read.")
    base_url: str | None = option(None, "OpenAI-compatible server that samples, as in http://localhost:8000.")
    api: str = option("auto", "How to ask it: completions (token ids), chat (text), or auto.")
    tokenizer: str | None = option(None, "Tokenizer folder or name, with --base_url.")
    concurrency: int = option(16, "Requests open at once, with --base_url; >= 1.")
    revision: str = option("main", "Revision of the model.")
    dtype: str = option("auto", "Precision of the weights: auto, float32, bfloat16 or float16.")
    max_turns: int | None = option(None, "Turns of a reading; one that goes on after so many is an error; 1000.")
    split: str = option("validation", "validation or train; all for a corpus that nothing was trained on.")
    validation_fraction: float | None = option(None, "Share of the projects that are held out; 0.1.")
    split_seed: int | None = option(None, "Seed of the split by project; 0.")
    rows: int | None = option(None, "Only a sample of so many rows.")
    trajectories: str | None = option(
        None, "Also write every turn of every reading there: NAME.parquet or NAME.jsonl."
    )
    members: int = option(1, "Readings of every row, >= 1.")
    cluster: str = option("row", "What the intervals resample: row, or project with all its rows.")
    compare_base: bool = option(False, "Also without the adapter, with the paired difference.")
    ignore_exit: bool = option(False, "Also with the exit gate ignored.")
    compare_document: bool = option(False, "Also the whole document in one prompt, where every document fits.")
    compare_ungated: bool = option(False, "Also as MemAgent reads, without gates, with the paired difference.")
    trivial_policies: bool = option(False, "Also with forced gates: always no, always yes, to the end, stop at once.")
    baselines: bool = option(False, "--compare_base, --compare_ungated, --compare_document and --trivial_policies.")
    allow_overlap: bool = option(False, "Evaluate on rows of projects that the adapter was trained on.")
    reward_funcs: list[str] | None = option(None, "Trajectory rewards by short name or dotted path; the training's.")
    turn_reward_funcs: list[str] | None = option(None, "Turn rewards by short name or dotted path; the training's.")
    reward_weights: list[float] | None = option(None, "One weight per trajectory reward; the training's, or 1.")
    turn_reward_weights: list[float] | None = option(None, "One weight per turn reward; the training's, or 1.")
    reward_timeout: float | None = option(None, "Seconds that a reward function may take for one call; any time.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        model = "a model's folder or name, or with --base_url a name that the server lists"
        return {"model": model, "corpus": CORPUS, "output": "a JSON file to write"}


@dataclass
class ReadArguments(ReadingOptions):
    """What to read with whom, and how."""

    base_url: str | None = option(None, "OpenAI-compatible server, as in http://localhost:8000; none: loaded here.")
    model: str = option(None, "Model or adapter (folder or name on the Hub); with --base_url a name of the server.")
    document: str = option(None, "File to read: text, Markdown, code, or PDF where pypdf is installed.")
    question: str = option(None, "What to answer.")
    json: bool = option(False, "Print one JSON object with answer and trace, and nothing else.")
    ignore_exit: bool = option(False, "Read to the end whatever the exit gate says.")
    api: str = option("auto", "How to ask: completions (token ids), chat (text), or auto.")
    adapter: str | None = option(None, "Adapter folder; with --base_url only its manifest is read.")
    tokenizer: str | None = option(None, "Tokenizer folder or name; the model's when left out.")
    revision: str = option("main", "Revision of a model that is loaded here.")
    dtype: str = option("auto", "Precision of weights that are loaded here: auto, float32, bfloat16 or float16.")
    answer_timeout: float = option(600.0, "Seconds that the server may take for one turn, > 0.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        model = "a model's folder or name, or with --base_url the name under which the server lists it"
        return {"model": model, "document": "a file to read", "question": "what to answer"}


@dataclass
class InspectArguments:
    """Which problem, what stands in for its rewards, and what is shown."""

    row: str = option("0", "Id of the train row, or its number from 0.")
    rewards: list[float] | None = option(None, "One number per response in place of the rewards.")
    data_seed: int | None = option(None, "Seed of the problems or of the split by project; --seed when left out.")
    workflow: str = option("single_turn", "single_turn (stock problems) or gated (a corpus).")
    corpus: str | None = option(None, "Corpus file of the workflow gated.")
    layout: str | None = option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = option(None, "Instruction of chunk turns; the workflow's own when left out.")
    tokens: bool = option(False, "Show every token too.")
    json: str | None = option(None, "Write everything as JSON to this file.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        return ({"corpus": CORPUS} if self.workflow == "gated" else {}) | {"model_name_or_path": MODEL}


@dataclass
class UpdateArguments:
    """How the group is sampled and the update made; the defaults are the laboratory's."""

    num_generations: int = option(4, "Responses of the group, >= 2.")
    learning_rate: float = option(1e-6, "Peak learning rate of the run whose first update this is.")
    updates: int = option(200, "Updates of that run: its schedule gives the first one's rate, a 20th of the peak.")
    beta: float = option(0.02, "Coefficient of the exact KL to the policy as it was.")
    weight_decay: float = option(0.01, "Weight decay of AdamW.")
    loss_type: str = option("grpo", "grpo, group or dapo.")
    scale_rewards: str = option("group", "none, group or batch.")
    max_prompt_length: int = option(256, "Longest prompt in tokens.")
    max_completion_length: int = option(64, "Longest response in tokens.")
    seed: int = option(0, "Seed of the sampling noise.")
    chunk_size: int = option(5000, "Tokens per chunk where the corpus holds whole documents.")
    max_memory_tokens: int = option(1024, "A memory longer than this is cut.")


@dataclass
class ExportArguments:
    """What to export, under which name, and what to do with it."""

    checkpoint: str = option(None, "Folder: a checkpoint-N, a run's output_dir, or an exported version.")
    name: str | None = option(None, "Name of the adapter; the run's folder's when left out.")
    adapters_dir: str | None = option(None, "Folder that gets NAME/v0001; adapters/ of the run when left out.")
    corpus: str | None = option(None, "Corpus file it was trained on; the one that the checkpoint names.")
    metrics: str | None = option(
        None,
        "JSON file whose numbers before and after stand in card and manifest: summary.json of train.py, or what "
        "evaluate.py --compare_base --output wrote; the run's own summary.json where it is about this checkpoint.",
    )
    merge: bool = option(False, "Also write base and adapter merged, for servers without LoRA.")
    push_to_hub: str | None = option(None, "Repository on the Hub, as in owner/name.")
    private: bool = option(True, "Make the repository private where it is new.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        return {"checkpoint": "a checkpoint-N, an output_dir or an exported version"}


@dataclass
class ReportArguments:
    """What to show, and where the page goes."""

    run: str = option(None, "Folder of train.py or run_lab.py, or a file that evaluate.py wrote.")
    output: str | None = option(None, "HTML file to write; report.html in the folder, or beside the file.")
    corpus: str | None = option(None, "Corpus file, where it is not where the run found it.")
    trajectories: int = option(1000, "Trajectories to show at most, those with a fault first; >= 1.")
    megabytes: float = option(20.0, "Size of the page at most, > 0.")

    def needs(self) -> dict[str, str]:
        """Return what must be given, by name, and what is expected there."""
        return {"run": "an output folder of train.py or run_lab.py, or a file of evaluate.py"}
