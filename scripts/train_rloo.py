"""The same as `jaxrl-lm rloo`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["rloo", *sys.argv[1:]])
