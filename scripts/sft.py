"""Warm start by supervised fine-tuning: on the gold turns of a corpus, or on prompts with completions.

    python scripts/sft.py --corpus code.jsonl --model_name_or_path Qwen/Qwen2.5-3B-Instruct --use_peft \
        --output_dir outputs/warm_start --max_length 8192 --num_train_epochs 1
    python scripts/sft.py --targets targets.jsonl --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --output_dir outputs/sft --learning_rate 2e-5

Prompts are built by the same workflow as in training, token for token. Only completions are trained, and the loss is
divided by all their tokens in the gradient accumulation. An example longer than --max_length is an error, never cut.
With --use_peft the adapter is saved, else the whole model, each with its tokenizer; where --model_name_or_path is the
folder of an adapter, that one is gone on with. On several processes (accelerate launch) the weights are those of one
process with the same batch, and process 0 writes. Checkpoints, from which a killed run goes on, are removed at the end
unless --save_strategy or --save_steps asked for them.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from arguments.commands import ModelOptions, SftArguments
from lib.options import parse_options
from lib.running import run_script, setting_up
from trl import SFTConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the examples, train, save; the mean loss of every logging step is printed and written to sft.json."""
    with ExitStack() as stack:
        with setting_up():
            kinds = [SftArguments, SFTConfig, ModelOptions]
            options, config, model_options = parse_options(kinds, arguments, __doc__)
            from jobs.imitating import check_options, imitate
            from lib.output import claimed_output

            check_options(options)
            stack.enter_context(claimed_output(config))
        return imitate(options, config, model_options)


if __name__ == "__main__":
    run_script(main)
