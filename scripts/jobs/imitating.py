"""What sft.py does: examples from gold turns or targets, exact supervised training, the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from arguments.commands import ModelOptions, SftArguments
from lib.adapters import new_adapter_config
from lib.loading import check_adapter, empty_model, load_model, lora_of, read_corpus
from lib.lookup import make_workflow
from lib.options import READING_FILE, reading_of, template_options
from lib.output import make_output, write_json
from lib.running import setting_up
from lib.tokenizing import load_tokenizer
from trl import SFTConfig

from turngrpo.data_prep import gold_thought
from turngrpo.data_prep.corpus import project_digest
from turngrpo.trainer.reading.workflows import WorkflowOptions
from turngrpo.trainer.runs.interruption import Interruption
from turngrpo.trainer.warm_start import check_batches, check_lengths, corpus_examples, fit, target_examples
from turngrpo.trainer.writing import going_on, writing

SAVING = ("steps", 500)  # transformers' defaults: nobody asked for checkpoints


def check_options(options: SftArguments) -> None:
    """Raise ValueError for options that say nothing together, or are out of their range."""
    if options.corpus is not None and options.targets is not None:
        raise ValueError("found both of --corpus and --targets: expected one of them")
    if not 0 <= options.gate_noise < 1:
        raise ValueError(f"--gate_noise is {options.gate_noise}: expected a probability, 0 or more and below 1")
    if not 0 <= options.read_on < 1:
        raise ValueError(f"--read_on is {options.read_on}: expected a probability, 0 or more and below 1")


def imitate(options: SftArguments, config: SFTConfig, model_options: ModelOptions) -> int:
    """Do what main says, in an output directory that is held."""
    reading: dict[str, Any] = {}
    output, asked = Path(config.output_dir or ""), (config.save_strategy, config.save_steps) != SAVING
    with setting_up():
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
            projects = sorted(map(project_digest, set(corpus["train"]["project"])))
            reading = reading_of(workflow, options.workflow, template) | {"train_projects": projects}
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
            print(interruption.ended(trainer.state.global_step))
        raise KeyboardInterrupt
    with writing(f"the result in {output}", going_on(output)):
        trainer.save_model(config.output_dir)
        if config.process_index == 0:
            losses = [log for log in trainer.state.log_history if "loss" in log]
            (output / "sft.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
            if reading:
                write_json(output / READING_FILE, reading)
            (output / "README.md").unlink(missing_ok=True)  # PEFT's template of a card, not filled in
    if config.process_index == 0 and not asked and not config.resume_from_checkpoint:
        for checkpoint in output.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    if config.process_index == 0:
        print(f"saved to {config.output_dir}")
    return 0
