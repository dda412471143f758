"""Evaluate a model, or a model with an adapter, on a corpus: every metric with its 95% bootstrap interval.

    python scripts/evaluate.py --model Qwen/Qwen2.5-3B-Instruct --adapter outputs/run/adapters/run/v0001 \
        --corpus code.jsonl --split validation --compare_base --output evaluation.json
    python scripts/evaluate.py --model outputs/quickstart/start/model --corpus outputs/quickstart/start/corpus.jsonl \
        --trivial_policies --output evaluation.json

    python scripts/evaluate.py --base_url http://localhost:8000 --model ADAPTER --corpus code.jsonl --compare_base \
        --output evaluation.json

--compare_base also evaluates prompting alone (the adapter switched off) on the same rows and the same sampling noise,
and gives the paired difference; --baselines adds every policy that a trained reader should beat. --ignore_exit also
reads every document to its end whatever the exit gate says.
On several processes (accelerate launch) each reads its share of the rows and process 0 writes.
Options left out that say how the model reads and how the corpus is split are those the adapter was trained with (its
manifest.json), or the defaults of training. With --base_url a served model or adapter reads (see read_document.py);
the base that it is compared with is the one the server names, and tokenizer and manifest come from folders that the
server names, where they exist here too.
"""

from collections.abc import Sequence

from arguments.commands import EvaluateArguments
from lib.options import parse_options
from lib.running import run_script, setting_up


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate every policy asked for, print the tables, write the JSON file."""
    with setting_up():
        (options,) = parse_options([EvaluateArguments], arguments, __doc__)
    from jobs.evaluating import hold_and_evaluate

    return hold_and_evaluate(options)


if __name__ == "__main__":
    run_script(main)
