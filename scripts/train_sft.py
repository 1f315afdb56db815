"""The same as `jaxrl-lm sft`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["sft", *sys.argv[1:]])
