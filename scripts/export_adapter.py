"""Export the adapter of a checkpoint as a version that servers mount; merge it, push it.

    python scripts/export_adapter.py --checkpoint outputs/run/checkpoint-30 --name contracts
    python scripts/export_adapter.py --checkpoint outputs/run --name contracts --merge --push_to_hub owner/contracts
    python scripts/export_adapter.py --checkpoint outputs/run/adapters/contracts/latest --push_to_hub owner/contracts

--checkpoint is a checkpoint-N, the output_dir of a run (its own adapter, or that of its newest checkpoint), or a
version that was exported before, which is then merged or pushed as it is. A new version is adapters/NAME/v0001, v0002,
... in the run's folder, with adapters/NAME/latest pointing to the newest; --merge writes v0001-merged beside it.
--push_to_hub makes one commit with all files of the version and tags it with its number; needs a token (HF_TOKEN, or
`hf auth login`).
"""

from collections.abc import Sequence

from arguments.commands import ExportArguments
from lib.options import parse_options
from lib.running import run_script, setting_up


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, merge, push; print where each result is."""
    with setting_up():
        (options,) = parse_options([ExportArguments], arguments, __doc__)
        from jobs.exporting import deliver

        deliver(options)
    return 0


if __name__ == "__main__":
    run_script(main)
