"""Compare two checkpoints field by field; exits with 1 on any difference, with 2 where one cannot be read.

python scripts/compare_states.py out/checkpoint-100 resumed/checkpoint-100
"""

import argparse
import sys

from safetensors import SafetensorError

from turngrpo.trainer.runs.compare import checkpoint_fields, compare_states


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="a checkpoint folder")
    parser.add_argument("second", help="the checkpoint folder to compare it with")
    options = parser.parse_args()
    try:
        lines = compare_states(options.first, options.second)
    except (OSError, ValueError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    fields = len(checkpoint_fields(options.first))
    print(f"{len(lines)} of {fields} fields differ" if lines else f"identical: {fields} fields, durations left out")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
