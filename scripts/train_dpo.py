"""The same as `jaxrl-lm dpo`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["dpo", *sys.argv[1:]])
