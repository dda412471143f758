"""Read a document with a gated agent: its gates and memory chunk by chunk, then its answer.

    python scripts/read_document.py --base_url http://localhost:8000 --model ADAPTER --document contract.md \
        --question "Who signs?"
    python scripts/read_document.py --model MODEL --adapter out/adapters/contracts/latest --document contract.pdf \
        --question "Who signs?" --ignore_exit --json > trace.json

Without --base_url the model is loaded here. A server is vLLM or any other with OpenAI's interface; a key is read from
OPENAI_API_KEY. One that takes token ids (vLLM's /v1/completions) gets the very prompts of training, any other the same
text through /v1/chat/completions. Options left out are those the adapter was trained with, where its folder is here or
the server names one that is, or the defaults of training. Ctrl-C leaves the trace so far, with exit status 130.
"""

import sys
from collections.abc import Sequence

from arguments.commands import ReadArguments
from lib.options import parse_options, sources_table
from lib.running import run_script, setting_up
from rich.console import Console
from rich.markup import escape

from turngrpo.trainer.showing import counted, visible, visible_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, show how, and print the answer; the status is 0 also where the model gave none."""
    with setting_up():
        (options,) = parse_options([ReadArguments], arguments, __doc__)
        from jobs.reading import Reading, read

        reading = Reading.prepare(options)
    console = Console(quiet=options.json, highlight=False)
    console.print(sources_table(reading.taken))
    report, status = read(reading, console)
    if options.json:
        print(visible_json(report))
    much = counted(len(report["turns"]), "turn")
    if report["chunks_read"] is not None:
        much = f"{report['chunks_read']} of {counted(report['chunks'], 'chunk')}"
    much = f"{much} in {report['seconds']:.1f} seconds"
    if report["error"] is not None:
        print(visible(f"error: {report['error']} after {much}"), file=sys.stderr)
        return status
    answer = "none (no answer in \\boxed{})" if report["answer"] is None else report["answer"]
    console.print(f"read {much}\n[bold]answer:[/] {escape(visible(answer))}")
    return status


if __name__ == "__main__":
    run_script(main)
