"""Warm start by supervised fine-tuning: on the gold turns of a corpus, or on prompts with completions.

    python scripts/sft.py --corpus code.jsonl --model_name_or_path Qwen/Qwen2.5-3B-Instruct --use_peft \
        --output_dir outputs/warm_start --max_length 8192 --num_train_epochs 1
    python scripts/sft.py --targets targets.jsonl --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --output_dir outputs/sft --learning_rate 2e-5

Prompts are built by the same workflow as in training, token for token. Only completions are trained, and the loss is
divided by all their tokens in the gradient accumulation. An example longer than --max_length is an error, never cut.
With --use_peft the adapter is saved, else the whole model, each with its tokenizer; where --model_name_or_path is the
folder of an adapter, that one is gone on with. On several processes (accelerate launch) the weights are those of one
process with the same batch, and process 0 writes.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lib.adapters import ModelOptions, new_adapter_config
from lib.loading import check_adapter, empty_model, load_model, load_tokenizer, lora_of, read_corpus
from lib.lookup import make_workflow
from lib.options import option, parse_options, template_options
from lib.output import claimed_output, make_output
from lib.running import run_script, setting_up
from trl import SFTConfig

from turngrpo.data_prep import gold_thought
from turngrpo.trainer.reading.workflows import WorkflowOptions
from turngrpo.trainer.runs.interruption import Interruption
from turngrpo.trainer.warm_start import check_batches, check_lengths, corpus_examples, fit, target_examples


@dataclass
class SftArguments:
    """What to imitate, and how its prompts are made."""

    corpus: str | None = option(None, "Corpus file: the gold turns of its training projects are imitated.")
    targets: str | None = option(None, "JSON Lines file, or dataset name, with columns prompt and completion.")
    validation_fraction: float = option(0.1, "Share of the projects that are held out.")
    split_seed: int = option(0, "Seed of the split by project.")
    workflow: str = option("gated", "Workflow of the corpus's prompts: gated or memagent.")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the examples, train, save; the mean loss of every logging step is printed and written to sft.json."""
    with ExitStack() as stack:
        with setting_up():
            options, config, model_options = parse_options([SftArguments, SFTConfig, ModelOptions], arguments)
            stack.enter_context(claimed_output(config))
        return imitate(options, config, model_options)


def imitate(options: SftArguments, config: SFTConfig, model_options: ModelOptions) -> int:
    """Do what main says, in an output directory that is held."""
    output = Path(config.output_dir or "")
    with setting_up():
        if (options.corpus is None) == (options.targets is None):
            found = "neither" if options.corpus is None else "both"
            raise ValueError(f"found {found} of --corpus and --targets: expected one of them")
        if not 0 <= options.gate_noise < 1:
            raise ValueError(f"--gate_noise is {options.gate_noise}: expected a probability, 0 or more and below 1")
        if not 0 <= options.read_on < 1:
            raise ValueError(f"--read_on is {options.read_on}: expected a probability, 0 or more and below 1")
        template = template_options(options.template_kwargs)
        tokenizer = load_tokenizer(model_options.model_name_or_path, model_options.model_revision)
        if options.targets is not None:
            examples, names = target_examples(options.targets, tokenizer, template)
        else:
            corpus = read_corpus(
                options.corpus, options.validation_fraction, options.split_seed, tokenizer, options.chunk_size
            )
            workflow = make_workflow(options.workflow, layout=options.layout, instruction=options.instruction)
            workflow.bind(tokenizer, WorkflowOptions(options.max_memory_tokens, template))
            examples, names = corpus_examples(
                corpus["train"],
                workflow,
                options.gate_noise,
                config.seed,
                think=gold_thought if options.think else None,
                read_on=options.read_on,
            )
        model = load_model(model_options)
        check_lengths(examples, names, config.max_length)
        check_batches(examples, config)
        check_adapter(empty_model(model_options), lora_of(model_options))
        make_output(output)
    if config.process_index == 0:
        if config.resume_from_checkpoint:
            print(f"going on from {config.resume_from_checkpoint}")
        print(f"{len(examples)} examples, {sum(map(sum, examples['completion_mask']))} completion tokens")
    lora, allowed = new_adapter_config(model_options), options.allow_changed
    interruption = Interruption()
    with interruption.listening(says=config.process_index == 0):
        trainer = fit(model, tokenizer, examples, names, config, lora, [interruption], allow_changed=allowed)
    if interruption.came:
        if config.process_index == 0:
            print(f"stopped after update {trainer.state.global_step}: its checkpoint is written")
        raise KeyboardInterrupt
    trainer.save_model(config.output_dir)
    if config.process_index == 0:
        losses = [log for log in trainer.state.log_history if "loss" in log]
        (output / "sft.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
        print(f"saved to {config.output_dir}")
    return 0


if __name__ == "__main__":
    run_script(main)
