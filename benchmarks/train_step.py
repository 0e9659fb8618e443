"""A training step by autofuse beside the best that is known to do by hand, and beside other libraries.

    python -m benchmarks.train_step [--models gpt2,llama] [--candidates eager,compile,autofuse]
                                    [--steps N] [--memory] [--json FILE] [--plot FILE]

`docs/benchmarks.md` says what is compared and how. One model is ``autofuse bench MODEL`` too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autofuse.bench.command import add_options, run
from autofuse.bench.workloads import BIG_VOCABULARY, WORKLOADS


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        raise argparse.ArgumentTypeError(f"there are {', '.join(WORKLOADS)}, not {', '.join(unknown)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 where a goal is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models",
        type=_names,
        default=list(WORKLOADS),
        help=f"some of {','.join(WORKLOADS)}; all by default",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    return run({name: WORKLOADS[name] for name in options.models}, options, BIG_VOCABULARY)


if __name__ == "__main__":
    sys.exit(main())
