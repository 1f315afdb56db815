"""The same as `jaxrl-lm grpo`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["grpo", *sys.argv[1:]])
