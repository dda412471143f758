"""Train a gated memory agent with GRPO, evaluate it before and after, and export the adapter.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train.py
    python scripts/train.py --config scripts/recipes/lora.yaml --corpus code.jsonl --model_name_or_path warm --dry_run
    python scripts/train.py --corpus code.jsonl --model_name_or_path Qwen/Qwen2.5-3B-Instruct --use_peft \
        --reward_funcs answer_reward exit_reward format_reward --turn_reward_funcs update_reward \
        --output_dir outputs/run --per_device_train_batch_size 8 --loss_type group
    python scripts/train.py --workflow single_turn --dataset_name prompts.jsonl --reward_funcs my_module.my_reward ...

Without arguments it runs scripts/recipes/quickstart.yaml: corpus, tiny model, warm start and training within minutes
on two CPU cores. The output directory gets summary.json, metrics.jsonl, curves.png, the checkpoints and, under LoRA,
adapters/<name>/v0001.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments.commands import ModelOptions, TrainArguments
from lib.options import parse_options
from lib.running import run_script, setting_up

from turngrpo.trainer import TurnGRPOConfig
from turngrpo.trainer.inherited_options import HONOURED_WITH_VLLM, REFUSED
from turngrpo.trainer.writing import going_on, writing

QUICKSTART = Path(__file__).parent / "recipes" / "quickstart.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, then train or stop after the checks."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--config", str(QUICKSTART)]
    started, refused = time.perf_counter(), set(REFUSED) - set(HONOURED_WITH_VLLM)
    with setting_up():
        kinds = [TrainArguments, TurnGRPOConfig, ModelOptions]
        options, config, model_options = parse_options(kinds, given, __doc__, refused)
    import torch
    from jobs.stopping import ending
    from jobs.training import dry_run, prepare, train
    from lib.output import claimed_output, finite, make_output, write_json
    from lib.reporting import make_console

    console = make_console()
    with setting_up():
        console.quiet = config.process_index > 0
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"--threads is {options.threads}: expected 1 or more")
            torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        with setting_up():
            output = stack.enter_context(claimed_output(config))
            if options.dry_run:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                dry_run(prepare(options, config, model_options, console, folder), folder / "probe")
                return 0
            run = prepare(options, config, model_options, console, output / "start")
            make_output(output)
        summary, trainer = train(run)
        run.seconds["total"] = time.perf_counter() - started
        summary["seconds"] = {name: round(value, 3) for name, value in run.seconds.items()}
        path = output / "summary.json"
        if config.process_index == 0:
            with writing(str(path), going_on(output)):
                write_json(path, finite(summary))
        console.print(ending(summary), highlight=False)
        console.print(f"{path}: {run.seconds['total']:.0f} seconds", highlight=False)
        if config.push_to_hub:
            with setting_up():
                trainer.push_to_hub()
    return 0


if __name__ == "__main__":
    run_script(main)
